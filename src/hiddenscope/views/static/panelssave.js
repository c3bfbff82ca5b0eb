/** Panels as files: a picture with its title and legend, and a table of the points. */

import { fitted } from "./canvas.js";
import { exact } from "./gridwords.js";
import { lettering } from "./pen.js";
import { shownText } from "./text.js";

const SIDE = 16;
const ROW = 22;

/**
 * A picture with a title and a legend above it.
 * @param {{title: string, keys: {name: string, colour: string}[]}} head
 * @param {import("./panelslayout.js").Layout} layout
 * @param {import("./theme.js").Theme} theme
 * @param {(pen: import("./pen.js").Pen, moved: import("./panelslayout.js").Layout) => void} paint
 * @returns {import("./export.js").Picture}
 */
export function picturedPanels(head, layout, theme, paint) {
  const width = Math.max(320, layout.width + 2 * SIDE);
  const keys = placedKeys(head.keys, width - SIDE, theme.font);
  const down = keys.length ? keys[keys.length - 1].y + ROW : 46;
  const shift = (/** @type {any} */ box) => ({ ...box, x: box.x + SIDE, y: box.y + down });
  const moved = { ...layout, boxes: layout.boxes.map(shift), heads: layout.heads.map(shift) };
  return {
    width,
    height: layout.height + down,
    paint: (pen) => {
      const bold = lettering(theme.font, { size: 16, bold: true });
      pen.text(fitted(shownText(head.title, 200), bold, width - 2 * SIDE), SIDE, 20, {
        fill: theme.ink,
        size: 16,
        bold: true,
      });
      for (const { x, y, name, colour } of keys) {
        pen.dot(x + 5, y, 5, colour);
        pen.text(name, x + 16, y, { fill: theme.ink, size: 12 });
      }
      paint(pen, moved);
    },
  };
}

/**
 * The keys of the legend in lines.
 * @param {{name: string, colour: string}[]} keys
 * @param {number} end
 * @param {string} font
 */
function placedKeys(keys, end, font) {
  let [x, y] = [SIDE, 46];
  return keys.map(({ name, colour }) => {
    const short = fitted(name, lettering(font, { size: 12 }), 200);
    const wide = 40 + 7 * short.length;
    if (x > SIDE && x + wide > end) [x, y] = [SIDE, y + ROW];
    const at = { x, y, name: short, colour };
    x += wide;
    return at;
  });
}

/**
 * One row for each point of each panel.
 * @param {import("./payload.js").Panels} panels
 * @param {Uint8Array | null} mask
 * @returns {Generator<import("./export.js").Cell[]>}
 */
export function* panelRows(panels, mask) {
  const { sites, points, labels, classes, texts, rows, rows_name, marks } = panels;
  const count = points.shape[1];
  const values = (
    /** @type {ArrayLike<unknown>} */ list,
    /** @type {import("./export.js").Cell} */ value,
  ) => (list.length ? [value] : []);
  yield [
    ...values(rows, rows_name),
    "site",
    ...values(marks, "mark"),
    "point",
    ...("data" in labels ? ["label"] : []),
    ...values(texts, "text"),
    "x",
    "y",
    "chosen",
  ];
  for (let panel = 0; panel < sites.length; panel++) {
    for (let point = 0; point < count; point++) {
      const at = 2 * (panel * count + point);
      if (Number.isNaN(points.data[at]) && rows.length) continue; // a point of another row
      const label = "data" in labels ? [classes[labels.data[point]]] : [];
      yield [
        ...values(rows, rows[panel]),
        sites[panel],
        ...values(marks, marks[panel]),
        point,
        ...label,
        ...values(texts, texts[point]),
        exact(points.data[at]),
        exact(points.data[at + 1]),
        mask ? mask[point] : 1,
      ];
    }
  }
}
