/** Panels: one scatter a layer, the same points in each. */

import { oncePerFrame, Surface, whenResized } from "./canvas.js";
import { choice, element, key } from "./elements.js";
import { Figure } from "./figure.js";
import { readState, writeState } from "./hash.js";
import { boxAt, layoutAll, nearest, partner, rowsOf } from "./panelslayout.js";
import { Picked } from "./panelspick.js";
import { CLASSES_SHOWN, longestRow, PanelsPicture } from "./panelspicture.js";
import { panelRows } from "./panelssave.js";
import { Zoom } from "./panelszoom.js";
import { canvasPen } from "./pen.js";
import { Player } from "./player.js";
import { shownText } from "./text.js";
import { hasFinger, theme, whenThemeChanges } from "./theme.js";

/** @typedef {import("./panelslayout.js").Box} Box */

const ZOOM_RESTS = 250; // milliseconds
const CLICK = 4; // pixels that a click may move
const HELP =
  "Left and right arrow keys go through the layers, up and down through the points; Enter " +
  "chooses a point, Escape clears the choice. " +
  "Plus and minus zoom, Shift with the arrow keys moves, 0 shows the whole.";

export class PanelsView {
  /**
   * @param {HTMLElement} root
   * @param {import("./payload.js").Panels} panels
   * @param {number} place
   */
  constructor(root, panels, place) {
    this.panels = panels;
    this.place = place;
    this.tool = "move";
    this.point = -1;
    /** @type {{box: Box, tool: string, moved: boolean, path: number[][]} | null} */
    this.drag = null;
    this.picked = new Picked(panels);
    /** @type {import("./panelspicture.js").Mode} */
    this.home = panels.first.length ? "first" : "all";
    if (panels.sites.length === 1) this.home = "one";
    this.figure = new Figure(root, panels, HELP, {
      picture: () => this.shown.saved(),
      rows: () => panelRows(panels, this.picked.mask),
    });
    this.back = new Surface("back");
    this.front = new Surface("front");
    this.layout = layoutAll(panels, 800, 0);
    this.paint = oncePerFrame(() => this.paintFront(), root);
    this.paintAll = oncePerFrame(() => {
      this.paintBack();
      this.paintFront();
    }, root);
    this.names = panels.sites.map((site, i) =>
      panels.rows[i] ? `${shownText(panels.rows[i], 40)} ${site}` : site,
    );
    this.steps = longestRow(panels);
    const steps = this.steps.map((panel) =>
      [...new Set(rowsOf(panels).map((row) => panels.sites[partner(panels, row, panel)]))].join(
        " · ",
      ),
    );
    this.player = new Player(
      steps,
      () =>
        this.change(() => {
          this.shown.mode = "one";
        }),
      () => this.paintAll(),
    );
    this.resting = 0;
    this.zoom = new Zoom(() => this.zoomed());
    this.shown = new PanelsPicture(panels, this);
    this.build();
    this.restore();
    this.listen();
  }

  build() {
    const { controls, stage, keys } = this.figure;
    this.modes = choice("Show", this.modesOffered(), (mode) =>
      this.change(() => {
        this.shown.mode = /** @type {import("./panelspicture.js").Mode} */ (mode);
      }),
    );
    this.tools = choice("Drag to", { move: "Move", select: "Select" }, (tool) => {
      this.tool = tool;
      this.settle();
    });
    this.words = element("input", {
      type: "search",
      placeholder: "Find in texts",
      "aria-label": "Find in texts",
      spellcheck: "false",
      autocomplete: "off",
    });
    this.words.addEventListener("input", () =>
      this.change(() => this.picked.find(this.words?.value ?? "")),
    );
    if (this.panels.sites.length > 1) controls.append(this.modes.root, this.player.root);
    if (this.panels.texts.length) controls.append(this.words);
    controls.append(element("div", { class: "hands" }, [this.tools.root, this.zoom.root]));
    const marked = this.panels.sites.filter((_, i) => this.panels.marks[i]).length;
    const size = `${this.panels.sites.length} panels of ${this.panels.points.shape[1]} points`;
    const summary = `${shownText(this.panels.title, 200)}: ${size}`;
    const label = marked
      ? `${summary}, ${marked} marked ${shownText(this.panels.marks.find(Boolean) ?? "", 40)}`
      : summary;
    this.frame = element("div", { class: "window", role: "img", "aria-label": label }, [
      this.back.canvas,
      this.front.canvas,
    ]);
    stage.append(this.frame);
    const classes = this.panels.classes.slice(0, CLASSES_SHOWN);
    this.keys = classes.map((name, i) =>
      key(shownText(name, 40), () => this.change(() => this.picked.toggle(i))),
    );
    keys.append(...this.keys.map((control) => control.root));
    stage.before(keys); // what the colours mean is read before the panels
    if (classes.length < this.panels.classes.length)
      keys.append(`and ${this.panels.classes.length - classes.length} more`);
  }

  /** @returns {Record<string, string>} */
  modesOffered() {
    const first = this.panels.first.flat().filter((panel) => panel >= 0);
    if (!first.length) return { all: "All layers", one: "One layer" };
    if (first.length === this.panels.sites.length) return { first: "All layers", one: "One layer" };
    return { first: `${this.panels.first[0].length} layers`, all: "All layers", one: "One layer" };
  }

  listen() {
    const { canvas } = this.front;
    const at = (/** @type {number} */ x, /** @type {number} */ y) => boxAt(this.layout, x, y);
    canvas.addEventListener("pointermove", (event) => {
      if (!this.zoom.pinch(event, at)) this.hover(event);
    });
    canvas.addEventListener("pointerleave", (event) => {
      if (!this.drag && event.pointerType !== "touch") this.look(-1);
    });
    canvas.addEventListener("pointercancel", () => {
      this.drag = null;
      this.paint();
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (this.zoom.pinch(event, at)) this.drag = null;
      else this.begin(event);
    });
    canvas.addEventListener("pointerup", (event) => this.finish(event));
    this.zoom.listen(this.figure.stage, canvas, at);
    this.figure.onKeys(this.keyActs());
    this.stops = [
      whenResized(this.figure.stage, () => this.arrange()),
      whenThemeChanges(() => {
        this.shown.theme = theme();
        this.settle();
      }),
    ];
  }

  /** Stop listening to the page, and playing: the view is taken from it. */
  destroy() {
    clearTimeout(this.resting);
    this.player.stop();
    for (const stop of this.stops ?? []) stop();
  }

  /** @returns {Record<string, (event: KeyboardEvent) => void>} */
  keyActs() {
    const last = this.panels.points.shape[1] - 1;
    const arrow =
      (/** @type {number} */ right, /** @type {number} */ down) =>
      (/** @type {KeyboardEvent} */ event) => {
        if (event.shiftKey) this.zoom.move(this.layout.boxes[0], -40 * right, -40 * down);
        else if (right) this.player.go(this.player.panel + right);
        else this.look(Math.min(last, Math.max(0, this.point + down)));
      };
    const nearer = () => this.zoom.by(1.5),
      farther = () => this.zoom.by(1 / 1.5);
    return {
      ArrowDown: arrow(0, 1),
      ArrowUp: arrow(0, -1),
      ArrowRight: arrow(1, 0),
      ArrowLeft: arrow(-1, 0),
      "+": nearer,
      "=": nearer,
      "-": farther,
      _: farther,
      0: () => this.zoom.reset(),
      Enter: () => {
        if (this.point >= 0) this.change(() => this.picked.togglePoint(this.point));
      },
      Escape: () =>
        this.change(() => {
          this.picked.find("");
          this.picked.clear();
          this.look(-1);
        }),
    };
  }

  restore() {
    const state = readState(this.place);
    const panel = this.names.indexOf(state.layer ?? "");
    this.shown.mode = state.show === "all" ? "all" : this.home;
    if (panel >= 0) this.shown.mode = "one";
    this.player.set(
      Math.max(0, this.steps.indexOf(partner(this.panels, this.steps, Math.max(0, panel)))),
    );
    this.picked.restore(state);
    this.zoom.restore(state);
    this.settle();
  }

  /** @param {() => void} act */
  change(act) {
    act();
    this.settle();
    this.remember();
  }

  remember() {
    const layer =
      this.shown.mode === "one" && this.home !== "one"
        ? this.names[this.steps[this.player.panel]]
        : "";
    const show = this.shown.mode === "all" && this.home !== "all" ? "all" : "";
    writeState(this.place, { show, layer, ...this.picked.state(), ...this.zoom.state() });
  }

  /** Zooming and moving are kept when they rest. */
  zoomed() {
    this.settleZoom();
    this.paintAll();
    clearTimeout(this.resting);
    this.resting = window.setTimeout(() => this.remember(), ZOOM_RESTS);
  }

  settleZoom() {
    this.zoom.whole.disabled = this.zoom.scale === 1;
    this.figure.stage.dataset.tool = this.tool;
    this.figure.stage.classList.toggle("zoomed", this.zoom.scale > 1);
  }

  settle() {
    this.modes?.set(this.shown.mode);
    this.tools?.set(this.tool);
    this.player.root.hidden = this.shown.mode !== "one";
    if (this.shown.mode !== "one") this.player.stop();
    if (this.words && this.words.value.trim() !== this.picked.words.trim())
      this.words.value = this.picked.words;
    const colours = this.shown.colours();
    this.keys?.forEach((control, i) => {
      control.root.setAttribute("aria-pressed", String(this.picked.classes.has(i)));
      control.swatch.style.setProperty("--colour", colours[i]);
    });
    this.settleZoom();
    this.tell();
    this.arrange();
  }

  arrange() {
    const room = this.figure.stage.clientWidth;
    if (!room) return;
    this.layout = this.shown.laidOut(room);
    for (const surface of [this.back, this.front])
      surface.resize(this.layout.width, this.layout.height);
    if (this.frame) {
      this.frame.style.width = `${this.layout.width}px`;
      this.frame.style.height = `${this.layout.height}px`;
    }
    this.paintAll();
  }

  /** @param {PointerEvent} event */
  pointAt(event) {
    const box = boxAt(this.layout, event.offsetX, event.offsetY);
    if (!box || this.panels.messages[box.panel]) return -1;
    return nearest(
      this.zoom.places(this.shown.unitsOf(box.panel), box),
      event.offsetX,
      event.offsetY,
      14,
    );
  }

  /** @param {PointerEvent} event */
  hover(event) {
    if (this.drag) return this.dragged(event);
    return this.look(this.pointAt(event), event);
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
    const tool = (this.tool === "select") !== event.shiftKey ? "select" : "move";
    this.drag = { box, tool, moved: false, path: [[event.offsetX, event.offsetY]] };
  }

  /** @param {PointerEvent} event */
  dragged(event) {
    if (!this.drag) return;
    const { path, box } = this.drag,
      { offsetX: x, offsetY: y } = event;
    const [lastX, lastY] = path[path.length - 1];
    this.drag.moved ||= Math.hypot(x - path[0][0], y - path[0][1]) > CLICK;
    if (!this.drag.moved) return;
    path.push([x, y]);
    this.figure.pointOut([]);
    if (this.drag.tool === "move") this.zoom.move(box, x - lastX, y - lastY);
    this.paint();
  }

  /** @param {PointerEvent} event */
  finish(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    this.front.canvas.releasePointerCapture(event.pointerId);
    if (!drag.moved) return this.click(event);
    const loop = drag.path.map(([x, y]) => this.zoom.unit(drag.box, x, y));
    if (drag.tool === "select")
      this.change(() => {
        this.point = -1;
        this.picked.surround(drag.box.panel, loop);
      });
    this.paint();
  }

  /**
   * A click chooses a point, and the ground clears the choice; a finger reads a point out.
   * @param {PointerEvent} event
   */
  click(event) {
    const point = this.pointAt(event);
    if (point < 0)
      return this.change(() => {
        this.look(-1);
        this.picked.clear();
      });
    if (event.pointerType === "touch") return this.look(point, event);
    return this.change(() => this.picked.togglePoint(point));
  }

  /** @param {number} point */
  pointWords(point) {
    const { labels, classes } = this.panels;
    const label =
      "data" in labels ? [{ strong: shownText(classes[labels.data[point]], 60) }, "  "] : [];
    return [...label, this.shown.textOf(point, 400)];
  }

  tell() {
    const summary = this.picked.summary();
    if (this.point >= 0) return this.figure.say(this.pointWords(this.point));
    return this.figure.say([summary ? shownText(summary, 400) : this.restWords()]);
  }

  /** What is said while no point is chosen: of labels and other panels where there are some. */
  restWords() {
    const everywhere = this.panels.sites.length > 1 ? " in every panel" : "";
    const labelled = this.panels.classes.length > 0;
    if (hasFinger()) {
      const label = labelled ? `; press a label to choose its points${everywhere}` : "";
      return `Touch a dot to read it${label}. Two fingers zoom and move.`;
    }
    const label = labelled ? ", or a label," : "";
    const press = `press it${label} to choose it${everywhere}`;
    return `Point at a dot to read it; ${press}. Zoom with Ctrl and the wheel, then drag to move.`;
  }

  paintBack() {
    this.shown.paint(
      canvasPen(this.back.clear(), this.shown.theme.font),
      this.layout,
      devicePixelRatio || 1,
      false,
    );
  }

  paintFront() {
    const pen = canvasPen(this.front.clear(), this.shown.theme.font);
    for (const box of this.layout.boxes)
      if (this.point >= 0 && !this.panels.messages[box.panel])
        this.shown.ring(pen, box, this.point);
    if (this.drag?.tool !== "select" || !this.drag.moved) return;
    const { path } = this.drag;
    pen.area(path, this.shown.theme.accent, 0.12);
    pen.line([...path, path[0]], this.shown.theme.accent, 1.5, [4, 3]);
  }
}
