"""Grouped: averages over texts that belong together, and how uncertain they are.

Copies of a text, paraphrases and sentences of one document say less than as many
independent texts. Groups are what was sampled, so an error is measured over groups, and
a share counts as many rows as there would be if a whole group were always right or
wrong together.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def joined(*keys: Sequence[Hashable] | None) -> Ints:
    """Number the groups of rows, in the order of their first row; rows that share any
    key are of one group.

    >>> joined(["a", "b", "a", "c"], [1, 2, 3, 3]).tolist()
    [0, 1, 0, 0]
    """
    given = [key for key in keys if key is not None]
    parents = list(range(len(given[0])))
    for key in given:
        first: dict[Hashable, int] = {}
        for row, value in enumerate(key):
            one, other = (
                _root(parents, row),
                _root(parents, first.setdefault(value, row)),
            )
            parents[max(one, other)] = min(one, other)
    return numbered(_root(parents, row) for row in range(len(parents)))


def _root(parents: list[int], row: int) -> int:
    """The first row of the group that a row is in; the way there is shortened for the
    next search.
    """
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = parents[row]
    return row


def numbered(values: Iterable[Hashable]) -> Ints:
    """Number values from 0, in the order in which each comes first.

    >>> numbered(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[Hashable, int] = {}
    return np.array(
        [numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64
    )


def group_sums(values: Floats, groups: Ints) -> Floats:
    """Add up the rows of each group, along the first axis.

    >>> group_sums(np.array([1.0, 2.0, 4.0]), np.array([0, 1, 0])).tolist()
    [5.0, 2.0]
    """
    sums: Floats = np.zeros((int(groups.max()) + 1, *values.shape[1:]))
    np.add.at(sums, groups, values)
    return sums


def effective_count(groups: Ints) -> float:
    """Count the independent rows that say as much of a share, if all rows of a group
    are right or wrong together.

    Where they are not, an interval with this count is wider than it need be. One whose
    width follows from how rows of a group agree is too narrow where groups are few and
    of unequal size: it held 83% of shares, called 95%.

    >>> effective_count(np.arange(12)), effective_count(np.array([0, 0, 0, 1, 1, 1]))
    (12.0, 2.0)
    """
    sizes = np.bincount(groups)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def standard_error(values: Floats, groups: Ints) -> Floats | None:
    """Give the standard error of the mean over rows, the first axis, by leaving out
    each group in turn.

    It is that of independent rows where every row is a group of its own, and None where
    there is one group.

    >>> values = np.array([1.0, 2.0, 4.0, 5.0])
    >>> bool(np.isclose(standard_error(values, np.arange(4)), values.std(ddof=1) / 2))
    True
    """
    sizes = np.bincount(groups).astype(float)
    count = len(sizes)
    if count < 2:
        return None
    others = sizes.sum() - sizes
    shape = (count, *(1 for _ in values.shape[1:]))
    left = (values.sum(0) - group_sums(values, groups)) / others.reshape(shape)
    error: Floats = np.sqrt((count - 1) * left.var(0))
    return error
