/**
 * The page's own colours, for what is drawn on a canvas.
 *
 * @typedef {{dark: boolean, ink: string, muted: string, faint: string, paper: string, accent: string, font: string}} Theme
 */

const darkness = matchMedia("(prefers-color-scheme: dark)");
const coarseness = matchMedia("(pointer: coarse)");
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

/** @returns {Theme} */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return {
    dark: darkness.matches,
    ink: read("ink"),
    muted: read("muted"),
    faint: read("faint"),
    paper: read("paper"),
    accent: read("accent"),
    font: read("font") || "sans-serif",
  };
}

/**
 * @param {() => void} act
 * @returns {() => void} call it to stop listening
 */
export function whenThemeChanges(act) {
  darkness.addEventListener("change", act);
  return () => darkness.removeEventListener("change", act);
}

/** Whether the reader points with a finger. */
export function hasFinger() {
  return coarseness.matches;
}

/** Whether the reader asked for things to keep still. */
export function keepsStill() {
  return stillness.matches;
}
