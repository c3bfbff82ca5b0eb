"""Give a mean over texts with its 95% interval, as the experiments print it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from hiddenscope.measures.grouped import (
    CORRELATION,
    effective_count,
    rank_ends,
    standard_error,
)
from hiddenscope.results.report import FEWEST_GROUPS
from hiddenscope.texts.groups import number_groups

LEVEL = 0.95


class Mean(NamedTuple):
    """A mean and the two ends of its interval."""

    value: float
    low: float
    high: float

    def factor(self) -> str:
        """Say a mean of log ratios as a factor."""
        value, low, high = np.exp([self.value, self.low, self.high])
        return f"{value:.3g} times ({low:.3g} to {high:.3g})"

    def percent(self) -> str:
        """Say a mean of log ratios as a change in percent, or as how many times."""
        value, low, high = np.expm1([self.value, self.low, self.high])
        return f"{_change(value)} ({_change(low)} to {_change(high)})"

    def share(self) -> str:
        """Say a share of `share_interval`."""
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%})"

    def signed(self) -> str:
        """Say a number with its sign, and its interval where it has one."""
        ends = f" ({self.low:+.2f} to {self.high:+.2f})"
        return f"{self.value:+.2f}{ends if np.isfinite(self.low) else ''}"


def mean_interval(values: ArrayLike, groups: ArrayLike | None = None) -> Mean:
    """Return the mean over texts with Student's 95% interval.

    Texts of one group are not independent: the standard error leaves out whole groups
    in turn, and the degrees of freedom count groups.
    """
    rows = np.asarray(values, float)
    numbers = np.arange(len(rows))
    if groups is not None:
        numbers = number_groups(np.asarray(groups).tolist())
    error = standard_error(rows, numbers)
    if error is None:
        raise ValueError("An interval needs at least two groups of texts.")
    freedom = effective_count(numbers) - 1
    reach = stats.t.ppf((1 + LEVEL) / 2, freedom) * float(error)
    mean = float(rows.mean())
    return Mean(mean, mean - reach, mean + reach)


def share_interval(values: ArrayLike, groups: ArrayLike) -> Mean:
    """Return the share of texts of which something is true, with Wilson's interval.

    It has an extent where all texts agree, too. Groups count by their effective number.
    """
    rows = np.asarray(values, float)
    count = effective_count(number_groups(np.asarray(groups).tolist()))
    share = float(rows.mean())
    z = stats.norm.ppf((1 + LEVEL) / 2)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    reach *= z / (1 + z**2 / count)
    return Mean(share, middle - reach, middle + reach)


def median_interval(values: ArrayLike, groups: ArrayLike) -> Mean:
    """Return the median over groups of each group's median, with its interval.

    The ends are two of these medians, which hold the true one whatever the
    distribution (a binomial count lies below it).
    """
    rows = np.asarray(values, float)
    numbers = number_groups(np.asarray(groups).tolist())
    medians = []
    for number in range(int(numbers.max()) + 1):
        medians.append(np.median(rows[numbers == number]))
    ordered = np.sort(medians)
    below = int(stats.binom.ppf((1 - LEVEL) / 2, len(ordered), 0.5))
    # The ends of fewer than six groups hold it less often than they should.
    first = max(below - 1, 0)
    low, high = ordered[first], ordered[len(ordered) - 1 - first]
    return Mean(float(np.median(ordered)), float(low), float(high))


def rank_correlation(
    left: ArrayLike, right: ArrayLike, classes: ArrayLike, groups: ArrayLike
) -> Mean:
    """Return the correlation of ranks within classes, with its interval.

    Two classes that differ in both numbers make no correlation. The error is a
    jackknife over groups, on Fisher's scale. Fewer than eight groups have none.
    """
    columns = np.asarray(left, float), np.asarray(right, float), np.asarray(classes)
    numbers = number_groups(np.asarray(groups).tolist())
    count = int(numbers.max()) + 1
    if count < FEWEST_GROUPS:
        whole = float(ranks_within(left, classes) @ ranks_within(right, classes))
        return Mean(whole, float("nan"), float("nan"))
    correlations = []
    # Of all texts, then without each group.
    for number in range(-1, count):
        first, second, names = (column[numbers != number] for column in columns)
        correlations.append(ranks_within(first, names) @ ranks_within(second, names))
    whole, *without = CORRELATION.there(np.array(correlations))
    error = np.sqrt((count - 1) * np.var(without))
    reach = stats.t.ppf((1 + LEVEL) / 2, effective_count(numbers) - 1) * error
    low, high = CORRELATION.back(np.array([whole - reach, whole + reach]))
    # A few texts may be in perfect order by chance, with and without any group.
    least, most = rank_ends(np.array(correlations[0]), len(columns[0]))
    return Mean(correlations[0], float(min(low, least)), float(max(high, most)))


def _change(change: float) -> str:
    """Say a change in percent, or as how many times where it is large."""
    if change >= 9:
        return f"times {1 + change:,.3g}" if change < 99 else f"times {1 + change:,.0f}"
    return f"{change:+.2%}"


def ranks_within(values: ArrayLike, classes: ArrayLike) -> np.ndarray:
    """Return the ranks within classes, centred and of length 1."""
    numbers, names = np.asarray(values, float), np.asarray(classes)
    ranks = np.zeros(len(numbers))
    for name in np.unique(names):
        inside = names == name
        within = stats.rankdata(numbers[inside]) / (inside.sum() + 1)
        ranks[inside] = within - within.mean()
    return ranks / np.linalg.norm(ranks)
