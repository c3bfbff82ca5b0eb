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
- Where labels and states both drift along the order of the groups
  (`serial_inflation`), nothing can be permuted.

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

from hiddenscope.measures.grouped import group_sums
from hiddenscope.states.arrays import Floats, Ints, Labels
from hiddenscope.texts import number_groups

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
# With fewer groups nothing can be told; groups beyond the most are ignored.
FEWEST_GROUPS = 12
MOST_GROUPS = 500
# Groups this close in order count as neighbours.
LAGS = 3
# A smaller deviation, relative to the largest state, is rounding.
ROUNDING = 1e-6
# Standard errors above which a drift is not chance, and the inflation that matters.
CERTAIN = 2.0
MATTERS = 1.5
# Up to this many observations, all flips of signs are made.
MOST_EXACT = 16
# Random flips of more observations, besides the data as they are.
FLIPS = 32_767
# Numbers that are held at a time.
BLOCK = 2**23


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
        serial = serial_inflation(labels, states, number_groups(group_of.tolist()))
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
        # Give each group the labels of another, mirrored to and fro from a random
        # place.
        labellings = np.tile(row_labels, (1 + count, 1))
        needed = 2 if row_labels.dtype.kind == "f" else len(np.unique(row_labels))
        starts = _starts(stratum_of[order], group_of[order])[1:]
        parts = np.split(order, starts)
        stratum_of = stratum_of[[part[0] for part in parts]]
        for labelling in labellings[1:]:
            present = 0
            while present < needed:
                # Sources in another order, and still sorted by stratum.
                sources = np.lexsort((generator.random(len(parts)), stratum_of))
                for rows, source in zip(parts, sources, strict=True):
                    mirrored = np.r_[parts[source], parts[source][::-1]]
                    turned = np.roll(mirrored, generator.integers(len(mirrored)))
                    labelling[rows] = row_labels[np.resize(turned, len(rows))]
                present = len(np.unique(labelling))
    alike = _alike(labellings[0], labellings)
    smallest_p = None if alike.all() else float(alike.mean())
    return Permuted(torch.from_numpy(np.ascontiguousarray(labellings)), smallest_p)


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


def _codes(names: ArrayLike) -> Ints:
    """Number names in their sorted order."""
    if isinstance(names, np.ndarray | Tensor):
        names = names.tolist()
    # Not `np.unique`: as an array of strings, names that are whole texts would all take
    # the memory of the longest.
    listed = list(names)  # type: ignore[arg-type]
    # Names of several types are ordered by type, then by value.
    ordered = sorted(set(listed), key=lambda name: (type(name).__name__, name))
    numbers = {name: number for number, name in enumerate(ordered)}
    return np.array([numbers[name] for name in listed], dtype=np.int64)


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
        uniform = []
        blocked_by_size = defaultdict(list)
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


def serial_inflation(labels: Tensor, states: Tensor, groups: Ints) -> float | None:
    """Return how much more closely shifted labels go with states than permuted ones.

    Two random walks go together though neither knows of the other (Yule 1926): rows
    that follow one another are not independent, and permuted labels, which do not
    drift, look worse than the true ones. Both must drift: if the states do not, sorted
    labels are as harmless as any. So labels are shifted along the order, which keeps
    their drift, and compared with permuted ones: how closely do they go with states?

    That is the ratio of mean squared covariances, at the site of `states`
    `[site, row, width]` where it is largest; None unless it is certain and matters.
    `groups` numbers the group of each row by first occurrence, and groups are compared
    by their means. Integers are classes. What labels explain of the states is taken
    out first, of numbers a cubic polynomial, so that states that merely follow sorted
    labels do not count.

    >>> steps = torch.randn(2, 1, 60, 8, generator=torch.Generator().manual_seed(0))
    >>> states, other = steps.cumsum(2)
    >>> serial_inflation(other[0, :, 0], states, np.arange(60)) > 2
    True
    >>> serial_inflation(torch.arange(60) // 30, steps[0], np.arange(60)) is None
    True
    """
    rows = np.flatnonzero(groups < MOST_GROUPS)
    inside = groups[rows]
    sizes = np.bincount(inside)[:, None]
    if len(sizes) < FEWEST_GROUPS:
        return None
    values = labels.numpy()[rows, None]
    features = (values == np.unique(values)).astype(float)
    powers = 1
    if values.dtype.kind == "f":
        features = (values - values.mean()) / values.std()
        powers = 3
    design = group_sums(features, inside) / sizes
    centred = design - design.mean(0)
    order = np.arange(len(sizes))
    near = (np.abs(np.subtract.outer(order, order)) <= LAGS).astype(float)
    labels_drift = _inflation(centred, near) > 1
    if not labels_drift:
        return None
    # The products of labels, summed over all circular shifts.
    spectrum = np.abs(np.fft.fft(centred, axis=0)) ** 2
    by_lag = np.fft.ifft(spectrum.sum(1)).real
    shifted = by_lag[np.subtract.outer(order, order)]
    design = np.hstack([design**power for power in range(powers + 1)])
    fitted = design @ np.linalg.pinv(design)
    largest = MATTERS
    for site in states:
        means = group_sums(site[rows].double().numpy(), inside) / sizes
        residuals = means - fitted @ means
        deviation = residuals.std(0)
        varied = deviation > ROUNDING * np.abs(means).max()
        # Unscaled, a few channels of large variance would decide alone.
        scaled = residuals[:, varied] / deviation[varied]
        largest = max(largest, _inflation(scaled, shifted))
    return largest if largest > MATTERS else None


def _inflation(rows: Floats, shifted: Floats) -> float:
    """Return the inflation of centred rows, 1 where chance explains it."""
    others = ~np.eye(len(rows), dtype=bool)
    products, expected = (rows @ rows.T)[others], shifted[others]
    # Both are products of centred rows, so that entries are nearly uncorrelated.
    excess = ((products - products.mean()) * (expected - expected.mean())).sum()
    # Each pair of rows is there twice, so the variance of the sum is doubled.
    error = products.std() * expected.std() * (2 * len(products)) ** 0.5
    if excess <= CERTAIN * error:
        return 1.0
    return float(1 + excess / (np.square(rows).sum() * shifted[0, 0]))


def corrected_sign_flip_p(differences: Floats, seed: int = 0) -> Floats:
    """Return the corrected p-value of each column's mean being larger than zero.

    `differences` are [observation, column]. A column with a NaN has no p-value. If a
    mean is zero and its distribution symmetric, each observation could as well have the
    other sign. All columns are flipped together, so that the test holds however they
    depend on each other, and each is compared with the largest statistic of any column
    (Westfall and Young). So no column of noise is called larger than zero in more than
    5% of cases, however many there are.

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
    # Rows of signs, each standing for its opposite too. The first changes nothing.
    count = len(scaled)
    if count <= MOST_EXACT:
        numbers = np.arange(2 ** (count - 1))
        bits = (numbers[:, None] >> np.arange(count)) & 1
        signs = np.where(bits, -1.0, 1.0)
    else:
        generator = np.random.default_rng(seed)
        signs = generator.choice([-1.0, 1.0], (FLIPS // 2 + 1, count))
        signs[0] = 1.0
    rows = max(1, BLOCK // scaled.shape[1])
    parts = []
    for start in range(0, len(signs), rows):
        sums = signs[start : start + rows] @ scaled
        # The opposite signs give the opposite sums.
        parts += [sums.max(1), -sums.min(1)]
    largest = np.concatenate(parts)
    # Rounding must not tell equal statistics apart.
    allowed = statistics - 1e-9
    places = np.searchsorted(np.sort(largest), allowed, side="left")
    p[known] = 1 - places / len(largest)
    return p
