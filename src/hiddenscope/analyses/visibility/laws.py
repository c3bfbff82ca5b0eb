"""Laws of decay, fitted to shares at the distances or depths 1, 2, 3, ..."""

from typing import NamedTuple

import numpy as np

from hiddenscope.states.arrays import Floats

# Two numbers lie on every line.
FEWEST_SHARES = 3
# Logarithms that differ by less differ by rounding.
ROUNDING = 1e-12


class Law(NamedTuple):
    """Two laws fitted to shares.

    `exponent` is that of the power law, share ~ distance ** -exponent, and `rate` that
    of the exponential, share ~ exp(-rate * distance). Both are least squares of log
    shares, where every doubling of the distance counts the same. `advantage` is how
    much larger the squared error of the exponential is, as a share of the variance, and
    `explained` is the share of the variance that the power law explains.
    """

    exponent: float
    rate: float
    advantage: float
    explained: float


NO_LAW = Law(np.nan, np.nan, np.nan, np.nan)
# Equal shares leave nothing to explain, and neither law is better.
NO_DECAY = Law(0.0, 0.0, 0.0, np.nan)


class Line(NamedTuple):
    """A weighted least-squares line: its slope and its mean squared error."""

    slope: float
    error: float


def fit_law(shares: Floats) -> Law:
    """Fit both laws to the shares at the distances 1, 2, 3, ...

    >>> law = fit_law(np.arange(1, 30) ** -1.5)
    >>> round(law.exponent, 6), law.advantage > 0
    (1.5, True)
    >>> fit_law(np.full(4, 0.1)).exponent
    0.0
    """
    if len(shares) < FEWEST_SHARES or not (shares > 0).all():
        return NO_LAW
    distances = np.arange(1.0, len(shares) + 1)
    logarithms = np.log(shares)
    if np.ptp(logarithms) < ROUNDING:
        return NO_DECAY
    # The distances of every octave weigh as much as those of the next.
    weights = 1 / distances
    power = _fit_line(np.log(distances), logarithms, weights)
    exponential = _fit_line(distances, logarithms, weights)
    mean = np.average(logarithms, weights=weights)
    variance = float(np.average((logarithms - mean) ** 2, weights=weights))
    advantage = (exponential.error - power.error) / variance
    explained = 1 - power.error / variance
    return Law(-power.slope, -exponential.slope, advantage, explained)


def _fit_line(x: Floats, y: Floats, weights: Floats) -> Line:
    """Fit a line through points that count by their weights."""
    across = x - np.average(x, weights=weights)
    up = y - np.average(y, weights=weights)
    covariance = (weights * across * up).sum()
    spread = (weights * across**2).sum()
    slope = float(covariance / spread)
    residuals = up - slope * across
    error = float(np.average(residuals**2, weights=weights))
    return Line(slope, error)
