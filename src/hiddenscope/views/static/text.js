/**
 * Strings as a reader can trust them: what cannot be seen is shown, what is long is cut, and
 * nothing is markup.
 */

const NAMED = /** @type {Record<string, string>} */ ({
  "\n": "⏎",
  "\t": "⇥",
  "\r": "␍",
  "\u007f": "␡",
});
const UNSEEN =
  /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u00a0\u115f\u1160\u3164\uffa0\u034f\u180b-\u180f]/gu;
const JOINED =
  /(?<=[\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f])\u200d(?=\p{Extended_Pictographic})/gu;
const HELD = "\u0001joiner\u0001";

/**
 * A token: spaces and line ends are marked.
 * @param {string | null} token
 * @param {number} [most] how many characters to show
 */
export function shownToken(token, most = 40) {
  if (token === null) return "";
  if (token === "") return "∅";
  return visible(shortened(token, most)).replaceAll(" ", "␣");
}

/**
 * A text: spaces are spaces, and the rest is marked.
 * @param {string} text
 * @param {number} [most]
 */
export function shownText(text, most = 300) {
  return visible(shortened(text, most));
}

/**
 * Every character that would act on its surroundings or cannot be seen, made visible.
 * @param {string} text
 */
export function visible(text) {
  const held = text.includes("\u200d")
    ? text.replaceAll("\u0001", "␁").replace(JOINED, HELD)
    : text;
  const readable = held
    .split(HELD)
    .map((part) => part.replace(UNSEEN, mark))
    .join("\u200d");
  return /^\p{M}/u.test(readable) ? `◌${readable}` : readable;
}

/** @param {string} character */
function mark(character) {
  const code = character.codePointAt(0) ?? 0;
  if (character in NAMED) return NAMED[character];
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/**
 * The first characters, and an ellipsis where there are more.
 * @param {string} text
 * @param {number} most
 */
export function shortened(text, most) {
  if (text.length <= most) return text;
  const cut = [...text.slice(0, 2 * most)];
  return cut.length <= most && text.length <= 2 * most
    ? text
    : `${cut.slice(0, most - 1).join("")}…`;
}

/**
 * Quoted for a read-out.
 * @param {string | null} token
 */
export function quoted(token) {
  return token === null ? "no token" : `“${shownToken(token, 120)}”`;
}

/**
 * A site for a narrow place: `layer.3` is 3, `encoder.layer.3.attn` is enc 3.attn.
 * @param {string} site
 */
export function shortSite(site) {
  return site.replace(/^(enc|dec)oder\./, "$1 ").replace("layer.", "");
}

/**
 * Where numbers stand along a log axis: each by how many doublings it is beyond the first.
 * @param {string[]} numbers
 */
export function octavesAlong(numbers) {
  return numbers.map((number) => Math.log2(Number(number) / Number(numbers[0])));
}

/**
 * Where names stand along an axis: layers of one stack at their depth, all else one after the
 * other.
 * @param {string[]} names
 * @param {boolean} areSites
 */
export function placesAlong(names, areSites) {
  const depths = names.map((name) => Number(/^layer\.(\d+)$/.exec(name)?.[1] ?? NaN));
  const last = names.length - 1;
  if (last > 0 && names[last] === "final") depths[last] = depths[last - 1] + 1;
  const known = areSites && depths.every((depth, i) => depth > (i ? depths[i - 1] : -1));
  return known ? depths.map((depth) => depth - depths[0]) : names.map((_, i) => i);
}

/**
 * A name for a file, from a title.
 * @param {string} title
 */
export function fileName(title) {
  const plain = title
    .slice(0, 200)
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-+|-+$/g, "");
  return plain.slice(0, 60) || "view";
}
