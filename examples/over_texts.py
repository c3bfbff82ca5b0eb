"""Cut reviews into texts of one length, and say how sure a mean over texts is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

import hiddenscope as hs
from hiddenscope.measures.grouped import shares
from hiddenscope.results.report import FEWEST_GROUPS


class Mean(NamedTuple):
    """A mean over texts with its confidence interval, for each layer."""

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def mean_over_texts(values: ArrayLike, comparisons: int = 1) -> Mean:
    """Return the mean of `values` [text, ...] with Student's 95% interval.

    Texts vary independently; the tokens of a text do not. So a text counts once.
    Divide the error among `comparisons` intervals to hold all of them together
    (Bonferroni).
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers)
    mean = numbers.mean(0)
    error = numbers.std(0, ddof=1) / np.sqrt(count)
    quantile = stats.t.ppf(1 - 0.025 / comparisons, count - 1)
    return Mean(mean, mean - quantile * error, mean + quantile * error)


def share_over_texts(values: ArrayLike, comparisons: int = 1) -> Mean:
    """Return the mean of shares [text, layer] with an interval between 0 and 1.

    It has an extent where all texts agree, too. Fewer than eight texts have none (NaN):
    what three have in common by chance looks certain.
    """
    numbers = np.asarray(values, dtype=np.float64)
    estimates = shares(numbers, np.arange(len(numbers)), comparisons)
    rows = [(share.value, share.low, share.high) for share in estimates]
    value, low, high = np.array(rows, np.float64).T
    if len(numbers) < FEWEST_GROUPS:
        low = high = np.full_like(value, np.nan)
    return Mean(value, low, high)


def first_tokens(
    model: hs.Model, texts: Sequence[str], count: int, length: int
) -> list[list[int]]:
    """Return the first `length` tokens of the first `count` texts that have as many."""
    chosen: list[list[int]] = []
    for text in texts:
        # A token is at most a dozen characters or so: the rest need not be read.
        (ids,) = model.encode(text[: 12 * length], truncate=True).ids
        if len(ids) >= length:
            chosen.append(list(ids[:length]))
        if len(chosen) == count:
            return chosen
    raise ValueError(f"only {len(chosen)} of {count} texts have {length} tokens")
