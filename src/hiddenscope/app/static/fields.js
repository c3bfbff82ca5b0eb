/** Fields: a text that grows, a model by name or from a list. */

import { element } from "../../views/static/elements.js";
import { refreshModels } from "./api.js";

/** @typedef {import("./api.js").ModelAnswer} ModelAnswer */

export const DTYPES = ["as it is", "float32", "bfloat16", "float16"];
let lists = 0;

/**
 * @param {string} label
 * @param {string} value
 * @param {(text: string) => void} act at every keystroke
 * @param {string} [size]
 */
export function textField(label, value, act, size = "") {
  const input = size
    ? element("input", { type: "text", value, spellcheck: "false" })
    : element("textarea", { rows: "1", spellcheck: "false" }, [value]);
  input.addEventListener("input", () => act(input.value));
  const root = element("label", { class: `field ${size}` }, [element("span", {}, [label]), input]);
  return {
    root,
    input,
    set: (/** @type {string} */ text) => {
      if (input.value !== text) input.value = text;
    },
  };
}

/**
 * One of the dtypes in which a model can be loaded.
 * @param {string} label
 * @param {string} value
 * @param {(value: string) => void} act
 */
export function dtypeField(label, value, act) {
  const offered = DTYPES.map((name) => ({ name, label: name }));
  return selectField(label, offered, value, act);
}

/**
 * One of a list.
 * @param {string} label
 * @param {{name: string, label: string}[]} offered
 * @param {string} value
 * @param {(value: string) => void} act
 */
export function selectField(label, offered, value, act) {
  const select = element(
    "select",
    {},
    offered.map((item) => element("option", { value: item.name }, [item.label])),
  );
  select.value = value;
  select.addEventListener("change", () => act(select.value));
  return {
    root: element("label", { class: "field small" }, [element("span", {}, [label]), select]),
    input: select,
  };
}

/**
 * A model: from the list, or any Hugging Face id.
 * @param {string} label
 * @param {ModelAnswer[]} models
 * @param {string} value
 * @param {(name: string) => void} act
 */
export function modelField(label, models, value, act) {
  const id = `models-${lists++}`;
  const wordOf = (/** @type {ModelAnswer} */ { source, label: shownAs, name }) =>
    source === "folder" ? shownAs : name;
  const shown = (/** @type {string} */ name) => {
    const known = models.find((model) => model.name === name);
    return known ? wordOf(known) : name;
  };
  const selected = () => models.find((model) => wordOf(model) === input.value.trim());
  const get = () => selected()?.name ?? input.value.trim();
  const offered = element("datalist", { id });
  const offer = () =>
    offered.replaceChildren(
      ...models.map((model) => {
        const words = `${model.label}${model.here ? "" : " (is downloaded first)"}`;
        return element("option", { value: wordOf(model), label: words });
      }),
    );
  // Without an answer, what was offered before is still offered.
  const refresh = () => refreshModels(models).then(offer, () => undefined);
  const input = element("input", {
    type: "text",
    list: id,
    value: shown(value),
    spellcheck: "false",
    autocomplete: "off",
  });
  offer();
  input.addEventListener("focus", () => void refresh());
  input.addEventListener("change", async () => {
    if (!selected()) await refresh();
    act(get());
  });
  const root = element("label", { class: "field" }, [element("span", {}, [label]), input, offered]);
  return {
    root,
    input,
    get,
    set: (/** @type {string} */ name) => {
      input.value = shown(name);
    },
  };
}
