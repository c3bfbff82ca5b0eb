/**
 * Stores: states that were kept before. What they hold, the texts nearest to a query, and their
 * texts one by one.
 */

import { button, choice, element } from "../../views/static/elements.js";
import { forgetViews, readPage, writePage } from "../../views/static/hash.js";
import { shownText } from "../../views/static/text.js";
import { read, Refused } from "./api.js";
import { Questioning } from "./asktab.js";
import { modelField } from "./fields.js";
import { KeptText } from "./kepttext.js";
import { heldModel, holdModel } from "./place.js";
import { paragraph, saveMenu } from "./result.js";

/**
 * @typedef {import("./api.js").StoreAnswer} StoreAnswer
 * @typedef {import("./api.js").ResultAnswer} ResultAnswer
 */

const PAGE = 20;
const BROWSE = "browse";
const FIT = "fit";
const LABELS_FROM =
  "The labels come from the dataset that the states were made of: its texts are compared with " +
  "those that were kept. Upload it under Datasets.";
const NONE =
  "There are no states to show yet. `hiddenscope extract corpus.jsonl --to states/` keeps " +
  "those of a corpus in a store, " +
  "`hiddenscope capture --out states.safetensors` those of a few texts in a file; then start " +
  "`hiddenscope serve --root FOLDER` above them.";

/**
 * Every store below the root as a card; the one that the address names, or else the first, is open.
 * @param {HTMLElement} root
 * @param {import("./asking.js").Asker} asker
 * @param {import("./api.js").AnalysisAnswer[]} analyses
 * @param {import("./form.js").Lists} lists
 */
export async function storeTab(root, asker, analyses, lists) {
  /** @type {StoreAnswer[]} */
  const stores = await read("/api/stores");
  const place = element("div");
  const cards = stores.map((store) => {
    const card = element("button", { type: "button", class: "card", "aria-pressed": "false" }, [
      element("strong", {}, [shownText(store.label, 100)]),
      element("span", {}, [
        `${count(store.texts, "text")}, states of ${shownText(store.model, 60)}`,
      ]),
    ]);
    card.addEventListener("click", () => {
      for (const name of ["q", "text", "site", "from", "word", "0.pin"]) writePage(name, "");
      writePage("store", store.name);
      open(store);
    });
    return /** @type {const} */ ([store, card]);
  });
  const open = (/** @type {StoreAnswer} */ store) => {
    for (const [candidate, card] of cards)
      card.setAttribute("aria-pressed", String(candidate === store));
    const opened = new OpenStore(store, asker, lists);
    const work = element("div");
    const offered = [...analyses.filter((analysis) => analysis.on_states), fitOf(store)];
    const todo = {
      [BROWSE]: "Browse its texts",
      ...Object.fromEntries(offered.map(({ word, action }) => [word, action])),
    };
    const start = (/** @type {boolean} */ linked) => {
      const analysis = offered.find((candidate) => candidate.word === readPage("word"));
      what.set(analysis?.word ?? BROWSE);
      if (analysis) work.replaceChildren(ofStore(analysis, store, asker, lists, linked));
      else {
        work.replaceChildren(opened.root);
        opened.start();
      }
    };
    const what = choice("What to do", todo, (word) => {
      for (const name of ["q", "text", "site", "from"]) writePage(name, "");
      forgetViews();
      writePage("word", word === BROWSE ? "" : word);
      start(false);
    });
    place.replaceChildren(facts(store), element("div", { class: "row" }, [what.root]), work);
    start(true);
  };
  root.replaceChildren(
    element("h2", { class: "tab" }, ["Stores"]),
    element("p", { class: "lead" }, [
      "Hidden states that were computed before and kept: read their texts, see the norm of " +
        "every state, and find what is nearest to a query or to a state.",
    ]),
    ...(stores.length
      ? [
          element(
            "ul",
            { class: "cards" },
            cards.map(([, card]) => element("li", {}, [card])),
          ),
        ]
      : [paragraph(NONE, true)]),
    place,
  );
  const named = readPage("store");
  const first = named ? stores.find((store) => store.name === named) : stores[0];
  if (first) open(first);
  else if (named)
    place.replaceChildren(paragraph("This link's store is not below the folder of --root."));
  document.documentElement.dataset.ready = "true";
}

/**
 * An analysis of kept states, with its form and its answer.
 * @param {import("./api.js").AnalysisAnswer} analysis
 * @param {StoreAnswer} store
 * @param {import("./asking.js").Asker} asker
 * @param {import("./form.js").Lists} lists
 * @param {boolean} linked whether the address may say what was asked
 */
function ofStore(analysis, store, asker, lists, linked) {
  const questioning = new Questioning(analysis, lists, asker, { tab: "stores", store: store.name });
  // A link fills the form of a fit in, but nothing is written before somebody asks for it.
  if (linked && questioning.restore() && analysis.word !== FIT) void questioning.ask();
  const labels = analysis.parameters.some((parameter) => parameter.kind === "data")
    ? [element("p", { class: "lead" }, [LABELS_FROM])]
    : [];
  return element("div", {}, [...labels, questioning.root]);
}

/**
 * What training a dictionary on a store asks for.
 * @param {StoreAnswer} store
 * @returns {import("./api.js").AnalysisAnswer}
 */
function fitOf(store) {
  const question = (
    /** @type {string} */ name,
    /** @type {string} */ label,
    /** @type {string} */ help,
    kind = "integer",
    /** @type {number | null} */ value = null,
    /** @type {string[]} */ choices = [],
  ) => ({
    ...{ name, label, help, kind, default: value, choices, required: value === null },
    ...{ empty_choice: "", aside: false, fields: [], of_states: true },
  });
  return {
    ...{ word: FIT, question: "", group: "", on_states: true, action: "Train a dictionary" },
    promise:
      "You will have a sparse dictionary of these states, in a new folder below dictionaries/ in " +
      "the folder of --root, and can choose it for the overlay Features. Other questions wait " +
      "until it is trained, and Cancel leaves nothing behind.",
    parameters: [
      question("to", "Name", "of the new folder: letters, digits, - and _", "word"),
      question("site", "Site", "", "choice", null, store.sites),
      question("features", "Features", "how many, up to 16,384", "integer", 1024),
      question("k", "Active", "how many act on a token, up to 100", "integer", 32),
      question("tokens", "Tokens", "states to train on, up to 10,000,000", "integer", 1_000_000),
    ],
  };
}

/** A store that is open: a search, a list of texts, and the text that is chosen. */
class OpenStore {
  /**
   * @param {StoreAnswer} store
   * @param {import("./asking.js").Asker} asker
   * @param {import("./form.js").Lists} lists
   */
  constructor(store, asker, lists) {
    this.store = store;
    this.asker = asker;
    this.list = element("section", { class: "texts", "aria-label": "Texts" });
    this.text = new KeptText(store, asker, (number, cell) => this.choose(number, cell));
    const source = lists.models.find(
      (model) =>
        model.name === store.model ||
        (model.source === "folder" && model.label.split("/").pop() === store.model),
    );
    this.model = modelField(
      "Model that encodes the query",
      lists.models,
      source?.name ?? heldModel("stores"),
      (name) => holdModel("stores", name),
    );
    this.query = element("input", {
      type: "search",
      value: readPage("q"),
      "aria-label": "Query",
      placeholder: "a text",
    });
    this.site = element(
      "select",
      { "aria-label": "Site" },
      store.sites.map((name) => element("option", { value: name }, [name])),
    );
    this.site.value = store.sites.includes(readPage("site"))
      ? readPage("site")
      : store.sites[store.sites.length - 1];
    const form = element("form", { class: "search" }, [
      field("Find the texts nearest to", this.query),
      field("Site", this.site),
      this.model.root,
      element("button", { type: "submit", class: "main" }, ["Search"]),
    ]);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.search();
    });
    this.root = element("div", {}, [
      form,
      element("div", { class: "browse" }, [this.list, this.text.root, this.text.aside]),
    ]);
  }

  /** What the address says: a search or a page of texts, and a text. */
  start() {
    const number = readPage("text");
    if (readPage("q")) void this.search();
    else void this.page(Number(readPage("from")) || 0);
    if (number) void this.text.open(Number(number));
    else this.text.empty();
  }

  /** @param {number} first */
  async page(first) {
    writePage("q", "");
    writePage("site", "");
    writePage("from", first ? String(first) : "");
    this.query.value = "";
    await this.shown(async () => {
      /** @type {import("./api.js").StoreTexts} */
      const { total, texts } = await read(
        `/api/stores/${this.store.name}/texts?first=${first}&count=${PAGE}`,
      );
      const turn = (
        /** @type {string} */ label,
        /** @type {string} */ hint,
        /** @type {number} */ to,
      ) => {
        const control = button(label, hint, () => void this.page(to));
        control.disabled = to < 0 || to >= total;
        control.setAttribute("aria-label", hint);
        return control;
      };
      const range = texts.length
        ? `Texts ${number(first)} to ${number(first + texts.length - 1)} of ${number(total)}`
        : "No texts here";
      return [
        element("div", { class: "turn" }, [
          element("h3", {}, [range]),
          turn("‹", "Earlier texts", Math.max(first - PAGE, first ? 0 : -1)),
          turn("›", "Later texts", first + PAGE),
        ]),
        this.items(
          texts.map((text) => ({
            number: text.number,
            words: text.text + (text.cut ? " …" : ""),
            aside: count(text.tokens, "token"),
          })),
        ),
      ];
    });
  }

  /** The texts nearest to the query. */
  async search() {
    if (!this.query.value.trim()) {
      await this.page(0);
      return this.list.prepend(paragraph("Type a text to search for: all texts are shown.", true));
    }
    writePage("q", this.query.value);
    writePage("site", this.site.value);
    const question = { store: this.store.name, query: this.query.value, site: this.site.value };
    return this.shown(async () => {
      const result = await this.asker.ask("store", {
        analysis: "store",
        model: { name: this.model.get() },
        arguments: question,
      });
      if (!result) return null;
      const rows = result.nearest.map((hit) => ({
        number: hit.text,
        words: hit.string,
        aside: `cosine ${hit.score.toFixed(3)}`,
      }));
      return [
        element("div", { class: "turn" }, [
          element("h3", {}, [`Nearest at ${this.site.value}`]),
          saveMenu(result, () => ({ view: "", measure: "" })),
        ]),
        this.items(rows),
        button("Show all texts", "Leave the search", () => void this.page(0)),
      ];
    });
  }

  /**
   * Put what comes into the list; where it does not come, say why.
   * @param {() => Promise<(Node | string)[] | null>} source
   */
  async shown(source) {
    this.list.classList.add("stale");
    try {
      const pieces = await source();
      if (pieces) this.list.replaceChildren(...pieces);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.list.replaceChildren(
        paragraph(error.message),
        button("Show all texts", "Leave the search", () => void this.page(0)),
      );
    } finally {
      this.list.classList.remove("stale");
    }
    this.mark();
  }

  /** @param {{number: number, words: string, aside: string}[]} rows */
  items(rows) {
    return element(
      "ol",
      {},
      rows.map((row) => {
        const item = element("button", { type: "button", "data-text": String(row.number) }, [
          element("small", {}, [`text ${number(row.number)}`, element("span", {}, [row.aside])]),
          element("bdi", {}, [shownText(row.words, 160) || "(the text was not kept)"]),
        ]);
        item.addEventListener("click", () => this.choose(row.number, ""));
        return element("li", {}, [item]);
      }),
    );
  }

  /**
   * @param {number} number
   * @param {string} cell as the address has it, or none
   */
  choose(number, cell) {
    writePage("text", String(number));
    writePage("0.pin", cell);
    this.mark();
    void this.text.open(number);
  }

  /** Mark the text that is open. */
  mark() {
    for (const item of this.list.querySelectorAll("button[data-text]")) {
      if (item.getAttribute("data-text") === readPage("text"))
        item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
    }
  }
}

/** @param {StoreAnswer} store */
function facts(store) {
  const { sites } = store;
  const named =
    sites.length > 1 ? `${sites[0]} to ${sites[sites.length - 1]}` : (sites[0] ?? "none");
  const pairs = /** @type {[string, string][]} */ ([
    ["Model", shownText(store.model, 80)],
    ["Sites", `${sites.length}: ${named}`],
    ["Hidden size", number(store.width)],
    ["Dtype", store.dtype],
    ["Texts", number(store.texts)],
    ["Tokens", number(store.tokens)],
    ["On disk", size(store.bytes)],
    ...(store.complete ? [] : [["State", "not complete: more units are to come"]]),
  ]);
  return element(
    "dl",
    { class: "facts" },
    pairs.map(([name, value]) =>
      element("div", {}, [element("dt", {}, [name]), element("dd", {}, [value])]),
    ),
  );
}

/**
 * @param {string} label
 * @param {HTMLElement} input
 */
function field(label, input) {
  return element("label", { class: "field" }, [element("span", {}, [label]), input]);
}

/** @param {number} value */
function number(value) {
  return value.toLocaleString("en");
}

/**
 * @param {number} many
 * @param {string} what
 */
function count(many, what) {
  return `${number(many)} ${what}${many === 1 ? "" : "s"}`;
}

/** @param {number} bytes */
function size(bytes) {
  return bytes < 1e6
    ? `${number(Math.ceil(bytes / 1e3))} kB`
    : `${number(Math.round(bytes / 1e5) / 10)} MB`;
}
