"""Circuit: whether intervals hold how faithful circuits are, where the curves of
contrasts share their shift, or are of two kinds.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from hiddenscope.measures.grouped import estimate
from hiddenscope.states.arrays import Floats
from labs.calibrate.graft import FOLLOWS
from labs.calibrate.trials import Claim, Experiment, Study, each

SIZES = np.linspace(-2, 2, 9)
NOISE = 0.01
GROUPS = (3, 5, 7, 8, 10, 12)
DESIGNS = {
    "8 groups of 4": (4,) * 8,
    "12 groups of 1 to 12": tuple(range(1, 13)),
}
# Contrasts of which the truth is the ratio of sums.
FRESH = 400_000


class Outcome(NamedTuple):
    """How many sizes are held, whether all are, and whether there are intervals."""

    each: float
    all: float
    given: float


def drawn(
    random: np.random.Generator, kind: str, sizes: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return what circuits keep of the logit differences, and these; both are
    [contrast, size]. In a group most contrasts have the curve of the group.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    follows = random.random((len(groups), 1)) < FOLLOWS
    of_group, own = (_curves(random, kind, n) for n in (len(sizes), len(groups)))
    shares = np.where(follows, of_group[groups], own)
    shares += random.normal(0, NOISE, shares.shape)
    spans = random.lognormal(0, 0.5, (len(groups), 1)) * np.ones(len(SIZES))
    return spans * shares, spans


def _curves(random: np.random.Generator, kind: str, count: int) -> Floats:
    shape = count, 1
    if kind == "shifts":
        return 0.5 + random.normal(0, 0.2, shape) * np.ones(len(SIZES))
    if kind == "skewed shifts":
        return 0.3 * random.lognormal(0, 0.7, shape) * np.ones(len(SIZES))
    if kind == "two kinds, halves":
        middle = np.where(random.random(shape) < 1 / 2, -1.0, 1.0)
    elif kind == "two kinds, a third":
        middle = np.where(random.random(shape) < 1 / 3, -1.0, 1.0)
    else:
        middle = random.gumbel(0, 0.5, shape) + 0.2 * random.normal(
            size=(count, len(SIZES))
        )
    curves: Floats = 1 / (1 + np.exp(-3 * (SIZES - middle)))
    return curves


@cache
def _truth(kind: str) -> Floats:
    kept, spans = drawn(np.random.default_rng(10**6), kind, (1,) * FRESH)
    true: Floats = kept.sum(0) / spans.sum(0)
    return true


def trial(seed: int, kind: str, sizes: tuple[int, ...]) -> Outcome:
    """Whether the intervals of one sample of contrasts hold the faithfulness."""
    kept, spans = drawn(np.random.default_rng(seed), kind, sizes)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    found = estimate(kept, groups, spans)
    held = []
    for size, true in zip(found, _truth(kind), strict=True):
        if size.low is not None and size.high is not None:
            held.append(size.low <= true <= size.high)
    if not held:
        return Outcome(np.nan, np.nan, 0.0)
    return Outcome(float(np.mean(held)), float(np.all(held)), 1.0)


def sum_up(records: Sequence[Outcome]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    return {name: [getattr(one, name) for one in records] for name in Outcome._fields}


KINDS = (
    "shifts",
    "skewed shifts",
    "two kinds, halves",
    "two kinds, a third",
    "curves of their own",
)
SAMPLES = {f"{count} groups": (1,) * count for count in GROUPS} | DESIGNS
STUDY = Study(
    "circuit",
    f"How faithful circuits of {len(SIZES)} sizes are, as ratios of sums over contrasts"
    " whose logit differences are lognormal. Their\ncurves share a shift, which is"
    " normal or lognormal (0.7), are of two kinds, or rise each at its own size; in a"
    f" group,\n{FOLLOWS:.0%} of them are what the group is. With fewer than eight groups"
    " there is no interval.",
    {
        "each": Claim("the interval of a size holds it", 0.93),
        "all": Claim("the intervals of all sizes hold them at once"),
        "given": Claim("there are intervals"),
    },
    [
        Experiment(
            f"{kind}, {what}", each(partial(trial, kind=kind, sizes=sizes)), sum_up
        )
        for kind in KINDS
        for what, sizes in SAMPLES.items()
    ],
)
