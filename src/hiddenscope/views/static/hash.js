/**
 * Deep links: what each view shows is kept after the `#` of the page's address, and read back from
 * there.
 */

/**
 * @param {number} place which view of the page
 * @returns {Record<string, string>}
 */
export function readState(place) {
  /** @type {Record<string, string>} */
  const state = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const [owner, field] = name.split(".");
    if (owner === String(place) && field) state[field] = value;
  }
  return state;
}

/**
 * Fields that are empty are left out.
 * @param {number} place
 * @param {Record<string, string>} state
 */
export function writeState(place, state) {
  const all = new URLSearchParams(location.hash.slice(1));
  for (const name of [...all.keys()]) if (name.startsWith(`${place}.`)) all.delete(name);
  for (const [field, value] of Object.entries(state))
    if (value) all.set(`${place}.${field}`, value);
  keep(all);
}

/** @param {URLSearchParams} all */
function keep(all) {
  // A link of the contents, which has done its work.
  for (const [name, value] of [...all]) if (!value) all.delete(name);
  const hash = `#${all}`;
  if (hash === location.hash || (hash === "#" && !location.hash)) return;
  try {
    history.replaceState(null, "", hash);
  } catch {
    // A frame in a notebook has no address to keep it in.
  }
}

/**
 * Something of the page as a whole: "" where there is nothing.
 * @param {string} name
 */
export function readPage(name) {
  return new URLSearchParams(location.hash.slice(1)).get(name) ?? "";
}

/**
 * @param {string} name
 * @param {string} value
 */
export function writePage(name, value) {
  const all = new URLSearchParams(location.hash.slice(1));
  if (value) all.set(name, value);
  else all.delete(name);
  keep(all);
}

/** What is written next is a new entry of the history: Back returns to what is shown now. */
export function newEntry() {
  history.pushState(null, "", location.href);
}

/**
 * Forget what the views show: others come in their places.
 * @param {string[]} [fields] fields that stay
 */
export function forgetViews(fields = []) {
  const all = new URLSearchParams(location.hash.slice(1));
  for (const name of [...all.keys()]) {
    const [owner, field] = name.split(".");
    if (field && /^\d+$/.test(owner) && !fields.includes(field)) all.delete(name);
  }
  keep(all);
}

/** @param {() => void} act */
export function whenLinked(act) {
  addEventListener("hashchange", act);
}
