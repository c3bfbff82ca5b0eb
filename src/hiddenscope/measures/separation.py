"""Separation: how far apart classes of rows are, compared with the same rows under shuffled labels.

>>> rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1]])
>>> scores = separation(Distances(rows), shuffled(torch.tensor([0, 0, 1, 1]), 99, 0))
>>> round(scores["silhouette"].value, 2), scores["neighbour"].value
(0.99, 1.0)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenscope.measures.distances import AT_ONCE, Distances

SCORES = ("silhouette", "neighbour", "fisher", "within")
MEMBERS = 1 << 24  # class memberships of shuffled labels that are held together: 64 MiB of float32


@dataclass(frozen=True)
class Score:
    """A score, its permutation p-value, and the median and the 95% quantile (5% for `within`) under shuffled labels."""

    value: float
    p: float
    chance: float
    high: float


def shuffled(codes: Tensor, count: int, seed: int) -> Tensor:
    """The labels as they are, and then shuffled so many times, `[1 + count, row]`."""
    generator = np.random.default_rng(seed)
    return torch.stack([codes, *(codes[torch.from_numpy(generator.permutation(len(codes)))] for _ in range(count))])


def separation(distances: Distances, labels: Tensor) -> Mapping[str, Score]:
    """The scores of rows by their classes, `labels[0]`, against those by shuffled classes, `labels[1:]`.

    `silhouette` is the mean silhouette; `neighbour` the share of rows whose nearest other row is of their class (where
    several are equally near, the share among these); `fisher` the variance between classes over that within, each by
    its degrees of freedom, so that 1 is chance; `within` the mean distance within classes over that of all pairs.

    The scores of all shuffles come from shared matrix products, where scikit-learn would be called once for each.
    """
    counts = torch.bincount(labels[0])
    exact = _scores(distances, labels[:1], counts, torch.float64)
    null = torch.cat([_scores(distances, some, counts, torch.float32) for some in _batches(labels, len(counts))], 1)
    scores = {}
    for row, name in enumerate(SCORES):
        sign = -1 if name == "within" else 1  # of this one, less is better
        shuffled_scores, reached, true = null[row, 1:], null[row, 1:] * sign, null[row, 0] * sign
        margin = 1e-5 * abs(true) + 1e-7  # rounding: shuffles that part the rows as the labels do reach their score
        p = (1 + int(((reached >= true - margin) | (reached == true)).sum())) / (1 + len(reached))
        median = high = float("nan")
        if len(reached):
            median = float(shuffled_scores.median())
            high = float(torch.quantile(shuffled_scores, 0.05 if name == "within" else 0.95))
        scores[name] = Score(float(exact[row, 0]), float("nan") if bool(true.isnan()) else p, median, high)
    return scores


def _batches(labels: Tensor, classes: int) -> Iterator[Tensor]:
    yield from torch.split(labels, max(1, MEMBERS // (labels.shape[1] * classes)))


def _scores(distances: Distances, labels: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Every score of every labelling, `[score, labelling]`; class sizes are the same in all."""
    labellings, (count, classes) = len(labels), (labels.shape[1], len(counts))
    members = torch.zeros(count, labellings * classes, dtype=dtype)
    members.scatter_(1, labels.T + torch.arange(labellings) * classes, 1)
    silhouettes, same, inside = torch.zeros(3, labellings, dtype=torch.float64)
    total = 0.0
    for here, block in distances.blocks(min(AT_ONCE, max(count, MEMBERS * count // (4 * labellings * classes)))):
        own = labels[:, here].T[:, :, None]
        sums = (block.to(dtype) @ members).view(-1, labellings, classes)
        silhouettes += _silhouettes(sums, own, counts).sum(0, dtype=torch.float64)
        inside += sums.gather(2, own)[..., 0].sum(0, dtype=torch.float64)
        total += float(block.sum())
        near = (_nearest(distances, here, block).to(dtype) @ members).view(-1, labellings, classes)
        same += near.gather(2, own)[..., 0].sum(0, dtype=torch.float64)
    pairs = float((counts * (counts - 1)).sum())
    within = inside / pairs / (total / (count * (count - 1))) if pairs else inside * torch.nan
    return torch.stack([silhouettes / count, same / count, _fisher(distances, members, counts, labellings), within])


def _silhouettes(sums: Tensor, own: Tensor, counts: Tensor) -> Tensor:
    """The silhouette of each row in each labelling, from its summed distances to every class; 0 where it is alone."""
    sizes = counts.to(sums.dtype)
    inside = sums.gather(2, own)[..., 0] / (sizes - 1).clamp_min(1)[own[..., 0]]
    other = (sums / sizes).scatter(2, own, torch.inf).amin(2)
    larger = torch.maximum(inside, other)
    silhouettes = torch.where(larger > 0, (other - inside) / larger, 0)
    return torch.where(sizes[own[..., 0]] > 1, silhouettes, 0)


def _nearest(distances: Distances, here: slice, block: Tensor) -> Tensor:
    """For some rows, the weight of each other row as the nearest: 1, or a share of it where several are nearest."""
    squared = block.square()
    squared[torch.arange(len(block)), torch.arange(here.start, here.stop)] = torch.inf
    near = squared <= squared.amin(1, keepdim=True) + distances.tie(here)
    return near / near.sum(1, keepdim=True)


def _fisher(distances: Distances, members: Tensor, counts: Tensor, labellings: int) -> Tensor:
    count, classes = len(distances), len(counts)
    sums = (members.T @ distances.rows.to(members.dtype)).double().view(labellings, classes, -1)
    between = (sums.square().sum(2) / counts).sum(1)
    inside = (distances.norms.sum() - between).clamp_min(0)
    return (between / (classes - 1)) / (inside / (count - classes))
