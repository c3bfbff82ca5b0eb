"""Two sets of rows in the same classes: whose classes are tighter, and in whose is the
nearest row more often of the same class?

If the sets come from one law, it means nothing which text is in which. So texts are
permuted between the sets, and keep their classes: a group with texts in both (a
sentence, complete and incomplete) swaps all of them, and groups in one set change
places with groups of the same classes.

Two sets may differ in what means nothing here: where they lie, and how far they spread.

- `dispersion` is smooth, so that every group contributes to it (its jackknife
  pseudo-value, Tukey 1958), and contributions change sets in place of rows. A
  difference is divided by its error under the same permutation, which holds where the
  sets vary by different amounts (Janssen 1997).
- `neighbour` is not: without one row, other rows have other neighbours. Rows change
  sets, after each set was centred and scaled.

>>> rows = np.array([[0.0], [1.0], [9.0], [10.0], [0.0], [4.0], [9.0], [13.0]])
>>> sets = Sets(np.arange(8) // 4, np.arange(8) // 2 % 2, np.arange(8) % 4)
>>> dispersion, _ = compared([torch.tensor(rows)], sets, Parts(sets, 99, 0)).values()
>>> np.exp([dispersion.first, dispersion.second]).round(2).tolist()
[[0.08], [0.31]]
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.measures.distances import AT_ONCE, Distances
from hiddenscope.measures.grouped import group_sums
from hiddenscope.measures.permutations import permuted
from hiddenscope.states.arrays import Floats, Ints

LEVEL = 0.05
# A smaller variance, relative to that of all rows, is rounding.
ROUNDING = 1e-12
# No other row: larger than any rank.
NONE = 1 << 30


class Sets(NamedTuple):
    """The set (0 or 1), the class and the group of each row, numbered from 0."""

    sets: Ints
    classes: Ints
    groups: Ints

    def members(self, number: int) -> "Sets":
        """Return the rows of one set."""
        inside = self.sets == number
        return Sets(*(column[inside] for column in self))


class Parts:
    """The part of each group in each set, which a permutation moves as a whole.

    `groups` are their groups, `of_row` is the part of each row. `sets` are 0 or 1,
    `[labelling, part]`, the true ones first. `pairs` is the number of groups in both
    sets. `smallest_p` is the smallest p-value possible, None where nothing can be
    permuted.
    """

    def __init__(self, rows: Sets, count: int, seed: int) -> None:
        numbers, self.of_row = np.unique(
            2 * rows.groups + rows.sets, return_inverse=True
        )
        self.groups = numbers // 2
        true = numbers % 2
        paired = np.bincount(self.groups)[self.groups] > 1
        self.pairs = int(paired.sum()) // 2
        self.sets = np.tile(true, (1 + count, 1))
        generator = np.random.default_rng(seed)
        flips = generator.integers(2, size=(count, int(self.groups.max()) + 1))
        self.sets[1:, paired] ^= flips[:, self.groups[paired]]
        others = np.flatnonzero(~paired)
        if len(others):
            strata = []
            for group in self.groups[others]:
                classes = rows.classes[rows.groups == group]
                strata.append(str(sorted(set(classes.tolist()))))
            orders = permuted(
                torch.from_numpy(true[others]), count, seed, strata=strata
            )
            drawn = orders.labellings.numpy()
            if len(drawn) <= count:
                # Few orders exist, and each is there once.
                drawn = drawn[generator.integers(len(drawn), size=1 + count)]
            self.sets[1:, others] = drawn[1:]
        # With all parts swapped, a difference has the opposite sign.
        changed = self.sets != true
        alike = ~changed.any(1) | changed.all(1)
        self.smallest_p = None if alike.all() else float(alike.mean())


class Difference(NamedTuple):
    """A number of both sets at each site, and how much larger that of the first is.

    `low` and `high` are the ends of intervals that hold at all sites together with 95%,
    made of the quantile and the error of the test as if they held at every difference.
    `p` is corrected for the number of sites. NaN where there is none.
    """

    first: Floats
    second: Floats
    low: Floats
    high: Floats
    p: Floats

    @property
    def value(self) -> Floats:
        """Return by how much the number of the first set is larger."""
        return self.first - self.second


class _Permuted(NamedTuple):
    """A number of both sets, and the difference of each labelling with its error."""

    first: float
    second: float
    differences: Floats
    errors: Floats


def compared(
    sites: Sequence[Tensor], rows: Sets, parts: Parts
) -> dict[str, Difference]:
    """Compare the sets by each measure, over sites of states `[row, width]`.

    `dispersion` is the logarithm of the root mean square distance to the mean of the
    class (by its degrees of freedom) over the distance between the means of two
    classes, averaged over pairs of classes. `neighbour` is the share of rows whose
    nearest row of their set, in another group, is of their class.
    """
    looser = [_dispersions(states, rows, parts) for states in sites]
    nearer = [_neighbours(states, rows, parts) for states in sites]
    # The error of neighbours is known where the sets do not differ, and only there:
    # where they did, intervals made of it held 85%.
    return {
        "dispersion": _tested(looser, parts, intervals=True),
        "neighbour": _tested(nearer, parts, intervals=False),
    }


def _tested(sites: Sequence[_Permuted], parts: Parts, *, intervals: bool) -> Difference:
    """Compare each site with the largest difference of all, under each labelling."""
    first, second = np.array([site[:2] for site in sites]).T
    p, reach = np.full((2, len(sites)), np.nan)
    known = np.flatnonzero(np.isfinite(first - second)).tolist()
    if known and parts.smallest_p is not None:
        statistics = []
        for site in known:
            away = np.abs(sites[site].differences)
            with np.errstate(divide="ignore", invalid="ignore"):
                # A labelling without a number counts as one that reaches any other.
                ratio = np.where(away > 0, away / sites[site].errors, np.inf)
            statistics.append(np.where(away == 0, 0, ratio))
        largest = np.max(statistics, axis=0)
        quantile = np.quantile(largest, 1 - LEVEL, method="higher")
        for site, statistic in zip(known, statistics, strict=True):
            # Rounding must not tell equal statistics apart.
            p[site] = np.mean(largest >= statistic[0] * (1 - 1e-9))
            error = sites[site].errors[0]
            is_known = intervals and parts.smallest_p <= LEVEL
            if is_known and error > 0 and np.isfinite(quantile):
                reach[site] = quantile * error
    value = first - second
    return Difference(first, second, value - reach, value + reach, p)


def _dispersions(states: Tensor, rows: Sets, parts: Parts) -> _Permuted:
    """Return the dispersion of each set, whose contributions change sets."""
    values = []
    contributions = np.zeros(len(parts.groups))
    for number in (0, 1):
        inside = rows.members(number)
        names, groups = np.unique(inside.groups, return_inverse=True)
        left = np.arange(len(names))[:, None] != groups
        whole = np.full((1, len(groups)), True)
        of_set = Distances(states[rows.sets == number])
        value, *without = _dispersion(of_set, inside.classes, np.vstack([whole, left]))
        away = np.mean(without) - np.array(without)
        values.append(float(value))
        # In the order of groups; their mean is the value.
        contributions[parts.sets[0] == number] = value + (len(names) - 1) * away
    differences = np.zeros(len(parts.sets))
    residuals = np.zeros(parts.sets.shape)
    for number, sign in ((0, 1), (1, -1)):
        weights = (parts.sets == number) / (parts.sets[:1] == number).sum()
        means = weights @ contributions
        differences += sign * means
        residuals += sign * weights * (contributions - means[:, None])
    by_group = group_sums(residuals.T, parts.groups)
    errors = np.sqrt(np.square(by_group).sum(0))
    return _Permuted(values[0], values[1], differences, errors)


def _dispersion(
    distances: Distances, classes: Ints, selections: "np.ndarray"
) -> Floats:
    """Return the logarithm of the dispersion of each selection of rows."""
    products = (distances.rows @ distances.rows.T).numpy()
    norms = distances.squared_norms.numpy()
    within = np.zeros(len(selections))
    means = []
    for code in np.unique(classes):
        inside = (selections & (classes == code)).astype(float)
        mean = inside / inside.sum(1, keepdims=True)
        within += inside @ norms - (mean @ products * inside).sum(1)
        means.append(mean)
    variance = within / (selections.sum(1) - len(means))
    squared = []
    for mean, other in combinations(means, 2):
        apart = mean - other
        squared.append((apart @ products * apart).sum(1))
    least = ROUNDING * norms.mean()
    known = (variance > least) & (np.min(squared, axis=0) > least)
    with np.errstate(all="ignore"):
        ratio = np.sqrt(variance) / np.sqrt(squared).mean(0)
        return np.where(known, np.log(ratio), np.nan)


def _neighbours(states: Tensor, rows: Sets, parts: Parts) -> _Permuted:
    """Return the agreement of nearest rows in each set; rows change sets."""
    aligned = states.double().clone()
    for number in (0, 1):
        inside = torch.from_numpy(rows.sets == number)
        centred = aligned[inside] - aligned[inside].mean(0)
        if Distances(states[inside]).all_equal:
            unknown = np.full(len(parts.sets), np.nan)
            return _Permuted(np.nan, np.nan, unknown, unknown)
        aligned[inside] = centred / centred.square().sum(1).mean().sqrt()
    distances = Distances(aligned)
    shares = np.concatenate(list(_agreements(distances, rows, parts)), axis=1)
    first, second = shares[:, 0]
    differences = shares[0] - shares[1]
    # Sets of other sizes have other shares by chance.
    away = differences - np.nanmean(differences)
    errors = np.full(len(away), np.nanstd(differences))
    return _Permuted(first, second, away, errors)


def _agreements(distances: Distances, rows: Sets, parts: Parts) -> Iterator[Floats]:
    """Yield the share of each set under some labellings, `[set, labelling]`."""
    count = len(distances)
    ((_, block),) = distances.blocks(count**2)
    groups = torch.from_numpy(rows.groups)
    classes = torch.from_numpy(rows.classes)
    squared = block.square()
    squared[groups[:, None] == groups] = torch.inf
    same_class = classes[:, None] == classes
    # Each row's others by distance; those that are equally near have the same rank.
    ordered, places = squared.sort(1)
    tie = distances.tie(slice(0, count)).gather(1, places)
    farther = ordered.diff(dim=1, prepend=ordered[:, :1]) > tie
    ranks = torch.empty(count, count, dtype=torch.int32)
    ranks.scatter_(1, places, farther.cumsum(1, dtype=torch.int32))
    any_ties = bool((~farther[:, 1:] & ordered[:, 1:].isfinite()).any())
    # The last bit says whether a row is of another class.
    coded = (2 * ranks + ~same_class).where(squared.isfinite(), NONE)
    labellings = torch.from_numpy(parts.sets[:, parts.of_row]).to(torch.int8)
    for sets in torch.split(labellings, max(1, AT_ONCE // count**2)):
        among = coded.where(sets[:, :, None] == sets[:, None], NONE)
        smallest = among.amin(2)
        agreement = (1 - smallest % 2).double()
        if any_ties:
            near = among // 2 == smallest[:, :, None] // 2
            agreement = (near & same_class).sum(2).double() / near.sum(2)
        agreement[smallest == NONE] = torch.nan
        shares = [agreement.where(sets == number, torch.nan) for number in (0, 1)]
        yield torch.stack(shares).nanmean(2).numpy()
