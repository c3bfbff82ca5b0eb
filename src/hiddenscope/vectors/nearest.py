"""The nearest rows to each query, exactly, by blocked matrix products.

The products are computed in float32. Every pair of a row and a query that rounding
leaves undecided is computed again in float64, each row by itself, so that equal rows
get equal scores wherever they stand, and of equals the first wins.

A piece of rows is small enough to stay in the cache from its products over their
maximum to its norms, and the products are not kept. Whether rows or queries should run
along their memory depends on the processor: the order that costs a tenth less on x86-64
takes twice as long for 16 queries on a Neoverse-N1. So the first pieces try both
orders. Only rows that may be among the nearest, a few in a thousand, are looked at
again.

>>> nearest = Nearest(torch.tensor([[0.0, 2.0, 1.0]]), k=2)
>>> nearest.see(torch.eye(3))
>>> nearest.numbers.tolist(), nearest.scores.round(2).tolist()
([[1, 2]], [[0.89, 0.45]])
"""

import time
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import NotFinite, StatesError

Nearness: TypeAlias = Literal["cosine", "dot", "l2"]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

NEARNESSES = ("cosine", "dot", "l2")
ROUNDING = 2.0**-24  # of float32
LARGEST = 1e38  # close to the largest float32
SMALLEST_KEY = 1e-6  # a cosine closer to zero than this is a bar just below zero
# Bytes of rows that are multiplied at a time: the caches of some cores hold them.
PIECE = 2**22
# Rows that are ranked first; then at most as many at a time as were seen, so that the
# bar rises early.
FIRST = 1024
# Pairs of a row and a query that are computed again at a time: few, so that they stay
# in the cache.
PAIRS = 256


class _Bar(NamedTuple):
    """A row may be among the nearest to a query if `left @ row + offset >= least *
    term`; one row for each query.

    The term is the length of the row, or for L2 its square. Rounding in float32 is
    allowed for: whatever reaches the bar in exact arithmetic reaches this one.
    """

    left: Tensor
    offset: Tensor | None
    least: Tensor


class _MemoryOrder:
    """Choose by trial how products `[query, row]` lie in memory: with the rows or with
    the queries side by side.
    """

    TRIALS = 3  # of each order, the first of which warms up

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._rows_along: bool | None = None

    def empty(self, queries: int, rows: int, *, rows_along: bool) -> Tensor:
        """Allocate products `[query, row]` in one of the two orders."""
        if rows_along:
            return torch.empty(queries, rows)
        return torch.empty(rows, queries).T

    def next(self) -> bool:
        """Return the order for the next piece: the faster one, or while that is not
        known each in turn.
        """
        if self._rows_along is not None:
            return self._rows_along
        return len(self._seconds[True]) <= len(self._seconds[False])

    def add(self, rows_along: bool, seconds: float) -> None:
        """Take the time of a piece into account."""
        self._seconds[rows_along].append(seconds)
        if min(len(times) for times in self._seconds.values()) < self.TRIALS:
            return
        # The least time is the one that other work on the machine disturbed least.
        fastest = {order: min(times[1:]) for order, times in self._seconds.items()}
        self._rows_along = fastest[True] <= fastest[False]

    @property
    def decided(self) -> bool:
        """Whether both orders were tried often enough."""
        return self._rows_along is not None


class Nearest:
    """The k rows nearest to each query, among those seen so far; call `see` with rows
    in order, any number at a time.

    `numbers` and `scores` are `[query, rank]`, the nearest first. Scores are cosines,
    dot products or L2 distances.
    """

    def __init__(self, queries: Tensor, k: int, nearness: Nearness = "cosine") -> None:
        self.k, self.nearness, self.seen = k, nearness, 0
        self._queries: Floats = queries.detach().cpu().double().numpy()
        self._lengths = np.linalg.norm(self._queries, axis=1)
        scale = self._lengths[:, None] if nearness == "cosine" else 1.0
        self._narrow = torch.from_numpy((self._queries / scale).astype(np.float32))
        # The rounding of a dot product, over the two lengths.
        self._share = (queries.shape[1] + 8) * ROUNDING
        self._by_torch: bool | None = None
        self._order = _MemoryOrder()
        self.numbers: Ints = np.zeros((len(queries), 0), dtype=np.int64)
        self._keys: Floats = np.zeros((len(queries), 0))  # larger is nearer

    @property
    def scores(self) -> Floats:
        """The score of each of the nearest rows."""
        return (
            np.sqrt(np.maximum(-self._keys, 0)) if self.nearness == "l2" else self._keys
        )

    def see(self, block: Tensor) -> None:
        """Rank these rows, `[row, width]`, among those seen so far."""
        if block.ndim != 2 or block.shape[1] != self._queries.shape[1]:
            reason = (
                f"the query is {self._queries.shape[1]} wide, and the rows are"
                f" {block.shape[-1]} wide"
            )
            raise StatesError(
                "Cannot search", reason, "Take both from the same model and site."
            )
        rows = block.detach()
        while len(rows):
            count = max(FIRST, 4 * self.k, self.seen)
            self._rank(rows[:count])
            self.seen += len(rows[:count])
            rows = rows[count:]

    def _rank(self, rows: Tensor) -> None:
        """Compute again in float64 what may be among the nearest, and keep what is."""
        if self._keys.shape[1] < self.k:
            narrow = rows.to("cpu", torch.float32)
            lengths = torch.linalg.vector_norm(narrow, dim=1)
            self._check(lengths)
            if len(rows) <= self.k:
                queries = len(self._queries)
                self._take(
                    rows,
                    np.repeat(np.arange(len(rows)), queries),
                    np.tile(np.arange(queries), len(rows)),
                )
                return
            bar, candidates = (
                self._bar(self._kth(narrow, lengths)),
                torch.arange(len(rows)),
            )
        else:
            bar = self._bar(self._keys[:, -1])
            largest, lengths = self._largest(rows, bar)
            self._check(lengths)
            candidates = (largest >= bar.least.min() * self._terms(lengths)).nonzero()[
                :, 0
            ]
            narrow = rows[candidates].to("cpu", torch.float32)
        products = self._products(
            narrow, bar, torch.empty(len(self._queries), len(narrow))
        )
        pairs = (
            products >= torch.outer(bar.least, self._terms(lengths[candidates]))
        ).nonzero()
        self._take(rows, candidates[pairs[:, 1]].numpy(), pairs[:, 0].numpy())

    def _largest(self, rows: Tensor, bar: _Bar) -> tuple[Tensor, Tensor]:
        """Return the largest product of each row over the queries, and the length of
        each row.
        """
        largest, lengths = torch.empty(len(rows)), torch.empty(len(rows))
        size = max(1, PIECE // (4 * rows.shape[1]))
        buffers: dict[bool, Tensor] = {}
        for start in range(0, len(rows), size):
            here = slice(start, start + size)
            piece, length = rows[here].to("cpu", torch.float32), lengths[here]
            rows_along = self._order.next()
            # A last piece that is shorter takes a part of the buffer, which would not
            # be contiguous in one order.
            if rows_along not in buffers or buffers[rows_along].shape[1] != len(piece):
                buffers[rows_along] = self._order.empty(
                    len(self._queries), len(piece), rows_along=rows_along
                )
            began = time.perf_counter()
            torch.amax(
                self._products(piece, bar, buffers[rows_along]), 0, out=largest[here]
            )
            if not self._order.decided and len(piece) == size:
                self._order.add(rows_along, time.perf_counter() - began)
            # After the product, which waits less for memory.
            torch.linalg.vector_norm(piece, dim=1, out=length)
        return largest, lengths

    def _products(self, rows: Tensor, bar: _Bar, out: Tensor) -> Tensor:
        """`left @ row + offset` for every query and row."""
        if self._by_torch is None:
            self._by_torch = self._torch_is_exact(rows[:FIRST])
        if not self._by_torch:
            np.matmul(bar.left.numpy(), rows.numpy().T, out=out.numpy())
            return out if bar.offset is None else out.add_(bar.offset[:, None])
        if bar.offset is None:
            return torch.mm(bar.left, rows.T, out=out)
        return torch.addmm(bar.offset[:, None], bar.left, rows.T, out=out)

    def _terms(self, lengths: Tensor) -> Tensor:
        return lengths.square() if self.nearness == "l2" else lengths

    def _torch_is_exact(self, rows: Tensor) -> bool:
        """Whether torch's products are float32's: `torch.set_float32_matmul_precision`
        lets it use fewer digits.
        """
        difference = (
            self._narrow @ rows.T
        ).double() - self._narrow.double() @ rows.double().T
        allowed = (
            self._share
            * self._narrow.double().norm(dim=1)[:, None]
            * rows.double().norm(dim=1)
        )
        return bool((difference.abs() <= allowed).all())

    def _bar(self, keys: Floats) -> _Bar:
        """What a row must reach to come before these keys, less what rounding may take
        away from it.
        """
        # Over its key, so that every query holds a row against the same number.
        if self.nearness == "cosine":
            lowered = keys - 2 * self._share
            lowered[np.abs(lowered) < SMALLEST_KEY] = -SMALLEST_KEY
            left, offset, least = (
                self._narrow / _float32(np.abs(lowered))[:, None],
                None,
                np.sign(lowered),
            )
        elif self.nearness == "dot":
            left, offset, least = (
                self._narrow,
                _float32(-keys),
                -self._share * self._lengths,
            )
        # Rounding is at most 2 * share * (|row| + |query|)², and so at most 4 * share *
        # (|row|² + |query|²).
        else:
            kept = 1 - 4 * self._share
            left, offset = 2 * self._narrow, _float32(-keys - kept * self._lengths**2)
            least = np.full(len(keys), kept)
        return _Bar(left, offset, _float32(least))

    def _kth(self, rows: Tensor, lengths: Tensor) -> Floats:
        """A key that the k-th nearest of these rows reaches in any case."""
        longest, bare = float(lengths.max()), _Bar(self._narrow, None, torch.empty(0))
        products = self._products(
            rows, bare, torch.empty(len(self._queries), len(rows))
        )
        if self.nearness == "cosine":
            keys, rounding = (
                products / lengths,
                np.full(len(self._lengths), 2 * self._share),
            )
        elif self.nearness == "dot":
            keys, rounding = products, self._share * longest * self._lengths
        else:
            keys = (
                2 * products
                - lengths.square()
                - torch.from_numpy(self._lengths**2).float()[:, None]
            )
            rounding = 2 * self._share * (longest + self._lengths) ** 2
        kth: Floats = keys.topk(self.k, dim=1).values[:, -1].double().numpy() - rounding
        return kth

    def _check(self, lengths: Tensor) -> None:
        """Refuse rows that cannot be multiplied, and for cosines rows of zeros."""
        longest = float(lengths.max())
        if not longest * max(1.0, float(self._lengths.max()), longest) < LARGEST:
            row = (
                int((~(lengths < LARGEST**0.5)).nonzero()[0])
                if not longest < LARGEST**0.5
                else int(lengths.argmax())
            )
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

    def _take(self, rows: Tensor, chosen: Ints, queries: Ints) -> None:
        """Compute these pairs in float64, and keep the nearest."""
        if not len(chosen):
            return
        parts = [slice(start, start + PAIRS) for start in range(0, len(chosen), PAIRS)]
        keys = np.concatenate(
            [self._exact(rows, chosen[part], queries[part]) for part in parts]
        )
        held, count = self._keys.shape[1], len(self._queries)
        all_queries = np.concatenate([np.repeat(np.arange(count), held), queries])
        all_numbers = np.concatenate([self.numbers.ravel(), chosen + self.seen])
        all_keys = np.concatenate([self._keys.ravel(), keys])
        order = np.lexsort((all_numbers, -all_keys, all_queries))
        starts = np.searchsorted(all_queries[order], np.arange(count))
        # Every query has as many: those held, or enough of these rows.
        size = min(self.k, self.seen + len(rows))
        best = order[starts[:, None] + np.arange(size)]
        self.numbers, self._keys = all_numbers[best], all_keys[best]

    def _exact(self, rows: Tensor, chosen: Ints, queries: Ints) -> Floats:
        """The keys of some pairs, each from its own row alone."""
        values: Floats = rows[torch.from_numpy(chosen)].cpu().double().numpy()
        others: Floats = self._queries[queries]
        if self.nearness == "l2":
            distances: Floats = np.square(values - others).sum(1)
            return -distances
        products: Floats = (values * others).sum(1)
        if self.nearness == "dot":
            return products
        cosines: Floats = products / (
            np.sqrt(np.square(values).sum(1)) * self._lengths[queries]
        )
        return cosines


def _float32(numbers: Floats) -> Tensor:
    return torch.from_numpy(numbers.astype(np.float32))
