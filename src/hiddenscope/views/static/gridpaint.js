/**
 * Painting a grid with a pen: labels, cells, words, the cursor. `shift` is how far it is scrolled.
 */

import { fitted } from "./canvas.js";
import { inkOn } from "./colour.js";
import { cornerOf, edgeOf, SIZES, widthAt } from "./gridlayout.js";
import { lettering } from "./pen.js";
import { shownToken } from "./text.js";

/**
 * @typedef {{shift: number, first: number, last: number}} Window
 * @typedef {import("./gridlayout.js").Layout} Layout
 * @typedef {import("./theme.js").Theme} Theme
 * @typedef {import("./pen.js").Pen} Pen
 */

const LETTERS = { size: SIZES.word };
// A full stop of the size of words can hardly be seen.
const SIGN = { size: SIZES.mark, bold: true };

/**
 * The columns that can be seen.
 * @param {Layout} layout
 * @param {number} shift
 * @param {number} width
 * @returns {Window}
 */
export function windowOf(layout, shift, width) {
  const first = Math.min(
    layout.columns - layout.bars,
    Math.max(0, Math.floor(shift / layout.wide)),
  );
  if (layout.bars) return { shift, first, last: layout.columns };
  const last = Math.min(layout.columns, Math.ceil((shift + width - layout.left) / layout.wide));
  return { shift, first, last };
}

/**
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {Theme} theme
 */
export function paintTokens(pen, layout, visible, theme) {
  for (let column = visible.first; column < visible.last; column++)
    tokenLabel(pen, layout, visible, column, theme.ink);
}

/**
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {number} column
 * @param {string} fill
 */
export function tokenLabel(pen, layout, visible, column, fill) {
  const x = edgeOf(layout, column) + widthAt(layout, column) / 2 - visible.shift;
  if (x < layout.left) return;
  const below = layout.top + layout.rows * layout.high;
  const turn = layout.turned ? -45 : 0;
  const [away, down] = layout.turned ? [4, 9] : [0, 15];
  const how = { fill, size: SIZES.token, turn };
  const two = layout.second.length > 0;
  const lower = two ? layout.second : layout.tokens;
  pen.text(lower[column], x + away, below + down, { ...how, anchor: turn ? "end" : "middle" });
  if (!two || layout.strip) return;
  pen.text(layout.tokens[column], x - away / 2, layout.top - down + 1, {
    ...how,
    anchor: turn ? "start" : "middle",
  });
}

/**
 * The names of two rows of tokens, at the left of each.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Theme} theme
 */
export function paintRowNames(pen, layout, theme) {
  if (!layout.names.length) return;
  const [upper, lower] = layout.names;
  const down = layout.turned ? 9 : 15;
  const how = { fill: theme.muted, size: SIZES.name, anchor: /** @type {const} */ ("end") };
  pen.text(lower, layout.left - 8, layout.top + layout.rows * layout.high + down, how);
  if (!layout.strip) pen.text(upper, layout.left - 8, layout.top - down + 1, how);
}

/**
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Theme} theme
 */
export function paintSites(pen, layout, theme) {
  for (let row = 0; row < layout.rows; row++) siteLabel(pen, layout, row, theme.muted);
}

/**
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {number} row
 * @param {string} fill
 */
export function siteLabel(pen, layout, row, fill) {
  const y = layout.top + (layout.rows - 0.5 - row) * layout.high;
  pen.text(layout.sites[row], layout.left - 8, y, { fill, size: SIZES.site, anchor: "end" });
}

/**
 * A stroke through every cell that has no value.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {Uint8Array} missing
 * @param {Theme} theme
 */
export function paintMissing(pen, layout, visible, missing, theme) {
  for (let cell = 0; cell < missing.length; cell++) {
    const column = cell % layout.columns;
    if (
      !missing[cell] ||
      column < visible.first ||
      column >= Math.min(visible.last, layout.columns - layout.bars)
    )
      continue;
    const [left, y] = cornerOf(layout, cell);
    const x = left - visible.shift;
    const reach = Math.min(layout.wide, layout.high) / 2 - 3;
    const [middle, centre] = [x + layout.wide / 2, y + layout.high / 2];
    pen.line(
      [
        [middle - reach, centre + reach],
        [middle + reach, centre - reach],
      ],
      theme.faint,
      1,
    );
  }
}

/**
 * A small mark in every cell that is exactly zero.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {Uint8Array} zeros
 * @param {Theme} theme
 */
export function paintZeros(pen, layout, visible, zeros, theme) {
  /** @type {[number, number, number, number][]} */
  const marks = [];
  zeros.forEach((zero, cell) => {
    const column = cell % layout.columns;
    if (
      !zero ||
      column < visible.first ||
      column >= Math.min(visible.last, layout.columns - layout.bars)
    )
      return;
    const [x, y] = cornerOf(layout, cell);
    marks.push([
      Math.round(x - visible.shift + layout.wide / 2) - 1,
      Math.round(y + layout.high / 2) - 1,
      2,
      2,
    ]);
  });
  if (marks.length) pen.rects(marks, theme.muted);
}

/**
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {Uint8ClampedArray<ArrayBuffer>} pixels bottom row first
 * @param {Theme} theme
 */
export function paintCells(pen, layout, visible, pixels, theme) {
  const { wide, high, columns, rows } = layout;
  const x = layout.left - visible.shift;
  const last = Math.min(visible.last, columns - layout.bars);
  pen.cells(flipped(pixels, columns), {
    x,
    y: layout.top,
    width: wide,
    height: high,
    columns,
    first: visible.first,
    last,
  });
  if (wide < 14) return;
  const [start, across, up] = [
    x + visible.first * wide,
    (last - visible.first) * wide,
    rows * high,
  ];
  /** @type {[number, number, number, number][]} */
  const gaps = [];
  for (let row = 1; row <= rows; row++) gaps.push([start, layout.top + row * high - 1, across, 1]);
  for (let column = visible.first + 1; column <= last; column++)
    gaps.push([x + column * wide - 1, layout.top, 1, up]);
  pen.rects(gaps, theme.paper);
}

/**
 * The last columns as bars, which begin in the middle of their column where values have signs, and
 * else at its left.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {Float32Array} levels from 0 to 1, as colours have them
 * @param {Uint8ClampedArray} pixels
 * @param {{diverging: boolean, theme: Theme}} how
 */
export function paintBarColumns(pen, layout, visible, levels, pixels, { diverging, theme }) {
  const [edge, tall] = [4, layout.rows * layout.high];
  for (let column = layout.columns - layout.bars; column < layout.columns; column++) {
    const left = edgeOf(layout, column) - visible.shift + edge;
    const room = layout.barWide - 2 * edge;
    const zero = diverging ? left + room / 2 : left;
    for (let row = 0; row < layout.rows; row++) {
      const cell = row * layout.columns + column;
      if (Number.isNaN(levels[cell])) continue;
      const end = left + room * Math.min(1, Math.max(0, levels[cell]));
      const y = cornerOf(layout, cell)[1] + 2;
      const fill = `rgb(${pixels[4 * cell]}, ${pixels[4 * cell + 1]}, ${pixels[4 * cell + 2]})`;
      if (end !== zero)
        pen.rect(Math.min(zero, end), y, Math.abs(end - zero), layout.high - 4, fill);
    }
    pen.rect(zero - 0.5, layout.top, 1, tall, theme.muted);
  }
}

/**
 * @param {Uint8ClampedArray<ArrayBuffer>} pixels
 * @param {number} columns
 */
function flipped(pixels, columns) {
  const out = new Uint8ClampedArray(pixels.length);
  const line = 4 * columns;
  for (let from = 0; from < pixels.length; from += line)
    out.set(pixels.subarray(from, from + line), pixels.length - from - line);
  return out;
}

/**
 * The first word of every cell: large where it is one sign or a space, and in some grids framed
 * from where on the word is that of the top row, and stays so.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {import("./payload.js").Words} words
 * @param {Uint8ClampedArray} pixels
 * @param {Theme} theme
 */
export function paintWords(pen, layout, visible, words, pixels, theme) {
  const ranks = words.chosen.shape[2];
  const settled = settledCells(words, layout);
  for (let cell = 0; cell < layout.rows * layout.columns; cell++) {
    const column = cell % layout.columns;
    const word = words.chosen.data[cell * ranks];
    if (column < visible.first || column >= visible.last || !(word >= 0)) continue;
    const [x, y] = cornerOf(layout, cell);
    const clear = !pixels[4 * cell + 3];
    const fill = clear
      ? theme.ink
      : inkOn(pixels[4 * cell], pixels[4 * cell + 1], pixels[4 * cell + 2]);
    const how = /^\s*[^\p{L}\p{N}\s]?\s*$/u.test(words.words[word]) ? SIGN : LETTERS;
    const shown = shownToken(words.words[word], 30);
    const text = fitted(shown, lettering(theme.font, how), layout.wide - 8);
    const middle = x - visible.shift + layout.wide / 2;
    pen.text(text, middle, y + layout.high / 2, { ...how, fill, anchor: "middle" });
    if (words.framed && cell === settled[column])
      pen.outline(x - visible.shift + 1.5, y + 1.5, layout.wide - 4, layout.high - 4, fill, 1.5);
  }
}

/**
 * In each column, the cell from which on all say what the top one says; -1 where that is the top
 * one alone.
 * @param {import("./payload.js").Words} words
 * @param {Layout} layout
 */
function settledCells(words, layout) {
  const [ranks, top] = [words.chosen.shape[2], (layout.rows - 1) * layout.columns];
  return layout.tokens.map((_, column) => {
    const answer = words.chosen.data[(top + column) * ranks];
    let cell = top + column;
    while (cell >= layout.columns && words.chosen.data[(cell - layout.columns) * ranks] === answer)
      cell -= layout.columns;
    return cell < top && answer >= 0 ? cell : -1;
  });
}

/**
 * Where one text ends and the next begins.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {number[]} textOf
 * @param {Theme} theme
 */
export function paintSeams(pen, layout, visible, textOf, theme) {
  for (
    let column = Math.max(1, visible.first);
    column < Math.min(visible.last, textOf.length);
    column++
  ) {
    if (textOf[column] === textOf[column - 1]) continue;
    const x = layout.left + column * layout.wide - visible.shift;
    pen.rect(x - 1.5, layout.top - 4, 3, layout.rows * layout.high + 8, theme.paper);
    pen.rect(x - 0.5, layout.top - 4, 1, layout.rows * layout.high + 8, theme.ink);
  }
}

/**
 * A frame around a cell, with its site and token in the same colour.
 * @param {Pen} pen
 * @param {Layout} layout
 * @param {Window} visible
 * @param {number} cell
 * @param {{paper: string, ink: string}} colours
 */
export function paintCursor(pen, layout, visible, cell, colours) {
  const [left, y] = cornerOf(layout, cell);
  const x = left - visible.shift;
  siteLabel(pen, layout, Math.floor(cell / layout.columns), colours.ink);
  if (x < layout.left - layout.wide / 2) return;
  const wide = widthAt(layout, cell % layout.columns);
  pen.outline(x - 1, y - 1, wide + 1, layout.high + 1, colours.paper, 4);
  pen.outline(x - 1, y - 1, wide + 1, layout.high + 1, colours.ink, 2);
  tokenLabel(pen, layout, visible, cell % layout.columns, colours.ink);
}
