/** A graph: the parts of a model in layers, and the edges between them. */

import { fitted, oncePerFrame, Surface, whenResized } from "./canvas.js";
import { colourMap } from "./colour.js";
import { Figure } from "./figure.js";
import { FRAME, graphLayout, mostOfEdges, thickness, underPointer } from "./graphlayout.js";
import { exact } from "./gridwords.js";
import { readState, writeState } from "./hash.js";
import { formatNumber, formatTick } from "./numbers.js";
import { canvasPen, lettering } from "./pen.js";
import { shownText } from "./text.js";
import { hasFinger, theme, whenThemeChanges } from "./theme.js";

/** @typedef {{node: number, edge: number}} Place */

const NOWHERE = { node: -1, edge: -1 };
// Beneath the graph: what colours and widths mean, at these shares of the strongest edge.
const GRAPH_KEY = { high: 44, sample: 26, step: 96, shares: [-1, -0.25, 0.25, 1] };
const WEAKEST = 0.5; // how far from the middle of the colours the weakest edge is
const TOLD = 4; // edges of a node that are named beside the pointer

export class GraphView {
  /**
   * @param {HTMLElement} root
   * @param {import("./payload.js").Graph} graph
   * @param {number} place
   */
  constructor(root, graph, place) {
    this.graph = graph;
    this.place = place;
    this.kept = -1; // the node that was clicked
    /** @type {Place} */
    this.pointed = NOWHERE;
    this.theme = theme();
    const size = (/** @type {number} */ edge) => Math.abs(graph.values.data[edge]);
    this.strongest = [...graph.values.data.keys()].sort((a, b) => size(b) - size(a));
    const help =
      "Left and right arrow keys move along the edges, strongest first, up and down along the " +
      "nodes; Enter keeps a node.";
    this.figure = new Figure(root, graph, help, {
      picture: () => this.picture(),
      rows: () => graphRows(graph, this.strongest),
    });
    this.surface = new Surface("front");
    this.layout = graphLayout(graph, 400, this.theme.font);
    this.paint = oncePerFrame(
      () => this.draw(canvasPen(this.surface.clear(), this.theme.font), this.layout),
      root,
    );
    const { canvas } = this.surface;
    canvas.setAttribute("role", "img");
    const counts = `${graph.nodes.length} parts, ${graph.values.data.length} edges`;
    canvas.setAttribute("aria-label", `${shownText(graph.title, 200)}: ${counts}`);
    this.figure.stage.append(canvas);
    this.restore();
    this.listen();
  }

  /** Take the state from the page's address. */
  restore() {
    const { node = -1 } = readState(this.place);
    this.kept = node in this.graph.nodes ? Number(node) : -1;
    this.tell();
  }

  listen() {
    const { canvas } = this.surface;
    const at = (/** @type {MouseEvent} */ { offsetX, offsetY }) =>
      underPointer(this.layout, offsetX, offsetY);
    for (const touched of /** @type {const} */ (["pointermove", "pointerdown"])) {
      canvas.addEventListener(touched, (event) => {
        this.point(at(event));
        this.figure.pointOut(this.hint(), event);
      });
    }
    canvas.addEventListener("pointerleave", (event) => {
      this.figure.pointOut([]);
      if (event.pointerType !== "touch") this.point(NOWHERE);
    });
    canvas.addEventListener("click", (event) => this.keep(at(event).node));
    this.figure.onKeys({
      ArrowRight: () => this.stepEdge(1),
      ArrowLeft: () => this.stepEdge(-1),
      ArrowUp: () => this.stepNode(1),
      ArrowDown: () => this.stepNode(-1),
      Enter: () => this.keep(this.pointed.node),
      Escape: () => {
        this.point(NOWHERE);
        this.keep(-1);
      },
    });
    this.stops = [
      whenResized(this.figure.stage, (width) => {
        this.layout = graphLayout(this.graph, width, this.theme.font);
        this.surface.resize(width, this.layout.height + GRAPH_KEY.high);
        this.paint();
      }),
      whenThemeChanges(() => {
        this.theme = theme();
        this.paint();
      }),
    ];
  }

  /** Stop listening to the page: the view is taken from it. */
  destroy() {
    for (const stop of this.stops ?? []) stop();
  }

  /** @param {Place} place */
  point(place) {
    if (place.node === this.pointed.node && place.edge === this.pointed.edge) return;
    this.pointed = place;
    this.tell();
  }

  /**
   * Keep the edges of a node in sight; those of the same node again, or of none, are let go.
   * @param {number} node
   */
  keep(node) {
    this.kept = node === this.kept ? -1 : node;
    writeState(this.place, { node: this.kept < 0 ? "" : String(this.kept) });
    this.tell();
  }

  /**
   * The next edge by strength, of the node that is kept or of all.
   * @param {number} by
   */
  stepEdge(by) {
    const edges = this.strongest.filter((edge) => this.kept < 0 || this.touches(edge, this.kept));
    const last = edges.length - 1;
    const next = Math.min(last, Math.max(0, edges.indexOf(this.pointed.edge) + by));
    if (last >= 0) this.point({ node: -1, edge: edges[next] });
  }

  /** @param {number} by */
  stepNode(by) {
    const last = this.graph.nodes.length - 1;
    const from = this.pointed.node < 0 ? this.kept : this.pointed.node;
    this.point({ node: Math.min(last, Math.max(0, from + by)), edge: -1 });
  }

  /**
   * @param {number} edge
   * @param {number} node
   */
  touches(edge, node) {
    return this.graph.source.data[edge] === node || this.graph.target.data[edge] === node;
  }

  /** The node whose edges stand out. */
  get chosen() {
    return this.pointed.node < 0 ? this.kept : this.pointed.node;
  }

  tell() {
    const pointing = "Point at an edge or at a node, or use the arrow keys.";
    const rest = hasFinger() ? "Touch an edge or a node." : pointing;
    const some = Math.max(this.pointed.edge, this.chosen) >= 0;
    this.figure.say(some ? this.words() : [rest]);
    this.paint();
  }

  /** @returns {import("./figure.js").Pieces} */
  words() {
    const { graph, pointed, chosen } = this;
    if (pointed.edge >= 0) return edgeWords(graph, pointed.edge);
    const edges = this.strongest.filter((edge) => this.touches(edge, chosen));
    const reads = edges.filter((edge) => graph.target.data[edge] === chosen).length;
    return [
      { strong: shownText(graph.nodes[chosen], 60) },
      `  edges in ${reads}, edges out ${edges.length - reads}`,
    ];
  }

  /**
   * What is said beside the pointer: of a node its strongest edges too.
   * @returns {import("./figure.js").Pieces}
   */
  hint() {
    const { edge, node } = this.pointed;
    if (Math.max(edge, node) < 0) return [];
    const edges = this.strongest.filter((each) => edge < 0 && this.touches(each, node));
    const told = edges.slice(0, TOLD).flatMap((each) => ["\n", ...edgeWords(this.graph, each)]);
    const more = edges.length > TOLD ? `\nand ${edges.length - TOLD} weaker` : "";
    return [...this.words(), ...told, more];
  }

  /**
   * Whether a node is the chosen one, or an edge goes from one to the other.
   * @param {number} node
   */
  near(node) {
    const joins = (/** @type {number} */ edge) =>
      this.touches(edge, node) && this.touches(edge, this.chosen);
    return node === this.chosen || this.strongest.some(joins);
  }

  picture() {
    const { font, ink } = this.theme;
    const [width, head] = [820, 40];
    const layout = graphLayout(this.graph, width, font, head);
    const letters = lettering(font, { size: 16, bold: true });
    const title = fitted(shownText(this.graph.title, 200), letters, width - 24);
    return {
      width,
      height: layout.height + GRAPH_KEY.high,
      paint: (/** @type {import("./pen.js").Pen} */ pen) => {
        pen.text(title, 12, 20, { fill: ink, size: 16, bold: true });
        this.draw(pen, layout);
      },
    };
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./graphlayout.js").GraphLayout} layout
   */
  draw(pen, layout) {
    const { graph, pointed, chosen } = this;
    const { ink, muted, faint, paper, accent } = this.theme;
    const most = mostOfEdges(graph);
    const bright = (/** @type {number} */ edge) =>
      chosen < 0 || edge === pointed.edge || this.touches(edge, chosen);
    // What stands out lies on top, and of this the strongest.
    const rank = (/** @type {number} */ edge) =>
      Number(bright(edge)) + Number(edge === pointed.edge);
    const drawn = [...this.strongest].reverse().sort((a, b) => rank(a) - rank(b));
    for (const edge of drawn) {
      const { points, thick } = layout.edges[edge];
      const colour = this.colour(graph.values.data[edge] / most);
      if (edge === pointed.edge) pen.line(points, ink, thick + 4);
      pen.line(points, bright(edge) ? colour : faint, thick);
    }
    layout.nodes.forEach(({ x, y, wide, label }, node) => {
      const [left, top] = [x - wide / 2, y - FRAME.high / 2];
      const isEnd = pointed.edge >= 0 && this.touches(pointed.edge, node);
      const quiet = chosen >= 0 && !isEnd && !this.near(node);
      let stroke = quiet ? faint : muted;
      if (node === chosen) stroke = accent;
      pen.rect(left, top, wide, FRAME.high, paper);
      pen.outline(left, top, wide, FRAME.high, stroke, isEnd || node === chosen ? 2 : 1);
      pen.text(label, x, y, { fill: quiet ? muted : ink, size: layout.size, anchor: "middle" });
    });
    this.drawKey(pen, layout, most);
  }

  /**
   * @param {import("./pen.js").Pen} pen
   * @param {import("./graphlayout.js").GraphLayout} layout
   * @param {number} most
   */
  drawKey(pen, { width, height }, most) {
    const { muted, font } = this.theme;
    const name = measured(this.graph.value_name, this.graph.unit);
    pen.text(fitted(name, lettering(font, {}), width), 0, height + 10, { fill: muted });
    const signs = new Set(Array.from(this.graph.values.data, Math.sign));
    const shares = GRAPH_KEY.shares.filter((share) => signs.has(Math.sign(share)));
    const step = Math.min(GRAPH_KEY.step, width / GRAPH_KEY.shares.length);
    shares.forEach((share, i) => {
      const value = Number((share * most).toPrecision(2));
      const [x, y] = [i * step, height + 32];
      const thick = thickness(Math.abs(value) / most);
      const points = [
        [x, y],
        [x + GRAPH_KEY.sample, y],
      ];
      pen.line(points, this.colour(value / most), thick);
      pen.text(formatTick(value), x + GRAPH_KEY.sample + 6, y, { fill: muted });
    });
  }

  /** @param {number} share of the strongest edge, from -1 to 1 */
  colour(share) {
    const map = colourMap("diverging", this.theme.dark);
    const level = Math.sign(share) * (WEAKEST + (1 - WEAKEST) * Math.min(1, Math.abs(share)));
    const at = 3 * Math.round(127.5 * (1 + level));
    return `rgb(${map.subarray(at, at + 3).join(", ")})`;
  }
}

/**
 * @param {string} name
 * @param {string} unit
 */
function measured(name, unit) {
  return shownText(unit ? `${name} (${unit})` : name, 80);
}

/**
 * @param {import("./payload.js").Graph} graph
 * @param {number} edge
 * @returns {import("./figure.js").Pieces}
 */
function edgeWords(graph, edge) {
  const [from, to] = [graph.source, graph.target].map((ends) => graph.nodes[ends.data[edge]]);
  const unit = graph.unit ? ` ${shownText(graph.unit, 40)}` : "";
  const kind = graph.kinds[edge] ? ` (${shownText(graph.kinds[edge], 40)})` : "";
  const second = graph.exact?.data[edge] ?? NaN;
  const more = [
    `  ${shownText(graph.exact_name, 40)} `,
    { strong: `${formatNumber(second)}${unit}` },
  ];
  return [
    { strong: `${shownText(from, 60)} → ${shownText(to, 60)}` },
    `${kind}  ${shownText(graph.value_name, 40)} `,
    { strong: `${formatNumber(graph.values.data[edge])}${unit}` },
    ...(Number.isNaN(second) ? [] : more),
  ];
}

/**
 * @param {import("./payload.js").Graph} graph
 * @param {number[]} edges strongest first
 * @returns {Generator<import("./export.js").Cell[]>}
 */
function* graphRows(graph, edges) {
  const second = graph.exact ? [graph.exact_name] : [];
  yield ["from", "to", "kind", graph.value_name, ...second];
  for (const edge of edges) {
    const ends = [graph.source, graph.target].map((side) => graph.nodes[side.data[edge]]);
    const number = graph.exact ? [exact(graph.exact.data[edge])] : [];
    yield [...ends, graph.kinds[edge] ?? "", exact(graph.values.data[edge]), ...number];
  }
}
