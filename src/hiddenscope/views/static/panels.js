/** Panels: one scatter a layer, the same points in each. */

import { fitted, oncePerFrame, Surface, whenResized } from "./canvas.js";
import { classColour } from "./colour.js";
import { choice, element, key } from "./elements.js";
import { Figure } from "./figure.js";
import { exact } from "./gridwords.js";
import { readState, writeState } from "./hash.js";
import { boxAt, layoutOne, layoutPanels, nearest, unitPoints } from "./panelslayout.js";
import { captionLines, dotSize, drawDots, paintAround, stampDots } from "./panelspaint.js";
import { Picked } from "./panelspick.js";
import { canvasPen, lettering } from "./pen.js";
import { Player } from "./player.js";
import { shownText } from "./text.js";
import { theme, whenThemeChanges } from "./theme.js";

const MOST_DRAWN = 20000; // circles in an SVG; more become a picture inside it
const CLASSES_SHOWN = 24;

export class PanelsView {
  /**
   * @param {HTMLElement} root
   * @param {import("./payload.js").Panels} panels
   * @param {number} place
   */
  constructor(root, panels, place) {
    this.panels = panels;
    this.place = place;
    this.one = false;
    this.point = -1;
    /** @type {{panel: number, loop: number[][]} | null} */
    this.drawing = null;
    this.picked = new Picked(panels);
    this.theme = theme();
    /** @type {Map<number, Float32Array>} */
    this.units = new Map();
    const help = "Left and right arrow keys go through the layers, up and down through the points; Escape clears the choice.";
    this.figure = new Figure(root, panels, help, { picture: () => this.picture(), rows: () => this.rows() });
    this.back = new Surface("back");
    this.front = new Surface("front");
    this.layout = layoutPanels(panels, 800, 0);
    this.paint = oncePerFrame(() => this.paintFront(), root);
    this.paintAll = oncePerFrame(() => { this.paintBack(); this.paintFront(); }, root);
    this.names = panels.sites.map((site, i) => (panels.rows[i] ? `${shownText(panels.rows[i], 40)} ${site}` : site));
    this.player = new Player(this.names, () => this.change(() => { this.one = true; }), () => this.paintAll());
    this.build();
    this.restore();
    this.listen();
  }

  build() {
    const { controls, stage, keys } = this.figure;
    this.modes = choice("Show", { all: "All layers", one: "One layer" }, (mode) => this.change(() => { this.one = mode === "one"; }));
    if (this.panels.sites.length > 1) controls.append(this.modes.root, this.player.root);
    const summary = `${shownText(this.panels.title, 200)}: ${this.panels.sites.length} panels of ${this.panels.points.shape[1]} points`;
    this.frame = element("div", { class: "window", role: "img", "aria-label": summary }, [this.back.canvas, this.front.canvas]);
    stage.append(this.frame);
    const classes = this.panels.classes.slice(0, CLASSES_SHOWN);
    this.keys = classes.map((label, i) => key(shownText(label, 40), () => this.change(() => this.picked.toggle(i))));
    keys.append(...this.keys.map((made) => made.root));
    stage.before(keys); // what the colours mean is read before the panels
    if (classes.length < this.panels.classes.length) keys.append(`and ${this.panels.classes.length - classes.length} more`);
  }

  listen() {
    const { canvas } = this.front;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", (event) => { if (!this.drawing && event.pointerType !== "touch") this.look(-1); });
    canvas.addEventListener("pointercancel", () => { this.drawing = null; this.paint(); });
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointerup", (event) => this.finish(event));
    const last = this.panels.points.shape[1] - 1;
    const next = (/** @type {number} */ by) => () => this.look(Math.min(last, Math.max(0, this.point + by)));
    const turn = (/** @type {number} */ by) => () => this.player.go(this.player.panel + by);
    this.figure.onKeys({
      ArrowDown: next(1), ArrowUp: next(-1), ArrowRight: turn(1), ArrowLeft: turn(-1),
      Escape: () => this.change(() => { this.picked.clear(); this.look(-1); }),
    });
    whenResized(this.figure.stage, () => this.arrange());
    whenThemeChanges(() => { this.theme = theme(); this.settle(); });
  }

  restore() {
    const state = readState(this.place);
    const panel = this.names.indexOf(state.layer ?? "");
    this.one = panel >= 0;
    this.player.set(Math.max(0, panel));
    this.picked.restore(state);
    this.settle();
  }

  /** @param {() => void} act */
  change(act) {
    act();
    this.settle();
    writeState(this.place, { layer: this.one ? this.names[this.player.panel] : "", ...this.picked.state() });
  }

  settle() {
    this.modes?.set(this.one ? "one" : "all");
    this.keys?.forEach((made, i) => {
      made.root.setAttribute("aria-pressed", String(this.picked.classes.has(i)));
      made.swatch.style.setProperty("--colour", classColour(i, this.theme.dark));
    });
    this.tell();
    this.arrange();
  }

  arrange() {
    const room = this.figure.stage.clientWidth;
    if (!room) return;
    const lay = (/** @type {number} */ lines) => (this.one ? layoutOne(this.player.panel, room, lines) : layoutPanels(this.panels, room, lines));
    this.layout = lay(captionLines(this.panels, lay(0).boxes[0].size, this.theme.font));
    for (const surface of [this.back, this.front]) surface.resize(this.layout.width, this.layout.height);
    if (this.frame) {
      this.frame.style.width = `${this.layout.width}px`;
      this.frame.style.height = `${this.layout.height}px`;
    }
    this.paintAll();
  }

  /**
   * The points of a panel between 0 and 1; on the way from one layer to the next while it plays.
   * @param {number} panel
   */
  unitsOf(panel) {
    let units = this.units.get(panel);
    if (!units) this.units.set(panel, (units = unitPoints(this.panels, panel)));
    const { from, share } = this.player;
    if (!this.one || share >= 1 || this.panels.messages[from] || this.panels.messages[panel]) return units;
    const before = this.units.get(from) ?? unitPoints(this.panels, from);
    return units.map((value, i) => value * share + before[i] * (1 - share));
  }

  /** @param {number} panel */
  dots(panel) {
    const { labels, classes } = this.panels;
    const colours = (classes.length ? classes : [""]).map((_, i) => classColour(i, this.theme.dark));
    const numbers = "data" in labels ? labels.data : new Uint8Array(this.panels.points.shape[1]);
    return { units: this.unitsOf(panel), labels: numbers, colours, chosen: this.picked.mask };
  }

  /** @param {PointerEvent} event */
  hover(event) {
    if (this.drawing) return this.draw(event);
    const box = boxAt(this.layout, event.offsetX, event.offsetY);
    if (!box || this.panels.messages[box.panel]) return this.look(-1);
    const [x, y] = [(event.offsetX - box.x) / box.size, (event.offsetY - box.y) / box.size];
    return this.look(nearest(this.unitsOf(box.panel), x, y, 14 / box.size), event);
  }

  /**
   * Ring one point in every panel and show its text.
   * @param {number} point
   * @param {PointerEvent} [event]
   */
  look(point, event) {
    this.figure.pointOut(point < 0 ? [] : this.pointWords(point), event);
    if (point === this.point) return;
    this.point = point;
    this.tell();
    this.paint();
  }

  /** @param {PointerEvent} event */
  begin(event) {
    const box = boxAt(this.layout, event.offsetX, event.offsetY);
    if (!box || event.button !== 0 || this.panels.messages[box.panel]) return;
    this.front.canvas.setPointerCapture(event.pointerId);
    this.drawing = { panel: box.panel, loop: [] };
    this.draw(event);
  }

  /** @param {PointerEvent} event */
  draw(event) {
    const box = this.layout.boxes.find((one) => one.panel === this.drawing?.panel);
    if (!box || !this.drawing) return;
    this.drawing.loop.push([(event.offsetX - box.x) / box.size, (event.offsetY - box.y) / box.size]);
    this.figure.pointOut([]);
    this.paint();
  }

  /** @param {PointerEvent} event */
  finish(event) {
    const { drawing } = this;
    this.drawing = null;
    if (!drawing) return;
    this.point = -1;
    this.front.canvas.releasePointerCapture(event.pointerId);
    const [xs, ys] = [0, 1].map((axis) => drawing.loop.map((corner) => corner[axis]));
    const drawn = Math.max(...xs) - Math.min(...xs) > 0.02 && Math.max(...ys) - Math.min(...ys) > 0.02;
    if (!drawn && event.pointerType === "touch") return this.hover(event);
    this.change(() => (drawn ? this.picked.surround(drawing.panel, drawing.loop) : this.picked.clear()));
  }

  /** @param {number} point */
  pointWords(point) {
    const { labels, classes, texts } = this.panels;
    const label = "data" in labels ? [{ strong: shownText(classes[labels.data[point]], 60) }, "  "] : [];
    return [...label, texts.length ? shownText(texts[point], 400) : `point ${point}`];
  }

  tell() {
    const chosen = this.picked.summary();
    if (this.point >= 0) return this.figure.say(this.pointWords(this.point));
    const hint = "Point at a dot to read it; draw a loop around some, or press a label, to choose them in every panel.";
    return this.figure.say([chosen ? shownText(chosen, 400) : hint]);
  }

  paintBack() {
    const pen = canvasPen(this.back.clear(), this.theme.font);
    this.paintPicture(pen, this.layout, devicePixelRatio || 1, false);
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./panelslayout.js").Layout} layout
   * @param {number} ratio
   * @param {boolean} sharp
   */
  paintPicture(pen, layout, ratio, sharp) {
    const { captions, messages } = this.panels;
    const names = layout.heads.length ? this.panels.sites : this.names;
    for (const head of layout.heads) pen.text(shownText(head.name, 80), head.x, head.y, { fill: this.theme.muted, size: 13, bold: true });
    for (const box of layout.boxes) {
      const message = messages[box.panel] ?? "";
      const dots = message ? null : this.dots(box.panel);
      if (dots && sharp) drawDots(pen, dots, box, this.theme);
      else if (dots) pen.image(stampDots(dots, box.size, ratio, this.theme), box.x, box.y, box.size, box.size);
      const current = !this.one && this.player.moved && box.panel === this.player.panel;
      paintAround(pen, box, { site: names[box.panel], caption: captions[box.panel] ?? "", message, current }, this.theme);
    }
  }

  paintFront() {
    const pen = canvasPen(this.front.clear(), this.theme.font);
    for (const box of this.layout.boxes) {
      if (this.point >= 0 && !this.panels.messages[box.panel]) this.ring(pen, box);
      if (this.drawing?.panel !== box.panel) continue;
      const loop = this.drawing.loop.map(([x, y]) => [box.x + x * box.size, box.y + y * box.size]);
      pen.area(loop, this.theme.accent, 0.12);
      pen.line([...loop, loop[0]], this.theme.accent, 1.5, [4, 3]);
    }
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./panelslayout.js").Box} box
   */
  ring(pen, box) {
    const { units, labels, colours } = this.dots(box.panel);
    const [x, y] = [box.x + units[2 * this.point] * box.size, box.y + units[2 * this.point + 1] * box.size];
    const radius = dotSize(units.length / 2, box.size);
    if (x !== x || y !== y) return;
    pen.dot(x, y, radius + 4, this.theme.ink);
    pen.dot(x, y, radius + 2.5, this.theme.paper);
    pen.dot(x, y, radius + 1, colours[labels[this.point] % colours.length]);
  }

  picture() {
    const lines = captionLines(this.panels, 200, this.theme.font);
    const layout = this.one ? layoutOne(this.player.panel, 540, lines) : layoutPanels(this.panels, 980, lines);
    const [side, head] = [16, 64];
    const shift = (/** @type {any} */ one) => ({ ...one, x: one.x + side, y: one.y + head });
    const moved = { ...layout, boxes: layout.boxes.map(shift), heads: layout.heads.map(shift) };
    const sharp = layout.boxes.length * this.panels.points.shape[1] <= MOST_DRAWN;
    const width = Math.max(320, layout.width + 2 * side);
    return {
      width,
      height: layout.height + head,
      paint: (/** @type {import("./pen.js").Pen} */ pen) => {
        const bold = lettering(this.theme.font, { size: 16, bold: true });
        pen.text(fitted(shownText(this.panels.title, 200), bold, width - 2 * side), side, 20, { fill: this.theme.ink, size: 16, bold: true });
        this.paintKeys(pen, side, 46, width - side);
        this.paintPicture(pen, moved, 2, sharp);
      },
    };
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {number} x
   * @param {number} y
   * @param {number} end
   */
  paintKeys(pen, x, y, end) {
    this.panels.classes.slice(0, CLASSES_SHOWN).forEach((label, i) => {
      const name = fitted(shownText(label, 40), lettering(this.theme.font, { size: 12 }), 160);
      if (x + 180 > end) return;
      pen.dot(x + 5, y, 5, classColour(i, this.theme.dark));
      pen.text(name, x + 16, y, { fill: this.theme.ink, size: 12 });
      x += 40 + 7 * name.length;
    });
  }

  /** @returns {Generator<import("./export.js").Cell[]>} */
  *rows() {
    const { sites, points, labels, classes, texts, rows, rows_name } = this.panels;
    const count = points.shape[1];
    yield [...(rows.length ? [rows_name] : []), "site", "point", ...("data" in labels ? ["label"] : []), ...(texts.length ? ["text"] : []), "x", "y", "chosen"];
    for (let panel = 0; panel < sites.length; panel++) {
      for (let point = 0; point < count; point++) {
        const at = 2 * (panel * count + point);
        if (Number.isNaN(points.data[at]) && rows.length) continue; // a point of another row
        const label = "data" in labels ? [classes[labels.data[point]]] : [];
        const chosen = this.picked.mask ? this.picked.mask[point] : 1;
        yield [...(rows.length ? [rows[panel]] : []), sites[panel], point, ...label, ...(texts.length ? [texts[point]] : []), exact(points.data[at]), exact(points.data[at + 1]), chosen];
      }
    }
  }
}
