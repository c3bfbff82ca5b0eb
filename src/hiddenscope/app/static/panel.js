/**
 * The side panel: one state. Its names, its norm, its nearest others, what a lens reads there, and
 * what changes do.
 */

import { button, element } from "../../views/static/elements.js";
import { largest, sourcesOf, targetsOf } from "../../views/static/influence.js";
import { formatNumber } from "../../views/static/numbers.js";
import { shownText, shownToken } from "../../views/static/text.js";
import { Refused } from "./api.js";
import { saveMenu, paragraph } from "./result.js";

/**
 * @typedef {{site: string, column: number, token: number, other: number | null | undefined, model:
 *   string}} Cell a state of text A, where it stands in a grid, and the token of text B in the same
 *   column
 * @typedef {import("./api.js").ResultAnswer} ResultAnswer
 */

const MOST_LINKS = 3;
const CHANGED = /** @type {Record<string, string>} */ ({
  ablate: "Ablated",
  replace: "Patched",
  steer: "Steered",
  add: "Feature added",
  scale: "Feature scaled",
});

export class StatePanel {
  /**
   * @param {HTMLElement} root
   * @param {(cell: Cell, change: Record<string, unknown> | null) => void} ask
   * @param {{choose: (site: string, token: number, model: string) => void, see: () => void, textB:
   *   () => string, isFirst: (cell: Cell) => boolean, write: (cell: Cell, change: Record<string,
   *   unknown> | null) => Promise<ResultAnswer | undefined>}} page
   */
  constructor(root, ask, page) {
    this.root = root;
    this.ask = ask;
    this.page = page;
    this.strength = "4";
    this.toward = "";
    this.away = "";
    this.feature = "0";
  }

  /** Nothing is chosen. */
  empty() {
    this.fresh();
    this.root.replaceChildren(
      element("h2", {}, ["One state"]),
      element("p", {}, [
        "Choose a cell of the grid: click it, or move with the arrow keys and press Enter. " +
          "Here you see what that state is, what is near it, and what happens when it is " +
          "changed.",
      ]),
    );
  }

  /** @param {string} sentence */
  wrong(sentence) {
    this.fresh();
    this.root.replaceChildren(element("h2", {}, ["One state"]), paragraph(sentence));
  }

  /** Nothing that is shown waits to be replaced. */
  fresh() {
    this.root.classList.remove("stale");
    delete this.root.dataset.cell;
  }

  /**
   * What the address says was done, in the fields for it.
   * @param {Record<string, unknown> | null} change
   */
  fill(change) {
    for (const name of /** @type {const} */ (["toward", "away", "strength", "feature"]))
      if (change?.[name] !== undefined) this[name] = String(change[name]);
  }

  /** @param {Cell} cell */
  wait(cell) {
    if (this.root.dataset.cell === nameOf(cell)) return this.root.classList.add("stale");
    this.root.replaceChildren(
      element("h2", {}, [cell.site]),
      element("p", {}, ["Reading this state …"]),
    );
    return undefined;
  }

  /**
   * @param {ResultAnswer} result
   * @param {Cell} cell
   * @param {import("../../views/static/payload.js").Grid} grid the grid that is shown
   * @param {Record<string, unknown> | null} change what was done to it
   */
  show(result, cell, grid, change) {
    const { state } = result;
    if (!state) return;
    this.root.classList.remove("stale");
    this.root.dataset.cell = nameOf(cell);
    this.root.scrollTop = 0;
    const facts = [
      ...Object.entries(state.names).flatMap(([tool, name]) => [
        element("dt", {}, [tool]),
        element("dd", {}, [element("code", {}, [name])]),
      ]),
      element("dt", {}, ["norm"]),
      element("dd", {}, [formatNumber(state.norm)]),
      element("dt", {}, ["token id"]),
      element("dd", {}, [String(state.id)]),
    ];
    this.root.replaceChildren(
      element("h2", {}, [
        `${state.site}, “`,
        element("bdi", {}, [shownToken(state.string)]),
        "”",
        ...(this.page.isFirst(cell) ? [] : [` in ${state.model}`]),
      ]),
      heading("Change it, and read the next token"),
      this.changes(cell, state),
      this.outcome(state),
      this.writing(cell, change),
      element("dl", {}, facts),
      heading("What this layer would predict here"),
      predictions(state.lens),
      ...(state.features
        ? [heading("Strongest features here"), this.features(state.features)]
        : []),
      heading("Nearest states of this text"),
      this.near(state.nearest, cell),
      ...this.seen(cell, grid),
      element("div", { class: "acts" }, [saveMenu(result, () => ({ view: "", measure: "" }))]),
    );
  }

  /**
   * @param {import("./api.js").StateAnswer["nearest"]} nearest
   * @param {Cell} cell
   */
  near(nearest, cell) {
    return element(
      "ul",
      { class: "words" },
      nearest.slice(0, 5).map(({ site, token, string, cosine }) => {
        const go = element("button", { type: "button", class: "plain" }, [
          `${site}, ${shownToken(string ?? null, 20)}`,
        ]);
        go.addEventListener("click", () => this.page.choose(site, token, cell.model));
        return element("li", {}, [go, element("span", {}, [`cosine ${cosine.toFixed(3)}`])]);
      }),
    );
  }

  /**
   * What it sees and what sees it: from the map where that is the overlay, or else a way to it.
   * @param {Cell} cell
   * @param {import("../../views/static/payload.js").Grid} grid
   */
  seen(cell, grid) {
    const map = grid.measures.find((measure) => measure.influence)?.influence;
    const row = this.page.isFirst(cell) ? grid.sites.indexOf(cell.site) : -1;
    const title = heading("What it sees, and what sees it");
    if (!map || row < 0)
      return [
        title,
        element("div", { class: "acts" }, [
          button(
            "Show on the grid",
            "Paint which states influence it, and which it influences",
            () => this.page.see(),
          ),
        ]),
      ];
    const count = grid.sites.length * grid.tokens.length;
    const at = row * grid.tokens.length + cell.column;
    const data = /** @type {Float32Array} */ (map.data);
    const both = /** @type {const} */ ([
      ["Sees most", sourcesOf(data, at, count)],
      ["Is seen most by", targetsOf(data, at, count)],
    ]);
    const lines = both.map(([words, values]) =>
      element("p", {}, [`${words}: ${strongest(values, grid) || "none"}.`]),
    );
    return [title, ...lines];
  }

  /**
   * @param {Cell} cell
   * @param {import("./api.js").StateAnswer} state
   */
  changes(cell, state) {
    const toward = element("input", {
      type: "text",
      value: this.toward,
      placeholder: "She is very happy",
      "aria-label": "Steer toward this text",
    });
    const away = element("input", {
      type: "text",
      value: this.away,
      placeholder: "She is very sad",
      "aria-label": "Steer away from this text",
    });
    const strength = this.number("Strength", this.strength, { step: "0.5" });
    const replace = button(
      "Patch from text B",
      "Put the state of text B in the same column here, or at the same position",
      () => this.ask(cell, { kind: "replace" }),
    );
    replace.disabled = !this.page.textB() || cell.other === null;
    if (cell.other === null) replace.title = "Text B has no token in this column.";
    const steer = button("Steer", "Add the difference of two texts' last states", () => {
      [this.toward, this.away, this.strength] = [toward.value, away.value, strength.value];
      const texts = {
        toward: toward.value || toward.placeholder,
        away: away.value || away.placeholder,
      };
      this.ask(cell, { kind: "steer", ...texts, strength: Number(strength.value) || 0 });
    });
    return element("div", {}, [
      element("div", { class: "acts" }, [
        button("Ablate", "Put zeros in its place", () => this.ask(cell, { kind: "ablate" })),
        replace,
      ]),
      element("details", {}, [
        element("summary", {}, ["Steer along a direction"]),
        element("div", { class: "form" }, [
          field("Toward", toward),
          field("Away from", away),
          field("Strength", strength),
          steer,
        ]),
      ]),
      ...(Array.isArray(state.features) ? [this.ofFeature(cell)] : []),
    ]);
  }

  /**
   * @param {string} label
   * @param {string} value
   * @param {Record<string, string>} limits
   */
  number(label, value, limits) {
    return element("input", { type: "number", value, ...limits, "aria-label": label });
  }

  /**
   * What can be done with a feature of the dictionary that is chosen.
   * @param {Cell} cell
   */
  ofFeature(cell) {
    const feature = this.number("Feature", this.feature, { min: "0" });
    const strength = this.number("Strength of the feature", this.strength, { step: "0.5" });
    const act = (/** @type {string} */ kind) => () => {
      [this.feature, this.strength] = [feature.value, strength.value];
      const numbers = { feature: feature.valueAsNumber, strength: strength.valueAsNumber };
      this.ask(cell, { kind, ...numbers });
    };
    return element("details", { class: "feature" }, [
      element("summary", {}, ["Add or scale a feature"]),
      element("div", { class: "form" }, [
        field("Feature", feature),
        field("Strength", strength),
        element("div", { class: "acts" }, [
          button("Add", "Add its direction, this many times", act("add")),
          button("Scale", "Multiply what lies along it by this; 0 takes it out", act("scale")),
        ]),
      ]),
    ]);
  }

  /** @param {NonNullable<import("./api.js").StateAnswer["features"]>} answer */
  features(answer) {
    if (typeof answer === "string") return element("p", {}, [shownText(answer, 400)]);
    const items = answer.map(({ feature, activation, words }) => {
      const go = element(
        "button",
        { type: "button", class: "plain", title: "Add it, or scale it" },
        [String(feature)],
      );
      go.addEventListener("click", () => this.take(feature));
      return element("li", {}, [
        element("span", {}, [go]),
        element("bdi", {}, [words.map((word) => shownToken(word, 24)).join(" ")]),
        element("span", {}, [formatNumber(activation)]),
      ]);
    });
    return element("ul", { class: "words" }, items.length ? items : ["None acts here."]);
  }

  /**
   * Put a feature into the fields that change it.
   * @param {number} feature
   */
  take(feature) {
    const place = this.root.querySelector("details.feature");
    const [number, strength] = place?.querySelectorAll("input") ?? [];
    if (!place || !number || !strength) return;
    place.setAttribute("open", "");
    number.value = this.feature = String(feature);
    strength.focus();
  }

  /** @param {import("./api.js").StateAnswer} state */
  outcome(state) {
    if (!state.after) return predictions(state.before);
    return element("div", {}, [
      ...usedWords(state.used ?? {}),
      element("div", { class: "sides" }, [
        element("div", {}, [heading("As it is"), predictions(state.before)]),
        element("div", {}, [
          heading(CHANGED[state.change ?? ""] ?? "Changed"),
          predictions(state.after),
        ]),
      ]),
    ]);
  }

  /**
   * A way to let the model write on, as it is and with the change.
   * @param {Cell} cell
   * @param {Record<string, unknown> | null} change
   */
  writing(cell, change) {
    const place = element("div", { class: "written" });
    const act = async () => {
      place.replaceChildren(element("p", {}, ["Writing …"]));
      try {
        const result = await this.page.write(cell, change);
        place.replaceChildren(
          ...(result?.continuation ? written(result, change) : [element("p", {}, ["Cancelled."])]),
        );
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        place.replaceChildren(paragraph(error.message));
      }
    };
    const go = button(
      "Write on",
      "Let the model continue the text, as it is and with the change",
      () => void act(),
    );
    return element("div", {}, [element("div", { class: "acts" }, [go]), place]);
  }
}

/**
 * What the model wrote, before and after.
 * @param {ResultAnswer} result
 * @param {Record<string, unknown> | null} change
 */
function written(result, change) {
  const { before, after } = /** @type {NonNullable<ResultAnswer["continuation"]>} */ (
    result.continuation
  );
  const line = (/** @type {string} */ words, /** @type {string} */ text) => [
    heading(words),
    element("p", {}, [element("bdi", {}, [shownText(text, 1000) || "(nothing)"])]),
  ];
  return [
    ...line("It writes, as it is", before),
    ...(after === null
      ? []
      : line(`It writes, ${(CHANGED[String(change?.kind)] ?? "changed").toLowerCase()}`, after)),
    element("div", { class: "acts" }, [saveMenu(result, () => ({ view: "", measure: "" }))]),
  ];
}

/**
 * What a state was changed with: the state of text B, or the direction and its strength.
 * @param {import("./api.js").Used} used
 */
function usedWords(used) {
  if (used.feature !== undefined)
    return [
      element("p", { class: "used" }, [
        `${formatNumber(used.strength ?? 1)} × feature ${used.feature}`,
      ]),
    ];
  if (used.strength !== undefined) {
    return [
      element("p", { class: "used" }, [
        `${formatNumber(used.strength)} × (“`,
        element("bdi", {}, [shownText(used.toward ?? "", 80)]),
        "” − “",
        element("bdi", {}, [shownText(used.away ?? "", 80)]),
        "”)",
      ]),
    ];
  }
  if (used.token === undefined) return [];
  return [
    element("p", { class: "used" }, [
      "With the state of “",
      element("bdi", {}, [shownToken(used.string ?? "", 40)]),
      `”, token ${used.token} of text B`,
    ]),
  ];
}

/** @param {Cell} cell */
function nameOf(cell) {
  return `${cell.model}~${cell.site}~${cell.column}`;
}

/** @param {string} words */
function heading(words) {
  return element("h3", {}, [words]);
}

/**
 * @param {string} label
 * @param {HTMLElement} input
 */
function field(label, input) {
  return element("label", { class: "field" }, [element("span", {}, [label]), input]);
}

/** @param {import("./api.js").Prediction[] | string} answer */
function predictions(answer) {
  if (typeof answer === "string") return element("p", {}, [shownText(answer, 400)]);
  return element(
    "ol",
    { class: "words" },
    answer.slice(0, 6).map(({ word, probability }) => {
      const shown = probability >= 0.0005 ? probability.toFixed(3) : probability.toExponential(1);
      const item = element("li", {}, [
        element("bdi", {}, [shownToken(word, 24)]),
        element("span", {}, [shown]),
      ]);
      item.style.setProperty("--share", `${100 * probability}%`);
      return item;
    }),
  );
}

/**
 * The places of the largest values, in words.
 * @param {Float32Array} values
 * @param {import("../../views/static/payload.js").Grid} grid
 */
function strongest(values, grid) {
  const rest = values.slice();
  const places = [];
  for (let i = 0; i < MOST_LINKS; i++) {
    const at = largest(rest);
    if (at < 0) break;
    const site = grid.sites[Math.floor(at / grid.tokens.length)];
    places.push(`${site} at ${shownToken(grid.tokens[at % grid.tokens.length], 14)}`);
    rest[at] = NaN;
  }
  return places.join("; ");
}
