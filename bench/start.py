"""How soon the command answers, against importing what it works with."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import measure
from bench.measure import Cost, Row

BAR = 0.1


def rows(repeats: int) -> list[Row]:
    """`hiddenscope --help` for one `import torch, transformers`, each in a process of its own."""
    script = Path(sys.executable).parent / "hiddenscope"
    if not script.exists():
        return [Row("start", "hiddenscope --help", skipped="the command is not installed beside this Python")]
    commands = {
        "help": [str(script), "--help"],
        "import": [sys.executable, "-c", "import torch, transformers"],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for round_ in range(repeats + 1):
        for name, command in commands.items():
            gc.collect()
            cost = child(command)
            if round_:  # the first round fills the file cache
                costs[name].append(cost)
    ratio = measure.ratios(costs, "import")["help"]
    return [Row("start", "hiddenscope --help / python -c 'import torch, transformers'", ratio.cpu, ratio.wall, BAR)]


def child(command: Sequence[str]) -> Cost:
    """What a command costs, with all the processes that it starts and waits for."""
    before, wall = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return Cost(used, time.perf_counter() - wall)
