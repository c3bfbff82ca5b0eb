/** A form for any analysis, made from what the API says of its parameters. */

import { element } from "../../views/static/elements.js";
import { DTYPES, dtypeField, modelField } from "./fields.js";

/**
 * @typedef {import("./api.js").Question} Question
 * @typedef {{models: import("./api.js").ModelAnswer[], datasets:
 *   import("./api.js").DatasetAnswer[], dictionaries?: import("./api.js").DictionaryAnswer[],
 *   unlabelled?: boolean}} Lists where `unlabelled` says that a dataset may be left out
 * @typedef {{root: HTMLElement, get: () => unknown, set: (value: any) => void}} Field
 */

// What a field shows while it is empty and has no default.
const EXAMPLES = /** @type {Record<string, string>} */ ({
  texts: "one text on each line; blank lines are left out",
  sites: "layer.3, layer.*, final, *.attn",
  numbers: "-1,1,2, or ablate",
});
const POSITION = "position";

/** A form whose values are the arguments of a request. */
export class Form {
  /**
   * @param {Question[]} questions
   * @param {Lists} lists
   */
  constructor(questions, lists) {
    this.fields = new Map(questions.map((question) => [question.name, fieldOf(question, lists)]));
    this.labels = new Map(questions.map(({ name, label }) => [name, label]));
    const rootsOf = (/** @type {Question[]} */ some) =>
      some.map(({ name }) => /** @type {Field} */ (this.fields.get(name)).root);
    const first = rootsOf(questions.filter(({ aside }) => !aside));
    const aside = rootsOf(questions.filter((question) => question.aside));
    const more = element("details", {}, [
      element("summary", {}, ["More options"]),
      element("div", {}, aside),
    ]);
    this.go = element("button", { type: "submit", class: "main" }, ["Run"]);
    this.root = element("div", { class: "form" }, [
      ...first,
      this.go,
      ...(aside.length ? [more] : []),
    ]);
  }

  /** @returns {Record<string, unknown>} those that were filled in */
  get() {
    return Object.fromEntries(
      [...this.fields]
        .map(([name, field]) => [name, field.get()])
        .filter(([, value]) => value !== undefined),
    );
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
    return this.labels.get(name) ?? name;
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
  if (question.fields.length) return group(question, lists);
  const make = FIELDS[question.kind] ?? typed;
  return make(question, lists);
}

/** @type {Record<string, (question: Question, lists: Lists) => Field>} */
const FIELDS = {
  model: modelOf,
  flag,
  pooling,
  choice: selection,
  data: selection,
  dictionary: selection,
};

/**
 * A field in which something is typed: lines where there may be many, and else a line.
 * @param {Question} question
 * @returns {Field}
 */
function typed({ kind, label, help, default: value }) {
  const many = kind === "texts" || kind === "pairs";
  const wide = many || kind === "text";
  const rows = many ? "3" : "1";
  const type = kind === "integer" ? "number" : "text";
  const input = wide
    ? element("textarea", { rows, spellcheck: "false" })
    : element("input", { type, spellcheck: "false" });
  const named = help.match(/such as ([\w.*]*\w)/)?.[1];
  const example = value === null ? (named ?? EXAMPLES[kind] ?? "") : String(value);
  if (example) input.setAttribute("placeholder", example);
  return {
    root: labelled(label, input, help, wide),
    get: () => valueOf(kind, input.value),
    set: (values) => {
      const separator = many ? "\n" : ",";
      input.value = Array.isArray(values) ? values.join(separator) : String(values);
    },
  };
}

/**
 * What was typed, as the request takes it; undefined for nothing.
 * @param {string} kind
 * @param {string} typed
 */
function valueOf(kind, typed) {
  if (!typed.trim()) return undefined;
  if (kind === "texts" || kind === "pairs") return typed.split("\n").filter((line) => line.trim());
  if (kind === "integer") return Math.round(Number(typed));
  if (kind === "numbers")
    return typed.trim() === "ablate" ? "ablate" : typed.split(",").map(Number);
  return typed;
}

/**
 * @param {string} label
 * @param {HTMLElement} input
 * @param {string} help
 * @param {boolean} [wide]
 */
function labelled(label, input, help, wide = false) {
  return element("label", { class: wide ? "field wide" : "field" }, [
    element("span", {}, [label]),
    input,
    ...(help ? [element("small", {}, [help])] : []),
  ]);
}

/**
 * @param {Question} question
 * @param {Lists} lists
 * @returns {Field}
 */
function modelOf({ label }, lists) {
  const field = modelField(label, lists.models, "", () => undefined);
  const dtype = dtypeField("Dtype", DTYPES[0], () => undefined);
  const kind = () => (dtype.input.value === DTYPES[0] ? {} : { dtype: dtype.input.value });
  return {
    root: element("div", { class: "pair" }, [field.root, dtype.root]),
    get: () => (field.get() ? { name: field.get(), ...kind() } : undefined),
    set: (value) => {
      field.set(value.name);
      dtype.input.value = value.dtype ?? DTYPES[0];
    },
  };
}

/**
 * @param {Question} question
 * @param {Lists} lists
 * @returns {Field}
 */
function selection(question, lists) {
  const listed = { data: lists.datasets, dictionary: lists.dictionaries ?? [] };
  const named = listed[/** @type {keyof typeof listed} */ (question.kind)] ?? [];
  const options = [
    ...named.map(({ name, label }) => [name, label]),
    ...question.choices.map((word) => [word, word]),
  ];
  const none =
    question.default === null && !question.required && (question.empty_choice || lists.unlabelled)
      ? [["", question.empty_choice || "none"]]
      : []; // or the first would be asked for
  const select = element(
    "select",
    {},
    [...none, ...options].map(([value, words]) => element("option", { value }, [words])),
  );
  if (question.default !== null) select.value = String(question.default);
  return {
    root: labelled(question.label, select, question.help),
    get: () => (select.value && select.value !== question.default ? select.value : undefined),
    set: (value) => {
      select.value = String(value);
    },
  };
}

/**
 * What stands for a text: a word, or the position of one token, which is asked for beside it.
 * @param {Question} question
 * @returns {Field}
 */
function pooling(question) {
  const options = [
    ...(question.default === null ? [["", question.empty_choice]] : []),
    ...question.choices.map((word) => [word, word]),
    [POSITION, "a position"],
  ];
  const select = element(
    "select",
    {},
    options.map(([value, words]) => element("option", { value }, [words])),
  );
  select.value = String(question.default ?? "");
  const position = element("input", { type: "number", step: "1", value: "0" });
  const beside = labelled("Position", position, "0 is the first token, -1 the last");
  const arrange = () => {
    beside.hidden = select.value !== POSITION;
    position.required = !beside.hidden;
  };
  select.addEventListener("change", arrange);
  arrange();
  return {
    root: element("div", { class: "pair" }, [
      labelled(question.label, select, question.help),
      beside,
    ]),
    get: () => {
      if (select.value === POSITION) return Math.round(Number(position.value));
      return select.value === question.default ? undefined : select.value || undefined;
    },
    set: (value) => {
      select.value = typeof value === "number" ? POSITION : String(value);
      if (typeof value === "number") position.value = String(value);
      arrange();
    },
  };
}

/**
 * @param {Question} question
 * @returns {Field}
 */
function flag(question) {
  const input = element("input", { type: "checkbox" });
  input.checked = question.default === true;
  return {
    root: element("label", { class: "check" }, [input, question.label]),
    get: () => (input.checked === (question.default === true) ? undefined : input.checked),
    set: (value) => {
      input.checked = value === true;
    },
  };
}

/**
 * Several fields that belong together; without all that are required they are no question.
 * @param {Question} question
 * @param {Lists} lists
 * @returns {Field}
 */
function group(question, lists) {
  const parts = question.fields.map((part) => /** @type {const} */ ([part, fieldOf(part, lists)]));
  const lacking = () => parts.some(([part, field]) => part.required && field.get() === undefined);
  const filled = () =>
    parts
      .map(([part, field]) => [part.name, field.get()])
      .filter(([, value]) => value !== undefined);
  return {
    root: element("fieldset", {}, [
      element("legend", {}, [question.label]),
      ...parts.map(([, field]) => field.root),
    ]),
    get: () => (lacking() || !filled().length ? undefined : Object.fromEntries(filled())),
    set: (value) => {
      for (const [part, field] of parts) field.set(value[part.name] ?? part.default ?? "");
    },
  };
}
