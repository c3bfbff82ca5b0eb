"""Trials: a claim that has a level, an experiment that puts it to the test again and again, and what came of it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import inf, nan, sqrt
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

CERTAIN = 2.0  # a bound is missed where the measured share is this many standard errors beyond it


class Claim(NamedTuple):
    """What is claimed, and the range in which its share must be; without one it is only told."""

    what: str
    low: float = -inf
    high: float = inf

    def __str__(self) -> str:
        ends = [f"≥ {self.low:.0%}"] * (self.low > 0) + [f"≤ {self.high:.0%}"] * (self.high < 1)
        return f"{self.what} ({', '.join(ends)})" if ends else self.what


class Share(NamedTuple):
    """How often something was so, and the standard error of that; NaN where there is but one number."""

    mean: float
    error: float

    @classmethod
    def of(cls, by_run: Sequence[float]) -> "Share":
        """From one number a run; runs in which it did not apply are NaN."""
        known = np.array([one for one in by_run if one == one], dtype=float)
        count = len(known)
        if count < 2:
            return cls(float(known[0]) if count else nan, nan)
        # Where all runs agree they show no spread: it is supposed that one more would have been the other way.
        spread = float(known.std(ddof=1)) if np.ptp(known) else sqrt(count) / (count + 1)
        return cls(float(known.mean()), spread / sqrt(count))

    def meets(self, claim: Claim) -> bool:
        """Whether the share is in the claimed range, or out of it by no more than chance explains."""
        slack = CERTAIN * self.error if self.error == self.error else 0.0
        return self.mean != self.mean or claim.low - slack <= self.mean <= claim.high + slack


@dataclass(frozen=True)
class Experiment:
    """A condition, a trial of it (a picklable function of a seed), and how trials are summed up, one number a run."""

    what: str
    trial: Callable[[int], Any]
    sum_up: Callable[[Sequence[Any]], Mapping[str, Sequence[float]]]
    cost: float = 1.0  # of a run, for one that is quick: there are so many times fewer runs

    def run(self, runs: int, jobs: int) -> "Row":
        count = max(10, round(runs / self.cost))
        if jobs == 1:
            records = [self.trial(seed) for seed in range(count)]
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
                records = list(pool.map(self.trial, range(count), chunksize=5))
        return Row(self.what, count, {key: Share.of(runs) for key, runs in self.sum_up(records).items()})


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@dataclass(frozen=True)
class Row:
    """What came of an experiment."""

    what: str
    runs: int
    shares: dict[str, Share]

    def to_json(self) -> dict[str, Any]:
        shares = {key: [None if one != one else one for one in share] for key, share in self.shares.items()}
        return {"runs": self.runs, "shares": shares}

    @classmethod
    def from_json(cls, what: str, given: Mapping[str, Any]) -> "Row":
        shares = {key: Share(*(nan if one is None else one for one in pair)) for key, pair in given["shares"].items()}
        return cls(what, given["runs"], shares)


@dataclass(frozen=True)
class Study:
    """The claims of one analysis by key, and the experiments that test them; a table of the page."""

    name: str
    introduction: str
    claims: Mapping[str, Claim]
    experiments: Sequence[Experiment] = field(default=())
