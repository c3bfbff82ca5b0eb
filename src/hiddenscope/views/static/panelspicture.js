/** What the panels show: which panels, where their points are, and how they are painted. */

import { fitted } from "./canvas.js";
import { classColour, noClassColour } from "./colour.js";
import { paintLabels } from "./panelslabels.js";
import { layoutAll, layoutFirst, layoutOne, partner, rowsOf, unitPoints } from "./panelslayout.js";
import { captionLines, dotSize, drawDots, paintAround, stampDots } from "./panelspaint.js";
import { picturedPanels } from "./panelssave.js";
import { lettering } from "./pen.js";
import { shownText } from "./text.js";
import { theme } from "./theme.js";

/**
 * @typedef {import("./panelslayout.js").Box} Box
 * @typedef {"first" | "all" | "one"} Mode
 * @typedef {{picked: import("./panelspick.js").Picked, zoom: import("./panelszoom.js").Zoom,
 *   player: import("./player.js").Player}} Parts
 */

const MOST_DRAWN = 20000; // circles in an SVG; more become a picture inside it
export const CLASSES_SHOWN = 24;

export class PanelsPicture {
  /**
   * @param {import("./payload.js").Panels} panels
   * @param {Parts} parts
   */
  constructor(panels, { picked, zoom, player }) {
    this.panels = panels;
    this.picked = picked;
    this.zoom = zoom;
    this.player = player;
    this.theme = theme();
    /** @type {Map<number, Float32Array>} */
    this.units = new Map();
    this.rows = rowsOf(panels);
    /** The panels that the slider goes through. */
    this.steps = longestRow(panels);
    /** @type {Mode} */
    this.mode = "all";
  }

  /** @param {number} room */
  laidOut(room) {
    const lay = (/** @type {number} */ lines) => {
      if (this.mode === "one")
        return layoutOne(
          this.panels,
          this.rows.map((row) => this.stepIn(row, this.player.panel)),
          room,
          lines,
        );
      return (this.mode === "first" ? layoutFirst : layoutAll)(this.panels, room, lines);
    };
    return lay(captionLines(this.panels, lay(0).boxes[0].width, this.theme.font));
  }

  /**
   * The panel of a row at a step of the slider.
   * @param {number[]} row
   * @param {number} step
   */
  stepIn(row, step) {
    return partner(this.panels, row, this.steps[step]);
  }

  /**
   * The points of a panel between 0 and 1; on the way from one layer to the next while it plays.
   * @param {number} panel
   */
  unitsOf(panel) {
    const known = (/** @type {number} */ panel) => {
      let units = this.units.get(panel);
      if (!units) this.units.set(panel, (units = unitPoints(this.panels, panel)));
      return units;
    };
    const units = known(panel),
      { from, share } = this.player;
    if (this.mode !== "one" || share >= 1) return units;
    const before = this.stepIn(this.rows.find((row) => row.includes(panel)) ?? this.steps, from);
    if (this.panels.messages[before] || this.panels.messages[panel]) return units;
    const start = known(before);
    return units.map((value, i) => value * share + start[i] * (1 - share));
  }

  /** The colour of each class. */
  colours() {
    const { classes, grey } = this.panels;
    let place = 0;
    return (classes.length ? classes : [""]).map((name) =>
      grey && name === grey
        ? noClassColour(this.theme.dark)
        : classColour(place++, this.theme.dark),
    );
  }

  /** @param {Box} box */
  dots(box) {
    const { labels, classes, grey } = this.panels;
    const numbers = "data" in labels ? labels.data : new Uint8Array(this.panels.points.shape[1]);
    const places = this.zoom.places(this.unitsOf(box.panel), box);
    return {
      places,
      labels: numbers,
      colours: this.colours(),
      grey: grey ? classes.indexOf(grey) : -1,
      chosen: this.picked.mask,
    };
  }

  /**
   * @param {number} point
   * @param {number} most
   */
  textOf(point, most) {
    return this.panels.texts.length ? shownText(this.panels.texts[point], most) : `point ${point}`;
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./panelslayout.js").Layout} layout
   * @param {number} ratio
   * @param {boolean} sharp
   */
  paint(pen, layout, ratio, sharp) {
    const { captions, messages, marks } = this.panels;
    for (const head of layout.heads) {
      const name = fitted(
        shownText(head.name, 80),
        lettering(this.theme.font, { size: 13, bold: true }),
        head.width,
      );
      pen.text(name, head.x, head.y, { fill: this.theme.muted, size: 13, bold: true });
    }
    for (const box of layout.boxes) {
      const message = messages[box.panel] ?? "";
      const dots = message ? null : this.dots(box);
      if (dots && sharp) drawDots(pen, dots, box, this.theme);
      else if (dots)
        pen.image(stampDots(dots, box, ratio, this.theme), box.x, box.y, box.width, box.height);
      paintAround(
        pen,
        box,
        {
          site: this.titleOf(box.panel),
          caption: captions[box.panel] ?? "",
          message,
          mark: marks[box.panel] ?? "",
        },
        this.theme,
      );
      if (dots && this.mode === "one") this.paintChosen(pen, box, dots.places);
    }
  }

  /**
   * A site, with its depth where rows have other sites at the same depth.
   * @param {number} panel
   */
  titleOf(panel) {
    const { sites, depths } = this.panels;
    const alike = this.rows.every(
      (row) =>
        row.length === this.rows[0].length &&
        row.every((panel, i) => sites[panel] === sites[this.rows[0][i]]),
    );
    return alike ? sites[panel] : `${sites[panel]}, ${Math.round(100 * depths[panel])}%`;
  }

  /**
   * Labels of the points that are chosen.
   * @param {import("./pen.js").Pen} pen
   * @param {Box} box
   * @param {Float32Array} places
   */
  paintChosen(pen, box, places) {
    const { mask } = this.picked;
    if (!mask || this.player.share < 1) return;
    const indices = [...mask.keys()].filter(
      (point) => mask[point] && Number.isFinite(places[2 * point]),
    );
    const points = indices.map((point) => ({
      x: places[2 * point],
      y: places[2 * point + 1],
      text: this.textOf(point, 60),
    }));
    paintLabels(pen, box, points, dotSize(mask.length, box.width), this.theme);
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {Box} box
   * @param {number} point
   */
  ring(pen, box, point) {
    const { places, labels, colours } = this.dots(box);
    const [x, y] = [places[2 * point], places[2 * point + 1]];
    const radius = dotSize(places.length / 2, box.width);
    if (!(x >= box.x && y >= box.y && x <= box.x + box.width && y <= box.y + box.height)) return;
    pen.dot(x, y, radius + 4, this.theme.ink);
    pen.dot(x, y, radius + 2.5, this.theme.paper);
    pen.dot(x, y, radius + 1, colours[labels[point]]);
  }

  /** For a file. */
  saved() {
    const colours = this.colours();
    const keys = this.panels.classes
      .slice(0, CLASSES_SHOWN)
      .map((name, i) => ({ name: shownText(name, 40), colour: colours[i] }));
    const layout = this.laidOut(980);
    const sharp = layout.boxes.length * this.panels.points.shape[1] <= MOST_DRAWN;
    return picturedPanels({ title: this.panels.title, keys }, layout, this.theme, (pen, moved) =>
      this.paint(pen, moved, 2, sharp),
    );
  }
}

/**
 * The row with the most panels.
 * @param {import("./payload.js").Panels} panels
 */
export function longestRow(panels) {
  return rowsOf(panels).reduce((longest, row) => (row.length > longest.length ? row : longest));
}
