"""Write docs/bench.md: the peers first, then how cost grows, then every row."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labs.bench.measure import Row
from labs.bench.peers.environments import NNTERP, OURS, PEERS, PLAIN

PATH = Path(__file__).parents[2] / "docs" / "bench.md"
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
    "visibility",
    "embed",
    "drift",
)
# Packages that every environment has in the version of the machine's record.
SHARED = ("torch==", "transformers==")
INTRODUCTION = """\
# What it costs

You find here what a task costs in hiddenscope, in other libraries and in plain Hugging Face code, how that cost grows, and
how far hiddenscope is from the bare forward pass. `make bench` writes this page; no number is typed in by hand.
"""
BESIDE = """\
## Beside its peers

Ratios to plain Hugging Face code for the same task: of CPU time, except in the row memory, which is the peak memory of the
process. 2.00 takes twice as much. The least of each row is bold, whoever it is, with all that are within 3 % of it. An empty
cell is not offered by that library, or was not measured; the table below says which.

- Every library does the task as its documentation recommends, without gradients (visibility is made of them), and stops the
  pass early where it can. Plain Hugging Face runs the whole pass.
- The libraries run in turn, round after round, in processes of their own. A ratio is the median over rounds.
- We are ahead where passes are shared (patch and visibility: plain code makes one for each cell or target), and where nothing
  is padded (ragged corpus, extract, embed).
- Drift does more than the plain difference: it runs both models again, finds the block, and tells rounding from a fault.
"""
DETAILS = """\
The tasks in full. "Same to 1e-06" is the largest difference from the numbers of plain Hugging Face, relative to the
largest of them; DIFFER says that they are not the same.
"""
GROWTH = """\
## How cost grows

The exponent of CPU time in one size while the others stay: 1 means that twice the tokens take twice the time. It is the
slope of a line through the logarithms of at least four sizes, with the 95 % interval of that slope. A wide interval means
that cost is no power of the size in this range; a fixed cost makes the exponent smaller than it is for large sizes. Models
have random weights and the shape of Llama (GPT-2 for visibility). The peer of capture, lens and patch is TransformerLens,
of visibility a loop of backward passes, of extract a loop with `torch.save`, of probe scikit-learn.

![Exponents of CPU time for hiddenscope and its peers](pictures/growth.png)
"""
ROWS = """\
## Every row

One table for each architecture that was measured. Every number is a ratio of two ways run in turn in one process, the
median over several rounds. CPU time counts all threads. The bar is compared with CPU time, on a GPU with wall time; memory
has one ratio, which stands under CPU. A bare pass is the module's own forward under `no_grad`, with nothing else asked of
it. A run replaces its rows in the table of its own architecture and leaves the others as they were measured, with the bars
of that time.
"""
TITLE = """\
### {architecture}: {cpu}

{cores} cores, {threads} torch threads, Python {python}, torch {torch}, transformers {transformers}, hiddenscope
{hiddenscope}. Medians of several rounds, thrice as many for rows that take a second, fewer for those that take
minutes. The load average is that of the moment when they began.

{runs}
"""
GPU_TITLE = """\
### {architecture}: {cpu}

Measured by `python -m labs.bench.gpu`, hiddenscope {hiddenscope}.
"""
Record = Mapping[str, Any]


def page(results: Mapping[str, Record]) -> str:
    """Return the page of everything that was measured."""
    order = architectures(results)
    parts = [INTRODUCTION]
    parts += _beside(results, order)
    parts += _growth(results, order)
    parts.append(ROWS)
    for architecture in order:
        parts += _rows(architecture, results[architecture])
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
        parts.append(_remarks(standings))
        parts.append(_versions(results[architecture]))
    parts.append(DETAILS)
    for architecture in measured:
        parts.append(f"{_machine_line(results[architecture])}.\n")
        parts.append(_table(details(results[architecture]["peers"])))
    return parts


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


def _remarks(standings: Sequence[Record]) -> str:
    """Say who is ahead of us, and by how much."""
    lines = []
    for task, here in _by_task(standings).items():
        ratios = _cpu_ratios(here)
        ours = ratios.get(OURS)
        if ours is None:
            continue
        amount = "much" if task == "memory" else "long"
        for library, ratio in ratios.items():
            times = ours / ratio
            if times > TIE:
                lines.append(
                    f"- {task}: {library} is ahead; hiddenscope takes {_number(times)}"
                    f" times as {amount}."
                )
    return "\n".join(lines) + "\n"


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


def _growth(results: Mapping[str, Record], order: Sequence[str]) -> list[str]:
    """Return the tables of exponents."""
    measured = [name for name in order if results[name].get("growth")]
    if not measured:
        return []
    parts = [GROWTH]
    for architecture in measured:
        parts.append(f"{_machine_line(results[architecture])}.\n")
        parts.append(_table(_exponents(results[architecture]["growth"])))
    return parts


def _exponents(growths: Sequence[Record]) -> Iterable[Sequence[str]]:
    """Yield one line for each task and axis: ours, the peer's, and both costs."""
    yield (
        "task",
        "grows in",
        "sizes",
        "hiddenscope",
        "peer",
        "which",
        "at the largest",
    )
    pairs: dict[tuple[str, str], dict[bool, Record]] = {}
    for row in growths:
        pair = pairs.setdefault((row["task"], row["axis"]), {})
        pair[row["library"] == OURS] = row
    for (task, axis), pair in pairs.items():
        if len(pair) < 2:
            continue
        ours, peer = pair[True], pair[False]
        sizes = ", ".join(str(size) for size in ours["sizes"])
        times = peer["seconds"][-1] / ours["seconds"][-1]
        yield (
            task,
            axis,
            sizes,
            _exponent(ours),
            _exponent(peer),
            peer["library"],
            f"the peer takes {_number(times)} times ours",
        )


def _exponent(growth: Record) -> str:
    return f"{growth['exponent']:.2f} ± {growth['half']:.2f}"


def _rows(architecture: str, record: Record) -> list[str]:
    title = GPU_TITLE if architecture == "cuda" else TITLE
    runs = "\n".join(_run(run) for run in record["runs"])
    lines = [cells(Row.from_json(row)) for row in record["rows"]]
    return [title.format(**record["machine"], runs=runs), _table([HEAD, *lines])]


def _run(run: Record) -> str:
    names = ", ".join(run["rows"])
    return f"- {run['repeats']} rounds, load average {run['load']}: {names}"


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
