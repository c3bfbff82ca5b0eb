/**
 * A question with its form and its answer: any analysis, on any model. The address holds what was
 * filled in.
 */

import { element } from "../../views/static/elements.js";
import { forgetViews, newEntry, readPage, writePage } from "../../views/static/hash.js";
import { unpack } from "../../views/static/payload.js";
import { readText, refreshDictionaries, Refused } from "./api.js";
import { modelField } from "./fields.js";
import { Form } from "./form.js";
import { remember } from "./history.js";
import { EXAMPLE, held, heldModel, holdModel, isExample } from "./place.js";
import { findingsShown, paragraph, saveMenu, showViews, viewsOf } from "./result.js";

/** @typedef {import("./api.js").AnalysisAnswer} AnalysisAnswer */

/** One analysis: its model, its form, and what it answers. */
export class Questioning {
  /**
   * @param {AnalysisAnswer} analysis
   * @param {import("./form.js").Lists} lists
   * @param {import("./asking.js").Asker} asker
   * @param {{named?: string, tab?: string, store?: string}} [how] what its model is called, the tab
   *   whose model it is, or the store that is asked in place of a model
   */
  constructor(analysis, lists, asker, { named = "Model", tab = "ask", store = "" } = {}) {
    this.analysis = analysis;
    this.lists = lists;
    this.store = store;
    this.asker = asker;
    this.turn = 0; // counts the questions: what belongs to an earlier one is not shown
    this.parameters = analysis.parameters.filter((parameter) => parameter.of_states || !store);
    this.form = new Form(this.parameters, store ? { ...lists, unlabelled: true } : lists);
    this.model = modelField(named, lists.models, heldModel(tab), (name) => holdModel(tab, name));
    this.answer = element(
      "div",
      { class: "views" },
      analysis.promise ? [paragraph(analysis.promise, true)] : [],
    );
    if (!store) this.form.root.prepend(this.model.root);
    const asking = element("form", { class: "asking" }, [this.form.root]);
    asking.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.ask();
    });
    this.root = element("div", {}, [asking, this.answer]);
  }

  /** What the address says was filled in; whether there was anything. */
  restore() {
    try {
      const values = JSON.parse(readPage("q") || "null");
      if (values === null || typeof values !== "object") return false;
      this.form.set(values);
      return true;
    } catch {
      return false;
    }
  }

  /**
   * @param {boolean} [written] whether the address is to hold the question; the example's is short
   */
  async ask(written = true) {
    const values = this.form.get();
    const empty = this.parameters.find(
      (parameter) => parameter.required && values[parameter.name] === undefined,
    );
    if (empty)
      return this.answer.replaceChildren(
        paragraph(`Fill in “${this.form.labelOf(empty.name)}” first.`),
      );
    if (written) writePage("q", JSON.stringify(values));
    this.answer.classList.add("stale");
    const turn = ++this.turn;
    try {
      const source = this.store ? { store: this.store } : { model: { name: this.model.get() } };
      const result = await this.asker.ask(
        "question",
        { analysis: this.analysis.word, ...source, arguments: values },
        (job) => void this.early(job, turn),
      );
      const views = result ? await viewsOf(result.id) : [];
      if (result?.analysis === "fit") await refreshDictionaries(this.lists.dictionaries ?? []);
      if (turn !== this.turn) return undefined;
      this.turn += 1;
      if (result) this.show(result, views);
      else
        this.answer
          .querySelector(".early")
          ?.replaceChildren("Cancelled: this is the first picture alone.");
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn !== this.turn) return undefined;
      this.turn += 1;
      this.answer.replaceChildren(paragraph(error.message));
    } finally {
      this.answer.classList.remove("stale");
    }
    return undefined;
  }

  /**
   * A partial result is shown as soon as there is one, and never after the whole.
   * @param {import("./api.js").Job} job
   * @param {number} turn
   */
  async early(job, turn) {
    if (!job.partial || this.seen === `${job.id} ${job.partial}`) return;
    this.seen = `${job.id} ${job.partial}`;
    const packed = await readText(`/api/jobs/${job.id}/partial`);
    if (!packed) return; // the job is over by now
    const views = await unpack(packed);
    if (turn !== this.turn) return;
    const [place, words] = [
      element("div"),
      paragraph("A first picture; the rest is being computed.", true),
    ];
    words.classList.add("early");
    this.answer.replaceChildren(words, place);
    showViews(place, views, 0);
  }

  /**
   * @param {import("./api.js").ResultAnswer} result
   * @param {import("./result.js").View[]} views
   */
  show(result, views) {
    const place = element("div", { class: "views" });
    const findings = result.findings.length ? [findingsShown(result.findings)] : [];
    findings.forEach((list) => {
      list.classList.add("beside");
      // It scrolls by itself, so the keyboard must reach it.
      list.tabIndex = 0;
    });
    const head = element("div", { class: "row" }, [
      element("h2", { class: "tab" }, [
        result.title.slice(0, 1).toUpperCase() + result.title.slice(1),
      ]),
      saveMenu(result, () => ({ view: "", measure: "" })),
    ]);
    this.answer.replaceChildren(element("div", { class: "found" }, [head, ...findings, place]));
    showViews(place, views, 0);
    document.documentElement.dataset.ready = "true";
    if (readPage("q")) remember(result.title, this.store ? "" : this.model.get());
  }
}

/**
 * Every analysis, as cards; choosing one opens its form.
 * @param {HTMLElement} root
 * @param {import("./asking.js").Asker} asker
 * @param {AnalysisAnswer[]} analyses
 * @param {import("./form.js").Lists} lists
 */
export function askTab(root, asker, analyses, lists) {
  const place = element("div");
  const cards = analyses.map((analysis) => {
    const card = element("button", { type: "button", class: "card", "aria-pressed": "false" }, [
      element("strong", {}, [analysis.word]),
      element("span", {}, [analysis.question]),
    ]);
    card.addEventListener("click", () => {
      newEntry();
      forgetViews();
      writePage("word", analysis.word);
      writePage("q", "");
      open(analysis, false);
    });
    return /** @type {const} */ ([analysis, card]);
  });
  const open = (/** @type {AnalysisAnswer} */ analysis, /** @type {boolean} */ linked) => {
    for (const [candidate, card] of cards)
      card.setAttribute("aria-pressed", String(candidate === analysis));
    const questioning = new Questioning(analysis, lists, asker);
    place.replaceChildren(element("h2", { class: "tab" }, [analysis.question]), questioning.root);
    if (linked && questioning.restore()) void questioning.ask();
    else place.scrollIntoView({ block: "nearest" });
  };
  root.replaceChildren(
    element("h2", { class: "tab" }, ["All analyses"]),
    element("p", { class: "lead" }, [
      "Each of these is one function in Python and one command in a terminal, under the same name.",
    ]),
    element(
      "ul",
      { class: "cards" },
      cards.map(([, card]) => element("li", {}, [card])),
    ),
    place,
  );
  const word = readPage("word");
  const linked = analyses.find((candidate) => candidate.word === word);
  if (linked) open(linked, true);
  else if (word) place.replaceChildren(paragraph(`There is no analysis “${word.slice(0, 40)}”.`));
  document.documentElement.dataset.ready = "true";
}

/**
 * The drift of two models: one question on a page of its own.
 * @param {HTMLElement} root
 * @param {import("./asking.js").Asker} asker
 * @param {AnalysisAnswer} drift
 * @param {import("./form.js").Lists} lists
 */
export function driftTab(root, asker, drift, lists) {
  const questioning = new Questioning(drift, lists, asker, { named: "Reference", tab: "drift" });
  root.replaceChildren(
    element("h2", { class: "tab" }, ["Where do two models diverge?"]),
    element("p", { class: "lead" }, [
      "The first is the reference, the second the candidate: a port, a fine-tuned copy, " +
        "another checkpoint of the same shape, or the same model in another dtype.",
    ]),
    questioning.root,
  );
  const known = questioning.restore();
  if (!known)
    questioning.form.set({
      candidate: { name: held("second"), dtype: held("seconddtype") },
      texts: [held("a")],
    });
  if (known || (heldModel("drift") === EXAMPLE.model && isExample(["a", "second", "seconddtype"])))
    void questioning.ask(known);
  document.documentElement.dataset.ready = "true";
}
