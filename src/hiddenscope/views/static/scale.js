/**
 * From values to places between 0 and 1: linear or log, over everything or layer by layer.
 *
 * @typedef {{meaning: "sequential" | "diverging", log: boolean, each: boolean, limits: [number,
 *   number] | null}} Way
 * @typedef {{low: number, high: number}} Ends
 */

const DECADES = 1e-6; // a log scale reaches this far below its top
const STEP_FROM_ZERO = 0.08; // and the least amount is kept this far from nothing at all

/**
 * From the least value to the largest, where a log scale shows what a linear one hides; what is at
 * most 1 may be a share.
 */
const SPANS = { amount: 100, share: 10_000 };

/**
 * Whether a log scale is worth offering: where it is asked for, or where amounts span orders of
 * magnitude.
 * @param {{scale: "linear" | "log", meaning?: "sequential" | "diverging"}} shown how it is shown
 *   first
 * @param {ArrayLike<number>} values
 */
export function offersLog({ scale, meaning }, values) {
  let below = false,
    zero = false,
    least = Infinity,
    most = 0;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!Number.isFinite(value)) continue;
    below ||= value < 0;
    zero ||= value === 0;
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  // The amounts of a grid have no colour below zero; a line goes on below it.
  if (scale === "log") return !(below && meaning === "sequential");
  return (
    meaning !== "diverging" &&
    !below &&
    !zero &&
    most >= (most > 1 ? SPANS.amount : SPANS.share) * least
  );
}

/**
 * The levels of values `[row, column]`; NaN where a value is missing.
 * @param {Float32Array} values
 * @param {number} columns
 * @param {Way} way
 */
export function levelsOf(values, columns, way) {
  const levels = new Float32Array(values.length);
  const step = way.each ? columns : values.length;
  for (let start = 0; start < values.length; start += step) {
    const part = values.subarray(start, start + step);
    const ends = way.each ? endsOf(part, { ...way, limits: null }) : endsOf(part, way);
    place(part, ends, way, levels.subarray(start, start + step));
  }
  return levels;
}

/**
 * Where a scale begins and ends. A scale of amounts begins at zero, or on a log scale at the least
 * amount there is; one of differences reaches as far down as up.
 * @param {ArrayLike<number>} values
 * @param {Way} way
 * @returns {Ends}
 */
export function endsOf(values, way) {
  const belowLog =
    way.log && way.meaning === "sequential" && way.limits !== null && way.limits[0] <= 0;
  if (way.limits && !belowLog) return { low: way.limits[0], high: way.limits[1] };
  let low = Infinity,
    high = -Infinity,
    least = Infinity,
    most = 0;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
    const size = Math.abs(value);
    if (size > most) most = size;
    if (size > 0 && size < least) least = size;
  }
  if (way.meaning === "diverging") return { low: -most, high: most };
  if (way.limits) [low, high] = way.limits;
  if (low > high) return { low: 0, high: 1 };
  if (way.log && high > 0) {
    const bottom = Math.max(Math.min(least, high), high * DECADES);
    return { low: low < bottom ? bottom * (bottom / high) ** STEP_FROM_ZERO : bottom, high };
  }
  return { low: Math.min(0, low), high: Math.max(0, high) };
}

/**
 * The place of one value.
 * @param {number} value
 * @param {Ends} ends
 * @param {Way} way
 */
export function placeOf(value, ends, way) {
  const single = new Float32Array(1);
  place(Float32Array.of(value), ends, way, single);
  return single[0];
}

/**
 * @param {Float32Array} values
 * @param {Ends} ends
 * @param {Way} way
 * @param {Float32Array} to
 */
function place(values, ends, way, to) {
  const { low, high } = ends;
  if (way.meaning === "diverging" && way.log) return placeSigned(values, Math.max(-low, high), to);
  if (way.log && low > 0) {
    const bottom = Math.log(low),
      span = Math.log(high) - bottom || 1;
    for (let i = 0; i < values.length; i++)
      to[i] = values[i] > low ? (Math.log(values[i]) - bottom) / span : 0 * values[i];
    return;
  }
  const span = high - low || 1;
  const flat = way.meaning === "diverging" && high === low ? 0.5 : 0;
  for (let i = 0; i < values.length; i++) to[i] = (values[i] - low) / span + flat;
}

/**
 * Both sides of zero on a log scale, four decades each.
 * @param {Float32Array} values
 * @param {number} most
 * @param {Float32Array} to
 */
function placeSigned(values, most, to) {
  const bend = most / 1e4 || 1;
  const span = 2 * Math.log1p(most / bend) || 1;
  for (let i = 0; i < values.length; i++) {
    to[i] = 0.5 + (Math.sign(values[i]) * Math.log1p(Math.abs(values[i]) / bend)) / span;
  }
}
