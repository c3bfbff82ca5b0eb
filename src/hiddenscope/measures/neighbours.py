"""Whether the nearest of many rows is nearer than chance explains.

What chance gives is told by the cosines of all pairs of some rows, drawn at random,
less their mean: where all rows point the same way, raw cosines tell nothing apart.
Pairs that belong together raise the upper part of these cosines, so a distribution is
put through two of their lower quantiles. `mean_cosine` alone is of raw rows.
"""

from statistics import NormalDist

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from hiddenscope.states.arrays import Ints

# Rows of which all pairs are looked at, and the fewest that tell anything.
MOST, LEAST = 500, 10
QUANTILES = 0.05, 0.25
# The share of searches in which unrelated rows pass for related.
FALSE_ALARMS = 0.05


def drawn(count: int) -> Ints:
    """Return the numbers of some of this many rows, at random and in order."""
    generator = np.random.default_rng(0)
    return np.sort(generator.choice(count, min(count, MOST), replace=False))


def explained_by_chance(
    rows: Tensor, queries: Tensor, nearest: Tensor, count: int
) -> Tensor | None:
    """Tell of each query if chance finds one of `count` rows as near as its nearest.

    All pairs of some `rows` tell; None where there are too few.
    """
    if len(rows) < LEAST:
        return None
    mean = rows.double().mean(0)
    pairs = torch.triu_indices(len(rows), len(rows), 1)
    cosines = _cosines(rows - mean)[*pairs]
    low, quarter = np.quantile(cosines.numpy(), QUANTILES)
    normal = NormalDist()
    far, near = map(normal.inv_cdf, QUANTILES)
    # Two quantiles of few rows are rough, so the tail is Student's. With n - 6 degrees,
    # simulated, unrelated rows pass in 2 to 8% of searches from ten rows on.
    highest = float(stdtrit(len(rows) - 6, (1 - FALSE_ALARMS) ** (1 / count)))
    bar = quarter + (highest - near) * (quarter - low) / (near - far)
    if queries is not rows:
        # Rows are part of their mean, which lowers their cosines by this.
        bar += 1 / (len(rows) - 1)
    found = torch.cosine_similarity(queries.double() - mean, nearest - mean, eps=1e-300)
    return found <= float(bar)


def mean_cosine(values: Tensor) -> float:
    """Return the mean cosine of two different rows.

    It is 0 where they point everywhere, and near 1 where all point the same way.

    >>> mean_cosine(torch.eye(3)), round(mean_cosine(torch.ones(3, 2)), 9)
    (0.0, 1.0)
    """
    count = len(values)
    if count < 2:
        return 1.0
    wide = values.double()
    norms = wide.norm(dim=1, keepdim=True)
    unit = wide / norms.clamp_min(torch.finfo(torch.float64).tiny)
    # The squared norm of the sum holds every pair, and each row with itself.
    cosines = unit.sum(0).square().sum() - unit.square().sum()
    return float(cosines / (count * (count - 1)))


def told_apart(rows: Tensor) -> float | None:
    """Return the share of rows whose nearest is nearer than chance explains.

    >>> noise = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    >>> told_apart(noise) < 0.06
    True
    """
    some = rows[drawn(len(rows))].double()
    cosines = _cosines(some - some.mean(0)).fill_diagonal_(-1.0)
    nearest = some[cosines.argmax(1)]
    explained = explained_by_chance(some, some, nearest, len(some) - 1)
    return None if explained is None else 1 - float(explained.double().mean())


def _cosines(rows: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(rows.double(), eps=1e-300)
    return unit @ unit.T
