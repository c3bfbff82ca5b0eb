/** The grid is the page: a model, a text, a second text, one grid that overlays paint, one state beside it, lines below. */

import { button, choice, element } from "../../views/static/elements.js";
import { forgetViews, readPage, writePage, writeState } from "../../views/static/hash.js";
import { Refused } from "./api.js";
import { ChoosingGrid } from "./choosing.js";
import { dtypeField, modelField, textField } from "./fields.js";
import { StatePanel } from "./panel.js";
import { held, heldCell, hold } from "./place.js";
import { findingsShown, remembered, said, saveMenu, showViews, viewsOf } from "./result.js";

/**
 * @typedef {import("./api.js").Asked} Asked
 * @typedef {import("./panel.js").Cell} Cell
 */

const REST = 80; // milliseconds after the last keystroke
const OVERLAYS = { norm: "Norm", difference: "Difference to B", lens: "Lens", visibility: "Visibility", patch: "Patch", drift: "Drift" };
const EXPLAINED = /** @type {Record<string, string>} */ ({
  norm: "The L2 norm of every state.",
  difference: "How far the states of the two texts are apart.",
  lens: "Logit lens: the token that each layer would predict if it were the last.",
  visibility: "Influence, from exact gradients: which states influence the chosen one, and which it influences.",
  patch: "Activation patching: how much of the answer comes back when one state of text A is put into text B.",
  drift: "Where a second model, or the same in another dtype, diverges.",
});

export class GridTab {
  /**
   * @param {HTMLElement} root
   * @param {import("./asking.js").Asker} asker
   * @param {import("./api.js").ModelAnswer[]} models
   */
  constructor(root, asker, models) {
    this.root = root;
    this.asker = asker;
    this.models = models;
    this.resting = 0;
    this.turn = 0; // counts the questions of the grid: what belongs to an earlier one is not shown
    this.stateTurn = 0; // and those of the panel
    /** @type {ChoosingGrid | null} */
    this.grid = null;
    /** @type {import("./api.js").ResultAnswer | null} */
    this.result = null;
    this.build();
    this.restore();
  }

  build() {
    const later = () => { clearTimeout(this.resting); this.resting = window.setTimeout(() => void this.paint(), REST); };
    this.model = modelField("Model", this.models, held("model"), (name) => { hold("model", name); void this.paint(); });
    this.a = textField("Text A", held("a"), (text) => { hold("a", text); writePage("change", ""); later(); });
    this.b = textField("Text B, to compare with", held("b"), (text) => { hold("b", text); if (this.usesB() || heldChange()?.kind === "replace") later(); });
    this.overlays = choice("Overlay", OVERLAYS, (overlay) => { hold("overlay", overlay); forgetViews(["pin"]); this.arrange(); void this.paint(); });
    this.overlays.root.id = "overlays";
    this.extra = element("div", { class: "extra" });
    this.save = element("div", { class: "save" });
    this.explained = element("p", { class: "lead tight" });
    this.stage = element("div", { class: "views" }, [said("Asking …", true)]);
    this.below = element("div", { class: "views below" });
    this.aside = element("aside", { class: "state", "aria-label": "The chosen state" });
    this.panel = new StatePanel(this.aside, (cell, change) => { writePage("change", JSON.stringify(change)); void this.read(cell, change); }, {
      choose: (site, token) => this.choose(site, token),
      see: () => { hold("overlay", "visibility"); forgetViews(["pin"]); this.restore(); },
      textB: () => held("b"),
    });
    this.panel.empty();
    this.root.replaceChildren(
      element("div", { class: "ask", id: "ask" }, [this.model.root, this.a.root, this.b.root]),
      element("div", { class: "overlays" }, [this.overlays.root, this.extra, this.save]),
      element("div", { class: "desk" }, [element("div", { class: "first" }, [this.explained, this.stage]), this.below, this.aside]),
    );
  }

  /** Take everything from the address. */
  restore() {
    this.model?.set(held("model"));
    this.a?.set(held("a"));
    this.b?.set(held("b"));
    this.arrange();
    void this.paint();
  }

  usesB() {
    return ["difference", "patch"].includes(held("overlay"));
  }

  /** What the overlay needs beside the texts. */
  arrange() {
    const overlay = held("overlay");
    this.overlays?.set(overlay);
    const again = (/** @type {import("./place.js").Held} */ name) => (/** @type {string} */ value) => {
      hold(name, value);
      clearTimeout(this.resting);
      this.resting = window.setTimeout(() => void this.paint(), 3 * REST);
    };
    const fields = {
      patch: () => [textField("Answer to A", held("answer"), again("answer"), "small"), textField("Answer to B", held("other"), again("other"), "small")],
      drift: () => [modelField("Against", this.models, held("second"), again("second")), dtypeField("in dtype", held("seconddtype"), again("seconddtype"))],
    };
    this.extra?.replaceChildren(...(fields[/** @type {"patch" | "drift"} */ (overlay)]?.() ?? []).map(({ root }) => root));
  }

  /** @returns {Asked} */
  asked() {
    const [text, other, model] = [held("a"), held("b"), { name: held("model") }];
    const contrasts = { clean: text, corrupt: other, answer: held("answer"), other: held("other") };
    const second = held("seconddtype") === "as it is" ? { name: held("second") } : { name: held("second"), dtype: held("seconddtype") };
    const questions = /** @type {Record<string, [string, Record<string, unknown>]>} */ ({
      norm: ["grid", { text }],
      difference: ["compare", { a: text, b: other }],
      lens: ["lens", { text }],
      visibility: ["visibility", { text }],
      patch: ["patch", { contrasts }],
      drift: ["drift", { candidate: second, texts: [text] }],
    });
    const [analysis, given] = questions[held("overlay")] ?? questions.norm;
    return { analysis, model, arguments: given };
  }

  /** Ask for what the overlay shows, and paint it. */
  async paint() {
    const turn = ++this.turn;
    const needs = missing(this.usesB());
    if (needs) return this.nothing(said(needs, true));
    this.stage?.classList.add("stale");
    try {
      const result = await this.asker.ask("grid", this.asked());
      const views = result ? await viewsOf(result.id) : [];
      if (turn !== this.turn) return undefined;
      if (result) this.show(result, views);
      else this.nothing(said("Cancelled.", true), this.again());
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn === this.turn) this.nothing(said(error.message), this.again());
    } finally {
      if (turn === this.turn) this.stage?.classList.remove("stale");
    }
    return undefined;
  }

  /**
   * Show a sentence in place of the grid: nothing of an earlier one stays beside it.
   * @param {HTMLElement[]} pieces
   */
  nothing(...pieces) {
    for (const place of ["grid", "state"]) this.asker.cancel(place);
    this.stateTurn += 1;
    this.grid = null;
    this.stage?.replaceChildren(...pieces);
    this.stage?.classList.remove("stale");
    this.below?.replaceChildren();
    this.save?.replaceChildren();
    this.panel?.empty();
  }

  again() {
    return button("Ask again", "Ask the same question once more", () => void this.paint());
  }

  /**
   * @param {import("./api.js").ResultAnswer} result
   * @param {import("./result.js").View[]} views
   */
  show(result, views) {
    const first = views.findIndex((view) => view.kind === "Grid");
    const view = views[first];
    if (!view || view.kind !== "Grid" || !this.stage || !this.below) return;
    this.result = result;
    const root = element("section", { "data-view": "0", class: "grid" });
    this.stage.replaceChildren(root);
    this.grid = remembered(root, new ChoosingGrid(root, view, (cell) => this.chosen(cell)));
    if (this.explained) this.explained.textContent = EXPLAINED[held("overlay")] ?? "";
    const rest = element("div");
    this.below.replaceChildren(...(result.findings.length ? [findingsShown(result.findings)] : []), rest);
    showViews(rest, views.filter((_, i) => i !== first), 1);
    const named = result.views[first]?.name ?? "";
    this.save?.replaceChildren(saveMenu(result, () => ({ view: named, measure: this.grid?.shown ? this.grid.measure.name : "" })));
    document.documentElement.dataset.ready = "true";
    const cell = heldCell();
    if (cell) this.open(cell.site, cell.column, heldChange());
    else this.panel?.empty();
  }

  /** @param {number} pin */
  chosen(pin) {
    writePage("change", "");
    if (!this.grid || pin < 0) {
      this.asker.cancel("state");
      this.stateTurn += 1;
      return this.panel?.empty();
    }
    const { sites, tokens } = this.grid.grid;
    return this.open(sites[Math.floor(pin / tokens.length)], pin % tokens.length);
  }

  /**
   * Read the state of a column of the grid; columns that text A lacks are not states of it.
   * @param {string} site
   * @param {number} column
   * @param {Record<string, unknown> | null} [change] what is done to it
   */
  open(site, column, change = null) {
    const tokens = this.grid?.grid.tokens ?? [];
    if (!(column in tokens)) return this.panel?.wrong(`The text has ${tokens.length} token${tokens.length === 1 ? "" : "s"} now. Choose another cell.`);
    if (tokens[column] === null) return this.panel?.wrong("Text A has no token here: this column belongs to text B alone.");
    const token = tokens.slice(0, column).filter((one) => one !== null).length;
    void this.read({ site, column, token }, change);
    return undefined;
  }

  /**
   * @param {Cell} cell
   * @param {Record<string, unknown> | null} change
   */
  async read(cell, change) {
    const turn = ++this.stateTurn;
    this.panel?.wait(cell);
    this.panel?.fill(change);
    const done = change?.kind === "replace" ? { ...change, text: held("b") } : change;
    const given = { text: held("a"), site: cell.site, token: cell.token, ...(done ? { change: done } : {}) };
    try {
      const result = await this.asker.ask("state", { analysis: "state", model: { name: held("model") }, arguments: given });
      if (turn !== this.stateTurn || !this.grid) return;
      if (result) this.panel?.show(result, cell, this.grid.grid);
      else this.panel?.wrong("Cancelled. Choose a cell to read it.");
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn === this.stateTurn) this.panel?.wrong(error.message);
    }
  }

  /**
   * Choose a state by its name, as the panel's links do.
   * @param {string} site
   * @param {number} token
   */
  choose(site, token) {
    if (!this.grid) return;
    const { sites, tokens } = this.grid.grid;
    const columns = tokens.flatMap((one, i) => (one === null ? [] : [i]));
    const row = sites.indexOf(site);
    if (row < 0 || columns[token] === undefined) return void this.read({ site, column: token, token }, null);
    const cell = row * tokens.length + columns[token];
    if (cell !== this.grid.pin) this.grid.hold(cell);
  }
}

/**
 * What must be typed first, in a sentence; nothing where all is there.
 * @param {boolean} both
 */
function missing(both) {
  if (!held("a").trim()) return "Type a text to see its states.";
  if (both && !held("b").trim()) return "Type a text B to compare with.";
  if (both && held("a") === held("b")) return "Text B is text A. Change one of them.";
  return "";
}

/**
 * What the address says was done to the chosen state.
 * @returns {Record<string, unknown> | null}
 */
function heldChange() {
  try {
    const change = JSON.parse(readPage("change") || "null");
    return change !== null && typeof change === "object" ? change : null;
  } catch {
    return null;
  }
}

/** Choose a cell before the first grid is there, as the example does. @param {string} pin */
export function pinFirst(pin) {
  if (!heldCell()) writeState(0, { pin });
}
