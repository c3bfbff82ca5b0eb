"""The nearest rows to each query, exactly, by blocked matrix products.

The products are computed in float32. Every pair of a row and a query that rounding
leaves undecided is computed again in float64, each row by itself, so that equal rows
get equal scores wherever they stand, and of equals the first wins.

A piece of rows is small enough to stay in the cache from its products over their
maximum to its norms, and the products are not kept. Only rows that may be among the
nearest, a few in a thousand, are looked at again.

>>> nearest = Nearest(torch.tensor([[0.0, 2.0, 1.0]]), k=2)
>>> nearest.see(torch.eye(3))
>>> nearest.numbers.tolist(), nearest.scores.round(2).tolist()
([[1, 2]], [[0.89, 0.45]])
"""

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.states.arrays import Floats, Ints

Nearness: TypeAlias = Literal["cosine", "dot", "l2"]

# Of float32.
ROUNDING = 2.0**-24
# Close to the largest float32.
LARGEST = 1e38
# A cosine closer to zero than this is a bar just below zero.
SMALLEST_KEY = 1e-6
# Bytes of rows that are multiplied at a time: the caches of some cores hold them.
PIECE = 2**22
# Rows whose products show whether torch computes in float32.
TRIED = 1024
# Pairs of a row and a query that are computed again at a time: few, so that they stay
# in the cache.
PAIRS = 256


class _Bar(NamedTuple):
    """The bar that a row must reach to be among the nearest, for each query.

    A row may be among them if `left @ row + offset >= lower_bound * term`, where the
    term is the length of the row, or for L2 its square. Rounding in float32 is allowed
    for: whatever reaches the bar in exact arithmetic reaches this one.
    """

    left: Tensor
    offset: Tensor | None
    lower_bound: Tensor


class Nearest:
    """The k rows nearest to each query, among those that were added with `see`.

    `numbers` and `scores` are `[query, rank]`, the nearest first. Scores are cosines,
    dot products or L2 distances. `seen` is the number of rows so far.
    """

    def __init__(self, queries: Tensor, k: int, nearness: Nearness = "cosine") -> None:
        self.k = k
        self.nearness = nearness
        self.seen = 0
        self._queries: Floats = queries.detach().cpu().double().numpy()
        self._lengths = np.linalg.norm(self._queries, axis=1)
        scale = self._lengths[:, None] if nearness == "cosine" else 1.0
        self._narrow = torch.from_numpy((self._queries / scale).astype(np.float32))
        # The rounding of a dot product, over the two lengths.
        self._share = (queries.shape[1] + 8) * ROUNDING
        self._by_torch: bool | None = None
        self.numbers: Ints = np.zeros((len(queries), 0), dtype=np.int64)
        # Scores of which the larger is nearer.
        self._keys: Floats = np.zeros((len(queries), 0))

    @property
    def scores(self) -> Floats:
        """Return the score of each of the nearest rows."""
        if self.nearness == "l2":
            # Their keys are squared distances, negated.
            return np.sqrt(np.maximum(-self._keys, 0))
        return self._keys

    def see(self, block: Tensor) -> None:
        """Rank the next rows, `[row, width]`, any number at a time."""
        width = self._queries.shape[1]
        if block.ndim != 2 or block.shape[1] != width:
            reason = (
                f"the query is {width} wide, and the rows are {block.shape[-1]} wide"
            )
            raise StatesError(
                "Cannot search", reason, "Take both from the same model and site."
            )
        rows = block.detach()
        while len(rows):
            # At most as many as before, so that the bar rises early.
            part = rows[: max(self.k - self.seen, self.seen)]
            self._rank(part)
            self.seen += len(part)
            rows = rows[len(part) :]

    def _rank(self, rows: Tensor) -> None:
        """Compute again in float64 what may be among the nearest, and keep what is."""
        queries = len(self._queries)
        if self.seen < self.k:
            self._check(torch.linalg.vector_norm(rows.to("cpu", torch.float32), dim=1))
            every_row = np.repeat(np.arange(len(rows)), queries)
            self._take(rows, every_row, np.tile(np.arange(queries), len(rows)))
            return
        bar = self._bar(self._keys[:, -1])
        # The largest product of each row over the queries, and its length.
        largest = torch.empty(len(rows))
        lengths = torch.empty(len(rows))
        size = max(1, PIECE // (4 * rows.shape[1]))
        products = torch.empty(0, 0)
        for start in range(0, len(rows), size):
            here = slice(start, start + size)
            piece = rows[here].to("cpu", torch.float32)
            # The last piece may be shorter.
            if products.shape[1] != len(piece):
                products = torch.empty(len(piece), len(self._queries)).T
            self._products(piece, bar, products)
            torch.amax(products, 0, out=largest[here])
            # After the product, which waits less for memory.
            torch.linalg.vector_norm(piece, dim=1, out=lengths[here])
        self._check(lengths)
        lowest = bar.lower_bound.min() * self._terms(lengths)
        candidates = (largest >= lowest).nonzero()[:, 0]
        narrow = rows[candidates].to("cpu", torch.float32)
        products = self._products(narrow, bar, torch.empty(queries, len(narrow)))
        bounds = torch.outer(bar.lower_bound, self._terms(lengths[candidates]))
        pairs = (products >= bounds).nonzero()
        self._take(rows, candidates[pairs[:, 1]].numpy(), pairs[:, 0].numpy())

    def _products(self, rows: Tensor, bar: _Bar, out: Tensor) -> Tensor:
        """Compute `left @ row + offset` for every query and row."""
        if self._by_torch is None:
            # `torch.set_float32_matmul_precision` lets torch use fewer digits.
            some, queries = rows[:TRIED].double(), self._narrow.double()
            error = (self._narrow @ rows[:TRIED].T).double() - queries @ some.T
            lengths = queries.norm(dim=1)[:, None] * some.norm(dim=1)
            self._by_torch = bool((error.abs() <= self._share * lengths).all())
        if not self._by_torch:
            np.matmul(bar.left.numpy(), rows.numpy().T, out=out.numpy())
            if bar.offset is not None:
                out.add_(bar.offset[:, None])
            return out
        if bar.offset is None:
            return torch.mm(bar.left, rows.T, out=out)
        return torch.addmm(bar.offset[:, None], bar.left, rows.T, out=out)

    def _terms(self, lengths: Tensor) -> Tensor:
        return lengths.square() if self.nearness == "l2" else lengths

    def _bar(self, keys: Floats) -> _Bar:
        """Return the bar of rows that come before these keys, lowered by rounding."""
        if self.nearness == "cosine":
            lowered = keys - 2 * self._share
            lowered[np.abs(lowered) < SMALLEST_KEY] = -SMALLEST_KEY
            # Divided by the key, so that every query compares with the same number.
            left = self._narrow / _float32(np.abs(lowered))[:, None]
            return _Bar(left, None, _float32(np.sign(lowered)))
        if self.nearness == "dot":
            lower_bound = _float32(-self._share * self._lengths)
            return _Bar(self._narrow, _float32(-keys), lower_bound)
        # Rounding is at most 2 * share * (|row| + |query|)², and so at most 4 * share *
        # (|row|² + |query|²).
        exact_share = 1 - 4 * self._share
        offset = _float32(-keys - exact_share * self._lengths**2)
        lower_bound = _float32(np.full(len(keys), exact_share))
        return _Bar(2 * self._narrow, offset, lower_bound)

    def _check(self, lengths: Tensor) -> None:
        """Refuse rows that cannot be multiplied, and for cosines rows of zeros."""
        longest = float(lengths.max())
        # Written with `not <`, because every comparison with a NaN is False.
        if not longest * max(1.0, float(self._lengths.max()), longest) < LARGEST:
            row = int(lengths.argmax())
            if not longest < LARGEST**0.5:
                row = int((~(lengths < LARGEST**0.5)).nonzero()[0])
            reason = (
                f"row {self.seen + row} has a NaN, an infinity, or numbers too large to"
                " multiply in float32"
            )
            raise NotFinite(
                "Cannot search", reason, "Leave it out, or look at where it comes from."
            )
        if self.nearness == "cosine" and not float(lengths.min()):
            reason = (
                f"row {self.seen + int(lengths.argmin())} is zero, or too small in"
                " float32 to have a direction"
            )
            raise StatesError(
                "Cannot search by cosine",
                reason,
                "Leave it out, or search by 'l2' or 'dot'.",
            )

    def _take(self, rows: Tensor, indices: Ints, queries: Ints) -> None:
        """Compute pairs of a row and a query in float64, and keep the nearest."""
        if not len(indices):
            return
        parts = []
        for start in range(0, len(indices), PAIRS):
            part = slice(start, start + PAIRS)
            parts.append(self._exact(rows, indices[part], queries[part]))
        keys = np.concatenate(parts)
        count, ranks = self._keys.shape
        all_queries = np.concatenate([np.repeat(np.arange(count), ranks), queries])
        all_numbers = np.concatenate([self.numbers.ravel(), indices + self.seen])
        all_keys = np.concatenate([self._keys.ravel(), keys])
        order = np.lexsort((all_numbers, -all_keys, all_queries))
        starts = np.searchsorted(all_queries[order], np.arange(count))
        # Every query has as many: those of before, or enough of these rows.
        size = min(self.k, self.seen + len(rows))
        best = order[starts[:, None] + np.arange(size)]
        self.numbers = all_numbers[best]
        self._keys = all_keys[best]

    def _exact(self, rows: Tensor, indices: Ints, queries: Ints) -> Floats:
        """Return the keys of some pairs, each computed from its row alone."""
        values = rows[torch.from_numpy(indices)].cpu().double().numpy()
        others = self._queries[queries]
        if self.nearness == "l2":
            distances: Floats = np.square(values - others).sum(1)
            return -distances
        products: Floats = (values * others).sum(1)
        if self.nearness == "dot":
            return products
        lengths = np.sqrt(np.square(values).sum(1))
        cosines: Floats = products / (lengths * self._lengths[queries])
        return cosines


def _float32(numbers: Floats) -> Tensor:
    return torch.from_numpy(numbers.astype(np.float32))
