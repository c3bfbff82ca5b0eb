"""Serial correlation: do labels and states both drift along the order of the rows?

Two random walks are correlated though neither knows of the other (Yule 1926): rows
that follow one another are not independent, and permuted labels, which do not drift,
look worse than the true ones. It takes both. Labels that are sorted meet states that
are not, and the other way round, as in any order.

>>> import torch
>>> drifting = torch.randn(2, 1, 60, 8, generator=torch.Generator().manual_seed(0))
>>> states, other = drifting.cumsum(2)
>>> serial_correlation(other[0, :, 0], states, np.arange(60)) is None
False
>>> serial_correlation(torch.arange(60) // 30, drifting[0], np.arange(60)) is None
True
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from hiddenscope.measures.grouped import group_sums
from hiddenscope.states.arrays import Floats, Ints

# A group is compared with so many that follow it.
LAGS = 3
# With fewer groups nothing is told, and more are not looked at.
FEWEST = 12
MOST = 500
# Standard errors from which on a correlation is no chance.
CERTAIN = 2.5
# The least product of both correlations that matters: the variance of a score grows by
# about twice its sum over all lags (Bartlett 1935).
MATTERS = 0.02


class SerialCorrelation(NamedTuple):
    """The mean correlation of neighbours, for labels and for what they leave of states.

    The states are those of the site where it is largest.
    """

    labels: float
    states: float


def serial_correlation(
    labels: Tensor, states: Tensor, groups: Ints
) -> SerialCorrelation | None:
    """Return how labels and states `[site, row, width]` drift; None unless both do.

    `groups` numbers the group of each row by first occurrence. Groups are compared by
    their means. What labels explain of the states is taken out first, numbers as cubic
    polynomials, so that states that merely follow sorted labels do not count.
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
    of_labels = _neighbours(design - design.mean(0))
    if not of_labels:
        return None
    design = np.hstack([design**power for power in range(powers + 1)])
    fitted = design @ np.linalg.pinv(design)
    of_states = 0.0
    for site in states:
        means = group_sums(site[rows].double().numpy(), inside) / sizes
        of_states = max(of_states, _neighbours(means - fitted @ means))
    if of_labels * of_states < MATTERS:
        return None
    return SerialCorrelation(of_labels, of_states)


def _neighbours(rows: Floats) -> float:
    """Return the mean correlation of centred rows with the next; 0 if it is chance."""
    products = rows @ rows.T
    near = np.concatenate([products.diagonal(lag) for lag in range(1, LAGS + 1)])
    others = products[np.triu_indices(len(rows), 1)]
    excess = near.mean() - others.mean()
    if excess <= CERTAIN * others.std() / len(near) ** 0.5:
        return 0.0
    return float(excess / products.diagonal().mean())
