"""Graft: the test of a difference between windows, and the interval of a share of right answers."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from calibrate.trials import Claim, Experiment, Study, each
from hiddenscope.analyses.graft import sign_flip_p
from hiddenscope.linear.intervals import wilson

TESTS, SHARES, TRUE = 4, 200, (0.3, 0.95)


def trial(seed: int, prompts: int) -> tuple[float, float]:
    """How often skewless differences without a mean get p <= 0.05, and how often the interval holds the true share."""
    random = np.random.default_rng(seed)
    small = [sign_flip_p(random.normal(size=prompts) ** 3) <= 0.05 for _ in range(TESTS)]
    true = random.uniform(*TRUE, SHARES)
    ends = [wilson(float(share), prompts) for share in random.binomial(prompts, true) / prompts]
    held = [low <= share <= high for (low, high), share in zip(ends, true, strict=True)]
    return float(np.mean(small)), float(np.mean(held))


def sum_up(records: Sequence[tuple[float, float]]) -> Mapping[str, Sequence[float]]:
    return {"test": [test for test, _ in records], "interval": [interval for _, interval in records]}


STUDY = Study(
    "graft",
    "Prompts that are independent of each other: differences between windows with a heavy tail and mean 0, and right\n"
    f"answers to {TRUE[0]:.0%} to {TRUE[1]:.0%} of them.",
    {
        "test": Claim("p ≤ 0.05 of a difference that is 0", 0.0, 0.05),
        "interval": Claim("the 95% interval holds the share", 0.93),
    },
    [Experiment(f"{prompts} prompts", each(partial(trial, prompts=prompts)), sum_up) for prompts in (10, 25, 50)],
)
