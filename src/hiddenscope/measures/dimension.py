"""Dimension: in how many directions states spread, by their spectrum and by their nearest neighbours."""

import torch
from torch import Tensor

FEWEST_POINTS = 20  # with fewer, the ratios of neighbours say nothing
DISCARDED = 0.1  # the largest ratios, as the method has it: they come from the thin edges of a cloud
CANDIDATES = 6
ROWS = 512


def effective_rank(variances: Tensor) -> float:
    """The exponential of the entropy of a spectrum that adds up to one: NaN where there is no variance at all.

    It is d where d directions have the same variance and the others none (Roy and Vetterli 2007, of variances).

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])), 9), effective_rank(torch.tensor([5.0, 0.0]))
    (3.0, 1.0)
    """
    variances = variances.to(torch.float64)
    total = variances.sum()
    return float(torch.special.entr(variances / total).sum().exp()) if bool(total > 0) else float("nan")


def two_nn(points: Tensor) -> float:
    """The intrinsic dimension of points `[point, width]` by their two nearest neighbours: TwoNN (Facco et al. 2017).

    Where a cloud is d-dimensional, the ratio of a point's second distance to its first is distributed with exponent d;
    it is fitted through the origin, without the largest tenth. Equal points count once. NaN for fewer than 20.

    >>> plane = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)) @ torch.ones(2, 8).tril()
    >>> round(two_nn(plane), 1)
    2.0
    """
    points = torch.unique(points.to(torch.float64), dim=0)
    if len(points) < FEWEST_POINTS:
        return float("nan")
    first, second = _two_nearest(points).unbind(1)
    ratios = (second / first).log().sort().values
    kept = int(len(ratios) * (1 - DISCARDED))
    rank = torch.arange(1, kept + 1, dtype=torch.float64, device=points.device)
    x, y = ratios[:kept], -torch.log1p(-rank / len(ratios))
    slope = float((x * y).sum() / x.square().sum())
    return slope if slope < float("inf") else float("nan")


def _two_nearest(points: Tensor) -> Tensor:
    """The distances to the two nearest other points, `[point, 2]`: found by products, then taken by subtraction.

    Products round by as much as the squares of the largest points allow; a point whose candidates could have others
    behind them within that is held against all points, by subtraction alone.
    """
    points = points - points.mean(0)
    squares = points.square().sum(1)
    rounding = (points.shape[1] + 4) * torch.finfo(torch.float64).eps * 4 * squares.max()
    found = []
    for start in range(0, len(points), ROWS):
        some = points[start : start + ROWS]
        own = torch.arange(start, start + len(some), device=points.device)
        distances = squares - 2 * some @ points.T + squares[own, None]
        distances[own - start, own] = torch.inf
        near = distances.topk(CANDIDATES, largest=False, sorted=True)
        exact = torch.linalg.vector_norm(points[near.indices] - some[:, None], dim=-1).sort(dim=1).values[:, :2]
        doubtful = near.values[:, -1] - rounding <= exact[:, 1].square()
        for row in doubtful.nonzero()[:, 0].tolist():
            every = torch.linalg.vector_norm(points - some[row], dim=1)
            every[start + row] = torch.inf
            exact[row] = every.topk(2, largest=False, sorted=True).values
        found.append(exact)
    return torch.cat(found)
