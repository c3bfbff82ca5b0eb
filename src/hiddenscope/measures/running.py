"""Running statistics of hidden states that are read once, some at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hiddenscope.measures.distances import Distances

# Numbers that are processed together: 8 MiB of float64.
CHUNK = 1 << 20
# With fewer points, the ratios of neighbour distances say nothing.
FEWEST_POINTS = 20
# The share of the largest ratios that TwoNN leaves out: they come from the sparse edges
# of the set.
DISCARDED = 0.1
# Nearest points by products, whose distances are then computed by subtraction.
CANDIDATES = 6
# Points whose candidates are compared at a time.
ROWS = 512


def chunks(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the same rows in order, about a million numbers at a time.

    So no result depends on how a source cuts its rows into blocks.

    >>> blocks = [torch.zeros(3, 400_000), torch.zeros(2, 400_000)]
    >>> [len(chunk) for chunk in chunks(blocks)]
    [2, 2, 1]
    """
    pending: list[Tensor] = []
    count = rows = 0
    for block in blocks:
        rows = rows or max(1, CHUNK // max(1, block.shape[-1]))
        while count + len(block) >= rows:
            missing = rows - count
            # A single block is not copied.
            if pending:
                yield torch.cat([*pending, block[:missing]])
            else:
                yield block[:missing]
            block = block[missing:]
            pending = []
            count = 0
        if len(block):
            pending.append(block)
            count += len(block)
    if pending:
        yield torch.cat(pending)


def widened(rows: Tensor) -> Tensor:
    """Return the rows in float64, on the CPU if their device does not have it."""
    rows = rows.detach()
    # Apple's GPUs have no float64.
    if rows.device.type == "mps":
        rows = rows.cpu()
    return rows.to(torch.float64)


class RunningStatistics:
    """Mean of states `[token, width]`, their scatter, and the sum of their directions.

    All are in float64. Up to as many states as they are wide are stored as they are; of
    more, only the scatter `[width, width]`. Two of them can be added. The first state
    is subtracted before anything is summed, so equal states have no scatter at all.

    >>> statistics = RunningStatistics()
    >>> statistics.add(torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 0.0]]))
    >>> statistics.count, statistics.mean.tolist(), round(statistics.anisotropy, 3)
    (3, [2.0, 1.3333333333333333], 0.333)
    >>> statistics.variances.numpy().round(3).tolist()
    [0.0, 5.556]
    """

    def __init__(self) -> None:
        self.count = self._nonzero = 0
        self._origin = self._directions = torch.zeros(0, dtype=torch.float64)
        self._rows: list[Tensor] = []
        # Of the states that are not stored any more, relative to the origin.
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
        # States of zero have no direction: divided by infinity, they add nothing.
        directions = rows / torch.where(norms > 0, norms, torch.inf)
        self._directions = self._directions + directions.sum(0)
        self._nonzero += int((norms > 0).sum())
        self.count += len(rows)
        self._rows.append(rows - self._origin)
        if self.count > rows.shape[1]:
            self._summarise()

    def __add__(self, other: "RunningStatistics") -> "RunningStatistics":
        if not self.count:
            return other
        if not other.count:
            return self
        both = RunningStatistics()
        both.count = self.count + other.count
        both._nonzero = self._nonzero + other._nonzero
        both._origin = self._origin
        both._directions = self._directions + other._directions
        shift = other._origin - self._origin
        both._rows = [*self._rows, *(rows + shift for rows in other._rows)]
        both._merge(self._summed, self._mean, self._scatter)
        if other._summed:
            both._merge(other._summed, other._mean + shift, other._scatter)
        if both.count > len(shift):
            both._summarise()
        return both

    @property
    def mean(self) -> Tensor:
        """Return the mean state; empty if no state was added."""
        total = self._mean * self._summed if self._summed else 0
        for rows in self._rows:
            total = total + rows.sum(0)
        return self._origin + total / max(1, self.count)

    @property
    def anisotropy(self) -> float:
        """Return the mean cosine of two different states.

        Zeros have no direction and are left out; it is NaN for fewer than two others.
        """
        n = self._nonzero
        if n < 2:
            return float("nan")
        # The squared norm of the summed directions is n plus the cosines of all ordered
        # pairs.
        cosines = float(self._directions.square().sum()) - n
        return min(1.0, max(-1.0, cosines / (n * (n - 1))))

    @property
    def variances(self) -> Tensor:
        """Return the eigenvalues of the covariance, ascending.

        Where states are fewer than they are wide, the zeros that follow from that are
        left out.
        """
        if not self.count:
            return self._origin
        if self._summed:
            self._summarise()
            scatter = self._scatter
        else:
            rows = torch.cat(self._rows)
            rows = rows - rows.mean(0)
            # Both products have the same eigenvalues but for zeros.
            few = len(rows) <= rows.shape[1]
            scatter = rows @ rows.T if few else rows.T @ rows
        eigenvalues = torch.linalg.eigvalsh(scatter)
        return torch.clamp(eigenvalues, min=0) / self.count

    @property
    def covariance(self) -> Tensor:
        """Return the covariance `[width, width]` of the states.

        >>> statistics = RunningStatistics()
        >>> statistics.add(torch.tensor([[3.0, 0.0], [1.0, 4.0]]))
        >>> statistics.covariance.tolist()
        [[1.0, -2.0], [-2.0, 4.0]]
        """
        self._summarise()
        return self._scatter / max(1, self.count)

    def _summarise(self) -> None:
        """Replace the stored states by their mean and scatter."""
        if self._rows:
            rows = torch.cat(self._rows)
            self._rows = []
            mean = rows.mean(0)
            rows = rows - mean
            self._merge(len(rows), mean, rows.T @ rows)

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        """Add a mean and a scatter without cancellation (Chan et al. 1979)."""
        if not count:
            return
        if not self._summed:
            self._summed, self._mean, self._scatter = count, mean, scatter
            return
        apart = mean - self._mean
        both = self._summed + count
        between = torch.outer(apart, apart) * (self._summed * count / both)
        self._scatter = self._scatter + scatter + between
        self._mean = self._mean + apart * (count / both)
        self._summed = both


def effective_rank(variances: Tensor) -> float:
    """Return the exponential of the entropy of a spectrum (Roy and Vetterli 2007).

    The spectrum is of variances. The rank is d where d directions have the same
    variance and the others none, and NaN where there is no variance at all.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])), 9)
    3.0
    """
    variances = variances.to(torch.float64)
    total = variances.sum()
    if not total > 0:
        return float("nan")
    return float(torch.special.entr(variances / total).sum().exp())


def two_nn(points: Tensor, rounding: float = 0.0) -> float:
    """Estimate the intrinsic dimension of points `[point, width]`.

    TwoNN (Facco et al. 2017): where points fill d dimensions, the ratio of a point's
    second distance to its first has a Pareto distribution with exponent d. It is fitted
    through the origin, without the largest tenth. Points count once that are equal, or
    nearer than `rounding` as a share of their norm. It is NaN for fewer than 20.

    >>> plane = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> round(two_nn(plane @ torch.ones(2, 8).tril()), 1)
    2.0
    """
    points = torch.unique(points.to("cpu", torch.float64), dim=0)
    if len(points) < FEWEST_POINTS:
        return float("nan")
    first, second = _two_nearest(points).unbind(1)
    reach = rounding * torch.linalg.vector_norm(points, dim=1)
    close = first < reach
    if close.any():
        # One text in two batches gives two states, of which the nearest says nothing.
        distinct = points[close][:0]
        for point, near in zip(points[close], reach[close], strict=True):
            if (torch.linalg.vector_norm(distinct - point, dim=1) >= near).all():
                distinct = torch.cat([distinct, point[None]])
        return two_nn(torch.cat([points[~close], distinct]))
    ratios = (second / first).log().sort().values
    count = int(len(ratios) * (1 - DISCARDED))
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    x = ratios[:count]
    y = -torch.log1p(-rank / len(ratios))
    slope = float((x * y).sum() / x.square().sum())
    return slope if slope < float("inf") else float("nan")


def _two_nearest(points: Tensor) -> Tensor:
    """Return the distances to the two nearest other points, `[point, 2]`.

    Candidates are found by products, which are fast. But products round in proportion
    to the largest squared norm, which hides small distances between points far from the
    origin. So the distances of candidates are computed by subtraction, and a point that
    may have another candidate within that rounding is compared with all points.
    """
    points = points - points.mean(0)
    eps = torch.finfo(torch.float64).eps
    rounding = (points.shape[1] + 4) * eps * 4 * points.square().sum(1).max()
    # The first is the point itself.
    indices, by_products = Distances(points).nearest(CANDIDATES + 1)
    blocks = []
    for start in range(0, len(points), ROWS):
        here = slice(start, start + ROWS)
        apart = points[indices[here, 1:]] - points[here, None]
        distances = torch.linalg.vector_norm(apart, dim=-1).sort(dim=1).values[:, :2]
        limit = by_products[here, -1].square() - rounding
        doubtful = limit <= distances[:, 1].square()
        for row in doubtful.nonzero()[:, 0].tolist():
            to_all = torch.linalg.vector_norm(points - points[start + row], dim=1)
            to_all[start + row] = torch.inf
            distances[row] = to_all.topk(2, largest=False, sorted=True).values
        blocks.append(distances)
    return torch.cat(blocks)
