"""How near the nearest of many rows is by chance, told by pairs of rows at random.

Cosines are those of rows less their mean: where all point the same way, raw ones tell
nothing apart. Pairs of rows that belong together are nearer than chance, so chance is
told by the pairs that are farthest: a normal distribution through two quantiles.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hiddenscope.states.arrays import Ints

# Rows of which all pairs are looked at, and the fewest that tell anything.
MOST, LEAST = 500, 10
QUANTILES = 0.05, 0.25
# In this share of searches noise is told apart.
LEVEL = 0.05


def drawn(count: int) -> Ints:
    """Return the numbers of some of this many rows, at random and in order."""
    generator = np.random.default_rng(0)
    return np.sort(generator.choice(count, min(count, MOST), replace=False))


@dataclass(frozen=True, eq=False)
class Chance:
    """The distribution of the cosines of rows that do not belong together."""

    mean: Tensor
    centre: float
    deviation: float

    @classmethod
    def of(cls, rows: Tensor) -> Self | None:
        """Look at all pairs of some rows; None where there are too few."""
        if len(rows) < LEAST:
            return None
        mean = rows.double().mean(0)
        unit = _unit(rows - mean)
        pairs = torch.triu_indices(len(rows), len(rows), 1)
        low, quarter = np.quantile((unit @ unit.T)[*pairs].numpy(), QUANTILES)
        far, near = map(NormalDist().inv_cdf, QUANTILES)
        deviation = float(quarter - low) / (near - far)
        return cls(mean, float(quarter) - near * deviation, deviation)

    def explains(self, rows: Tensor, nearest: Tensor, count: int) -> Tensor:
        """Tell of each row if chance finds one of `count` that is as near as this."""
        cosines = (_unit(rows - self.mean) * _unit(nearest - self.mean)).sum(1)
        highest = NormalDist().inv_cdf((1 - LEVEL) ** (1 / count))
        return cosines <= self.centre + highest * self.deviation


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
    some = rows[drawn(len(rows))]
    chance = Chance.of(some)
    if chance is None:
        return None
    unit = _unit(some - chance.mean)
    nearest = (unit @ unit.T).fill_diagonal_(-1.0).argmax(1)
    explained = chance.explains(some, some[nearest], len(some) - 1)
    return 1 - float(explained.double().mean())


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.double(), eps=1e-300)
