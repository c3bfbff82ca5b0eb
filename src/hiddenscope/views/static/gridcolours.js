/**
 * The colours of a grid's cells, and the legend that explains them: a measure's values at rest, or which
 * states influence a cell and which it influences.
 *
 * @typedef {{measure: import("./payload.js").Measure, focus: number, direction: import("./influence.js").Direction,
 *   way: import("./scale.js").Way, columns: number}} Colouring
 */

import { fitted } from "./canvas.js";
import { colourMap, painted } from "./colour.js";
import { bothEnds, bothLevels, targetsOf, sourcesOf } from "./influence.js";
import { LEGEND, ticksOf } from "./legend.js";
import { formatTick } from "./numbers.js";
import { lettering } from "./pen.js";
import { endsOf, levelsOf } from "./scale.js";
import { shownText } from "./text.js";

/**
 * @param {Colouring} colouring
 * @param {boolean} dark
 */
export function cellPixels(colouring, dark) {
  const { focus, direction, way, columns } = colouring;
  if (focus >= 0 && direction === "both") {
    return painted(bothLevels(sourcesNow(colouring), targetsNow(colouring), columns, way), colourMap("diverging", dark));
  }
  return painted(levelsOf(valuesNow(colouring), columns, way), colourMap(way.meaning, dark));
}

/**
 * @param {Colouring} colouring
 * @param {import("./theme.js").Theme} theme
 * @returns {import("./legend.js").Legend}
 */
export function cellLegend(colouring, theme) {
  const { measure, focus, direction, way } = colouring;
  const fit = (/** @type {string} */ text) => fitted(text, lettering(theme.font, { size: 12 }), LEGEND.width - 4);
  const name = shownText(measure.name, 60);
  if (focus < 0 || direction !== "both" || way.meaning === "diverging") {
    const unit = measure.unit ? ` (${shownText(measure.unit, 40)})` : "";
    const ticks = ticksOf(endsOf(valuesNow(colouring), way), way);
    return { map: colourMap(way.meaning, theme.dark), ticks, name: fit(`${name}${unit}`) };
  }
  const ends = bothEnds(sourcesNow(colouring), targetsNow(colouring), way);
  const short = (/** @type {number} */ value) => formatTick(Number(value.toPrecision(3)));
  const ticks = [
    { at: 0, label: way.each ? "most of its layer" : short(ends.sources.high) },
    { at: 0.5, label: "0" },
    { at: 1, label: way.each ? "most of its layer" : short(ends.targets.high) },
  ];
  return { map: colourMap("diverging", theme.dark), ticks, name: fit(`influences it ← ${name} → influenced by it`) };
}

/** @param {Colouring} colouring */
function valuesNow(colouring) {
  if (colouring.focus < 0) return /** @type {Float32Array} */ (colouring.measure.values.data);
  return colouring.direction === "targets" ? targetsNow(colouring) : sourcesNow(colouring);
}

/** @param {Colouring} colouring */
function sourcesNow({ measure, focus }) {
  return sourcesOf(/** @type {Float32Array} */ (measure.influence?.data), focus, measure.values.data.length);
}

/** @param {Colouring} colouring */
function targetsNow({ measure, focus }) {
  return targetsOf(/** @type {Float32Array} */ (measure.influence?.data), focus, measure.values.data.length);
}
