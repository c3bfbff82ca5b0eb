/**
 * Asking from the page: one question at a time in each place, its progress in the page's head, with
 * a way to cancel it.
 */

import { button, element } from "../../views/static/elements.js";
import { ask, Cancelled } from "./api.js";

const PATIENCE = 350; // milliseconds until progress is shown

/** What runs now, and where the reader sees it. */
export class Asker {
  /** @param {HTMLElement} status */
  constructor(status) {
    this.status = status;
    /** @type {Map<string, AbortController>} */
    this.running = new Map();
  }

  /**
   * Ask in a place of the page; what is still asked there is cancelled. Undefined where another
   * question took its place.
   * @param {string} place
   * @param {import("./api.js").Asked} question
   * @param {(job: import("./api.js").Job) => void} [report]
   * @returns {Promise<import("./api.js").ResultAnswer | undefined>}
   */
  async ask(place, question, report) {
    this.cancel(place);
    if (this.status.dataset.kept === "passing") this.clear();
    const control = new AbortController();
    this.running.set(place, control);
    /** @type {import("./api.js").Job | null} */
    let last = null;
    let patient = true;
    const waiting = setTimeout(() => {
      patient = false;
      if (last) this.show(last, control);
    }, PATIENCE);
    try {
      return await ask(
        question,
        (job) => {
          last = job;
          if (!patient) this.show(job, control);
          report?.(job);
          if (job.note) this.say(job.note);
        },
        control.signal,
      );
    } catch (error) {
      if (error instanceof Cancelled) return undefined;
      throw error;
    } finally {
      clearTimeout(waiting);
      if (this.running.get(place) === control) this.running.delete(place);
      if (!this.running.size && !this.status.dataset.kept) this.status.replaceChildren();
    }
  }

  /** @param {string} place */
  cancel(place) {
    this.running.get(place)?.abort();
    this.running.delete(place);
  }

  /**
   * @param {string} sentence
   * @param {boolean} [passing] whether the next question makes it out of date
   */
  say(sentence, passing = false) {
    this.status.dataset.kept = passing ? "passing" : "true";
    this.status.replaceChildren(sentence);
  }

  clear() {
    delete this.status.dataset.kept;
    this.status.replaceChildren();
  }

  /**
   * @param {import("./api.js").Job} job
   * @param {AbortController} control
   */
  show(job, control) {
    if (job.state !== "queued" && job.state !== "running") return;
    delete this.status.dataset.kept;
    const words =
      job.state === "queued"
        ? `${job.analysis}: ${job.waiting} before it`
        : `${job.analysis}: ${job.progress?.what ?? "working"}`;
    let shown = this.status.querySelector("span");
    if (!shown) {
      shown = element("span");
      this.status.replaceChildren(
        shown,
        element("progress", { "aria-label": "Progress", max: "1" }),
        button("Cancel", "Stop this question", () => undefined),
      );
    }
    shown.textContent = words.slice(0, 80);
    const bar = this.status.querySelector("progress");
    const { done, total } = job.progress ?? { done: 0, total: null };
    if (total) bar?.setAttribute("value", String(Math.min(1, done / total)));
    else bar?.removeAttribute("value");
    const stop = this.status.querySelector("button");
    if (stop)
      stop.onclick = () => {
        control.abort();
        this.say("Cancelled.", true);
      };
  }
}
