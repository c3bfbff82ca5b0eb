/**
 * Where panels lie, and where points lie in them.
 *
 * @typedef {{x: number, y: number, width: number, height: number, panel: number}} Box
 * @typedef {{x: number, y: number, width: number, name: string}} Head
 * @typedef {{boxes: Box[], heads: Head[], width: number, height: number}} Layout
 * @typedef {import("./payload.js").Panels} Panels
 */

import { widthOf } from "./canvas.js";
import { lettering } from "./pen.js";

export const TITLE = 20;
export const LINE = 14;
const GAP = 16;
const HEAD = 28;
const MARGIN = 0.05;
const LEAST = 150;
const LEAST_SIDE = 260; // of one layer, where models stand side by side

/**
 * The panels of each row.
 * @param {Panels} panels
 */
export function rowsOf(panels) {
  /** @type {number[][]} */
  const rows = [];
  panels.sites.forEach((_, panel) => {
    if (!panel || (panels.rows.length && panels.rows[panel] !== panels.rows[panel - 1]))
      rows.push([]);
    rows[rows.length - 1].push(panel);
  });
  return rows;
}

/**
 * The panel of a row that is as deep as another; of two, the one with its name.
 * @param {Panels} panels
 * @param {number[]} row
 * @param {number} panel
 */
export function partner(panels, row, panel) {
  const far = (/** @type {number} */ candidate) =>
    Math.abs(panels.depths[candidate] - panels.depths[panel]);
  const same = (/** @type {number} */ candidate) =>
    Number(panels.sites[candidate] !== panels.sites[panel]);
  return row.reduce(
    (best, candidate) =>
      (far(candidate) - far(best) || same(candidate) - same(best)) < 0 ? candidate : best,
    row[0],
  );
}

/**
 * Every panel, each row wrapped by itself.
 * @param {Panels} panels
 * @param {number} room
 * @param {number} lines how many lines the captions need
 * @returns {Layout}
 */
export function layoutAll(panels, room, lines) {
  const count = panels.sites.length;
  return wrappedRows(
    panels,
    rowsOf(panels),
    room,
    lines,
    count > 4 ? LEAST : 220,
    count > 4 ? 230 : 340,
  );
}

/**
 * The panels that are shown first. Those of equal depth stand beneath one another, or side by side
 * where the screen is too narrow for a row.
 * @param {Panels} panels
 * @param {number} room
 * @param {number} lines
 * @returns {Layout}
 */
export function layoutFirst(panels, room, lines) {
  const { first } = panels;
  const fits = (/** @type {number} */ count) => room >= count * (LEAST + GAP) - GAP;
  if (first.length > 1 && fits(first[0].length)) return matrix(panels, first, room, lines);
  if (first.length === 2) return pairs(panels, first, room, lines);
  return wrappedRows(
    panels,
    first.map((row) => row.filter((panel) => panel >= 0)),
    room,
    lines,
    LEAST,
    340,
  );
}

/**
 * @param {Panels} panels
 * @param {number[][]} rows
 * @param {number} room
 * @param {number} lines
 * @param {number} least
 * @param {number} most
 * @returns {Layout}
 */
function wrappedRows(panels, rows, room, lines, least, most) {
  const longest = Math.max(...rows.map((row) => row.length));
  const across = Math.max(1, Math.min(longest, Math.floor((room + GAP) / (least + GAP))));
  const size = Math.floor(Math.min(most, (room - GAP * (across - 1)) / across));
  const deep = TITLE + size + LINE * lines + GAP;
  /** @type {Layout} */
  const layout = { boxes: [], heads: [], width: across * (size + GAP) - GAP, height: 0 };
  for (const row of rows) {
    if (panels.rows.length) {
      layout.heads.push({
        x: 0,
        y: layout.height + 10,
        width: layout.width,
        name: panels.rows[row[0]],
      });
      layout.height += HEAD;
    }
    row.forEach((panel, i) => {
      const [column, line] = [i % across, Math.floor(i / across)];
      layout.boxes.push({
        x: column * (size + GAP),
        y: layout.height + line * deep + TITLE,
        width: size,
        height: size,
        panel,
      });
    });
    layout.height += deep * Math.ceil(row.length / across);
  }
  return layout;
}

/**
 * A line for each row, a column for each depth.
 * @param {Panels} panels
 * @param {number[][]} first
 * @param {number} room
 * @param {number} lines
 * @returns {Layout}
 */
function matrix(panels, first, room, lines) {
  const across = first[0].length;
  const size = Math.floor(Math.min(340, (room - GAP * (across - 1)) / across));
  const deep = HEAD + TITLE + size + LINE * lines + GAP;
  const width = across * (size + GAP) - GAP;
  /** @type {Layout} */
  const layout = { boxes: [], heads: [], width, height: deep * first.length };
  first.forEach((row, line) => {
    layout.heads.push({
      x: 0,
      y: line * deep + 10,
      width,
      name: panels.rows[row.find((panel) => panel >= 0) ?? 0],
    });
    row.forEach((panel, column) => {
      const y = line * deep + HEAD + TITLE;
      if (panel >= 0)
        layout.boxes.push({ x: column * (size + GAP), y, width: size, height: size, panel });
    });
  });
  return layout;
}

/**
 * A line for each depth, a column for each of two rows.
 * @param {Panels} panels
 * @param {number[][]} first
 * @param {number} room
 * @param {number} lines
 * @returns {Layout}
 */
function pairs(panels, first, room, lines) {
  const size = Math.floor(Math.min(340, (room - GAP) / 2));
  const deep = TITLE + size + LINE * lines + GAP;
  /** @type {Layout} */
  const layout = {
    boxes: [],
    heads: [],
    width: 2 * size + GAP,
    height: HEAD + deep * first[0].length,
  };
  first.forEach((row, column) => {
    const x = column * (size + GAP);
    layout.heads.push({
      x,
      y: 10,
      width: size,
      name: panels.rows[row.find((panel) => panel >= 0) ?? 0],
    });
    row.forEach((panel, line) => {
      if (panel >= 0)
        layout.boxes.push({ x, y: HEAD + line * deep + TITLE, width: size, height: size, panel });
    });
  });
  return layout;
}

/**
 * One layer as large as the page allows: one panel of each row, side by side where there is room.
 * @param {Panels} panels
 * @param {number[]} shown
 * @param {number} room
 * @param {number} lines
 * @returns {Layout}
 */
export function layoutOne(panels, shown, room, lines) {
  const beside = room >= shown.length * (LEAST_SIDE + GAP) - GAP;
  const across = beside ? shown.length : 1;
  const width = Math.floor((room - GAP * (across - 1)) / across);
  const height = Math.min(width, 640, Math.max(360, Math.round(0.58 * room)));
  const named = shown.length > 1 ? HEAD : 0;
  const deep = named + TITLE + height + LINE * lines + GAP;
  /** @type {Layout} */
  const layout = { boxes: [], heads: [], width: room, height: beside ? deep : deep * shown.length };
  shown.forEach((panel, i) => {
    const [x, y] = beside ? [i * (width + GAP), 0] : [0, i * deep];
    if (named) layout.heads.push({ x, y: y + 10, width, name: panels.rows[panel] });
    layout.boxes.push({ x, y: y + named + TITLE, width, height, panel });
  });
  return layout;
}

/**
 * The points of one panel between 0 and 1, y downwards, both axes to one scale.
 * @param {Panels} panels
 * @param {number} panel
 */
export function unitPoints(panels, panel) {
  const count = panels.points.shape[1];
  const data = panels.points.data.subarray(2 * count * panel, 2 * count * (panel + 1));
  const low = [Infinity, Infinity],
    high = [-Infinity, -Infinity];
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
 * Words in lines of a given width; a line end begins another line.
 * @param {string} text
 * @param {number} room
 * @param {string} font
 * @param {number} size
 */
export function wrapped(text, room, font, size) {
  /** @type {string[]} */
  const lines = [];
  for (const line of text.split("\n")) {
    let fresh = true;
    for (const word of line.split(" ").filter(Boolean)) {
      const longer = fresh ? word : `${lines[lines.length - 1]} ${word}`;
      if (!fresh && widthOf(longer, lettering(font, { size })) <= room)
        lines[lines.length - 1] = longer;
      else lines.push(word);
      fresh = false;
    }
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
  return (
    layout.boxes.find(
      (box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height,
    ) ?? null
  );
}

/**
 * The nearest point to a place, within reach, or -1.
 * @param {Float32Array} places
 * @param {number} x
 * @param {number} y
 * @param {number} reach
 */
export function nearest(places, x, y, reach) {
  let best = -1,
    least = reach * reach;
  for (let i = 0; i < places.length; i += 2) {
    const far = (places[i] - x) ** 2 + (places[i + 1] - y) ** 2;
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
      const [ax, ay] = loop[k],
        [bx, by] = loop[j];
      if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) mask[i] ^= 1;
    }
  }
  return mask;
}
