"""Run one task in every library that has it, in turn, and compare costs and numbers."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np

from labs.bench import measure
from labs.bench.measure import Cost, Row
from labs.bench.peers.environments import (
    LIBRARIES,
    OURS,
    PLAIN,
    ROOT,
    Library,
    variables,
)

# How many times longer a peer must take than ours: task, peer, bar.
BARS = (
    ("patch", "TransformerLens", 8.0),
    ("heads", "TransformerLens", 6.0),
    ("heads, shared prefix", "TransformerLens", 10.0),
    ("edges", "TransformerLens", 5.0),
    ("integrated edges", PLAIN, 5.0),
)


@dataclass(frozen=True)
class Task:
    """A task: its word in the libraries' files, its inputs, and who is asked.

    Numbers agree where the largest difference in an array is at most `tolerance` times
    the largest number of the reference's. Without a tolerance there is nothing to
    compare.
    """

    name: str
    what: str
    job: Mapping[str, Any]
    libraries: tuple[str, ...]
    word: str = ""
    tolerance: float | None = 1e-4
    reference: str = PLAIN
    memory: bool = False

    @property
    def function(self) -> str:
        """Return the name of the function that does the task."""
        return self.word or self.name


@dataclass(frozen=True)
class Standing:
    """What one library takes for a task, as a ratio to the reference's."""

    task: str
    what: str
    library: str
    cpu: float | None = None
    wall: float | None = None
    # CPU seconds of a run, or bytes where the task is about memory.
    seconds: float | None = None
    numbers: str = ""
    skipped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the file of results."""
        return asdict(self)


class Failed(Exception):
    """A library could not do what was asked."""


class Process:
    """A worker of one library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        # A file and not a pipe: a pipe that nobody reads fills up and blocks.
        self.errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115, see stop
        self.process = subprocess.Popen(
            [library.python, "-m", "labs.bench.peers.worker", library.module],
            cwd=ROOT,
            env=variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, do: str, **order: Any) -> Any:
        """Send an order and return its answer."""
        self.send(do, **order)
        return self.receive()

    def send(self, do: str, **order: Any) -> None:
        """Send an order without waiting for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None

    def receive(self) -> Any:
        """Wait for the answer to the last order."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["answer"]

    def _last_words(self) -> str:
        """Say that the process is gone, with the last line that it wrote."""
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"it stopped: {said[-1]}" if said else "it stopped"

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # An order that a dead worker never read is flushed here.
                with suppress(BrokenPipeError):
                    pipe.close()
        self.errors.close()


class Workers:
    """The workers of all libraries, each started when it is first needed."""

    def __init__(self) -> None:
        self.running: dict[str, Process] = {}

    def of(self, name: str) -> Process:
        """Return the worker of a library."""
        library = LIBRARIES[name]
        if library.missing:
            raise Failed(library.missing)
        if name not in self.running:
            self.running[name] = Process(library)
        return self.running[name]

    def stop(self) -> None:
        """End all workers."""
        for process in self.running.values():
            process.stop()
        self.running.clear()


@contextmanager
def workers() -> Iterator[Workers]:
    """Hold workers, and end them in any case."""
    held = Workers()
    try:
        yield held
    finally:
        held.stop()


def measured(task: Task, held: Workers, rounds: int) -> list[Standing]:
    """Measure a task in every library, one run after the other, round after round."""
    with TemporaryDirectory() as folder:
        ready, failures = _prepared(task, held, Path(folder))
        costs = _interleaved(task, held, ready, rounds, failures)
        numbers = _numbers(task, held, list(costs), Path(folder), failures)
    standings = []
    for name in task.libraries:
        if name in failures:
            reason = failures[name]
            standings.append(Standing(task.name, task.what, name, skipped=reason))
        else:
            standings.append(_standing(task, name, costs, numbers))
    return standings


def _standing(
    task: Task,
    name: str,
    costs: Mapping[str, list[Cost]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> Standing:
    if task.reference not in costs:
        reason = f"{task.reference} could not be measured"
        return Standing(task.name, task.what, name, skipped=reason)
    ratio = measure.ratios(costs, task.reference)[name]
    seconds = measure.median(costs[name]).cpu
    agreement = ""
    if task.tolerance is not None and name != task.reference:
        agreement = "NO REFERENCE"
        if task.reference in numbers:
            agreement = compare(numbers[task.reference], numbers[name], task.tolerance)
    return Standing(
        task.name, task.what, name, ratio.cpu, ratio.wall, seconds, agreement
    )


def _prepared(
    task: Task, held: Workers, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Prepare a task everywhere; return who is ready, and why the others are not."""
    path = folder / "job.json"
    path.write_text(json.dumps(task.job), encoding="utf-8")
    failures: dict[str, str] = {}
    asked, ready = [], []
    # All prepare at once, since nothing is timed yet.
    for name in task.libraries:
        try:
            held.of(name).send("prepare", task=task.function, job=str(path))
            asked.append(name)
        except Failed as failure:
            failures[name] = str(failure)
    for name in asked:
        try:
            held.of(name).receive()
            ready.append(name)
        except Failed as failure:
            failures[name] = str(failure)
    return ready, failures


def _interleaved(
    task: Task,
    held: Workers,
    ready: Sequence[str],
    rounds: int,
    failures: dict[str, str],
) -> dict[str, list[Cost]]:
    """Run the libraries in turn; whoever fails is out."""
    costs: dict[str, list[Cost]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name in list(costs):
            try:
                costs[name].append(_cost(task, held.of(name)))
            except Failed as failure:
                failures[name] = str(failure)
                del costs[name]
    return costs


def _cost(task: Task, process: Process) -> Cost:
    if task.memory:
        # Of the whole process: what a task adds cannot be told, since it may reuse
        # memory that was freed before and is still held.
        most = process.ask("peak")["most"]
        return Cost(most, most)
    answer = process.ask("run")
    return Cost(answer["cpu"], answer["wall"])


def _numbers(
    task: Task,
    held: Workers,
    names: Sequence[str],
    folder: Path,
    failures: dict[str, str],
) -> dict[str, Mapping[str, Any]]:
    """Collect the numbers of every library, by files."""
    if task.tolerance is None:
        return {}
    collected: dict[str, Mapping[str, Any]] = {}
    for name in names:
        path = folder / f"{LIBRARIES[name].module}.npz"
        try:
            held.of(name).ask("numbers", to=str(path))
        except Failed as failure:
            failures[name] = str(failure)
            continue
        with np.load(path) as arrays:
            collected[name] = dict(arrays)
    return collected


def compare(
    reference: Mapping[str, Any], other: Mapping[str, Any], tolerance: float
) -> str:
    """Say whether two sets of named arrays agree, and how far apart they are.

    Distances are relative to the largest number of each array of the reference.
    """
    common = [name for name in reference if name in other]
    if not common:
        return "NO NUMBERS IN COMMON"
    largest = 0.0
    for name in common:
        left, right = reference[name], other[name]
        if left.shape != right.shape:
            return f"DIFFER: {name} has {right.size} numbers, not {left.size}"
        scale = float(np.abs(left).max()) or 1.0
        apart = float(np.abs(left - right).max()) / scale
        # `max` would pass over a NaN.
        if not np.isfinite(apart):
            return f"DIFFER: {name} holds numbers that are not finite"
        largest = max(largest, apart)
    if largest > tolerance:
        return f"DIFFER by {largest:.0e}"
    part = ""
    if len(common) < len(reference):
        part = f" ({len(common)} of {len(reference)} arrays)"
    return f"same to {largest:.0e}{part}"


def rows_with_bars(standings: Sequence[Standing]) -> list[Row]:
    """Return the rows of peers that have a bar: theirs / ours.

    Both are medians of ratios to the same reference. Of libraries whose numbers differ
    nothing is said.
    """
    known = {(standing.task, standing.library): standing for standing in standings}
    rows = []
    for task, peer, bar in BARS:
        ours, theirs = known.get((task, OURS)), known.get((task, peer))
        if ours is None or theirs is None:
            continue
        what = f"{theirs.what}: {peer} / ours"
        name = f"{task} peer"
        reason = theirs.skipped or ours.skipped
        for standing in (ours, theirs):
            if standing.numbers and not standing.numbers.startswith("same"):
                reason = f"the numbers of {standing.library}: {standing.numbers}"
        if reason or not (ours.cpu and ours.wall and theirs.cpu and theirs.wall):
            rows.append(Row(name, what, bar=bar, at_least=True, skipped=reason))
            continue
        cpu, wall = theirs.cpu / ours.cpu, theirs.wall / ours.wall
        rows.append(Row(name, what, cpu, wall, bar, at_least=True))
    return rows
