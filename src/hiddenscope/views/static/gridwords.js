/** What a grid says in words: its read-out, its rows for CSV and table, and how its keys work. */

import { largest, targetsOf, sourcesOf } from "./influence.js";
import { formatNumber } from "./numbers.js";
import { quoted, shownText, shownToken } from "./text.js";

/**
 * @typedef {import("./payload.js").Grid} Grid
 * @typedef {string | {strong: string}} Piece
 */

/** @param {Grid} grid */
export function gridHelp(grid) {
  const map = grid.measures.some((measure) => measure.influence);
  const shows = map ? " The cell's view of the others is painted." : "";
  return `Arrow keys move a cell cursor, Enter pins a cell, Escape unpins.${shows}`;
}

/**
 * @param {Grid} grid
 * @param {number} shown which measure
 * @param {number} cursor
 * @param {number} pin
 * @returns {Piece[]}
 */
export function gridReadout(grid, shown, cursor, pin) {
  const measure = grid.measures[shown];
  const cell = cursor >= 0 ? cursor : pin;
  if (cell < 0) return [measure.influence ? "Point at a cell to see which states influence it, and which it influences." : "Point at a cell, or use the arrow keys."];
  const value = measure.values.data[cell];
  const number = Number.isNaN(value) ? "no value" : `${formatNumber(value)}${measure.unit ? ` ${shownText(measure.unit, 40)}` : ""}`;
  const pieces = [...placeOfCell(grid, cell), `  ${shownText(measure.name, 60)} `, { strong: number }];
  if (pin >= 0 && cell === pin) pieces.push("  (pinned)");
  if (measure.influence) pieces.push(...influenceWords(grid, measure, cell, pin));
  return [...pieces, ...topWords(grid, cell)];
}

/**
 * @param {Grid} grid
 * @param {number} cell
 * @returns {Piece[]}
 */
function placeOfCell(grid, cell) {
  const column = cell % grid.tokens.length;
  const site = grid.sites[Math.floor(cell / grid.tokens.length)];
  const against = grid.second.length ? [" against ", { strong: quoted(grid.second[column]) }] : [];
  const text = grid.text_of.length ? `, text ${grid.text_of[column] + 1}` : "";
  return [{ strong: site }, "  ", { strong: quoted(grid.tokens[column]) }, ...against, ` token ${column}${text}`];
}

/**
 * @param {Grid} grid
 * @param {import("./payload.js").Measure} measure
 * @param {number} cell
 * @param {number} pin
 * @returns {Piece[]}
 */
function influenceWords(grid, measure, cell, pin) {
  const map = /** @type {Float32Array} */ (measure.influence?.data);
  const count = grid.sites.length * grid.tokens.length;
  if (pin >= 0 && cell !== pin) {
    const [moves, moved] = [formatNumber(map[pin * count + cell]), formatNumber(map[cell * count + pin])];
    return ["; moves the pinned cell by ", { strong: moves }, ", is moved by it by ", { strong: moved }];
  }
  const [sources, targets] = [sourcesOf(map, cell, count), targetsOf(map, cell, count)];
  return [...farthest(grid, "; influenced most by ", sources), ...farthest(grid, "; influences most ", targets)];
}

/**
 * @param {Grid} grid
 * @param {string} lead
 * @param {Float32Array} values
 * @returns {Piece[]}
 */
function farthest(grid, lead, values) {
  const best = largest(values);
  if (best < 0) return [];
  const token = quoted(grid.tokens[best % grid.tokens.length]);
  return [lead, { strong: `${grid.sites[Math.floor(best / grid.tokens.length)]} ${token}` }, ` (${formatNumber(values[best])})`];
}

/**
 * @param {Grid} grid
 * @param {number} cell
 * @returns {Piece[]}
 */
function topWords(grid, cell) {
  if (!grid.words) return [];
  const { words, chosen, probabilities } = grid.words;
  const ranks = chosen.shape[2];
  /** @type {Piece[]} */
  const pieces = [];
  for (let rank = 0; rank < ranks; rank++) {
    const word = chosen.data[cell * ranks + rank];
    if (word < 0) continue;
    const share = probabilities ? ` ${formatNumber(probabilities.data[cell * ranks + rank])}` : "";
    pieces.push(rank ? ", " : "  says ", { strong: shownToken(words[word], 40) }, share);
  }
  return pieces;
}

/**
 * One row a cell, the top layer first as it is drawn.
 * @param {Grid} grid
 * @param {number} pin
 * @returns {Generator<import("./export.js").Cell[]>}
 */
export function* gridRows(grid, pin) {
  const columns = grid.tokens.length, count = columns * grid.sites.length;
  const mapped = pin < 0 ? [] : grid.measures.filter((measure) => measure.influence);
  const maps = mapped.map((measure) => /** @type {Float32Array} */ (measure.influence?.data));
  const ranks = grid.words ? grid.words.chosen.shape[2] : 0;
  const named = (/** @type {import("./payload.js").Measure} */ measure) => (measure.unit ? `${measure.name} (${measure.unit})` : measure.name);
  yield [
    "site", "position", "token", ...(grid.second.length ? ["second"] : []), ...(grid.text_of.length ? ["text"] : []),
    ...grid.measures.map(named), ...mapped.flatMap((measure) => [`${measure.name}: on the pinned cell`, `${measure.name}: of the pinned cell`]),
    ...Array.from({ length: ranks }, (_, rank) => [`word ${rank + 1}`, `probability ${rank + 1}`]).flat(),
  ];
  for (let row = grid.sites.length - 1; row >= 0; row--) {
    for (let column = 0; column < columns; column++) {
      const cell = row * columns + column;
      yield [
        grid.sites[row], column, grid.tokens[column], ...(grid.second.length ? [grid.second[column]] : []),
        ...(grid.text_of.length ? [grid.text_of[column]] : []), ...grid.measures.map((measure) => exact(measure.values.data[cell])),
        ...maps.flatMap((map) => [exact(map[pin * count + cell]), exact(map[cell * count + pin])]), ...wordCells(grid, cell, ranks),
      ];
    }
  }
}

/**
 * @param {Grid} grid
 * @param {number} cell
 * @param {number} ranks
 */
function wordCells(grid, cell, ranks) {
  return Array.from({ length: ranks }, (_, rank) => {
    const at = cell * ranks + rank;
    const word = grid.words?.chosen.data[at] ?? -1;
    return [word < 0 ? null : (grid.words?.words[word] ?? null), exact(grid.words?.probabilities?.data[at] ?? NaN)];
  }).flat();
}

/**
 * The shortest number that is the same float32.
 * @param {number} value
 */
export function exact(value) {
  for (let digits = 6; digits < 9; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return short;
  }
  return value;
}
