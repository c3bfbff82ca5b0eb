/** The workbench: tabs, each made when it is first shown. */

import { element } from "../../views/static/elements.js";
import { forgetViews, newEntry, readPage, whenLinked, writePage } from "../../views/static/hash.js";
import { read, Refused } from "./api.js";
import { Asker } from "./asking.js";
import { askTab, driftTab } from "./asktab.js";
import { DatasetTab } from "./datatab.js";
import { GridTab, pinFirst } from "./gridtab.js";
import { helpTab } from "./help.js";
import { historyButtons } from "./history.js";
import { held } from "./place.js";
import { destroyDetached, paragraph } from "./result.js";
import { storeTab } from "./storetab.js";
import { themeSwitch } from "./themeswitch.js";
import { tour } from "./tour.js";

const TABS = /** @type {Record<string, string>} */ ({
  grid: "Grid",
  data: "Datasets",
  stores: "Stores",
  drift: "Drift",
  ask: "All analyses",
  help: "Help",
});
const FIRST_CELL = "layer.24~4";

const work = /** @type {HTMLElement} */ (document.getElementById("work"));
const nav = /** @type {HTMLElement} */ (document.getElementById("tabs"));
const tools = /** @type {HTMLElement} */ (document.getElementById("tools"));
const status = /** @type {HTMLElement} */ (document.getElementById("status"));

async function start() {
  const asker = new Asker(status);
  const [analyses, models, datasets, dictionaries] = await Promise.all([
    /** @type {Promise<import("./api.js").AnalysisAnswer[]>} */ (read("/api/analyses")),
    /** @type {Promise<import("./api.js").ModelAnswer[]>} */ (read("/api/models")),
    /** @type {Promise<import("./api.js").DatasetAnswer[]>} */ (read("/api/datasets")),
    /** @type {Promise<import("./api.js").DictionaryAnswer[]>} */ (read("/api/dictionaries")),
  ]);
  const lists = { models, datasets, dictionaries };
  const drift = analyses.find((analysis) => analysis.word === "drift");
  /** @type {GridTab | null} */
  let grid = null;
  let pinned = ""; // in the grid, while another tab is shown
  if (!location.hash) pinFirst(FIRST_CELL);

  const show = () => {
    const tab = Object.hasOwn(TABS, held("tab")) ? held("tab") : "grid";
    for (const link of nav.querySelectorAll("a")) {
      if (link.dataset.tab === tab) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${TABS[tab]} · hiddenscope`;
    const root = element("div");
    work.replaceChildren(root);
    if (tab !== held("tab"))
      work.prepend(paragraph(`There is no tab “${held("tab").slice(0, 40)}”.`));
    destroyDetached();
    grid = null;
    if (tab === "grid") {
      grid = new GridTab(
        root,
        asker,
        models,
        analyses.map(({ word }) => word),
        dictionaries,
      );
      tour(root);
    } else if (tab === "data") new DatasetTab(root, asker, analyses, lists);
    else if (tab === "stores")
      storeTab(root, asker, analyses, lists).catch((error) =>
        root.replaceChildren(paragraph(String(error.message))),
      );
    else if (tab === "drift" && drift) driftTab(root, asker, drift, lists);
    else if (tab === "help") helpTab(root, analyses);
    else askTab(root, asker, analyses, lists);
  };

  nav.replaceChildren(
    ...Object.entries(TABS).map(([tab, label]) => {
      const link = element("a", { href: `#tab=${tab}`, "data-tab": tab }, [label]);
      link.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        if (grid) pinned = readPage("0.pin");
        newEntry();
        for (const name of ["q", "word", "data", "store", "text", "site", "from", "change"])
          writePage(name, "");
        forgetViews();
        if (tab === "grid") writePage("0.pin", pinned);
        writePage("tab", tab === "grid" ? "" : tab);
        show();
        work.focus({ preventScroll: true });
      });
      return link;
    }),
  );
  tools.replaceChildren(...historyButtons(), themeSwitch());
  whenLinked(() => (grid && held("tab") === "grid" ? grid.restore() : show()));
  if (readPage("token")) writePage("token", "");
  show();
}

start().catch((/** @type {Error} */ error) => {
  work.replaceChildren(
    paragraph(
      error instanceof Refused ? error.message : `The page cannot be shown: ${error.message}`,
    ),
  );
});
