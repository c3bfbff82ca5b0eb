/**
 * The columns of a table that was uploaded: its first rows, and which column holds the texts, the
 * labels and the groups.
 */

import { element } from "../../views/static/elements.js";
import { shownText } from "../../views/static/text.js";
import { Form } from "./form.js";

/**
 * @param {import("./api.js").TableAnswer} table
 * @param {(columns: Record<string, string>) => void} use
 */
export function columnForm(table, use) {
  const form = new Form(table.parameters, { models: [], datasets: [] });
  form.set(
    Object.fromEntries(Object.entries(table.likely).filter(([, column]) => column !== null)),
  );
  form.go.textContent = "Use these columns";
  const asking = element("form", { class: "asking", "aria-label": "Columns" }, [form.root]);
  asking.addEventListener("submit", (event) => {
    event.preventDefault();
    use(/** @type {Record<string, string>} */ (form.get()));
  });
  return element("section", { class: "columns" }, [
    element("h3", {}, ["Columns of ", element("bdi", {}, [shownText(table.file, 80)])]),
    element(
      "div",
      { class: "rows", tabindex: "0", role: "region", "aria-label": "The first rows" },
      [firstRows(table)],
    ),
    asking,
  ]);
}

/** @param {import("./api.js").TableAnswer} table */
function firstRows(table) {
  const head = element(
    "tr",
    {},
    table.columns.map((name) => element("th", { scope: "col" }, [shownText(name, 60)])),
  );
  const rows = table.rows.map((cells) =>
    element(
      "tr",
      {},
      cells.map((cell) => element("td", {}, [element("bdi", {}, [shownText(cell, 120)])])),
    ),
  );
  return element("table", {}, [element("thead", {}, [head]), element("tbody", {}, rows)]);
}
