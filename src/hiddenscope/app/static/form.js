/** A form for any analysis, made from what the API says of its parameters. */

import { element } from "../../views/static/elements.js";
import { DTYPES, dtypeField, modelField } from "./fields.js";

/**
 * @typedef {import("./api.js").Question} Question
 * @typedef {{models: import("./api.js").ModelAnswer[], datasets: import("./api.js").DatasetAnswer[],
 *   unlabelled?: boolean}} Lists where `unlabelled` says that a dataset may be left out
 * @typedef {{root: HTMLElement, get: () => unknown, set: (value: any) => void}} Field
 */

const PROSE = /** @type {Record<string, string>} */ ({ texts: "one text on each line", sites: "layer.3, layer.*, final, *.attn", numbers: "-1,1,2, or ablate" });
const NAMES = /** @type {Record<string, string>} */ ({ a: "Text A", b: "Text B", k: "How many", data: "Dataset", contrasts: "Contrast", pool: "Pooling", new_tokens: "Tokens to write", other: "Second model" });
const CONTRAST = { clean: "Clean prompt", corrupt: "Corrupt prompt", answer: "Its answer, with the space", other: "The other answer" };
const DIRECTION = { toward: "Toward these texts", away: "Away from these texts" };
const POSITION = "position";
const ASIDE = new Set(["sites", "seed", "sample", "truncate", "targets", "probes", "window", "layers", "final_norm", "low_memory", "quality", "pool", "site", "target", "smallest"]);

/** A form whose values are the arguments of a request. */
export class Form {
  /**
   * @param {Question[]} questions
   * @param {Lists} lists
   */
  constructor(questions, lists) {
    this.fields = new Map(questions.map((question) => [question.name, fieldOf(question, lists)]));
    const [first, aside] = [questions.filter((one) => !ASIDE.has(one.name) || one.required), questions.filter((one) => ASIDE.has(one.name) && !one.required)];
    const roots = (/** @type {Question[]} */ some) => some.map((one) => /** @type {Field} */ (this.fields.get(one.name)).root);
    const more = aside.length ? [element("details", {}, [element("summary", {}, ["More options"]), element("div", {}, roots(aside))])] : [];
    this.go = element("button", { type: "submit", class: "main" }, ["Run"]);
    this.root = element("div", { class: "form" }, [...roots(first), this.go, ...more]);
  }

  /** @returns {Record<string, unknown>} those that were filled in */
  get() {
    return Object.fromEntries([...this.fields].map(([name, field]) => [name, field.get()]).filter(([, value]) => value !== undefined));
  }

  /**
   * Leave a field out of sight: the page asks for it elsewhere.
   * @param {string} name
   */
  hide(name) {
    const field = this.fields.get(name);
    if (field) field.root.hidden = true;
  }

  /**
   * What a field is called on the page.
   * @param {string} name
   */
  labelOf(name) {
    return labelOf(name);
  }

  /** @param {Record<string, unknown>} values */
  set(values) {
    for (const [name, value] of Object.entries(values)) this.fields.get(name)?.set(value);
  }
}

/**
 * @param {Question} question
 * @param {Lists} lists
 * @returns {Field}
 */
function fieldOf(question, lists) {
  const label = labelOf(question.name);
  if (question.kind === "model") return modelOf(label, lists);
  if (question.kind === "contrast") return group(label, CONTRAST, false);
  if (question.kind === "direction") return group(label, DIRECTION, true);
  if (question.kind === "flag") return flag(label, question);
  if (question.kind === "pooling") return pooling(label, question);
  if (question.kind === "choice" || question.kind === "data") return chosen(label, question, lists);
  const many = question.kind === "texts";
  const input = many || question.kind === "text" ? element("textarea", { rows: many ? "3" : "1", spellcheck: "false" }) : element("input", { type: question.kind === "integer" ? "number" : "text", spellcheck: "false" });
  const hint = question.default === null ? PROSE[question.kind] ?? "" : String(question.default);
  if (hint) input.setAttribute("placeholder", hint);
  return {
    root: labelled(label, input, question.help, many || question.kind === "text"),
    get: () => valueOf(question.kind, input.value),
    set: (value) => { input.value = Array.isArray(value) ? value.join(many ? "\n" : ",") : String(value); },
  };
}

/** @param {string} name of a parameter */
function labelOf(name) {
  const words = NAMES[name] ?? name.replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
}

/**
 * What was typed, as the request takes it; undefined for nothing.
 * @param {string} kind
 * @param {string} typed
 */
function valueOf(kind, typed) {
  if (!typed.trim()) return undefined;
  if (kind === "texts") return typed.split("\n").filter((line) => line.trim());
  if (kind === "integer") return Math.round(Number(typed));
  if (kind === "numbers") return typed.trim() === "ablate" ? "ablate" : typed.split(",").map(Number);
  return typed;
}

/**
 * @param {string} label
 * @param {HTMLElement} input
 * @param {string} help
 * @param {boolean} [wide]
 */
function labelled(label, input, help, wide = false) {
  return element("label", { class: wide ? "field wide" : "field" }, [element("span", {}, [label]), input, ...(help ? [element("small", {}, [help])] : [])]);
}

/**
 * @param {string} label
 * @param {Lists} lists
 * @returns {Field}
 */
function modelOf(label, lists) {
  const field = modelField(label, lists.models, "", () => undefined);
  const dtype = dtypeField("Dtype", DTYPES[0], () => undefined);
  const kind = () => (dtype.input.value === DTYPES[0] ? {} : { dtype: dtype.input.value });
  return {
    root: element("div", { class: "pair" }, [field.root, dtype.root]),
    get: () => (field.get() ? { name: field.get(), ...kind() } : undefined),
    set: (value) => { field.set(value.name); dtype.input.value = value.dtype ?? DTYPES[0]; },
  };
}

/**
 * @param {string} label
 * @param {Question} question
 * @param {Lists} lists
 * @returns {Field}
 */
function chosen(label, question, lists) {
  const options = question.kind === "data" ? lists.datasets.map((one) => [one.name, one.label]) : question.choices.map((word) => [word, word]);
  const optional = question.kind === "choice" || lists.unlabelled;
  const none = question.default === null && !question.required && optional ? [["", "none"]] : []; // or the first would be asked for
  const select = element("select", {}, [...none, ...options].map(([value, words]) => element("option", { value }, [words])));
  if (question.default !== null) select.value = String(question.default);
  return {
    root: labelled(label, select, question.help),
    get: () => (select.value && select.value !== question.default ? select.value : undefined),
    set: (value) => { select.value = String(value); },
  };
}

/**
 * What stands for a text: a word, or the position of one token, which is asked for beside it.
 * @param {string} label
 * @param {Question} question
 * @returns {Field}
 */
function pooling(label, question) {
  const options = [...(question.default === null ? [["", "as trained, or mean"]] : []), ...question.choices.map((word) => [word, word]), [POSITION, "a position"]];
  const select = element("select", {}, options.map(([value, words]) => element("option", { value }, [words])));
  select.value = String(question.default ?? "");
  const position = element("input", { type: "number", step: "1", value: "0" });
  const beside = labelled("Position", position, "0 is the first token, -1 the last");
  const arrange = () => { beside.hidden = select.value !== POSITION; position.required = !beside.hidden; };
  select.addEventListener("change", arrange);
  arrange();
  return {
    root: element("div", { class: "pair" }, [labelled(label, select, question.help), beside]),
    get: () => (select.value === POSITION ? Math.round(Number(position.value)) : select.value && select.value !== question.default ? select.value : undefined),
    set: (value) => {
      select.value = typeof value === "number" ? POSITION : String(value);
      if (typeof value === "number") position.value = String(value);
      arrange();
    },
  };
}

/**
 * @param {string} label
 * @param {Question} question
 * @returns {Field}
 */
function flag(label, question) {
  const input = element("input", { type: "checkbox" });
  input.checked = question.default === true;
  return {
    root: element("label", { class: "check" }, [input, label]),
    get: () => (input.checked === (question.default === true) ? undefined : input.checked),
    set: (value) => { input.checked = value === true; },
  };
}

/**
 * Several texts that belong together.
 * @param {string} title
 * @param {Record<string, string>} names
 * @param {boolean} many
 * @returns {Field}
 */
function group(title, names, many) {
  const inputs = Object.entries(names).map(([name, label]) => /** @type {const} */ ([name, label, element("textarea", { rows: many ? "2" : "1", spellcheck: "false", ...(many ? { placeholder: PROSE.texts } : {}) })]));
  const filled = () => inputs.map(([name, , input]) => [name, valueOf(many ? "texts" : "text", input.value)]).filter(([, value]) => value !== undefined);
  return {
    root: element("fieldset", {}, [element("legend", {}, [title]), ...inputs.map(([, label, input]) => labelled(label, input, ""))]),
    get: () => (filled().length === inputs.length ? Object.fromEntries(filled()) : undefined), // in part it is no question
    set: (value) => { for (const [name, , input] of inputs) input.value = [value[name] ?? ""].flat().join("\n"); },
  };
}
