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
  tab: "grid",
};

/** @typedef {keyof typeof EXAMPLE} Held */

/**
 * @param {Held} name
 * @returns {string}
 */
export function held(name) {
  const given = readPage(name);
  if (given === "~") return ""; // emptied by the reader
  return given || EXAMPLE[name];
}

/**
 * What is as in the example is not written: an address is as short as it can be.
 * @param {Held} name
 * @param {string} value
 */
export function hold(name, value) {
  writePage(name, value === EXAMPLE[name] ? "" : value || "~");
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
