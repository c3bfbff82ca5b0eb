/**
 * Patterns: small multiples of layer by head, one head large, and the text with what a token reads
 * and which tokens read it.
 */

import { fitted, oncePerFrame, Surface, whenResized } from "./canvas.js";
import { colourMap } from "./colour.js";
import { choice, element, list } from "./elements.js";
import { Figure, listenToKeys } from "./figure.js";
import { readState, writeState } from "./hash.js";
import {
  clamped,
  headExists,
  headName,
  mostOf,
  patternOf,
  spread,
  whatIsRead,
  whoReads,
} from "./patternsdata.js";
import { headUnder, largeLayout, pairUnder, smallLayout } from "./patternslayout.js";
import { frameHead, paintLarge, paintSmall, smallPictures } from "./patternspaint.js";
import { TokenText } from "./patternstext.js";
import {
  headHint,
  headRows,
  HEADS_HELP,
  headsReadout,
  LARGE_HELP,
  meaningShown,
  scoresShown,
} from "./patternswords.js";
import { keyLayout, paintKey } from "./legend.js";
import { formatTick } from "./numbers.js";
import { canvasPen, lettering } from "./pen.js";
import { shownText } from "./text.js";
import { theme, whenThemeChanges } from "./theme.js";

/** @typedef {import("./patternswords.js").Chosen} Chosen */

const WIDE = 860; // from there on the large head stands beside the small ones
const TALLEST = { wide: 640, narrow: 400 };
const SMALL_SHARE = 0.46; // of the width, at most, beside the large head
const LONG_TEXT = 40; // tokens
const NONE = { query: -1, key: -1 };

export class PatternsView {
  /**
   * @param {HTMLElement} root
   * @param {import("./payload.js").Patterns} heads
   * @param {number} place which view of the page it is
   */
  constructor(root, heads, place) {
    this.heads = heads;
    this.place = place;
    this.count = heads.sites.length * heads.heads.length;
    this.exists = Array.from({ length: this.count }, (_, at) => headExists(heads, at));
    this.first = heads.large[0] * heads.heads.length + heads.large[1];
    this.at = this.first; // the large head
    this.cursor = -1; // the small picture under the pointer
    this.weighted = heads.weighted;
    this.each = true;
    this.root = this.longText; // whether colours run by the square root
    this.shade = ""; // of the small pictures
    this.loudest = 0; // the largest value-weighted number of all heads, once it is asked for
    /** @type {Chosen} */
    this.pin = this.lastToken();
    /** @type {Chosen} */
    this.pointed = NONE;
    this.theme = theme();
    this.figure = new Figure(root, heads, HEADS_HELP, {
      picture: () => this.picture(),
      rows: () => headRows(heads, this.at),
    });
    this.small = new Surface("front");
    this.large = new Surface("large");
    this.key = new Surface("legend");
    /** @type {HTMLCanvasElement | null} */
    this.pictures = null;
    this.smallAt = smallLayout(heads, 400, TALLEST.wide, this.theme.font);
    this.largeAt = largeLayout(heads, 400, this.theme.font);
    this.paint = oncePerFrame(() => this.draw(), root);
    this.build();
    this.restore();
    this.listen();
  }

  build() {
    const { heads, figure } = this;
    this.shows = choice("Shows", { pattern: "Weights", weighted: "Value-weighted" }, (shown) =>
      this.change(() => {
        this.weighted = shown === "weighted";
      }),
    );
    this.spans = choice("Colour range", { each: "Each head", all: "All heads" }, (span) =>
      this.change(() => {
        this.each = span === "each";
      }),
    );
    this.scales = choice("Scale", { linear: "Linear", root: "Root" }, (scale) =>
      this.change(() => {
        this.root = scale === "root";
      }),
    );
    this.known = this.exists.flatMap((exists, at) => (exists ? [at] : []));
    this.list = list(
      "Large head",
      this.known.map((at) => shownText(headName(heads, at), 80)),
      (selected) =>
        this.change(() => {
          this.at = this.known?.[selected] ?? this.at;
        }),
    );
    figure.controls.append(this.shows.root, this.spans.root, this.scales.root, this.list.root);
    this.small.canvas.setAttribute("role", "img");
    this.small.canvas.setAttribute(
      "aria-label",
      `${shownText(heads.title, 200)}: ${heads.sites.length} layers, ${heads.heads.length} heads`,
    );
    this.name = element("h3");
    this.scores = element("div", { class: "scores" });
    this.meaning = element("p", { class: "meaning" });
    this.texts = this.textsOf();
    this.stage = element("div", { class: "largestage", tabindex: "0", role: "application" }, [
      this.large.canvas,
    ]);
    this.pair = element("div", { class: "headpair" });
    this.aside = element("div", { class: "onehead" }, [
      this.name,
      this.scores,
      this.meaning,
      ...this.texts.map(({ root }) => root),
      element("div", { class: "scroller" }, [this.stage]),
    ]);
    figure.stage.replaceWith(this.pair);
    figure.stage.append(element("div", { class: "scroller" }, [this.small.canvas]));
    this.pair.append(figure.stage, this.aside);
    figure.keys.append(this.key.canvas);
  }

  /**
   * One text where tokens read their own text, and else that of the queries and that of the keys.
   */
  textsOf() {
    const { queries, keys, positions } = this.heads;
    if (positions.length)
      return [
        new TokenText("The text: choose a token", keys, (place, keep) =>
          this.point(this.ofToken(place), keep),
        ),
      ];
    return [
      new TokenText("The text that reads: choose a token", queries, (place, keep) =>
        this.point({ query: place, key: -1 }, keep),
      ),
      new TokenText("The text that is read: choose a token", keys, (place, keep) =>
        this.point({ query: -1, key: place }, keep),
      ),
    ];
  }

  /**
   * A token of the text as one that reads and as one that is read.
   * @param {number} place
   * @returns {Chosen}
   */
  ofToken(place) {
    return { query: this.heads.positions.indexOf(place), key: place };
  }

  /** @returns {Chosen} */
  lastToken() {
    const query = this.heads.queries.length - 1;
    return { query, key: this.heads.positions.length ? this.heads.positions[query] : -1 };
  }

  /** Of a long text most weights are small: the square root keeps them apart. */
  get longText() {
    return this.heads.keys.length > LONG_TEXT;
  }

  /** The token that is shown: the one that is pointed at, or else the one that was chosen. */
  get chosen() {
    const { query, key } = this.pointed;
    return query < 0 && key < 0 ? this.pin : this.pointed;
  }

  listen() {
    const { figure } = this;
    const under = (/** @type {MouseEvent} */ event) =>
      headUnder(this.smallAt, event.offsetX, event.offsetY);
    this.small.canvas.addEventListener("pointermove", (event) => {
      const at = under(event);
      figure.pointOut(at < 0 ? [] : headHint(this.heads, at), event);
      if (at !== this.cursor) {
        this.cursor = at;
        this.paint();
      }
    });
    this.small.canvas.addEventListener("pointerleave", () => {
      figure.pointOut([]);
      this.cursor = -1;
      this.paint();
    });
    this.small.canvas.addEventListener("click", (event) => this.choose(under(event)));
    const step = (/** @type {number} */ right, /** @type {number} */ up) => () =>
      this.stepHead(right, up);
    const [across, high] = [this.heads.heads.length, this.heads.sites.length];
    figure.onKeys({
      ArrowRight: step(1, 0),
      ArrowLeft: step(-1, 0),
      ArrowUp: step(0, 1),
      ArrowDown: step(0, -1),
      Home: step(-across, 0),
      End: step(across, 0),
      PageUp: step(0, high),
      PageDown: step(0, -high),
    });
    this.listenToLarge();
    const watched = /** @type {HTMLElement} */ (this.pair);
    this.stops = [
      whenResized(watched, (width) => this.arrange(width)),
      whenThemeChanges(() => {
        this.theme = theme();
        this.pictures = null;
        this.settle();
      }),
    ];
  }

  listenToLarge() {
    const { canvas } = this.large;
    const pair = (/** @type {MouseEvent} */ event) =>
      pairUnder(this.largeAt, event.offsetX, event.offsetY);
    canvas.addEventListener("pointermove", (event) => this.point(pair(event), false));
    canvas.addEventListener("pointerleave", () => this.point(NONE, false));
    canvas.addEventListener("click", (event) => this.point(pair(event), true));
    const step = (/** @type {number} */ down, /** @type {number} */ right) => () => {
      const { query, key } = this.chosen;
      const [lastQuery, lastKey] = [this.heads.queries.length - 1, this.heads.keys.length - 1];
      this.point(
        { query: clamped(query + down, lastQuery), key: clamped(key + right, lastKey) },
        true,
      );
    };
    const far = Math.max(this.heads.queries.length, this.heads.keys.length);
    if (this.stage)
      listenToKeys(this.stage, {
        ArrowDown: step(1, 0),
        ArrowUp: step(-1, 0),
        ArrowRight: step(0, 1),
        ArrowLeft: step(0, -1),
        Home: step(0, -far),
        End: step(0, far),
        PageUp: step(-far, 0),
        PageDown: step(far, 0),
        Escape: () => this.point(this.lastToken(), true),
      });
  }

  /** Stop listening to the page: the view is taken from it. */
  destroy() {
    for (const stop of this.stops ?? []) stop();
  }

  /**
   * The next head in a direction that a block has.
   * @param {number} right
   * @param {number} up
   */
  stepHead(right, up) {
    const across = this.heads.heads.length;
    const column = clamped((this.at % across) + right, across - 1);
    const row = clamped(Math.floor(this.at / across) + up, this.heads.sites.length - 1);
    this.choose(row * across + column);
  }

  /** @param {number} at */
  choose(at) {
    if (at >= 0 && this.exists[at])
      this.change(() => {
        this.at = at;
      });
  }

  /**
   * @param {Chosen} place
   * @param {boolean} keep whether it stays when the pointer leaves
   */
  point(place, keep) {
    const some = place.query >= 0 || place.key >= 0;
    if (keep && some)
      return this.change(() => {
        this.pin = place;
        this.pointed = NONE;
      });
    if (place.query === this.pointed.query && place.key === this.pointed.key) return undefined;
    this.pointed = place;
    return this.tell();
  }

  /** Take the state from the page's address. */
  restore() {
    const state = readState(this.place);
    const at = this.exists.findIndex(
      (exists, head) => exists && headName(this.heads, head) === state.head,
    );
    this.at = at < 0 ? this.first : at;
    this.weighted = state.shows ? state.shows === "weighted" : this.heads.weighted;
    this.each = state.colours !== "all";
    this.root = state.scale ? state.scale === "root" : this.longText;
    const [query, key] = (state.token ?? "").split("~").map(Number);
    const known =
      query < this.heads.queries.length && key < this.heads.keys.length && query >= -1 && key >= -1;
    this.pin = known ? { query, key } : this.lastToken();
    this.settle();
  }

  /** @param {() => void} act */
  change(act) {
    act();
    this.settle();
    const last = this.lastToken();
    const moved = this.pin.query !== last.query || this.pin.key !== last.key;
    const shows = this.weighted ? "weighted" : "pattern";
    const scale = this.root ? "root" : "linear";
    writeState(this.place, {
      head: this.at === this.first ? "" : headName(this.heads, this.at),
      shows: this.weighted === this.heads.weighted ? "" : shows,
      colours: this.each ? "" : "all",
      scale: this.root === this.longText ? "" : scale,
      token: moved ? `${this.pin.query}~${this.pin.key}` : "",
    });
  }

  settle() {
    const shade = `${this.weighted} ${this.each} ${this.root}`;
    if (shade !== this.shade) this.pictures = null;
    this.shade = shade;
    this.shows?.set(this.weighted ? "weighted" : "pattern");
    this.spans?.set(this.each ? "each" : "all");
    this.scales?.set(this.root ? "root" : "linear");
    this.list?.set(this.known?.indexOf(this.at) ?? 0);
    const name = headName(this.heads, this.at);
    this.name?.replaceChildren(name);
    this.scores?.replaceChildren(scoresShown(this.heads, this.at));
    this.values = patternOf(this.heads, this.at, this.weighted);
    this.stage?.setAttribute("aria-label", `${name}, large. ${LARGE_HELP}`);
    this.tell();
  }

  /** Say and show what the chosen token reads, and which tokens read it. */
  tell() {
    const { heads, at, weighted, chosen } = this;
    this.figure.say(headsReadout(heads, at, chosen, weighted));
    const reads = chosen.query < 0 ? null : whatIsRead(heads, at, chosen.query, weighted);
    const readers = chosen.key < 0 ? null : whoReads(heads, at, chosen.key, weighted);
    this.meaning?.replaceChildren(...meaningShown(heads, chosen));
    const [first, second] = this.texts ?? [];
    if (second) {
      first.show({ reads: null, readers }, chosen.query);
      second.show({ reads, readers: null }, chosen.key);
    } else
      first?.show(
        { reads, readers: readers && spread(readers, heads) },
        chosen.query >= 0 ? heads.positions[chosen.query] : chosen.key,
      );
    this.paint();
  }

  /** @param {number} width */
  arrange(width) {
    const wide = width >= WIDE;
    this.pair?.classList.toggle("wide", wide);
    const { font } = this.theme;
    this.smallAt = smallLayout(
      this.heads,
      wide ? SMALL_SHARE * width : width,
      wide ? TALLEST.wide : TALLEST.narrow,
      font,
    );
    const room = wide ? width - this.smallAt.width - 36 : width;
    this.largeAt = largeLayout(this.heads, room, font);
    this.small.resize(this.smallAt.width, this.smallAt.height);
    this.large.resize(this.largeAt.width, this.largeAt.height);
    if (this.stage) this.stage.style.width = `${this.largeAt.width}px`;
    this.pictures = null;
    this.paint();
  }

  /** The largest number of the colours of the large head. */
  get most() {
    return this.each ? mostOf(this.values ?? []) : this.mostOfAll();
  }

  mostOfAll() {
    if (!this.weighted) return 1;
    this.loudest ||= Math.max(
      ...(this.known ?? []).map((at) => mostOf(patternOf(this.heads, at, true))),
    );
    return this.loudest;
  }

  /** @param {number} ratio */
  smallOnes(ratio) {
    const shade = {
      weighted: this.weighted,
      each: this.each,
      most: this.each ? 1 : this.mostOfAll(),
      root: this.root,
      dark: this.theme.dark,
    };
    return smallPictures(this.heads, this.smallAt, shade, ratio);
  }

  draw() {
    this.pictures ??= this.smallOnes(devicePixelRatio || 1);
    const { paper, ink, accent } = this.theme;
    const pen = canvasPen(this.small.clear(), this.theme.font);
    paintSmall(pen, this.heads, this.smallAt, this.pictures, this.theme);
    if (this.cursor >= 0) frameHead(pen, this.smallAt, this.cursor, { paper, ink });
    frameHead(pen, this.smallAt, this.at, { paper, ink: accent });
    const largePen = canvasPen(this.large.clear(), this.theme.font);
    if (this.values) paintLarge(largePen, this.largeAt, this.values, this, this.chosen, this.theme);
    this.drawKey();
  }

  /** @returns {import("./legend.js").Legend} */
  get legend() {
    const what = this.weighted ? "value-weighted (L2)" : "attention weight";
    const whose = this.each ? "; small: each to its own most" : "";
    const { most } = this;
    const ticks = [0, 0.5, 1].map((at) => ({
      at,
      label: formatTick(Number(((this.root ? at * at : at) * most).toPrecision(2))),
    }));
    return { map: colourMap("sequential", this.theme.dark), ticks, name: `${what}${whose}` };
  }

  drawKey() {
    const layout = keyLayout(1, [], this.figure.root.clientWidth, this.theme.font);
    this.key.resize(layout.width, layout.height);
    paintKey(canvasPen(this.key.clear(), this.theme.font), [this.legend], 0, 0, layout, this.theme);
    this.key.canvas.setAttribute("role", "img");
    this.key.canvas.setAttribute(
      "aria-label",
      `Colours: ${this.legend.name}, ${this.legend.ticks.map((tick) => tick.label).join(", ")}`,
    );
  }

  /** The small multiples and beneath them the large head, to be saved. */
  picture() {
    const [head, edge, gap] = [40, 12, 34];
    const { font, ink } = this.theme;
    const [small, large] = [this.smallAt, this.largeAt];
    const width = Math.max(small.width, large.width, 320) + 2 * edge;
    const key = keyLayout(1, [], width, font);
    const bold = lettering(font, { size: 16, bold: true });
    const pictures = this.smallOnes(2);
    return {
      width,
      height: head + small.height + gap + large.height + key.height + edge,
      paint: (/** @type {import("./pen.js").Pen} */ pen) => {
        pen.text(fitted(this.figure.title, bold, width - 2 * edge), edge, 20, {
          fill: ink,
          size: 16,
          bold: true,
        });
        const moved = { ...small, left: small.left + edge, top: small.top + head };
        paintSmall(pen, this.heads, moved, pictures, this.theme);
        frameHead(pen, moved, this.at, { paper: this.theme.paper, ink: this.theme.accent });
        const below = head + small.height + gap;
        pen.text(headName(this.heads, this.at), edge, below - 16, {
          fill: ink,
          size: 14,
          bold: true,
        });
        if (this.values)
          paintLarge(
            pen,
            { ...large, left: large.left + edge, top: large.top + below },
            this.values,
            this,
            this.pin,
            this.theme,
          );
        paintKey(pen, [this.legend], edge, below + large.height + 4, key, this.theme);
      },
    };
  }
}
