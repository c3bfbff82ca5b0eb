/** Datasets: shipped or uploaded, with panels of every layer and probes; and stores of states, to open and search. */

import { choice, element } from "../../views/static/elements.js";
import { readPage, writePage } from "../../views/static/hash.js";
import { shownText } from "../../views/static/text.js";
import { read, Refused, upload } from "./api.js";
import { Questioning } from "./asktab.js";
import { modelField } from "./fields.js";
import { held, hold } from "./place.js";
import { findingsShown, said, saveMenu, showViews, viewsOf } from "./result.js";

const QUESTIONS = { project: "See how they lie", probe: "Read the labels", graft: "Graft another model" };

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
    this.analyses = analyses;
    this.lists = lists;
    this.cards = element("ul", { class: "cards" });
    this.place = element("div");
    this.problem = element("div");
    const file = element("input", { type: "file", accept: ".txt,.csv,.tsv,.jsonl", "aria-label": "Upload a dataset" });
    file.addEventListener("change", () => void this.take(file.files?.[0]));
    const drop = element("label", { class: "drop" }, ["Your own: a .csv, .tsv, .jsonl or .txt file, with a column of texts and one of labels. ", file]);
    for (const name of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(name, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", name === "dragover");
        if (name === "drop") void this.take(/** @type {DragEvent} */ (event).dataTransfer?.files[0]);
      });
    }
    this.what = choice("Question", QUESTIONS, (word) => { writePage("word", word); this.open(false); });
    root.replaceChildren(
      element("h2", { class: "part" }, ["Datasets"]),
      element("p", { class: "lead" }, ["Labelled texts: how their states lie in every layer, whether the classes are apart in the full space, and where a probe can read the label."]),
      this.cards, drop, this.problem, element("div", { class: "row" }, [this.what.root]), this.place,
    );
    this.list();
    this.open(true);
    document.documentElement.dataset.ready = "true";
  }

  get chosen() {
    const name = readPage("data");
    return this.lists.datasets.find((one) => one.name === name) ?? this.lists.datasets[0];
  }

  get word() {
    const word = readPage("word");
    return word in QUESTIONS ? word : "project";
  }

  /** @param {File | undefined} file */
  async take(file) {
    if (!file) return;
    try {
      const added = await upload(file);
      this.lists.datasets = [...this.lists.datasets.filter((one) => one.name !== added.name), added];
      writePage("data", added.name);
      this.problem.replaceChildren();
      this.list();
      this.open(false);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.problem.replaceChildren(said(error.message));
    }
  }

  list() {
    this.cards.replaceChildren(...this.lists.datasets.map((one) => {
      const labels = Object.entries(one.labels).slice(0, 4).map(([label, count]) => `${label} ${count}`).join(", ");
      const card = element("button", { type: "button", class: "card", "aria-pressed": String(one === this.chosen) }, [
        element("strong", {}, [shownText(one.label, 80)]),
        element("span", {}, [`${one.texts} texts${labels ? `: ${shownText(labels, 120)}` : ", no labels"}`]),
        element("span", {}, [`“${shownText(one.sample[0] ?? "", 90)}”`]),
      ]);
      card.addEventListener("click", () => { writePage("data", one.name); writePage("q", ""); this.list(); this.open(false); });
      return element("li", {}, [card]);
    }));
  }

  /** @param {boolean} linked whether the address says what was asked */
  open(linked) {
    this.what.set(this.word);
    const analysis = this.analyses.find((one) => one.word === this.word);
    if (!analysis || !this.chosen) return;
    const questioning = new Questioning(analysis, this.lists, this.asker);
    this.place.replaceChildren(questioning.root);
    const known = linked && questioning.restore();
    questioning.form.set({ data: this.chosen.name });
    if (known) void questioning.ask();
  }
}

/**
 * Kept states: what there is below the root, opened and searched.
 * @param {HTMLElement} root
 * @param {import("./asking.js").Asker} asker
 * @param {import("./form.js").Lists} lists
 */
export async function storeTab(root, asker, lists) {
  /** @type {import("./api.js").StoreAnswer[]} */
  const stores = await read("/api/stores");
  const place = element("div");
  const cards = stores.map((store) => {
    const card = element("button", { type: "button", class: "card", "aria-pressed": "false" }, [
      element("strong", {}, [shownText(store.label, 100)]),
      element("span", {}, [`${store.texts} texts, ${store.tokens} tokens, ${store.sites.length} sites, ${(store.bytes / 1e6).toFixed(1)} MB; ${shownText(store.model, 60)}`]),
    ]);
    card.addEventListener("click", () => open(store));
    return /** @type {const} */ ([store, card]);
  });
  const open = (/** @type {import("./api.js").StoreAnswer} */ store) => {
    writePage("store", store.name);
    for (const [one, card] of cards) card.setAttribute("aria-pressed", String(one === store));
    place.replaceChildren(searchOf(store, asker, lists));
  };
  const none = said("No states are kept below the root. `hiddenscope capture --out states.safetensors` keeps some; start `hiddenscope serve --root FOLDER` above them.", true);
  root.replaceChildren(
    element("h2", { class: "part" }, ["Stores"]),
    element("p", { class: "lead" }, ["Hidden states that were computed before and kept in files: see what they hold, and find the texts nearest to a query."]),
    ...(stores.length ? [element("ul", { class: "cards" }, cards.map(([, card]) => element("li", {}, [card])))] : [none]), place,
  );
  const linked = stores.find((one) => one.name === readPage("store"));
  if (linked) open(linked);
  document.documentElement.dataset.ready = "true";
}

/**
 * @param {import("./api.js").StoreAnswer} store
 * @param {import("./asking.js").Asker} asker
 * @param {import("./form.js").Lists} lists
 */
function searchOf(store, asker, lists) {
  const model = modelField("The model that they were made with", lists.models, lists.models.some((one) => one.name === store.model) ? store.model : held("model"), (name) => hold("model", name));
  const query = element("input", { type: "search", value: readPage("q"), "aria-label": "Query" });
  const site = element("select", { "aria-label": "Site" }, store.sites.map((name) => element("option", { value: name }, [name])));
  site.selectedIndex = store.sites.length - 1;
  const answer = element("div", { class: "views" });
  const form = element("form", {}, [
    element("div", { class: "form" }, [
      model.root, element("label", { class: "field" }, [element("span", {}, ["Site"]), site]),
      element("label", { class: "field wide" }, [element("span", {}, ["Which texts are nearest to"]), query]),
    ]),
    element("div", { class: "row" }, [element("button", { type: "submit", class: "main" }, ["Search"])]),
  ]);
  const ask = async () => {
    if (!query.value.trim()) return answer.replaceChildren(said("Type a query first.", true));
    writePage("q", query.value);
    try {
      const given = { store: store.name, query: query.value, site: site.value };
      const result = await asker.ask("store", { analysis: "store", model: { name: model.get() }, arguments: given });
      if (!result) return undefined;
      const place = element("div");
      answer.replaceChildren(element("div", { class: "row" }, [saveMenu(result, () => ({ view: "", measure: "" }))]), findingsShown(result.findings), place);
      showViews(place, await viewsOf(result.id), 0);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      answer.replaceChildren(said(error.message));
    }
    return undefined;
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); void ask(); });
  return element("div", {}, [form, answer]);
}
