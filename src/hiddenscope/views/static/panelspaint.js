/**
 * Painting panels: points are stamped into pixels, so that ten thousand of them take a few
 * milliseconds.
 */

import { fitted, newContext, widthOf } from "./canvas.js";
import { parts } from "./colour.js";
import { LINE, wrapped } from "./panelslayout.js";
import { lettering } from "./pen.js";
import { shownText } from "./text.js";

/**
 * @typedef {{places: Float32Array, labels: ArrayLike<number>, colours: string[], grey: number,
 *   chosen: Uint8Array | null}} Dots
 * @typedef {import("./panelslayout.js").Box} Box
 * @typedef {import("./theme.js").Theme} Theme
 */

const CAPTION = 11;
// How large dots are, and how opaque, by how many there are.
const DOTS = [
  { most: 200, size: 4, opacity: 0.88 },
  { most: 1500, size: 3, opacity: 0.88 },
  { most: 4000, size: 2.2, opacity: 0.7 },
];
const CROWDED = { size: 1.6, opacity: 0.55 };

/**
 * @param {number} count
 * @param {number} size of the panel
 */
export function dotSize(count, size) {
  const base = crowding(count).size;
  if (size > 400) return base * 1.3;
  return size < 190 ? base * 0.85 : base;
}

/** @param {number} count */
export function dotOpacity(count) {
  return crowding(count).opacity;
}

/** @param {number} count */
function crowding(count) {
  return DOTS.find(({ most }) => count <= most) ?? CROWDED;
}

/**
 * The points in the order in which they are drawn, each with its colour: those that are not chosen
 * lie beneath those of no class, and these beneath the others.
 * @param {Dots} dots
 * @param {Theme} theme
 * @param {(x: number, y: number, colour: string) => void} draw
 */
function eachDot(dots, theme, draw) {
  const { places, labels, colours, grey, chosen } = dots;
  for (let pass = 0; pass < 3; pass++) {
    if ((pass === 0 && !chosen) || (pass === 1 && grey < 0)) continue;
    for (let i = 0; i < places.length / 2; i++) {
      let wanted = labels[i] === grey ? 1 : 2;
      if (chosen && !chosen[i]) wanted = 0;
      const x = places[2 * i],
        y = places[2 * i + 1];
      if (wanted === pass && x === x && y === y)
        draw(x, y, pass ? colours[labels[i]] : theme.faint);
    }
  }
}

/**
 * A picture of one panel's points.
 * @param {Dots} dots
 * @param {Box} box in CSS pixels
 * @param {number} ratio
 * @param {Theme} theme
 */
export function stampDots(dots, box, ratio, theme) {
  const [wide, high] = [box.width, box.height].map((side) => Math.max(1, Math.round(side * ratio)));
  const context = newContext(wide, high);
  const image = context.createImageData(wide, high);
  const [red, green, blue] = parts(theme.paper);
  new Uint32Array(image.data.buffer).fill((255 << 24) | (blue << 16) | (green << 8) | red);
  const count = dots.places.length / 2;
  const stamp = roundStamp(dotSize(count, box.width) * ratio, dotOpacity(count));
  const inks = new Map([theme.faint, ...dots.colours].map((colour) => [colour, parts(colour)]));
  eachDot(dots, theme, (x, y, colour) => {
    press(
      image,
      (x - box.x) * ratio,
      (y - box.y) * ratio,
      stamp,
      /** @type {number[]} */ (inks.get(colour)),
    );
  });
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
 * @param {ImageData} image
 * @param {number} atX
 * @param {number} atY
 * @param {Float32Array} stamp
 * @param {number[]} ink
 */
function press(image, atX, atY, stamp, ink) {
  const { data: pixels, width, height } = image;
  const [left, top] = [Math.round(atX - 0.5), Math.round(atY - 0.5)];
  for (let k = 0; k < stamp.length; k += 3) {
    const x = left + stamp[k],
      y = top + stamp[k + 1];
    if (x < 0 || y < 0 || x >= width || y >= height) continue;
    const to = 4 * (y * width + x),
      share = stamp[k + 2];
    pixels[to] += (ink[0] - pixels[to]) * share;
    pixels[to + 1] += (ink[1] - pixels[to + 1]) * share;
    pixels[to + 2] += (ink[2] - pixels[to + 2]) * share;
  }
}

/**
 * The same points with a pen, for a drawing that keeps its lines sharp.
 * @param {import("./pen.js").Pen} pen
 * @param {Dots} dots
 * @param {Box} box
 * @param {Theme} theme
 */
export function drawDots(pen, dots, box, theme) {
  const count = dots.places.length / 2;
  const radius = dotSize(count, box.width);
  eachDot(dots, theme, (x, y, colour) => {
    const within = x >= box.x && y >= box.y && x <= box.x + box.width && y <= box.y + box.height;
    if (within) pen.dot(x, y, radius, colour, dotOpacity(count));
  });
}

/**
 * @param {import("./pen.js").Pen} pen
 * @param {Box} box
 * @param {{site: string, caption: string, message: string, mark: string}} labels
 * @param {Theme} theme
 */
export function paintAround(pen, box, labels, theme) {
  const plain = lettering(theme.font, { size: 12 });
  const mark = fitted(shownText(labels.mark, 40), plain, box.width / 2);
  const room = mark ? box.width - widthOf(mark, plain) - 8 : box.width;
  const title = fitted(
    shownText(labels.site, 60),
    lettering(theme.font, { size: 12, bold: true }),
    room,
  );
  pen.text(title, box.x, box.y - 10, { fill: theme.ink, size: 12, bold: true });
  if (mark)
    pen.text(mark, box.x + box.width, box.y - 10, { fill: theme.accent, size: 12, anchor: "end" });
  pen.outline(
    box.x + 0.5,
    box.y + 0.5,
    box.width - 1,
    box.height - 1,
    mark ? theme.accent : theme.faint,
    1,
  );
  const message = wrapped(shownText(labels.message, 200), box.width - 24, theme.font, 12);
  message.forEach((line, i) => {
    const y = box.y + box.height / 2 + (i - (message.length - 1) / 2) * 17;
    const short = fitted(line, lettering(theme.font, { size: 12 }), box.width - 12);
    pen.text(short, box.x + box.width / 2, y, { fill: theme.muted, size: 12, anchor: "middle" });
  });
  captionOf(labels.caption, box.width, theme.font).forEach((line, i) => {
    const short = fitted(line, lettering(theme.font, { size: CAPTION }), box.width);
    pen.text(short, box.x, box.y + box.height + 10 + LINE * i, {
      fill: theme.muted,
      size: CAPTION,
    });
  });
}

/**
 * A caption in lines.
 * @param {string} caption
 * @param {number} room
 * @param {string} font
 */
function captionOf(caption, room, font) {
  return wrapped(
    caption
      .slice(0, 300)
      .split("\n")
      .map((line) => shownText(line))
      .join("\n"),
    room,
    font,
    CAPTION,
  );
}

/**
 * @param {import("./payload.js").Panels} panels
 * @param {number} width
 * @param {string} font
 */
export function captionLines(panels, width, font) {
  return panels.captions.reduce(
    (most, caption) => Math.max(most, captionOf(caption, width, font).length),
    0,
  );
}
