"""Running statistics of hidden states that are seen once, some at a time: mean, spread,
direction, dimension.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK = 1 << 20  # numbers that are processed together: 8 MiB of float64
FEWEST_POINTS = 20  # with fewer, the ratios of neighbour distances say nothing
# The share of the largest ratios that TwoNN leaves out: they come from the sparse edges
# of the set.
DISCARDED = 0.1
CANDIDATES = (
    # Nearest points by products, whose distances are then computed by subtraction.
    6
)
ROWS = 512  # points whose distances to all others are computed at a time


def chunks(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same rows in order, about a million numbers at a time, so that no result
    depends on how a source cuts them.

    >>> [len(chunk) for chunk in chunks([torch.zeros(3, 400_000), torch.zeros(2, 400_000)])]
    [2, 2, 1]
    """
    pending: list[Tensor] = []
    count = rows = 0
    for block in blocks:
        rows = rows or max(1, CHUNK // max(1, block.shape[-1]))
        while count + len(block) >= rows:
            yield (
                torch.cat([*pending, block[: rows - count]])
                if pending
                else block[:rows]
            )
            block, pending, count = block[rows - count :], [], 0
        if len(block):
            pending, count = [*pending, block], count + len(block)
    if pending:
        yield torch.cat(pending)


def widened(rows: Tensor) -> Tensor:
    """The rows in float64 on their device, or on the CPU where the device has no
    float64.
    """
    rows = rows.detach()
    return (rows.cpu() if rows.device.type == "mps" else rows).to(torch.float64)


class RunningStatistics:
    """The mean of states `[token, width]`, their scatter about it, and the sum of their
    directions, in float64.

    Up to as many states as they are wide are kept as they are; of more, only the
    scatter `[width, width]`. Two of them can be added. The first state is subtracted
    before anything is summed, so equal states have no scatter at all.

    >>> seen = RunningStatistics()
    >>> seen.add(torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 0.0]]))
    >>> seen.count, seen.mean.tolist(), round(seen.anisotropy, 3), seen.variances.numpy().round(3).tolist()
    (3, [2.0, 1.3333333333333333], 0.333, [0.0, 5.556])
    """

    def __init__(self) -> None:
        self.count = self._nonzero = 0
        self._origin = self._directions = torch.zeros(0, dtype=torch.float64)
        self._rows: list[Tensor] = []
        # Of the states that are no longer kept, relative to the origin.
        self._mean = self._scatter = self._origin
        self._summed = 0

    def add(self, rows: Tensor) -> None:
        """Add some states, which must be finite."""
        if not len(rows):
            return
        rows = rows.to(torch.float64)
        if not self.count:
            self._origin = rows[0].clone()
            self._directions = torch.zeros_like(self._origin)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        self._directions = self._directions + (
            rows / torch.where(norms > 0, norms, torch.inf)
        ).sum(0)
        self._nonzero += int((norms > 0).sum())
        self.count += len(rows)
        self._rows.append(rows - self._origin)
        if self.count > rows.shape[1]:
            self._summarise()

    def __add__(self, other: "RunningStatistics") -> "RunningStatistics":
        both = RunningStatistics()
        not_empty = [part for part in (self, other) if part.count]
        if len(not_empty) < 2:
            return not_empty[0] if not_empty else both
        both.count, both._nonzero = (
            self.count + other.count,
            self._nonzero + other._nonzero,
        )
        both._origin, both._directions = (
            self._origin,
            self._directions + other._directions,
        )
        shift = other._origin - self._origin
        both._rows = [*self._rows, *(rows + shift for rows in other._rows)]
        both._merge(self._summed, self._mean, self._scatter)
        both._merge(
            other._summed,
            other._mean + shift if other._summed else other._mean,
            other._scatter,
        )
        if both.count > len(shift):
            both._summarise()
        return both

    @property
    def mean(self) -> Tensor:
        """The mean state; empty where no state was added."""
        summed = sum(
            (rows.sum(0) for rows in self._rows),
            self._mean * self._summed if self._summed else 0,
        )
        return self._origin + summed / max(1, self.count)

    @property
    def anisotropy(self) -> float:
        """The mean cosine of two different states; zeros have no direction and are left
        out. NaN for fewer than two.
        """
        n = self._nonzero
        if n < 2:
            return float("nan")
        return min(
            1.0, max(-1.0, (float(self._directions.square().sum()) - n) / (n * (n - 1)))
        )

    @property
    def variances(self) -> Tensor:
        """The eigenvalues of the covariance, ascending; without the zeros that it has
        where states are few.
        """
        if not self.count:
            return self._origin
        if self._summed:
            self._summarise()
            eigenvalues = torch.linalg.eigvalsh(self._scatter)
        else:
            rows = torch.cat(self._rows)
            rows = rows - rows.mean(0)
            eigenvalues = torch.linalg.eigvalsh(
                rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
            )
        return torch.clamp(eigenvalues, min=0) / self.count

    def _summarise(self) -> None:
        """Replace the states that were kept by their mean and scatter."""
        if self._rows:
            rows, self._rows = torch.cat(self._rows), []
            mean = rows.mean(0)
            rows = rows - mean
            self._merge(len(rows), mean, rows.T @ rows)

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        """Add a mean and a scatter to those there are, without cancellation (Chan et
        al. 1979).
        """
        if not count or not self._summed:
            if count:
                self._summed, self._mean, self._scatter = count, mean, scatter
            return
        apart, both = mean - self._mean, self._summed + count
        self._scatter = (
            self._scatter
            + scatter
            + torch.outer(apart, apart) * (self._summed * count / both)
        )
        self._mean, self._summed = self._mean + apart * (count / both), both


def effective_rank(variances: Tensor) -> float:
    """The exponential of the entropy of a normalised spectrum (Roy and Vetterli 2007,
    of variances).

    It is d where d directions have the same variance and the others none; NaN where
    there is no variance at all.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])), 9), effective_rank(torch.tensor([5.0, 0.0]))
    (3.0, 1.0)
    """
    variances = variances.to(torch.float64)
    total = variances.sum()
    return (
        float(torch.special.entr(variances / total).sum().exp())
        if bool(total > 0)
        else float("nan")
    )


def two_nn(points: Tensor) -> float:
    """The intrinsic dimension of points `[point, width]` by their two nearest
    neighbours: TwoNN (Facco et al. 2017).

    Where points fill d dimensions, the ratio of a point's second distance to its first
    is distributed with exponent d; it is fitted through the origin, without the largest
    tenth. Equal points count once. NaN for fewer than 20.

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
    """The distances to the two nearest other points, `[point, 2]`: candidates by
    products, distances by subtraction.

    Products round in proportion to the largest squared norm, which hides small
    distances between points far from the origin. A point with another candidate within
    that rounding is compared with all points by subtraction.
    """
    points = points - points.mean(0)
    squares = points.square().sum(1)
    rounding = (
        (points.shape[1] + 4) * torch.finfo(torch.float64).eps * 4 * squares.max()
    )
    distances_of = []
    for start in range(0, len(points), ROWS):
        block = points[start : start + ROWS]
        own = torch.arange(start, start + len(block), device=points.device)
        distances = squares - 2 * block @ points.T + squares[own, None]
        distances[own - start, own] = torch.inf
        near = distances.topk(CANDIDATES, largest=False, sorted=True)
        exact = (
            torch.linalg.vector_norm(points[near.indices] - block[:, None], dim=-1)
            .sort(dim=1)
            .values[:, :2]
        )
        doubtful = near.values[:, -1] - rounding <= exact[:, 1].square()
        for row in doubtful.nonzero()[:, 0].tolist():
            apart = torch.linalg.vector_norm(points - block[row], dim=1)
            apart[start + row] = torch.inf
            exact[row] = apart.topk(2, largest=False, sorted=True).values
        distances_of.append(exact)
    return torch.cat(distances_of)
