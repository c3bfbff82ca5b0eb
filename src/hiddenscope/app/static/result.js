/** A result on the page: its findings, its views, and the menu that saves it. */

import { button, element } from "../../views/static/elements.js";
import { unpack } from "../../views/static/payload.js";
import { viewIn } from "../../views/static/showing.js";
import { shownText } from "../../views/static/text.js";
import { readText } from "./api.js";

/**
 * @typedef {import("../../views/static/payload.js").View} View
 * @typedef {import("./api.js").ResultAnswer} ResultAnswer
 */

const FILES = /** @type {const} */ ([
  ["html", "Page that works offline (HTML)"],
  ["png", "Picture (PNG)"],
  ["svg", "Drawing (SVG)"],
  ["pdf", "Document (PDF)"],
  ["csv", "Numbers (CSV)"],
  ["nc", "Data, exactly (netCDF)"],
]);

/**
 * The views of a result.
 * @param {string} id
 * @returns {Promise<View[]>}
 */
export async function viewsOf(id) {
  const text = await readText(`/api/results/${id}/payload`);
  return text ? unpack(text) : [];
}

/** @type {Map<HTMLElement, {destroy: () => void}>} the views of the page, by their roots */
const attached = new Map();

/**
 * Remember a view, so that it is destroyed once its root has left the page; those that have left
 * are destroyed now.
 * @template {{destroy: () => void}} T
 * @param {HTMLElement} root
 * @param {T} view
 */
export function remembered(root, view) {
  destroyDetached();
  attached.set(root, view);
  return view;
}

/**
 * Destroy the views whose roots have left the page: a view listens to the window's size and theme
 * until then.
 */
export function destroyDetached() {
  for (const [root, view] of attached) {
    if (root.isConnected) continue;
    view.destroy();
    attached.delete(root);
  }
}

/**
 * A place for a view, and how to make the view in it.
 * @param {View} view
 * @param {number} place which view of the page it is
 */
function placed(view, place) {
  const root = element("section", { "data-view": String(place), class: view.kind.toLowerCase() });
  return { root, make: () => remembered(root, viewIn(root, view, place)) };
}

/**
 * Show views in order; the first has this place.
 * @param {HTMLElement} parent
 * @param {View[]} views
 * @param {number} first
 */
export function showViews(parent, views, first) {
  const roots = views.map((view, i) => placed(view, first + i));
  parent.replaceChildren(...roots.map(({ root }) => root));
  for (const { make } of roots) make();
}

/** @param {string[]} findings */
export function findingsShown(findings) {
  return element(
    "ul",
    { class: "findings" },
    findings.map((sentence) => element("li", {}, inline(sentence))),
  );
}

/**
 * A sentence in which words between backticks are code.
 * @param {string} sentence
 */
function inline(sentence) {
  return shownText(sentence, 2000)
    .split("`")
    .map((part, i) => (i % 2 ? element("code", {}, [part]) : part));
}

/**
 * A sentence that stands out.
 * @param {string} sentence
 * @param {boolean} [quiet]
 */
export function paragraph(sentence, quiet = false) {
  return element(
    "p",
    quiet ? { class: "say quiet" } : { class: "say", role: "alert" },
    inline(sentence),
  );
}

/**
 * The menu that saves a result: files, code, a link.
 * @param {ResultAnswer} result
 * @param {() => {view: string, measure: string}} look which view is shown now, and which measure
 */
export function saveMenu(result, look) {
  const items = element("div", { popover: "manual" }); // in the top layer, where no panel clips it
  const open = element("button", { type: "button", "aria-expanded": "false" }, ["Save ▾"]);
  const isOpen = () => items.matches(":popover-open");
  const follow = () => (items.isConnected ? placeBeside(items, open) : shut());
  const shut = () => {
    if (isOpen()) items.hidePopover();
    open.setAttribute("aria-expanded", "false");
    removeEventListener("scroll", follow, true);
    removeEventListener("resize", follow);
  };
  for (const [format, label] of result.state || result.continuation ? [] : FILES) {
    const link = element("a", { href: "#", download: "" }, [label]);
    link.addEventListener("click", () => {
      const query = new URLSearchParams({ format });
      if (format === "png" || format === "svg" || format === "pdf")
        Object.entries(look()).forEach(([name, value]) => value && query.set(name, value));
      link.href = `/api/results/${result.id}/file?${query}`;
      shut();
    });
    items.append(link);
  }
  const python = button("As Python", "Code that makes the same result", () => {
    shut();
    code("As Python", result.python ?? "");
  });
  const command = button(
    "As command",
    result.command ? "A command that makes the same result" : result.command_reason,
    () => {
      shut();
      code("As command", result.command ?? "");
    },
  );
  python.disabled = !result.python;
  command.disabled = !result.command;
  items.append(
    python,
    command,
    button("Copy the link to this view", "The address holds everything", () => {
      shut();
      code("The link to this view", location.href, true);
    }),
  );
  open.addEventListener("click", () => {
    if (isOpen()) return shut();
    items.showPopover();
    placeBeside(items, open);
    open.setAttribute("aria-expanded", "true");
    /** @type {HTMLElement | null} */ (items.firstElementChild)?.focus({ preventScroll: true });
    addEventListener("scroll", follow, true);
    addEventListener("resize", follow);
    return undefined;
  });
  const menu = element("div", { class: "menu save" }, [open, items]);
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isOpen()) return;
    shut();
    open.focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (!(event.relatedTarget instanceof Node && menu.contains(event.relatedTarget))) shut();
  });
  return menu;
}

/**
 * Put an open menu below its button, or above it where there is more room; never over the edge of
 * the window.
 * @param {HTMLElement} items
 * @param {HTMLElement} opener
 */
function placeBeside(items, opener) {
  const [at, gap] = [opener.getBoundingClientRect(), 6];
  const { offsetWidth: width, offsetHeight: height } = items;
  const below = at.bottom + gap + height <= innerHeight;
  const top = below ? at.bottom + gap : at.top - gap - height;
  items.style.left = `${Math.max(gap, Math.min(at.right - width, innerWidth - width - gap))}px`;
  items.style.top = `${Math.max(gap, top)}px`;
}

/**
 * A text to take along, with a word on whether it was copied: a browser may refuse that.
 * @param {string} title
 * @param {string} text
 * @param {boolean} [taken] whether it is copied at once
 */
function code(title, text, taken = false) {
  const status = element("span", { role: "status" });
  const take = async () => {
    status.textContent = (await copied(text))
      ? "Copied."
      : "The browser did not allow it: select the text and copy it.";
  };
  const dialog = element("dialog", { "aria-label": title }, [
    element("h2", {}, [title]),
    element("pre", { tabindex: "0" }, [element("code", {}, [text])]),
    element("div", { class: "acts" }, [
      button("Copy", "Copy it", () => void take()),
      button("Close", "Close this", () => dialog.close()),
      status,
    ]),
  ]);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  if (taken) void take();
}

/**
 * Whether a text is in the clipboard now; over plain HTTP from another machine there is none.
 * @param {string} text
 */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
