"""Run the tasks of one library in a process of its own, on orders from stdin.

An order is a line of JSON, and so is each answer. It runs in the environment of the
library: `python -m labs.bench.peers.worker transformer_lens_`.
"""

import gc
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import numpy as np

from labs.bench import measure
from labs.bench.peers.ways import Way, flat


class Worker:
    """The task at hand, and what can be ordered of it."""

    def __init__(self, module: str) -> None:
        self.library = importlib.import_module(f"labs.bench.peers.{module}")
        self.way: Way | None = None

    def answer(self, order: dict[str, Any]) -> Any:
        """Do what an order says and return what is to be answered."""
        return getattr(self, order.pop("do"))(**order)

    def prepare(self, task: str, job: str) -> dict[str, Any]:
        """Load what a task needs from its file, and run it once unmeasured."""
        self.way = None
        gc.collect()
        with open(job, encoding="utf-8") as file:
            inputs = json.load(file)
        self.way = getattr(self.library, task)(inputs)
        self._ready().run()
        return {}

    def run(self) -> dict[str, float]:
        """Run the task and return its seconds of CPU and of wall time."""
        way = self._ready()
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        result = way.run()
        cost = time.process_time() - cpu, time.perf_counter() - wall
        del result
        return {"cpu": cost[0] * way.times, "wall": cost[1] * way.times}

    def peak(self) -> dict[str, int]:
        """Return the most bytes that the process held while the task ran."""
        return {"most": measure.peak(self._ready().run)}

    def numbers(self, to: str) -> dict[str, Any]:
        """Run the task and write its numbers to a file."""
        way = self._ready()
        named = way.numbers(way.run())
        arrays = {name: flat(value) for name, value in named.items()}
        np.savez(to, **arrays)
        return {}

    def _ready(self) -> Way:
        if self.way is None:
            raise RuntimeError("no task is prepared")
        return self.way


def main() -> None:
    """Answer orders until stdin ends."""
    answers = _own_stdout()
    import torch

    torch.set_grad_enabled(False)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = {"answer": worker.answer(json.loads(line))}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            answer = {"error": " ".join(text.split())[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _own_stdout() -> TextIO:
    """Keep stdout for answers, and send what libraries print there to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
