/** Which class draws which kind of view, for every host. */

import { GraphView } from "./graph.js";
import { GridView } from "./grid.js";
import { PatternsView } from "./patterns.js";
import { LinesView } from "./lines.js";
import { PanelsView } from "./panels.js";

/**
 * @param {HTMLElement} root
 * @param {import("./payload.js").View} view
 * @param {number} place which view of the page it is
 */
export function viewIn(root, view, place) {
  if (view.kind === "Grid") return new GridView(root, view, place);
  if (view.kind === "Panels") return new PanelsView(root, view, place);
  if (view.kind === "Patterns") return new PatternsView(root, view, place);
  if (view.kind === "Graph") return new GraphView(root, view, place);
  return new LinesView(root, view, place);
}
