"""Permutations: labels in another order, as the design of the data allows.

A permutation test is valid where the labels could as well have come in the other order. So a text keeps one label for
all its rows, and texts that belong together (a group: paraphrases, a minimal pair) stay together:

- Groups whose texts all have one label exchange their labels: an unpaired design.
- A group with several labels deals them anew among its texts, and exchanges the whole set with groups of the same
  size: a paired or blocked design.
- Where the rows of one text have several labels, as tokens do, the labels of a group are a sequence. Sequences change
  places between groups, and each is rotated by a random number of rows, so that neighbours stay neighbours.

>>> pairs = permuted(torch.tensor([0, 1, 0, 1]), 99, 0, groups=["a", "a", "b", "b"])
>>> pairs.labellings.tolist(), pairs.smallest_p
([[0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0]], 0.5)
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations
from math import exp, lgamma
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]
Labels: TypeAlias = NDArray[Any]

MOST_CLASSES = 6  # of which all renamings are tried
ROUNDS = 30  # a labelling of few is missed in so many rounds of draws with a chance of 1e-13
LEAST_DRAWS = 64
LARGEST = 700.0  # the logarithm of a number that is still a float


class Permuted(NamedTuple):
    """The labels as they are and in other orders, `[labelling, row]`, the true ones first.

    Where few orders exist, each is there once. `smallest_p` is the smallest p-value that they can give; None where no
    order parts the rows in another way, so that there is nothing to compare with.
    """

    labellings: Tensor
    smallest_p: float | None


class _Uniform(NamedTuple):
    """Groups of one label each, which they exchange: their `units`, the number of the group of each, and its first."""

    units: Ints
    group: Ints
    first: Ints

    def draw(self, labels: Labels, count: int, generator: np.random.Generator) -> Labels:
        """Deal the labels of groups anew, `[labelling, unit]`."""
        repeated = np.tile(labels[self.first], (count, 1))
        return generator.permuted(repeated, axis=1)[:, self.group]

    def hands(self, labels: Labels) -> Counter[tuple[Any, ...]]:
        """Count the groups by the labels that they hold."""
        return Counter((label,) for label in labels[self.first].tolist())


class _Mixed(NamedTuple):
    """Groups of several labels and one size, which deal them anew and exchange them: `units` `[group, unit]`."""

    units: Ints

    def draw(self, labels: Labels, count: int, generator: np.random.Generator) -> Labels:
        """Deal the labels anew, `[labelling, unit]`."""
        turns = np.tile(np.arange(len(self.units)), (count, 1))
        hands = labels[self.units][generator.permuted(turns, axis=1)]
        return generator.permuted(hands, axis=2).reshape(count, -1)

    def hands(self, labels: Labels) -> Counter[tuple[Any, ...]]:
        """Count the groups by the labels that they hold."""
        return Counter(tuple(sorted(hand)) for hand in labels[self.units].tolist())


_Pool: TypeAlias = _Uniform | _Mixed


def permuted(
    labels: Tensor,
    count: int,
    seed: int,
    groups: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    units: ArrayLike | None = None,
) -> Permuted:
    """Permute labels so many times as the design allows.

    `groups` names the group of each row, `units` its text; without units each row is a text, and without groups each
    text is a group. With `strata` (folds) labels stay in theirs. The names alone decide, not the order of the rows.
    """
    rows = np.arange(len(labels))
    unit_of = rows if units is None else _codes(units)
    group_of = unit_of if groups is None else _codes(groups)
    stratum_of = np.zeros_like(rows) if strata is None else _codes(strata)
    order = np.lexsort((rows, unit_of, group_of, stratum_of))
    starts = _starts(group_of[order], unit_of[order])
    first, own = order[starts], labels.numpy()
    number = np.empty_like(rows)
    number[order] = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(rows)]))
    by_unit = own[first]
    if not np.array_equal(by_unit[number], own):
        return _sequences(labels, count, seed, group_of, stratum_of)
    pools = list(_pools(by_unit, group_of[first], stratum_of[first]))
    drawn, smallest = _of_units(by_unit, pools, count, np.random.default_rng(seed))
    return Permuted(torch.from_numpy(np.ascontiguousarray(drawn[:, number])), smallest)


def shuffled(
    labels: Tensor,
    count: int,
    seed: int,
    groups: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    units: ArrayLike | None = None,
) -> Tensor:
    """Return the labellings of `permuted` alone.

    >>> shuffled(torch.tensor([0, 0, 1, 1]), 9, 0, groups=["a", "b", "c", "c"]).shape
    torch.Size([3, 4])
    """
    return permuted(labels, count, seed, groups, strata, units).labellings


def same_labelling(labels: Tensor, other: Tensor) -> bool:
    """Whether two labellings are the same numbers, or part the rows into the same classes, whatever these are called.

    >>> same_labelling(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]))
    True
    """
    if labels.is_floating_point():
        return torch.equal(labels, other)
    pairs = set(zip(labels.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(labels.tolist())) == len(set(other.tolist()))


def _codes(names: ArrayLike) -> Ints:
    codes = np.unique(np.asarray(names), return_inverse=True)[1]
    return codes.reshape(-1).astype(np.int64)


def _starts(*sorted_codes: Ints) -> Ints:
    """Where a new combination of codes begins."""
    changes = [np.diff(codes) != 0 for codes in sorted_codes]
    return np.flatnonzero(np.r_[True, np.logical_or.reduce(changes)])


def _pools(labels: Labels, groups: Ints, strata: Ints) -> Iterator[_Pool]:
    """Find which units change places; they come sorted by stratum and group."""
    for stratum in np.unique(strata):
        inside = np.flatnonzero(strata == stratum)
        parts = np.split(inside, np.flatnonzero(np.diff(groups[inside])) + 1)
        several = [bool((labels[part] != labels[part[0]]).any()) for part in parts]
        uniform = [part for part, mixed in zip(parts, several, strict=True) if not mixed]
        if uniform:
            sizes = [len(part) for part in uniform]
            first = np.array([part[0] for part in uniform])
            yield _Uniform(np.concatenate(uniform), np.repeat(np.arange(len(uniform)), sizes), first)
        by_size = defaultdict(list)
        for part, mixed in zip(parts, several, strict=True):
            if mixed:
                by_size[len(part)].append(part)
        for _, alike in sorted(by_size.items()):
            yield _Mixed(np.stack(alike))


def _of_units(
    labels: Labels, pools: Sequence[_Pool], count: int, generator: np.random.Generator
) -> tuple[Labels, float | None]:
    """Permute the labels of units, and find the smallest p-value that this can give."""
    orders, alike = _orders(labels, pools), _alike(labels, pools)
    if orders > 1.5 + count:
        return np.concatenate([labels[None], _drawn(labels, pools, count, generator)]), 1 / (1 + count)
    all_orders = round(orders)
    drawn = _every(labels, pools, all_orders, generator)
    return drawn, None if all_orders <= alike else alike / all_orders


def _drawn(labels: Labels, pools: Sequence[_Pool], count: int, generator: np.random.Generator) -> Labels:
    drawn = np.tile(labels, (count, 1))
    for pool in pools:
        drawn[:, pool.units.reshape(-1)] = pool.draw(labels, count, generator)
    return drawn


def _every(labels: Labels, pools: Sequence[_Pool], orders: int, generator: np.random.Generator) -> Labels:
    """Return all orders once, the true one first: they are drawn until none is missing."""
    seen = {tuple(labels.tolist()): None}
    for _ in range(ROUNDS):
        if len(seen) >= orders:
            break
        for drawn in _drawn(labels, pools, max(orders, LEAST_DRAWS), generator).tolist():
            seen.setdefault(tuple(drawn))
    true, *others = seen
    return np.array([true, *sorted(others)], dtype=labels.dtype)


def _orders(labels: Labels, pools: Sequence[_Pool]) -> float:
    """The number of different orders."""
    logarithm = 0.0
    for pool in pools:
        hands = pool.hands(labels)
        logarithm += _log_orders(hands.values())
        for hand, times in hands.items():
            logarithm += times * _log_orders(Counter(hand).values())
    return exp(min(logarithm, LARGEST))


def _log_orders(counts: Collection[int]) -> float:
    """The logarithm of the number of orders of things of which so many each are alike."""
    return lgamma(sum(counts) + 1) - sum(lgamma(count + 1) for count in counts)


def _alike(labels: Labels, pools: Sequence[_Pool]) -> int:
    """The number of orders that part the units as the true one does: classes renamed, where that is an order too."""
    names = np.unique(labels).tolist()
    # Numbers that change places are alike for a regression only where there are two of them.
    most = 2 if labels.dtype.kind == "f" else MOST_CLASSES
    if len(names) > most:
        return 1
    hands = [pool.hands(labels) for pool in pools]
    renamings = [dict(zip(names, others, strict=True)) for others in permutations(names)]
    return sum(all(_renamed(hand, renaming) == hand for hand in hands) for renaming in renamings)


def _renamed(hands: Counter[tuple[Any, ...]], renaming: Mapping[Any, Any]) -> Counter[tuple[Any, ...]]:
    renamed: Counter[tuple[Any, ...]] = Counter()
    for hand, count in hands.items():
        renamed[tuple(sorted(renaming[label] for label in hand))] += count
    return renamed


def _sequences(labels: Tensor, count: int, seed: int, groups: Ints, strata: Ints) -> Permuted:
    """Lay the labels of whole groups over the rows in another order of groups, each rotated by some rows."""
    generator = np.random.default_rng(seed)
    drawn = labels.repeat(1 + count, 1).numpy()
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        rows = rows[np.argsort(groups[rows], kind="stable")]
        parts = np.split(rows, np.flatnonzero(np.diff(groups[rows])) + 1)
        for number in range(1, 1 + count):
            turned = [np.roll(part, generator.integers(len(part))) for part in parts]
            order = generator.permutation(len(parts))
            drawn[number, rows] = drawn[0, np.concatenate([turned[k] for k in order])]
    labellings = torch.from_numpy(drawn)
    changed = any(not same_labelling(labels, other) for other in labellings[1:])
    return Permuted(labellings, 1 / (1 + count) if changed else None)
