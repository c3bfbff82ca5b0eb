/** Three steps for a first visit; dismissed once, it stays away. */

import { button, element } from "../../views/static/elements.js";

const STEPS = [
  [
    "#ask",
    "Type a text. Every token runs across the grid, every layer up it: each cell is one " +
      "hidden state. What you see is an example, computed before.",
  ],
  [
    "#overlays",
    "Paint the grid in another way: how large states are, what each layer would predict, " +
      "which states carry an answer.",
  ],
  [
    "aside.state",
    "Click a cell to read that state: its names, what is near it, what it predicts, and what " +
      "happens when it is taken away.",
  ],
];
const KEY = "hiddenscope-toured";

/** @param {HTMLElement} parent */
export function tour(parent) {
  if (remembered()) return;
  let step = 0;
  const words = element("p");
  const count = element("span", { class: "step" });
  const end = () => {
    point("");
    bar.remove();
    remember();
  };
  const next = button("Next", "The next step", () => {
    step += 1;
    if (step >= STEPS.length) end();
    else show();
  });
  const bar = element("section", { class: "tour", "aria-label": "A short tour" }, [
    count,
    words,
    next,
    button("Dismiss", "Do not show this again", end),
  ]);
  const show = () => {
    count.textContent = `${step + 1} of ${STEPS.length}`;
    words.textContent = STEPS[step][1];
    if (step === STEPS.length - 1) next.textContent = "Done";
    point(STEPS[step][0]);
  };
  parent.prepend(bar);
  show();
}

/** @param {string} selector */
function point(selector) {
  for (const marked of document.querySelectorAll(".pointed")) marked.classList.remove("pointed");
  if (selector) document.querySelector(selector)?.classList.add("pointed");
}

function remembered() {
  try {
    return localStorage.getItem(KEY) === "true";
  } catch {
    return false;
  }
}

function remember() {
  try {
    localStorage.setItem(KEY, "true");
  } catch {
    // A private window forgets it.
  }
}
