/**
 * The tokens above a tall grid, which stay on the screen while it is scrolled: those below it are
 * out of sight at first.
 */

import { Surface, whenHeightChanges } from "./canvas.js";
import { element } from "./elements.js";
import { edgeOf, SIZES, widthAt } from "./gridlayout.js";
import { canvasPen } from "./pen.js";

export class TokenAxis {
  /** @param {HTMLElement} readout which stays on the screen too: the tokens come below it */
  constructor(readout) {
    this.readout = readout;
    this.surface = new Surface("tokens-above");
    this.root = element("div", { class: "axis", hidden: "", "aria-hidden": "true" }, [
      this.surface.canvas,
    ]);
    this.stop = whenHeightChanges(readout, () => this.place());
  }

  /**
   * @param {import("./gridlayout.js").Layout} layout
   * @param {number} width
   */
  arrange(layout, width) {
    this.root.hidden = !layout.strip;
    this.surface.resize(width, layout.strip);
    this.place();
  }

  /** As far down as the read-out reaches, where that stands still. */
  place() {
    const above = parseFloat(getComputedStyle(this.readout).top) || 0;
    this.root.style.top = `${above + this.readout.offsetHeight}px`;
  }

  /**
   * @param {import("./gridlayout.js").Layout} layout
   * @param {import("./gridpaint.js").Window} visible
   * @param {import("./theme.js").Theme} theme
   * @param {number} pin
   */
  paint(layout, visible, theme, pin) {
    if (!layout.strip) return;
    const pen = canvasPen(this.surface.clear(), theme.font);
    const rows = layout.second.length ? [layout.tokens, layout.second] : [layout.tokens];
    const high = layout.strip / rows.length;
    const pinned = pin < 0 ? -1 : pin % layout.columns;
    const [turn, away, down] = layout.turned ? [-45, 2, 8] : [0, 0, 14];
    const anchor = turn ? "start" : "middle";
    rows.forEach((tokens, row) => {
      const y = (row + 1) * high - down;
      if (rows.length > 1)
        pen.text(layout.names[row], layout.left - 8, y, {
          fill: theme.muted,
          size: SIZES.name,
          anchor: "end",
        });
      for (let column = visible.first; column < visible.last; column++) {
        const x = edgeOf(layout, column) + widthAt(layout, column) / 2 - visible.shift;
        const fill = column === pinned ? theme.accent : theme.ink;
        if (x >= layout.left)
          pen.text(tokens[column], x - away, y, { fill, size: SIZES.token, turn, anchor });
      }
    });
  }
}
