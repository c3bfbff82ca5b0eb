/**
 * Where things lie in a grid, in CSS pixels.
 *
 * @typedef {{left: number, top: number, bottom: number, right: number, wide: number, high: number,
 *   rows: number, columns: number, turned: boolean, width: number, height: number, sites: string[],
 *   tokens: string[], second: string[], names: string[], strip: number, bars: number, barWide:
 *   number}} Layout where `names` are those of the two rows of tokens, `strip` is the height of the
 *   tokens that stay above a tall grid, or 0, and the last `bars` columns are `barWide`
 */

import { fitted, widthOf } from "./canvas.js";
import { lettering } from "./pen.js";
import { shownText, shownToken } from "./text.js";

export const SIZES = { site: 12, token: 12, word: 11.5, mark: 15, name: 11 };
const LONGEST_NAME = 110; // of a row of tokens, in pixels
const LONGEST_TOKEN = 18;
const NARROWEST_WORD = 46; // five letters or so; the read-out has the whole word
// How wide a column of bars is, and from where on it may be that wide.
const BAR = { wide: 150, narrow: 46, roomy: 640 };
// From there on the tokens below a grid are out of sight when its top is looked at.
const TALL = 380;

/**
 * @param {import("./payload.js").Grid} grid
 * @param {number} room the width there is
 * @param {string} font
 * @param {boolean} [scrolled] whether it is on a screen, and not in a picture that shows the whole
 * @returns {Layout}
 */
export function layoutOf(grid, room, font, scrolled = true) {
  const { sites } = grid;
  const [tokens, second] = [grid.tokens, grid.second].map((row) =>
    row.map((token) => shownToken(token, LONGEST_TOKEN)),
  );
  const widest = (/** @type {string[]} */ texts, /** @type {number} */ size) =>
    texts.reduce((most, text) => Math.max(most, widthOf(text, lettering(font, { size }))), 0);
  const naming = lettering(font, { size: SIZES.name });
  const names = rowNames(grid).map((name) => fitted(name, naming, LONGEST_NAME));
  const left = Math.ceil(Math.max(widest(sites, SIZES.site), widest(names, SIZES.name))) + 14;
  const label = Math.ceil(widest([...tokens, ...second], SIZES.token));
  const high = cellHeight(grid);
  const above = high * sites.length > TALL;
  const bars = grid.bars ?? 0; // a page that was packed before grids had bars has none
  const cells = tokens.length - bars;
  const barWide = room < BAR.roomy ? BAR.narrow : BAR.wide;
  const wideOf = (/** @type {number} */ right) =>
    cellWidth(grid, (room - left - right - bars * barWide) / cells, label);
  const leaning = Math.max(10, Math.ceil(0.72 * label)); // of labels that lean over the last column
  const turned = label > wideOf(10) - 6;
  const right = turned && (second.length || above) ? leaning : 10;
  const wide = wideOf(right);
  const tall = turned ? Math.ceil(0.72 * label) + 18 : 26;
  const lines = second.length ? 2 : 1;
  const strip = above && scrolled ? tall * lines : 0;
  const [top, bottom] = [second.length && !strip ? tall : 6, tall];
  const width = left + wide * cells + barWide * bars + right;
  const height = top + high * sites.length + bottom;
  return {
    left,
    top,
    bottom,
    right,
    wide,
    high,
    rows: sites.length,
    columns: tokens.length,
    turned,
    width,
    height,
    sites,
    tokens,
    second,
    names,
    strip,
    bars,
    barWide,
  };
}

/**
 * What the two rows of tokens are, the upper one first; nothing where there is one row.
 * @param {import("./payload.js").Grid} grid
 */
function rowNames(grid) {
  if (!grid.second.length) return [];
  const named = grid.token_rows ?? []; // a page that was packed before rows had names has none
  return ["first", "second"].map((name, row) => shownText(named[row] ?? name, 40));
}

/**
 * As wide as fits, within reason; labels that nearly fit get the room they need.
 * @param {import("./payload.js").Grid} grid
 * @param {number} share
 * @param {number} label
 */
function cellWidth(grid, share, label) {
  if (grid.words) return Math.floor(Math.min(136, Math.max(NARROWEST_WORD, share)));
  const [least, most] = [18, 136];
  const fitting = label + 8 <= most && label + 8 <= share * 1.02 ? label + 8 : least;
  return Math.floor(Math.min(most, Math.max(least, fitting, share)));
}

/** @param {import("./payload.js").Grid} grid */
function cellHeight(grid) {
  if (grid.words) return 23;
  if (grid.sites.length <= 14) return 26;
  return grid.sites.length <= 48 ? 18 : 14;
}

/**
 * Where a column begins.
 * @param {Layout} layout
 * @param {number} column
 */
export function edgeOf(layout, column) {
  const cells = layout.columns - layout.bars;
  return (
    layout.left +
    Math.min(column, cells) * layout.wide +
    Math.max(0, column - cells) * layout.barWide
  );
}

/**
 * How wide a column is: one of bars is wider than the others.
 * @param {Layout} layout
 * @param {number} column
 */
export function widthAt(layout, column) {
  return column < layout.columns - layout.bars ? layout.wide : layout.barWide;
}

/**
 * The top left corner of a cell; `layer.0` is at the bottom.
 * @param {Layout} layout
 * @param {number} cell
 */
export function cornerOf(layout, cell) {
  const row = Math.floor(cell / layout.columns);
  return [
    edgeOf(layout, cell % layout.columns),
    layout.top + (layout.rows - 1 - row) * layout.high,
  ];
}

/**
 * The cell at a place, or -1.
 * @param {Layout} layout
 * @param {number} x
 * @param {number} y
 */
export function cellAt(layout, x, y) {
  const cells = layout.columns - layout.bars;
  const beyond = x - edgeOf(layout, cells);
  const column =
    layout.bars && beyond >= 0
      ? cells + Math.floor(beyond / layout.barWide)
      : Math.floor((x - layout.left) / layout.wide);
  const row = layout.rows - 1 - Math.floor((y - layout.top) / layout.high);
  const inside = column >= 0 && column < layout.columns && row >= 0 && row < layout.rows;
  return inside ? row * layout.columns + column : -1;
}
