/**
 * Reads the payload: base64, gzip, a JSON header, and sections of numbers whose bytes lie in
 * planes.
 *
 * @typedef {{data: Float32Array | Int32Array | Uint8Array, shape: number[]}} Numbers
 * @typedef {{kind: "Measure", name: string, values: Numbers, unit: string, meaning: "sequential" |
 *   "diverging", scale: "linear" | "log", each_layer: boolean, limits: [number, number] | null,
 *   influence: Numbers | null, title: string}} Measure
 * @typedef {{kind: "Words", words: string[], chosen: Numbers, probabilities: Numbers | null,
 *   framed: boolean}} Words
 * @typedef {{kind: "Grid", title: string, sites: string[], tokens: (string | null)[], measures:
 *   Measure[], words: Words | null, second: (string | null)[], texts: string[], text_of: number[],
 *   note: string, token_rows?: string[], x_name?: string, y_name?: string, bars?: number}} Grid
 * @typedef {{kind: "Panels", title: string, sites: string[], points: Numbers, classes: string[],
 *   labels: Numbers | [], texts: string[], captions: string[], messages: string[], rows: string[],
 *   rows_name: string, note: string, marks: string[], grey: string, depths: number[], first:
 *   number[][]}} Panels
 * @typedef {{kind: "Series", name: string, y: Numbers, low: Numbers | null, high: Numbers | null,
 *   band: string, style: "line" | "dash" | "bar"}} Series
 * @typedef {{kind: "Lines", title: string, x: string[], series: Series[], x_name: string, y_name:
 *   string, unit: string, scale: "linear" | "log", note: string, x_scale?: "linear" | "log"}} Lines
 * @typedef {{kind: "HeadScore", name: string, here: Numbers | null, score: Numbers | null, null:
 *   Numbers | null, p: Numbers | null}} HeadScore
 * @typedef {{kind: "Patterns", title: string, sites: string[], heads: string[], queries: string[],
 *   keys: string[], weights: Numbers, steps: number, norms: Numbers, positions: number[], scores:
 *   HeadScore[], large: [number, number], weighted: boolean, note: string}} Patterns
 * @typedef {{kind: "Graph", title: string, nodes: string[], rows: number[], source: Numbers,
 *   target: Numbers, values: Numbers, kinds: string[], value_name: string, unit: string, note:
 *   string, exact: Numbers | null, exact_name: string, short: string[], across: Numbers}} Graph
 * @typedef {Grid | Panels | Lines | Patterns | Graph} View
 * @typedef {{dtype: string, shape: number[], offset: number, length: number}} Section
 */

const WIDTHS = /** @type {Record<string, number>} */ ({
  float32: 4,
  int32: 4,
  float16: 2,
  uint16: 2,
  uint8: 1,
});

/**
 * The views that a payload holds.
 * @param {string} text
 * @returns {Promise<View[]>}
 */
export async function unpack(text) {
  const raw = await gunzip(fromBase64(text.trim()));
  const bytes = new Uint8Array(raw);
  if (String.fromCharCode(...bytes.subarray(0, 4)) !== "HSV1")
    throw new Error("This is no payload of views.");
  const start = 8 + new DataView(raw).getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const numbers = /** @type {Section[]} */ (header.arrays).map((section) =>
    read(section, bytes.subarray(start)),
  );
  return header.views.map((/** @type {unknown} */ view) => filled(view, numbers));
}

/** @param {string} text */
function fromBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** @param {Uint8Array<ArrayBuffer>} bytes */
async function gunzip(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/**
 * Floats become Float32Array and whole numbers Int32Array, whatever they were packed as; bytes stay
 * bytes.
 * @param {Section} section
 * @param {Uint8Array} bytes
 * @returns {Numbers}
 */
function read(section, bytes) {
  const width = WIDTHS[section.dtype];
  const count = section.length / width;
  const joined = new Uint8Array(section.length);
  for (let plane = 0; plane < width; plane++) {
    const from = section.offset + plane * count;
    for (let i = 0, to = plane; i < count; i++, to += width) joined[to] = bytes[from + i];
  }
  return { data: typed(section.dtype, joined.buffer), shape: section.shape };
}

/**
 * Sections are little-endian, as is every machine that runs a browser.
 * @param {string} dtype
 * @param {ArrayBuffer} buffer
 */
function typed(dtype, buffer) {
  if (dtype === "float32") return new Float32Array(buffer);
  if (dtype === "float16") return Float32Array.from(new Uint16Array(buffer), half);
  if (dtype === "int32") return new Int32Array(buffer);
  return dtype === "uint16" ? Int32Array.from(new Uint16Array(buffer)) : new Uint8Array(buffer);
}

/** @param {number} bits */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent
    ? sign * (1 + fraction / 1024) * 2 ** (exponent - 15)
    : sign * fraction * 2 ** -24;
}

/**
 * The header's value with its arrays in place.
 * @param {any} value
 * @param {Numbers[]} numbers
 * @returns {any}
 */
function filled(value, numbers) {
  if (Array.isArray(value)) return value.map((inner) => filled(inner, numbers));
  if (value === null || typeof value !== "object") return value;
  if ("array" in value) return numbers[value.array];
  return Object.fromEntries(
    Object.entries(value).map(([name, inner]) => [name, filled(inner, numbers)]),
  );
}
