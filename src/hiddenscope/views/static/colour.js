/**
 * Colours. Lightness runs evenly along each map, so order is seen with any eyes; the diverging maps
 * go from blue to orange. The first colour of a map is near the page's own, light or dark, so much
 * stands out and little recedes.
 */

/** @type {Record<"sequential" | "diverging", Record<"light" | "dark", string[]>>} */
const ANCHORS = {
  sequential: {
    light: [
      "#faf7e1",
      "#cce3bc",
      "#89d1b1",
      "#51b8ac",
      "#049daa",
      "#037ea0",
      "#005f97",
      "#133f87",
      "#1f206d",
    ],
    dark: [
      "#191d2f",
      "#243159",
      "#284886",
      "#136a98",
      "#148ba1",
      "#23aca6",
      "#5cca9f",
      "#abe18d",
      "#f8f085",
    ],
  },
  diverging: {
    light: [
      "#004b97",
      "#3274c4",
      "#74a0d8",
      "#b3cbea",
      "#f7f6f1",
      "#e6bfae",
      "#cf8a6b",
      "#b55320",
      "#803100",
    ],
    dark: [
      "#77c7fe",
      "#459cd4",
      "#3c7194",
      "#30495a",
      "#232321",
      "#56402e",
      "#8d6039",
      "#c78142",
      "#f8aa66",
    ],
  },
};

/** @type {Record<"light" | "dark", string[]>} */
const CLASSES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#3ba3dd", "#7a6a00", "#333b4d"],
  dark: ["#4ba3dc", "#f08343", "#2fc49a", "#d98cbf", "#e8b13d", "#8fd0f5", "#d6ca5a", "#e3e8f2"],
};

/** @type {Record<"light" | "dark", string[]>} */
const NO_CLASS = { light: ["#8a919c"], dark: ["#737b87"] };

/** @type {Map<string, Uint8Array>} */
const cache = new Map();

/**
 * A map as 256 colours of three bytes.
 * @param {"sequential" | "diverging"} meaning
 * @param {boolean} dark
 * @returns {Uint8Array}
 */
export function colourMap(meaning, dark) {
  const name = `${meaning} ${dark}`;
  const known = cache.get(name);
  if (known) return known;
  const anchors = ANCHORS[meaning][dark ? "dark" : "light"].map(parts);
  const map = new Uint8Array(768);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (anchors.length - 1);
    const below = Math.min(Math.floor(place), anchors.length - 2);
    for (let c = 0; c < 3; c++) {
      map[3 * i + c] = Math.round(
        anchors[below][c] + (place - below) * (anchors[below + 1][c] - anchors[below][c]),
      );
    }
  }
  cache.set(name, map);
  return map;
}

/**
 * One side of a map, from its middle outwards, as 256 colours.
 * @param {"sequential" | "diverging"} meaning
 * @param {-1 | 1} side
 * @param {boolean} dark
 */
export function sideMap(meaning, side, dark) {
  const map = colourMap(meaning, dark);
  return Uint8Array.from(
    { length: 768 },
    (_, at) => map[3 * Math.round(127.5 + (side * Math.floor(at / 3)) / 2) + (at % 3)],
  );
}

/**
 * Levels from 0 to 1 as pixels; NaN is clear. A pixel is written whole, as one number.
 * @param {Float32Array} levels
 * @param {Uint8Array} map
 * @returns {Uint8ClampedArray<ArrayBuffer>}
 */
export function painted(levels, map) {
  const whole = wholePixels(map);
  const pixels = new Uint32Array(levels.length);
  for (let i = 0; i < levels.length; i++) {
    const level = levels[i];
    if (level === level) pixels[i] = whole[(255 * Math.min(1, Math.max(0, level)) + 0.5) | 0];
  }
  return new Uint8ClampedArray(pixels.buffer);
}

/** @type {WeakMap<Uint8Array, Uint32Array>} */
const wholes = new WeakMap();

/** @param {Uint8Array} map */
function wholePixels(map) {
  let whole = wholes.get(map);
  if (!whole) {
    whole = Uint32Array.from(
      { length: 256 },
      (_, i) => (255 << 24) | (map[3 * i + 2] << 16) | (map[3 * i + 1] << 8) | map[3 * i],
    );
    wholes.set(map, whole);
  }
  return whole;
}

/**
 * The colour of the n-th class or series; after eight they come round again.
 * @param {number} n
 * @param {boolean} dark
 */
export function classColour(n, dark) {
  const colours = CLASSES[dark ? "dark" : "light"];
  return colours[n % colours.length];
}

/**
 * The colour of points that belong to no class.
 * @param {boolean} dark
 */
export function noClassColour(dark) {
  return NO_CLASS[dark ? "dark" : "light"][0];
}

/**
 * Red, green and blue of `#rrggbb`.
 * @param {string} hex
 */
export function parts(hex) {
  return [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16));
}

/**
 * Ink that can be read on a colour: whichever of black and white has the larger contrast, which is
 * 4.58 to 1 or more.
 * @param {number} red
 * @param {number} green
 * @param {number} blue
 */
export function inkOn(red, green, blue) {
  const [r, g, b] = [red, green, blue].map((part) =>
    part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}
