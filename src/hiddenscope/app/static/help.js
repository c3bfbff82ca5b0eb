/**
 * Help: what the page shows and how it is used. It comes with the package, and needs no network.
 */

import { element } from "../../views/static/elements.js";
import { EXPLAINED, OVERLAYS } from "./gridtab.js";

const GRID = "The grid";

const PARTS = /** @type {[string, string[]][]} */ ([
  [
    GRID,
    [
      "Tokens run across and layers run up: each cell is one hidden state. layer.0 is what " +
        "enters the first block, layer.k what comes after k blocks, and final is the last layer " +
        "after the model’s final norm.",
      "Choose a model and type a text; the grid follows. Each overlay colours it in its own way.",
      "A model without an unembedding, such as a sentence encoder, predicts no tokens: it has no " +
        "Lens and no Patch. Difference to B and Patch need a second text.",
      "Patch needs two answers that tell the texts apart. Left empty, they are the tokens " +
        "that the model finds likeliest after each text.",
      "A second model can stand beside the first: both are asked the same question.",
    ],
  ],
  [
    "One state",
    [
      "Click a cell, or move with the arrow keys and press Enter; Escape lets it go. Home, " +
        "End, Page Up and Page Down go to the edges.",
      "Ablate puts zeros in the place of the state. Patch from text B puts in the state of " +
        "text B in the same column, or at the same position where the grid shows text A alone. " +
        "Steer adds the difference of two texts’ last states, times a strength. Of a dictionary " +
        "at this site a feature can be added, or scaled: 0 takes it out. The next token is " +
        "shown before and after, and Write on lets the model continue the text.",
    ],
  ],
  [
    "Your own texts",
    [
      "Under Datasets you can upload a .csv, .tsv, .jsonl or .txt file. Choose which column " +
        "holds the texts, which the labels, and which the groups: texts that belong together, " +
        "such as paraphrases or the sentences of one document.",
      "Under Stores you find states that `hiddenscope extract` or `hiddenscope capture` kept " +
        "below the folder that the workbench was started with (--root). They can be browsed, " +
        "searched, profiled, projected, probed and clustered without a model, and a dictionary " +
        "of features can be trained on them.",
    ],
  ],
  [
    "Keep it, and go back",
    [
      "The address of the page holds everything: copy it to show the same view again. Undo " +
        "and History lead back to what was asked before in this window.",
      "Save offers files, and the code that makes the same result, as Python and as a command.",
    ],
  ],
  [
    "More",
    [
      "`series` runs an analysis on one model after another, and `extract` keeps the states of " +
        "a corpus: both are asked in a terminal or in Python.",
      "In a terminal, `hiddenscope --help` lists every command, and in Python `help(hs.lens)` " +
        "explains an analysis. The folder docs of the project has a page for each.",
    ],
  ],
]);

/**
 * @param {HTMLElement} root
 * @param {import("./api.js").AnalysisAnswer[]} analyses that the server offers
 */
export function helpTab(root, analyses) {
  const parts = PARTS.flatMap(([title, paragraphs]) => {
    const elements = paragraphs.map((words) => element("p", {}, inline(words)));
    return [
      element("h3", {}, [title]),
      ...elements,
      ...(title === GRID ? [overlaysExplained()] : []),
    ];
  });
  const listed = analyses.map(({ word, question }) => /** @type {const} */ ([word, question]));
  const all = [...parts, element("h3", {}, ["All analyses"]), explained(listed)];
  const heading = element("h2", { class: "tab" }, ["Help"]);
  root.replaceChildren(heading, element("div", { class: "prose help" }, all));
  document.documentElement.dataset.ready = "true";
}

function overlaysExplained() {
  const names = Object.entries(OVERLAYS);
  return explained(names.map(([name, label]) => /** @type {const} */ ([label, EXPLAINED[name]])));
}

/** @param {(readonly [string, string])[]} pairs of a name and what it is */
function explained(pairs) {
  return element(
    "dl",
    { class: "terms" },
    pairs.flatMap(([name, words]) => [element("dt", {}, [name]), element("dd", {}, [words])]),
  );
}

/**
 * A paragraph in which words between backticks are code.
 * @param {string} words
 */
function inline(words) {
  return words.split("`").map((part, i) => (i % 2 ? element("code", {}, [part]) : part));
}
