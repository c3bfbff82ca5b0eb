"""Trials: a claim that has a level, an experiment that puts it to the test again and
again, and what came of it.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from math import inf, nan, sqrt
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

# A bound is missed where the measured share is this many standard errors beyond it.
CERTAIN = 2.0


class Claim(NamedTuple):
    """What is claimed, and the range in which its share must be; without one it is only
    told.
    """

    what: str
    low: float = -inf
    high: float = inf

    def __str__(self) -> str:
        ends = [f"≥ {self.low:.0%}"] * (self.low > 0) + [f"≤ {self.high:.0%}"] * (
            self.high < 1
        )
        return f"{self.what} ({', '.join(ends)})" if ends else self.what


class Share(NamedTuple):
    """How often something was so, and the standard error of that; NaN where there is
    but one number.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, by_run: Sequence[float]) -> "Share":
        """From one number a run; runs in which it did not apply are NaN."""
        known = np.array([one for one in by_run if one == one], dtype=float)
        count = len(known)
        if count < 2:
            return cls(float(known[0]) if count else nan, nan)
        # Where all runs agree they show no spread: it is supposed that one more would
        # have been the other way.
        spread = (
            float(known.std(ddof=1)) if np.ptp(known) else sqrt(count) / (count + 1)
        )
        return cls(float(known.mean()), spread / sqrt(count))

    def meets(self, claim: Claim) -> bool:
        """Whether the share is in the claimed range, or out of it by no more than
        chance explains.
        """
        slack = CERTAIN * self.error if self.error == self.error else 0.0
        return (
            self.mean != self.mean
            or claim.low - slack <= self.mean <= claim.high + slack
        )


Trials = Callable[[Sequence[int], str, int], Sequence[Any]]
"""From seeds, a device and a number of processes: what came of the trial of each seed.
"""


@dataclass(frozen=True)
class Experiment:
    """A condition, its trials, and how they are summed up, one number a run."""

    what: str
    trials: Trials
    sum_up: Callable[[Sequence[Any]], Mapping[str, Sequence[float]]]

    def run(self, runs: int, device: str, jobs: int, first: int = 0) -> "Row":
        """This many runs, with seeds from `first` on."""
        records = self.trials(range(first, first + runs), device, jobs)
        return Row(
            self.what,
            runs,
            {key: Share.of(by_run) for key, by_run in self.sum_up(records).items()},
            _machine(device),
        )


def _machine(device: str) -> str:
    """The architecture, and the GPU where there was one."""
    import torch

    return platform.machine() + (
        f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    )


def each(trial: Callable[[int], Any]) -> Trials:
    """Trials that are made one by one, on processors, by a picklable function of a
    seed.
    """
    return lambda seeds, device, jobs: mapped(trial, seeds, jobs)


def mapped(
    function: Callable[[int], Any], seeds: Sequence[int], jobs: int
) -> list[Any]:
    """The function of every seed, in this many processes."""
    if jobs == 1:
        return [function(seed) for seed in seeds]
    return list(_pool(jobs).map(function, seeds, chunksize=5))


@cache
def _pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that serve all experiments, since each takes seconds to start."""
    return ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_one_thread
    )


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@dataclass(frozen=True)
class Row:
    """What came of an experiment."""

    what: str
    runs: int
    shares: dict[str, Share]
    machine: str

    def to_json(self) -> dict[str, Any]:
        shares = {
            key: [None if one != one else one for one in share]
            for key, share in self.shares.items()
        }
        return {"runs": self.runs, "machine": self.machine, "shares": shares}

    @classmethod
    def from_json(cls, what: str, given: Mapping[str, Any]) -> "Row":
        shares = {
            key: Share(*(nan if one is None else one for one in pair))
            for key, pair in given["shares"].items()
        }
        return cls(what, given["runs"], shares, given["machine"])


@dataclass(frozen=True)
class Study:
    """The claims of one analysis by key, and the experiments that test them; a table of
    the page.
    """

    name: str
    introduction: str
    claims: Mapping[str, Claim]
    experiments: Sequence[Experiment] = field(default=())
