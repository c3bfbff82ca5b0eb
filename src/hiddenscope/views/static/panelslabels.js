/**
 * Labels of chosen points, beside their dots, where they cover neither one another nor another
 * chosen dot.
 */

import { fitted, widthOf } from "./canvas.js";
import { lettering } from "./pen.js";

/**
 * @typedef {{x: number, y: number, width: number, height: number}} Area
 * @typedef {import("./panelslayout.js").Box} Box
 */

const HIGH = 17;
const FAR = 4;
const MOST_LABELS = 60;
const SIZE = 12;
const WIDEST = 260;

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Box} box
 * @param {{x: number, y: number, text: string}[]} points
 * @param {number} radius of a dot
 * @param {import("./theme.js").Theme} theme
 */
export function paintLabels(pen, box, points, radius, theme) {
  const font = lettering(theme.font, { size: SIZE });
  const within = points.filter(
    ({ x, y }) => x >= box.x && y >= box.y && x <= box.x + box.width && y <= box.y + box.height,
  );
  const dots = within.map(({ x, y }) => ({
    x: x - radius,
    y: y - radius,
    width: 2 * radius,
    height: 2 * radius,
  }));
  /** @type {Area[]} */
  const taken = [];
  within.slice(0, MOST_LABELS).forEach((point, i) => {
    const text = fitted(point.text, font, Math.min(WIDEST, box.width / 2));
    const area = around(point, widthOf(text, font) + 6, radius).find(
      (label) =>
        inBox(label, box) &&
        !taken.some((other) => overlap(label, other)) &&
        !dots.some((dot, k) => k !== i && overlap(label, dot)),
    );
    if (!area) return;
    taken.push(area);
    const { x, y, width, height } = area;
    pen.area(
      [
        [x, y],
        [x + width, y],
        [x + width, y + height],
        [x, y + height],
      ],
      theme.paper,
      0.85,
    );
    pen.text(text, x + 3, y + height / 2, { fill: theme.ink, size: SIZE });
  });
}

/**
 * Where a label may stand: right, left, above, below.
 * @param {{x: number, y: number}} point
 * @param {number} width
 * @param {number} radius
 * @returns {Area[]}
 */
function around({ x, y }, width, radius) {
  const far = radius + FAR;
  return [
    { x: x + far, y: y - HIGH / 2 },
    { x: x - far - width, y: y - HIGH / 2 },
    { x: x - width / 2, y: y - far - HIGH },
    { x: x - width / 2, y: y + far },
  ].map((corner) => ({ ...corner, width, height: HIGH }));
}

/**
 * @param {Area} point
 * @param {Box} box
 */
function inBox(point, box) {
  return (
    point.x >= box.x &&
    point.y >= box.y &&
    point.x + point.width <= box.x + box.width &&
    point.y + point.height <= box.y + box.height
  );
}

/**
 * @param {Area} first
 * @param {Area} other
 */
function overlap(first, other) {
  return (
    first.x < other.x + other.width &&
    other.x < first.x + first.width &&
    first.y < other.y + other.height &&
    other.y < first.y + first.height
  );
}
