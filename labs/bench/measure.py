"""Measure CPU time, wall time and memory, always one way beside another in one run."""

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
        """Tell whether the bar is met; None without a bar, or without a number."""
        value = self.cpu if self.judged == "cpu" else self.wall
        if self.bar is None or value is None:
            return None
        return value >= self.bar if self.at_least else value <= self.bar

    @property
    def verdict(self) -> str:
        """Return the same in a word."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return {True: "met", False: "MISSED", None: ""}[self.met]

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the file of results."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Row":
        """Return the row that was kept."""
        known = dict(fields)
        known.pop("met", None)
        return cls(**known)


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
    if warm:
        for way in ways.values():
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
    """Return what each way costs for one of the reference.

    It is the median over rounds of the ratio within the round.
    """
    made = {}
    for name, measured in costs.items():
        cpu, wall = [], []
        for cost, base in zip(measured, costs[reference], strict=True):
            cpu.append(cost.cpu / base.cpu)
            wall.append(cost.wall / base.wall)
        made[name] = Cost(statistics.median(cpu), statistics.median(wall))
    return made


def median(costs: list[Cost]) -> Cost:
    """Return the median of each time by itself."""
    return Cost(
        statistics.median(cost.cpu for cost in costs),
        statistics.median(cost.wall for cost in costs),
    )


def peak(way: Callable[[], Any]) -> int:
    """Return the most bytes that the process held while the way ran; Linux only.

    Memory that was freed before is given back to the system first, so that it cannot
    hide what the way needs.
    """
    gc.collect()
    give_back_freed()
    # The high-water mark starts again from here.
    Path("/proc/self/clear_refs").write_text("5")
    kept = way()
    most = resident("VmHWM")
    del kept
    return most


def resident(which: str = "VmRSS") -> int:
    """Return the bytes that the process holds now (VmRSS), or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    for line in lines:
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {which} in /proc/self/status")


def machine() -> dict[str, Any]:
    """Describe the machine; nothing tells whose it is."""
    import torch
    import transformers

    return {
        "cpu": _cpu(),
        "architecture": platform.machine(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hiddenscope": version("hiddenscope"),
        "load": round(os.getloadavg()[0], 1),
    }


def give_back_freed() -> None:
    """Return the memory that was freed to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    """Return the model of the CPU, which only lscpu knows on some machines."""
    import subprocess

    try:
        listing = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    for line in listing.splitlines():
        if line.startswith("Model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
