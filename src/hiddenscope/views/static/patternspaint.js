/** Painting heads with a pen: the small multiples, and the large head with its tokens. */

import { newContext } from "./canvas.js";
import { colourMap, painted } from "./colour.js";
import { headExists, mostOf, patternOf } from "./patternsdata.js";
import { cornerOfHead, HEAD_SIZES } from "./patternslayout.js";

/**
 * @typedef {import("./payload.js").Patterns} Patterns
 * @typedef {import("./pen.js").Pen} Pen
 * @typedef {import("./theme.js").Theme} Theme
 * @typedef {{weighted: boolean, each: boolean, most: number, root: boolean, dark: boolean}} Shade
 *   `most` is the largest number of all heads, where these share one scale; with `root`, colours
 *   run by the square root
 */

const LABEL_APART = 13;
const MOST_RECTS = 10_000; // with more cells than this a drawing holds pixels

/**
 * Values as pixels; what is exactly zero is clear.
 * @param {Float32Array} values
 * @param {{most: number, root: boolean, dark: boolean}} shade
 */
export function weightPixels(values, { most, root, dark }) {
  const levels = values.map((value) =>
    root ? Math.sqrt(value / (most || 1)) : value / (most || 1),
  );
  const pixels = painted(levels, colourMap("sequential", dark));
  const whole = new Uint32Array(pixels.buffer);
  values.forEach((value, i) => {
    if (!value) whole[i] = 0;
  });
  return pixels;
}

/**
 * All small pictures on one canvas, as sharp as the screen is.
 * @param {Patterns} heads
 * @param {import("./patternslayout.js").Small} layout
 * @param {Shade} shade
 * @param {number} ratio pixels of the screen for each pixel of the layout
 */
export function smallPictures(heads, layout, shade, ratio) {
  const side = Math.max(1, Math.round(layout.side * ratio));
  const gap = side > 12 ? 2 : 1;
  const inner = side - gap;
  const [rows, columns] = [heads.queries.length, heads.keys.length].map((count) =>
    Math.min(count, inner),
  );
  const [whole, part] = [
    newContext(side * layout.columns, side * layout.rows),
    newContext(columns, rows),
  ];
  whole.imageSmoothingEnabled = false;
  for (let at = 0; at < layout.rows * layout.columns; at++) {
    if (!headExists(heads, at)) continue;
    const values = patternOf(heads, at, shade.weighted, rows, columns);
    const pixels = weightPixels(values, {
      ...shade,
      most: shade.each ? mostOf(values) : shade.most,
    });
    part.putImageData(new ImageData(pixels, columns, rows), 0, 0);
    const y = (layout.rows - 1 - Math.floor(at / layout.columns)) * side;
    whole.drawImage(part.canvas, (at % layout.columns) * side, y, inner, inner);
  }
  return whole.canvas;
}

/**
 * @param {Pen} pen
 * @param {Patterns} heads
 * @param {import("./patternslayout.js").Small} layout
 * @param {HTMLCanvasElement} pictures
 * @param {Theme} theme
 */
export function paintSmall(pen, heads, layout, pictures, theme) {
  const { left, top, side, rows, columns } = layout;
  const [width, height] = [columns * side, rows * side];
  pen.image(pictures, left, top, width, height);
  const how = { fill: theme.muted, size: HEAD_SIZES.site };
  for (let row = 0, every = Math.ceil(LABEL_APART / side); row < rows; row += every) {
    pen.text(layout.sites[row], left - 6, top + (rows - 0.5 - row) * side, {
      ...how,
      anchor: "end",
    });
  }
  for (let head = 0, every = Math.ceil(20 / side); head < columns; head += every) {
    pen.text(heads.heads[head], left + (head + 0.5) * side, top + height + 10, {
      ...how,
      anchor: "middle",
    });
  }
  pen.text("head", left + width / 2, top + height + 25, { ...how, anchor: "middle" });
  for (let at = 0; at < rows * columns; at++) {
    if (headExists(heads, at)) continue;
    const [x, y] = cornerOfHead(layout, at);
    pen.line(
      [
        [x + 3, y + side - 4],
        [x + side - 4, y + 3],
      ],
      theme.faint,
      1,
    );
  }
}

/**
 * A frame around one small picture.
 * @param {Pen} pen
 * @param {import("./patternslayout.js").Small} layout
 * @param {number} at
 * @param {{paper: string, ink: string}} colours
 */
export function frameHead(pen, layout, at, { paper, ink }) {
  const [x, y] = cornerOfHead(layout, at);
  pen.outline(x - 1, y - 1, layout.side + 1, layout.side + 1, paper, 4);
  pen.outline(x - 1, y - 1, layout.side + 1, layout.side + 1, ink, 2);
}

/**
 * @param {Pen} pen
 * @param {import("./patternslayout.js").Large} layout
 * @param {Float32Array} values `[query, key]`
 * @param {{most: number, root: boolean}} shade
 * @param {{query: number, key: number}} pin -1 for none
 * @param {Theme} theme
 */
export function paintLarge(pen, layout, values, shade, pin, theme) {
  const { left, top, cell, rows, columns } = layout;
  const pixels = weightPixels(values, { ...shade, dark: theme.dark });
  const [width, height] = [columns * cell, rows * cell];
  if (rows * columns <= MOST_RECTS)
    pen.cells(pixels, {
      x: left,
      y: top,
      width: cell,
      height: cell,
      columns,
      first: 0,
      last: columns,
    });
  else pen.image(enlarged(pixels, columns, rows, Math.ceil(cell)), left, top, width, height);
  pen.outline(left - 0.5, top - 0.5, width + 1, height + 1, theme.faint, 1);
  if (cell >= 14) {
    /** @type {[number, number, number, number][]} */
    const gaps = [];
    for (let row = 1; row < rows; row++) gaps.push([left, top + row * cell - 0.5, width, 1]);
    for (let column = 1; column < columns; column++)
      gaps.push([left + column * cell - 0.5, top, 1, height]);
    pen.rects(gaps, theme.paper);
  }
  const every = Math.ceil(LABEL_APART / cell);
  for (const query of labelled(rows, every, pin.query))
    queryLabel(pen, layout, query, query === pin.query ? theme.accent : theme.ink);
  for (const key of labelled(columns, every, pin.key))
    keyLabel(pen, layout, key, key === pin.key ? theme.accent : theme.ink);
  if (pin.query >= 0)
    pen.outline(left - 1, top + pin.query * cell - 0.5, width + 2, cell + 1, theme.accent, 1.5);
  if (pin.key >= 0)
    pen.outline(left + pin.key * cell - 0.5, top - 1, cell + 1, height + 2, theme.accent, 1.5);
}

/**
 * Cells as a picture of this many pixels each.
 * @param {Uint8ClampedArray<ArrayBuffer>} pixels
 * @param {number} columns
 * @param {number} rows
 * @param {number} times
 */
function enlarged(pixels, columns, rows, times) {
  const [small, large] = [newContext(columns, rows), newContext(columns * times, rows * times)];
  small.putImageData(new ImageData(pixels, columns, rows), 0, 0);
  large.imageSmoothingEnabled = false;
  large.drawImage(small.canvas, 0, 0, columns * times, rows * times);
  return large.canvas;
}

/**
 * The places that get a label: some of many, and always the chosen one, which pushes its neighbours
 * away.
 * @param {number} count
 * @param {number} every
 * @param {number} selected
 */
export function labelled(count, every, selected) {
  const places = [];
  for (let place = 0; place < count; place += every)
    if (selected < 0 || place === selected || Math.abs(place - selected) >= every)
      places.push(place);
  if (selected >= 0 && selected % every) places.push(selected);
  return places;
}

/**
 * @param {Pen} pen
 * @param {import("./patternslayout.js").Large} layout
 * @param {number} query
 * @param {string} fill
 */
function queryLabel(pen, layout, query, fill) {
  pen.text(layout.queries[query], layout.left - 6, layout.top + (query + 0.5) * layout.cell, {
    fill,
    size: HEAD_SIZES.token,
    anchor: "end",
  });
}

/**
 * @param {Pen} pen
 * @param {import("./patternslayout.js").Large} layout
 * @param {number} key
 * @param {string} fill
 */
function keyLabel(pen, layout, key, fill) {
  const [turn, away, up] = layout.turned ? [-45, -2, 8] : [0, 0, 11];
  const x = layout.left + (key + 0.5) * layout.cell + away;
  pen.text(layout.keys[key], x, layout.top - up, {
    fill,
    size: HEAD_SIZES.token,
    turn,
    anchor: turn ? "start" : "middle",
  });
}
