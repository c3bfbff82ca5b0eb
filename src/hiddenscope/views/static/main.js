/** The page: unpack the payload and put each view in its place. */

import { followContents, opened } from "./contents.js";
import { readPage, readState, whenLinked, writePage } from "./hash.js";
import { unpack } from "./payload.js";
import { viewIn } from "./showing.js";
import { chooseTheme } from "./theme.js";

const SCROLL_RESTS = 200; // milliseconds

async function start() {
  const payload = document.getElementById("payload");
  const roots = [
    .../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("section[data-view]")),
  ];
  if (!payload) return;
  obeyTheme();
  const views = await unpack(payload.textContent ?? "");
  payload.remove();
  const shown = views.map((view, place) => viewIn(roots[place], view, place));
  whenLinked(() => {
    shown.forEach((view) => view.restore());
    scrollBack(roots);
  });
  roots.forEach((root, place) => {
    if (Object.keys(readState(place)).length) opened(root);
  });
  document.documentElement.dataset.ready = "true";
  tellHeight();
  followContents();
  if (parent === window) requestAnimationFrame(() => requestAnimationFrame(() => keepPlace(roots)));
}

/**
 * The address keeps where one has scrolled to: in which view, and how far, in thousandths of its
 * height. So it is the same place on another screen.
 * @param {HTMLElement[]} roots
 */
function keepPlace(roots) {
  let resting = 0;
  scrollBack(roots);
  addEventListener(
    "scroll",
    () => {
      clearTimeout(resting);
      resting = window.setTimeout(() => writePage("at", scrolledTo(roots)), SCROLL_RESTS);
    },
    { passive: true },
  );
}

/** @param {HTMLElement[]} roots */
function scrolledTo(roots) {
  const visible = roots.filter((root) => !root.closest("details:not([open])"));
  const above = visible.filter((root) => root.getBoundingClientRect().top <= 0);
  const root = above.at(-1) ?? visible[0];
  if (scrollY < 1 || !root) return "";
  const { top, height } = root.getBoundingClientRect();
  return `${roots.indexOf(root)}~${Math.round((-1000 * top) / height)}`;
}

/** @param {HTMLElement[]} roots */
function scrollBack(roots) {
  const [place, part] = readPage("at").split("~").map(Number);
  if (!(place in roots) || !Number.isFinite(part)) return;
  opened(roots[place]);
  const { top, height } = roots[place].getBoundingClientRect();
  scrollTo(0, scrollY + top + (part * height) / 1000);
}

/** A frame around the page is told how high it is. */
function tellHeight() {
  if (parent === window) return;
  document.documentElement.classList.add("framed");
  const tell = () =>
    parent.postMessage(
      { hiddenscope: "height", height: document.documentElement.offsetHeight },
      "*",
    );
  new ResizeObserver(tell).observe(document.body);
  tell();
}

/** A page around the frame that has a button for light and dark says which is chosen. */
function obeyTheme() {
  if (parent === window) return;
  addEventListener("message", (event) => {
    if (event.source === parent && event.data?.hiddenscope === "theme")
      chooseTheme(event.data.theme);
  });
}

start().catch((/** @type {Error} */ error) => {
  for (const root of document.querySelectorAll("section[data-view]")) {
    root.replaceChildren(`The picture cannot be shown: ${error.message}`);
  }
});
