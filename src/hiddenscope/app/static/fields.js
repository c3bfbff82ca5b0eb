/** Fields: a text that grows, a model by name or from a list. */

import { element } from "../../views/static/elements.js";

export const DTYPES = ["as it is", "float32", "bfloat16", "float16"];
let lists = 0;

/**
 * @param {string} label
 * @param {string} value
 * @param {(text: string) => void} act at every keystroke
 * @param {string} [size]
 */
export function textField(label, value, act, size = "") {
  const input = size ? element("input", { type: "text", value, spellcheck: "false" }) : element("textarea", { rows: "1", spellcheck: "false" }, [value]);
  input.addEventListener("input", () => act(input.value));
  const root = element("label", { class: `field ${size}` }, [element("span", {}, [label]), input]);
  return { root, input, set: (/** @type {string} */ text) => { if (input.value !== text) input.value = text; } };
}

/**
 * One of the dtypes in which a model can be loaded.
 * @param {string} label
 * @param {string} value
 * @param {(value: string) => void} act
 */
export function dtypeField(label, value, act) {
  const select = element("select", {}, DTYPES.map((name) => element("option", { value: name }, [name])));
  select.value = value;
  select.addEventListener("change", () => act(select.value));
  return { root: element("label", { class: "field small" }, [element("span", {}, [label]), select]), input: select };
}

/**
 * A model: from the list, or any Hugging Face id.
 * @param {string} label
 * @param {import("./api.js").ModelAnswer[]} models
 * @param {string} value
 * @param {(name: string) => void} act
 */
export function modelField(label, models, value, act) {
  const id = `models-${lists++}`;
  const names = new Map(models.map((model) => [model.source === "folder" ? model.label : model.name, model.name]));
  const shown = (/** @type {string} */ name) => [...names].find(([, known]) => known === name)?.[0] ?? name;
  const options = models.map((model) => element("option", { value: shown(model.name), label: `${model.label}${model.here ? "" : " (is downloaded first)"}` }));
  const input = element("input", { type: "text", list: id, value: shown(value), spellcheck: "false", autocomplete: "off" });
  input.addEventListener("change", () => act(names.get(input.value.trim()) ?? input.value.trim()));
  const root = element("label", { class: "field" }, [element("span", {}, [label]), input, element("datalist", { id }, options)]);
  return {
    root,
    input,
    get: () => names.get(input.value.trim()) ?? input.value.trim(),
    set: (/** @type {string} */ name) => { input.value = shown(name); },
  };
}
