/**
 * Where things lie in a picture of heads, in CSS pixels.
 *
 * @typedef {{left: number, top: number, side: number, rows: number, columns: number, width: number,
 *   height: number, sites: string[]}} Small the small multiples
 * @typedef {{left: number, top: number, cell: number, rows: number, columns: number, width: number,
 *   height: number, queries: string[], keys: string[], turned: boolean}} Large one head
 */

import { fitted, widthOf } from "./canvas.js";
import { lettering } from "./pen.js";
import { shownText, shownToken } from "./text.js";

export const HEAD_SIZES = { site: 11, token: 12 };
const SIDES = { least: 7, most: 40 };
const CELLS = { least: 4, most: 36 };
const LONGEST_LABELS = { site: 150, label: 110, token: 18 };

/**
 * @param {import("./payload.js").Patterns} heads
 * @param {number} room
 * @param {number} tallest how high all pictures may be together
 * @param {string} font
 * @returns {Small}
 */
export function smallLayout(heads, room, tallest, font) {
  const naming = lettering(font, { size: HEAD_SIZES.site });
  const sites = heads.sites.map((site) => fitted(shownText(site, 60), naming, LONGEST_LABELS.site));
  const left = Math.ceil(Math.max(...sites.map((site) => widthOf(site, naming)))) + 8;
  const [rows, columns] = [heads.sites.length, heads.heads.length];
  const fitting = Math.min((room - left - 4) / columns, tallest / rows);
  const side = Math.floor(4 * Math.min(SIDES.most, Math.max(SIDES.least, fitting))) / 4;
  return {
    left,
    top: 4,
    side,
    rows,
    columns,
    width: left + columns * side + 4,
    height: 4 + rows * side + 34,
    sites,
  };
}

/**
 * The head at a place, or -1; the first layer is at the bottom.
 * @param {Small} layout
 * @param {number} x
 * @param {number} y
 */
export function headUnder(layout, x, y) {
  const column = Math.floor((x - layout.left) / layout.side);
  const row = layout.rows - 1 - Math.floor((y - layout.top) / layout.side);
  const inside = column >= 0 && column < layout.columns && row >= 0 && row < layout.rows;
  return inside ? row * layout.columns + column : -1;
}

/**
 * The top left corner of a small picture.
 * @param {Small} layout
 * @param {number} at
 */
export function cornerOfHead(layout, at) {
  const row = Math.floor(at / layout.columns);
  return [
    layout.left + (at % layout.columns) * layout.side,
    layout.top + (layout.rows - 1 - row) * layout.side,
  ];
}

/**
 * @param {import("./payload.js").Patterns} heads
 * @param {number} room
 * @param {string} font
 * @returns {Large}
 */
export function largeLayout(heads, room, font) {
  const naming = lettering(font, { size: HEAD_SIZES.token });
  const longest = Math.min(LONGEST_LABELS.label, room / 4);
  const shown = (/** @type {string} */ token) =>
    fitted(shownToken(token, LONGEST_LABELS.token), naming, longest);
  const [queries, keys] = [heads.queries.map(shown), heads.keys.map(shown)];
  const widest = (/** @type {string[]} */ tokens) =>
    Math.ceil(tokens.reduce((most, token) => Math.max(most, widthOf(token, naming)), 0));
  const left = widest(queries) + 10;
  const [rows, columns, label] = [queries.length, keys.length, widest(keys)];
  const turned = label + 6 > Math.min(CELLS.most, (room - left) / columns);
  const leaning = turned ? Math.ceil(0.72 * label) : 4;
  const fitting = (room - left - leaning) / columns;
  const cell = Math.min(CELLS.most, Math.max(CELLS.least, fitting));
  const top = turned ? leaning + 22 : 22;
  return {
    left,
    top,
    cell,
    rows,
    columns,
    width: left + columns * cell + leaning,
    height: top + rows * cell + 4,
    queries,
    keys,
    turned,
  };
}

/**
 * The query and the key at a place: beside the picture only one of them; -1 is none.
 * @param {Large} layout
 * @param {number} x
 * @param {number} y
 */
export function pairUnder(layout, x, y) {
  const key = Math.floor((x - layout.left) / layout.cell);
  const query = Math.floor((y - layout.top) / layout.cell);
  return {
    query: query >= 0 && query < layout.rows ? query : -1,
    key: key >= 0 && key < layout.columns ? key : -1,
  };
}
