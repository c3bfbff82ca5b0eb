"""Serial correlation: do labels and states both drift along the order of the rows?

Two random walks go together though neither knows of the other (Yule 1926): rows that
follow one another are not independent, and permuted labels, which do not drift, look
worse than the true ones. Both must drift: if the states do not, sorted labels are as
harmless as any. So labels are shifted along the order, which keeps their drift, and
compared with permuted ones: how closely do they go with the states?

>>> import torch
>>> steps = torch.randn(2, 1, 60, 8, generator=torch.Generator().manual_seed(0))
>>> states, other = steps.cumsum(2)
>>> serial_inflation(other[0, :, 0], states, np.arange(60)) > 2
True
>>> serial_inflation(torch.arange(60) // 30, steps[0], np.arange(60)) is None
True
"""

import numpy as np
from torch import Tensor

from hiddenscope.measures.grouped import group_sums
from hiddenscope.states.arrays import Floats, Ints

# With fewer groups nothing can be told; groups beyond the most are ignored.
FEWEST = 12
MOST = 500
# Groups this close in order count as neighbours.
LAGS = 3
# A smaller deviation, relative to the largest state, is rounding.
ROUNDING = 1e-6
# Standard errors above which a drift is not chance, and the inflation that matters.
CERTAIN = 3.0
MATTERS = 1.5


def serial_inflation(labels: Tensor, states: Tensor, groups: Ints) -> float | None:
    """Return how much more closely shifted labels go with states than permuted ones.

    That is the ratio of mean squared covariances, at the site of `states`
    `[site, row, width]` where it is largest; None unless it is certain and matters.
    `groups` numbers the group of each row by first occurrence, and groups are compared
    by their means. Integers are classes. What labels explain of the states is taken
    out first, of numbers a cubic polynomial, so that states that merely follow sorted
    labels do not count.
    """
    rows = np.flatnonzero(groups < MOST)
    inside = groups[rows]
    sizes = np.bincount(inside)[:, None]
    if len(sizes) < FEWEST:
        return None
    values = labels.numpy()[rows, None]
    features = (values == np.unique(values)).astype(float)
    powers = 1
    if values.dtype.kind == "f":
        features = (values - values.mean()) / values.std()
        powers = 3
    design = group_sums(features, inside) / sizes
    centred = design - design.mean(0)
    order = np.arange(len(sizes))
    near = (np.abs(np.subtract.outer(order, order)) <= LAGS).astype(float)
    labels_drift = _inflation(centred, near) > 1
    if not labels_drift:
        return None
    shifted = _shifted(centred)
    design = np.hstack([design**power for power in range(powers + 1)])
    fitted = design @ np.linalg.pinv(design)
    largest = MATTERS
    for site in states:
        means = group_sums(site[rows].double().numpy(), inside) / sizes
        residuals = means - fitted @ means
        deviation = residuals.std(0)
        varied = deviation > ROUNDING * np.abs(means).max()
        # Unscaled, a few channels of large variance would decide alone.
        scaled = residuals[:, varied] / deviation[varied]
        largest = max(largest, _inflation(scaled, shifted))
    return largest if largest > MATTERS else None


def _shifted(labels: Floats) -> Floats:
    """Return the products `[row, row]` of labels, summed over all circular shifts."""
    spectrum = np.abs(np.fft.fft(labels, axis=0)) ** 2
    by_lag = np.fft.ifft(spectrum.sum(1)).real
    order = np.arange(len(labels))
    return by_lag[np.subtract.outer(order, order)]


def _inflation(rows: Floats, shifted: Floats) -> float:
    """Return the inflation of centred rows, 1 where chance explains it."""
    others = ~np.eye(len(rows), dtype=bool)
    products, expected = (rows @ rows.T)[others], shifted[others]
    # Both are products of centred rows, so that entries are nearly uncorrelated.
    excess = ((products - products.mean()) * (expected - expected.mean())).sum()
    # Each pair of rows is there twice, so the variance of the sum is doubled.
    error = products.std() * expected.std() * (2 * len(products)) ** 0.5
    if excess <= CERTAIN * error:
        return 1.0
    return float(1 + excess / (np.square(rows).sum() * shifted[0, 0]))
