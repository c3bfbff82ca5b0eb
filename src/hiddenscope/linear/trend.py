"""Trends: is the last of a row of numbers where the others lead?"""

from typing import NamedTuple

import numpy as np

from hiddenscope.states.arrays import Floats

# A parabola through fewer numbers follows their scatter.
PARABOLA_FROM = 10
# A line through fewer has no scatter worth the name.
LINE_FROM = 4


class Departure(NamedTuple):
    """How far the last number is from a trend through the others.

    `weights` make the departure of all numbers: it is linear in them. `error` is the
    standard error of a prediction: the scatter of the others around the trend, and that
    of the trend itself. It has `freedom` degrees of freedom.
    """

    weights: Floats
    error: float
    freedom: int


def degree_of(count: int) -> int | None:
    """Return the degree of a trend through this many numbers; None for too few."""
    if count < LINE_FROM:
        return None
    return 1 if count < PARABOLA_FROM else 2


def departure(places: Floats, numbers: Floats, degree: int) -> Departure:
    """Compare the last of some numbers with a polynomial through the others.

    The squared error is that of the usual prediction interval of a least-squares fit.
    It is also the mean square of the standardised errors with which the same trend
    predicts each earlier number from those before it (Brown, Durbin and Evans 1975), so
    a trend that often failed before must fail by more to count.

    >>> places, numbers = np.arange(6.0), np.array([0.0, 1.1, 1.9, 3.1, 3.9, 9.0])
    >>> last = departure(places, numbers, 1)
    >>> round(float(last.weights @ numbers), 2), round(last.error, 2), last.freedom
    (4.06, 0.16, 3)
    """
    # Centred and scaled, powers are well conditioned.
    scaled = (places - places.mean()) / np.ptp(places)
    powers = np.vander(scaled, degree + 1)
    inverse = np.linalg.pinv(powers[:-1])
    prediction = powers[-1] @ inverse
    residuals = numbers[:-1] - powers[:-1] @ (inverse @ numbers[:-1])
    freedom = len(residuals) - degree - 1
    variance = (residuals**2).sum() / freedom * (1 + (prediction**2).sum())
    return Departure(np.append(-prediction, 1.0), float(np.sqrt(variance)), freedom)
