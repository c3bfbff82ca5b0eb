/** The page's address holds everything: which tab, model, texts, overlay and cell. */

import { readPage, writePage } from "../../views/static/hash.js";

export const EXAMPLE = {
  model: "smollm2",
  a: "The capital of France is",
  b: "The capital of Germany is",
  overlay: "lens",
  answer: " Paris",
  other: " Berlin",
  second: "smollm2",
  seconddtype: "bfloat16",
  beside: "",
  dictionary: "",
  tab: "grid",
};

/** @typedef {keyof typeof EXAMPLE} Held */

/**
 * @param {Held} name
 * @returns {string}
 */
export function held(name) {
  const value = readPage(name);
  if (value === "~") return ""; // emptied by the reader
  return value || usual(name);
}

/**
 * What is meant where the address says nothing. Paris and Berlin answer the texts of the example
 * alone.
 * @param {Held} name
 */
function usual(name) {
  const answers = name === "answer" || name === "other";
  return answers && !isExample(["a", "b"]) ? "" : EXAMPLE[name];
}

/**
 * The model of a tab: its own, or else that of the grid. Choosing one in a tab changes no other.
 * @param {string} tab
 */
export function heldModel(tab) {
  return readPage(`${tab}.model`) || held("model");
}

/**
 * @param {string} tab
 * @param {string} name
 */
export function holdModel(tab, name) {
  writePage(`${tab}.model`, name);
}

/**
 * What is as in the example is not written: an address is as short as it can be.
 * @param {Held} name
 * @param {string} value
 */
export function hold(name, value) {
  writePage(name, value === usual(name) ? "" : value || "~");
}

/**
 * Whether these are as in the example, whose results come with the package.
 * @param {Held[]} names
 */
export function isExample(names) {
  return names.every((name) => held(name) === EXAMPLE[name]);
}

/** The cell that is pinned, as the grid keeps it. */
export function heldCell() {
  const [site, token] = readPage("0.pin").split("~");
  return site && token !== undefined ? { site, column: Number(token) } : null;
}
