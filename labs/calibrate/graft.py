"""Graft: the test of a difference between windows, and the interval of a share of right
answers, also of the lowest.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from hiddenscope.analyses.graft.compute import sign_flip_p
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import effective_count
from hiddenscope.states.arrays import Floats, Ints
from labs.calibrate.trials import Claim, Experiment, Study, each

TESTS, SHARES, TRUE = 4, 200, (0.3, 0.95)
FOLLOWS = 0.8
WINDOWS = 12


class Shares(NamedTuple):
    """How often differences without a mean get p <= 0.05, and how often an interval
    holds the true share.
    """

    test: float
    interval: float
    lowest: float


def trial(seed: int, sizes: Sequence[int]) -> Shares:
    """Differences that are not skewed; shares alone; and the lowest of several windows
    of one true share.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    small = [
        sign_flip_p(_differences(random, groups), groups) <= 0.05 for _ in range(TESTS)
    ]
    true = random.uniform(*TRUE, SHARES)
    right = np.stack([_right(random, true, groups) for _ in range(WINDOWS)])
    held = _held(right[0], true, groups, 1), _held(right.min(0), true, groups, WINDOWS)
    return Shares(float(np.mean(small)), *held)


def _differences(random: np.random.Generator, groups: Ints) -> Floats:
    """Differences with a heavy tail and mean 0, of which those of a group have a part
    in common.
    """
    together = random.normal(size=groups.max() + 1) ** 3
    alone = random.normal(size=len(groups)) ** 3
    differences: Floats = np.where(
        random.random(len(groups)) < FOLLOWS, together[groups], alone
    )
    return differences


def _right(random: np.random.Generator, true: Floats, groups: Ints) -> Floats:
    """The shares of right answers, where most prompts of a group are right or wrong
    together.
    """
    together = random.random((SHARES, groups.max() + 1)) < true[:, None]
    alone = random.random((SHARES, len(groups))) < true[:, None]
    follows = random.random((SHARES, len(groups))) < FOLLOWS
    shares: Floats = np.where(follows, together[:, groups], alone).mean(1)
    return shares


def _held(right: Floats, true: Floats, groups: Ints, shares: int) -> float:
    """How often the interval of a share of right answers, jointly for this many, holds
    the true one.
    """
    ends = [wilson(float(share), effective_count(groups), shares) for share in right]
    return float(
        np.mean(
            [
                low <= share <= high
                for (low, high), share in zip(ends, true, strict=True)
            ]
        )
    )


def sum_up(records: Sequence[Shares]) -> Mapping[str, Sequence[float]]:
    return {key: [getattr(record, key) for record in records] for key in Shares._fields}


DESIGNS = {
    **{f"{prompts} prompts": (1,) * prompts for prompts in (10, 25, 50)},
    "10 groups of 4 prompts": (4,) * 10,
    "25 groups of 4 prompts": (4,) * 25,
    "20 groups of 1 to 20 prompts": tuple(max(1, 20 // rank) for rank in range(1, 21)),
}

STUDY = Study(
    "graft",
    "Differences between windows with a heavy tail and mean 0, and right answers to"
    f" {TRUE[0]:.0%} to {TRUE[1]:.0%} of the prompts. In a\ngroup,"
    f" {FOLLOWS:.0%} of the prompts are what the group is.",
    {
        "test": Claim("p ≤ 0.05 of a difference that is 0", 0.0, 0.05),
        "interval": Claim("the 95% interval holds the share", 0.93),
        "lowest": Claim(
            f"the interval of the lowest of {WINDOWS} windows holds its share", 0.93
        ),
    },
    [
        Experiment(what, each(partial(trial, sizes=sizes)), sum_up)
        for what, sizes in DESIGNS.items()
    ],
)
