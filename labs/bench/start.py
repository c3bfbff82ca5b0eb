"""Measure how soon a command answers, and how long each library takes to import."""

import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from labs.bench import measure
from labs.bench.measure import Cost, Row
from labs.bench.peers.environments import LIBRARIES, PLAIN, variables

IMPORT = "python -c 'import torch, transformers'"
# The last is refused: it is the name of a file.
BARS = {
    "--help": 0.1,
    "--version": 0.03,
    "lens corpus.txt": 0.2,
}
STATUS, STATUS_BAR = "lens --progress --nosuch", 0.05
REFERENCE = [sys.executable, "-c", "import torch, transformers"]


def rows(repeats: int) -> list[Row]:
    """Compare commands and imports with one `import torch, transformers`."""
    return [*_commands(repeats), *_imports(repeats)]


def _commands(repeats: int) -> list[Row]:
    """Time each command in a process of its own."""
    script = Path(sys.executable).parent / "hiddenscope"
    if not script.exists():
        reason = "the command is not installed beside this Python"
        return [Row("start", "hiddenscope --help", skipped=reason)]
    ways: dict[str, Callable[[], Cost]] = {IMPORT: lambda: child(REFERENCE)}
    for name in BARS:
        ways[name] = _command([str(script), *name.split()])
    ways[STATUS] = lambda: until_status([str(script), *STATUS.split()])
    ratios = measure.ratios(_in_turn(ways, repeats), IMPORT)
    made = []
    for name, bar in BARS.items():
        what = f"hiddenscope {name} / {IMPORT}"
        made.append(Row("start", what, ratios[name].cpu, ratios[name].wall, bar))
    what = f"hiddenscope lens, until its status is on stderr / {IMPORT}"
    wall = ratios[STATUS].wall
    return [*made, Row("start", what, None, wall, STATUS_BAR, judged="wall")]


def _imports(repeats: int) -> list[Row]:
    """Time `import` of every library that is installed, each in its environment."""
    present = [library for library in LIBRARIES.values() if not library.missing]
    ways = {}
    for library in present:
        ways[library.name] = _command(
            [library.python, "-c", f"import {library.imported}"]
        )
    ratios = measure.ratios(_in_turn(ways, repeats), PLAIN)
    made = []
    for library in LIBRARIES.values():
        if library.name == PLAIN:
            continue
        what = f"import {library.imported} / import torch, transformers"
        if library.missing:
            made.append(Row("import", what, skipped=library.missing))
            continue
        cost = ratios[library.name]
        made.append(Row("import", what, cost.cpu, cost.wall))
    return made


def _command(command: Sequence[str]) -> Callable[[], Cost]:
    return lambda: child(command)


def _in_turn(
    ways: Mapping[str, Callable[[], Cost]], repeats: int
) -> dict[str, list[Cost]]:
    """Run processes in turn; the first round fills the file cache and is left out."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            gc.collect()
            cost = way()
            if number:
                costs[name].append(cost)
    return costs


def child(command: Sequence[str]) -> Cost:
    """Return what a command costs, with the processes that it starts and waits for."""
    before, wall = _used(), time.perf_counter()
    ended = subprocess.run(
        command,
        env=variables(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # 2: the argument was refused, as it should be.
    if ended.returncode not in (0, 2):
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}.")
    return Cost(_used() - before, time.perf_counter() - wall)


def until_status(command: Sequence[str]) -> Cost:
    """Return the time until the first line on stderr, and the CPU time of it all."""
    before, wall = _used(), time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        seconds = time.perf_counter() - wall
        process.stderr.read()
    if line != "Running lens ...\n":
        message = f"The first line on stderr must be the status, got {line!r}."
        raise RuntimeError(message)
    return Cost(_used() - before, seconds)


def _used() -> float:
    """Return the seconds of CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
