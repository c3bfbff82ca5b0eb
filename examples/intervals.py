"""Give a mean over texts with its 95% interval, as the experiments print it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from hiddenscope.measures.grouped import effective_count, standard_error
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
        """Say a mean of log ratios as a change in percent."""
        value, low, high = 100 * np.expm1([self.value, self.low, self.high])
        return f"{value:+.2f}% ({low:+.2f}% to {high:+.2f}%)"

    def share(self) -> str:
        """Say a mean of zeros and ones as a share; a share lies between 0 and 1."""
        value, low, high = 100 * np.clip([self.value, self.low, self.high], 0.0, 1.0)
        return f"{value:.0f}% ({low:.0f}% to {high:.0f}%)"


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
