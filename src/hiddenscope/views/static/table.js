/**
 * The numbers behind a picture as a table, for those who read it with a screen reader, made when it
 * is opened.
 */

import { element } from "./elements.js";
import { formatNumber } from "./numbers.js";
import { shownText } from "./text.js";

const MOST_ROWS = 2000;

/**
 * @param {() => string} caption
 * @param {() => Iterable<import("./export.js").Cell[]>} rows the first is the head
 */
export function tableBehind(caption, rows) {
  const summary = element("summary", {}, ["Table"]);
  const root = element("details", { class: "behind" }, [summary]);
  root.addEventListener("toggle", () => {
    for (const old of root.querySelectorAll(".scroll")) old.remove();
    if (root.open) root.append(drawn(caption(), rows()));
  });
  return root;
}

/**
 * @param {string} caption
 * @param {Iterable<import("./export.js").Cell[]>} rows
 */
function drawn(caption, rows) {
  const body = element("tbody");
  const table = element("table", {}, [element("caption", {}, [caption])]);
  let count = 0;
  for (const row of rows) {
    if (count === 0) table.append(element("thead", {}, [line(row, "th", "col")]));
    else if (count <= MOST_ROWS) body.append(line(row, "td", ""));
    count++;
  }
  table.append(body);
  const more = count - 1 - MOST_ROWS;
  const rest = more > 0 ? [element("p", {}, [`And ${more} more rows: the CSV has them all.`])] : [];
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, [
    table,
    ...rest,
  ]);
}

/**
 * @param {import("./export.js").Cell[]} row
 * @param {"td" | "th"} tag
 * @param {string} scope
 */
function line(row, tag, scope) {
  const cells = row.map((cell, i) => {
    const head = tag === "th" || i === 0;
    const text = typeof cell === "number" ? formatNumber(cell) : shownText(cell ?? "", 200);
    if (head) return element("th", { scope: scope || "row" }, [text]);
    return element("td", typeof cell === "number" ? { class: "number" } : {}, [text]);
  });
  return element("tr", {}, cells);
}
