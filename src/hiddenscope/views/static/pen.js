/**
 * One way to draw, two things to draw on: a canvas for the screen and PNG, and SVG text. Views draw
 * with a pen only, so that what is saved is what was seen.
 *
 * @typedef {{fill: string, size?: number, anchor?: "start" | "middle" | "end", turn?: number,
 *   bold?: boolean}} Lettering
 * @typedef {{x: number, y: number, width: number, height: number, columns: number, first: number,
 *   last: number}} Cells
 * @typedef {{ rect: (x: number, y: number, width: number, height: number, fill: string) => void,
 *   rects: (boxes: [number, number, number, number][], fill: string) => void, outline: (x: number,
 *   y: number, width: number, height: number, stroke: string, thick: number) => void, line:
 *   (points: number[][], stroke: string, thick: number, dash?: number[]) => void, area: (points:
 *   number[][], fill: string, opacity: number) => void, dot: (x: number, y: number, radius: number,
 *   fill: string, opacity?: number) => void, text: (text: string, x: number, y: number, how:
 *   Lettering) => void, cells: (pixels: Uint8ClampedArray<ArrayBuffer>, where: Cells) => void,
 *   image: (picture: HTMLCanvasElement, x: number, y: number, width: number, height: number) =>
 *   void,
 * }} Pen
 */

import { scratchCanvas } from "./canvas.js";

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} font
 * @returns {Pen}
 */
export function canvasPen(context, font) {
  context.textBaseline = "middle";
  let written = "";
  const trace = (/** @type {number[][]} */ points) => {
    context.beginPath();
    for (const [x, y] of points) context.lineTo(x, y);
  };
  return {
    rect: (x, y, width, height, fill) => {
      context.fillStyle = fill;
      context.fillRect(x, y, width, height);
    },
    rects: (boxes, fill) => {
      context.fillStyle = fill;
      for (const [x, y, width, height] of boxes) context.fillRect(x, y, width, height);
    },
    outline: (x, y, width, height, stroke, thick) => {
      context.strokeStyle = stroke;
      context.lineWidth = thick;
      context.strokeRect(x, y, width, height);
    },
    line: (points, stroke, thick, dash = []) => {
      trace(points);
      context.strokeStyle = stroke;
      context.lineWidth = thick;
      context.lineJoin = "round";
      context.setLineDash(dash);
      context.stroke();
      context.setLineDash([]);
    },
    area: (points, fill, opacity) => {
      trace(points);
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      context.fill();
      context.globalAlpha = 1;
    },
    dot: (x, y, radius, fill, opacity = 1) => {
      context.globalAlpha = opacity;
      context.fillStyle = fill;
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.fill();
      context.globalAlpha = 1;
    },
    text: (text, x, y, how) => {
      const wanted = lettering(font, how);
      if (wanted !== written) context.font = written = wanted;
      letter(context, text, x, y, how);
    },
    cells: (pixels, where) => stretch(context, pixels, where),
    image: (picture, x, y, width, height) => context.drawImage(picture, x, y, width, height),
  };
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {Lettering} how
 */
function letter(context, text, x, y, how) {
  context.fillStyle = how.fill;
  context.textAlign = how.anchor === "middle" ? "center" : (how.anchor ?? "start");
  if (!how.turn) return context.fillText(text, x, y);
  context.save();
  context.translate(x, y);
  context.rotate((how.turn * Math.PI) / 180);
  context.fillText(text, 0, 0);
  return context.restore();
}

/**
 * @param {string} font
 * @param {{size?: number, bold?: boolean}} how
 */
export function lettering(font, how) {
  return `${how.bold ? "600 " : ""}${how.size ?? 12}px ${font}`;
}

/**
 * Many cells at once: one pixel each, drawn large.
 * @param {CanvasRenderingContext2D} context
 * @param {Uint8ClampedArray<ArrayBuffer>} pixels
 * @param {Cells} where
 */
function stretch(context, pixels, where) {
  const rows = pixels.length / 4 / where.columns;
  const small = scratchCanvas(where.columns, rows);
  small.putImageData(new ImageData(pixels, where.columns, rows), 0, 0);
  const count = where.last - where.first;
  const left = where.x + where.first * where.width;
  context.imageSmoothingEnabled = false;
  context.drawImage(
    small.canvas,
    where.first,
    0,
    count,
    rows,
    left,
    where.y,
    count * where.width,
    rows * where.height,
  );
}

/**
 * @param {number} width
 * @param {number} height
 * @param {string} font
 * @returns {{pen: Pen, text: () => string}}
 */
export function svgPen(width, height, font) {
  /** @type {string[]} */
  const out = [];
  const put = (
    /** @type {string} */ tag,
    /** @type {Record<string, string | number>} */ named,
    inner = "",
  ) => {
    const attributes = Object.entries(named)
      .map(([name, value]) => ` ${name}="${escaped(String(value))}"`)
      .join("");
    out.push(inner ? `<${tag}${attributes}>${inner}</${tag}>` : `<${tag}${attributes}/>`);
  };
  const path = (/** @type {number[][]} */ points) =>
    points.map(([x, y]) => `${short(x)},${short(y)}`).join(" ");
  const box = (/** @type {number[]} */ [x, y, w, h]) => ({
    x: short(x),
    y: short(y),
    width: short(w),
    height: short(h),
  });
  return {
    pen: {
      rect: (x, y, w, h, fill) => put("rect", { ...box([x, y, w, h]), fill }),
      rects: (boxes, fill) => boxes.forEach((rect) => put("rect", { ...box(rect), fill })),
      outline: (x, y, w, h, stroke, thick) =>
        put("rect", { ...box([x, y, w, h]), fill: "none", stroke, "stroke-width": thick }),
      line: (points, stroke, thick, dash = []) =>
        put("polyline", {
          points: path(points),
          fill: "none",
          stroke,
          "stroke-width": thick,
          "stroke-dasharray": dash.join(" ") || "none",
        }),
      area: (points, fill, opacity) =>
        put("polygon", { points: path(points), fill, "fill-opacity": opacity }),
      dot: (x, y, radius, fill, opacity = 1) =>
        put("circle", { cx: short(x), cy: short(y), r: radius, fill, "fill-opacity": opacity }),
      text: (text, x, y, how) => put("text", placed(x, y, how), escaped(text)),
      cells: (pixels, where) => {
        for (const cell of eachCell(pixels, where)) put("rect", cell);
      },
      image: (picture, x, y, w, h) =>
        put("image", { x, y, width: w, height: h, href: picture.toDataURL("image/png") }),
    },
    text: () =>
      `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" ` +
      `viewBox="0 0 ${width} ${height}" ` +
      `font-family="${escaped(font)}" xml:space="preserve">\n${out.join("\n")}\n</svg>\n`,
  };
}

/**
 * @param {number} x
 * @param {number} y
 * @param {Lettering} how
 */
function placed(x, y, how) {
  /** @type {Record<string, string | number>} */
  const attributes = {
    x: short(x),
    y: short(y),
    fill: how.fill,
    "font-size": how.size ?? 12,
    "dominant-baseline": "central",
  };
  if (how.anchor && how.anchor !== "start") attributes["text-anchor"] = how.anchor;
  if (how.bold) attributes["font-weight"] = 600;
  if (how.turn) attributes.transform = `rotate(${how.turn} ${short(x)} ${short(y)})`;
  return attributes;
}

/**
 * @param {Uint8ClampedArray} pixels
 * @param {Cells} where
 */
function* eachCell(pixels, where) {
  const { x, y, width, height, columns, first, last } = where;
  for (let i = 0; i < pixels.length / 4; i++) {
    const column = i % columns;
    if (!pixels[4 * i + 3] || column < first || column >= last) continue;
    const rgb = [...pixels.subarray(4 * i, 4 * i + 3)];
    const fill = `#${rgb.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
    yield { x: x + column * width, y: y + Math.floor(i / columns) * height, width, height, fill };
  }
}

/** @param {number} value */
function short(value) {
  return Math.round(100 * value) / 100;
}

/** @param {string} text */
function escaped(text) {
  return text
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;");
}
