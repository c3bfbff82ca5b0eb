"""Graft: the test of a difference between windows, and the interval of a share of right answers, also of the lowest."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.trials import Claim, Experiment, Study, each
from hiddenscope.analyses.graft import sign_flip_p
from hiddenscope.linear.intervals import wilson

TESTS, SHARES, TRUE = 4, 200, (0.3, 0.95)
WINDOWS = 12


class Shares(NamedTuple):
    """How often differences without a mean get p <= 0.05, and how often an interval holds the true share."""

    test: float
    interval: float
    lowest: float


def trial(seed: int, prompts: int) -> Shares:
    """Differences that are not skewed; shares alone; and the lowest of several windows of one true share."""
    random = np.random.default_rng(seed)
    small = [sign_flip_p(random.normal(size=prompts) ** 3) <= 0.05 for _ in range(TESTS)]
    true = random.uniform(*TRUE, SHARES)
    lowest = random.binomial(prompts, true, (WINDOWS, SHARES)).min(0)
    held = _held(random.binomial(prompts, true), true, prompts, 1), _held(lowest, true, prompts, WINDOWS)
    return Shares(float(np.mean(small)), *held)


def _held(right: NDArray[np.int64], true: NDArray[np.float64], prompts: int, shares: int) -> float:
    """How often the interval of a share of right answers, jointly for so many, holds the true one."""
    ends = [wilson(float(count / prompts), prompts, shares) for count in right]
    return float(np.mean([low <= share <= high for (low, high), share in zip(ends, true, strict=True)]))


def sum_up(records: Sequence[Shares]) -> Mapping[str, Sequence[float]]:
    return {key: [getattr(record, key) for record in records] for key in Shares._fields}


STUDY = Study(
    "graft",
    "Prompts that are independent of each other: differences between windows with a heavy tail and mean 0, and right\n"
    f"answers to {TRUE[0]:.0%} to {TRUE[1]:.0%} of them.",
    {
        "test": Claim("p ≤ 0.05 of a difference that is 0", 0.0, 0.05),
        "interval": Claim("the 95% interval holds the share", 0.93),
        "lowest": Claim(f"that of the lowest of {WINDOWS} windows holds its share", 0.93),
    },
    [Experiment(f"{prompts} prompts", each(partial(trial, prompts=prompts)), sum_up) for prompts in (10, 25, 50)],
)
