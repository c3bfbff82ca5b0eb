"""Run the cases of every kind, print the table, and name what went wrong."""

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from labs.fuzz import (
    adapters,
    calls,
    dictionaries,
    disk,
    folders,
    interrupts,
    saved,
    texts,
)
from labs.fuzz.sandbox import Case, Outcome, sandboxed

Make = Callable[[int, int, Path], Iterator[Case]]
KINDS: dict[str, tuple[Make, float]] = {  # and how many of each, for one of --cases
    "folders": (folders.folders, 1.0),
    "adapters": (adapters.cases, 0.2),
    "dictionaries": (dictionaries.cases, 0.2),
    "gguf": (folders.ggufs, 1.0),
    "saved": (saved.cases, 0.06),
    "disk": (disk.cases, 0.01),
    "texts": (texts.cases, 0.25),
    "sites": (texts.sites, 4.0),
    "calls": (calls.cases, 1.6),
    "interrupts": (interrupts.cases, 2.0),
}
# Cases in one process, where starting one takes longer than the case.
TOGETHER = {"calls": 50}
GOOD = {"loaded", "answered", "clean", "refused"}
HEAD = (
    "kind",
    "cases",
    "worked",
    "refused",
    "foreign",
    "timeout",
    "memory",
    "crashed",
    "different",
    "s",
    "MB",
)


@dataclass
class Line:
    """One line of the table: how often each verdict, and the most time and memory that
    a case took.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one more case."""
        bad = outcome.verdict.startswith(("left", "locked"))
        self.verdicts["different" if bad else outcome.verdict] += 1
        self.seconds, self.memory = (
            max(self.seconds, outcome.seconds),
            max(self.memory, outcome.memory),
        )

    def cells(self, kind: str) -> list[str]:
        """The line in words."""
        worked = sum(self.verdicts[verdict] for verdict in GOOD - {"refused"})
        rest = [self.verdicts[verdict] for verdict in HEAD[3:9]]
        numbers = [
            self.verdicts.total(),
            worked,
            *rest,
            round(self.seconds, 1),
            self.memory // 2**20,
        ]
        return [kind, *(f"{number:,}" for number in numbers)]


def main() -> int:
    """Parse, run, print; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m labs.fuzz", description=__doc__)
    parser.add_argument(
        "--cases",
        type=int,
        default=10_000,
        help="how many folders; the other kinds in proportion",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed makes other cases"
    )
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=list(KINDS), help="some kinds alone"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="cases at a time"
    )
    options = parser.parse_args()
    _quiet()
    lines: dict[str, Line] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
        for name in options.only:
            make, share = KINDS[name]
            begin, count = time.monotonic(), max(1, round(options.cases * share))
            together = TOGETHER.get(name, 1)
            for outcome in sandboxed(
                make(count, options.seed, Path(work)),
                options.workers,
                together=together,
            ):
                line = lines.setdefault(outcome.case.kind, Line())
                line.add(outcome)
                if line.verdicts.total() % 500 == 0:
                    print(
                        f"{outcome.case.kind}: {dict(line.verdicts)}",
                        file=sys.stderr,
                        flush=True,
                    )
                if outcome.verdict not in GOOD:
                    print(
                        f"{outcome.verdict}: {outcome.case.name} {outcome.detail}",
                        flush=True,
                    )
            print(
                f"{name}: {time.monotonic() - begin:,.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print("\n".join(table(lines)))
    return int(any(set(line.verdicts) - GOOD for line in lines.values()))


def table(lines: dict[str, Line]) -> list[str]:
    """The table, as Markdown."""
    rows = [
        list(HEAD),
        ["---"] * len(HEAD),
        *(line.cells(kind) for kind, line in lines.items()),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _quiet() -> None:
    """One thread to a case, and nothing that transformers wants to say."""
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
