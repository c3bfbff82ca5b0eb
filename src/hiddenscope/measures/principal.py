"""Principal coordinates: rows along the directions in which they vary most."""

import numpy as np

from hiddenscope.states.arrays import Floats


def principal_coordinates(centred: Floats, most: int) -> Floats:
    """Return the coordinates of centred rows along at most so many directions.

    There are no more directions than rows or channels.

    >>> principal_coordinates(np.array([[3.0, 4.0], [-3.0, -4.0]]), 1).round(9).tolist()
    [[5.0], [-5.0]]
    """
    from scipy.linalg import eigh

    count = min(most, *centred.shape)
    is_tall = len(centred) > centred.shape[1]
    # Of the two products, the smaller one: their spectra differ by zeros only.
    square = centred.T @ centred if is_tall else centred @ centred.T
    # A subset takes half the time of all of them.
    subset = [len(square) - count, len(square) - 1]
    values, vectors = eigh(square, subset_by_index=subset)
    places = vectors * np.sqrt(np.maximum(values, 0))
    if is_tall:
        places = centred @ vectors
    # A direction is defined up to its sign. Its largest coordinate is made positive, or
    # a picture could come out mirrored.
    largest = np.take_along_axis(places, np.abs(places).argmax(0)[None], 0)
    coordinates: Floats = (places * np.sign(largest))[:, ::-1]
    return coordinates
