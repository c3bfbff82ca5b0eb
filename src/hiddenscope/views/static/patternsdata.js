/**
 * Numbers of heads: weights are packed as steps of their square root, and a value-weighted weight
 * is a weight times the norm of what the token that is read writes.
 *
 * @typedef {import("./payload.js").Patterns} Patterns
 */

/** @type {Map<number, Float32Array>} */
const tables = new Map();

/**
 * The weight of every step.
 * @param {number} steps
 */
export function weightsOfSteps(steps) {
  let table = tables.get(steps);
  if (!table) {
    table = Float32Array.from({ length: steps + 1 }, (_, step) => (step / steps) ** 2);
    tables.set(steps, table);
  }
  return table;
}

/**
 * Whether a block has this head.
 * @param {Patterns} heads
 * @param {number} at the place of a head among all
 */
export function headExists(heads, at) {
  const keys = heads.keys.length;
  return !heads.norms.data.slice(at * keys, (at + 1) * keys).every(Number.isNaN);
}

/**
 * The site of a head.
 * @param {Patterns} heads
 * @param {number} at
 */
export function headName(heads, at) {
  const site = heads.sites[Math.floor(at / heads.heads.length)];
  return `${site}.head.${heads.heads[at % heads.heads.length]}`;
}

/**
 * What one token reads of one other.
 * @param {Patterns} heads
 * @param {number} at
 * @param {number} query
 * @param {number} key
 * @param {boolean} weighted
 */
export function weightAt(heads, at, query, key, weighted) {
  const keys = heads.keys.length;
  const step = heads.weights.data[(at * heads.queries.length + query) * keys + key];
  const weight = weightsOfSteps(heads.steps)[step];
  return weighted ? weight * heads.norms.data[at * keys + key] : weight;
}

/**
 * What one token reads: a number for each key.
 * @param {Patterns} heads
 * @param {number} at
 * @param {number} query -1 for none
 * @param {boolean} weighted
 */
export function whatIsRead(heads, at, query, weighted) {
  if (query < 0) return new Float32Array(heads.keys.length);
  return Float32Array.from(heads.keys, (_, key) => weightAt(heads, at, query, key, weighted));
}

/**
 * Which tokens read one: a number for each query.
 * @param {Patterns} heads
 * @param {number} at
 * @param {number} key -1 for none
 * @param {boolean} weighted
 */
export function whoReads(heads, at, key, weighted) {
  if (key < 0) return new Float32Array(heads.queries.length);
  return Float32Array.from(heads.queries, (_, query) => weightAt(heads, at, query, key, weighted));
}

/**
 * A head's pattern `[query, key]`, thinned to this many rows and columns: each is the largest of
 * those it stands for.
 * @param {Patterns} heads
 * @param {number} at
 * @param {boolean} weighted
 * @param {number} [rows]
 * @param {number} [columns]
 */
export function patternOf(
  heads,
  at,
  weighted,
  rows = heads.queries.length,
  columns = heads.keys.length,
) {
  const [queries, keys] = [heads.queries.length, heads.keys.length];
  const table = weightsOfSteps(heads.steps);
  const { data } = heads.weights;
  const norms = /** @type {Float32Array} */ (heads.norms.data).subarray(at * keys, (at + 1) * keys);
  const columnOf = Int32Array.from({ length: keys }, (_, key) =>
    Math.floor((key * columns) / keys),
  );
  const out = new Float32Array(rows * columns);
  for (let query = 0, from = at * queries * keys; query < queries; query++) {
    const row = Math.floor((query * rows) / queries) * columns;
    for (let key = 0; key < keys; key++, from++) {
      const step = data[from];
      if (!step) continue;
      const value = weighted ? table[step] * norms[key] : table[step];
      const to = row + columnOf[key];
      if (value > out[to]) out[to] = value;
    }
  }
  return out;
}

/**
 * The largest number of some.
 * @param {ArrayLike<number>} values
 */
export function mostOf(values) {
  let most = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > most) most = values[i];
  return most;
}

/**
 * The places of the largest numbers, the largest first; zeros are left out.
 * @param {ArrayLike<number>} values
 * @param {number} count
 */
export function strongestPlaces(values, count) {
  const places = Array.from({ length: values.length }, (_, place) => place).filter(
    (place) => values[place] > 0,
  );
  return places.sort((a, b) => values[b] - values[a]).slice(0, count);
}

/**
 * Numbers of the queries at the places that these have among the keys; NaN elsewhere.
 * @param {Float32Array} values
 * @param {import("./payload.js").Patterns} heads
 */
export function spread(values, heads) {
  const out = new Float32Array(heads.keys.length).fill(NaN);
  heads.positions.forEach((place, query) => {
    out[place] = values[query];
  });
  return out;
}

/**
 * A place that is there.
 * @param {number} value
 * @param {number} last
 */
export function clamped(value, last) {
  return Math.min(last, Math.max(0, value));
}
