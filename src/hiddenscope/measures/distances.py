"""Euclidean distances of every row to every other, some rows at a time, and whether a
picture keeps neighbours.

Why not scikit-learn's: permutation tests, neighbours and trustworthiness all read the
same distances, which are computed once here. Equal rows (last tokens at `layer.0`, for
instance) are at a distance of exactly zero, which products alone do not give.
scikit-learn's `trustworthiness` gives the same number where no two distances are equal;
it ranks equal ones arbitrarily (0.93 in place of 1 for a perfect picture of two points
that occur 25 times each) and holds three matrices of all pairs: 60 GB for 50,000 rows,
where this holds 32 MiB.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

AT_ONCE = 1 << 22  # distances that are computed together: 32 MiB of float64
# As many distances are kept once they have been computed: 128 MiB of float64.
KEPT = 1 << 24
SMALL = 1 << 18  # distances for which float64 costs nothing worth saving
# Squared distances below this share of the squared norms lose too many digits in
# float32.
CLOSE = 0.01
# The rounding of a squared distance, over the squared norms.
TIE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
}


class Distances:
    """Euclidean distances between rows `[row, width]`.

    They come from products of the centred rows: in float64, or in float32 where there
    are many rows and no two of them are so close that its rounding matters.

    >>> distances = Distances(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]))
    >>> [block.tolist() for _, block in distances.blocks()]
    [[[0.0, 5.0, 5.0], [5.0, 0.0, 0.0], [5.0, 0.0, 0.0]]]
    >>> distances.all_equal, Distances(torch.ones(3, 2)).all_equal
    (False, True)
    """

    def __init__(self, rows: Tensor) -> None:
        wide = rows.detach().cpu().double()
        self.rows = wide - wide.mean(0)
        self.norms = self.rows.square().sum(1)  # squared
        self.codes = _codes_of_equal_rows(rows.detach().cpu())
        self.all_differ = self.distinct == len(wide)
        self.dtype = torch.float32 if SMALL < len(wide) ** 2 <= KEPT else torch.float64
        if self.dtype == torch.float32 and not self._float32_suffices():
            self.dtype = torch.float64
            del self._whole

    def __len__(self) -> int:
        return len(self.rows)

    def tie(self, here: slice) -> Tensor:
        """How far two squared distances may differ by rounding alone, `[some rows,
        row]`.
        """
        return (TIE[self.dtype] * (self.norms[here, None] + self.norms)).to(self.dtype)

    @property
    def distinct(self) -> int:
        """The number of different rows."""
        return int(self.codes.max()) + 1 if len(self) else 0

    @property
    def all_equal(self) -> bool:
        """Whether all rows are equal."""
        return self.distinct <= 1

    def blocks(self, at_once: int = AT_ONCE) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time: their slice, and their distances `[some rows, row]`,
        which must not be written to.
        """
        count = max(1, at_once // max(1, len(self)))
        for start in range(0, len(self), count):
            here = slice(start, min(start + count, len(self)))
            if len(self) ** 2 <= KEPT:
                yield here, self._whole[here]
            else:
                yield here, self._from_products(self.rows[here] @ self.rows.T, here)

    @cached_property
    def _whole(self) -> Tensor:
        """All distances."""
        rows = self.rows.to(self.dtype).numpy()
        # numpy sees that the product is symmetric and computes half of it; torch
        # computes all.
        return self._from_products(torch.from_numpy(rows @ rows.T), slice(0, len(self)))

    def _from_products(self, products: Tensor, here: slice) -> Tensor:
        """The distances of some rows to all, computed in place of their products."""
        norms = self.norms.to(products.dtype)
        distances = (
            products.mul_(-2).add_(norms).add_(norms[here, None]).clamp_min_(0).sqrt_()
        )
        if self.all_differ:
            diagonal = torch.arange(here.stop - here.start)
            distances[diagonal, diagonal + here.start] = 0
            return distances
        return distances.masked_fill_(self.codes[here, None] == self.codes[None], 0)

    def _float32_suffices(self) -> bool:
        """Whether no two different rows are so close to one another that float32 loses
        too much of their distance.
        """
        # Equal rows are, and no others may be.
        close = self._whole < (CLOSE * self.norms).float().sqrt()[:, None]
        return int(close.sum()) == int(torch.bincount(self.codes).square().sum())

    def nearest(self, count: int) -> tuple[Tensor, Tensor]:
        """The nearest rows of each row and their distances, `[row, count]`; the first
        is the row itself.

        >>> Distances(torch.tensor([[0.0], [1.0], [3.0]])).nearest(2)[0].tolist()
        [[0, 1], [1, 0], [2, 1]]
        """
        blocks = []
        for here, block in self.blocks():
            itself = torch.arange(here.start, here.stop)[:, None] == torch.arange(
                len(self)
            )
            distances, indices = torch.where(itself, -1, block).topk(
                count, dim=1, largest=False, sorted=True
            )
            distances[:, 0] = 0
            blocks.append((indices, distances))
        indices, distances = (torch.cat(side) for side in zip(*blocks, strict=True))
        return indices, distances


def trustworthiness(distances: Distances, picture: Tensor, neighbours: int) -> float:
    """Whether neighbours in a picture are close in the full space: 1 if all are, about
    0.5 by chance.

    As scikit-learn defines it (Venna and Kaski 2001), where rows at the same distance
    share the better rank.

    >>> rows = torch.tensor([[0.0], [1.0], [3.0], [6.0], [10.0]])
    >>> trustworthiness(Distances(rows), rows, 2)
    1.0
    """
    count = len(distances)
    shown, _ = Distances(picture).nearest(neighbours + 1)
    penalty = 0.0
    for here, block in distances.blocks(AT_ONCE // 4):
        closer = [
            (block < block.gather(1, shown[here, k : k + 1])).sum(1)
            for k in range(1, neighbours + 1)
        ]
        # A row is among those closer to itself.
        penalty += float((torch.stack(closer) - neighbours).clamp_min(0).sum())
    return 1.0 - penalty * 2.0 / (
        count * neighbours * (2.0 * count - 3.0 * neighbours - 1.0)
    )


def _codes_of_equal_rows(rows: Tensor) -> Tensor:
    """The same number for equal rows, other numbers for other rows."""
    numbers: dict[bytes, int] = {}
    # Without negative zeros.
    plain = (rows + 0.0).contiguous().view(torch.uint8).numpy()
    return torch.tensor(
        [numbers.setdefault(row.tobytes(), len(numbers)) for row in plain]
    )
