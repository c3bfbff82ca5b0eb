"""Certainty: how far a score may be off, when rows of one text are not independent of each other."""

from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

LEVEL = 0.95
DRAWS = 1_000


class Interval(NamedTuple):
    """A score, the ends of its 95% interval, and its lower end when so many scores must hold together."""

    score: float
    low: float
    high: float
    low_of_all: float


def of_shares(right: NDArray[np.bool_], groups: Ints, together: int = 1) -> Interval:
    """The share of rows that are right, with Wilson's interval, which is honest at 0 and 1 too.

    Rows of one group that are right and wrong together count for fewer: for as many independent rows as would spread
    the share as the groups do, but never for fewer than there are groups.

    >>> of_shares(np.array([True] * 8 + [False] * 2), np.arange(10)).score
    0.8
    """
    share, count = float(right.mean()), float(len(right))
    number = int(groups.max()) + 1
    if number < len(right):
        sums = np.bincount(groups, right - share, minlength=number)
        spread = float((sums**2).sum()) / count**2 * number / max(1, number - 1)
        count = min(count, max(number, share * (1 - share) / spread)) if spread > 0 else float(number)
    low, high = wilson(share, count)
    return Interval(share, low, high, wilson(share, count, together)[0])


def of_errors(error: Floats, base: Floats, groups: Ints, together: int, seed: int) -> Interval:
    """One less the errors over those of a baseline, with an interval over groups that are drawn again and again."""
    number = int(groups.max()) + 1
    sums = np.stack([np.bincount(groups, part, minlength=number) for part in (error, base)])
    score = float(1 - sums[0].sum() / sums[1].sum())
    counts = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), DRAWS)
    errors, bases = sums @ counts.T
    drawn = 1 - errors / np.maximum(bases, np.finfo(np.float64).tiny)
    drawn = drawn[bases > 0]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(score, float(low), float(high), score - _width(together) * float(drawn.std()))


def _width(together: int) -> float:
    """How many deviations hold 95%, when that is to be true of so many at once."""
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / together)


def wilson(share: float, count: float, together: int = 1) -> tuple[float, float]:
    """Wilson's 95% interval of a share of so many, when it is to be true of so many shares at once.

    >>> [round(side, 3) for side in wilson(0.8, 10)]
    [0.49, 0.943]
    """
    width = _width(together)
    square = width**2 / count
    middle = (share + square / 2) / (1 + square)
    half = width / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
