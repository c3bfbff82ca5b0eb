/** The same question to a second model, whose grid stands beside the first. */

import { element } from "../../views/static/elements.js";
import { Refused } from "./api.js";
import { ChoosingGrid } from "./choosing.js";
import { Columns } from "./columns.js";
import { remembered, said, saveMenu, viewsOf } from "./result.js";

const PLACE = 9; // its view in the address: those below the first grid count from 1

export class Beside {
  /**
   * @param {import("./asking.js").Asker} asker
   * @param {(columns: Columns, cell: {site: string, column: number}, model: string) => void} open read a state of the second model
   */
  constructor(asker, open) {
    this.asker = asker;
    this.open = open;
    this.turn = 0;
    this.root = element("div", { class: "views beside", hidden: "" });
  }

  clear() {
    this.turn += 1;
    this.asker.cancel("beside");
    this.root.hidden = true;
    this.root.replaceChildren();
  }

  /**
   * @param {string} model none: nothing stands beside the first grid
   * @param {import("./api.js").Asked} asked the question to the first model
   */
  async paint(model, asked) {
    if (!model) return this.clear();
    const turn = ++this.turn;
    this.root.hidden = false;
    this.root.classList.add("stale");
    try {
      const result = await this.asker.ask("beside", { ...asked, model: { name: model } });
      const views = result ? await viewsOf(result.id) : [];
      if (turn !== this.turn) return undefined;
      if (result) this.show(result, views, model);
      else this.root.replaceChildren(said("Cancelled.", true));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn === this.turn) this.root.replaceChildren(said(`The second model: ${error.message}`));
    } finally {
      if (turn === this.turn) this.root.classList.remove("stale");
    }
    return undefined;
  }

  /**
   * @param {import("./api.js").ResultAnswer} result
   * @param {import("./result.js").View[]} views
   * @param {string} model
   */
  show(result, views, model) {
    const place = views.findIndex((view) => view.kind === "Grid");
    const view = views[place];
    if (!view || view.kind !== "Grid") return;
    const root = element("section", { "data-view": String(PLACE), class: "grid" });
    const name = result.views[place]?.name ?? "";
    this.root.replaceChildren(root, element("div", { class: "acts" }, [saveMenu(result, () => ({ view: name, measure: "" }))]));
    const columns = new Columns(result, view.tokens.length);
    const grid = new ChoosingGrid(root, view, (pin) => {
      if (pin >= 0) this.open(columns, { site: view.sites[Math.floor(pin / view.tokens.length)], column: pin % view.tokens.length }, model);
    }, PLACE);
    remembered(root, grid);
  }
}
