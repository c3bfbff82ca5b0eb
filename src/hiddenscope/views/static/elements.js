/** Pieces of the page, made without markup: text is only ever text. */

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string>} [attributes]
 * @param {(Node | string)[]} [children]
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, attributes = {}, children = []) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/**
 * @param {string} label
 * @param {string} hint
 * @param {() => void} act
 */
export function button(label, hint, act) {
  const node = element("button", { type: "button", title: hint }, [label]);
  node.addEventListener("click", act);
  return node;
}

let groups = 0;

/**
 * One of a few: radio buttons that look like one switch.
 * @param {string} name what is chosen
 * @param {Record<string, string>} options value to label
 * @param {(value: string) => void} act
 * @returns {{root: HTMLElement, set: (value: string) => void}}
 */
export function choice(name, options, act) {
  const group = `choice-${groups++}`;
  const root = element("fieldset", { class: "choice" }, [element("legend", {}, [name])]);
  /** @type {Map<string, HTMLInputElement>} */
  const inputs = new Map();
  for (const [value, label] of Object.entries(options)) {
    const input = element("input", { type: "radio", name: group, value });
    input.addEventListener("change", () => act(value));
    inputs.set(value, input);
    root.append(element("label", {}, [input, element("span", {}, [label])]));
  }
  return {
    root,
    set: (value) => {
      const input = inputs.get(value);
      if (input) input.checked = true;
    },
  };
}

/**
 * One of many: a list that opens.
 * @param {string} name
 * @param {string[]} options
 * @param {(place: number) => void} act
 * @returns {{root: HTMLElement, set: (place: number) => void}}
 */
export function list(name, options, act) {
  const select = element(
    "select",
    {},
    options.map((label, i) => element("option", { value: String(i) }, [label])),
  );
  select.addEventListener("change", () => act(select.selectedIndex));
  const root = element("label", { class: "list" }, [element("span", {}, [name]), select]);
  return {
    root,
    set: (place) => {
      select.selectedIndex = place;
    },
  };
}

/**
 * A key of a legend that can be pressed, with a swatch of its colour.
 * @param {string} label
 * @param {() => void} act
 * @returns {{root: HTMLButtonElement, swatch: HTMLElement}}
 */
export function key(label, act) {
  const swatch = element("i", { class: "swatch", "aria-hidden": "true" });
  const root = element("button", { type: "button", class: "key", "aria-pressed": "false" }, [
    swatch,
    label,
  ]);
  root.addEventListener("click", act);
  return { root, swatch };
}

/**
 * Put these in the place of what was there.
 * @param {Element} parent
 * @param {(Node | string)[]} children
 */
export function fill(parent, children) {
  parent.replaceChildren(...children);
}
