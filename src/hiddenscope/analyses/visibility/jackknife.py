"""Intervals over groups of texts: the jackknife (Tukey 1958) with Student's quantile.

Texts are what was sampled, and texts of a group belong together. Sums are kept for each
batch of groups; every statistic is computed again without each of the batches. With no
more groups than batches, that is the jackknife over groups.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from hiddenscope.analyses.visibility.tallies import NamedSums
from hiddenscope.states.arrays import Floats

LEVEL = 0.95


class Estimate(NamedTuple):
    """Estimated numbers with the ends of their 95% intervals."""

    value: Floats
    low: Floats
    high: Floats


def jackknife(
    sums: NamedSums, statistics: Callable[[NamedSums], Mapping[str, Floats]]
) -> tuple[dict[str, Estimate], float]:
    """Return statistics of sums [batch, ...] with their intervals.

    The second value is how many batches of equal size the intervals are worth.

    >>> sums = {"targets": np.ones((4, 1)), "share": np.array([1.0, 2.0, 3.0, 4.0])}
    >>> estimates, batches = jackknife(sums, lambda part: {"sum": part["share"]})
    >>> float(estimates["sum"].value), batches
    (10.0, 4.0)
    """
    from scipy.stats import t

    sizes = sums["targets"].sum(1)
    total = {name: array.sum(0) for name, array in sums.items()}
    whole = statistics(total)
    left_out: dict[str, list[Floats]] = {name: [] for name in whole}
    for batch in range(len(sizes)):
        rest = {name: total[name] - array[batch] for name, array in sums.items()}
        for name, value in statistics(rest).items():
            left_out[name].append(value)
    # Batches of unequal size count for fewer (Kish 1965).
    count = float(sizes.sum() ** 2 / (sizes**2).sum())
    quantile = float(t.ppf((1 + LEVEL) / 2, max(1.0, count - 1)))
    estimates = {}
    for name, value in whole.items():
        half = quantile * _standard_error(np.array(left_out[name]))
        estimates[name] = Estimate(value, value - half, value + half)
    return estimates, count


def _standard_error(left_out: Floats) -> Floats:
    """Return the standard error of statistics [batch, ...] without each batch."""
    # A statistic that some batches are needed for has no error.
    with np.errstate(invalid="ignore"):
        variance = np.var(left_out, axis=0)
        error: Floats = np.sqrt((len(left_out) - 1) * variance)
    return error
