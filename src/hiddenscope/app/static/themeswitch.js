/** Light, dark, or as the system has it. What was chosen is remembered. */

import { element } from "../../views/static/elements.js";
import { chooseTheme } from "../../views/static/theme.js";

const KEY = "hiddenscope-theme";
const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

export function themeSwitch() {
  const select = element(
    "select",
    { "aria-label": "Theme" },
    Object.entries(THEMES).map(([value, label]) => element("option", { value }, [label])),
  );
  select.value = remembered();
  chooseTheme(select.value);
  select.addEventListener("change", () => {
    chooseTheme(select.value);
    try {
      localStorage.setItem(KEY, select.value);
    } catch {
      // A private window forgets it.
    }
  });
  return select;
}

function remembered() {
  try {
    const theme = localStorage.getItem(KEY) ?? "";
    return theme in THEMES ? theme : "auto";
  } catch {
    return "auto";
  }
}
