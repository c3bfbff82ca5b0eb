/**
 * The text itself, with what a token reads and which tokens read it as numbers above the tokens.
 */

import { element } from "./elements.js";
import { mostOf } from "./patternsdata.js";
import { shortWeight, weightWords } from "./patternswords.js";
import { shownText, shownToken } from "./text.js";

/**
 * @typedef {{reads: Float32Array | null, readers: Float32Array | null}} Above numbers for each
 *   token of the text
 */

export class TokenText {
  /**
   * @param {string} name
   * @param {string[]} tokens
   * @param {(place: number, keep: boolean) => void} act a token is pointed at, or chosen to stay
   */
  constructor(name, tokens, act) {
    this.tokens = tokens.map((token) => shownToken(token, 24));
    this.places = this.tokens.map((token, place) => this.option(token, place, act));
    this.root = element(
      "div",
      { class: "tokentext", role: "listbox", "aria-label": shownText(name, 80) },
      this.places.map(({ root }) => root),
    );
    this.root.addEventListener("keydown", (event) => this.step(event, act));
  }

  /**
   * @param {string} token
   * @param {number} place
   * @param {(place: number, keep: boolean) => void} act
   */
  option(token, place, act) {
    const [reads, readers] = [
      element("i", { class: "reads", "aria-hidden": "true" }),
      element("i", { class: "readers", "aria-hidden": "true" }),
    ];
    const root = element(
      "span",
      {
        role: "option",
        class: "readtoken",
        tabindex: place ? "-1" : "0",
        "aria-selected": "false",
      },
      [reads, readers, element("bdi", {}, [token])],
    );
    root.addEventListener("pointerenter", (event) => {
      if (event.pointerType !== "touch") act(place, false);
    });
    root.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") act(-1, false);
    });
    root.addEventListener("click", () => act(place, true));
    root.addEventListener("focus", () => {
      if (root.matches(":focus-visible")) act(place, true);
    });
    return { root, reads, readers };
  }

  /**
   * @param {KeyboardEvent} event
   * @param {(place: number, keep: boolean) => void} act
   */
  step(event, act) {
    const now = this.places.findIndex(({ root }) => root === document.activeElement);
    const last = this.places.length - 1;
    const to = {
      ArrowRight: now + 1,
      ArrowDown: now + 1,
      ArrowLeft: now - 1,
      ArrowUp: now - 1,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const place = Math.min(last, Math.max(0, to));
    this.places[place].root.focus();
    act(place, true);
  }

  /**
   * Scroll a long text, and nothing around it, until a token is in sight.
   * @param {HTMLElement} token
   */
  reveal(token) {
    const [top, room] = [token.offsetTop - this.root.offsetTop, this.root.clientHeight];
    if (top < this.root.scrollTop || top + token.offsetHeight > this.root.scrollTop + room)
      this.root.scrollTop = top - room / 2;
  }

  /**
   * @param {Above} above
   * @param {number} selected -1 for none
   */
  show({ reads, readers }, selected) {
    const [mostRead, mostReaders] = [reads ? mostOf(reads) : 0, readers ? mostOf(readers) : 0];
    const focus = Math.max(0, selected);
    if (selected >= 0 && !this.root.matches(":hover")) this.reveal(this.places[selected].root);
    this.places.forEach((token, place) => {
      fillNumber(token.reads, reads ? reads[place] : 0, mostRead);
      fillNumber(token.readers, readers ? readers[place] : 0, mostReaders);
      token.root.setAttribute("aria-selected", String(place === selected));
      token.root.setAttribute("tabindex", place === focus ? "0" : "-1");
      const words = [
        reads ? `is read ${weightWords(reads[place])}` : "",
        readers ? `reads it ${weightWords(readers[place])}` : "",
      ].filter(Boolean);
      token.root.setAttribute("aria-description", `token ${place}: ${words.join(", ")}`);
    });
  }
}

/**
 * @param {HTMLElement} place
 * @param {number} value
 * @param {number} most
 */
function fillNumber(place, value, most) {
  const text = Number.isNaN(value) ? "" : shortWeight(value);
  if (place.textContent !== text) place.textContent = text;
  place.style.setProperty(
    "--share",
    `${most > 0 && value > 0 ? Math.round((100 * value) / most) : 0}%`,
  );
}
