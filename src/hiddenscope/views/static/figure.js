/**
 * What every view has around its picture: a title, controls, a stage that takes the keyboard, a read-out, keys,
 * buttons, and the table behind it.
 */

import { saveCsv, savePng, saveSvg } from "./export.js";
import { button, element } from "./elements.js";
import { tableBehind } from "./table.js";
import { fileName, shownText } from "./text.js";

/**
 * @typedef {{picture: () => import("./export.js").Picture, rows: () => Iterable<import("./export.js").Cell[]>}} Saved
 */

export class Figure {
  /**
   * @param {HTMLElement} root
   * @param {{title: string, note: string}} view
   * @param {string} help how the keys work
   * @param {Saved} saved
   */
  constructor(root, view, help, saved) {
    const title = shownText(view.title, 200);
    this.root = root;
    this.controls = element("div", { class: "controls" });
    this.stage = element("div", { class: "stage", tabindex: "0", role: "application", "aria-label": `${title}. ${help}` });
    this.readout = element("output", { class: "readout", "aria-live": "polite" });
    this.keys = element("div", { class: "keys" });
    const foot = element("div", { class: "foot" }, [this.keys, buttons(fileName(view.title), saved)]);
    const note = view.note ? [element("p", { class: "note" }, [shownText(view.note, 2000)])] : [];
    root.replaceChildren(
      element("h2", {}, [title]), ...note, this.controls, this.readout, this.stage, foot, tableBehind(title, saved.rows),
    );
    root.setAttribute("aria-label", title);
  }

  /**
   * Say something where a reader sees and hears it; pieces in `strong` stand out.
   * @param {(string | {strong: string})[]} pieces
   */
  say(pieces) {
    this.readout.replaceChildren(...piecesShown(pieces));
  }

  /**
   * @param {Record<string, (event: KeyboardEvent) => void>} acts
   */
  onKeys(acts) {
    this.stage.addEventListener("keydown", (event) => {
      const act = acts[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act(event);
    });
  }
}

/**
 * Pieces of a sentence; each that stands out keeps its own direction of writing.
 * @param {(string | {strong: string})[]} pieces
 */
export function piecesShown(pieces) {
  return pieces.map((piece) => (typeof piece === "string" ? piece : element("strong", {}, [element("bdi", {}, [piece.strong])])));
}

/**
 * @param {string} name
 * @param {Saved} saved
 */
function buttons(name, saved) {
  return element("div", { class: "saves", role: "group", "aria-label": "Save this view" }, [
    button("PNG", "Save as a picture", () => void savePng(saved.picture(), name)),
    button("SVG", "Save as a drawing", () => saveSvg(saved.picture(), name)),
    button("CSV", "Save the numbers", () => saveCsv(saved.rows(), name)),
  ]);
}
