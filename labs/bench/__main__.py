"""Measure the rows, print them, and write labs/bench/results.json and docs/bench.md.

`make bench` measures everything, with the peers. `QUICK=1 make bench` measures a few
rows in minutes and uses the environments of peers only if they are there.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from labs.bench import (
    attention,
    capture,
    depth,
    dictionary,
    drift,
    edges,
    embed,
    examples,
    extract,
    formats,
    gpu,
    growth,
    lens,
    load,
    measure,
    monitor,
    page,
    patch,
    probe,
    project,
    ragged,
    results,
    search,
    serve,
    start,
    store,
    visibility,
)
from labs.bench.growth import Growth
from labs.bench.measure import Row
from labs.bench.peers import beside, tasks
from labs.bench.peers.beside import Standing, Task
from labs.bench.peers.environments import NNTERP, PEERS, set_up

PICTURE = page.PATH.parent / "pictures" / "growth.png"
PEER_GROUP, GROWTH_GROUP = "peers", "growth"
# What QUICK=1 measures: seconds each, and the peers of the tasks that need one pass.
QUICK_ROWS = ("capture", "depth", "patch")
QUICK_TASKS = ("capture", "early stop", "lens")


def main() -> None:
    """Measure what was asked for, print it, and write it as it comes."""
    options = _options()
    console = Console()
    machine = measure.machine()
    rows: list[Row] = []
    standings: list[Standing] = []
    for measured in _measure_rows(options, console):
        rows += measured
        _keep(options, machine, measured, (), ())
    for compared in _measure_peers(options, console):
        barred = beside.rows_with_bars(compared)
        rows += barred
        standings += compared
        _keep(options, machine, barred, compared, ())
    for growths in _measure_growth(options, console):
        _keep(options, machine, (), (), growths)
    console.print(_row_table(rows))
    console.print(_peer_table(standings))


def _keep(
    options: argparse.Namespace,
    machine: results.Record,
    rows: Sequence[Row],
    standings: Sequence[Standing],
    growths: Sequence[Growth],
) -> None:
    """Write what was just measured, so that a run that is stopped leaves the rest."""
    if not options.write:
        return
    known = results.read()
    results.keep_rows(known, machine, rows, options.repeats)
    results.keep_standings(known, machine, [row.to_json() for row in standings])
    results.keep_growths(known, machine, [row.to_json() for row in growths])
    write(known)


def write(known: dict[str, results.Record]) -> None:
    """Write the results, their page and the picture of growth."""
    results.write(known)
    page.PATH.write_text(page.page(known), encoding="utf-8")
    page.ROWS_PATH.write_text(page.every_row(known), encoding="utf-8")
    for architecture in page.architectures(known):
        growths = known[architecture].get("growth")
        if growths:
            growth.picture(growths, architecture, PICTURE)
            break


def _measure_rows(options: argparse.Namespace, console: Console) -> Iterator[list[Row]]:
    """Yield the rows of every group."""
    for name, group in _groups(options).items():
        if _wanted(name, options):
            begin = time.perf_counter()
            yield group()
            _report(console, name, begin)


def _measure_peers(
    options: argparse.Namespace, console: Console
) -> Iterator[list[Standing]]:
    """Yield every task beside the peers; environments are made if they may be."""
    if not _wanted(PEER_GROUP, options):
        return
    if options.peers:
        for environment in (PEERS, NNTERP):
            problem = set_up(environment)
            if problem:
                console.print(f"{environment.folder}: {problem}")
    with TemporaryDirectory() as folder, beside.workers() as held:
        for task in _chosen_tasks(Path(folder), options):
            begin = time.perf_counter()
            yield beside.measured(task, held, options.repeats)
            _report(console, f"peers, {task.name}", begin)


def _chosen_tasks(folder: Path, options: argparse.Namespace) -> list[Task]:
    chosen = tasks.all_tasks(folder)
    if options.quick:
        return [task for task in chosen if task.name in QUICK_TASKS]
    if options.tasks:
        return [task for task in chosen if task.name in options.tasks]
    return chosen


def _measure_growth(
    options: argparse.Namespace, console: Console
) -> Iterator[list[Growth]]:
    """Yield the exponents of both libraries, task by task and axis by axis."""
    if not _wanted(GROWTH_GROUP, options):
        return
    begin = time.perf_counter()
    for pair in growth.measured(options.repeats, options.tasks):
        yield pair
        for exponent in pair[:1]:
            _report(console, f"growth, {exponent.task}, {exponent.axis}", begin)


def _wanted(name: str, options: argparse.Namespace) -> bool:
    if options.rows:
        return name in options.rows
    if options.quick:
        return name in (*QUICK_ROWS, PEER_GROUP)
    return True


def _report(console: Console, name: str, begin: float) -> None:
    console.print(f"[dim]{name}: {time.perf_counter() - begin:.0f} s[/dim]")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m labs.bench", description="Measure what hiddenscope costs."
    )
    nothing = argparse.Namespace(repeats=0, full=False)
    names = [*_groups(nothing), PEER_GROUP, GROWTH_GROUP]
    add = parser.add_argument
    add("rows", nargs="*", choices=[[], *names], help="only these")
    add("--write", action="store_true", help="write what was measured")
    add("--repeats", type=int, default=7, help="rounds, of which the median is taken")
    add("--full", action="store_true", help=f"{ragged.ALL:,} texts in the ragged row")
    add("--peers", action="store_true", help="make the environments of the peers")
    add("--quick", action="store_true", help="a few rows, one round, five minutes")
    add("--tasks", nargs="*", default=(), help="only these tasks of peers and growth")
    options = parser.parse_args()
    if options.quick:
        options.repeats = 1
    return options


def _groups(options: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    rounds = int(options.repeats)
    # What takes a second gets more rounds: one second of a shared machine may be slow.
    many = 3 * rounds
    few = max(1, rounds // 2)
    return {
        "start": lambda: start.rows(rounds),
        "load": lambda: load.rows(many),
        "capture": lambda: capture.rows(many),
        "attention": lambda: attention.rows(many),
        "depth": lambda: depth.rows(many),
        "ragged": lambda: ragged.rows(few, full=options.full),
        "visibility": lambda: visibility.rows(rounds),
        "lens": lambda: lens.rows(rounds),
        "monitor": lambda: monitor.rows(rounds),
        "embed": lambda: embed.rows(few),
        "extract": lambda: extract.rows(few),
        "share": lambda: extract.share_rows(few),
        "search": lambda: search.rows(many),
        "examples": lambda: examples.rows(few),
        "fit": lambda: dictionary.rows(rounds),
        "store": lambda: [*store.rows(rounds), *formats.rows(rounds)],
        "probe": lambda: probe.rows(rounds),
        "project": lambda: project.rows(rounds),
        "gpu": gpu.rows,
        "drift": lambda: drift.rows(few),
        "serve": lambda: serve.rows(many),
        "patch": lambda: patch.rows(few),
        "edges": lambda: edges.rows(few),
    }


def _row_table(rows: Sequence[Row]) -> Table:
    table = Table(*page.HEAD)
    for row in rows:
        style = "bold red" if row.met is False else None
        table.add_row(*page.cells(row), style=style)
    return table


def _peer_table(standings: Sequence[Standing]) -> Table:
    lines = page.details([one.to_json() for one in standings])
    head, *body = lines
    table = Table(*head)
    for line in body:
        table.add_row(*line)
    return table


if __name__ == "__main__":
    main()
