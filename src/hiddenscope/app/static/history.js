/**
 * What was asked in this window, the last first: any of it is shown again, and the last step is
 * undone.
 */

import { button, element } from "../../views/static/elements.js";
import { shownText } from "../../views/static/text.js";

/** @typedef {{hash: string, words: string, model: string, time: number}} Step */

const KEY = "hiddenscope-history";
const MOST = 60;
// Milliseconds: a question that follows sooner, while a text is typed, takes the place of the last.
const TYPING = 1500;
const TEXTS = ["a", "b", "answer", "other"];

/** @type {Step[]} */
let steps = read();
/** @type {(() => void)[]} */
const listeners = [];

/**
 * Remember what the address shows now.
 * @param {string} words
 * @param {string} model
 */
export function remember(words, model) {
  const step = { hash: location.hash || "#", words, model, time: Date.now() };
  const last = steps[steps.length - 1];
  if (last?.hash === step.hash) return;
  if (last && step.time - last.time < TYPING && onlyTyped(last.hash, step.hash)) steps.pop();
  steps = [...steps, step].slice(-MOST);
  keep();
}

/** Show what was asked before the last question. */
export function undo() {
  if (steps.length < 2) return;
  steps = steps.slice(0, -1);
  keep();
  go(steps[steps.length - 1]);
}

/** The buttons of the page's head: undo, and the list. */
export function historyButtons() {
  const back = button("Undo", "Show what was asked before", undo);
  const open = button("History", "What was asked in this window", () => list());
  const arrange = () => {
    back.disabled = steps.length < 2;
    open.disabled = !steps.length;
  };
  listeners.push(arrange);
  arrange();
  return [back, open];
}

function list() {
  const items = steps.toReversed().map((step) => {
    const link = element("button", { type: "button", class: "plain" }, [
      element("bdi", {}, [shownText(step.words, 120)]),
    ]);
    link.addEventListener("click", () => {
      dialog.close();
      go(step);
    });
    return element("li", {}, [link, element("small", {}, [shownText(step.model, 40)])]);
  });
  const dialog = element("dialog", { "aria-label": "History", class: "history" }, [
    element("h2", {}, ["What was asked in this window"]),
    element("ol", {}, items),
    element("div", { class: "acts" }, [
      button("Forget all", "Empty this list", () => {
        steps = steps.slice(-1);
        keep();
        dialog.close();
      }),
      button("Close", "Close this", () => dialog.close()),
    ]),
  ]);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {Step} step */
function go(step) {
  if (location.hash !== step.hash) location.hash = step.hash;
}

/**
 * Whether two addresses differ in what is typed alone.
 * @param {string} first
 * @param {string} second
 */
function onlyTyped(first, second) {
  const [left, other] = [first, second].map((hash) => new URLSearchParams(hash.slice(1)));
  for (const name of TEXTS) [left, other].forEach((all) => all.delete(name));
  return String(left) === String(other);
}

/** @returns {Step[]} */
function read() {
  try {
    const known = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
    return Array.isArray(known)
      ? known.filter((step) => typeof step?.hash === "string" && typeof step.words === "string")
      : [];
  } catch {
    return [];
  }
}

function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(steps));
  } catch {
    // A private window, or one that is full: it is known until the page is left.
  }
  for (const tell of listeners) tell();
}
