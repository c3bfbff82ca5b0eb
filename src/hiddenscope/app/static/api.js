/**
 * The API, as the page uses it: lists, jobs that are followed until they are over, and results.
 *
 * @typedef {{name: string, dtype?: string}} ModelChoice
 * @typedef {{analysis: string, model?: ModelChoice, store?: string, arguments: Record<string,
 *   unknown>}} Asked
 * @typedef {{what: string, done: number, total: number | null}} Progress
 * @typedef {{id: string, analysis: string, state: "queued" | "running" | "done" | "failed" |
 *   "cancelled", waiting: number, progress: Progress | null, partial: number, result: string |
 *   null, error: string | null, note: string}} Job
 * @typedef {{word: string, probability: number}} Prediction
 * @typedef {{site: string, token: number, string: string, id: number, names: Record<string,
 *   string>, norm: number, nearest: {site: string, token: number, string?: string, cosine:
 *   number}[], lens: Prediction[] | string, model?: string, before: Prediction[] | string, after?:
 *   Prediction[], change?: string, used?: Used, features?: string | {feature: number, activation:
 *   number, words: string[]}[]}} StateAnswer
 * @typedef {{token?: number, string?: string, toward?: string, away?: string, strength?: number,
 *   feature?: number}} Used what a state was changed with
 * @typedef {{text: number, token: number | null, string: string, score: number}} NearestAnswer
 * @typedef {{id: string, analysis: string, model: ModelChoice | null, title: string, findings:
 *   string[], views: {name: string, title: string, kind: string}[], sections: {title: string,
 *   prose: string, views: number[]}[], python: string | null, command: string | null,
 *   command_reason: string, state: StateAnswer | null, continuation: {before: string, after: string
 *   | null} | null, answers: {answer: string, other: string} | null, columns: (number | null)[],
 *   other_columns: (number | null)[], nearest: NearestAnswer[]}} ResultAnswer
 * @typedef {{name: string, label: string, source: string, here: boolean,
 *   headless: boolean}} ModelAnswer
 * @typedef {{name: string, label: string, texts: number, labels: Record<string, number>, groups:
 *   number | null, sample: string[], columns: ColumnChoice | null}} DatasetAnswer
 * @typedef {{name: string, label: string}} DictionaryAnswer
 * @typedef {{text: string | null, label: string | null, group: string | null}} ColumnChoice
 * @typedef {{file: string, columns: string[], rows: string[][], likely: ColumnChoice, certain:
 *   boolean, parameters: Question[]}} TableAnswer
 * @typedef {{name: string, label: string, bytes: number, sites: string[], tokens: number, texts:
 *   number, model: string, dtype: string, width: number, complete: boolean}} StoreAnswer
 * @typedef {{number: number, text: string, cut: boolean, tokens: number}} StoreText
 * @typedef {{total: number, first: number, texts: StoreText[]}} StoreTexts
 * @typedef {{name: string, kind: string, required: boolean, default: string | number | boolean |
 *   null, choices: string[], empty_choice: string, help: string, label: string, aside: boolean,
 *   fields: Question[], of_states: boolean}} Question
 * @typedef {{word: string, question: string, group: string, on_states: boolean, action: string,
 *   promise: string, parameters: Question[]}} AnalysisAnswer
 */

/** What went wrong, in a sentence for the reader. */
export class Refused extends Error {}

/** The job was cancelled, by the reader or because another took its place. */
export class Cancelled extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 */
async function fetched(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Refused(
      "The server does not answer. Start `hiddenscope serve` again, and reload this page.",
    );
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Refused(String(answer.detail ?? `The server answered with ${response.status}.`));
}

/**
 * @template T
 * @param {string} path
 * @returns {Promise<T>}
 */
export async function read(path) {
  return (await fetched(path)).json();
}

/**
 * Read the models anew into the list that the page has: a folder may have been made since.
 * @param {ModelAnswer[]} models
 */
export async function refreshModels(models) {
  /** @type {ModelAnswer[]} */
  const fresh = await read("/api/models");
  models.splice(0, models.length, ...fresh);
}

/**
 * The same of the dictionaries: one may have been trained since.
 * @param {DictionaryAnswer[]} dictionaries
 */
export async function refreshDictionaries(dictionaries) {
  /** @type {DictionaryAnswer[]} */
  const fresh = await read("/api/dictionaries");
  dictionaries.splice(0, dictionaries.length, ...fresh);
}

/** @param {string} path */
export async function readText(path) {
  return (await fetched(path)).text();
}

/**
 * The columns and first rows of a table; a file of lines has none.
 * @param {File} file
 * @returns {Promise<TableAnswer>}
 */
export async function readTable(file) {
  return (
    await fetched(`/api/tables?file=${encodeURIComponent(file.name)}`, {
      method: "POST",
      body: file,
    })
  ).json();
}

/**
 * @param {File} file
 * @param {Record<string, string>} columns which hold the texts, the labels and the groups
 * @returns {Promise<DatasetAnswer>}
 */
export async function upload(file, columns) {
  const query = new URLSearchParams({ file: file.name, ...columns });
  return (await fetched(`/api/datasets?${query}`, { method: "POST", body: file })).json();
}

/**
 * Ask a question and follow its job: the result once it is done, or a Refused or Cancelled.
 * `report` hears how it stands.
 * @param {Asked} question
 * @param {(job: Job) => void} report
 * @param {AbortSignal} signal
 * @returns {Promise<ResultAnswer>}
 */
export async function ask(question, report, signal) {
  const headers = { "Content-Type": "application/json" };
  /** @type {Job} */
  const first = await (
    await fetched("/api/jobs", { method: "POST", headers, body: JSON.stringify(question) })
  ).json();
  const job = first.state === "done" ? first : await followed(first, report, signal);
  if (job.state === "cancelled") throw new Cancelled();
  if (job.state === "failed") throw new Refused(job.error ?? "It failed.");
  report(job);
  return read(`/api/results/${job.result}`);
}

/**
 * @param {Job} first
 * @param {(job: Job) => void} report
 * @param {AbortSignal} signal
 * @returns {Promise<Job>}
 */
function followed(first, report, signal) {
  return new Promise((done, failed) => {
    const events = new EventSource(`/api/jobs/${first.id}/events`);
    const over = () => events.close();
    const cancel = () => {
      over();
      fetched(`/api/jobs/${first.id}`, { method: "DELETE" }).catch(() => undefined);
      failed(new Cancelled());
    };
    if (signal.aborted) return cancel();
    signal.addEventListener("abort", cancel, { once: true });
    report(first);
    events.onmessage = (event) => {
      /** @type {Job} */
      const job = JSON.parse(event.data);
      if (job.state === "queued" || job.state === "running") return report(job);
      over();
      signal.removeEventListener("abort", cancel);
      done(job);
    };
    events.onerror = () => {
      over();
      failed(
        new Refused("The server went away. Start `hiddenscope serve` again, and reload this page."),
      );
    };
  });
}
