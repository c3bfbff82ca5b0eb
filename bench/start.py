"""How soon a command answers, against importing what it works with."""

import gc
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import measure
from bench.measure import Cost, Row

IMPORT = "python -c 'import torch, transformers'"
# The last is refused: it is the name of a file.
BARS = {
    "--help": 0.1,
    "--version": 0.03,
    "lens corpus.txt": 0.2,
}
STATUS, STATUS_BAR = "lens --progress --nosuch", 0.05


def rows(repeats: int) -> list[Row]:
    """What each command costs for one `import torch, transformers`, each in a process
    of its own.
    """
    script = Path(sys.executable).parent / "hiddenscope"
    if not script.exists():
        return [
            Row(
                "start",
                "hiddenscope --help",
                skipped="the command is not installed beside this Python",
            )
        ]
    reference = [sys.executable, "-c", "import torch, transformers"]
    costs: dict[str, list[Cost]] = {name: [] for name in (*BARS, STATUS, IMPORT)}
    for round_ in range(repeats + 1):
        for name, kept in costs.items():
            gc.collect()
            command = reference if name == IMPORT else [str(script), *name.split()]
            cost = until_status(command) if name == STATUS else child(command)
            if round_:  # the first round fills the file cache
                kept.append(cost)
    ratios = measure.ratios(costs, IMPORT)
    whole = [
        Row(
            "start",
            f"hiddenscope {name} / {IMPORT}",
            ratios[name].cpu,
            ratios[name].wall,
            BARS[name],
        )
        for name in BARS
    ]
    what = f"hiddenscope lens, until its status is on stderr / {IMPORT}"
    return [
        *whole,
        Row("start", what, None, ratios[STATUS].wall, STATUS_BAR, judged="wall"),
    ]


def child(command: Sequence[str]) -> Cost:
    """What a command costs, with all the processes that it starts and waits for."""
    before, wall = _used(), time.perf_counter()
    ended = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if ended.returncode not in (0, 2):  # 2: the argument was refused, as it should be
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}.")
    return Cost(_used() - before, time.perf_counter() - wall)


def until_status(command: Sequence[str]) -> Cost:
    """The time until the first line on stderr; the CPU time is that of the whole
    command.
    """
    before, wall = _used(), time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        seconds = time.perf_counter() - wall
        process.stderr.read()
    if line != "Running lens ...\n":
        raise RuntimeError(
            f"The first line on stderr must be the status, got {line!r}."
        )
    return Cost(_used() - before, seconds)


def _used() -> float:
    """Seconds of CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
