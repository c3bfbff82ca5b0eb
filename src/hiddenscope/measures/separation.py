"""Separation: how far apart classes of rows are, compared with the same rows under
shuffled labels.

>>> rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1]])
>>> scores = separation(Distances(rows), torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]))
>>> round(scores["silhouette"].value, 2), scores["neighbour"].value
(0.99, 1.0)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hiddenscope.measures.distances import AT_ONCE, Distances

SCORES = ("silhouette", "neighbour", "fisher", "within")
# Class memberships of shuffled labels that are held together: 64 MiB of float32.
MEMBERS = 1 << 24


@dataclass(frozen=True, eq=False)
class Score:
    """A score, its permutation p-value, and the median and the 95% quantile (5% for
    `within`) under shuffled labels.

    `under_labels` has the score of every labelling, the true one first, in float32 and
    so that more is better.
    """

    value: float
    p: float
    chance: float
    high: float
    under_labels: Tensor = field(repr=False)


def separation(
    distances: Distances, labels: Tensor, groups: ArrayLike | None = None
) -> Mapping[str, Score]:
    """The scores of rows by their classes, `labels[0]`, against those by permuted
    classes, `labels[1:]`.

    `silhouette` is the mean silhouette; `neighbour` the share of rows whose nearest row
    of another group is of their class (where several are equally near, the share among
    these); `fisher` the variance between classes over that within, each by its degrees
    of freedom, so that 1 is chance; `within` the mean distance within classes over that
    of all pairs. Without permuted classes there are no p-values.

    The scores of all labellings come from shared matrix products, where scikit-learn
    would be called once for each.
    """
    classes = int(labels.max()) + 1
    groups = _group_codes(groups, labels.shape[1])
    exact = _scores(distances, labels[:1], classes, torch.float64, groups)
    parts = [
        _scores(distances, some, classes, torch.float32, groups)
        for some in _batches(labels, classes)
    ]
    every = torch.cat(parts, 1)
    scores = {}
    for row, name in enumerate(SCORES):
        better = every[row]
        # Of this one, less is better.
        if name == "within":
            better = -better
        elif name == "neighbour":
            # Where groups of several sizes exchange labels, the sizes of the classes
            # change, and with them how many neighbours are of one class by chance.
            better = better - _same_by_chance(labels, classes)
        true, p = better[0], float("nan")
        if len(labels) > 1 and not bool(true.isnan()):
            p = float((better >= true - _rounding(true)).double().mean())
        median = high = float("nan")
        if len(labels) > 1:
            # Torch's median is the lower of two middle values.
            median = float(torch.quantile(every[row, 1:], 0.5))
            high = float(
                torch.quantile(every[row, 1:], 0.05 if name == "within" else 0.95)
            )
        scores[name] = Score(float(exact[row, 0]), p, median, high, better)
    return scores


def _group_codes(groups: ArrayLike | None, count: int) -> Tensor:
    """The number of each row's group; rows are groups of their own where there is but
    one.
    """
    if groups is not None:
        codes = np.unique(np.asarray(groups), return_inverse=True)[1].reshape(-1)
        if int(codes.max()) > 0:
            return torch.from_numpy(codes)
    return torch.arange(count)


def _same_by_chance(labels: Tensor, classes: int) -> Tensor:
    """The share of pairs of rows that are of one class, for each labelling."""
    counts = torch.stack([(labels == code).sum(1) for code in range(classes)]).double()
    count = labels.shape[1]
    return (counts * (counts - 1)).sum(0) / (count * (count - 1))


def corrected(scores: Sequence[Score]) -> list[float]:
    """The p-value of each of several scores of the same labellings, corrected for there
    being several.

    It is the share of labellings under which the largest of all scores, each
    standardised by its own mean and deviation over the labellings, is as large (the
    max-statistic of Westfall and Young). The chance that any score of labels that mean
    nothing gets 0.05 or less is 0.05, however many there are and however they depend on
    one another, and however few the shuffles.

    >>> nulls = torch.tensor([3.0, 0, 1, 0]), torch.tensor([0.0, 2, 1, 0])
    >>> corrected([Score(0.0, 0.0, 0.0, 0.0, null) for null in nulls])
    [0.25, 1.0]
    """
    under = torch.stack([score.under_labels for score in scores]).double()
    if under.shape[1] == 1:
        return [float("nan")] * len(scores)
    deviation = under.std(1, keepdim=True, correction=0)
    standard = torch.where(
        deviation > 0,
        (under - under.mean(1, keepdim=True)) / deviation,
        torch.zeros_like(under),
    )
    largest = standard.amax(0)
    return [
        float((largest >= true - _rounding(true)).double().mean())
        for true in standard[:, 0]
    ]


def _rounding(value: Tensor) -> Tensor:
    """How far below a score another one may be and still reach it: labellings that part
    the rows alike round apart.
    """
    return 1e-5 * value.abs() + 1e-7


def _batches(labels: Tensor, classes: int) -> Iterator[Tensor]:
    yield from torch.split(labels, max(1, MEMBERS // (labels.shape[1] * classes)))


def _scores(
    distances: Distances,
    labels: Tensor,
    classes: int,
    dtype: torch.dtype,
    groups: Tensor,
) -> Tensor:
    """Every score of every labelling, `[score, labelling]`."""
    labellings, count = labels.shape
    members = torch.zeros(count, labellings * classes, dtype=dtype)
    members.scatter_(1, labels.T + torch.arange(labellings) * classes, 1)
    sizes = members.sum(0).view(labellings, classes)
    silhouettes, same, inside = torch.zeros(3, labellings, dtype=torch.float64)
    total = 0.0
    for here, block in distances.blocks(
        min(AT_ONCE, max(count, MEMBERS * count // (4 * labellings * classes)))
    ):
        own = labels[:, here].T[:, :, None]
        sums = (block.to(dtype) @ members).view(-1, labellings, classes)
        silhouettes += _silhouettes(sums, own, sizes).sum(0, dtype=torch.float64)
        inside += sums.gather(2, own)[..., 0].sum(0, dtype=torch.float64)
        total += float(block.sum())
        near = (_nearest(distances, here, block, groups).to(dtype) @ members).view(
            -1, labellings, classes
        )
        same += near.gather(2, own)[..., 0].sum(0, dtype=torch.float64)
    pairs = (sizes * (sizes - 1)).sum(1, dtype=torch.float64)
    within = torch.where(pairs > 0, inside / pairs, torch.nan) / (
        total / (count * (count - 1))
    )
    return torch.stack(
        [silhouettes / count, same / count, _fisher(distances, members, sizes), within]
    )


def _silhouettes(sums: Tensor, own: Tensor, sizes: Tensor) -> Tensor:
    """The silhouette of each row in each labelling, from its summed distances to every
    class; 0 where it is alone.
    """
    own_size = sizes.expand_as(sums).gather(2, own)[..., 0]
    inside = sums.gather(2, own)[..., 0] / (own_size - 1).clamp_min(1)
    other = (sums / sizes).scatter(2, own, torch.inf).amin(2)
    larger = torch.maximum(inside, other)
    silhouettes = torch.where(larger > 0, (other - inside) / larger, 0)
    return torch.where(own_size > 1, silhouettes, 0)


def _nearest(
    distances: Distances, here: slice, block: Tensor, groups: Tensor
) -> Tensor:
    """For some rows, the weight of each row of another group as the nearest: 1, or a
    share where several are.
    """
    squared = block.square()
    squared[groups[here][:, None] == groups] = torch.inf
    near = squared <= squared.amin(1, keepdim=True) + distances.tie(here)
    return near / near.sum(1, keepdim=True)


def _fisher(distances: Distances, members: Tensor, sizes: Tensor) -> Tensor:
    labellings, classes = sizes.shape
    sums = (
        (members.T @ distances.rows.to(members.dtype))
        .double()
        .view(labellings, classes, -1)
    )
    between = (sums.square().sum(2) / sizes).sum(1)
    inside = (distances.norms.sum() - between).clamp_min(0)
    return (between / (classes - 1)) / (inside / (len(distances) - classes))
