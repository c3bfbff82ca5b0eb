/** Painting lines with a pen: axes, bands, bars, lines and the rule under the cursor. */

import { widthOf } from "./canvas.js";
import { linearTicks, logTicks, formatTick } from "./numbers.js";
import { lettering } from "./pen.js";
import { octavesAlong, placesAlong, shortSite, shownText } from "./text.js";

/**
 * @typedef {import("./payload.js").Lines} Lines
 * @typedef {{left: number, top: number, right: number, bottom: number, width: number, height:
 *   number, low: number, high: number, log: boolean, bend: number, ticks: number[], at: number[]}}
 *   Chart `at` is where each x stands; a log scale bends at zero where values reach it or lie below
 * @typedef {{series: import("./payload.js").Series, colour: string}} Drawn
 */

const SMALL = 11;
const LINEAR_BELOW = 1e-4; // of the largest amount

/**
 * @param {Lines} lines
 * @param {Drawn[]} drawn
 * @param {number} width
 * @param {boolean} log
 * @param {string} font
 * @returns {Chart}
 */
export function chartOf(lines, drawn, width, log, font) {
  const { low, high, bend, ticks } = rangeOf(drawn, log);
  const widest = ticks.reduce(
    (most, tick) => Math.max(most, widthOf(formatTick(tick), lettering(font, { size: SMALL }))),
    0,
  );
  const height = Math.round(Math.min(340, Math.max(220, width * 0.4)));
  const at =
    lines.x_scale === "log" ? octavesAlong(lines.x) : placesAlong(lines.x, lines.x_name === "site");
  return {
    left: Math.ceil(widest) + 18,
    top: lines.y_name || lines.unit || bend ? 30 : 12,
    right: 14,
    bottom: 46,
    width,
    height,
    low,
    high,
    log,
    bend,
    ticks,
    at,
  };
}

/**
 * @param {Drawn[]} drawn
 * @param {boolean} log
 */
function rangeOf(drawn, log) {
  let low = Infinity,
    high = -Infinity,
    least = Infinity;
  for (const { series } of drawn) {
    for (const numbers of [series.y, series.low, series.high]) {
      for (const value of numbers?.data ?? []) {
        if (!Number.isFinite(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
        if (value) least = Math.min(least, Math.abs(value));
      }
    }
    if (series.style === "bar" && !log) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  }
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (log && low <= 0) return bentRange(low, high, least);
  if (log)
    return {
      bend: 0,
      low: low / 1.15,
      high: high * 1.15,
      ticks: logTicks(low / 1.15, high * 1.15, 6),
    };
  if (low > 0 && low < 0.6 * high) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [low === 0 ? 0 : low - room, high === 0 ? 0 : high + room];
  return { low, high, bend: 0, ticks: linearTicks(low, high, 5) };
}

/**
 * A log scale on both sides of zero, which is linear nearer to it than `bend`: no value is left
 * out.
 * @param {number} low
 * @param {number} high
 * @param {number} least the smallest amount that is not zero
 */
function bentRange(low, high, least) {
  const most = Math.max(-low, high);
  const bend = most ? Math.max(least, most * LINEAR_BELOW) : 1;
  const [down, up] = [low < 0 ? low * 1.15 : -bend / 4, high > 0 ? high * 1.15 : bend / 4];
  const decades = (/** @type {number} */ end) =>
    end > bend ? logTicks(bend, end, 3).filter((tick) => tick > bend) : [];
  return {
    low: down,
    high: up,
    bend,
    ticks: [
      ...decades(-down)
        .map((tick) => -tick)
        .reverse(),
      0,
      ...decades(up),
    ],
  };
}

/**
 * @param {Chart} chart
 * @param {number} value
 */
export function heightOf(chart, value) {
  const span = chart.height - chart.top - chart.bottom;
  const [at, low, high] = [value, chart.low, chart.high].map((number) => scaled(chart, number));
  const place = (at - low) / (high - low);
  return chart.height - chart.bottom - place * span;
}

/**
 * @param {Chart} chart
 * @param {number} value
 */
function scaled(chart, value) {
  if (!chart.log) return value;
  return chart.bend ? Math.sign(value) * Math.log1p(Math.abs(value) / chart.bend) : Math.log(value);
}

/**
 * @param {Chart} chart
 * @param {number} place
 */
export function acrossOf(chart, place) {
  return chart.left + (chart.at[place] + 0.5) * slotOf(chart);
}

/**
 * The place that is nearest to an x, -1 outside of the chart.
 * @param {Chart} chart
 * @param {number} x
 */
export function placeAt(chart, x) {
  const along = (x - chart.left) / slotOf(chart) - 0.5;
  if (x < chart.left || x > chart.width - chart.right) return -1;
  return chart.at.reduce(
    (best, at, place) => (Math.abs(at - along) < Math.abs(chart.at[best] - along) ? place : best),
    0,
  );
}

/**
 * How much room a layer has.
 * @param {Chart} chart
 */
function slotOf(chart) {
  return (chart.width - chart.left - chart.right) / (chart.at[chart.at.length - 1] + 1);
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Lines} lines
 * @param {Chart} chart
 * @param {import("./theme.js").Theme} theme
 */
export function paintAxes(pen, lines, chart, theme) {
  const end = chart.width - chart.right;
  for (const tick of chart.ticks) {
    const y = Math.round(heightOf(chart, tick)) + 0.5;
    pen.line(
      [
        [chart.left, y],
        [end, y],
      ],
      theme.faint,
      tick === 0 ? 1.5 : 1,
    );
    pen.text(formatTick(tick), chart.left - 8, y, {
      fill: theme.muted,
      size: SMALL,
      anchor: "end",
    });
  }
  const named = axisName(lines, chart);
  if (named) pen.text(named, 2, 11, { fill: theme.muted, size: 12 });
  const base = chart.height - chart.bottom;
  for (const { place, label, beneath } of placesShown(lines.x, chart, theme.font)) {
    const x = acrossOf(chart, place);
    pen.line(
      [
        [x, base],
        [x, base + (beneath ? 18 : 4)],
      ],
      theme.muted,
      1,
    );
    pen.text(label, x, base + (beneath ? 25 : 14), {
      fill: theme.muted,
      size: SMALL,
      anchor: "middle",
    });
  }
  const x = (chart.left + end) / 2;
  pen.text(lines.x_name === "site" ? "layer" : shownText(lines.x_name, 80), x, base + 37, {
    fill: theme.muted,
    size: 12,
    anchor: "middle",
  });
}

/**
 * What is measured, in which unit, and on which scale where that could be mistaken.
 * @param {Lines} lines
 * @param {Chart} chart
 */
export function axisName(lines, chart) {
  const bent = chart.bend ? "log scale on both sides of zero" : "";
  const named = [shownText(lines.y_name, 80), lines.unit ? `(${shownText(lines.unit, 40)})` : ""]
    .filter(Boolean)
    .join(" ");
  return [named, bent].filter(Boolean).join(", ");
}

/**
 * As many labels as there is room for; `final` goes beneath where it would hide the last layer.
 * @param {string[]} x
 * @param {Chart} chart
 * @param {string} font
 */
function placesShown(x, chart, font) {
  const labels = x.map((place) => shownText(shortSite(place), 16));
  const widths = labels.map((label) => widthOf(label, lettering(font, { size: SMALL })));
  const slot = slotOf(chart);
  const clash = (/** @type {number} */ left, /** @type {number} */ other) =>
    Math.abs(chart.at[left] - chart.at[other]) * slot < (widths[left] + widths[other]) / 2 + 6;
  const last = x.length - 1;
  const beneath = last > 0 && labels[last].endsWith("final") && clash(last, last - 1);
  const places = [beneath ? last - 1 : last];
  const ordinary = Math.max(0, ...widths.slice(0, -1));
  const step =
    [1, 2, 4, 5, 10, 20, 50, 100, 200].find((size) => size * slot >= ordinary + 8) ?? x.length;
  for (let place = places[0] - 1; place >= 0; place--) {
    if (chart.at[place] % step === 0 && !places.some((other) => clash(place, other)))
      places.push(place);
  }
  const shown = places.map((place) => ({ place, label: labels[place], beneath: false }));
  return beneath ? [...shown, { place: last, label: labels[last], beneath }] : shown;
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Lines} lines
 * @param {Chart} chart
 * @param {Drawn[]} drawn
 * @param {string} ink
 */
export function paintSeries(pen, lines, chart, drawn, ink) {
  const count = lines.x.length;
  const bars = drawn.filter(({ series }) => series.style === "bar");
  const thick = Math.min(40, (0.76 * slotOf(chart)) / Math.max(1, bars.length));
  for (const curve of drawn) if (curve.series.style !== "bar") paintBand(pen, chart, curve, count);
  bars.forEach((curve, k) =>
    paintBars(pen, chart, { ...curve, ink }, count, [(k - (bars.length - 1) / 2) * thick, thick]),
  );
  for (const curve of drawn) {
    if (curve.series.style === "bar") continue;
    const dash = curve.series.style === "dash" ? [6, 4] : [];
    for (const run of runsOf(chart, curve.series.y.data, count)) {
      if (run.length > 1) pen.line(run, curve.colour, 2, dash);
      if (count <= 60 || run.length === 1)
        for (const [x, y] of run) if (!dash.length) pen.dot(x, y, 2.5, curve.colour);
    }
  }
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Chart} chart
 * @param {Drawn} curve
 * @param {number} count
 */
function paintBand(pen, chart, curve, count) {
  const { low, high } = curve.series;
  if (!low || !high) return;
  const both = low.data.map((value, i) => value + 0 * high.data[i]);
  for (const run of runsOf(chart, both, count)) {
    const places = run.map(([, , place]) => place);
    const top = places.map((place) => [acrossOf(chart, place), heightOf(chart, high.data[place])]);
    pen.area([...top, ...run.map(([x, y]) => [x, y]).reverse()], curve.colour, 0.16);
  }
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Chart} chart
 * @param {Drawn & {ink: string}} curve
 * @param {number} count
 * @param {number[]} slot how far from the middle, and how thick
 */
function paintBars(pen, chart, curve, count, [shift, thick]) {
  const base = heightOf(chart, chart.log && !chart.bend ? chart.low : 0);
  const { y, low, high } = curve.series;
  for (const [across, top, place] of runsOf(chart, y.data, count).flat()) {
    const x = across + shift;
    pen.rect(
      x - thick / 2 + 0.5,
      Math.min(top, base),
      Math.max(1, thick - 1),
      Math.max(0.5, Math.abs(base - top)),
      curve.colour,
    );
    if (!low || !high || !Number.isFinite(low.data[place] + high.data[place])) continue;
    const ends = [low.data[place], high.data[place]].map((value) =>
      heightOf(chart, Math.max(value, chart.low)),
    );
    pen.area(
      [
        [x - 0.75, ends[0]],
        [x + 0.75, ends[0]],
        [x + 0.75, ends[1]],
        [x - 0.75, ends[1]],
      ],
      curve.ink,
      0.7,
    );
  }
}

/**
 * Points without a gap, as [x, y, place].
 * @param {Chart} chart
 * @param {ArrayLike<number>} values
 * @param {number} count
 */
function runsOf(chart, values, count) {
  /** @type {number[][][]} */
  const runs = [[]];
  for (let place = 0; place < count; place++) {
    const value = values[place];
    if (!Number.isFinite(value)) runs.push([]);
    else runs[runs.length - 1].push([acrossOf(chart, place), heightOf(chart, value), place]);
  }
  return runs.filter((run) => run.length);
}
