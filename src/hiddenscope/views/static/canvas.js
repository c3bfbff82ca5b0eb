/**
 * Canvases that are sharp on every screen, follow their container, and are painted once a frame.
 */

/**
 * @param {number} width
 * @param {number} height
 */
export function newContext(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  if (!context) throw new Error("This browser has no canvas.");
  return context;
}

/** @type {CanvasRenderingContext2D | null} */
let scratch = null;

/**
 * A small canvas that is used again and again.
 * @param {number} width
 * @param {number} height
 */
export function scratchCanvas(width, height) {
  scratch ??= newContext(width, height);
  if (scratch.canvas.width !== width || scratch.canvas.height !== height) {
    scratch.canvas.width = width;
    scratch.canvas.height = height;
  }
  return scratch;
}

/** A canvas measured in CSS pixels. */
export class Surface {
  /** @param {string} name its class */
  constructor(name) {
    this.context = newContext(1, 1);
    this.canvas = this.context.canvas;
    this.canvas.className = name;
    this.width = 0;
    this.height = 0;
  }

  /**
   * @param {number} width
   * @param {number} height
   */
  resize(width, height) {
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [
      Math.max(1, Math.round(width * ratio)),
      Math.max(1, Math.round(height * ratio)),
    ];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    [this.width, this.height] = [width, height];
  }

  /** A clean context. */
  clear() {
    const ratio = devicePixelRatio || 1;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    return this.context;
  }
}

/**
 * However often it is asked for, the work is done once, in the next frame; `painted` is told how
 * long it took.
 * @param {() => void} work
 * @param {EventTarget} teller
 */
export function oncePerFrame(work, teller) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const start = performance.now();
      work();
      teller.dispatchEvent(new CustomEvent("painted", { detail: performance.now() - start }));
    });
  };
}

/**
 * The pixel ratio and the container's width, whenever one of them changes.
 * @param {HTMLElement} container
 * @param {(width: number) => void} act
 * @returns {() => void} call it to stop watching
 */
export function whenResized(container, act) {
  let last = "";
  const observer = new ResizeObserver(() => {
    const now = `${container.clientWidth} ${devicePixelRatio}`;
    if (now !== last && container.clientWidth) act(container.clientWidth);
    last = now;
  });
  observer.observe(container);
  return () => observer.disconnect();
}

/**
 * @param {HTMLElement} watched
 * @param {() => void} act whenever its height changes
 * @returns {() => void} call it to stop watching
 */
export function whenHeightChanges(watched, act) {
  let last = 0;
  const observer = new ResizeObserver(() => {
    if (watched.offsetHeight !== last) act();
    last = watched.offsetHeight;
  });
  observer.observe(watched);
  return () => observer.disconnect();
}

/** @type {CanvasRenderingContext2D | null} */
let ruler = null;
/** @type {Map<string, number>} */
const widths = new Map();

/**
 * How wide a text is.
 * @param {string} text
 * @param {string} font
 */
export function widthOf(text, font) {
  const name = `${font}\n${text}`;
  let width = widths.get(name);
  if (width === undefined) {
    ruler ??= newContext(1, 1);
    ruler.font = font;
    width = ruler.measureText(text).width;
    if (widths.size > 20000) widths.clear();
    widths.set(name, width);
  }
  return width;
}

/**
 * As much of a text as there is room for.
 * @param {string} text
 * @param {string} font
 * @param {number} room
 */
export function fitted(text, font, room) {
  if (widthOf(text, font) <= room) return text;
  const letters = [...text];
  let low = 0,
    high = letters.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (widthOf(`${letters.slice(0, middle).join("")}…`, font) <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${letters.slice(0, low).join("")}…` : "";
}
