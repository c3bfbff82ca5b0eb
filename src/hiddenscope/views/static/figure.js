/**
 * What every view has around its picture: a title, controls, a stage that takes the keyboard, a
 * read-out that stays on the screen, a hint at the pointer, keys, buttons, and the table behind it.
 */

import { saveCsv, savePng, saveSvg } from "./export.js";
import { button, element } from "./elements.js";
import { tableBehind } from "./table.js";
import { fileName, shownText } from "./text.js";

/**
 * @typedef {{picture: () => import("./export.js").Picture, rows: () =>
 *   Iterable<import("./export.js").Cell[]>}} Saved
 * @typedef {(string | {strong: string})[]} Pieces
 */

const HINT = { right: 14, down: 18, wide: 330 };

export class Figure {
  /**
   * @param {HTMLElement} root
   * @param {{title: string, note: string}} view
   * @param {string} help how the keys work
   * @param {Saved} saved
   */
  constructor(root, view, help, saved) {
    this.root = root;
    this.help = help;
    this.title = shownText(view.title, 200);
    this.heading = element("h2");
    this.controls = element("div", { class: "controls" });
    this.stage = element("div", { class: "stage", tabindex: "0", role: "application" });
    this.readout = element("output", { class: "readout", "aria-live": "polite" });
    this.hint = element("div", { class: "hint", hidden: "", "aria-hidden": "true" });
    this.stage.append(this.hint);
    this.keys = element("div", { class: "keys" });
    const foot = element("div", { class: "foot" }, [
      this.keys,
      buttons(() => fileName(this.title), saved),
    ]);
    const note = view.note ? [element("p", { class: "note" }, [shownText(view.note, 2000)])] : [];
    root.replaceChildren(
      this.heading,
      this.controls,
      this.readout,
      this.stage,
      foot,
      ...note,
      tableBehind(() => this.title, saved.rows),
    );
    this.entitle(this.title);
  }

  /**
   * Name what is shown now; files that are saved get this name too.
   * @param {string} title
   */
  entitle(title) {
    this.title = title;
    this.heading.replaceChildren(title);
    this.root.setAttribute("aria-label", title);
    this.stage.setAttribute("aria-label", `${title}. ${this.help}`);
  }

  /**
   * Say something where a reader sees and hears it; pieces in `strong` stand out.
   * @param {Pieces} pieces
   */
  say(pieces) {
    this.readout.replaceChildren(...piecesShown(pieces));
  }

  /**
   * Say something beside the pointer, above it where there is no room below; nothing without
   * pieces.
   * @param {Pieces} pieces
   * @param {MouseEvent} [event] over the picture
   */
  pointOut(pieces, event) {
    this.hint.hidden = !pieces.length || !event;
    if (this.hint.hidden || !event) return;
    this.hint.replaceChildren(...piecesShown(pieces));
    const stage = this.stage.getBoundingClientRect();
    const [x, y] = [event.clientX - stage.left, event.clientY - stage.top];
    const left = Math.min(x + HINT.right, Math.max(0, this.stage.clientWidth - HINT.wide));
    const high = this.hint.offsetHeight;
    const above =
      event.clientY + HINT.down + high > innerHeight && event.clientY > HINT.down + high;
    const top = above ? y - HINT.down / 2 - high : y + HINT.down;
    this.hint.style.transform = `translate(${left}px, ${top}px)`;
  }

  /**
   * @param {Record<string, (event: KeyboardEvent) => void>} acts
   */
  onKeys(acts) {
    listenToKeys(this.stage, acts);
  }
}

/**
 * @param {HTMLElement} stage
 * @param {Record<string, (event: KeyboardEvent) => void>} acts
 */
export function listenToKeys(stage, acts) {
  stage.addEventListener("keydown", (event) => {
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event);
  });
}

/**
 * Pieces of a sentence; each that stands out keeps its own direction of writing.
 * @param {Pieces} pieces
 */
export function piecesShown(pieces) {
  return pieces.map((piece) =>
    typeof piece === "string" ? piece : element("strong", {}, [element("bdi", {}, [piece.strong])]),
  );
}

/**
 * @param {() => string} name
 * @param {Saved} saved
 */
function buttons(name, saved) {
  return element("div", { class: "saves", role: "group", "aria-label": "Save this view" }, [
    button("PNG", "Save as a picture", () => void savePng(saved.picture(), name())),
    button("SVG", "Save as a drawing", () => saveSvg(saved.picture(), name())),
    button("CSV", "Save the numbers", () => saveCsv(saved.rows(), name())),
  ]);
}
