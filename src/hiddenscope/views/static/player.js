/** A slider through the layers, and a button that plays it. */

import { button, element } from "./elements.js";
import { keepsStill } from "./theme.js";

const REST = 500;
const MOVE = 650;

export class Player {
  /**
   * @param {string[]} sites
   * @param {() => void} choose a layer was chosen
   * @param {() => void} moved something is to be painted anew
   */
  constructor(sites, choose, moved) {
    this.sites = sites;
    this.chosen = choose;
    this.repaint = moved;
    this.panel = 0;
    this.from = 0;
    this.share = 1;
    this.moved = false;
    this.playing = 0;
    this.slider = element("input", {
      type: "range",
      min: "0",
      max: String(sites.length - 1),
      step: "1",
      value: "0",
      "aria-label": "Layer",
    });
    this.slider.addEventListener("input", () => {
      this.stop();
      this.go(Number(this.slider.value));
    });
    this.button = button("Play", "Play through the layers", () =>
      this.playing ? this.stop() : this.play(),
    );
    this.name = element("span", { class: "now" }, [sites[0] ?? ""]);
    this.root = element("div", { class: "player" }, [this.button, this.slider, this.name]);
  }

  /**
   * Show a layer at once.
   * @param {number} panel
   */
  set(panel) {
    this.panel = this.from = panel;
    this.share = 1;
    this.slider.value = String(panel);
    this.slider.setAttribute("aria-valuetext", this.sites[panel] ?? "");
    this.name.replaceChildren(this.sites[panel] ?? "");
  }

  /**
   * Move to a layer.
   * @param {number} panel
   */
  go(panel) {
    const to = Math.min(this.sites.length - 1, Math.max(0, panel));
    const before = this.panel;
    this.moved = true;
    this.set(to);
    this.chosen();
    if (to === before || keepsStill()) return;
    [this.from, this.share] = [before, 0];
    this.glide(to, performance.now());
  }

  /**
   * @param {number} to
   * @param {number} start
   */
  glide(to, start) {
    requestAnimationFrame((now) => {
      if (this.panel !== to || this.share >= 1) return;
      const part = Math.min(1, Math.max(0, (now - start) / MOVE));
      this.share = part * part * (3 - 2 * part);
      this.repaint();
      if (part < 1) this.glide(to, start);
    });
  }

  play() {
    this.button.replaceChildren("Pause");
    if (this.panel === this.sites.length - 1) this.go(0);
    this.playing = window.setInterval(() => {
      if (this.panel >= this.sites.length - 1) this.stop();
      else this.go(this.panel + 1);
    }, MOVE + REST);
    this.go(Math.min(this.panel + 1, this.sites.length - 1));
  }

  stop() {
    clearInterval(this.playing);
    this.playing = 0;
    this.button.replaceChildren("Play");
  }
}
