"""How far apart classes of rows are, compared with the same rows under permuted labels.

>>> rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1]])
>>> labels = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]])
>>> scores = separation(Distances(rows), labels)
>>> round(scores["silhouette"].value, 2), scores["neighbour"].value
(0.99, 1.0)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hiddenscope.measures.distances import AT_ONCE, Distances

SCORES = ("silhouette", "neighbour", "fisher", "within")
# Class memberships of permuted labels that are held together: 64 MiB of float32.
MEMBERS = 1 << 24


@dataclass(frozen=True, eq=False)
class Score:
    """A score with its permutation p-value.

    `chance` is the median under permuted labels, and `high` the 95% quantile (5% for
    `within`). `under_labels` has the score of every labelling, the true one first, in
    float32 and so that more is better.
    """

    value: float
    p: float
    chance: float
    high: float
    under_labels: Tensor = field(repr=False)


def separation(
    distances: Distances, labels: Tensor, groups: ArrayLike | None = None
) -> Mapping[str, Score]:
    """Score rows by their classes `labels[0]` and by permuted classes `labels[1:]`.

    `silhouette` is the mean silhouette (Rousseeuw 1987); `neighbour` the share of rows
    whose nearest row of another group is of their class (where several are equally
    near, the share among these); `fisher` the variance between classes over that
    within, each by its degrees of freedom, so that 1 is chance; `within` the mean
    distance within classes over that of all pairs. Without permuted classes there are
    no p-values.

    The scores of all labellings come from shared matrix products, where scikit-learn
    would be called once for each.
    """
    classes = int(labels.max()) + 1
    count = labels.shape[1]
    group_of = torch.arange(count)
    if groups is not None:
        codes = np.unique(np.asarray(groups), return_inverse=True)[1].reshape(-1)
        # Rows are groups of their own if all share one.
        if int(codes.max()) > 0:
            group_of = torch.from_numpy(codes)
    exact = _scores(distances, labels[:1], classes, torch.float64, group_of)
    batch_size = max(1, MEMBERS // (count * classes))
    parts = [
        _scores(distances, batch, classes, torch.float32, group_of)
        for batch in torch.split(labels, batch_size)
    ]
    by_labelling = torch.cat(parts, 1)
    scores = {}
    for row, name in enumerate(SCORES):
        values = by_labelling[row]
        better = values
        quantile = 0.95
        if name == "within":
            # Of this one, less is better.
            better = -values
            quantile = 0.05
        elif name == "neighbour":
            # Where groups of several sizes exchange labels, the sizes of the classes
            # change, and with them how many neighbours are of one class by chance.
            sizes = [(labels == code).sum(1) for code in range(classes)]
            counts = torch.stack(sizes).double()
            pairs = (counts * (counts - 1)).sum(0)
            better = values - pairs / (count * (count - 1))
        p = median = high = float("nan")
        if len(labels) > 1:
            if not better[0].isnan():
                p = _p_value(better, better[0])
            # Not `torch.median`, which is the lower of two middle values.
            median = float(torch.quantile(values[1:], 0.5))
            high = float(torch.quantile(values[1:], quantile))
        scores[name] = Score(float(exact[row, 0]), p, median, high, better)
    return scores


def corrected(scores: Sequence[Score]) -> list[float]:
    """Return p-values of scores of the same labellings, corrected for their number.

    A p-value is the share of labellings under which the largest of all scores, each
    standardised by its mean and deviation over the labellings, is as large (max
    statistic, Westfall and Young 1993). With meaningless labels, the probability that
    any score gets p <= 0.05 is at most 0.05, however many there are, however they
    depend on each other, and however few the permutations.

    >>> nulls = torch.tensor([3.0, 0, 1, 0]), torch.tensor([0.0, 2, 1, 0])
    >>> corrected([Score(0.0, 0.0, 0.0, 0.0, null) for null in nulls])
    [0.25, 1.0]
    """
    under = torch.stack([score.under_labels for score in scores])
    if under.shape[1] == 1:
        return [float("nan")] * len(scores)
    return max_statistic(under)[0]


def max_statistic(scores: Tensor) -> tuple[list[float], Tensor]:
    """Return the corrected p-value of each row of scores `[score, labelling]`, the true
    labelling first, and the largest standardised score of each labelling.
    """
    scores = scores.double()
    deviation = scores.std(1, keepdim=True, correction=0)
    # Scores that are equal up to rounding count as equal.
    z = (scores - scores.mean(1, keepdim=True)) / deviation.clamp_min(1e-9)
    largest = z.amax(0)
    return [_p_value(largest, true) for true in z[:, 0]], largest


def _p_value(scores: Tensor, true: Tensor) -> float:
    """Return the share of scores that reach the true one."""
    # Labellings that split the rows alike have the same score but for rounding.
    rounding = 1e-5 * true.abs() + 1e-7
    return float((scores >= true - rounding).double().mean())


def _scores(
    distances: Distances,
    labels: Tensor,
    classes: int,
    dtype: torch.dtype,
    groups: Tensor,
) -> Tensor:
    """Return every score of every labelling, `[score, labelling]`."""
    labellings, count = labels.shape
    # One column per class of each labelling, 1 where a row is of that class.
    members = torch.zeros(count, labellings * classes, dtype=dtype)
    members.scatter_(1, labels.T + torch.arange(labellings) * classes, 1)
    sizes = members.sum(0).view(labellings, classes)
    silhouettes, same, inside = torch.zeros(3, labellings, dtype=torch.float64)
    total = 0.0
    at_once = MEMBERS * count // (4 * labellings * classes)
    for here, block in distances.blocks(min(AT_ONCE, max(count, at_once))):
        class_of = labels[:, here].T[:, :, None]
        # Distances of each row, summed over the rows of each class.
        sums = (block.to(dtype) @ members).view(-1, labellings, classes)
        to_class = sums.gather(2, class_of)[..., 0]
        inside += to_class.sum(0, dtype=torch.float64)
        size = sizes.expand_as(sums).gather(2, class_of)[..., 0]
        near = to_class / (size - 1).clamp_min(1)
        far = (sums / sizes).scatter(2, class_of, torch.inf).amin(2)
        scale = torch.maximum(near, far)
        # A row that is alone in its class has a silhouette of 0.
        known = (size > 1) & (scale > 0)
        rows = torch.where(known, (far - near) / scale, 0)
        silhouettes += rows.sum(0, dtype=torch.float64)
        total += float(block.sum())
        nearest = _nearest(distances, here, block, groups).to(dtype)
        votes = (nearest @ members).view(-1, labellings, classes)
        same += votes.gather(2, class_of)[..., 0].sum(0, dtype=torch.float64)
    pairs = (sizes * (sizes - 1)).sum(1, dtype=torch.float64)
    mean_inside = torch.where(pairs > 0, inside / pairs, torch.nan)
    within = mean_inside / (total / (count * (count - 1)))
    # The variance between classes over that within.
    sums = (members.T @ distances.rows.to(dtype)).double()
    squares = sums.view(labellings, classes, -1).square().sum(2)
    between = (squares / sizes).sum(1)
    rest = (distances.squared_norms.sum() - between).clamp_min(0)
    fisher = (between / (classes - 1)) / (rest / (count - classes))
    return torch.stack([silhouettes / count, same / count, fisher, within])


def _nearest(
    distances: Distances, here: slice, block: Tensor, groups: Tensor
) -> Tensor:
    """Return weights `[some rows, row]` of the nearest rows of other groups.

    The weight is 1, or a share of it where several are equally near.
    """
    squared = block.square()
    squared[groups[here][:, None] == groups] = torch.inf
    near = squared <= squared.amin(1, keepdim=True) + distances.tie(here)
    return near / near.sum(1, keepdim=True)
