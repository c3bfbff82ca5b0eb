/**
 * Which points of the panels are chosen: by label, one by one, by a loop drawn in one panel, or by
 * words in their texts.
 */

import { inside, unitPoints } from "./panelslayout.js";
import { shortened } from "./text.js";

const MOST_CORNERS = 60;
const MOST_POINTS = 100;
const LONGEST = 80; // characters that are looked for

export class Picked {
  /** @param {import("./payload.js").Panels} panels */
  constructor(panels) {
    this.panels = panels;
    /** @type {Set<number>} */
    this.classes = new Set();
    /** @type {Set<number>} */
    this.points = new Set();
    /** @type {{panel: number, loop: number[][]} | null} */
    this.lasso = null;
    this.words = "";
    /** @type {Uint8Array | null} */
    this.mask = null;
  }

  /** @param {number} label */
  toggle(label) {
    [this.lasso, this.points] = [null, new Set()];
    if (!this.classes.delete(label)) this.classes.add(label);
    this.settle();
  }

  /** @param {number} point */
  togglePoint(point) {
    this.lasso = null;
    this.classes.clear();
    if (!this.points.delete(point) && this.points.size < MOST_POINTS) this.points.add(point);
    this.settle();
  }

  /** @param {string} words */
  find(words) {
    this.words = words.slice(0, LONGEST);
    this.settle();
  }

  /**
   * @param {number} panel
   * @param {number[][]} loop between 0 and 1
   */
  surround(panel, loop) {
    this.classes.clear();
    this.points.clear();
    const step = Math.ceil(loop.length / MOST_CORNERS);
    const round = (/** @type {number} */ value) => Math.round(1e4 * value) / 1e4;
    const corners = loop.filter((_, i) => i % step === 0).map(([x, y]) => [round(x), round(y)]);
    this.lasso = { panel, loop: corners };
    this.settle();
  }

  /** What was chosen by hand; what is looked for stays. */
  clear() {
    this.classes.clear();
    this.points.clear();
    this.lasso = null;
    this.settle();
  }

  settle() {
    const points = this.byHand();
    const wanted = this.words.trim().toLowerCase();
    if (wanted) {
      this.mask = Uint8Array.from(this.panels.texts, (text, i) =>
        Number(text.toLowerCase().includes(wanted) && (!points || points[i] === 1)),
      );
    } else this.mask = points;
  }

  byHand() {
    const { labels, points } = this.panels;
    if (this.lasso) {
      const mask = inside(unitPoints(this.panels, this.lasso.panel), this.lasso.loop);
      if (mask.includes(1)) return mask;
      this.lasso = null;
    }
    if (this.points.size)
      return Uint8Array.from({ length: points.shape[1] }, (_, i) => Number(this.points.has(i)));
    if (this.classes.size && "data" in labels)
      return Uint8Array.from(labels.data, (label) => Number(this.classes.has(label)));
    return null;
  }

  /** For a link: `Toronto` as its number, a loop as its panel and corners. */
  state() {
    const loop = this.lasso
      ? `${this.lasso.panel}:${this.lasso.loop.map((corner) => corner.join("_")).join("~")}`
      : "";
    const listed = (/** @type {Set<number>} */ numbers) =>
      [...numbers].sort((a, b) => a - b).join(".");
    return {
      labels: listed(this.classes),
      points: listed(this.points),
      lasso: loop,
      find: this.words.trim(),
    };
  }

  /** @param {Record<string, string>} state */
  restore(state) {
    const known = (/** @type {string} */ text, /** @type {number} */ count) =>
      new Set(
        text
          .split(".")
          .filter(Boolean)
          .map(Number)
          .filter((number) => Number.isInteger(number) && number >= 0 && number < count),
      );
    this.classes = known(state.labels ?? "", this.panels.classes.length);
    this.points = new Set(
      [...known(state.points ?? "", this.panels.points.shape[1])].slice(0, MOST_POINTS),
    );
    const [panel, corners] = (state.lasso ?? "").split(":");
    const loop = (corners ?? "").split("~").map((corner) => corner.split("_").map(Number));
    const sound =
      loop.length > 2 &&
      loop.every((corner) => corner.length === 2 && corner.every(Number.isFinite));
    this.lasso =
      sound && Number(panel) in this.panels.sites ? { panel: Number(panel), loop } : null;
    this.find(this.panels.texts.length ? (state.find ?? "") : "");
  }

  /** How many are chosen, in words. */
  summary() {
    if (!this.mask) return "";
    const { labels, classes } = this.panels;
    const counts = new Map();
    let all = 0;
    this.mask.forEach((isPicked, i) => {
      if (!isPicked) return;
      all++;
      if ("data" in labels) counts.set(labels.data[i], (counts.get(labels.data[i]) ?? 0) + 1);
    });
    const parts = [...counts]
      .sort((a, b) => b[1] - a[1])
      .slice(0, 6)
      .map(([label, count]) => `${shortened(classes[label], 60)} ${count}`);
    const what = this.words.trim()
      ? `points have “${this.words.trim()}” in their text`
      : "points chosen";
    return `${all} of ${this.mask.length} ${what}${parts.length ? `: ${parts.join(", ")}` : ""}`;
  }
}
