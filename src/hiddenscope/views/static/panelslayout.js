/**
 * Where panels lie, and where points lie in them.
 *
 * @typedef {{x: number, y: number, size: number, panel: number}} Box
 * @typedef {{boxes: Box[], heads: {x: number, y: number, name: string}[], width: number, height: number}} Layout
 * @typedef {import("./payload.js").Panels} Panels
 */

import { widthOf } from "./canvas.js";
import { lettering } from "./pen.js";

export const TITLE = 20;
export const LINE = 14;
const GAP = 16;
const MARGIN = 0.05;

/**
 * @param {Panels} panels
 * @param {number} room
 * @param {number} lines how many lines the captions need
 * @returns {Layout}
 */
export function layoutPanels(panels, room, lines) {
  const count = panels.sites.length;
  const least = count > 4 ? 150 : 220;
  const across = Math.max(1, Math.min(count, Math.floor((room + GAP) / (least + GAP))));
  const size = Math.floor(Math.min(count > 4 ? 230 : 340, (room - GAP * (across - 1)) / across));
  const deep = TITLE + size + LINE * lines + GAP;
  /** @type {Layout} */
  const layout = { boxes: [], heads: [], width: across * (size + GAP) - GAP, height: 0 };
  let column = 0, y = 0;
  for (let panel = 0; panel < count; panel++) {
    const fresh = panels.rows.length > 0 && panels.rows[panel] !== panels.rows[panel - 1];
    if (column === across || (fresh && column)) [column, y] = [0, y + deep];
    if (fresh) {
      layout.heads.push({ x: 0, y: y + 10, name: panels.rows[panel] });
      y += 28;
    }
    layout.boxes.push({ x: column * (size + GAP), y: y + TITLE, size, panel });
    column++;
  }
  layout.height = y + deep;
  return layout;
}

/**
 * One panel, large.
 * @param {number} panel
 * @param {number} room
 * @param {number} lines
 * @returns {Layout}
 */
export function layoutOne(panel, room, lines) {
  const size = Math.min(540, room);
  return { boxes: [{ x: 0, y: TITLE, size, panel }], heads: [], width: size, height: TITLE + size + LINE * lines + GAP };
}

/**
 * The points of one panel between 0 and 1, y downwards, both axes to one scale.
 * @param {Panels} panels
 * @param {number} panel
 */
export function unitPoints(panels, panel) {
  const count = panels.points.shape[1];
  const data = panels.points.data.subarray(2 * count * panel, 2 * count * (panel + 1));
  const low = [Infinity, Infinity], high = [-Infinity, -Infinity];
  for (let i = 0; i < data.length; i++) {
    const value = data[i];
    if (!Number.isFinite(value)) continue;
    if (value < low[i & 1]) low[i & 1] = value;
    if (value > high[i & 1]) high[i & 1] = value;
  }
  const span = Math.max(high[0] - low[0], high[1] - low[1]) || 1;
  const middle = [(low[0] + high[0]) / 2, (low[1] + high[1]) / 2];
  const scale = (1 - 2 * MARGIN) / span;
  const units = new Float32Array(data.length);
  for (let i = 0; i < data.length; i += 2) {
    units[i] = 0.5 + (data[i] - middle[0]) * scale;
    units[i + 1] = 0.5 - (data[i + 1] - middle[1]) * scale;
  }
  return units;
}

/**
 * Words in lines of a given width.
 * @param {string} text
 * @param {number} room
 * @param {string} font
 * @param {number} size
 */
export function wrapped(text, room, font, size) {
  /** @type {string[]} */
  const lines = [];
  for (const word of text.split(" ").filter(Boolean)) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    if (lines.length && widthOf(longer, lettering(font, { size })) <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/**
 * The box at a place.
 * @param {Layout} layout
 * @param {number} x
 * @param {number} y
 */
export function boxAt(layout, x, y) {
  return layout.boxes.find((box) => x >= box.x && x < box.x + box.size && y >= box.y && y < box.y + box.size) ?? null;
}

/**
 * The nearest point to a place between 0 and 1, within reach, or -1.
 * @param {Float32Array} units
 * @param {number} x
 * @param {number} y
 * @param {number} reach
 */
export function nearest(units, x, y, reach) {
  let best = -1, least = reach * reach;
  for (let i = 0; i < units.length; i += 2) {
    const far = (units[i] - x) ** 2 + (units[i + 1] - y) ** 2;
    if (far < least) [best, least] = [i / 2, far];
  }
  return best;
}

/**
 * Which points lie inside a loop.
 * @param {Float32Array} units
 * @param {number[][]} loop
 */
export function inside(units, loop) {
  const mask = new Uint8Array(units.length / 2);
  for (let i = 0; i < mask.length; i++) {
    const [x, y] = [units[2 * i], units[2 * i + 1]];
    for (let k = 0, j = loop.length - 1; k < loop.length; j = k++) {
      const [ax, ay] = loop[k], [bx, by] = loop[j];
      if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) mask[i] ^= 1;
    }
  }
  return mask;
}
