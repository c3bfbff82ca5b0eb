/** Painting panels: points are stamped into pixels, so that ten thousand of them take a few milliseconds. */

import { fitted, newContext } from "./canvas.js";
import { parts } from "./colour.js";
import { LINE, wrapped } from "./panelslayout.js";
import { lettering } from "./pen.js";
import { shownText } from "./text.js";

/**
 * @typedef {{units: Float32Array, labels: ArrayLike<number>, colours: string[], chosen: Uint8Array | null}} Dots
 * @typedef {import("./theme.js").Theme} Theme
 */

const CAPTION = 11;

/**
 * @param {number} count
 * @param {number} size of the panel
 */
export function dotSize(count, size) {
  const base = count <= 200 ? 4 : count <= 1500 ? 3 : count <= 4000 ? 2.2 : 1.6;
  return size > 400 ? base * 1.3 : size < 190 ? base * 0.85 : base;
}

/** @param {number} count */
export function dotOpacity(count) {
  return count <= 1500 ? 0.88 : count <= 4000 ? 0.7 : 0.55;
}

/**
 * A picture of one panel's points.
 * @param {Dots} dots
 * @param {number} size in CSS pixels
 * @param {number} ratio
 * @param {Theme} theme
 */
export function stampDots(dots, size, ratio, theme) {
  const side = Math.max(1, Math.round(size * ratio));
  const context = newContext(side, side);
  const image = context.createImageData(side, side);
  const [red, green, blue] = parts(theme.paper);
  new Uint32Array(image.data.buffer).fill((255 << 24) | (blue << 16) | (green << 8) | red);
  const count = dots.units.length / 2;
  const stamp = roundStamp(dotSize(count, size) * ratio, dotOpacity(count));
  const inks = dots.colours.map(parts);
  const grey = parts(theme.faint);
  for (const pass of dots.chosen ? [0, 1] : [1]) {
    for (let i = 0; i < count; i++) {
      if (dots.chosen && dots.chosen[i] !== pass) continue;
      const [x, y] = [dots.units[2 * i] * side, dots.units[2 * i + 1] * side];
      if (x === x && y === y) press(image.data, side, x, y, stamp, pass ? inks[dots.labels[i] % inks.length] : grey);
    }
  }
  context.putImageData(image, 0, 0);
  return context.canvas;
}

/**
 * How much of each pixel around a point its dot covers.
 * @param {number} radius
 * @param {number} opacity
 */
function roundStamp(radius, opacity) {
  const reach = Math.ceil(radius);
  const cover = [];
  for (let y = -reach; y <= reach; y++) {
    for (let x = -reach; x <= reach; x++) {
      const share = Math.min(1, Math.max(0, radius + 0.5 - Math.hypot(x, y)));
      if (share > 0) cover.push(x, y, share * opacity);
    }
  }
  return Float32Array.from(cover);
}

/**
 * @param {Uint8ClampedArray} pixels
 * @param {number} side
 * @param {number} atX
 * @param {number} atY
 * @param {Float32Array} stamp
 * @param {number[]} ink
 */
function press(pixels, side, atX, atY, stamp, ink) {
  const [left, top] = [Math.round(atX - 0.5), Math.round(atY - 0.5)];
  for (let k = 0; k < stamp.length; k += 3) {
    const x = left + stamp[k], y = top + stamp[k + 1];
    if (x < 0 || y < 0 || x >= side || y >= side) continue;
    const to = 4 * (y * side + x), share = stamp[k + 2];
    pixels[to] += (ink[0] - pixels[to]) * share;
    pixels[to + 1] += (ink[1] - pixels[to + 1]) * share;
    pixels[to + 2] += (ink[2] - pixels[to + 2]) * share;
  }
}

/**
 * The same points with a pen, for a drawing that keeps its lines sharp.
 * @param {import("./pen.js").Pen} pen
 * @param {Dots} dots
 * @param {import("./panelslayout.js").Box} box
 * @param {Theme} theme
 */
export function drawDots(pen, dots, box, theme) {
  const count = dots.units.length / 2;
  const radius = dotSize(count, box.size);
  for (const pass of dots.chosen ? [0, 1] : [1]) {
    for (let i = 0; i < count; i++) {
      if (dots.chosen && dots.chosen[i] !== pass) continue;
      const [x, y] = [box.x + dots.units[2 * i] * box.size, box.y + dots.units[2 * i + 1] * box.size];
      const fill = pass ? dots.colours[dots.labels[i] % dots.colours.length] : theme.faint;
      if (x === x && y === y) pen.dot(x, y, radius, fill, dotOpacity(count));
    }
  }
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {import("./panelslayout.js").Box} box
 * @param {{site: string, caption: string, message: string, current: boolean}} labels
 * @param {Theme} theme
 */
export function paintAround(pen, box, labels, theme) {
  const bold = lettering(theme.font, { size: 12, bold: true });
  const title = fitted(shownText(labels.site, 60), bold, box.size);
  pen.text(title, box.x, box.y - 10, { fill: labels.current ? theme.accent : theme.ink, size: 12, bold: true });
  pen.outline(box.x + 0.5, box.y + 0.5, box.size - 1, box.size - 1, labels.current ? theme.accent : theme.faint, labels.current ? 2 : 1);
  const message = wrapped(shownText(labels.message, 200), box.size - 24, theme.font, 12);
  message.forEach((line, i) => {
    const y = box.y + box.size / 2 + (i - (message.length - 1) / 2) * 17;
    const short = fitted(line, lettering(theme.font, { size: 12 }), box.size - 12);
    pen.text(short, box.x + box.size / 2, y, { fill: theme.muted, size: 12, anchor: "middle" });
  });
  wrapped(shownText(labels.caption, 300), box.size, theme.font, CAPTION).forEach((line, i) => {
    const short = fitted(line, lettering(theme.font, { size: CAPTION }), box.size);
    pen.text(short, box.x, box.y + box.size + 10 + LINE * i, { fill: theme.muted, size: CAPTION });
  });
}

/**
 * @param {import("./payload.js").Panels} panels
 * @param {number} size
 * @param {string} font
 */
export function captionLines(panels, size, font) {
  return panels.captions.reduce((most, caption) => Math.max(most, wrapped(shownText(caption, 300), size, font, CAPTION).length), 0);
}
