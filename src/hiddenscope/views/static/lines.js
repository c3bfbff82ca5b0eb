/** Lines: series along the layers, with bands. */

import { fitted, oncePerFrame, Surface, whenResized } from "./canvas.js";
import { classColour } from "./colour.js";
import { choice, key } from "./elements.js";
import { Figure } from "./figure.js";
import { exact } from "./gridwords.js";
import { readState, writeState } from "./hash.js";
import {
  acrossOf,
  axisName,
  chartOf,
  heightOf,
  paintAxes,
  paintSeries,
  placeAt,
} from "./linespaint.js";
import { formatNumber } from "./numbers.js";
import { canvasPen, lettering } from "./pen.js";
import { offersLog } from "./scale.js";
import { shownText } from "./text.js";
import { hasFinger, theme, whenThemeChanges } from "./theme.js";

export class LinesView {
  /**
   * @param {HTMLElement} root
   * @param {import("./payload.js").Lines} lines
   * @param {number} place
   */
  constructor(root, lines, place) {
    this.lines = lines;
    this.place = place;
    this.cursor = -1;
    this.log = lines.scale === "log";
    this.linear = false; // whether a log scale would show nothing more
    /** @type {Set<number>} */
    this.hidden = new Set();
    this.theme = theme();
    const help = "Left and right arrow keys move along it.";
    this.figure = new Figure(root, lines, help, {
      picture: () => this.picture(),
      rows: () => linesRows(lines),
    });
    this.surface = new Surface("front");
    this.paint = oncePerFrame(() => this.draw(), root);
    this.build();
    this.restore();
    this.listen();
  }

  build() {
    const { controls, stage, keys } = this.figure;
    this.scales = choice("Scale", { linear: "Linear", log: "Log" }, (scale) =>
      this.change(() => {
        this.log = scale === "log";
      }),
    );
    const drawn = this.lines.series.flatMap(({ y }) => [...y.data]);
    if (offersLog(this.lines, drawn)) controls.append(this.scales.root);
    else this.linear = true;
    this.surface.canvas.setAttribute("role", "img");
    const size = `${this.lines.series.length} series over ${this.lines.x.length} places`;
    const summary = `${shownText(this.lines.title, 200)}: ${size}`;
    this.surface.canvas.setAttribute("aria-label", summary);
    stage.append(this.surface.canvas);
    this.keys = this.lines.series.map((series, i) => {
      const band = series.band ? ` (band: ${shownText(series.band, 60)})` : "";
      const control = key(`${shownText(series.name, 60)}${band}`, () =>
        this.change(() => {
          if (!this.hidden.delete(i)) this.hidden.add(i);
        }),
      );
      control.swatch.classList.add(series.style);
      return control;
    });
    keys.append(...this.keys.map((control) => control.root));
  }

  listen() {
    const { canvas } = this.surface;
    const last = this.lines.x.length - 1;
    const at = (/** @type {PointerEvent} */ event) =>
      placeAt(this.chart(this.surface.width), event.offsetX);
    for (const touched of /** @type {const} */ (["pointermove", "pointerdown"])) {
      canvas.addEventListener(touched, (event) => {
        this.move(at(event));
        this.figure.pointOut(this.cursor < 0 ? [] : this.words(), event);
      });
    }
    canvas.addEventListener("pointerleave", (event) => {
      this.figure.pointOut([]);
      if (event.pointerType !== "touch") this.move(-1);
    });
    const step = (/** @type {number} */ by) => () =>
      this.move(Math.min(last, Math.max(0, this.cursor + by)));
    const go = (/** @type {number} */ to) => () => this.move(to);
    this.figure.onKeys({
      ArrowRight: step(1),
      ArrowLeft: step(-1),
      Home: go(0),
      End: go(last),
      Escape: go(-1),
    });
    const resized = whenResized(this.figure.stage, (width) => {
      this.surface.resize(width, this.chart(width).height);
      this.paint();
    });
    this.stops = [
      resized,
      whenThemeChanges(() => {
        this.theme = theme();
        this.settle();
      }),
    ];
  }

  /** Stop listening to the page: the view is taken from it. */
  destroy() {
    for (const stop of this.stops ?? []) stop();
  }

  restore() {
    const state = readState(this.place);
    this.log = !this.linear && (state.scale ?? this.lines.scale) === "log";
    this.hidden = new Set((state.hidden ?? "").split(".").filter(Boolean).map(Number));
    this.settle();
  }

  /** @param {() => void} act */
  change(act) {
    act();
    this.settle();
    const scale = this.log ? "log" : "linear";
    writeState(this.place, {
      scale: scale === this.lines.scale ? "" : scale,
      hidden: [...this.hidden].sort().join("."),
    });
  }

  settle() {
    this.scales?.set(this.log ? "log" : "linear");
    this.keys?.forEach((control, i) => {
      control.root.setAttribute("aria-pressed", String(!this.hidden.has(i)));
      control.swatch.style.setProperty("--colour", classColour(i, this.theme.dark));
    });
    this.tell();
    this.paint();
  }

  /** @param {number} cursor */
  move(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.tell();
    this.paint();
  }

  drawn() {
    const all = this.lines.series.map((series, i) => ({
      series,
      colour: classColour(i, this.theme.dark),
    }));
    return all.filter((_, i) => !this.hidden.has(i));
  }

  /** @param {number} width */
  chart(width) {
    return chartOf(this.lines, this.drawn(), width, this.log, this.theme.font);
  }

  tell() {
    const pointing = "Point at a place, or use the arrow keys.";
    const rest = hasFinger() ? "Touch a place to read it." : pointing;
    this.figure.say(this.cursor < 0 ? [rest] : this.words());
  }

  /** @returns {import("./figure.js").Pieces} */
  words() {
    const unit = this.lines.unit ? ` ${shownText(this.lines.unit, 40)}` : "";
    const pieces = this.drawn().flatMap(({ series }) => {
      const [y, low, high] = [series.y, series.low, series.high].map(
        (numbers) => numbers?.data[this.cursor] ?? NaN,
      );
      const band = Number.isNaN(low + high)
        ? ""
        : ` [${formatNumber(low)} to ${formatNumber(high)}]`;
      return [
        `  ${shownText(series.name, 60)} `,
        { strong: Number.isNaN(y) ? "no value" : `${formatNumber(y)}${unit}` },
        band,
      ];
    });
    return [{ strong: shownText(this.lines.x[this.cursor], 60) }, ...pieces];
  }

  draw() {
    const chart = this.chart(this.surface.width);
    this.surface.resize(this.surface.width, chart.height);
    const pen = canvasPen(this.surface.clear(), this.theme.font);
    paintAxes(pen, this.lines, chart, this.theme);
    if (this.cursor >= 0) {
      const x = acrossOf(chart, this.cursor);
      pen.line(
        [
          [x, chart.top],
          [x, chart.height - chart.bottom],
        ],
        this.theme.muted,
        1,
        [3, 3],
      );
    }
    paintSeries(pen, this.lines, chart, this.drawn(), this.theme.ink);
    if (this.cursor >= 0) this.marks(pen, chart);
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./linespaint.js").Chart} chart
   */
  marks(pen, chart) {
    const x = acrossOf(chart, this.cursor);
    for (const { series, colour } of this.drawn()) {
      const value = series.y.data[this.cursor];
      if (series.style === "bar" || !Number.isFinite(value)) continue;
      pen.dot(x, heightOf(chart, value), 5.5, this.theme.paper);
      pen.dot(x, heightOf(chart, value), 4, colour);
    }
  }

  picture() {
    const drawn = this.drawn();
    const [width, head] = [820, 40];
    const chart = this.chart(width - 24);
    const font = lettering(this.theme.font, { size: 16, bold: true });
    return {
      width,
      height: head + chart.height + 22 * drawn.length + 12,
      paint: (/** @type {import("./pen.js").Pen} */ pen) => {
        const moved = { ...chart, top: chart.top + head, height: chart.height + head };
        pen.text(fitted(shownText(this.lines.title, 200), font, width - 24), 12, 20, {
          fill: this.theme.ink,
          size: 16,
          bold: true,
        });
        paintAxes(pen, { ...this.lines, y_name: "", unit: "" }, moved, this.theme);
        pen.text(axisName(this.lines, chart), 12, head + 11, { fill: this.theme.muted });
        paintSeries(pen, this.lines, moved, drawn, this.theme.ink);
        drawn.forEach(({ series, colour }, i) => {
          const y = moved.height + 10 + 22 * i;
          pen.line(
            [
              [chart.left, y],
              [chart.left + 20, y],
            ],
            colour,
            3,
            series.style === "dash" ? [6, 4] : [],
          );
          const band = series.band ? ` (band: ${shownText(series.band, 60)})` : "";
          pen.text(`${shownText(series.name, 60)}${band}`, chart.left + 28, y, {
            fill: this.theme.ink,
          });
        });
      },
    };
  }
}

/**
 * @param {import("./payload.js").Lines} lines
 * @returns {Generator<import("./export.js").Cell[]>}
 */
function* linesRows(lines) {
  yield [
    lines.x_name,
    ...lines.series.flatMap((series) => [
      series.name,
      ...(series.low ? [`${series.name}: low`, `${series.name}: high`] : []),
    ]),
  ];
  for (let place = 0; place < lines.x.length; place++) {
    const numbers = lines.series.flatMap((series) => [
      series.y,
      ...(series.low && series.high ? [series.low, series.high] : []),
    ]);
    yield [lines.x[place], ...numbers.map((column) => exact(column.data[place]))];
  }
}
