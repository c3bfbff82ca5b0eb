/** Which points of the panels are chosen: by label, or by a loop drawn in one panel. */

import { inside, unitPoints } from "./panelslayout.js";

const MOST_CORNERS = 60;

export class Picked {
  /** @param {import("./payload.js").Panels} panels */
  constructor(panels) {
    this.panels = panels;
    /** @type {Set<number>} */
    this.classes = new Set();
    /** @type {{panel: number, loop: number[][]} | null} */
    this.lasso = null;
    /** @type {Uint8Array | null} */
    this.mask = null;
  }

  /** @param {number} label */
  toggle(label) {
    this.lasso = null;
    if (!this.classes.delete(label)) this.classes.add(label);
    this.settle();
  }

  /**
   * @param {number} panel
   * @param {number[][]} loop between 0 and 1
   */
  surround(panel, loop) {
    this.classes.clear();
    const step = Math.ceil(loop.length / MOST_CORNERS);
    const round = (/** @type {number} */ value) => Math.round(1000 * value) / 1000;
    const kept = loop.filter((_, i) => i % step === 0).map(([x, y]) => [round(x), round(y)]);
    this.lasso = { panel, loop: kept };
    this.settle();
  }

  clear() {
    this.classes.clear();
    this.lasso = null;
    this.settle();
  }

  settle() {
    const { labels } = this.panels;
    if (this.lasso) this.mask = inside(unitPoints(this.panels, this.lasso.panel), this.lasso.loop);
    else if (this.classes.size && "data" in labels) this.mask = Uint8Array.from(labels.data, (label) => (this.classes.has(label) ? 1 : 0));
    else this.mask = null;
    if (this.lasso && !this.mask?.includes(1)) [this.lasso, this.mask] = [null, null];
  }

  /** For a link: `Toronto` as its number, a loop as its panel and corners. */
  state() {
    const loop = this.lasso ? `${this.lasso.panel}:${this.lasso.loop.map((corner) => corner.join("_")).join("~")}` : "";
    return { labels: [...this.classes].sort((a, b) => a - b).join("."), lasso: loop };
  }

  /** @param {Record<string, string>} state */
  restore(state) {
    const known = (state.labels ?? "").split(".").filter(Boolean).map(Number).filter((label) => label in this.panels.classes);
    this.classes = new Set(known);
    const [panel, corners] = (state.lasso ?? "").split(":");
    const loop = (corners ?? "").split("~").map((corner) => corner.split("_").map(Number));
    const sound = loop.length > 2 && loop.every((corner) => corner.length === 2 && corner.every(Number.isFinite));
    this.lasso = sound && Number(panel) in this.panels.sites ? { panel: Number(panel), loop } : null;
    this.settle();
  }

  /** How many are chosen, in words. */
  summary() {
    if (!this.mask) return "";
    const { labels, classes } = this.panels;
    const counts = new Map();
    let all = 0;
    this.mask.forEach((chosen, i) => {
      if (!chosen) return;
      all++;
      if ("data" in labels) counts.set(labels.data[i], (counts.get(labels.data[i]) ?? 0) + 1);
    });
    const parts = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 6).map(([label, count]) => `${classes[label]} ${count}`);
    return `${all} of ${this.mask.length} points chosen${parts.length ? `: ${parts.join(", ")}` : ""}`;
  }
}
