/**
 * The colours of a grid's cells, and the legend that explains them: a measure's values at rest, or
 * which states influence a cell and which it influences.
 *
 * @typedef {{measure: import("./payload.js").Measure, focus: number, direction:
 *   import("./influence.js").Direction, way: import("./scale.js").Way, columns: number}} Colouring
 */

import { fitted } from "./canvas.js";
import { colourMap, sideMap, painted } from "./colour.js";
import { bothLevels, targetsOf, sourcesOf } from "./influence.js";
import { LEGEND, ticksOf } from "./legend.js";
import { lettering } from "./pen.js";
import { endsOf, levelsOf } from "./scale.js";
import { shownText } from "./text.js";

const ON = "influence on the selected state";
const OF = "influence of the selected state";

/**
 * Cells that are exactly zero are left clear: they get a mark of their own.
 * @param {Colouring} colouring
 * @param {boolean} dark
 */
export function cellPixels(colouring, dark) {
  const { way, columns } = colouring;
  const pixels = isBoth(colouring)
    ? painted(
        bothLevels(sourcesNow(colouring), targetsNow(colouring), columns, way),
        colourMap("diverging", dark),
      )
    : painted(levelsOf(valuesNow(colouring), columns, way), colourMap(way.meaning, dark));
  const whole = new Uint32Array(pixels.buffer);
  zeroCells(colouring).forEach((zero, cell) => {
    if (zero) whole[cell] = 0;
  });
  return pixels;
}

/**
 * Which cells are exactly zero; where both directions are shown, in both of them.
 * @param {Colouring} colouring
 */
export function zeroCells(colouring) {
  const values = isBoth(colouring) ? sourcesNow(colouring) : valuesNow(colouring);
  const zeros = Uint8Array.from(values, (value) => (value === 0 ? 1 : 0));
  if (isBoth(colouring))
    targetsNow(colouring).forEach((value, cell) => {
      if (value !== 0) zeros[cell] = 0;
    });
  return zeros;
}

/**
 * Which cells have no value; where both directions are shown, in neither of them.
 * @param {Colouring} colouring
 */
export function missingCells(colouring) {
  const values = isBoth(colouring) ? sourcesNow(colouring) : valuesNow(colouring);
  const missing = Uint8Array.from(values, (value) => (Number.isNaN(value) ? 1 : 0));
  if (isBoth(colouring))
    targetsNow(colouring).forEach((value, cell) => {
      if (!Number.isNaN(value)) missing[cell] = 0;
    });
  return missing;
}

/**
 * One scale, or two where a cell shows both what influences it and what it influences.
 * @param {Colouring} colouring
 * @param {import("./theme.js").Theme} theme
 * @returns {import("./legend.js").Legend[]}
 */
export function cellLegends(colouring, theme) {
  const { measure, focus, direction, way } = colouring;
  const unit = measure.unit ? ` (${shownText(measure.unit, 40)})` : "";
  const fit = (/** @type {string} */ text) =>
    fitted(`${text}${unit}`, lettering(theme.font, { size: 12 }), LEGEND.width - 4);
  const ticks = (/** @type {Float32Array} */ values) => ticksOf(endsOf(values, way), way);
  if (isBoth(colouring) && way.meaning !== "diverging") {
    return [
      {
        map: sideMap("diverging", -1, theme.dark),
        ticks: ticks(sourcesNow(colouring)),
        name: fit(ON),
      },
      {
        map: sideMap("diverging", 1, theme.dark),
        ticks: ticks(targetsNow(colouring)),
        name: fit(OF),
      },
    ];
  }
  const influences = { both: `${ON}, or of it`, targets: OF, sources: ON };
  const name = focus < 0 ? shownText(measure.name, 60) : influences[direction];
  return [
    {
      map: colourMap(way.meaning, theme.dark),
      ticks: ticks(valuesNow(colouring)),
      name: fit(name),
    },
  ];
}

/** @param {Colouring} colouring */
function isBoth({ focus, direction }) {
  return focus >= 0 && direction === "both";
}

/** @param {Colouring} colouring */
function valuesNow(colouring) {
  if (colouring.focus < 0) return /** @type {Float32Array} */ (colouring.measure.values.data);
  return colouring.direction === "targets" ? targetsNow(colouring) : sourcesNow(colouring);
}

/** @param {Colouring} colouring */
function sourcesNow({ measure, focus }) {
  return sourcesOf(
    /** @type {Float32Array} */ (measure.influence?.data),
    focus,
    measure.values.data.length,
  );
}

/** @param {Colouring} colouring */
function targetsNow({ measure, focus }) {
  return targetsOf(
    /** @type {Float32Array} */ (measure.influence?.data),
    focus,
    measure.values.data.length,
  );
}

/**
 * The marks that may stand in cells; those of a map depend on the cell that is chosen, so all of
 * them are explained.
 * @param {import("./payload.js").Grid} grid
 * @param {import("./payload.js").Measure} measure
 */
export function marksOf(grid, measure) {
  const bars = grid.bars ?? 0; // they have no marks
  const all = (measure.influence ?? measure.values).data;
  const values = bars
    ? all.filter((_, cell) => cell % grid.tokens.length < grid.tokens.length - bars)
    : all;
  const marksZeros = measure.influence !== null || grid.words === null;
  /** @type {import("./legend.js").Mark[]} */
  const marks = [];
  if (marksZeros && values.includes(0)) marks.push("zero");
  if (measure.influence && leavesItselfOut(values)) marks.push("itself");
  else if (values.some(Number.isNaN)) marks.push("missing");
  return marks;
}

/**
 * Whether a map leaves out what a state does to itself, and not all that is done to its first
 * state.
 * @param {ArrayLike<number>} map
 */
function leavesItselfOut(map) {
  return map.length > 1 && Number.isNaN(map[0]) && !Number.isNaN(map[1]);
}
