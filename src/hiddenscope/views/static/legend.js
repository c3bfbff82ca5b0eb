/**
 * The key of colour scales: bars, their ticks, what they measure and in which unit, and what marks
 * in cells mean.
 */

import { linearTicks, logTicks, formatTick } from "./numbers.js";
import { widthOf } from "./canvas.js";
import { lettering } from "./pen.js";
import { placeOf } from "./scale.js";

/**
 * @typedef {{at: number, label: string}} Tick
 * @typedef {{map: Uint8Array, ticks: Tick[], name: string}} Legend
 * @typedef {keyof typeof MARKS} Mark
 * @typedef {{places: number[][], marks: Mark[], width: number, height: number}} KeyLayout
 */

export const LEGEND = { width: 280, height: 46 };
const MARK = { side: 12, gap: 6 };
/** What a mark in a cell means. */
export const MARKS = { zero: "exactly 0", missing: "no value", itself: "itself, left out" };
const APART = 16;
const STEPS = 64;
const EDGE = 16;

/**
 * @param {import("./scale.js").Ends} ends
 * @param {import("./scale.js").Way} way
 * @returns {Tick[]}
 */
export function ticksOf(ends, way) {
  if (way.each)
    return [
      { at: 0, label: way.meaning === "diverging" ? "−most" : "least" },
      { at: 1, label: "most of its layer" },
    ];
  if (ends.low === ends.high)
    return [{ at: way.meaning === "diverging" ? 0.5 : 0, label: formatTick(ends.low) }];
  if (way.meaning === "diverging" && way.log) {
    const round = (/** @type {number} */ part) => Number((part * ends.high).toPrecision(2));
    return [-1, -0.01, 0, 0.01, 1]
      .map(round)
      .map((value) => ({ at: placeOf(value, ends, way), label: formatTick(value) }));
  }
  const values = way.log && ends.low > 0 ? decades(ends) : linearTicks(ends.low, ends.high, 4);
  return values.map((value) => ({ at: placeOf(value, ends, way), label: formatTick(value) }));
}

/**
 * Powers of ten alone, where there are two or more.
 * @param {import("./scale.js").Ends} ends
 */
function decades(ends) {
  const all = logTicks(ends.low, ends.high, 6);
  const powers = all.filter(
    (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9,
  );
  return powers.length > 1 ? powers : all;
}

/**
 * Where so many bars and the marks stand: side by side while there is room, and else one beneath
 * the other.
 * @param {number} bars
 * @param {Mark[]} marks
 * @param {number} room
 * @param {string} font
 * @returns {KeyLayout}
 */
export function keyLayout(bars, marks, room, font) {
  const words = lettering(font, { size: 12 });
  const widths = marks.map(
    (mark) => Math.ceil(MARK.side + MARK.gap + widthOf(MARKS[mark], words)) + 4,
  );
  widths.unshift(...Array(bars).fill(LEGEND.width));
  /** @type {number[][]} */
  const places = [];
  let x = 0,
    y = 0,
    widest = 0;
  for (const width of widths) {
    if (x && x + width > room) [x, y] = [0, y + LEGEND.height];
    places.push([x, y]);
    widest = Math.max(widest, x + width);
    x += width + APART;
  }
  return { places, marks, width: widest, height: y + LEGEND.height };
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Legend[]} legends
 * @param {number} x
 * @param {number} y
 * @param {KeyLayout} layout
 * @param {import("./theme.js").Theme} theme
 */
export function paintKey(pen, legends, x, y, { places, marks }, theme) {
  legends.forEach((legend, i) =>
    paintLegend(pen, legend, x + places[i][0], y + places[i][1], theme),
  );
  // The bars have their places first, even where fewer are shown.
  const left = places.length - marks.length;
  marks.forEach((mark, i) =>
    paintMark(pen, mark, x + places[left + i][0] + 1, y + places[left + i][1] + 23, theme),
  );
}

/**
 * A small cell with a mark in it, and what the mark means.
 * @param {import("./pen.js").Pen} pen
 * @param {Mark} mark
 * @param {number} left
 * @param {number} middle
 * @param {import("./theme.js").Theme} theme
 */
function paintMark(pen, mark, left, middle, theme) {
  const { side, gap } = MARK;
  const reach = side / 2 - 3;
  const centre = left + side / 2;
  pen.outline(left + 0.5, middle - side / 2 + 0.5, side - 1, side - 1, theme.faint, 1);
  if (mark === "zero") pen.rect(centre - 1, middle - 1, 2, 2, theme.muted);
  else
    pen.line(
      [
        [centre - reach, middle + reach],
        [centre + reach, middle - reach],
      ],
      theme.muted,
      1,
    );
  pen.text(MARKS[mark], left + side + gap, middle, { fill: theme.muted, size: 12 });
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Legend} legend
 * @param {number} x
 * @param {number} y
 * @param {import("./theme.js").Theme} theme
 */
function paintLegend(pen, legend, x, y, theme) {
  const width = LEGEND.width - 2 * EDGE;
  const left = x + EDGE;
  pen.text(legend.name, x, y + 8, { fill: theme.muted, size: 12 });
  const pixels = new Uint8ClampedArray(4 * STEPS);
  for (let i = 0; i < STEPS; i++) {
    const from = 3 * Math.round((255 * i) / (STEPS - 1));
    pixels.set([legend.map[from], legend.map[from + 1], legend.map[from + 2], 255], 4 * i);
  }
  pen.cells(pixels, {
    x: left,
    y: y + 18,
    width: width / STEPS,
    height: 10,
    columns: STEPS,
    first: 0,
    last: STEPS,
  });
  pen.outline(left - 0.5, y + 17.5, width + 1, 11, theme.faint, 1);
  for (const tick of spaced(legend.ticks, width, theme.font)) {
    const at = left + tick.at * width;
    pen.line(
      [
        [at, y + 28],
        [at, y + 32],
      ],
      theme.muted,
      1,
    );
    pen.text(tick.label, at, y + 39, {
      fill: theme.muted,
      size: 11,
      anchor: anchor(tick, width, theme.font),
    });
  }
}

/**
 * In the middle of its tick, where it does not run over the end.
 * @param {Tick} tick
 * @param {number} width
 * @param {string} font
 */
function anchor(tick, width, font) {
  const half = widthOf(tick.label, lettering(font, { size: 11 })) / 2;
  if (tick.at * width + EDGE < half) return "start";
  return (1 - tick.at) * width + EDGE < half ? "end" : "middle";
}

/**
 * Those ticks whose labels do not touch.
 * @param {Tick[]} ticks
 * @param {number} width
 * @param {string} font
 */
function spaced(ticks, width, font) {
  /** @type {Tick[]} */
  const shown = [];
  let end = -Infinity;
  for (const tick of [...ticks].sort((a, b) => a.at - b.at)) {
    const wide = widthOf(tick.label, lettering(font, { size: 11 }));
    const shift = { start: 0, middle: 0.5, end: 1 }[anchor(tick, width, font)];
    const start = tick.at * width - shift * wide;
    if (start < end + 8) continue;
    shown.push(tick);
    end = start + wide;
  }
  return shown;
}
