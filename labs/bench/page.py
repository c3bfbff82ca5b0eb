"""Write docs/bench.md (the peers, how cost grows, bars that are missed), and rows.md
with every row.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labs.bench.measure import Row
from labs.bench.peers.environments import NNTERP, OURS, PEERS, PLAIN

PATH = Path(__file__).parents[2] / "docs" / "bench.md"
ROWS_PATH = Path(__file__).with_name("rows.md")
HEAD = ("row", "what is compared", "CPU", "wall", "bar", "")
COLUMNS = (
    PLAIN,
    OURS,
    "TransformerLens",
    "nnsight",
    "nnterp",
    "TorchLens",
    "sentence-transformers",
)
# A remark in brackets, and how many heads a model has.
BRACKETS = re.compile(r" \([^()]*\)(?= |$)")
HEADS = re.compile(r"\d+ x \d+ heads")
# Two libraries whose costs differ by less share a place: medians of a few rounds move
# this much from run to run.
TIE = 1.03
# The order of the tasks in both tables, whatever was measured last.
TASKS = (
    "load",
    "capture",
    "early stop",
    "memory",
    "ragged corpus",
    "extract",
    "lens",
    "patch",
    "edges",
    "integrated edges",
    "visibility",
    "embed",
    "drift",
)
# Packages that every environment has in the version of the machine's record.
SHARED = ("torch==", "transformers==")
INTRODUCTION = """\
# What it costs

`make bench` writes this page: what a task costs in hiddenscope, in other libraries and in plain Hugging Face code, how that
cost grows, and how far hiddenscope is from the bare forward pass. Capture, lens and extraction stay close to the bare pass.
hiddenscope is far ahead where passes can be shared (patch and visibility, for which plain code makes one pass for each cell
or target) and where nothing needs padding (ragged corpus, extract, embed). Others are ahead in loading, because every model
is proved when it is loaded, and in drift, which also finds the block and tells rounding from a fault. Every measurement, with
wall times, rounds, load and seconds, is in [results.json](../labs/bench/results.json).
"""
BESIDE = """\
## Beside its peers

Ratios of CPU time to plain Hugging Face code for the same task; of peak memory of the process in the row memory. The least
of each row is bold, with all within 3 % of it. An empty cell is not offered by that library or was not measured. Every
library does the task as its documentation recommends, without gradients (except for visibility), and stops the pass early
where it can; plain Hugging Face runs the whole pass. The libraries run in turn, in processes of their own; a ratio is the
median over rounds.
"""
DETAILS = """\
The tasks in full, with what plain Hugging Face takes, and the largest difference of any library's numbers from its own,
relative to the largest of them (DIFFER says that they are not the same).
"""
GROWTH = """\
## How cost grows

The exponent of CPU time in one size while the others stay, with its 95 % interval: 1 means that twice the tokens take twice
the time. A wide interval means that cost is no power of the size in this range; a fixed cost makes the exponent smaller. Models
have random weights and the shape of Llama (GPT-2 for visibility). The peer of capture, lens and patch is TransformerLens, of
visibility a loop of backward passes, of extract a loop with `torch.save`, of probe scikit-learn. The numbers, with the cost of
the peer over ours at the largest size, are in [rows.md](../labs/bench/rows.md).

![Exponents of CPU time for hiddenscope and its peers](pictures/growth.png)
"""
MISSED = """\
## Bars that are missed

Most analyses have a bar: a ratio of two ways run in turn in one process, such as capture over the bare pass. {met} of {barred} are
met; these are not. All rows are in [rows.md](../labs/bench/rows.md).
"""
ROWS = """\
# Every row of `make bench`

Ratios of two ways run in turn in one process: medians over several rounds of CPU time of all threads, or of wall time where
only that is meant; memory has one ratio. A ratio that misses its bar is bold. A bare pass is the module's own forward under
`no_grad`. Rows keep the bars of the day on which they were measured.
"""
GPU_ROWS = """\
## {cpu}

Ratios of wall time, measured by `python -m labs.bench.gpu` and, for BatchTopK, `python -m labs.bench.dictionary`.
"""
EXPONENTS = """\
## How cost grows

Exponents of CPU time with 95 % intervals, and the cost of the peer over ours at the largest size.
"""
Record = Mapping[str, Any]


def page(results: Mapping[str, Record]) -> str:
    """Return the page of everything that was measured."""
    order = architectures(results)
    on_cpu = [name for name in order if name != "cuda"]
    parts = [INTRODUCTION]
    parts += _beside(results, order)
    if any(record.get("growth") for record in results.values()):
        parts.append(GROWTH)
    if "cuda" in results:
        parts.append(GPU_ROWS.format(**results["cuda"]["machine"]))
        parts.append(_table(_gpu_rows(results["cuda"])))
    barred, missed = 0, 0
    for architecture in on_cpu:
        for fields in results[architecture]["rows"]:
            barred += fields["met"] is not None
            missed += fields["met"] is False
    parts.append(MISSED.format(met=barred - missed, barred=barred))
    head, *rows = _rows(results, on_cpu)
    parts.append(_table([head, *(row for row in rows if "**" in "".join(row))]))
    return "\n".join(parts)


def every_row(results: Mapping[str, Record]) -> str:
    """Return a page with every row that has been measured."""
    on_cpu = [name for name in architectures(results) if name != "cuda"]
    parts = [ROWS, _table(_rows(results, on_cpu))]
    if "cuda" in results:
        parts.append(GPU_ROWS.format(**results["cuda"]["machine"]))
        parts.append(_table(_rows(results, ["cuda"])))
    grown = [name for name in architectures(results) if results[name].get("growth")]
    if grown:
        parts += [EXPONENTS, _table(_exponents(results, grown))]
    return "\n".join(parts)


def architectures(results: Mapping[str, Record]) -> list[str]:
    """Return what was measured: the architecture of most users first, a GPU last."""
    return sorted(results, key=lambda name: (name == "cuda", name != "x86_64"))


def _beside(results: Mapping[str, Record], order: Sequence[str]) -> list[str]:
    """Return the tables of peers, one an architecture."""
    measured = [name for name in order if results[name].get("peers")]
    if not measured:
        return []
    parts = [BESIDE]
    for architecture in measured:
        standings = results[architecture]["peers"]
        parts.append(f"{_machine_line(results[architecture])}.\n")
        parts.append(_table(_ratios(standings)))
        parts.append(_versions(results[architecture]))
    parts += [DETAILS, _table(_tasks(results, measured))]
    return parts


def _tasks(
    results: Mapping[str, Record], measured: Sequence[str]
) -> Iterable[Sequence[str]]:
    """Yield one line for each task: what it is, and what plain Hugging Face takes."""
    yield ("task", "what is asked", *measured, "largest difference")
    standings = []
    for architecture in measured:
        for row in results[architecture]["peers"]:
            standings.append({**row, "architecture": architecture})
    for task, here in _by_task(standings).items():
        costs = []
        for architecture in measured:
            plain = ""
            for row in here:
                if (row["architecture"], row["library"]) == (architecture, PLAIN):
                    plain = _amount(row)
            costs.append(plain)
        notes = [row["numbers"] for row in here if row["numbers"]]
        wrong = [note for note in notes if note.startswith("DIFFER")]
        largest = max(notes, key=_difference, default="").removeprefix("same to ")
        yield (task, here[0]["what"], *costs, ", ".join(wrong) or largest)


def _difference(note: str) -> float:
    """Return the number that ends a note such as "same to 1e-06"."""
    try:
        return float(note.split()[-1])
    except ValueError:
        return 0.0


def _amount(row: Record) -> str:
    """Return seconds of CPU time with their unit, or the peak memory."""
    if not row["seconds"]:
        return ""
    if row["task"] == "memory":
        return f"{row['seconds'] / 2**20:.0f} MiB"
    return f"{_number(row['seconds'])} s"


def _machine_line(record: Record) -> str:
    machine = record["machine"]
    return f"{machine['architecture']} ({machine['cpu']}, {machine['cores']} cores)"


def _versions(record: Record) -> str:
    """Return the versions of everything that was measured on one architecture."""
    machine = record["machine"]
    versions = [f"torch {machine['torch']}", f"transformers {machine['transformers']}"]
    for pin in PEERS.pins:
        if not pin.startswith(SHARED):
            versions.append(pin.replace("==", " "))
    measured = _cpu_ratios(record["peers"])
    if "nnterp" in measured:
        nnterp, nnsight = NNTERP.pins[-2:]
        versions.append(f"{nnterp} with {nnsight}".replace("==", " "))
    return f"Versions: {', '.join(versions)}.\n"


def _ratios(standings: Sequence[Record]) -> Iterable[Sequence[str]]:
    """Yield one line for each task, with the least ratios bold."""
    yield ("task", *COLUMNS)
    for task, here in _by_task(standings).items():
        ratios = _cpu_ratios(here)
        least = min(ratios.values(), default=0.0)
        cells = []
        for library in COLUMNS:
            ratio = ratios.get(library)
            cell = _number(ratio)
            if ratio is not None and ratio <= least * TIE:
                cell = f"**{cell}**"
            cells.append(cell)
        yield (task, *cells)


def _cpu_ratios(standings: Sequence[Record]) -> dict[str, float]:
    """Return the ratio of CPU time of each library that was measured."""
    measured = [row for row in standings if row["cpu"] is not None]
    return {row["library"]: row["cpu"] for row in measured}


def details(standings: Sequence[Record]) -> Iterable[Sequence[str]]:
    """Yield one line for each task and library."""
    yield (
        "task",
        "what is asked",
        "library",
        "CPU",
        "wall",
        "CPU seconds or peak memory",
        "numbers",
    )
    for row in sorted(standings, key=_task_rank):
        note = row["numbers"]
        if row["skipped"]:
            note = f"not measured: {row['skipped']}"
        seconds = _number(row["seconds"])
        if row["task"] == "memory" and row["seconds"]:
            seconds = f"{row['seconds'] / 2**20:.0f} MiB"
        yield (
            row["task"],
            row["what"],
            row["library"],
            _number(row["cpu"]),
            _number(row["wall"]),
            seconds,
            note.replace("|", "/"),
        )


def _by_task(standings: Sequence[Record]) -> dict[str, list[Record]]:
    tasks: dict[str, list[Record]] = {}
    for row in sorted(standings, key=_task_rank):
        tasks.setdefault(row["task"], []).append(row)
    return tasks


def _task_rank(standing: Record) -> int:
    """Return where a task stands in the tables; a task without a place is last."""
    task = standing["task"]
    if task in TASKS:
        return TASKS.index(task)
    return len(TASKS)


def _exponents(
    results: Mapping[str, Record], measured: Sequence[str]
) -> Iterable[Sequence[str]]:
    """Yield one line for each task and axis: ours, the peer's, and both costs."""
    head = ["task", "grows in"]
    for architecture in measured:
        head += [f"{architecture}, ours", "peer", "peer / ours"]
    yield head
    pairs: dict[tuple[str, str], dict[tuple[str, bool], Record]] = {}
    for architecture in measured:
        for row in results[architecture]["growth"]:
            pair = pairs.setdefault((row["task"], row["axis"]), {})
            pair[architecture, row["library"] == OURS] = row
    for (task, axis), pair in pairs.items():
        line = [task, axis]
        for architecture in measured:
            ours, peer = pair.get((architecture, True)), pair.get((architecture, False))
            if ours is None or peer is None:
                line += ["", "", ""]
                continue
            times = peer["seconds"][-1] / ours["seconds"][-1]
            line += [_exponent(ours), _exponent(peer), _number(times)]
        yield line


def _exponent(growth: Record) -> str:
    return f"{growth['exponent']:.2f} ± {growth['half']:.2f}"


def _rows(
    results: Mapping[str, Record], order: Sequence[str]
) -> Iterable[Sequence[str]]:
    """Yield one line for each comparison, with a ratio for each architecture."""
    yield ("row", "what is compared", *order, "bar")
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for architecture in order:
        prefix = f"{results[architecture]['machine']['cpu']}: "
        for fields in results[architecture]["rows"]:
            row = Row.from_json(fields)
            what = row.what.removeprefix(prefix)
            lines.setdefault((row.name, what), {})[architecture] = row
    for (name, what), measured in sorted(lines.items(), key=lambda line: line[0][0]):
        ratios = []
        for architecture in order:
            row = measured.get(architecture)
            ratios.append("" if row is None else _ratio(row))
        bars = dict.fromkeys(cells(row)[4] for row in measured.values())
        yield (name, what, *ratios, ", ".join(bars))


def _gpu_rows(record: Record) -> Iterable[Sequence[str]]:
    """Yield one line for each comparison, with a ratio for each shape of a model."""
    lines: dict[str, dict[str, Row]] = {}
    for fields in record["rows"]:
        row = Row.from_json(fields)
        what = row.what.removeprefix(f"{record['machine']['cpu']}: ")
        shape, _, rest = what.partition(" shape, ")
        if not rest:
            shape, rest = "no model", what
        # Times and differences in brackets are those of one shape, as are its heads.
        compared = BRACKETS.sub("", HEADS.sub("every head", rest))
        lines.setdefault(compared, {})[shape] = row
    shapes = list(dict.fromkeys(shape for line in lines.values() for shape in line))
    yield ("what is compared", *shapes, "bar")
    for compared, line in lines.items():
        ratios = [_ratio(line[shape]) if shape in line else "" for shape in shapes]
        bars = dict.fromkeys(cells(row)[4] for row in line.values())
        yield (compared, *ratios, ", ".join(filter(None, bars)))


def _ratio(row: Row) -> str:
    """Return the ratio that is held against the bar, bold if it misses it."""
    value = row.cpu
    if row.judged != "cpu" or value is None:
        value = row.wall
    ratio = _number(value)
    return f"**{ratio}**" if row.met is False else ratio


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row with a bar."""
    bar = ""
    if row.bar is not None:
        sign = "≥" if row.at_least else "≤"
        bar = f"{sign} {row.bar:g}"
    return row.name, row.what, _number(row.cpu), _number(row.wall), bar, row.verdict


def _table(lines: Iterable[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *body]) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value < 2:
        return f"{value:.3f}"
    return f"{value:.2f}"
