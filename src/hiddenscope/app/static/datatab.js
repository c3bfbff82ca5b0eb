/** Datasets: shipped or uploaded, with panels of every layer and probes. */

import { choice, element } from "../../views/static/elements.js";
import { readPage, writePage } from "../../views/static/hash.js";
import { shownText } from "../../views/static/text.js";
import { readTable, Refused, upload } from "./api.js";
import { Questioning } from "./asktab.js";
import { columnForm } from "./columnform.js";
import { EXAMPLE, heldModel } from "./place.js";
import { paragraph } from "./result.js";

// The answer to this question comes with the package.
const EXAMPLE_DATA = "cities-incomplete";
const EXAMPLE_WORD = "project";
const EXAMPLE_METHOD = "pca";

/** @typedef {import("./api.js").DatasetAnswer} DatasetAnswer */

export class DatasetTab {
  /**
   * @param {HTMLElement} root
   * @param {import("./asking.js").Asker} asker
   * @param {import("./api.js").AnalysisAnswer[]} analyses
   * @param {import("./form.js").Lists} lists
   */
  constructor(root, asker, analyses, lists) {
    this.asker = asker;
    this.analyses = analyses.filter(({ parameters }) =>
      parameters.some(({ kind }) => kind === "data"),
    );
    this.lists = lists;
    this.cards = element("ul", { class: "cards" });
    this.place = element("div");
    this.problem = element("div");
    this.columns = element("div");
    const file = element("input", {
      type: "file",
      accept: ".txt,.csv,.tsv,.jsonl",
      "aria-label": "Upload a dataset",
    });
    file.addEventListener("change", () => void this.take(file.files?.[0]));
    const drop = element("label", { class: "card drop" }, [
      element("strong", {}, ["Your own"]),
      element("span", {}, ["A .csv, .tsv, .jsonl or .txt file with texts and labels."]),
      file,
    ]);
    this.drop = element("li", {}, [drop]);
    for (const name of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(name, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", name === "dragover");
        if (name === "drop")
          void this.take(/** @type {DragEvent} */ (event).dataTransfer?.files[0]);
      });
    }
    this.what = choice(
      "Analysis",
      Object.fromEntries(this.analyses.map(({ word, action }) => [word, action])),
      (word) => {
        writePage("word", word);
        this.open(false);
      },
    );
    root.replaceChildren(
      element("h2", { class: "tab" }, ["Datasets"]),
      element("p", { class: "lead" }, [
        "Labelled texts: how their states lie in every layer, whether the classes are apart " +
          "in the full space, and where a probe can read the label.",
      ]),
      this.cards,
      this.columns,
      this.problem,
      element("div", { class: "row" }, [this.what.root]),
      this.place,
    );
    this.list();
    const named = readPage("data");
    if (named && this.chosen.name !== named)
      this.problem.replaceChildren(paragraph("This link's dataset is not here: upload it again."));
    this.open(true);
    document.documentElement.dataset.ready = "true";
  }

  get chosen() {
    const name = readPage("data");
    return (
      this.lists.datasets.find((dataset) => dataset.name === (name || EXAMPLE_DATA)) ??
      this.lists.datasets[0]
    );
  }

  get word() {
    const word = readPage("word");
    return this.analyses.some((analysis) => analysis.word === word) ? word : EXAMPLE_WORD;
  }

  /**
   * Show the columns of a file; where their names say what they are, and in a file of lines, it is
   * taken at once.
   * @param {File | undefined} file
   */
  async take(file) {
    if (!file) return;
    try {
      const table = await readTable(file);
      this.problem.replaceChildren();
      this.columns.replaceChildren(
        ...(table.columns.length
          ? [columnForm(table, (columns) => void this.add(file, columns))]
          : []),
      );
      if (table.certain || !table.columns.length) await this.add(file, {});
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.problem.replaceChildren(paragraph(error.message));
    }
  }

  /**
   * @param {File} file
   * @param {Record<string, string>} columns
   */
  async add(file, columns) {
    try {
      const added = await upload(file, columns);
      this.lists.datasets = [
        ...this.lists.datasets.filter((dataset) => dataset.name !== added.name),
        added,
      ];
      writePage("data", added.name);
      this.problem.replaceChildren();
      this.list();
      this.open(false);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.problem.replaceChildren(paragraph(error.message));
    }
  }

  list() {
    const cards = this.lists.datasets.map((dataset) => {
      const labels = Object.entries(dataset.labels)
        .slice(0, 4)
        .map(([label, count]) => `${label} ${count}`)
        .join(", ");
      const classes = labels ? `: ${shownText(labels, 120)}` : ", no labels";
      const groups = dataset.groups === null ? "" : `; ${dataset.groups} groups`;
      const pressed = String(dataset === this.chosen);
      const card = element("button", { type: "button", class: "card", "aria-pressed": pressed }, [
        element("strong", {}, [shownText(dataset.label, 80)]),
        element("span", {}, [`${dataset.texts} texts${classes}${groups}`]),
        ...namedColumns(dataset),
        element("span", {}, [`“${shownText(dataset.sample[0] ?? "", 90)}”`]),
      ]);
      card.addEventListener("click", () => {
        writePage("data", dataset.name);
        writePage("q", "");
        this.list();
        this.open(false);
      });
      return element("li", {}, [card]);
    });
    this.cards.replaceChildren(...cards, ...(this.drop ? [this.drop] : []));
  }

  /** @param {boolean} linked whether the address says what was asked */
  open(linked) {
    this.what.set(this.word);
    const analysis = this.analyses.find((candidate) => candidate.word === this.word);
    if (!analysis || !this.chosen) return;
    const questioning = new Questioning(analysis, this.lists, this.asker, { tab: "data" });
    this.place.replaceChildren(questioning.root);
    const known = linked && questioning.restore();
    questioning.form.set({
      data: this.chosen.name,
      ...(known || this.word !== EXAMPLE_WORD ? {} : { method: EXAMPLE_METHOD }),
    });
    questioning.form.hide("data");
    const example =
      this.word === EXAMPLE_WORD &&
      this.chosen.name === EXAMPLE_DATA &&
      heldModel("data") === EXAMPLE.model;
    if (known || example) void questioning.ask(known);
  }
}

/**
 * The columns that were taken, where somebody chose them.
 * @param {DatasetAnswer} dataset
 */
function namedColumns(dataset) {
  const columns = Object.entries(dataset.columns ?? {}).filter(([, column]) => column);
  const words = columns.map(([role, column]) => `${role}: ${column}`).join(", ");
  return words ? [element("span", {}, [shownText(words, 120)])] : [];
}
