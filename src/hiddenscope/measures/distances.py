"""Euclidean distances between all rows, and whether a picture keeps neighbours.

Why not scikit-learn: permutation tests, neighbours and trustworthiness all read the
same distances, which are computed once here. Equal rows (last tokens at `layer.0`, for
instance) are at a distance of exactly zero, which products alone do not give.
scikit-learn's `trustworthiness` returns the same number where no two distances are
equal; it ranks equal ones arbitrarily (0.93 instead of 1 for a perfect picture of two
points that occur 25 times each) and holds three matrices of all pairs: 60 GB for 50,000
rows, where this holds 32 MiB.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

# Distances that are computed together: 32 MiB of float64.
AT_ONCE = 1 << 22
# Up to this many distances are kept once they have been computed: 128 MiB of float64.
KEPT = 1 << 24
# The rounding of a squared distance, relative to the squared norms.
TIE = 1e-12


class Distances:
    """Euclidean distances between rows `[row, width]`.

    They come from products of the centred rows, in float64.

    >>> distances = Distances(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]))
    >>> [block.tolist() for _, block in distances.blocks()]
    [[[0.0, 5.0, 5.0], [5.0, 0.0, 0.0], [5.0, 0.0, 0.0]]]
    >>> distances.all_equal, Distances(torch.ones(3, 2)).all_equal
    (False, True)
    """

    def __init__(self, rows: Tensor) -> None:
        host = rows.detach().cpu()
        wide = host.double()
        self.rows = wide - wide.mean(0)
        self.squared_norms = self.rows.square().sum(1)
        # Equal rows have the same number. Adding zero turns negative zeros, whose bytes
        # differ, into positive ones.
        content = (host + 0.0).contiguous().view(torch.uint8).numpy()
        numbers: dict[bytes, int] = {}
        self.codes = torch.tensor(
            [numbers.setdefault(row.tobytes(), len(numbers)) for row in content]
        )
        self.all_differ = self.distinct == len(wide)

    def __len__(self) -> int:
        return len(self.rows)

    def tie(self, here: slice) -> Tensor:
        """Return how far two squared distances of some rows may differ by rounding."""
        return TIE * (self.squared_norms[here, None] + self.squared_norms)

    @property
    def distinct(self) -> int:
        """Return the number of different rows."""
        return int(self.codes.max()) + 1 if len(self) else 0

    @property
    def all_equal(self) -> bool:
        """Return whether all rows are equal."""
        return self.distinct <= 1

    def blocks(self, at_once: int = AT_ONCE) -> Iterator[tuple[slice, Tensor]]:
        """Yield the slice of some rows and their distances `[some, row]`.

        The distances must not be written to.
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
        """Return all distances."""
        rows = self.rows.numpy()
        # numpy sees that the product is symmetric and computes half of it; torch
        # computes all.
        return self._from_products(torch.from_numpy(rows @ rows.T), slice(0, len(self)))

    def _from_products(self, products: Tensor, here: slice) -> Tensor:
        """Turn products of some rows with all rows into distances, in place."""
        norms = self.squared_norms
        squared = products.mul_(-2).add_(norms).add_(norms[here, None])
        # Rounding may leave a small negative number.
        distances = squared.clamp_min_(0).sqrt_()
        if self.all_differ:
            diagonal = torch.arange(here.stop - here.start)
            distances[diagonal, diagonal + here.start] = 0
            return distances
        return distances.masked_fill_(self.codes[here, None] == self.codes[None], 0)

    def nearest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the nearest rows of each row and their distances, `[row, count]`.

        The first is the row itself.

        >>> Distances(torch.tensor([[0.0], [1.0], [3.0]])).nearest(2)[0].tolist()
        [[0, 1], [1, 0], [2, 1]]
        """
        every_index = []
        every_distance = []
        for here, block in self.blocks():
            rows = torch.arange(here.start, here.stop)[:, None]
            itself = rows == torch.arange(len(self))
            # A negative distance, so that a row comes before others that equal it.
            distances, indices = torch.where(itself, -1, block).topk(
                count, dim=1, largest=False, sorted=True
            )
            distances[:, 0] = 0
            every_index.append(indices)
            every_distance.append(distances)
        return torch.cat(every_index), torch.cat(every_distance)


def trustworthiness(distances: Distances, picture: Tensor, neighbours: int) -> float:
    """Measure whether neighbours in a picture are close in the full space.

    It is 1 if all are, and about 0.5 by chance (Venna and Kaski 2001). As in
    scikit-learn, except that rows at the same distance share the better rank.

    >>> rows = torch.tensor([[0.0], [1.0], [3.0], [6.0], [10.0]])
    >>> trustworthiness(Distances(rows), rows, 2)
    1.0
    """
    count = len(distances)
    shown, _ = Distances(picture).nearest(neighbours + 1)
    penalty = 0.0
    for here, block in distances.blocks(AT_ONCE // 4):
        ranks = []
        for k in range(1, neighbours + 1):
            # The number of rows that are closer, which includes the row itself.
            closer = block < block.gather(1, shown[here, k : k + 1])
            ranks.append(closer.sum(1))
        penalty += float((torch.stack(ranks) - neighbours).clamp_min(0).sum())
    worst = count * neighbours * (2.0 * count - 3.0 * neighbours - 1.0)
    return 1.0 - penalty * 2.0 / worst
