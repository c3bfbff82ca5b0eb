/**
 * The grid: tokens across, layers up. A cursor reads cells out; a pin keeps one; a map shows which
 * states influence a cell.
 */

import { fitted, oncePerFrame, Surface, whenResized } from "./canvas.js";
import { choice, element, list } from "./elements.js";
import { Figure } from "./figure.js";
import { TokenAxis } from "./gridaxis.js";
import { cellLegends, cellPixels, marksOf, missingCells, zeroCells } from "./gridcolours.js";
import { cellAt, edgeOf, layoutOf, widthAt } from "./gridlayout.js";
import { gridHelp, gridHint, gridReadout, gridRows, gridSize, gridTitle } from "./gridwords.js";
import {
  paintBarColumns,
  paintCells,
  paintCursor,
  paintMissing,
  paintRowNames,
  paintSeams,
  paintSites,
  paintTokens,
  paintWords,
  paintZeros,
  windowOf,
} from "./gridpaint.js";
import { readState, writeState } from "./hash.js";
import { keyLayout, LEGEND, MARKS, paintKey } from "./legend.js";
import { canvasPen, lettering } from "./pen.js";
import { levelsOf, offersLog } from "./scale.js";
import { shownText } from "./text.js";
import { theme, whenThemeChanges } from "./theme.js";

/** @typedef {import("./influence.js").Direction} Direction */

const KEY_RESTS = 60; // the legend of a map follows the cursor when it rests, in milliseconds

export class GridView {
  /**
   * @param {HTMLElement} root
   * @param {import("./payload.js").Grid} grid
   * @param {number} place which view of the page it is
   */
  constructor(root, grid, place) {
    this.grid = grid;
    this.place = place;
    this.cursor = -1;
    this.pin = -1;
    this.shown = 0;
    this.log = false;
    this.each = false;
    /** @type {Direction} */
    this.direction = "both";
    this.resting = 0;
    this.shift = 0; // how far it is scrolled: to ask for it while painting would lay out the page
    this.theme = theme();
    this.figure = new Figure(root, grid, gridHelp(grid), {
      picture: () => this.picture(),
      rows: () => gridRows(grid, this.pin),
    });
    this.back = new Surface("back");
    this.front = new Surface("front");
    this.key = new Surface("legend");
    this.axis = new TokenAxis(this.figure.readout);
    this.marks = grid.measures.map((measure) => marksOf(grid, measure));
    this.logs = grid.measures.map((measure) => offersLog(measure, measure.values.data));
    this.layout = layoutOf(grid, 800, this.theme.font);
    this.paint = oncePerFrame(() => this.paintFront(), root);
    this.paintAll = oncePerFrame(() => {
      this.paintBack();
      this.paintFront();
      this.paintLegends();
    }, root);
    this.build();
    this.restore();
    this.listen();
  }

  get measure() {
    return this.grid.measures[this.shown];
  }

  get values() {
    return /** @type {Float32Array} */ (this.measure.values.data);
  }

  /** The cell whose influence is shown: the pinned one, or the one under the cursor. */
  get focus() {
    if (!this.measure.influence) return -1;
    return this.pin >= 0 ? this.pin : this.cursor;
  }

  /** @returns {import("./scale.js").Way} */
  get way() {
    const { meaning, limits } = this.measure;
    return { meaning, log: this.log, each: this.each, limits: this.focus >= 0 ? null : limits };
  }

  build() {
    const { controls, stage, keys } = this.figure;
    const names = this.grid.measures.map((measure) => shownText(measure.name, 60));
    this.measures = list("Measure", names, (shown) => this.change(() => this.choose(shown)));
    this.scales = choice("Scale", { linear: "Linear", log: "Log" }, (scale) =>
      this.change(() => {
        this.log = scale === "log";
      }),
    );
    const ranges =
      (this.grid.y_name ?? "site") === "site"
        ? { all: "All layers", layer: "Each layer" }
        : { all: "All rows", layer: "Each row" };
    this.spans = choice("Colour range", ranges, (span) =>
      this.change(() => {
        this.each = span === "layer";
      }),
    );
    const directions = {
      both: "Both",
      sources: "What influences it",
      targets: "What it influences",
    };
    this.directions = choice("A cell shows", directions, (to) =>
      this.change(() => {
        this.direction = /** @type {Direction} */ (to);
      }),
    );
    if (names.length > 1) controls.append(this.measures.root);
    controls.append(this.scales.root, this.spans.root);
    if (this.grid.measures.some((measure) => measure.influence))
      controls.append(this.directions.root);
    const summary = `${shownText(this.grid.title, 200)}: ${gridSize(this.grid)}`;
    this.frame = element("div", { class: "window", role: "img", "aria-label": summary }, [
      this.back.canvas,
      this.front.canvas,
    ]);
    this.spacer = element("div", { class: "spacer" }, [this.frame]);
    this.scroller = element("div", { class: "scroller" }, [this.spacer]);
    this.more = element("div", { class: "more", hidden: "", "aria-hidden": "true" }, ["more →"]);
    stage.append(this.more, this.axis.root, this.scroller);
    // Above the grid: below a tall one it would be out of sight.
    keys.append(this.key.canvas);
    controls.append(keys);
  }

  listen() {
    const { front, scroller, figure } = this;
    for (const touched of /** @type {const} */ (["pointermove", "pointerdown"])) {
      front.canvas.addEventListener(touched, (event) => this.pointAt(this.under(event), event));
    }
    front.canvas.addEventListener("pointerleave", (event) => this.leave(event));
    front.canvas.addEventListener("click", (event) => this.hold(this.under(event)));
    scroller?.addEventListener("scroll", () => {
      this.shift = scroller.scrollLeft;
      this.figure.pointOut([]);
      this.cue();
      this.paintAll();
    });
    const { columns, rows } = { columns: this.grid.tokens.length, rows: this.grid.sites.length };
    const step = (/** @type {number} */ right, /** @type {number} */ up) => () => {
      const known = this.cursor >= 0 ? this.cursor : this.pin;
      if (known < 0 && Math.abs(right) + Math.abs(up) === 1) return this.reveal(0);
      const at = Math.max(0, known);
      const column = Math.min(columns - 1, Math.max(0, (at % columns) + right));
      const row = Math.min(rows - 1, Math.max(0, Math.floor(at / columns) + up));
      return this.reveal(row * columns + column);
    };
    figure.onKeys({
      ArrowRight: step(1, 0),
      ArrowLeft: step(-1, 0),
      ArrowUp: step(0, 1),
      ArrowDown: step(0, -1),
      Home: step(-columns, 0),
      End: step(columns, 0),
      PageUp: step(0, rows),
      PageDown: step(0, -rows),
      Enter: () => this.hold(this.cursor),
      " ": () => this.hold(this.cursor),
      Escape: () => this.hold(-1),
    });
    this.stops = [
      this.axis.stop,
      whenResized(figure.stage, () => this.arrange()),
      whenThemeChanges(() => {
        this.theme = theme();
        this.paintAll();
      }),
    ];
  }

  /** Stop listening to the page: the view is taken from it. */
  destroy() {
    clearTimeout(this.resting);
    for (const stop of this.stops ?? []) stop();
  }

  /** Take the state from the page's address. */
  restore() {
    const state = readState(this.place);
    this.choose(state.measure in this.grid.measures ? Number(state.measure) : 0);
    if (state.scale) this.log = state.scale === "log";
    if (state.colours) this.each = state.colours === "layer";
    this.direction = state.show === "sources" || state.show === "targets" ? state.show : "both";
    const [site, token] = (state.pin ?? "").split("~");
    const [row, column] = [this.grid.sites.indexOf(site), Number(token)];
    this.pin = row >= 0 && column in this.grid.tokens ? row * this.grid.tokens.length + column : -1;
    this.settle();
  }

  /** @param {number} shown */
  choose(shown) {
    this.shown = shown;
    this.log = this.measure.scale === "log";
    this.each = this.measure.each_layer;
  }

  /** @param {() => void} act */
  change(act) {
    act();
    this.settle();
    const { columns } = this.layout;
    const scale = this.log ? "log" : "linear";
    const colours = this.each ? "layer" : "all";
    writeState(this.place, {
      measure: this.shown ? String(this.shown) : "",
      scale: scale === this.measure.scale ? "" : scale,
      colours: this.each === this.measure.each_layer ? "" : colours,
      show: this.direction === "both" ? "" : this.direction,
      pin:
        this.pin < 0
          ? ""
          : `${this.grid.sites[Math.floor(this.pin / columns)]}~${this.pin % columns}`,
    });
  }

  settle() {
    this.figure.entitle(gridTitle(this.grid, this.shown));
    this.measures?.set(this.shown);
    if (!this.logs[this.shown]) this.log = false;
    if (this.scales) this.scales.root.hidden = !this.logs[this.shown];
    this.scales?.set(this.log ? "log" : "linear");
    this.spans?.set(this.each ? "layer" : "all");
    this.directions?.set(this.direction);
    this.tell();
    this.paintAll();
  }

  arrange() {
    this.layout = layoutOf(this.grid, this.figure.stage.clientWidth, this.theme.font);
    const width = Math.min(this.figure.stage.clientWidth, this.layout.width);
    for (const surface of [this.back, this.front]) surface.resize(width, this.layout.height);
    this.axis.arrange(this.layout, width);
    if (!this.spacer || !this.frame) return;
    this.spacer.style.width = `${this.layout.width}px`;
    this.frame.style.width = `${width}px`;
    this.frame.style.height = `${this.layout.height}px`;
    this.shift = this.scroller?.scrollLeft ?? 0;
    this.cue();
    this.paintAll();
  }

  /** Say whether there is more to the right; where all is seen at once there is no room for it. */
  cue() {
    if (!this.more) return;
    this.more.hidden = this.front.width >= this.layout.width - 4;
    const atEnd = this.shift + this.front.width >= this.layout.width - 4;
    this.more.style.visibility = atEnd ? "hidden" : "";
  }

  /** @param {PointerEvent | MouseEvent} event */
  under(event) {
    const shift = event.offsetX > this.layout.left ? this.shift : -Infinity;
    return cellAt(this.layout, event.offsetX + shift, event.offsetY);
  }

  /**
   * @param {number} cell
   * @param {PointerEvent} event
   */
  pointAt(cell, event) {
    this.move(cell);
    this.figure.pointOut(gridHint(this.grid, this.shown, cell, this.pin), event);
  }

  /**
   * What a finger touched stays read out when it is lifted.
   * @param {PointerEvent} event
   */
  leave(event) {
    this.figure.pointOut([]);
    if (event.pointerType !== "touch") this.move(-1);
  }

  /** @param {number} cell */
  move(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.tell();
    this.paint();
    if (!this.measure.influence) return;
    clearTimeout(this.resting);
    this.resting = window.setTimeout(() => this.paintLegends(), KEY_RESTS);
  }

  /**
   * Pin a cell; the same again, or none, unpins.
   * @param {number} cell
   */
  hold(cell) {
    this.change(() => {
      this.pin = cell === this.pin ? -1 : cell;
    });
  }

  /**
   * Move the cursor to a cell and scroll it into view.
   * @param {number} cell
   */
  reveal(cell) {
    const { scroller, layout } = this;
    if (scroller) {
      const column = cell % layout.columns;
      const x = edgeOf(layout, column) - layout.left;
      const room = scroller.clientWidth - layout.left;
      if (x < scroller.scrollLeft) scroller.scrollLeft = x;
      const end = x + widthAt(layout, column);
      if (end > scroller.scrollLeft + room) scroller.scrollLeft = end - room + 10;
    }
    this.move(cell);
  }

  tell() {
    this.figure.say(gridReadout(this.grid, this.shown, this.cursor, this.pin));
  }

  /** What decides the colours now. */
  get colouring() {
    const { measure, focus, direction, way } = this;
    return { measure, focus, direction, way, columns: this.grid.tokens.length };
  }

  paintBack() {
    const pen = canvasPen(this.back.clear(), this.theme.font);
    const visible = this.window();
    paintTokens(pen, this.layout, visible, this.theme);
    if (visible.shift > 0)
      this.back.context.clearRect(0, 0, this.layout.left, this.layout.height - this.layout.bottom);
    paintSites(pen, this.layout, this.theme);
    paintRowNames(pen, this.layout, this.theme);
    this.axis.paint(this.layout, visible, this.theme, this.pin);
  }

  paintFront() {
    const context = this.front.clear();
    const pen = canvasPen(context, this.theme.font);
    const visible = this.window();
    this.paintPicture(pen, visible);
    if (visible.shift > 0) context.clearRect(0, 0, this.layout.left, this.layout.height);
    const { paper, ink, accent } = this.theme;
    if (this.cursor >= 0) paintCursor(pen, this.layout, visible, this.cursor, { paper, ink });
    if (this.pin >= 0) paintCursor(pen, this.layout, visible, this.pin, { paper, ink: accent });
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./gridpaint.js").Window} visible
   */
  paintPicture(pen, visible) {
    const pixels = cellPixels(this.colouring, this.theme.dark);
    paintCells(pen, this.layout, visible, pixels, this.theme);
    paintMissing(pen, this.layout, visible, missingCells(this.colouring), this.theme);
    if (!this.grid.words)
      paintZeros(pen, this.layout, visible, zeroCells(this.colouring), this.theme);
    if (this.grid.words) paintWords(pen, this.layout, visible, this.grid.words, pixels, this.theme);
    paintSeams(pen, this.layout, visible, this.grid.text_of, this.theme);
    if (!this.layout.bars) return;
    const levels = levelsOf(this.values, this.layout.columns, this.way);
    paintBarColumns(pen, this.layout, visible, levels, pixels, {
      diverging: this.way.meaning === "diverging",
      theme: this.theme,
    });
  }

  paintLegends() {
    const legends = cellLegends(this.colouring, this.theme);
    const layout = this.keyLayout(this.figure.stage.clientWidth);
    this.key.resize(layout.width, layout.height);
    paintKey(canvasPen(this.key.clear(), this.theme.font), legends, 0, 0, layout, this.theme);
    const scales = legends.map(
      (legend) => `${legend.name}, ${legend.ticks.map((tick) => tick.label).join(", ")}`,
    );
    const marked = layout.marks.map((mark) => MARKS[mark]);
    this.key.canvas.setAttribute("role", "img");
    this.key.canvas.setAttribute("aria-label", `Colours: ${[...scales, ...marked].join("; ")}`);
  }

  /**
   * Room for both scales of a map, whether or not a cell is selected: so the page stays still.
   * @param {number} room
   */
  keyLayout(room) {
    const bars = this.measure.influence && this.direction === "both" ? 2 : 1;
    return keyLayout(bars, this.marks[this.shown], room, this.theme.font);
  }

  window() {
    return windowOf(this.layout, this.shift, this.front.width);
  }

  /** The whole grid with its title and legend, to be saved. */
  picture() {
    const layout = layoutOf(this.grid, this.figure.stage.clientWidth, this.theme.font, false);
    const whole = { shift: 0, first: 0, last: layout.columns };
    const head = 40;
    const width = Math.max(layout.width, LEGEND.width + 20) + 20;
    const key = this.keyLayout(width - 20);
    const title = fitted(
      this.figure.title,
      lettering(this.theme.font, { size: 16, bold: true }),
      width - 30,
    );
    return {
      width,
      height: head + layout.height + key.height + 16,
      paint: (/** @type {import("./pen.js").Pen} */ pen) => {
        pen.text(title, 12, 20, { fill: this.theme.ink, size: 16, bold: true });
        const moved = { ...layout, top: layout.top + head };
        const saved = this.layout;
        this.layout = moved;
        this.paintPicture(pen, whole);
        paintTokens(pen, moved, whole, this.theme);
        paintSites(pen, moved, this.theme);
        paintRowNames(pen, moved, this.theme);
        if (this.pin >= 0)
          paintCursor(pen, moved, whole, this.pin, {
            paper: this.theme.paper,
            ink: this.theme.accent,
          });
        this.layout = saved;
        paintKey(
          pen,
          cellLegends(this.colouring, this.theme),
          12,
          head + layout.height + 4,
          key,
          this.theme,
        );
      },
    };
  }
}
