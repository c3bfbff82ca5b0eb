"""Intervals: how uncertain a cross-validated score is.

Rows of one text are not independent of each other. Nor are the predictions of cross-validation: every fold is predicted
by a fit on nearly the same rows, so their errors go together. Nadeau and Bengio (2003) estimate how much that adds to
the variance of a mean over k folds: 1 / k of one fold's becomes 1 / k + 1 / (k - 1), because a test fold is 1 / (k - 1)
as large as what it is predicted from. With five folds a row counts for 1 / 2.25 of an independent one.
"""

from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

LEVEL = 0.95
DRAWS = 1_000


class Interval(NamedTuple):
    """A score, the ends of its 95% interval, and the lower end of an interval that holds for several scores jointly."""

    score: float
    low: float
    high: float
    joint_low: float


def variance_factor(folds: int) -> float:
    """By how much cross-validation in so many folds adds to the variance of a score; 1 for one held-out set.

    >>> variance_factor(5)
    2.25
    """
    return 1 + folds / (folds - 1) if folds > 1 else 1.0


def accuracy_interval(right: NDArray[np.bool_], groups: Ints, scores: int = 1, folds: int = 1) -> Interval:
    """The share of rows that are right, with Wilson's interval, which is honest at 0 and 1 too.

    Rows of one group that are right and wrong together count for fewer: for as many independent rows as would give the
    variance that the groups show, but never for fewer than there are groups.

    >>> accuracy_interval(np.array([True] * 8 + [False] * 2), np.arange(10)).score
    0.8
    """
    share, count = float(right.mean()), float(len(right))
    number = int(groups.max()) + 1
    if number < len(right):
        sums = np.bincount(groups, right - share, minlength=number)
        variance = float((sums**2).sum()) / count**2 * number / max(1, number - 1)
        count = min(count, max(number, share * (1 - share) / variance)) if variance > 0 else float(number)
    count /= variance_factor(folds)
    low, high = wilson(share, count)
    return Interval(share, low, high, wilson(share, count, scores)[0])


def r2_interval(error: Floats, baseline: Floats, groups: Ints, scores: int, seed: int, folds: int = 1) -> Interval:
    """1 - the sum of errors / that of a baseline, with a bootstrap interval over groups."""
    number = int(groups.max()) + 1
    sums = np.stack([np.bincount(groups, part, minlength=number) for part in (error, baseline)])
    score = float(1 - sums[0].sum() / sums[1].sum())
    counts = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), DRAWS)
    errors, baselines = sums @ counts.T
    resampled = 1 - errors / np.maximum(baselines, np.finfo(np.float64).tiny)
    resampled = resampled[baselines > 0]
    wider = variance_factor(folds) ** 0.5
    low, high = score + wider * (np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) - score)
    return Interval(score, float(low), float(high), score - wider * _deviations(scores) * float(resampled.std()))


def _deviations(scores: int) -> float:
    """How many standard deviations hold 95%, jointly for so many scores (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / scores)


def wilson(share: float, count: float, scores: int = 1) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` rows, jointly for so many shares.

    >>> [round(end, 3) for end in wilson(0.8, 10)]
    [0.49, 0.943]
    """
    width = _deviations(scores)
    square = width**2 / count
    middle = (share + square / 2) / (1 + square)
    half = width / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
