/** A view as a file: PNG and SVG as it is drawn, CSV as its numbers. */

import { newContext } from "./canvas.js";
import { canvasPen, svgPen } from "./pen.js";
import { theme } from "./theme.js";

/**
 * @typedef {{width: number, height: number, paint: (pen: import("./pen.js").Pen) => void}} Picture
 * @typedef {string | number | null} Cell
 */

const MOST_PIXELS = 1e8;
const LONGEST_SIDE = 16000;

/**
 * @param {Picture} picture
 * @param {string} name
 */
export async function savePng(picture, name) {
  const { paper, font } = theme();
  const { width, height } = picture;
  const scale = Math.min(
    2,
    LONGEST_SIDE / width,
    LONGEST_SIDE / height,
    Math.sqrt(MOST_PIXELS / (width * height)),
  );
  const context = newContext(Math.ceil(width * scale), Math.ceil(height * scale));
  context.scale(scale, scale);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  picture.paint(canvasPen(context, font));
  const blob = await new Promise((done) => context.canvas.toBlob(done, "image/png"));
  if (blob instanceof Blob) hand(blob, `${name}.png`);
}

/**
 * @param {Picture} picture
 * @param {string} name
 */
export function saveSvg(picture, name) {
  const { paper, font } = theme();
  const { pen, text } = svgPen(Math.ceil(picture.width), Math.ceil(picture.height), font);
  pen.rect(0, 0, picture.width, picture.height, paper);
  picture.paint(pen);
  hand(new Blob([text()], { type: "image/svg+xml" }), `${name}.svg`);
}

/**
 * @param {Iterable<Cell[]>} rows
 * @param {string} name
 */
export function saveCsv(rows, name) {
  const lines = [];
  for (const row of rows) lines.push(`${row.map(csvCell).join(",")}\r\n`);
  hand(new Blob(["\ufeff", ...lines], { type: "text/csv;charset=utf-8" }), `${name}.csv`);
}

/**
 * Text stays text: a spreadsheet must not take it for a formula, nor stop at a NUL.
 * @param {Cell} cell
 */
export function csvCell(cell) {
  if (cell === null) return "";
  if (typeof cell === "number") return Number.isNaN(cell) ? "" : String(cell);
  const whole = cell
    .replaceAll("\0", "\\x00")
    .replace(/\p{Cs}/gu, (lone) => `\\u${lone.charCodeAt(0).toString(16)}`);
  const plain = /^[=+\-@\t\r]/.test(whole) ? `'${whole}` : whole;
  return /[",\r\n\t']/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/**
 * @param {Blob} blob
 * @param {string} name
 */
function hand(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
