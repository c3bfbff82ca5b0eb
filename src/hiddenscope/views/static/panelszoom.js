/**
 * The part of every panel that is seen. One finger and the wheel scroll the page; two fingers, the
 * wheel with Ctrl, and the wheel in a view that has the focus zoom.
 *
 * @typedef {import("./panelslayout.js").Box} Box
 */

import { button, element } from "./elements.js";

const MOST = 64;
const STEP = 1.5;

export class Zoom {
  /** @param {() => void} changed */
  constructor(changed) {
    this.changed = changed;
    this.scale = 1;
    this.x = this.y = 0.5;
    this.whole = button("Reset", "Show the whole panels (key 0, or a double click)", () =>
      this.reset(),
    );
    this.root = element("div", { class: "zoom", role: "group", "aria-label": "Zoom" }, [
      button("−", "Zoom out (key -)", () => this.by(1 / STEP)),
      button("+", "Zoom in (key +)", () => this.by(STEP)),
      this.whole,
    ]);
    /** @type {Map<number, {x: number, y: number}>} */
    this.fingers = new Map();
  }

  reset() {
    this.scale = 1;
    this.x = this.y = 0.5;
    this.changed();
  }

  /**
   * Where points are on the canvas.
   * @param {Float32Array} units
   * @param {Box} box
   */
  places(units, box) {
    const size = Math.min(box.width, box.height) * this.scale;
    const left = box.x + box.width / 2 - this.x * size,
      top = box.y + box.height / 2 - this.y * size;
    const places = new Float32Array(units.length);
    for (let i = 0; i < units.length; i += 2) {
      places[i] = left + units[i] * size;
      places[i + 1] = top + units[i + 1] * size;
    }
    return places;
  }

  /**
   * A place on the canvas as one between 0 and 1.
   * @param {Box} box
   * @param {number} x
   * @param {number} y
   */
  unit(box, x, y) {
    const size = Math.min(box.width, box.height) * this.scale;
    return [
      this.x + (x - box.x - box.width / 2) / size,
      this.y + (y - box.y - box.height / 2) / size,
    ];
  }

  /**
   * Zoom by a factor, around a place of a box or around the middle.
   * @param {number} factor
   * @param {{box: Box, x: number, y: number}} [at]
   */
  by(factor, at) {
    const scale = Math.min(MOST, Math.max(1, this.scale * factor));
    if (scale === 1) return this.reset();
    if (at) {
      const [x, y] = this.unit(at.box, at.x, at.y);
      this.x = x + ((this.x - x) * this.scale) / scale;
      this.y = y + ((this.y - y) * this.scale) / scale;
    }
    this.scale = scale;
    return this.keepNear();
  }

  /**
   * Move what is seen, in pixels of a box.
   * @param {Box} box
   * @param {number} right
   * @param {number} down
   */
  move(box, right, down) {
    if (this.scale === 1) return;
    const size = Math.min(box.width, box.height) * this.scale;
    this.x -= right / size;
    this.y -= down / size;
    this.keepNear();
  }

  keepNear() {
    [this.x, this.y] = [this.x, this.y].map((middle) => Math.min(1, Math.max(0, middle)));
    this.changed();
  }

  /** For a link. */
  state() {
    const short = (/** @type {number} */ value) => String(Math.round(1e4 * value) / 1e4);
    return { zoom: this.scale === 1 ? "" : [this.scale, this.x, this.y].map(short).join("_") };
  }

  /** @param {Record<string, string>} state */
  restore(state) {
    const [scale, x, y] = (state.zoom ?? "").split("_").map(Number);
    const sound =
      [scale, x, y].every(Number.isFinite) &&
      scale > 1 &&
      scale <= MOST &&
      Math.min(x, y) >= 0 &&
      Math.max(x, y) <= 1;
    [this.scale, this.x, this.y] = sound ? [scale, x, y] : [1, 0.5, 0.5];
  }

  /**
   * The wheel, two fingers and the double click.
   * @param {HTMLElement} stage
   * @param {HTMLCanvasElement} canvas
   * @param {(x: number, y: number) => Box | null} boxAt
   */
  listen(stage, canvas, boxAt) {
    canvas.addEventListener(
      "wheel",
      (event) => {
        const box = boxAt(event.offsetX, event.offsetY);
        const zooms = event.ctrlKey || event.metaKey || document.activeElement === stage;
        if (!box || !zooms || (event.deltaY > 0 && this.scale === 1)) return;
        event.preventDefault();
        const turned = event.deltaY * (event.deltaMode ? 16 : 1) * (event.ctrlKey ? 4 : 1);
        this.by(Math.exp(-Math.max(-240, Math.min(240, turned)) * 0.0025), {
          box,
          x: event.offsetX,
          y: event.offsetY,
        });
      },
      { passive: false },
    );
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener(
      "touchstart",
      (event) => {
        if (event.touches.length > 1) event.preventDefault();
      },
      { passive: false },
    );
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      canvas.addEventListener(name, (event) =>
        this.fingers.delete(/** @type {PointerEvent} */ (event).pointerId),
      );
    }
  }

  /**
   * Whether a finger is one of two, which zoom and move.
   * @param {PointerEvent} event
   * @param {(x: number, y: number) => Box | null} boxAt
   */
  pinch(event, boxAt) {
    if (event.pointerType !== "touch") return false;
    const before = [...this.fingers.values()];
    this.fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    const now = [...this.fingers.values()];
    if (now.length < 2) return false;
    const box = boxAt(...middle(now));
    if (before.length < 2 || !box) return true;
    const [x, y] = middle(before),
      [toX, toY] = middle(now);
    this.by(apart(now) / (apart(before) || 1), { box, x, y });
    this.move(box, toX - x, toY - y);
    return true;
  }
}

/**
 * @param {{x: number, y: number}[]} fingers
 * @returns {[number, number]}
 */
function middle([first, other]) {
  return [(first.x + other.x) / 2, (first.y + other.y) / 2];
}

/** @param {{x: number, y: number}[]} fingers */
function apart([first, other]) {
  return Math.hypot(first.x - other.x, first.y - other.y);
}
