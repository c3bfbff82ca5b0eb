"""Permutations of labels, in the ways that the design of the data allows.

A permutation test is valid only if the labels could equally well have come in any of
these orders (exchangeability). So a text keeps one label for all its rows, and texts
that belong together (a group: paraphrases, a minimal pair) stay together:

- Groups whose texts all have one label exchange their labels: an unpaired design.
- A group with several labels shuffles them among its texts, and exchanges the whole set
  with groups of the same size: a paired or blocked design.
- Where the rows of one text have several labels, as tokens do, the labels of a group
  are a sequence. Sequences change places between groups, and each is rotated by a
  random number of rows, so that neighbours stay neighbours. Where groups differ in
  length, a sequence may reach into the next group, and the test is approximate.

>>> pairs = permuted(torch.tensor([0, 1, 0, 1]), 99, 0, groups=["a", "a", "b", "b"])
>>> pairs.labellings.tolist(), pairs.smallest_p
([[0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0]], 0.5)
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from math import exp, lgamma
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hiddenscope.states.arrays import Ints, Labels

# Each round of draws misses a given order with probability 1/e, so that 30 rounds miss
# it with 1e-13.
ROUNDS = 30
MIN_DRAWS = 64
# exp() overflows above about 709.
MAX_LOG = 700.0


class Permuted(NamedTuple):
    """Labels in several orders, `[labelling, row]`, the true one first.

    Where few orders of texts exist, each is there once. `smallest_p` is the smallest
    p-value that these labellings can give: the share of them that are the true one, or
    the true one with its classes renamed. It is None where all are, so that there is
    nothing to compare with.
    """

    labellings: Tensor
    smallest_p: float | None


class _Uniform(NamedTuple):
    """Groups of one label each, which exchange their labels.

    `units` are their texts, `group` is the number of the group of each, and
    `first_unit` the first text of each group.
    """

    units: Ints
    group: Ints
    first_unit: Ints

    def draw(
        self, labels: Labels, count: int, generator: np.random.Generator
    ) -> Labels:
        """Shuffle the labels among the groups, `[labelling, unit]`."""
        repeated = np.tile(labels[self.first_unit], (count, 1))
        return generator.permuted(repeated, axis=1)[:, self.group]

    def label_sets(self, labels: Labels) -> Counter[tuple[Any, ...]]:
        """Count the groups by the labels that they hold."""
        return Counter((label,) for label in labels[self.first_unit].tolist())


class _Blocked(NamedTuple):
    """Groups of several labels and one size, which shuffle and exchange their labels.

    `units` are their texts, `[group, unit]`.
    """

    units: Ints

    def draw(
        self, labels: Labels, count: int, generator: np.random.Generator
    ) -> Labels:
        """Shuffle the labels among groups and within them, `[labelling, unit]`."""
        group_order = np.tile(np.arange(len(self.units)), (count, 1))
        label_sets = labels[self.units][generator.permuted(group_order, axis=1)]
        return generator.permuted(label_sets, axis=2).reshape(count, -1)

    def label_sets(self, labels: Labels) -> Counter[tuple[Any, ...]]:
        """Count the groups by the labels that they hold."""
        return Counter(tuple(sorted(group)) for group in labels[self.units].tolist())


_Pool: TypeAlias = _Uniform | _Blocked


def permuted(
    labels: Tensor,
    count: int,
    seed: int,
    groups: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    units: ArrayLike | None = None,
) -> Permuted:
    """Permute labels up to `count` times, as far as the design allows.

    `groups` names the group of each row, `units` its text; without units each row is a
    text, and without groups each text is a group. With `strata` (folds), labels stay
    within theirs. The result depends on the names, not on the order of the rows.
    """
    rows = np.arange(len(labels))
    unit_of = rows if units is None else _codes(units)
    group_of = unit_of if groups is None else _codes(groups)
    stratum_of = np.zeros_like(rows) if strata is None else _codes(strata)
    generator = np.random.default_rng(seed)
    row_labels = labels.numpy()
    order = np.lexsort((rows, unit_of, group_of, stratum_of))
    starts = _starts(stratum_of[order], group_of[order], unit_of[order])
    sizes = np.diff(np.r_[starts, len(rows)])
    unit_index = np.empty_like(rows)
    unit_index[order] = np.repeat(np.arange(len(starts)), sizes)
    first_row = order[starts]
    unit_labels = row_labels[first_row]
    if np.array_equal(unit_labels[unit_index], row_labels):
        pools = list(_pools(unit_labels, group_of[first_row], stratum_of[first_row]))
        labellings = _permute_units(unit_labels, pools, count, generator)[:, unit_index]
    else:
        labellings = _permute_sequences(
            row_labels, order, count, group_of, stratum_of, generator
        )
    return Permuted(
        torch.from_numpy(np.ascontiguousarray(labellings)), _smallest_p(labellings)
    )


def same_labelling(labels: Tensor, other: Tensor) -> bool:
    """Return whether two labellings split the rows alike, whatever the class names.

    Numbers are alike where they are equal or mirrored: a regression explains as much of
    `y` as of `c - y`.

    >>> same_labelling(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    True
    """
    return bool(_alike(labels.numpy(), other.numpy()[None])[0])


def _alike(labels: Labels, labellings: Labels) -> NDArray[np.bool_]:
    """Return which labellings `[labelling, row]` split the rows as `labels` does."""
    if labels.dtype.kind == "f":
        mirrored = labels.max() + labels.min() - labels
        equal = np.isclose(labellings, labels).all(1)
        return np.asarray(equal | np.isclose(labellings, mirrored).all(1))
    _, first, codes = np.unique(labels, return_index=True, return_inverse=True)
    new_names = labellings[:, first]
    consistent = (new_names[:, codes.reshape(-1)] == labellings).all(1)
    different = (np.diff(np.sort(new_names, axis=1), axis=1) != 0).all(1)
    return np.asarray(consistent & different)


def _smallest_p(labellings: Labels) -> float | None:
    alike = _alike(labellings[0], labellings)
    return None if alike.all() else float(alike.mean())


def _codes(names: ArrayLike) -> Ints:
    """Number names in their sorted order."""
    if isinstance(names, np.ndarray | Tensor):
        names = names.tolist()
    # Not `np.unique`: as an array of strings, names that are whole texts would all take
    # the memory of the longest.
    listed = list(names)  # type: ignore[arg-type]
    ordered = sorted(set(listed), key=_by_name)
    numbers = {name: number for number, name in enumerate(ordered)}
    return np.array([numbers[name] for name in listed], dtype=np.int64)


def _by_name(name: object) -> tuple[str, object]:
    """Return a key that orders names of several types: by type, then by value."""
    return type(name).__name__, name


def _starts(*sorted_codes: Ints) -> Ints:
    """Return where a new combination of codes begins."""
    changes = [np.diff(codes) != 0 for codes in sorted_codes]
    return np.flatnonzero(np.r_[True, np.logical_or.reduce(changes)])


def _pools(labels: Labels, groups: Ints, strata: Ints) -> Iterator[_Pool]:
    """Yield pools of units that change places, from units sorted by stratum and group.

    Pools may depend on the labels, because no permutation within a pool changes which
    pools there are.
    """
    for stratum in np.unique(strata):
        inside = np.flatnonzero(strata == stratum)
        uniform: list[Ints] = []
        blocked_by_size: defaultdict[int, list[Ints]] = defaultdict(list)
        for part in np.split(inside, np.flatnonzero(np.diff(groups[inside])) + 1):
            if (labels[part] != labels[part[0]]).any():
                blocked_by_size[len(part)].append(part)
            else:
                uniform.append(part)
        if uniform:
            sizes = [len(part) for part in uniform]
            yield _Uniform(
                units=np.concatenate(uniform),
                group=np.repeat(np.arange(len(uniform)), sizes),
                first_unit=np.array([part[0] for part in uniform]),
            )
        for _, same_size in sorted(blocked_by_size.items()):
            yield _Blocked(np.stack(same_size))


def _permute_units(
    labels: Labels, pools: Sequence[_Pool], count: int, generator: np.random.Generator
) -> Labels:
    """Return the labels of units in all orders if these are few, else in drawn ones."""
    orders = _number_of_orders(labels, pools)
    # The number is a rounded float: half an order guards the comparison with 1 + count.
    if orders > 1.5 + count:
        return np.concatenate([labels[None], _drawn(labels, pools, count, generator)])
    return _enumerated(labels, pools, round(orders), generator)


def _drawn(
    labels: Labels, pools: Sequence[_Pool], count: int, generator: np.random.Generator
) -> Labels:
    drawn = np.tile(labels, (count, 1))
    for pool in pools:
        drawn[:, pool.units.reshape(-1)] = pool.draw(labels, count, generator)
    return drawn


def _enumerated(
    labels: Labels, pools: Sequence[_Pool], orders: int, generator: np.random.Generator
) -> Labels:
    """Return all orders once, the true one first, drawing until none is missing."""
    # A dictionary, because it keeps the true order first.
    distinct = {tuple(labels.tolist()): None}
    count = max(orders, MIN_DRAWS)
    for _ in range(ROUNDS):
        if len(distinct) >= orders:
            break
        for drawn in _drawn(labels, pools, count, generator).tolist():
            distinct.setdefault(tuple(drawn))
    true, *others = distinct
    return np.array([true, *sorted(others)], dtype=labels.dtype)


def _number_of_orders(labels: Labels, pools: Sequence[_Pool]) -> float:
    """Count the different orders."""
    logarithm = 0.0
    for pool in pools:
        label_sets = pool.label_sets(labels)
        logarithm += _log_orders(label_sets.values())
        for label_set, times in label_sets.items():
            logarithm += times * _log_orders(Counter(label_set).values())
    return exp(min(logarithm, MAX_LOG))


def _log_orders(counts: Collection[int]) -> float:
    """Return the logarithm of the multinomial coefficient."""
    return lgamma(sum(counts) + 1) - sum(lgamma(count + 1) for count in counts)


def _permute_sequences(
    labels: Labels,
    order: Ints,
    count: int,
    groups: Ints,
    strata: Ints,
    generator: np.random.Generator,
) -> Labels:
    """Lay the labels of whole groups over the rows in another order, each rotated.

    `order` sorts the rows by stratum, group and text.
    """
    labellings = np.tile(labels, (1 + count, 1))
    for stratum in np.unique(strata):
        rows = order[strata[order] == stratum]
        parts = np.split(rows, np.flatnonzero(np.diff(groups[rows])) + 1)
        for labelling in labellings[1:]:
            rotated = [np.roll(part, generator.integers(len(part))) for part in parts]
            group_order = generator.permutation(len(parts))
            sources = np.concatenate([rotated[group] for group in group_order])
            labelling[rows] = labels[sources]
    return labellings
