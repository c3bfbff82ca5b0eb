/** The same question to a second model, whose grid stands beside the first. */

import { element } from "../../views/static/elements.js";
import { Refused } from "./api.js";
import { ChoosingGrid } from "./choosing.js";
import { Columns } from "./columns.js";
import { remembered, paragraph, saveMenu, viewsOf } from "./result.js";

const PLACE = 9; // its view in the address: those below the first grid count from 1

export class Beside {
  /**
   * @param {import("./asking.js").Asker} asker
   * @param {(columns: Columns, cell: {site: string, column: number}, model: string) => void} open
   *   read a state of the second model
   */
  constructor(asker, open) {
    this.asker = asker;
    this.open = open;
    this.turn = 0;
    this.root = element("div", { class: "views beside", hidden: "" });
    /** @type {ChoosingGrid | null} */
    this.grid = null;
    /** @type {ChoosingGrid | null} the grid of the first model */
    this.first = null;
    this.heights = new ResizeObserver(() => this.align());
  }

  /** @param {ChoosingGrid} first the grid that this one stands beside */
  follow(first) {
    this.first = first;
    this.mirror();
  }

  /** Pin in the second grid what is pinned in the first. */
  mirror() {
    if (this.first && this.grid) this.grid.mirror(sameCell(this.first, this.grid));
  }

  /** The rows of both begin at one height: what stands above them may be higher in one. */
  align() {
    const pair = [this.first, this.grid].filter((grid) => grid?.figure.root.isConnected);
    const stages = pair.map((grid) => /** @type {ChoosingGrid} */ (grid).figure.stage);
    for (const stage of stages) stage.style.marginTop = "";
    if (stages.length < 2) return;
    const tops = stages.map((stage) => stage.closest("section")?.getBoundingClientRect().top);
    if (tops[0] !== tops[1]) return; // one stands below the other
    const rows = pair.map((grid) => grid?.frame?.getBoundingClientRect().top ?? 0);
    const lowest = Math.max(...rows);
    stages.forEach((stage, i) => {
      stage.style.marginTop = `${lowest - rows[i]}px`;
    });
  }

  clear() {
    this.turn += 1;
    this.asker.cancel("beside");
    this.root.hidden = true;
    this.root.replaceChildren();
    this.grid = null;
    this.align();
  }

  /**
   * @param {string} model none: nothing stands beside the first grid
   * @param {import("./api.js").Asked} question the question to the first model
   */
  async paint(model, question) {
    if (!model) return this.clear();
    const turn = ++this.turn;
    this.root.hidden = false;
    this.root.classList.add("stale");
    try {
      const result = await this.asker.ask("beside", { ...question, model: { name: model } });
      const views = result ? await viewsOf(result.id) : [];
      if (turn !== this.turn) return undefined;
      if (result) this.show(result, views, model);
      else this.root.replaceChildren(paragraph("Cancelled.", true));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn === this.turn)
        this.root.replaceChildren(paragraph(`The second model: ${error.message}`));
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
    this.root.replaceChildren(
      root,
      element("div", { class: "acts" }, [saveMenu(result, () => ({ view: name, measure: "" }))]),
    );
    const columns = new Columns(result, view.tokens.length);
    const grid = new ChoosingGrid(
      root,
      view,
      (pin) => {
        this.first?.mirror(sameCell(grid, this.first));
        const count = view.tokens.length;
        const cell = { site: view.sites[Math.floor(pin / count)], column: pin % count };
        if (pin >= 0) this.open(columns, cell, model);
        else this.first?.hold(-1);
      },
      PLACE,
    );
    this.grid = remembered(root, grid);
    this.mirror();
    this.heights.disconnect();
    for (const { figure, axis } of [grid, this.first].filter((view) => view !== null)) {
      for (const part of [figure.heading, figure.controls, figure.readout, axis.root]) {
        this.heights.observe(part);
      }
    }
  }
}

/**
 * The cell of one grid in another: of the same site, and of the same token, counted among its
 * equals; or -1.
 * @param {ChoosingGrid} from
 * @param {ChoosingGrid} to
 */
function sameCell({ pin, grid: from }, { grid: to }) {
  if (pin < 0) return -1;
  const column = pin % from.tokens.length;
  const token = from.tokens[column];
  const row = to.sites.indexOf(from.sites[Math.floor(pin / from.tokens.length)]);
  const before = from.tokens.slice(0, column).filter((string) => string === token).length;
  const equal = to.tokens.flatMap((string, place) => (string === token ? [place] : []));
  return row < 0 || equal[before] === undefined ? -1 : row * to.tokens.length + equal[before];
}
