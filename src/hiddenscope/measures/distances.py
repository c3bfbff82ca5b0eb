"""Distances: every row against every other, some rows at a time, with exact zeros between rows that are equal."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

AT_ONCE = 1 << 22  # distances that are computed or looked at together: 32 MiB of float64
KEPT = 1 << 24  # distances that are kept when they have been computed: 128 MiB of float64
FEW = 1 << 18  # distances for which float64 costs nothing worth saving
CLOSE = 0.01  # of the squared norms: pairs nearer than this lose too many digits in float32
TIE = {torch.float64: 1e-12, torch.float32: 1e-6}  # of the squared norms: the rounding of a product, with some room


class Distances:
    """Euclidean distances between rows `[row, width]`.

    They come from products of the rows less their mean: in float64, and where there are many and no two rows are so
    near one another that it matters, in float32.

    >>> apart = Distances(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]))
    >>> [block.tolist() for _, block in apart.blocks()]
    [[[0.0, 5.0, 5.0], [5.0, 0.0, 0.0], [5.0, 0.0, 0.0]]]
    >>> apart.alike, Distances(torch.ones(3, 2)).alike
    (False, True)
    """

    def __init__(self, rows: Tensor) -> None:
        wide = rows.detach().cpu().double()
        self.rows = wide - wide.mean(0)
        self.norms = self.rows.square().sum(1)
        self.groups = _groups(rows.detach().cpu())
        self.differ = self.distinct == len(wide)
        self.dtype = torch.float32 if FEW < len(wide) ** 2 <= KEPT else torch.float64
        if self.dtype == torch.float32 and not self._keeps_digits():
            self.dtype = torch.float64
            del self._whole

    def __len__(self) -> int:
        return len(self.rows)

    def tie(self, here: slice) -> Tensor:
        """How far two squared distances may differ by rounding alone, `[some rows, row]`."""
        return (TIE[self.dtype] * (self.norms[here, None] + self.norms)).to(self.dtype)

    @property
    def distinct(self) -> int:
        """How many rows there are when equal ones count once."""
        return int(self.groups.max()) + 1 if len(self) else 0

    @property
    def alike(self) -> bool:
        """Whether all rows are equal."""
        return self.distinct <= 1

    def blocks(self, at_once: int = AT_ONCE) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time: which, and their distances `[some rows, row]`, not to be written to."""
        some = max(1, at_once // max(1, len(self)))
        for start in range(0, len(self), some):
            here = slice(start, min(start + some, len(self)))
            if len(self) ** 2 <= KEPT:
                yield here, self._whole[here]
            else:
                yield here, self._apart(self.rows[here] @ self.rows.T, here)

    @cached_property
    def _whole(self) -> Tensor:
        """All distances."""
        rows = self.rows.to(self.dtype).numpy()
        return self._apart(torch.from_numpy(rows @ rows.T), slice(0, len(self)))  # numpy computes half of it, torch all

    def _apart(self, products: Tensor, here: slice) -> Tensor:
        """The distances of some rows to all, made in the place of their products."""
        norms = self.norms.to(products.dtype)
        apart = products.mul_(-2).add_(norms).add_(norms[here, None]).clamp_min_(0).sqrt_()
        if self.differ:
            itself = torch.arange(here.stop - here.start)
            apart[itself, itself + here.start] = 0
            return apart
        return apart.masked_fill_(self.groups[here, None] == self.groups[None], 0)

    def _keeps_digits(self) -> bool:
        """Whether no two rows that differ are so near one another that float32 loses too much of their distance."""
        near = self._whole < (CLOSE * self.norms).float().sqrt()[:, None]  # equal rows are, and no others may be
        return int(near.sum()) == int(torch.bincount(self.groups).square().sum())

    def nearest(self, count: int) -> tuple[Tensor, Tensor]:
        """The nearest rows of each row and their distances, `[row, count]`; the first is the row itself.

        >>> Distances(torch.tensor([[0.0], [1.0], [3.0]])).nearest(2)[0].tolist()
        [[0, 1], [1, 0], [2, 1]]
        """
        found = []
        for here, block in self.blocks():
            rows = torch.arange(here.start, here.stop)
            ranked = torch.where(rows[:, None] == torch.arange(len(self)), -1, block)
            distances, places = ranked.topk(count, dim=1, largest=False, sorted=True)
            distances[:, 0] = 0
            found.append((places, distances))
        places, distances = (torch.cat(side) for side in zip(*found, strict=True))
        return places, distances


def trustworthiness(apart: Distances, picture: Tensor, neighbours: int) -> float:
    """How far the neighbours in a picture are neighbours indeed: 1 if all are, about 0.5 by chance.

    As scikit-learn has it; rows that are equally far share the better rank.

    >>> rows = torch.tensor([[0.0], [1.0], [3.0], [6.0], [10.0]])
    >>> trustworthiness(Distances(rows), rows, 2)
    1.0
    """
    count = len(apart)
    near, _ = Distances(picture).nearest(neighbours + 1)
    lost = 0.0
    for here, block in apart.blocks(AT_ONCE // 4):
        ahead = torch.stack([(block < block.gather(1, near[here, k : k + 1])).sum(1) for k in range(1, neighbours + 1)])
        lost += float((ahead - neighbours).clamp_min(0).sum())  # a row counts itself among those that are nearer
    return 1.0 - lost * 2.0 / (count * neighbours * (2.0 * count - 3.0 * neighbours - 1.0))


def _groups(rows: Tensor) -> Tensor:
    """The same number for rows that are equal, of which most are not."""
    numbers: dict[bytes, int] = {}
    plain = (rows + 0.0).contiguous().view(torch.uint8).numpy()  # no negative zeros
    return torch.tensor([numbers.setdefault(row.tobytes(), len(numbers)) for row in plain])
