/**
 * Which states influence a cell, and which it influences: two slices of a map `[site, token,
 * source_site, source_token]`.
 *
 * @typedef {"both" | "sources" | "targets"} Direction
 */

import { levelsOf } from "./scale.js";

/**
 * How much every cell moves this one; NaN where that is not measured, as for the cell itself.
 * @param {Float32Array} map
 * @param {number} cell
 * @param {number} count how many cells there are
 */
export function sourcesOf(map, cell, count) {
  return map.slice(cell * count, (cell + 1) * count);
}

/**
 * How much this cell moves every other.
 * @param {Float32Array} map
 * @param {number} cell
 * @param {number} count
 */
export function targetsOf(map, cell, count) {
  if (map.length <= MOST_TURNED) return sourcesOf(turnedOver(map, count), cell, count);
  const slice = new Float32Array(count);
  for (let i = 0, from = cell; i < count; i++, from += count) slice[i] = map[from];
  return slice;
}

const MOST_TURNED = 1 << 22;
/** @type {WeakMap<Float32Array, Float32Array>} */
const turned = new WeakMap();

/**
 * The map with targets and sources exchanged, kept: numbers that lie together are read many times
 * faster.
 * @param {Float32Array} map
 * @param {number} count
 */
function turnedOver(map, count) {
  let over = turned.get(map);
  if (!over) {
    over = new Float32Array(map.length);
    for (let i = 0; i < count; i++)
      for (let j = 0; j < count; j++) over[j * count + i] = map[i * count + j];
    turned.set(map, over);
  }
  return over;
}

/**
 * Both at once: what influences it below one half, what it influences above, each against its own
 * largest.
 * @param {Float32Array} sources
 * @param {Float32Array} targets
 * @param {number} columns
 * @param {import("./scale.js").Way} way
 */
export function bothLevels(sources, targets, columns, way) {
  if (way.meaning === "diverging")
    return levelsOf(
      sources.map((value, i) => value || targets[i]),
      columns,
      way,
    );
  const below = levelsOf(sources, columns, way);
  const above = levelsOf(targets, columns, way);
  for (let i = 0; i < below.length; i++) {
    const outward = Number.isNaN(below[i]) || above[i] > below[i];
    below[i] = outward ? 0.5 + above[i] / 2 : 0.5 - below[i] / 2;
  }
  return below;
}

/**
 * Where the largest value lies, -1 where there is none but zeros.
 * @param {Float32Array} values
 */
export function largest(values) {
  let best = -1;
  for (let i = 0; i < values.length; i++) {
    const size = Math.abs(values[i]);
    if (size > 0 && (best < 0 || size > Math.abs(values[best]))) best = i;
  }
  return best;
}
