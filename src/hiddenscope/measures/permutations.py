"""Permutations of labels, in the ways that the design of the data allows.

A permutation test is valid only if the labels could equally well have come in any of
these orders (exchangeability). So a text keeps one label for all its rows, and texts
that belong together (a group: paraphrases, a minimal pair) stay together:

- Groups whose texts all have one label exchange their labels: an unpaired design.
- A group with several labels shuffles them among its texts, and exchanges the whole set
  with groups of the same size: a paired or blocked design.
- Where what exchanges labels differs in its number of rows, every class keeps its
  number of rows but for `TOLERANCE`. Otherwise a score would be compared with those of
  other class sizes: a probe of noise reaches the share of the largest class. Given
  both numbers, of groups and of rows, all orders are equally likely even where labels
  depend on size (by a logistic law). Where the classes differ in size so much that
  hardly a label can move, nothing can be permuted.
- Where the rows of one text have several labels, as tokens do, the labels of a group
  are a sequence. Each group gets the sequence of another one, mirrored to and fro from
  a random place. So neighbours stay neighbours, and no sequence reaches into the next
  group.
- Where labels and states both drift along the order of the groups (`serial`), nothing
  can be permuted.

>>> pairs = permuted(torch.tensor([0, 1, 0, 1]), 99, 0, groups=["a", "a", "b", "b"])
>>> pairs.labellings.tolist(), pairs.smallest_p
([[0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0]], 0.5)
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hiddenscope.measures.grouped import numbered
from hiddenscope.measures.serial import serial_inflation
from hiddenscope.states.arrays import Ints, Labels

# Each round of draws misses a given order with probability 1/e, so that 30 rounds miss
# it with 1e-13.
ROUNDS = 30
MIN_DRAWS = 64
# How far the number of rows of a class may be off: in standard deviations of what
# permutations regardless of size would do, or as a share of the rows.
TOLERANCE = 0.25
ROW_TOLERANCE = 0.02
# Swaps that are tried for each group, and at most.
SWAPS = 5
MAX_SWAPS = 20_000
# Permutations must change this share of what they would change if all groups had one
# size.
LEAST_CHANGE = 0.5


class Permuted(NamedTuple):
    """Labels in several orders, `[labelling, row]`, the true one first.

    Where few orders of texts exist, each is there once. `smallest_p` is the smallest
    p-value that these labellings can give: the share of them that are the true one, or
    the true one with its classes renamed. It is None where all are, so that there is
    nothing to compare with; where the order of the rows is why, `serial` is the
    inflation.
    """

    labellings: Tensor
    smallest_p: float | None
    serial: float | None = None


class _Uniform(NamedTuple):
    """Groups of one label each, which exchange their labels; the texts of each."""

    groups: list[Ints]

    @property
    def units(self) -> Ints:
        """Return the texts of all groups."""
        return np.concatenate(self.groups)

    def draw(
        self, labels: Labels, count: int, generator: np.random.Generator
    ) -> Labels:
        """Shuffle the labels among the groups, `[labelling, unit]`."""
        group_labels = labels[[group[0] for group in self.groups]]
        drawn = generator.permuted(np.tile(group_labels, (count, 1)), axis=1)
        return drawn.repeat([len(group) for group in self.groups], axis=1)

    def exchanges(self) -> list[list[Ints]]:
        """Return sets of texts that exchange labels, each text with its companions."""
        return [self.groups]


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

    def exchanges(self) -> list[list[Ints]]:
        """Return sets of units that exchange labels: those of each group."""
        return [list(group[:, None]) for group in self.units]


_Pool: TypeAlias = _Uniform | _Blocked


def permuted(
    labels: Tensor,
    count: int,
    seed: int,
    groups: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    units: ArrayLike | None = None,
    states: Tensor | None = None,
) -> Permuted:
    """Permute labels up to `count` times, as far as the design allows.

    `groups` names the group of each row, `units` its text; without units each row is a
    text, and without groups each text is a group. With `strata` (folds), labels stay
    within theirs. The result depends on the names, not on the order of the rows, unless
    `states` `[site, row, width]` are given, to see whether they drift along that order.
    """
    rows = np.arange(len(labels))
    unit_of = rows if units is None else _codes(units)
    group_of = unit_of if groups is None else _codes(groups)
    if states is not None:
        serial = serial_inflation(labels, states, numbered(group_of.tolist()))
        if serial is not None:
            return Permuted(labels[None], None, serial)
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
        drawn = _permute_units(unit_labels, sizes, pools, count, generator)
        labellings = drawn[:, unit_index]
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
            yield _Uniform(uniform)
        for _, same_size in sorted(blocked_by_size.items()):
            yield _Blocked(np.stack(same_size))


def _permute_units(
    labels: Labels,
    sizes: Ints,
    pools: Sequence[_Pool],
    count: int,
    generator: np.random.Generator,
) -> Labels:
    """Return the labels of units in all orders if these are few, else in drawn ones.

    `sizes` are the numbers of rows of the units.
    """
    exchanges = []
    for pool in pools:
        exchanges += pool.exchanges()
    for members in exchanges:
        if len({int(sizes[units].sum()) for units in members}) > 1:
            return _swapped(labels, sizes, exchanges, count, generator)
    labellings = _drawn(labels, pools, count, generator)
    distinct = {row.tobytes(): row for row in labellings}
    if len(distinct) == len(labellings):
        return labellings
    for _ in range(ROUNDS):
        drawn = _drawn(labels, pools, max(count, MIN_DRAWS), generator)
        distinct |= {row.tobytes(): row for row in drawn}
        if len(distinct) > len(labellings):
            return labellings
    every = np.unique(np.stack(list(distinct.values())), axis=0)
    return np.concatenate([labels[None], every[(every != labels).any(1)]])


def _swapped(
    labels: Labels,
    sizes: Ints,
    exchanges: Sequence[Sequence[Ints]],
    count: int,
    generator: np.random.Generator,
) -> Labels:
    """Return labels whose classes keep their numbers of rows, or the true ones alone.

    Many chains begin at the true labels, and swap those of two members of an exchange
    wherever the numbers of rows stay within the tolerance. A swap is as likely as its
    reverse, so that all such orders are equally likely in the end (Metropolis).
    """
    cells: list[Ints] = []
    spans = []
    for members in exchanges:
        spans += [(len(cells), len(members))] * len(members)
        cells += members
    first, length = np.array(spans).T
    rows = np.array([sizes[units].sum() for units in cells])
    cell_labels = np.array([labels[units[0]] for units in cells])
    goals = cell_labels[:, None]
    if labels.dtype.kind != "f":
        goals = cell_labels[:, None] == np.unique(cell_labels)
    goals = goals.astype(float)
    tolerance = max(
        ROW_TOLERANCE * rows.sum(), TOLERANCE * rows.std() * len(cells) ** 0.5
    )
    tolerance = tolerance * goals.std(0)
    source = np.tile(np.arange(len(cells)), (count, 1))
    drift = np.zeros((count, goals.shape[1]))
    chains = np.arange(count)
    for _ in range(min(MAX_SWAPS, SWAPS * len(cells))):
        left = generator.integers(len(cells), size=count)
        right = first[left] + generator.integers(length[left])
        pair = source[chains, left], source[chains, right]
        difference = (rows[right] - rows[left])[:, None]
        moved = drift + difference * (goals[pair[0]] - goals[pair[1]])
        accepted = (np.abs(moved) <= tolerance).all(1)
        drift = np.where(accepted[:, None], moved, drift)
        source[chains, left], source[chains, right] = np.where(
            accepted, pair[::-1], pair
        )
    change = (goals[source] - goals).var((0, 1)) / 2
    if change.sum() < LEAST_CHANGE * goals.var(0).sum():
        return labels[None]
    labellings = np.tile(labels, (1 + count, 1))
    for cell, units in enumerate(cells):
        labellings[1:, units] = cell_labels[source[:, cell, None]]
    return labellings


def _drawn(
    labels: Labels, pools: Sequence[_Pool], count: int, generator: np.random.Generator
) -> Labels:
    """Return the true labels, then drawn ones."""
    drawn = np.tile(labels, (1 + count, 1))
    for pool in pools:
        drawn[1:, pool.units.reshape(-1)] = pool.draw(labels, count, generator)
    return drawn


def _permute_sequences(
    labels: Labels,
    order: Ints,
    count: int,
    groups: Ints,
    strata: Ints,
    generator: np.random.Generator,
) -> Labels:
    """Give each group the labels of another, mirrored to and fro from a random place.

    `order` sorts the rows by stratum, group and text. Every class stays present.
    """
    labellings = np.tile(labels, (1 + count, 1))
    needed = 2 if labels.dtype.kind == "f" else len(np.unique(labels))
    starts = _starts(strata[order], groups[order])[1:]
    parts = np.split(order, starts)
    stratum_of = strata[[part[0] for part in parts]]
    for labelling in labellings[1:]:
        present = 0
        while present < needed:
            # Sources in another order, and still sorted by stratum.
            sources = np.lexsort((generator.random(len(parts)), stratum_of))
            for rows, source in zip(parts, sources, strict=True):
                mirrored = np.r_[parts[source], parts[source][::-1]]
                turned = np.roll(mirrored, generator.integers(len(mirrored)))
                labelling[rows] = labels[np.resize(turned, len(rows))]
            present = len(np.unique(labelling))
    return labellings
