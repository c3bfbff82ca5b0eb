/**
 * The API, as the page uses it: lists, jobs that are followed until they are over, and results.
 *
 * @typedef {{name: string, dtype?: string}} ModelChoice
 * @typedef {{analysis: string, model?: ModelChoice, arguments: Record<string, unknown>}} Asked
 * @typedef {{what: string, done: number, total: number | null}} Progress
 * @typedef {{id: string, analysis: string, state: "queued" | "running" | "done" | "failed" | "cancelled", waiting: number,
 *   progress: Progress | null, partial: number, result: string | null, error: string | null, note: string}} Job
 * @typedef {{word: string, probability: number}} Prediction
 * @typedef {{site: string, token: number, string: string, id: number, names: Record<string, string>, norm: number,
 *   nearest: {site: string, token: number, cosine: number}[], lens: Prediction[] | string,
 *   before: Prediction[] | string, after?: Prediction[], change?: string}} StateAnswer
 * @typedef {{text: number, token: number | null, string: string, score: number}} NearestAnswer
 * @typedef {{id: string, analysis: string, model: ModelChoice | null, title: string, findings: string[],
 *   views: {name: string, title: string, kind: string}[], sections: {title: string, prose: string, views: number[]}[],
 *   python: string | null, command: string | null, command_reason: string, state: StateAnswer | null,
 *   nearest: NearestAnswer[]}} ResultAnswer
 * @typedef {{name: string, label: string, source: string, here: boolean}} ModelAnswer
 * @typedef {{name: string, label: string, texts: number, labels: Record<string, number>, sample: string[]}} DatasetAnswer
 * @typedef {{name: string, label: string, bytes: number, sites: string[], tokens: number, texts: number, model: string,
 *   dtype: string, width: number, complete: boolean}} StoreAnswer
 * @typedef {{number: number, text: string, cut: boolean, tokens: number}} StoreText
 * @typedef {{total: number, first: number, texts: StoreText[]}} StoreTexts
 * @typedef {{name: string, kind: string, required: boolean, default: string | number | boolean | null, choices: string[],
 *   help: string}} Question
 * @typedef {{word: string, question: string, group: string, parameters: Question[]}} AnalysisAnswer
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
    throw new Refused("The server does not answer. Start `hiddenscope serve` again, and reload this page.");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(String(said.detail ?? `The server answered with ${response.status}.`));
}

/**
 * @template T
 * @param {string} path
 * @returns {Promise<T>}
 */
export async function read(path) {
  return (await fetched(path)).json();
}

/** @param {string} path */
export async function readText(path) {
  return (await fetched(path)).text();
}

/**
 * @param {File} file
 * @returns {Promise<DatasetAnswer>}
 */
export async function upload(file) {
  return (await fetched(`/api/datasets?file=${encodeURIComponent(file.name)}`, { method: "POST", body: file })).json();
}

/**
 * Ask a question and follow its job: the result once it is done, or a Refused or Cancelled. `told` hears how it stands.
 * @param {Asked} asked
 * @param {(job: Job) => void} told
 * @param {AbortSignal} signal
 * @returns {Promise<ResultAnswer>}
 */
export async function ask(asked, told, signal) {
  const headers = { "Content-Type": "application/json" };
  /** @type {Job} */
  const first = await (await fetched("/api/jobs", { method: "POST", headers, body: JSON.stringify(asked) })).json();
  const job = first.state === "done" ? first : await followed(first, told, signal);
  if (job.state === "cancelled") throw new Cancelled();
  if (job.state === "failed") throw new Refused(job.error ?? "It failed.");
  told(job);
  return read(`/api/results/${job.result}`);
}

/**
 * @param {Job} first
 * @param {(job: Job) => void} told
 * @param {AbortSignal} signal
 * @returns {Promise<Job>}
 */
function followed(first, told, signal) {
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
    told(first);
    events.onmessage = (event) => {
      /** @type {Job} */
      const job = JSON.parse(event.data);
      if (job.state === "queued" || job.state === "running") return told(job);
      over();
      signal.removeEventListener("abort", cancel);
      done(job);
    };
    events.onerror = () => {
      over();
      failed(new Refused("The server went away. Start `hiddenscope serve` again, and reload this page."));
    };
  });
}
