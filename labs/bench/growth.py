"""Measure how cost grows with tokens, layers, width and texts, for ours and for a peer.

Each exponent is the slope of log CPU seconds over log size. Models have random weights
and Llama's or GPT-2's shape: what a pass costs does not depend on the weights.
"""

import json
import math
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scipy import stats

from hiddenscope.loading import zoo
from labs.bench.peers import beside, tasks
from labs.bench.peers.beside import Task, Workers
from labs.bench.peers.environments import OURS, PLAIN

WORDS, CONFIDENCE = 4096, 0.95
LENS = "TransformerLens"
# Each is one token of smollm2's tokenizer, for texts of a known length.
COMMON = (" the", " of", " and", " to", " in", " a", " is", " that", " for", " it")


@dataclass(frozen=True)
class Sizes:
    """The size of one problem."""

    tokens: int
    layers: int
    width: int
    texts: int


@dataclass(frozen=True)
class Subject:
    """A task, the peer beside ours, where it starts, and what is varied."""

    task: str
    peer: str
    start: Sizes
    axes: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Growth:
    """The exponent of one library's cost along one axis.

    `half` is half of the 95 % interval of the slope, with the residuals around the line
    as the only error.
    """

    task: str
    axis: str
    library: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    exponent: float
    half: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the file of results."""
        return asdict(self)


SUBJECTS = (
    Subject(
        "capture",
        LENS,
        Sizes(tokens=64, layers=4, width=256, texts=4),
        {
            "tokens": (64, 128, 256, 512, 1024),
            "layers": (2, 4, 8, 16, 32),
            "width": (128, 256, 512, 1024),
            "texts": (4, 8, 16, 32, 64),
        },
    ),
    Subject(
        "lens",
        LENS,
        Sizes(tokens=64, layers=4, width=256, texts=1),
        {
            "tokens": (32, 64, 128, 256, 512),
            "layers": (2, 4, 8, 16, 32),
            "width": (128, 256, 512, 1024),
        },
    ),
    Subject(
        "visibility",
        PLAIN,
        Sizes(tokens=8, layers=4, width=256, texts=1),
        {
            "tokens": (4, 8, 16, 32, 64),
            "layers": (2, 4, 8, 16),
            "width": (128, 256, 512, 1024),
        },
    ),
    Subject(
        "patch",
        LENS,
        Sizes(tokens=12, layers=4, width=256, texts=1),
        {
            "tokens": (6, 12, 24, 48, 96),
            "layers": (2, 4, 8, 16),
            "width": (128, 256, 512, 1024),
        },
    ),
    Subject(
        "extract",
        PLAIN,
        Sizes(tokens=64, layers=4, width=256, texts=32),
        {
            "tokens": (32, 64, 128, 256),
            "layers": (2, 4, 8, 16),
            "width": (128, 256, 512, 1024),
            "texts": (32, 64, 128, 256),
        },
    ),
    Subject(
        "probe",
        "scikit-learn",
        Sizes(tokens=1, layers=2, width=128, texts=500),
        {
            "layers": (2, 4, 8, 16),
            "width": (64, 128, 256, 512),
            "texts": (250, 500, 1000, 2000),
        },
    ),
)


def measured(rounds: int, names: Sequence[str] = ()) -> Iterator[list[Growth]]:
    """Measure every task along every axis and yield the exponents of both libraries."""
    with TemporaryDirectory() as folder, beside.workers() as held:
        for subject in SUBJECTS:
            if names and subject.task not in names:
                continue
            for axis, sizes in subject.axes.items():
                place = Path(folder, subject.task, axis)
                yield _along(subject, axis, sizes, place, held, rounds)


def _along(
    subject: Subject,
    axis: str,
    sizes: Sequence[int],
    folder: Path,
    held: Workers,
    rounds: int,
) -> list[Growth]:
    """Measure one axis; a library that fails at a size has no exponent."""
    seconds: dict[str, list[float]] = {}
    for size in sizes:
        problem = replace(subject.start, **{axis: size})
        task = _task(subject, problem, folder / str(size))
        for standing in beside.measured(task, held, rounds):
            if standing.seconds is not None:
                seconds.setdefault(standing.library, []).append(standing.seconds)
        shutil.rmtree(folder / str(size), ignore_errors=True)
    growths = []
    for library, costs in seconds.items():
        if len(costs) < len(sizes):
            continue
        exponent, half = fit(sizes, costs)
        name = subject.peer if library != OURS else OURS
        growths.append(
            Growth(subject.task, axis, name, tuple(sizes), tuple(costs), exponent, half)
        )
    return growths


def fit(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Fit a power law; return its exponent and half of the 95 % interval."""
    line = stats.linregress([math.log(s) for s in sizes], [math.log(c) for c in costs])
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 2)
    return float(line.slope), float(quantile * line.stderr)


def _task(subject: Subject, problem: Sizes, folder: Path) -> Task:
    """Return the task at one size, for ours and the peer, with nothing to compare."""
    task = TASKS[subject.task](problem, folder)
    peer = PLAIN if subject.peer == "scikit-learn" else subject.peer
    return replace(task, libraries=(peer, OURS), reference=peer, tolerance=None)


def _llama(problem: Sizes, folder: Path) -> str:
    tasks.llama(
        folder,
        layers=problem.layers,
        width=problem.width,
        heads=max(1, problem.width // 64),
        words=WORDS,
    )
    for name in tasks.TOKENIZER_FILES:
        source = zoo.zoo_folder("smollm2") / name
        if source.exists():
            shutil.copy(source, folder / name)
    return str(folder)


def _capture(problem: Sizes, folder: Path) -> Task:
    ids = tasks.draw(problem.texts, problem.tokens, WORDS)
    job = {"folder": _llama(problem, folder), "ids": ids}
    return Task("capture", "", job, ())


def _lens(problem: Sizes, folder: Path) -> Task:
    ids = tasks.draw(1, problem.tokens, WORDS)
    job = {"folder": _llama(problem, folder), "ids": ids, "k": tasks.K}
    return Task("lens", "", job, ())


def _visibility(problem: Sizes, folder: Path) -> Task:
    place = tasks.gpt2(folder, problem.layers, problem.width)
    return tasks.visibility_task(place, problem.tokens)


def _patch(problem: Sizes, folder: Path) -> Task:
    place = _llama(problem, folder)
    return tasks.patch_task(place, problem.layers, problem.tokens, (), WORDS)


def _extract(problem: Sizes, folder: Path) -> Task:
    # All texts differ: hiddenscope computes a text that comes twice only once.
    generator = random.Random(0)
    texts = []
    for _ in range(problem.texts):
        words = generator.choices(COMMON, k=problem.tokens)
        texts.append("".join(words))
    place = _llama(problem, folder)
    job = {
        "folder": place,
        "texts": texts,
        "to": str(folder / "extracted"),
        "first_tokens": 1,
    }
    return Task("extract", "", job, ())


def _probe(problem: Sizes, folder: Path) -> Task:
    shape = {
        "layers": problem.layers,
        "rows": problem.texts,
        "width": problem.width,
    }
    return Task("probe", "", {"shape": shape}, ())


TASKS = {
    "capture": _capture,
    "lens": _lens,
    "visibility": _visibility,
    "patch": _patch,
    "extract": _extract,
    "probe": _probe,
}


def picture(
    growths: Sequence[Mapping[str, Any]], architecture: str, path: Path
) -> None:
    """Draw every exponent with its interval, readable on a phone."""
    from matplotlib import pyplot

    keys = list(dict.fromkeys((row["task"], row["axis"]) for row in growths))
    figure, axes = pyplot.subplots(figsize=(3.9, 0.27 * len(keys) + 1.1))
    styles = {True: ("o", "#2457a6", -0.14), False: ("s", "#c8641e", 0.14)}
    for row in growths:
        marker, colour, shift = styles[row["library"] == OURS]
        place = keys.index((row["task"], row["axis"])) + shift
        axes.errorbar(
            row["exponent"],
            place,
            xerr=min(row["half"], 3.0),
            fmt=marker,
            color=colour,
            markersize=4.5,
            linewidth=1.4,
        )
    axes.set_yticks(range(len(keys)))
    axes.set_yticklabels([f"{task}, {axis}" for task, axis in keys], fontsize=8.5)
    axes.set_ylim(len(keys) - 0.4, -0.6)
    axes.set_xlim(-0.5, 3.0)
    axes.set_xticks([0, 1, 2, 3])
    axes.tick_params(axis="x", labelsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"exponent of CPU time, {architecture}", fontsize=9)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for ours, label in ((True, "hiddenscope"), (False, "its peer")):
        marker, colour, _ = styles[ours]
        axes.plot([], [], marker, color=colour, label=label, markersize=5)
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.4, 1.0),
        ncols=2,
        fontsize=8.5,
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=200)
    pyplot.close(figure)


def main() -> None:
    """Measure alone and print, one line for each exponent."""
    for growths in measured(1):
        for growth in growths:
            print(json.dumps(growth.to_json()), flush=True)


if __name__ == "__main__":
    main()
