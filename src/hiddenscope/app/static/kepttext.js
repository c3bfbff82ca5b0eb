/**
 * One text of kept states: its tokens, the norm of each of its states, and the nearest states to
 * the one that is chosen.
 */

import { element } from "../../views/static/elements.js";
import { shownToken } from "../../views/static/text.js";
import { Refused } from "./api.js";
import { ChoosingGrid } from "./choosing.js";
import { heldCell } from "./place.js";
import { remembered, paragraph, saveMenu, viewsOf } from "./result.js";

const MOST_TOKENS = 400; // shown above the grid, which has them all
const NEAREST = 12;

export class KeptText {
  /**
   * @param {import("./api.js").StoreAnswer} store
   * @param {import("./asking.js").Asker} asker
   * @param {(text: number, cell: string) => void} choose open another text, at a cell
   */
  constructor(store, asker, choose) {
    this.store = store;
    this.asker = asker;
    this.choose = choose;
    this.number = -1;
    /** @type {ChoosingGrid | null} */
    this.grid = null;
    this.root = element("section", { class: "kept views", "aria-label": "The chosen text" });
    this.aside = element("aside", { class: "state", "aria-label": "The chosen state" });
  }

  /** No text is chosen. */
  empty() {
    this.root.replaceChildren(
      paragraph(
        "Choose a text: you see its tokens, and how large each of its states is at every kept " +
          "site.",
        true,
      ),
    );
    this.noCell();
  }

  noCell() {
    this.aside.replaceChildren(
      element("h2", {}, ["Nearest states"]),
      element("p", {}, [
        "Choose a cell of the grid, or a token, to see which states at its site, over all " +
          "texts, have the highest cosine with it.",
      ]),
    );
  }

  /** @param {number} number of the text */
  async open(number) {
    this.number = number;
    this.asker.cancel("nearest");
    this.root.classList.add("stale");
    try {
      const result = await this.asker.ask("kept", {
        analysis: "kept",
        arguments: { store: this.store.name, text: number },
      });
      const views = result ? await viewsOf(result.id) : [];
      if (result && number === this.number) await this.show(result, views);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.root.replaceChildren(paragraph(error.message));
      this.noCell();
    } finally {
      this.root.classList.remove("stale");
    }
  }

  /**
   * @param {import("./api.js").ResultAnswer} result
   * @param {import("./result.js").View[]} views
   */
  async show(result, views) {
    const view = views.find((candidate) => candidate.kind === "Grid");
    if (!view || view.kind !== "Grid") return;
    const place = element("section", { "data-view": "0", class: "grid" });
    const last = view.sites[view.sites.length - 1];
    const tokens = view.tokens.slice(0, MOST_TOKENS).map((token, i) => {
      const chip = element(
        "button",
        { type: "button", class: "token", title: `token ${i}, counted from 0` },
        [element("bdi", {}, [shownToken(token, 40)])],
      );
      chip.addEventListener("click", () => this.pin(last, i));
      return chip;
    });
    const rest = view.tokens.length - tokens.length;
    const menu = saveMenu(result, () => ({ view: result.views[0]?.name ?? "", measure: "" }));
    this.root.replaceChildren(
      element("div", { class: "turn" }, [
        element("h3", {}, [`Text ${this.number.toLocaleString("en")}`]),
        menu,
      ]),
      element("p", { class: "tokens" }, [
        ...tokens,
        ...(rest > 0 ? [` and ${rest.toLocaleString("en")} more`] : []),
      ]),
      place,
    );
    const cell = heldCell();
    this.grid = remembered(place, new ChoosingGrid(place, view, (cell) => this.chosen(cell)));
    if (cell && view.sites.includes(cell.site) && cell.column in view.tokens)
      await this.near(cell.site, cell.column);
    else this.noCell();
    if (cell && this.grid.pin < 0)
      this.aside.append(
        paragraph(`This text has no state ${cell.site.slice(0, 40)} at token ${cell.column}.`),
      );
  }

  /**
   * @param {string} site
   * @param {number} token
   */
  pin(site, token) {
    if (!this.grid) return;
    const { sites, tokens } = this.grid.grid;
    const cell = sites.indexOf(site) * tokens.length + token;
    if (cell !== this.grid.pin) this.grid.hold(cell);
    this.grid.reveal(cell);
  }

  /** @param {number} pin */
  chosen(pin) {
    if (!this.grid || pin < 0) {
      this.asker.cancel("nearest");
      return this.noCell();
    }
    const { sites, tokens } = this.grid.grid;
    return void this.near(sites[Math.floor(pin / tokens.length)], pin % tokens.length);
  }

  /**
   * The states at one site, over all texts, that have the highest cosine with the chosen one.
   * @param {string} site
   * @param {number} token
   */
  async near(site, token) {
    this.aside.classList.add("stale");
    try {
      const question = { store: this.store.name, text: this.number, site, token, k: NEAREST };
      const result = await this.asker.ask("nearest", { analysis: "nearest", arguments: question });
      if (result) this.aside.replaceChildren(...this.listed(result, site, token));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.aside.replaceChildren(element("h2", {}, ["Nearest states"]), paragraph(error.message));
    } finally {
      this.aside.classList.remove("stale");
    }
  }

  /**
   * @param {import("./api.js").ResultAnswer} result
   * @param {string} site
   * @param {number} token
   */
  listed(result, site, token) {
    const string = this.grid?.grid.tokens[token] ?? "";
    const items = result.nearest.map((state) => {
      const go = element("button", { type: "button", class: "plain" }, [
        element("bdi", {}, [shownToken(state.string, 24)]),
        `text ${state.text.toLocaleString("en")}, token ${state.token}`,
      ]);
      go.addEventListener("click", () => this.choose(state.text, `${site}~${state.token}`));
      return element("li", {}, [go, element("span", {}, [state.score.toFixed(3)])]);
    });
    return [
      element("h2", {}, [`${site}, “`, element("bdi", {}, [shownToken(string, 40)]), "”"]),
      element("h3", {}, ["Nearest states at this site, over all texts, by cosine"]),
      element("ul", { class: "words near" }, items),
      element("p", { class: "quiet" }, ["Tokens are counted from 0."]),
      element("div", { class: "acts" }, [saveMenu(result, () => ({ view: "", measure: "" }))]),
    ];
  }
}
