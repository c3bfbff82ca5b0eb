"""Cloud: what is kept of any number of states that are seen once, a few at a time."""

import torch
from torch import Tensor


class Cloud:
    """The mean of states `[token, width]`, their scatter about it, and the sum of their directions, in float64.

    Up to as many states as they are wide are kept as they are; of more, only the scatter `[width, width]`. Two clouds
    add up to one. The first state is taken off before anything is summed, so equal states have no scatter at all.

    >>> cloud = Cloud()
    >>> cloud.add(torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 0.0]]))
    >>> cloud.count, cloud.mean.tolist(), round(cloud.anisotropy, 3), cloud.variances.numpy().round(3).tolist()
    (3, [2.0, 1.3333333333333333], 0.333, [0.0, 5.556])
    """

    def __init__(self) -> None:
        self.count = self._directed = 0
        self._origin = self._directions = torch.zeros(0, dtype=torch.float64)
        self._rows: list[Tensor] = []
        self._mean = self._scatter = self._origin  # of what is no longer kept as it is, about the origin
        self._summed = 0

    def add(self, rows: Tensor) -> None:
        """See some more states; they must be finite."""
        if not len(rows):
            return
        rows = rows.to(torch.float64)
        if not self.count:
            self._origin = rows[0].clone()
            self._directions = torch.zeros_like(self._origin)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        self._directions = self._directions + (rows / torch.where(norms > 0, norms, torch.inf)).sum(0)
        self._directed += int((norms > 0).sum())
        self.count += len(rows)
        self._rows.append(rows - self._origin)
        if self.count > rows.shape[1]:
            self._settle()

    def __add__(self, other: "Cloud") -> "Cloud":
        both = Cloud()
        full = [one for one in (self, other) if one.count]
        if len(full) < 2:
            return full[0] if full else both
        both.count, both._directed = self.count + other.count, self._directed + other._directed
        both._origin, both._directions = self._origin, self._directions + other._directions
        shift = other._origin - self._origin
        both._rows = [*self._rows, *(rows + shift for rows in other._rows)]
        both._take(self._summed, self._mean, self._scatter)
        both._take(other._summed, other._mean + shift if other._summed else other._mean, other._scatter)
        if both.count > len(shift):
            both._settle()
        return both

    @property
    def mean(self) -> Tensor:
        """The mean state; empty while there is none."""
        summed = sum((rows.sum(0) for rows in self._rows), self._mean * self._summed if self._summed else 0)
        return self._origin + summed / max(1, self.count)

    @property
    def anisotropy(self) -> float:
        """The mean cosine between different states; a zero has no direction and is left out. NaN for fewer than two."""
        n = self._directed
        if n < 2:
            return float("nan")
        return min(1.0, max(-1.0, (float(self._directions.square().sum()) - n) / (n * (n - 1))))

    @property
    def variances(self) -> Tensor:
        """The spectrum of the covariance, rising; without the zeros that it must have where states are few."""
        if not self.count:
            return self._origin
        if self._summed:
            self._settle()
            found = torch.linalg.eigvalsh(self._scatter)
        else:
            rows = torch.cat(self._rows)
            rows = rows - rows.mean(0)
            found = torch.linalg.eigvalsh(_squared(rows.T if len(rows) <= rows.shape[1] else rows))
        return torch.clamp(found, min=0) / self.count

    def _settle(self) -> None:
        """Let go of the states that were kept as they are, for their mean and scatter."""
        if self._rows:
            rows, self._rows = torch.cat(self._rows), []
            mean = rows.mean(0)
            rows = rows - mean
            self._take(len(rows), mean, _squared(rows))

    def _take(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        """Join a mean and a scatter to those there are, without the cancellation that sums of squares suffer."""
        if not count or not self._summed:
            if count:
                self._summed, self._mean, self._scatter = count, mean, scatter
            return
        apart, both = mean - self._mean, self._summed + count
        self._scatter = self._scatter + scatter + torch.outer(apart, apart) * (self._summed * count / both)
        self._mean, self._summed = self._mean + apart * (count / both), both


def _squared(rows: Tensor) -> Tensor:
    """The products of channels; numpy sees that a matrix meets itself and makes half of them, where torch makes all."""
    return rows.T @ rows if rows.device.type != "cpu" else torch.from_numpy(rows.numpy().T @ rows.numpy())
