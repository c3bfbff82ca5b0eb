/** The page: unpack the payload and put each view in its place. */

import { GridView } from "./grid.js";
import { whenLinked } from "./hash.js";
import { LinesView } from "./lines.js";
import { PanelsView } from "./panels.js";
import { unpack } from "./payload.js";

/**
 * @param {HTMLElement} root
 * @param {import("./payload.js").View} view
 * @param {number} place which view of the page it is
 */
export function show(root, view, place) {
  if (view.kind === "Grid") return new GridView(root, view, place);
  if (view.kind === "Panels") return new PanelsView(root, view, place);
  return new LinesView(root, view, place);
}

async function start() {
  const payload = document.getElementById("payload");
  const roots = [.../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("section[data-view]"))];
  if (!payload) return;
  const views = await unpack(payload.textContent ?? "");
  payload.remove();
  const shown = views.map((view, place) => show(roots[place], view, place));
  whenLinked(() => shown.forEach((view) => view.restore()));
  document.documentElement.dataset.ready = "true";
  tellHeight();
}

/** A frame around the page is told how high it is. */
function tellHeight() {
  if (parent === window) return;
  document.documentElement.classList.add("framed");
  const tell = () => parent.postMessage({ hiddenscope: "height", height: document.documentElement.offsetHeight }, "*");
  new ResizeObserver(tell).observe(document.body);
  tell();
}

start().catch((/** @type {Error} */ error) => {
  for (const root of document.querySelectorAll("section[data-view]")) {
    root.replaceChildren(`The picture cannot be shown: ${error.message}`);
  }
});
