"""The nearest of any number of rows, exactly, by blocked matrix products.

The products are made in float32. What their rounding leaves in question is computed again in float64, row by row, so
that equal rows get equal scores wherever they stand, and of equals the first comes first.

>>> nearest = Nearest(torch.tensor([[0.0, 2.0, 1.0]]), k=2)
>>> nearest.see(torch.eye(3))
>>> nearest.numbers.tolist(), nearest.scores.round(2).tolist()
([[1, 2]], [[0.89, 0.45]])
"""

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import NotFinite, StatesError

Nearness: TypeAlias = Literal["cosine", "dot", "l2"]
Floats: TypeAlias = NDArray[np.float64]

NEARNESSES = ("cosine", "dot", "l2")
ROUNDING = 2.0**-24  # of float32
LARGEST = 1e38  # that float32 holds, and a little room
PAIRS = 4096  # of a row and a query that are computed again at a time
TRIED = 64  # rows on which the products are held against float64


class Nearest:
    """The k rows nearest to each query, among those seen so far; `see` them in order, some at a time.

    `numbers` and `scores` are `[query, rank]`, the nearest first. Scores are cosines, dot products or distances.
    """

    def __init__(self, queries: Tensor, k: int, nearness: Nearness = "cosine") -> None:
        self.k, self.nearness, self.seen = k, nearness, 0
        self._exact: Floats = queries.detach().cpu().double().numpy()
        self._lengths = np.linalg.norm(self._exact, axis=1)
        scale = self._lengths[:, None] if nearness == "cosine" else 1.0
        self._narrow = torch.from_numpy((self._exact / scale).astype(np.float32))
        self._share = (queries.shape[1] + 8) * ROUNDING  # what rounding may make of a sum of products
        self._by_torch: bool | None = None
        self.numbers = np.zeros((len(queries), 0), dtype=np.int64)
        self._keys = np.zeros((len(queries), 0))  # larger is nearer

    @property
    def scores(self) -> Floats:
        """How near each of them is."""
        return np.sqrt(np.maximum(-self._keys, 0)) if self.nearness == "l2" else self._keys

    def see(self, block: Tensor) -> None:
        """Let these rows, `[row, width]`, take the places of what is less near."""
        if block.ndim != 2 or block.shape[1] != self._exact.shape[1]:
            reason = f"the query is {self._exact.shape[1]} wide, and what is searched {block.shape[-1]}"
            raise StatesError("A search", reason, "Take both from the same model and site.")
        if not len(block):
            return
        narrow = block.detach().to("cpu", torch.float32)
        lengths = torch.linalg.vector_norm(narrow, dim=1)
        longest = self._longest(lengths)
        rows, queries = self._in_question(self._products(narrow), lengths, longest)
        if len(rows):
            self._take(block, rows.numpy(), queries.numpy())
        self.seen += len(block)

    def _longest(self, lengths: Tensor) -> float:
        """The length of the longest row, when all can be multiplied."""
        longest = float(lengths.max())
        if not longest * max(1.0, float(self._lengths.max()), longest) < LARGEST:
            row = int((~(lengths < LARGEST**0.5)).nonzero()[0]) if not longest < LARGEST**0.5 else int(lengths.argmax())
            reason = f"row {self.seen + row} holds a NaN, an infinity, or numbers too large to be multiplied in float32"
            raise NotFinite("A search", reason, "Leave it out, or look at where it comes from.")
        if self.nearness == "cosine" and not float(lengths.min()):
            reason = f"row {self.seen + int(lengths.argmin())} is zero, or too small in float32 to point anywhere"
            raise StatesError("Cosines", reason, "Leave it out, or search by 'l2' or 'dot'.")
        return longest

    def _in_question(self, products: Tensor, lengths: Tensor, longest: float) -> tuple[Tensor, Tensor]:
        """The pairs of a row and a query that may be among the nearest, whatever rounding made of the products."""
        if self.nearness == "cosine":
            tolerance = np.full(len(self._lengths), 2 * self._share)
        elif self.nearness == "dot":
            tolerance = self._share * longest * self._lengths
        else:
            tolerance = 2 * self._share * (longest + self._lengths) ** 2
            products.mul_(2).sub_(lengths.square()[:, None]).sub_(torch.from_numpy(self._lengths**2).float())
        filled = self._keys.shape[1] == self.k
        if self.nearness == "cosine" and not filled:
            products /= lengths[:, None]
        bar = self._keys[:, -1] - tolerance if filled else self._first_bar(products, tolerance)
        if self.nearness == "cosine" and filled:
            over = products.addr_(lengths, torch.from_numpy(bar).float(), alpha=-1)
        else:
            over = products.sub_(torch.from_numpy(bar).float())
        rows = (over.amax(1) >= 0).nonzero()[:, 0]
        pairs = (over[rows] >= 0).nonzero()
        return rows[pairs[:, 0]], pairs[:, 1]

    def _products(self, narrow: Tensor) -> Tensor:
        """Every row times every query; by numpy where torch was told to make products less exactly."""
        if self._by_torch is None:
            some = narrow[:TRIED]
            off = (some @ self._narrow.T).double() - some.double() @ self._narrow.double().T
            room = self._share * some.double().norm(dim=1)[:, None] * self._narrow.double().norm(dim=1)
            self._by_torch = bool((off.abs() <= room).all())
        if self._by_torch:
            return narrow @ self._narrow.T
        return torch.from_numpy(narrow.numpy() @ self._narrow.numpy().T)

    def _first_bar(self, keys: Tensor, tolerance: Floats) -> Floats:
        """What a row must reach to be among the k nearest of this block alone."""
        if len(keys) <= self.k:
            return np.full(len(tolerance), -np.inf)
        least = keys.topk(self.k, dim=0).values[-1]
        bar: Floats = least.double().numpy() - 2 * tolerance
        return bar

    def _take(self, block: Tensor, rows: NDArray[np.int64], queries: NDArray[np.int64]) -> None:
        """Compute these pairs in float64, and keep the nearest."""
        starts = range(0, len(rows), PAIRS)
        parts = [self._again(block, rows[at : at + PAIRS], queries[at : at + PAIRS]) for at in starts]
        keys = np.concatenate(parts)
        order = np.argsort(queries, kind="stable")
        ends = np.searchsorted(queries[order], np.arange(len(self.numbers) + 1))
        size = min(self.k, self.seen + len(block))
        if size > self._keys.shape[1]:  # then every query has rows to take
            more = ((0, 0), (0, size - self._keys.shape[1]))
            self.numbers, self._keys = np.pad(self.numbers, more), np.pad(self._keys, more, constant_values=-np.inf)
        for query in np.unique(queries):
            own = order[ends[query] : ends[query + 1]]
            numbers = np.concatenate([self.numbers[query], rows[own] + self.seen])
            near = np.concatenate([self._keys[query], keys[own]])
            chosen = np.lexsort((numbers, -near))[:size]
            self.numbers[query], self._keys[query] = numbers[chosen], near[chosen]

    def _again(self, block: Tensor, rows: NDArray[np.int64], queries: NDArray[np.int64]) -> Floats:
        """The keys of some pairs, each from its own row alone."""
        values: Floats = block[torch.from_numpy(rows)].detach().cpu().double().numpy()
        asked: Any = self._exact[queries]
        if self.nearness == "l2":
            distances: Floats = np.square(values - asked).sum(1)
            return -distances
        products: Floats = (values * asked).sum(1)
        if self.nearness == "dot":
            return products
        cosines: Floats = products / (np.sqrt(np.square(values).sum(1)) * self._lengths[queries])
        return cosines
