"""The centre of gravity of a label over layers, with its interval.

Tenney, Das and Pavlick (2019) weigh each layer by what a learnt mix gives it. Such
weights are nearly all or nothing, even in noise (`mix`). Here the weight of a layer is
its gain: how much more often its probe is right than guessing the largest class. Gains
below zero count as such, so that layers which tell nothing cancel out; cut off at zero,
they would pull every centre to the middle.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hiddenscope.measures.grouped import effective_count, group_sums
from hiddenscope.states.arrays import Floats, Ints

LEVEL = 0.95


class GravityCentre(NamedTuple):
    """The mean layer, weighted by gain, with its 95% interval.

    `spread` is the standard deviation of the layers under the same weights. `gained` is
    the mean layer at which the best score so far rises.
    """

    layer: float
    low: float
    high: float
    spread: float
    gained: float


def centre_of_gravity(
    correct: Floats, chance: float, layers: Sequence[int], groups: Ints, factor: float
) -> GravityCentre | None:
    """Return the centre of gains, or None where the mean gain may be zero.

    `correct` `[layer, row]` is 1 where a held-out row is predicted right. The centre is
    a ratio of two means, so its interval is Fieller's (1954): every c for which the
    mean of (layer - c) times gain does not differ from 0. It is finite where the mean
    gain differs from 0. Rows vary by group, and `factor` is what cross-validation adds
    to their variance.

    >>> correct = np.repeat([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], 8, 1)
    >>> centre = centre_of_gravity(correct, 0.5, [0, 1, 2], np.arange(40), 1.6)
    >>> centre.layer, 0.5 < centre.low < 1 < centre.high < 1.5
    (1.0, True)
    """
    from scipy.stats import t

    depth = np.asarray(layers, dtype=float)
    rows = correct.shape[1]
    # The two means whose ratio is the centre: of layer times gain, and of gain.
    weights = np.stack([depth, np.ones_like(depth)])
    parts = weights @ (correct - chance)
    moment, total = parts.mean(1)
    sums = group_sums((parts - parts.mean(1, keepdims=True)).T, groups)
    effective = effective_count(groups)
    # Bessel's correction, as for the variance of an accuracy (`intervals`).
    bessel = effective / max(1.0, effective - 1)
    variation = bessel * (sums.T @ sums) / rows**2
    # A layer without an error shows no variance: suppose that one group was wrong.
    scores = correct.mean(1)
    certain = weights[:, scores == 1]
    covariance = factor * (variation + certain @ certain.T / effective**2)
    # The squared standard errors that fit in the interval.
    square = float(t.ppf((1 + LEVEL) / 2, max(1.0, effective - 1))) ** 2
    # (moment - c total)² <= square times its variance, a quadratic inequality in c.
    leading = total**2 - square * covariance[1, 1]
    if total <= 0 or leading <= 0:
        return None
    half = moment * total - square * covariance[0, 1]
    constant = moment**2 - square * covariance[0, 0]
    root = np.sqrt(max(0.0, half**2 - leading * constant))
    centre = moment / total
    variance = (scores - chance) @ (depth - centre) ** 2 / total
    gains = np.diff(np.maximum.accumulate([chance, *scores]))
    ends = (half - root) / leading, (half + root) / leading
    # With gains below zero, a ratio may leave the layers that were probed.
    layer, low, high = np.clip([centre, *ends], depth[0], depth[-1]).tolist()
    return GravityCentre(
        layer,
        low,
        high,
        spread=float(np.sqrt(max(0.0, variance))),
        gained=float(gains @ depth / gains.sum()),
    )
