"""Separation: how far apart classes of rows are, beside what the same rows give with their labels shuffled.

>>> rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1]])
>>> found = separation(Distances(rows), shuffled(torch.tensor([0, 0, 1, 1]), 99, 0))
>>> round(found["silhouette"].value, 2), found["neighbour"].value
(0.99, 1.0)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenscope.measures.distances import AT_ONCE, Distances

SCORES = ("silhouette", "neighbour", "fisher", "within")
TOGETHER = 1 << 24  # numbers of shuffled labels that are held together: 64 MiB of float32


@dataclass(frozen=True)
class Score:
    """A score, the share of shuffled labels that reach it, and what the middle and the best in twenty of these give."""

    value: float
    p: float
    chance: float
    high: float


def shuffled(codes: Tensor, count: int, seed: int) -> Tensor:
    """The labels as they are, and then shuffled so many times, `[1 + count, row]`."""
    generator = np.random.default_rng(seed)
    return torch.stack([codes, *(codes[torch.from_numpy(generator.permutation(len(codes)))] for _ in range(count))])


def separation(apart: Distances, labels: Tensor) -> Mapping[str, Score]:
    """The scores of rows by their classes, `labels[0]`, against those by shuffled classes, `labels[1:]`.

    `silhouette` is the mean silhouette; `neighbour` the share of rows whose nearest other row is of their class (of
    several that are equally near, the share among these); `fisher` the variance between classes over that within, each
    by its degrees of freedom, so that 1 is chance; `within` the mean distance within classes over that of all pairs.
    """
    counts = torch.bincount(labels[0])
    exact = _scores(apart, labels[:1], counts, torch.float64)
    null = torch.cat([_scores(apart, some, counts, torch.float32) for some in _together(labels, len(counts))], 1)
    found = {}
    for row, name in enumerate(SCORES):
        chance, reached = null[row, 1:], null[row, 1:] * (-1 if name == "within" else 1)
        own = null[row, 0] * (-1 if name == "within" else 1)
        margin = 1e-5 * abs(own) + 1e-7  # shuffles that part the rows as the labels do reach what these give
        p = (1 + int(((reached >= own - margin) | (reached == own)).sum())) / (1 + len(chance))
        p = float("nan") if bool(own.isnan()) else p
        high = torch.quantile(chance, 0.05 if name == "within" else 0.95) if len(chance) else torch.tensor(torch.nan)
        found[name] = Score(
            float(exact[row, 0]), p, float(chance.median()) if len(chance) else float("nan"), float(high)
        )
    return found


def silhouette(apart: Distances, codes: Tensor) -> float:
    """The mean silhouette alone.

    >>> silhouette(Distances(torch.tensor([[0.0], [1.0], [9.0], [10.0]])), torch.tensor([0, 0, 1, 1]))
    0.8885448916408669
    """
    counts = torch.bincount(codes)
    members = torch.nn.functional.one_hot(codes).to(apart.dtype)
    sums = torch.cat([block @ members for _, block in apart.blocks()]).double()
    return float(_silhouettes(sums[:, None], codes[:, None, None], counts).mean())


def _together(labels: Tensor, classes: int) -> Iterator[Tensor]:
    some = max(1, TOGETHER // (labels.shape[1] * classes))
    yield from torch.split(labels, some)


def _scores(apart: Distances, labels: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Every score of every labelling, `[score, labelling]`; the classes of all are of one size."""
    ways, (count, classes) = len(labels), (labels.shape[1], len(counts))
    members = torch.zeros(count, ways * classes, dtype=dtype)
    members.scatter_(1, labels.T + torch.arange(ways) * classes, 1)
    silhouettes, same, inside = torch.zeros(3, ways, dtype=torch.float64)
    every = 0.0
    for here, block in apart.blocks(min(AT_ONCE, max(count, TOGETHER * count // (4 * ways * classes)))):
        own = labels[:, here].T[:, :, None]
        sums = (block.to(dtype) @ members).view(-1, ways, classes)
        silhouettes += _silhouettes(sums, own, counts).sum(0, dtype=torch.float64)
        inside += sums.gather(2, own)[..., 0].sum(0, dtype=torch.float64)
        every += float(block.sum())
        near = (_nearest(apart, here, block).to(dtype) @ members).view(-1, ways, classes)
        same += near.gather(2, own)[..., 0].sum(0, dtype=torch.float64)
    pairs = float((counts * (counts - 1)).sum())
    within = inside / pairs / (every / (count * (count - 1))) if pairs else inside * torch.nan
    return torch.stack([silhouettes / count, same / count, _fisher(apart, members, counts, ways), within])


def _silhouettes(sums: Tensor, own: Tensor, counts: Tensor) -> Tensor:
    """The silhouette of each row in each labelling, from its summed distances to every class; 0 where it is alone."""
    sizes = counts.to(sums.dtype)
    inside = sums.gather(2, own)[..., 0] / (sizes - 1).clamp_min(1)[own[..., 0]]
    other = (sums / sizes).scatter(2, own, torch.inf).amin(2)
    larger = torch.maximum(inside, other)
    found = torch.where(larger > 0, (other - inside) / larger, 0)
    return torch.where(sizes[own[..., 0]] > 1, found, 0)


def _nearest(apart: Distances, here: slice, block: Tensor) -> Tensor:
    """For some rows, the others that are nearest, sharing 1 where several are."""
    squared = block.square()
    squared[torch.arange(len(block)), torch.arange(here.start, here.stop)] = torch.inf
    near = squared <= squared.amin(1, keepdim=True) + apart.tie(here)
    return near / near.sum(1, keepdim=True)


def _fisher(apart: Distances, members: Tensor, counts: Tensor, ways: int) -> Tensor:
    count, classes = len(apart), len(counts)
    total = apart.norms.sum()
    sums = (members.T @ apart.rows.to(members.dtype)).double().view(ways, classes, -1)
    between = (sums.square().sum(2) / counts).sum(1)
    inside = (total - between).clamp_min(0)
    return (between / (classes - 1)) / (inside / (count - classes))
