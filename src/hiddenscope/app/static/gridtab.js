/**
 * The grid is the page: a model, a text, a second text, one grid that overlays paint, one state
 * beside it, lines below.
 */

import { button, choice, element } from "../../views/static/elements.js";
import { forgetViews, readPage, writePage, writeState } from "../../views/static/hash.js";
import { Refused } from "./api.js";
import { Beside } from "./beside.js";
import { ChoosingGrid } from "./choosing.js";
import { Columns } from "./columns.js";
import { dtypeField, modelField, selectField, textField } from "./fields.js";
import { remember } from "./history.js";
import { StatePanel } from "./panel.js";
import { held, heldCell, hold } from "./place.js";
import { findingsShown, remembered, paragraph, saveMenu, showViews, viewsOf } from "./result.js";

/**
 * @typedef {import("./api.js").Asked} Asked
 * @typedef {import("./panel.js").Cell} Cell
 */

const NO_HEAD =
  "By its config this model has no head, and so it predicts no tokens. " +
  "Choose another for Lens and Patch.";
const REST = 80; // milliseconds after the last keystroke
export const OVERLAYS = {
  norm: "Norm",
  difference: "Difference to B",
  lens: "Lens",
  visibility: "Visibility",
  attention: "Attention",
  patch: "Patch",
  drift: "Drift",
  features: "Features",
};
export const EXPLAINED = /** @type {Record<string, string>} */ ({
  norm: "The L2 norm of every state.",
  difference: "How far the states of the two texts are apart.",
  lens: "Logit lens: the token that each layer would predict if it were the last.",
  visibility:
    "Influence, from exact gradients: which states influence the chosen one, and which it " +
    "influences.",
  attention:
    "What the chosen token reads in each layer: the largest weight of any head. The list of " +
    "measures has the mean of all heads too, and both value-weighted.",
  patch:
    "Activation patching: how much of the answer comes back when one state of text A is put " +
    "into text B.",
  drift: "Where a second model, or the same in another dtype, diverges.",
  features:
    "The strongest features of a dictionary on every token but the first, and how much of the " +
    "state they leave unexplained. Dictionaries are found below the folder of --root.",
});

const PREDICTING = ["lens", "patch"]; // overlays that read what the model predicts
// Overlays that a model answers from the text alone, or never.
const NEEDS_NOTHING_MORE = ["lens", "visibility", "attention"];

export class GridTab {
  /**
   * @param {HTMLElement} root
   * @param {import("./asking.js").Asker} asker
   * @param {import("./api.js").ModelAnswer[]} models
   * @param {string[]} words of the analyses that the server offers
   * @param {import("./api.js").DictionaryAnswer[]} dictionaries
   */
  constructor(root, asker, models, words, dictionaries) {
    this.root = root;
    this.asker = asker;
    this.models = models;
    this.words = words;
    this.dictionaries = dictionaries;
    /** @type {number | undefined} the token whose attention is shown */
    this.reader = undefined;
    this.resting = 0;
    this.turn = 0; // counts the questions of the grid: what belongs to an earlier one is not shown
    this.stateTurn = 0; // and those of the panel
    /** @type {ChoosingGrid | null} */
    this.grid = null;
    /** @type {import("./api.js").ResultAnswer | null} */
    this.result = null;
    /** @type {Columns | null} */
    this.columns = null;
    /**
     * @type {{site: string, token: number} | null} the state that is chosen, whatever column it has
     *   in a grid
     */
    this.state = null;
    this.instead = ""; // the overlay that the model could not answer
    this.build();
    this.restore();
  }

  build() {
    const later = () => {
      clearTimeout(this.resting);
      this.resting = window.setTimeout(() => void this.paint(), REST);
    };
    this.model = modelField("Model", this.models, held("model"), (name) => this.changeModel(name));
    this.a = textField("Text A", held("a"), (text) => {
      hold("a", text);
      writePage("change", "");
      later();
    });
    this.b = textField("Text B, to compare with", held("b"), (text) => {
      hold("b", text);
      if (this.usesB() || heldChange()?.kind === "replace") later();
    });
    const offered = Object.entries(OVERLAYS).filter(
      ([overlay]) =>
        (overlay !== "attention" || this.words.includes(overlay)) &&
        (overlay !== "features" || this.dictionaries.length),
    );
    this.overlays = choice("Overlay", Object.fromEntries(offered), (overlay) => {
      this.instead = "";
      this.changeOverlay(overlay);
    });
    this.overlays.root.id = "overlays";
    this.extra = element("div", { class: "extra" });
    this.save = element("div", { class: "save" });
    this.explained = element("p", { class: "lead tight" });
    this.why = element("div");
    this.stage = element("div", { class: "views" }, [paragraph("Asking …", true)]);
    this.beside = new Beside(this.asker, (...choice) => this.chosenBeside(...choice));
    this.besideModel = modelField(
      "Second model, beside it",
      this.models,
      held("beside"),
      (name) => {
        hold("beside", name);
        void this.paint();
      },
    );
    this.below = element("div", { class: "views below" });
    this.aside = element("aside", { class: "state", "aria-label": "The chosen state" });
    this.panel = new StatePanel(this.aside, (cell, change) => this.changeState(cell, change), {
      choose: (site, token, model) =>
        model === held("model")
          ? this.choose(site, token)
          : void this.read({ site, column: token, token, other: undefined, model }, null),
      see: () => {
        this.instead = "";
        this.changeOverlay("visibility");
      },
      textB: () => held("b"),
      isFirst: (cell) => cell.model === held("model"),
      write: (cell, change) => this.continued(cell, change),
    });
    this.panel.empty();
    this.root.replaceChildren(
      element("div", { class: "ask", id: "ask" }, [this.model.root, this.a.root, this.b.root]),
      element("div", { class: "overlays" }, [
        this.overlays.root,
        this.extra,
        this.besideModel.root,
        this.save,
      ]),
      element("div", { class: "desk" }, [
        element("div", { class: "first" }, [
          this.explained,
          this.why,
          element("div", { class: "pairing" }, [this.stage, this.beside.root]),
        ]),
        this.below,
        this.aside,
      ]),
    );
  }

  /** @param {string} name */
  changeModel(name) {
    hold("model", name);
    forgetFeature();
    if (this.instead) hold("overlay", this.instead);
    this.instead = "";
    this.arrange();
    void this.paint();
  }

  /**
   * The address holds what is done to a state of the first model, whose cell it holds too.
   * @param {Cell} cell
   * @param {Record<string, unknown> | null} change
   */
  changeState(cell, change) {
    if (cell.model === held("model")) writePage("change", change ? JSON.stringify(change) : "");
    // Under another overlay too a feature is one of this dictionary.
    if (change?.feature !== undefined) hold("dictionary", this.dictionary() ?? "");
    void this.read(cell, change);
  }

  /** @param {string} overlay */
  changeOverlay(overlay) {
    hold("overlay", overlay);
    forgetViews(this.state ? ["pin"] : []);
    this.arrange();
    void this.paint();
  }

  /** Take everything from the address. */
  restore() {
    this.state = null;
    this.instead = "";
    this.besideModel?.set(held("beside"));
    this.model?.set(held("model"));
    this.a?.set(held("a"));
    this.b?.set(held("b"));
    const overlay = held("overlay");
    const isKnown = Object.hasOwn(OVERLAYS, overlay);
    if (!isKnown) hold("overlay", "norm");
    this.arrange();
    if (!isKnown)
      this.why?.replaceChildren(
        paragraph(`There is no overlay “${overlay.slice(0, 40)}”. The norms are shown.`, true),
      );
    void this.paint();
  }

  /** The dictionary that was chosen, or the first one where its features are painted. */
  dictionary() {
    const { dictionaries } = this;
    const first = held("overlay") === "features" ? dictionaries[0] : undefined;
    return (dictionaries.find(({ name }) => name === held("dictionary")) ?? first)?.name;
  }

  usesB() {
    return ["difference", "patch"].includes(held("overlay"));
  }

  /** What the overlay needs beside the texts. */
  arrange() {
    const overlay = held("overlay");
    this.overlays?.set(overlay);
    for (const input of this.overlays?.root.querySelectorAll("input") ?? []) {
      input.disabled = PREDICTING.includes(input.value) && this.isHeadless();
      if (input.parentElement) input.parentElement.title = input.disabled ? NO_HEAD : "";
    }
    if (this.explained) this.explained.textContent = EXPLAINED[overlay] ?? "";
    this.why?.replaceChildren(...(this.instead ? [paragraph(this.reason ?? "", true)] : []));
    const again =
      (/** @type {import("./place.js").Held} */ name) => (/** @type {string} */ value) => {
        hold(name, value);
        if (name === "dictionary") forgetFeature();
        clearTimeout(this.resting);
        this.resting = window.setTimeout(() => void this.paint(), 3 * REST);
      };
    const fields = {
      patch: () => [
        this.answerField("Answer to A", "answer", again("answer")),
        this.answerField("Answer to B", "other", again("other")),
      ],
      drift: () => [
        modelField("Against", this.models, held("second"), again("second")),
        dtypeField("in dtype", held("seconddtype"), again("seconddtype")),
      ],
      features: () => [
        selectField("Dictionary", this.dictionaries, this.dictionary() ?? "", again("dictionary")),
      ],
    };
    this.extra?.replaceChildren(
      ...(fields[/** @type {keyof typeof fields} */ (overlay)]?.() ?? []).map(({ root }) => root),
    );
  }

  /**
   * An answer of Patch; left empty, it is what the model finds likeliest.
   * @param {string} label
   * @param {"answer" | "other"} name
   * @param {(value: string) => void} act
   */
  answerField(label, name, act) {
    const field = textField(label, held(name), act, "small");
    field.input.setAttribute("placeholder", "the likeliest");
    field.input.dataset.answer = name;
    return field;
  }

  /**
   * The two answers of Patch: those that were typed, or what the model finds likeliest after each
   * text.
   * @returns {Promise<{answer: string, other: string} | null>} null where it was cancelled
   */
  async answers() {
    const typed = { answer: held("answer"), other: held("other") };
    if (typed.answer && typed.other) return typed;
    const result = await this.asker.ask("answers", {
      analysis: "answers",
      model: { name: held("model") },
      arguments: { a: held("a"), b: held("b") },
    });
    if (!result?.answers) return null;
    for (const name of /** @type {const} */ (["answer", "other"])) {
      this.extra
        ?.querySelector(`[data-answer="${name}"]`)
        ?.setAttribute("placeholder", result.answers[name]);
    }
    return {
      answer: typed.answer || result.answers.answer,
      other: typed.other || result.answers.other,
    };
  }

  /**
   * @param {{answer: string, other: string}} [answers] of Patch
   * @returns {Asked}
   */
  asked(answers) {
    const [text, other, model] = [held("a"), held("b"), { name: held("model") }];
    const contrasts = { clean: text, corrupt: other, ...answers };
    const second =
      held("seconddtype") === "as it is"
        ? { name: held("second") }
        : { name: held("second"), dtype: held("seconddtype") };
    const questions = /** @type {Record<string, [string, Record<string, unknown>]>} */ ({
      norm: ["grid", { text }],
      difference: ["compare", { a: text, b: other }],
      lens: ["lens", { texts: text }],
      visibility: ["visibility", { texts: text }],
      attention: ["reads", this.reader === undefined ? { text } : { text, token: this.reader }],
      patch: ["patch", { contrasts }],
      drift: ["drift", { candidate: second, texts: [text] }],
      features: ["features", { texts: text, dictionary: this.dictionary() }],
    });
    const [analysis, parameters] = questions[held("overlay")] ?? questions.norm;
    return { analysis, model, arguments: parameters };
  }

  /** Ask for what the overlay shows, and paint it. */
  async paint() {
    const turn = ++this.turn;
    if (PREDICTING.includes(held("overlay")) && this.isHeadless()) {
      return this.replace(NO_HEAD);
    }
    const needs =
      held("overlay") === "features" && !this.dictionary()
        ? "There is no dictionary below the folder of --root."
        : missing(this.usesB());
    if (needs) return this.nothing(paragraph(needs, true));
    this.stage?.classList.add("stale");
    const reader = this.state?.token ?? heldCell()?.column;
    this.reader = Number.isInteger(reader) ? reader : undefined;
    try {
      const question = await this.question();
      const result =
        question && turn === this.turn ? await this.asker.ask("grid", question) : undefined;
      const views = result ? await viewsOf(result.id) : [];
      if (turn !== this.turn) return undefined;
      if (result) this.show(result, views);
      else this.nothing(paragraph("Cancelled.", true), this.again());
      if (question && result) await this.beside?.paint(held("beside"), question);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn === this.turn) return this.refused(error.message);
    } finally {
      if (turn === this.turn) this.stage?.classList.remove("stale");
    }
    return undefined;
  }

  /** The question of the overlay; null where it was cancelled. */
  async question() {
    if (held("overlay") !== "patch") return this.asked();
    const answers = await this.answers();
    return answers ? this.asked(answers) : null;
  }

  /**
   * The overlay was refused. One that needs nothing but the text gives way to the norms, which
   * every model has.
   * @param {string} reason
   */
  async refused(reason) {
    const [overlay, turn] = [held("overlay"), this.turn];
    const replaced = NEEDS_NOTHING_MORE.includes(overlay) && (await this.hasNorms());
    if (turn !== this.turn) return undefined; // something else was asked in the meantime
    if (!replaced) {
      const norms = button("Show the norms", "Paint the norm of every state in its place", () =>
        this.changeOverlay("norm"),
      );
      return this.nothing(paragraph(reason), this.again(), ...(overlay === "norm" ? [] : [norms]));
    }
    return this.replace(reason);
  }

  /**
   * Show the norms in place of the overlay, and say why.
   * @param {string} reason
   */
  replace(reason) {
    this.instead = held("overlay");
    const label = OVERLAYS[/** @type {keyof typeof OVERLAYS} */ (this.instead)] ?? this.instead;
    this.reason = `${reason} The norms are shown in place of ${label}.`;
    return this.changeOverlay("norm");
  }

  /** Whether the model predicts no tokens, as far as that is known before it is loaded. */
  isHeadless() {
    return this.models.some((model) => model.name === held("model") && model.headless);
  }

  /** Whether the model can be loaded, and the text read. */
  async hasNorms() {
    try {
      return (
        (await this.asker.ask("norms", {
          analysis: "grid",
          model: { name: held("model") },
          arguments: { text: held("a") },
        })) !== undefined
      );
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      return false;
    }
  }

  /**
   * Show a sentence in place of the grid: nothing of an earlier one stays beside it.
   * @param {HTMLElement[]} pieces
   */
  nothing(...pieces) {
    for (const place of ["grid", "answers", "state"]) this.asker.cancel(place);
    this.stateTurn += 1;
    this.grid = null;
    this.stage?.replaceChildren(...pieces);
    this.stage?.classList.remove("stale");
    this.beside?.clear();
    this.below?.replaceChildren();
    this.save?.replaceChildren();
    this.panel?.empty();
    document.documentElement.dataset.ready = "true";
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
    this.columns = new Columns(result, view.tokens.length);
    this.keepState();
    const root = element("section", { "data-view": "0", class: "grid" });
    this.stage.replaceChildren(root);
    this.grid = remembered(root, new ChoosingGrid(root, view, (cell) => this.chosen(cell)));
    this.beside?.follow(this.grid);
    const rest = element("div");
    this.below.replaceChildren(
      ...(result.findings.length ? [findingsShown(result.findings)] : []),
      rest,
    );
    showViews(
      rest,
      views.filter((_, i) => i !== first),
      1,
    );
    const named = result.views[first]?.name ?? "";
    this.save?.replaceChildren(
      saveMenu(result, () => ({
        view: named,
        measure: this.grid?.shown ? this.grid.measure.name : "",
      })),
    );
    document.documentElement.dataset.ready = "true";
    const cell = heldCell();
    if (cell) this.open(this.columns, cell, heldChange());
    else this.panel?.empty();
    remember(
      `${OVERLAYS[/** @type {keyof typeof OVERLAYS} */ (held("overlay"))] ?? ""} of “${held("a")}”`,
      held("model"),
    );
  }

  /** The chosen state stays chosen: in another overlay it may stand in another column. */
  keepState() {
    if (!this.state || !this.columns || !heldCell()) return;
    const column = this.columns.columnOf(this.state.token);
    writePage("0.pin", `${this.state.site}~${column < 0 ? this.state.token : column}`);
  }

  /** @param {number} pin */
  chosen(pin) {
    writePage("change", "");
    this.state = null;
    if (!this.grid || !this.columns || pin < 0) {
      this.asker.cancel("state");
      this.stateTurn += 1;
      this.beside?.mirror();
      return this.panel?.empty();
    }
    const { sites, tokens } = this.grid.grid;
    this.open(this.columns, {
      site: sites[Math.floor(pin / tokens.length)],
      column: pin % tokens.length,
    });
    this.beside?.mirror();
    // In this overlay the grid shows what the chosen token reads.
    const token = this.columns.tokenAt(pin % tokens.length);
    if (held("overlay") === "attention" && typeof token === "number" && token !== this.reader)
      void this.paint();
    return undefined;
  }

  /**
   * A cell of the second model: the first grid shows the same one, the panel the second's state.
   * @param {Columns} columns
   * @param {{site: string, column: number}} cell
   * @param {string} model
   */
  chosenBeside(columns, cell, model) {
    const { grid } = this;
    writePage("change", "");
    this.state = null;
    if (grid && grid.pin >= 0) {
      const token = this.columns?.tokenAt(grid.pin % grid.grid.tokens.length);
      const site = grid.grid.sites[Math.floor(grid.pin / grid.grid.tokens.length)];
      if (typeof token === "number") this.state = { site, token };
    }
    this.open(columns, cell, null, model);
  }

  /**
   * Read the state of a column of a grid; columns that text A lacks are not states of it.
   * @param {Columns} columns
   * @param {{site: string, column: number}} cell
   * @param {Record<string, unknown> | null} [change] what is done to it
   * @param {string} [model]
   */
  open(columns, { site, column }, change = null, model = held("model")) {
    const [token, count] = [columns.tokenAt(column), columns.tokens.length];
    if (typeof token === "number")
      return void this.read({ site, column, token, other: columns.otherAt(column), model }, change);
    this.asker.cancel("state");
    this.stateTurn += 1;
    if (token === null)
      return this.panel?.wrong("Text A has no token here: this column belongs to text B alone.");
    return this.panel?.wrong(
      `The text has ${count} token${count === 1 ? "" : "s"} now. Choose another cell.`,
    );
  }

  /**
   * @param {Cell} cell
   * @param {Record<string, unknown> | null} change
   */
  async read(cell, change) {
    const turn = ++this.stateTurn;
    const isFirst = cell.model === held("model");
    if (isFirst) this.state = { site: cell.site, token: cell.token };
    this.panel?.wait(cell);
    this.panel?.fill(change);
    try {
      const result = await this.asker.ask("state", {
        analysis: "state",
        model: { name: cell.model },
        arguments: this.stateArguments(cell, change),
      });
      if (turn !== this.stateTurn || !this.grid) return undefined;
      if (!result) return this.panel?.wrong("Cancelled. Choose a cell to read it.");
      this.panel?.show(result, cell, this.grid.grid, change);
      if (change) remember(`${String(change.kind)} ${cell.site} of “${held("a")}”`, cell.model);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn === this.stateTurn) this.panel?.wrong(error.message);
    }
    return undefined;
  }

  /**
   * What the model writes after the text, as it is and with the change.
   * @param {Cell} cell
   * @param {Record<string, unknown> | null} change
   */
  continued(cell, change) {
    return this.asker.ask("continuation", {
      analysis: "continuation",
      model: { name: cell.model },
      arguments: this.stateArguments(cell, change),
    });
  }

  /**
   * The arguments of a question about one state.
   * @param {Cell} cell
   * @param {Record<string, unknown> | null} change
   */
  stateArguments(cell, change) {
    const dictionary = cell.model === held("model") ? this.dictionary() : undefined;
    const state = { text: held("a"), site: cell.site, token: cell.token, dictionary };
    if (!change) return state;
    if (change.kind !== "replace") return { ...state, change };
    const aligned =
      // Where it stands in text B.
      typeof cell.other === "number" && cell.other !== cell.token ? { token: cell.other } : {};
    return { ...state, change: { ...change, text: held("b"), ...aligned } };
  }

  /**
   * Choose a state by its name, as the panel's links do.
   * @param {string} site
   * @param {number} token
   */
  choose(site, token) {
    if (!this.grid || !this.columns) return;
    const { sites, tokens } = this.grid.grid;
    const [row, column] = [sites.indexOf(site), this.columns.columnOf(token)];
    if (row < 0 || column < 0)
      return void this.read(
        { site, column: token, token, other: undefined, model: held("model") },
        null,
      );
    const cell = row * tokens.length + column;
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

/** A number names another feature in another dictionary, and a dictionary is of one model. */
function forgetFeature() {
  if (heldChange()?.feature !== undefined) writePage("change", "");
}

/** Choose a cell before the first grid is there, as the example does. @param {string} pin */
export function pinFirst(pin) {
  if (!heldCell()) writeState(0, { pin });
}
