/** What heads say in words: read-outs, the scores of a head, and the rows behind the picture. */

import { element } from "./elements.js";
import {
  headExists,
  headName,
  strongestPlaces,
  weightAt,
  whatIsRead,
  whoReads,
} from "./patternsdata.js";
import { formatNumber } from "./numbers.js";
import { quoted, shownText } from "./text.js";

/**
 * @typedef {import("./payload.js").Patterns} Patterns
 * @typedef {{query: number, key: number}} Chosen -1 for none
 * @typedef {import("./figure.js").Pieces} Pieces
 */

const MOST_NAMED = 3;
export const HEADS_HELP =
  "Arrow keys choose a head: left and right within a layer, up and down through the layers.";
export const LARGE_HELP =
  "Arrow keys choose a token that reads, up and down, and one that is read, left and right. " +
  "Escape goes back to the last token.";

/** @param {number} value a weight, or one times a norm */
export function weightWords(value) {
  if (value === 0) return "0";
  if (value < 0.001) return "<0.001";
  return value < 10
    ? value.toFixed(3).replace(/0+$/, "").replace(/\.$/, "")
    : formatNumber(Number(value.toPrecision(3)));
}

/**
 * Short, for above a token.
 * @param {number} value
 */
export function shortWeight(value) {
  if (value === 0) return "";
  if (value < 0.005) return "0.00";
  if (value < 10) return value.toFixed(2);
  return value.toFixed(value < 100 ? 1 : 0);
}

/**
 * @param {Patterns} heads
 * @param {number} at
 * @param {Chosen} selected
 * @param {boolean} weighted
 * @returns {Pieces}
 */
export function headsReadout(heads, at, selected, weighted) {
  const name = { strong: headName(heads, at) };
  const { query, key } = selected;
  if (query < 0 && key < 0) return [name];
  const same = heads.positions.length > 0 && heads.positions[query] === key;
  if (query >= 0 && key >= 0 && !same) {
    const value = weightWords(weightAt(heads, at, query, key, weighted));
    return [
      name,
      "  ",
      ...tokenPieces(heads, "query", query),
      " reads ",
      ...tokenPieces(heads, "key", key),
      `: ${weighted ? "value-weighted " : ""}`,
      { strong: value },
    ];
  }
  const token = query >= 0 ? tokenPieces(heads, "query", query) : tokenPieces(heads, "key", key);
  const pieces = [name, "  ", ...token];
  if (query >= 0) {
    const strongest = strongestPieces(heads, "key", whatIsRead(heads, at, query, weighted));
    pieces.push(" reads ", ...strongest);
  }
  if (key >= 0) {
    const strongest = strongestPieces(heads, "query", whoReads(heads, at, key, weighted));
    pieces.push(`${query >= 0 ? ";" : ""} is read by `, ...strongest);
  }
  return weighted ? [...pieces, "  (value-weighted)"] : pieces;
}

/**
 * @param {Patterns} heads
 * @param {"query" | "key"} side
 * @param {number} place
 * @returns {Pieces}
 */
function tokenPieces(heads, side, place) {
  const token = side === "query" ? heads.queries[place] : heads.keys[place];
  const position = side === "query" && heads.positions.length ? heads.positions[place] : place;
  return [{ strong: quoted(token) }, ` token ${position}`];
}

/**
 * @param {Patterns} heads
 * @param {"query" | "key"} side
 * @param {Float32Array} values
 * @returns {Pieces}
 */
function strongestPieces(heads, side, values) {
  const tokens = side === "query" ? heads.queries : heads.keys;
  const places = strongestPlaces(values, MOST_NAMED);
  if (!places.length) return ["no token"];
  return places.flatMap((place, i) => [
    i ? ", " : "",
    { strong: quoted(tokens[place]) },
    ` ${weightWords(values[place])}`,
  ]);
}

/**
 * A head in a few words, for a hint at the pointer.
 * @param {Patterns} heads
 * @param {number} at
 * @returns {Pieces}
 */
export function headHint(heads, at) {
  if (!headExists(heads, at)) return ["This layer has no such head."];
  const scores = heads.scores.flatMap((score) => {
    const values = score.score ?? score.here;
    return values ? [`\n${shownText(score.name, 60)} ${weightWords(values.data[at])}`] : [];
  });
  return [{ strong: headName(heads, at) }, ...scores];
}

/**
 * The scores of one head as a table.
 * @param {Patterns} heads
 * @param {number} at
 */
export function scoresShown(heads, at) {
  const tested = heads.scores.some((score) => score.score);
  const names = [
    "",
    "in this text",
    ...(tested ? ["on random tokens", "by chance", "corrected p"] : []),
  ];
  const cell = (/** @type {import("./payload.js").Numbers | null} */ numbers) => {
    const value = numbers ? numbers.data[at] : NaN;
    return element("td", { class: "number" }, [Number.isNaN(value) ? "–" : weightWords(value)]);
  };
  const rows = heads.scores.map((score) =>
    element("tr", score.p && score.p.data[at] < 0.05 ? { class: "significant" } : {}, [
      element("th", { scope: "row" }, [shownText(score.name, 60)]),
      cell(score.here),
      ...(tested ? [score.score, score.null, score.p].map(cell) : []),
    ]),
  );
  return element("table", { class: "scores" }, [
    element("caption", {}, [`Scores of ${headName(heads, at)}`]),
    element("thead", {}, [
      element(
        "tr",
        {},
        names.map((name) => (name ? element("th", { scope: "col" }, [name]) : element("td"))),
      ),
    ]),
    element("tbody", {}, rows),
  ]);
}

/**
 * What the two rows of numbers above the tokens are.
 * @param {Patterns} heads
 * @param {Chosen} selected
 */
export function meaningShown(heads, selected) {
  const line = (/** @type {string} */ kind, /** @type {(Node | string)[]} */ words) =>
    element("span", { class: kind }, [
      element("i", { class: "swatch", "aria-hidden": "true" }),
      ...words,
    ]);
  const named = (/** @type {string} */ token) => element("bdi", {}, [quoted(token)]);
  const reads =
    selected.query < 0
      ? []
      : [line("reads", ["what ", named(heads.queries[selected.query]), " reads"])];
  const readers =
    selected.key < 0
      ? []
      : [line("readers", ["which tokens read ", named(heads.keys[selected.key])])];
  return [...reads, ...readers];
}

/**
 * One row for each pair of tokens of a head of which one can read the other.
 * @param {Patterns} heads
 * @param {number} at
 * @returns {Generator<import("./export.js").Cell[]>}
 */
export function* headRows(heads, at) {
  const name = headName(heads, at);
  yield ["head", "query position", "query", "key position", "key", "weight", "value-weighted (L2)"];
  for (let query = 0; query < heads.queries.length; query++) {
    for (let key = 0; key < heads.keys.length; key++) {
      const weight = weightAt(heads, at, query, key, false);
      if (!weight) continue;
      const position = heads.positions.length ? heads.positions[query] : query;
      yield [
        name,
        position,
        heads.queries[query],
        key,
        heads.keys[key],
        fourDigits(weight),
        fourDigits(weightAt(heads, at, query, key, true)),
      ];
    }
  }
}

/** @param {number} value as many digits as the packed weights have */
function fourDigits(value) {
  return Number(value.toPrecision(4));
}
