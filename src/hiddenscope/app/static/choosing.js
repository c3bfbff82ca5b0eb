/** A grid whose cells are chosen: by a click, or with the arrow keys and Enter. */

import { GridView } from "../../views/static/grid.js";

/** The page hears which cell is pinned, or -1. */
export class ChoosingGrid extends GridView {
  /**
   * @param {HTMLElement} root
   * @param {import("../../views/static/payload.js").Grid} grid
   * @param {(cell: number) => void} choose
   * @param {number} [place] which view of the page it is
   */
  constructor(root, grid, choose, place = 0) {
    super(root, grid, place);
    this.chosen = choose;
  }

  /** @param {number} cell */
  hold(cell) {
    super.hold(cell);
    this.chosen?.(this.pin);
  }

  /**
   * Pin the cell that is chosen in another grid; nobody is told.
   * @param {number} cell or -1
   */
  mirror(cell) {
    if (cell !== this.pin) super.hold(cell);
  }
}
