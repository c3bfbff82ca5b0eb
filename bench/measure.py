"""What a computation costs: CPU time, wall time and memory, always one way beside
another in the same run.
"""

import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Seconds of CPU time, over all threads, and of wall time."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Row:
    """One line of the table: how two ways compare, and the bar that one of them should
    meet.

    `cpu` and `wall` are ratios; `judged` names the one that is held against the bar. A
    row without a bar is there to be read beside the others; a row that could not be
    measured says why in `skipped`.
    """

    name: str
    what: str
    cpu: float | None = None
    wall: float | None = None
    bar: float | None = None
    at_least: bool = False
    judged: str = "cpu"
    skipped: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is no bar, or nothing was measured."""
        value = self.cpu if self.judged == "cpu" else self.wall
        if self.bar is None or value is None:
            return None
        return value >= self.bar if self.at_least else value <= self.bar

    @property
    def verdict(self) -> str:
        """The same in a word."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return {True: "met", False: "MISSED", None: ""}[self.met]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Row":
        return cls(**{name: value for name, value in fields.items() if name != "met"})


def interleaved(
    ways: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    before: Callable[[], Any] = gc.collect,
    warm: bool = True,
) -> dict[str, list[Cost]]:
    """Run each way in turn, round after round, so that a slow minute of the machine is
    shared by all of them.

    Each way is first run once unmeasured, unless `warm` is False. What a way returns is
    let go when its time is known.
    """
    for way in ways.values() if warm else ():
        way()
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            before()
            wall, cpu = time.perf_counter(), time.process_time()
            kept = way()
            costs[name].append(
                Cost(time.process_time() - cpu, time.perf_counter() - wall)
            )
            del kept
    return costs


def ratios(costs: Mapping[str, list[Cost]], reference: str) -> dict[str, Cost]:
    """What each way costs for one of the reference: the median over rounds of the ratio
    within the round.
    """
    base = costs[reference]
    return {
        name: Cost(
            statistics.median(a.cpu / b.cpu for a, b in zip(own, base, strict=True)),
            statistics.median(a.wall / b.wall for a, b in zip(own, base, strict=True)),
        )
        for name, own in costs.items()
    }


def median(costs: list[Cost]) -> Cost:
    """The median of each time by itself."""
    return Cost(
        statistics.median(cost.cpu for cost in costs),
        statistics.median(cost.wall for cost in costs),
    )


def peak(way: Callable[[], Any]) -> int:
    """The most memory that the process held while the way ran, in bytes; Linux only.

    Memory that was freed before is given back to the system first, so that it cannot
    hide what the way needs.
    """
    gc.collect()
    _give_back_freed()
    # The high-water mark starts again from here.
    Path("/proc/self/clear_refs").write_text("5")
    kept = way()
    most = resident("VmHWM")
    del kept
    return most


def resident(which: str = "VmRSS") -> int:
    """The memory that the process holds now (VmRSS), or held at most (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def machine() -> dict[str, Any]:
    """What the numbers were measured on; nothing that would tell whose machine it is."""
    import torch
    import transformers

    return {
        "cpu": _cpu(),
        "architecture": platform.machine(),
        "cores": (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count()
        ),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hiddenscope": version("hiddenscope"),
        "load": round(os.getloadavg()[0], 1),
    }


def _give_back_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cpu() -> str:
    """The CPU's model; on some machines the kernel knows numbers only, and lscpu the
    name.
    """
    import subprocess

    try:
        listing = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    names = [
        line.partition(":")[2].strip()
        for line in listing.splitlines()
        if line.startswith("Model name")
    ]
    return names[0] if names else platform.machine()
