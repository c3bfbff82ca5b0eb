"""Sign flips: a test of many means at once, corrected for having looked at all.

If a mean is zero and its distribution symmetric, each observation could as well have
the other sign. All columns are flipped together, so that the test holds however they
depend on each other, and each is compared with the largest statistic of any column
(Westfall and Young). So no column of noise is called larger than zero in more than 5%
of cases, however many there are.
"""

import numpy as np

from hiddenscope.states.arrays import Floats

# Up to so many observations all flips are made.
MOST_EXACT = 16
# Random flips of more observations, besides the data as they are.
FLIPS = 32_767
# Numbers that are held at a time.
BLOCK = 2**23


def corrected_sign_flip_p(differences: Floats, seed: int = 0) -> Floats:
    """Return the corrected p-value of each column's mean being larger than zero.

    `differences` are [observation, column]. A column with a NaN has no p-value.

    >>> noise = np.random.default_rng(0).standard_normal((8, 3))
    >>> shifted = np.column_stack([noise, np.full(8, 0.5)])
    >>> corrected_sign_flip_p(shifted).round(3).tolist()
    [0.965, 0.965, 0.988, 0.004]
    """
    differences = np.asarray(differences, dtype=np.float64)
    known = ~np.isnan(differences).any(0)
    p = np.full(differences.shape[1], np.nan)
    if not known.any():
        return p
    observed = differences[:, known]
    sizes = np.sqrt((observed**2).sum(0))
    # The sum of squares does not change with signs, so each statistic is a t-statistic
    # but for a monotone map, and no column has a larger say for being larger.
    scaled = observed / np.maximum(sizes, np.finfo(float).tiny)
    statistics = scaled.sum(0)
    largest = _largest(scaled, seed)
    # Rounding must not tell equal statistics apart.
    allowed = statistics - 1e-9
    places = np.searchsorted(np.sort(largest), allowed, side="left")
    p[known] = 1 - places / len(largest)
    return p


def _largest(scaled: Floats, seed: int) -> Floats:
    """Return the largest statistic of any column for each flip of signs."""
    count, columns = scaled.shape
    signs = _signs(count, seed)
    rows = max(1, BLOCK // columns)
    largest = []
    for start in range(0, len(signs), rows):
        sums = signs[start : start + rows] @ scaled
        # The opposite signs give the opposite sums.
        largest += [sums.max(1), -sums.min(1)]
    return np.concatenate(largest)


def _signs(count: int, seed: int) -> Floats:
    """Return rows of signs, each standing for its opposite too.

    The first changes nothing.
    """
    if count <= MOST_EXACT:
        numbers = np.arange(2 ** (count - 1))
        bits = (numbers[:, None] >> np.arange(count)) & 1
        return np.where(bits, -1.0, 1.0)
    generator = np.random.default_rng(seed)
    signs: Floats = generator.choice([-1.0, 1.0], (FLIPS // 2 + 1, count))
    signs[0] = 1.0
    return signs
