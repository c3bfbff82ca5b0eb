"""Run the rows, print the table, and write it to bench/results.json and docs/bench.md,
under this architecture.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import (
    capture,
    depth,
    drift,
    embed,
    extract,
    gpu,
    lens,
    load,
    measure,
    patch,
    peers,
    probe,
    project,
    ragged,
    search,
    serve,
    start,
    store,
    visibility,
)
from bench.measure import Row

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "bench" / "results.json", ROOT / "docs" / "bench.md"
HEAD = ("row", "what is compared", "CPU", "wall", "bar", "")
INTRODUCTION = """\
# What it costs

Written by `make bench`, one table for each architecture that was measured. Every number is a ratio of two ways run in
turn in one process, the median over several rounds. CPU time counts all threads. The bar is compared with CPU time, on
a GPU with wall time; memory has one ratio, which stands under CPU. A bare pass is the module's own forward under
`no_grad`, with nothing else asked of it. A run replaces its rows in the table of its own architecture and leaves the
others as they were measured, with the bars of that time.
"""
TITLE = """\
## {architecture}: {cpu}

{cores} cores, {threads} torch threads, Python {python}, torch {torch}, transformers {transformers}, hiddenscope
{hiddenscope}. Medians of several rounds, thrice as many for rows that take a second, fewer for those that take
minutes. The load average is that of the moment when they began.

{runs}
"""
GPU_TITLE = """\
## {architecture}: {cpu}

Measured by `python -m bench.gpu`, hiddenscope {hiddenscope}.
"""


def main() -> None:
    """Parse, measure, print, write."""
    options = _options()
    machine = measure.machine()
    console = Console()
    rows: list[Row] = []
    for name, measured in _groups(options).items():
        if not options.rows or name in options.rows:
            console.print(f"[dim]{name} ...[/dim]")
            rows += measured()
    console.print(_table(rows))
    if not options.rows or options.write:
        _write(rows, machine, options.repeats)
        console.print(f"Written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


def _write(rows: list[Row], machine: dict[str, Any], repeats: int) -> None:
    """Keep the rows under their architecture, a GPU's under "cuda", and write the page
    of all of them.

    Rows that were not measured this time stay as they were.
    """
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    known = results.get(machine["architecture"], {"rows": [], "runs": []})
    ours = [row for row in rows if row.name != "gpu"]
    runs = _runs(
        known["runs"],
        {"rows": _names(ours), "repeats": repeats, "load": machine["load"]},
    )
    joined = _in_place([Row.from_json(row) for row in known["rows"]], ours)
    results[machine["architecture"]] = _record(machine, runs, joined)
    on_gpu = [row for row in rows if row.name == "gpu"]
    if on_gpu and ":" in on_gpu[0].what:
        name = on_gpu[0].what.partition(":")[0]
        results["cuda"] = _record(
            {**machine, "cpu": name, "architecture": "cuda"}, [], on_gpu
        )
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


def _in_place(before: list[Row], rows: list[Row]) -> list[Row]:
    """The rows of before, and in their places those that were measured again, by name."""
    measured = {row.name for row in rows}
    return [
        row
        for name in _names([*before, *rows])
        for row in (rows if name in measured else before)
        if row.name == name
    ]


def _names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def _runs(before: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that rows of the table are from, without what was measured again."""
    kept = [
        {**old, "rows": [name for name in old["rows"] if name not in run["rows"]]}
        for old in before
    ]
    return [old for old in [*kept, run] if old["rows"]]


def _record(
    machine: dict[str, Any], runs: list[dict[str, Any]], rows: list[Row]
) -> dict[str, Any]:
    return {"machine": machine, "runs": runs, "rows": [row.to_json() for row in rows]}


def page(results: dict[str, Any]) -> str:
    """The page of all architectures, those of CPUs first."""
    parts = [INTRODUCTION]
    for architecture in sorted(
        results, key=lambda name: (name == "cuda", name != "x86_64")
    ):
        record = results[architecture]
        title = GPU_TITLE if architecture == "cuda" else TITLE
        rows = [_cells(Row.from_json(row)) for row in record["rows"]]
        table = [HEAD, ("---",) * len(HEAD), *rows]
        parts.append(
            title.format(
                **record["machine"], runs="\n".join(map(_of_run, record["runs"]))
            )
        )
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in table) + "\n")
    return "\n".join(parts)


def _of_run(run: dict[str, Any]) -> str:
    return (
        f"- {run['repeats']} rounds, load average {run['load']}:"
        f" {', '.join(run['rows'])}"
    )


def _options() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure what hiddenscope costs."
    )
    names = [*_groups(argparse.Namespace(repeats=0, full=False, peers=False))]
    parser.add_argument(
        "rows",
        nargs="*",
        choices=[[], *names],
        help="only these; nothing is written then",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the named rows too; the others stay as they were",
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="rounds, of which the median is taken"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"all {ragged.ALL:,} texts in the ragged row",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure other libraries, in an environment of their own",
    )
    return parser.parse_args()


def _groups(options: Any) -> dict[str, Callable[[], list[Row]]]:
    return {
        "start": lambda: start.rows(options.repeats),
        "load": lambda: load.rows(_many(options)),
        "capture": lambda: capture.rows(_many(options)),
        "depth": lambda: depth.rows(_many(options)),
        "ragged": lambda: ragged.rows(_few(options), full=options.full),
        "visibility": lambda: visibility.rows(options.repeats),
        "lens": lambda: lens.rows(options.repeats, ask_peers=options.peers),
        "embed": lambda: embed.rows(_few(options)),
        "extract": lambda: extract.rows(_few(options)),
        "share": lambda: extract.share_rows(_few(options)),
        "search": lambda: search.rows(_many(options)),
        "store": lambda: store.rows(options.repeats),
        "probe": lambda: probe.rows(options.repeats),
        "project": lambda: project.rows(options.repeats),
        "gpu": lambda: gpu.rows(),
        "drift": lambda: drift.rows(_few(options)),
        "serve": lambda: serve.rows(_many(options)),
        "patch": lambda: patch.rows(_few(options), ask_peers=options.peers),
        "peers": lambda: (
            peers.rows(options.repeats) if options.peers else peers.not_asked()
        ),
    }


def _many(options: Any) -> int:
    """Rounds for what takes about a second: a second on a shared machine may be a slow
    one.
    """
    return 3 * int(options.repeats)


def _few(options: Any) -> int:
    """Rounds for a row that takes long and varies little."""
    return max(1, options.repeats // 2)


def _cells(row: Row) -> tuple[str, ...]:
    bar = "" if row.bar is None else f"{'≥' if row.at_least else '≤'} {row.bar:g}"
    return row.name, row.what, _number(row.cpu), _number(row.wall), bar, row.verdict


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}" if ratio < 2 else f"{ratio:.2f}"


def _table(rows: list[Row]) -> Table:
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*_cells(row), style="bold red" if row.met is False else None)
    return table


if __name__ == "__main__":
    main()
