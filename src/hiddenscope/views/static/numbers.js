/** Numbers as a person reads them. */

/**
 * Four digits that count.
 * @param {number} value
 */
export function formatNumber(value) {
  if (Number.isNaN(value)) return "none";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return scientific(value, 3);
  const digits = size === 0 ? 0 : Math.min(8, 3 - Math.floor(Math.log10(size)));
  const text = size >= 1000 ? grouped(Math.round(size)) : trimmed(size.toFixed(digits));
  return value < 0 && text !== "0" ? `−${text}` : text;
}

/**
 * Short, for an axis.
 * @param {number} value
 */
export function formatTick(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return scientific(value, 2);
  const text = size >= 1000 ? grouped(Math.round(size)) : trimmed(size.toPrecision(6));
  return value < 0 ? `−${text}` : text;
}

/**
 * @param {number} value
 * @param {number} digits
 */
function scientific(value, digits) {
  const [front, power] = value.toExponential(digits).split("e");
  return `${trimmed(front)}e${power.replace("+", "")}`.replaceAll("-", "−");
}

/** @param {number} whole */
function grouped(whole) {
  return String(whole).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** @param {string} text */
function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/**
 * Round numbers between two ends, some five of them.
 * @param {number} low
 * @param {number} high
 * @param {number} [wanted]
 */
export function linearTicks(low, high, wanted = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find((size) => size * power >= rough) ?? 10);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++)
    ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}

/**
 * Powers of ten between two ends, and 2 and 5 times them where there is room.
 * @param {number} low
 * @param {number} high
 * @param {number} [wanted]
 */
export function logTicks(low, high, wanted = 5) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.ceil(Math.log10(high) - 1e-9);
  const step = Math.max(1, Math.ceil((last - first) / wanted));
  let fine = [1];
  if (last - first < wanted) fine = [1, 3];
  if (last - first === 2) fine = [1, 2, 5];
  if (last - first <= 1) fine = [1, 2, 3, 5, 7];
  const ticks = [];
  for (let power = first; power <= last; power += step)
    ticks.push(...fine.map((front) => front * 10 ** power));
  return ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
}
