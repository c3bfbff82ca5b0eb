/**
 * The page's own colours, for what is drawn on a canvas.
 *
 * @typedef {{dark: boolean, ink: string, muted: string, faint: string, paper: string, accent:
 *   string, font: string}} Theme
 */

const darkness = matchMedia("(prefers-color-scheme: dark)");
const CHANGED = "hiddenscope-theme";
const coarseness = matchMedia("(pointer: coarse)");
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

/** @returns {Theme} */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return {
    dark: isDark(),
    ink: read("ink"),
    muted: read("muted"),
    faint: read("faint"),
    paper: read("paper"),
    accent: read("accent"),
    font: read("font") || "sans-serif",
  };
}

/** Whether the page is dark: as the reader chose, or else as the system has it. */
function isDark() {
  const selected = document.documentElement.dataset.theme;
  return selected ? selected === "dark" : darkness.matches;
}

/**
 * Make the page light or dark; any other word leaves it to the system.
 * @param {string} name
 */
export function chooseTheme(name) {
  if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  dispatchEvent(new Event(CHANGED));
}

/**
 * @param {() => void} act
 * @returns {() => void} call it to stop listening
 */
export function whenThemeChanges(act) {
  darkness.addEventListener("change", act);
  addEventListener(CHANGED, act);
  return () => {
    darkness.removeEventListener("change", act);
    removeEventListener(CHANGED, act);
  };
}

/** Whether the reader points with a finger. */
export function hasFinger() {
  return coarseness.matches;
}

/** Whether the reader asked for things to keep still. */
export function keepsStill() {
  return stillness.matches;
}
