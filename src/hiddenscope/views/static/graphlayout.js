/**
 * Where the nodes and the edges of a graph stand, for any width, and what is under the pointer.
 *
 * @typedef {{x: number, y: number, wide: number, label: string}} Node
 * @typedef {{points: number[][], thick: number}} Edge
 * @typedef {{nodes: Node[], edges: Edge[], size: number, width: number, height: number}}
 *   GraphLayout
 */

import { fitted, widthOf } from "./canvas.js";
import { lettering } from "./pen.js";
import { shownText } from "./text.js";

// As in results/layering.py and pictures.py: the width that a graph is laid out for, in pixels, and
// that of a character of a label.
const NARROW = 320;
const CHARACTER = 7.7;
const BESIDE = 8;
const PITCH = 19; // from one line to the next
export const FRAME = { high: 20, side: 6, apart: 5 }; // around a label
const FONT_SIZE = 12; // of letters
const THICK = { least: 1.4, most: 6 };
const REACH = 8; // how far from an edge a pointer is still on it
const CURVE = 8; // of a curve from one line to the next

/**
 * @param {import("./payload.js").Graph} graph
 * @param {number} width
 * @param {string} font
 * @param {number} [top] where it begins
 * @returns {GraphLayout}
 */
export function graphLayout(graph, width, font, top = 0) {
  const [lines, columns] = graph.across.shape;
  const room = Math.max(1, width - 2 * BESIDE);
  const size = Math.min(FONT_SIZE, (FONT_SIZE * room) / NARROW);
  const across = (/** @type {number} */ line, /** @type {number} */ item) =>
    BESIDE + room * graph.across.data[line * columns + item];
  const down = (/** @type {number} */ line) =>
    top + BESIDE + FRAME.high / 2 + (lines - 1 - line) * PITCH;
  const lineOf = graph.nodes.map((_, node) => {
    let line = 0;
    while (Number.isNaN(across(line, node))) line++;
    return line;
  });
  const most = mostOfEdges(graph);
  const nodes = graph.nodes.map((_, node) => ({
    x: across(lineOf[node], node),
    y: down(lineOf[node]),
    wide: 0,
    label: "",
  }));
  const edges = Array.from(graph.values.data, (value, edge) => {
    const stops = [];
    const last = lineOf[graph.target.data[edge]];
    for (let line = lineOf[graph.source.data[edge]]; line <= last; line++)
      stops.push([across(line, graph.nodes.length + edge), down(line)]);
    return { points: curve(stops), thick: thickness(Math.abs(value) / most) };
  });
  const layout = { nodes, edges, size, width, height: 3 * BESIDE + down(0) };
  // Whole names where they fit beside all that stands on their lines.
  const names = graph.nodes.map((name) => shownText(name, 60));
  const letters = lettering(font, { size });
  label(layout, names, letters);
  const fits = nodes.every((node, i) => {
    const line = lineOf[i];
    for (let item = 0; item < columns; item++) {
      const other = nodes[item];
      const need = node.wide / 2 + (other ? other.wide / 2 : 0) + FRAME.apart;
      if (item !== i && (!other || lineOf[item] === line))
        if (Math.abs(across(line, item) - node.x) < need && !isEnd(graph, item, i)) return false;
    }
    return node.x > node.wide / 2 && node.x < width - node.wide / 2;
  });
  if (fits) return layout;
  const short = graph.short.map((name) => {
    const room = Math.max(3, [...name].length) * CHARACTER * (size / FONT_SIZE);
    return fitted(shownText(name, 60), letters, room);
  });
  label(layout, short, letters);
  return layout;
}

/** @param {number} share of the strongest edge, from 0 to 1 */
export function thickness(share) {
  return Math.max(THICK.least, THICK.most * share);
}

/** @param {import("./payload.js").Graph} graph */
export function mostOfEdges(graph) {
  return Math.max(...Array.from(graph.values.data, Math.abs), Number.MIN_VALUE);
}

/**
 * Whether an item of the layout is an edge that ends in this node.
 * @param {import("./payload.js").Graph} graph
 * @param {number} item
 * @param {number} node
 */
function isEnd({ nodes, source, target }, item, node) {
  const edge = item - nodes.length;
  return source.data[edge] === node || target.data[edge] === node;
}

/**
 * @param {GraphLayout} layout
 * @param {string[]} labels
 * @param {string} letters
 */
function label({ nodes }, labels, letters) {
  nodes.forEach((node, i) => {
    node.label = labels[i];
    node.wide = widthOf(labels[i], letters) + 2 * FRAME.side;
  });
}

/**
 * A smooth curve through stops that sways no further than they do (Fritsch and Carlson 1980).
 * @param {number[][]} stops
 */
function curve(stops) {
  const steps = stops.slice(1).map(([x], i) => x - stops[i][0]);
  const slopes = stops.map((_, i) => {
    const [before, after] = [steps[i - 1] ?? steps[i], steps[i] ?? steps[i - 1]];
    return before * after > 0 ? (2 * before * after) / (before + after) : 0;
  });
  const points = [stops[0]];
  for (let i = 1; i < stops.length; i++) {
    const [[x, y], [, end]] = [stops[i - 1], stops[i]];
    for (let step = 1; step <= CURVE; step++) {
      const part = step / CURVE;
      const sway = part * (1 - part) * ((1 - part) * slopes[i - 1] - part * slopes[i]);
      const bend = part * part * (3 - 2 * part);
      points.push([x + bend * steps[i - 1] + sway, y + part * (end - y)]);
    }
  }
  return points;
}

/**
 * The node at a place, or else the nearest edge; -1 for none.
 * @param {GraphLayout} layout
 * @param {number} x
 * @param {number} y
 */
export function underPointer({ nodes, edges }, x, y) {
  const node = nodes.findIndex(
    (each) => Math.abs(each.x - x) <= each.wide / 2 && Math.abs(each.y - y) <= FRAME.high / 2,
  );
  if (node >= 0) return { node, edge: -1 };
  let edge = -1,
    nearest = Infinity;
  edges.forEach(({ points, thick }, i) => {
    for (let k = 1; k < points.length; k++) {
      const distance = fromSegment(points[k - 1], points[k], x, y);
      if (distance < Math.min(nearest, REACH + thick / 2)) [edge, nearest] = [i, distance];
    }
  });
  return { node, edge };
}

/**
 * @param {number[]} from
 * @param {number[]} to
 * @param {number} x
 * @param {number} y
 */
function fromSegment([left, top], [right, bottom], x, y) {
  const [wide, high] = [right - left, bottom - top];
  const along = ((x - left) * wide + (y - top) * high) / (wide * wide + high * high || 1);
  const part = Math.min(1, Math.max(0, along));
  return Math.hypot(left + part * wide - x, top + part * high - y);
}
