/** What a grid says in words: its read-out, its rows for CSV and table, and how its keys work. */

import { largest, targetsOf, sourcesOf } from "./influence.js";
import { formatNumber } from "./numbers.js";
import { quoted, shownText, shownToken } from "./text.js";
import { hasFinger } from "./theme.js";

/**
 * @typedef {import("./payload.js").Grid} Grid
 * @typedef {string | {strong: string}} Piece
 */

/** @param {Grid} grid */
export function gridHelp(grid) {
  const map = grid.measures.some((measure) => measure.influence);
  const shows = map ? " What influences the cell and what it influences is painted." : "";
  return `Arrow keys move a cell cursor, Enter pins a cell, Escape unpins.${shows}`;
}

/**
 * The title of what is shown: that of the measure, or else that of the grid and which measure it
 * is.
 * @param {Grid} grid
 * @param {number} shown which measure
 */
export function gridTitle(grid, shown) {
  const { title, name } = grid.measures[shown];
  return shownText(title || (shown ? `${grid.title}: ${name}` : grid.title), 200);
}

/**
 * How large it is, in words.
 * @param {Grid} grid
 */
export function gridSize({ sites, tokens, x_name, y_name }) {
  const ofStates = (x_name ?? "token") === "token" && (y_name ?? "site") === "site";
  return ofStates
    ? `${sites.length} sites, ${tokens.length} tokens`
    : `${sites.length} rows, ${tokens.length} columns`;
}

/**
 * @param {Grid} grid
 * @param {number} shown which measure
 * @param {number} cursor
 * @param {number} pin
 * @returns {Piece[]}
 */
export function gridReadout(grid, shown, cursor, pin) {
  const measure = grid.measures[shown];
  const cell = cursor >= 0 ? cursor : pin;
  if (cell < 0) return [restWords(measure)];
  const pinned = pin >= 0 && cell === pin ? ["  (pinned)"] : [];
  const words = measure.influence
    ? influenceWords(grid, measure, cell, pin)
    : valueWords(measure, cell);
  return [...placeOfCell(grid, cell), ...pinned, "  ", ...words, ...topWords(grid, cell)];
}

/**
 * What is said while no cell is chosen.
 * @param {import("./payload.js").Measure} measure
 */
function restWords(measure) {
  const how = hasFinger() ? "Touch" : "Point at";
  const both = "which states influence it, and which it influences";
  if (measure.influence) return `${how} a cell to select it: you see ${both}.`;
  return hasFinger() ? "Touch a cell to read it." : "Point at a cell, or use the arrow keys.";
}

/**
 * The same in short, for a hint at the pointer.
 * @param {Grid} grid
 * @param {number} shown
 * @param {number} cell
 * @param {number} pin
 * @returns {Piece[]}
 */
export function gridHint(grid, shown, cell, pin) {
  if (cell < 0) return [];
  const measure = grid.measures[shown];
  const apart = measure.influence && pin >= 0 && pin !== cell;
  let words = measure.influence ? [] : valueWords(measure, cell);
  if (apart) words = influenceWords(grid, measure, cell, pin);
  return [
    ...placeOfCell(grid, cell),
    ...(words.length ? ["  ", ...words] : []),
    ...topWords(grid, cell),
  ];
}

/**
 * @param {import("./payload.js").Measure} measure
 * @param {number} cell
 * @returns {Piece[]}
 */
function valueWords(measure, cell) {
  return [
    `${shownText(measure.name, 60)} `,
    { strong: amount(measure, measure.values.data[cell]) },
  ];
}

/**
 * A number with its unit; zero that is no rounding of something small is called exact.
 * @param {import("./payload.js").Measure} measure
 * @param {number} value
 */
function amount(measure, value) {
  if (Number.isNaN(value)) return "no value";
  if (value === 0) return "exactly 0";
  return `${formatNumber(value)}${measure.unit ? ` ${shownText(measure.unit, 40)}` : ""}`;
}

/**
 * @param {Grid} grid
 * @param {number} cell
 * @returns {Piece[]}
 */
function placeOfCell(grid, cell) {
  const column = cell % grid.tokens.length;
  const site = grid.sites[Math.floor(cell / grid.tokens.length)];
  const across = grid.x_name ?? "token";
  if (across !== "token")
    return [
      { strong: site },
      ...(across
        ? [`  ${shownText(across, 40)} `, { strong: shownText(grid.tokens[column] ?? "", 60) }]
        : []),
    ];
  const against = grid.second.length ? [" against ", { strong: quoted(grid.second[column]) }] : [];
  const text = grid.text_of.length ? `, text ${grid.text_of[column] + 1}` : "";
  return [
    { strong: site },
    "  ",
    { strong: quoted(grid.tokens[column]) },
    ...against,
    ` token ${column}${text}`,
  ];
}

/**
 * @param {Grid} grid
 * @param {import("./payload.js").Measure} measure
 * @param {number} cell
 * @param {number} pin
 * @returns {Piece[]}
 */
function influenceWords(grid, measure, cell, pin) {
  const map = /** @type {Float32Array} */ (measure.influence?.data);
  const count = grid.sites.length * grid.tokens.length;
  if (pin >= 0 && cell !== pin) {
    const [on, of] = [map[pin * count + cell], map[cell * count + pin]].map((value) =>
      amount(measure, value),
    );
    return [
      "its influence on the pinned state: ",
      { strong: on },
      "; the pinned state’s influence on it: ",
      { strong: of },
    ];
  }
  const on = strongest(grid, measure, "is influenced most by ", sourcesOf(map, cell, count));
  const of = strongest(grid, measure, "influences most ", targetsOf(map, cell, count));
  return on.length && of.length ? [...on, "; ", ...of] : [...on, ...of];
}

/**
 * @param {Grid} grid
 * @param {import("./payload.js").Measure} measure
 * @param {string} lead
 * @param {Float32Array} values
 * @returns {Piece[]}
 */
function strongest(grid, measure, lead, values) {
  const best = largest(values);
  if (best < 0) return [];
  const token = quoted(grid.tokens[best % grid.tokens.length]);
  return [
    lead,
    { strong: `${grid.sites[Math.floor(best / grid.tokens.length)]} ${token}` },
    ` (${amount(measure, values[best])})`,
  ];
}

/**
 * @param {Grid} grid
 * @param {number} cell
 * @returns {Piece[]}
 */
function topWords(grid, cell) {
  if (!grid.words) return [];
  const { words, chosen, probabilities } = grid.words;
  const ranks = chosen.shape[2];
  /** @type {Piece[]} */
  const pieces = [];
  for (let rank = 0; rank < ranks; rank++) {
    const word = chosen.data[cell * ranks + rank];
    if (word < 0) continue;
    const share = probabilities ? ` ${formatNumber(probabilities.data[cell * ranks + rank])}` : "";
    pieces.push(rank ? ", " : "  says ", { strong: shownToken(words[word], 40) }, share);
  }
  return pieces;
}

/**
 * One row a cell, the top layer first as it is drawn.
 * @param {Grid} grid
 * @param {number} pin
 * @returns {Generator<import("./export.js").Cell[]>}
 */
export function* gridRows(grid, pin) {
  const columns = grid.tokens.length,
    count = columns * grid.sites.length;
  const mapped = pin < 0 ? [] : grid.measures.filter((measure) => measure.influence);
  const maps = mapped.map((measure) => /** @type {Float32Array} */ (measure.influence?.data));
  const ranks = grid.words ? grid.words.chosen.shape[2] : 0;
  yield [
    grid.y_name ?? "site",
    "position",
    grid.x_name || "token",
    ...(grid.second.length ? ["second"] : []),
    ...(grid.text_of.length ? ["text"] : []),
    ...grid.measures.map((measure) => `${measure.name}${unitOf(measure)}`),
    ...mapped.flatMap((measure) => [
      `influence on the pinned state${unitOf(measure)}`,
      `influence of the pinned state${unitOf(measure)}`,
    ]),
    ...Array.from({ length: ranks }, (_, rank) => [
      `word ${rank + 1}`,
      `probability ${rank + 1}`,
    ]).flat(),
  ];
  for (let row = grid.sites.length - 1; row >= 0; row--) {
    for (let column = 0; column < columns; column++) {
      const cell = row * columns + column;
      yield [
        grid.sites[row],
        column,
        grid.tokens[column],
        ...(grid.second.length ? [grid.second[column]] : []),
        ...(grid.text_of.length ? [grid.text_of[column]] : []),
        ...grid.measures.map((measure) => exact(measure.values.data[cell])),
        ...maps.flatMap((map) => [exact(map[pin * count + cell]), exact(map[cell * count + pin])]),
        ...wordCells(grid, cell, ranks),
      ];
    }
  }
}

/**
 * @param {Grid} grid
 * @param {number} cell
 * @param {number} ranks
 */
function wordCells(grid, cell, ranks) {
  return Array.from({ length: ranks }, (_, rank) => {
    const at = cell * ranks + rank;
    const word = grid.words?.chosen.data[at] ?? -1;
    return [
      word < 0 ? null : (grid.words?.words[word] ?? null),
      exact(grid.words?.probabilities?.data[at] ?? NaN),
    ];
  }).flat();
}

/** @param {import("./payload.js").Measure} measure */
function unitOf(measure) {
  return measure.unit ? ` (${measure.unit})` : "";
}

/**
 * The shortest number that is the same float32.
 * @param {number} value
 */
export function exact(value) {
  for (let digits = 6; digits < 9; digits++) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return short;
  }
  return value;
}
