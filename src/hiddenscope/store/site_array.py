"""SiteArray: the states of one site of a store, `[row, width]`, read when they are
asked for.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import StatesError
from hiddenscope.store.plan import DTYPES
from hiddenscope.store.shard_reader import ShardReader
from hiddenscope.store.text_index import Ints, TextIndex

FEW = 32  # shards that the disk is asked for at once, fewer than are kept open
AT_ONCE = 32 * 2**20  # bytes that are widened at a time


class Shards(Protocol):
    """The shards of a store by the numbers of their units."""

    def __getitem__(self, number: int) -> ShardReader:
        """The open shard of a unit."""


class SiteArray:
    """A lazy array: `array[3]`, `array[10:20]`, `array[[5, 900]]`, `array[mask, :8]`,
    `np.asarray(array)`.

    float32 is given as it is, float16 and bfloat16 as float32, which is exact. Every
    block that is read is checked.
    """

    def __init__(
        self, shards: Shards, index: TextIndex, site: str, width: int, stored: str
    ) -> None:
        self._shards, self._index, self.site, self.stored = shards, index, site, stored
        self.shape = (index.count, width)
        self.dtype = np.dtype(np.float32)
        self.row_bytes = width * DTYPES[stored].itemsize

    ndim = 2

    @property
    def size(self) -> int:
        """The number of values."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes that all values take in memory."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SiteArray({self.site}, {list(self.shape)}, {self.stored} on disk)"

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (row for part in self.blocks() for row in part)

    def __getitem__(self, key: Any) -> Any:
        rows, columns = self._both(key)
        values = self._rows(rows)
        if isinstance(columns, slice) and columns == slice(None):
            return values
        # The rows that were read stand for those that were asked for, in the same
        # shape: numpy combines the two.
        shape = values.shape[:-1]
        chosen = (
            slice(None)
            if isinstance(rows, slice)
            else np.arange(math.prod(shape)).reshape(shape)
        )
        try:
            return values.reshape(-1, self.shape[1])[chosen, columns]
        except (IndexError, TypeError, ValueError) as error:
            raise self._cannot(str(error)[:200]) from error

    def _both(self, key: Any) -> tuple[Any, Any]:
        """The index of the rows, and that of the columns."""
        given = list(key) if isinstance(key, tuple) else [key]
        dots = [at for at, one in enumerate(given) if one is Ellipsis]
        if len(dots) > 1 or len(given) - len(dots) > 2:
            raise self._cannot(f"{len(given)} indices were given")
        whole = [slice(None)] * (2 - len(given) + len(dots))
        at = dots[0] if dots else len(given)
        both: list[Any] = [*given[:at], *whole, *given[at + 1 :]]
        return both[0], both[1]

    def _cannot(self, reason: str) -> StatesError:
        return StatesError(
            f"Cannot index {self!r}",
            reason,
            "Give a number, a slice, a mask or indices of its rows.",
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values: NDArray[Any] = self._range(0, len(self))
        return values if dtype is None else values.astype(dtype, copy=False)

    def blocks(self, rows: int | None = None) -> Iterator[NDArray[np.float32]]:
        """All rows in order, some at a time, so that only those are held."""
        step = max(1, AT_ONCE // self.row_bytes) if rows is None else _positive(rows)
        return (
            self._range(start, min(start + step, len(self)))
            for start in range(0, len(self), step)
        )

    def native_blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows in order as they lie on disk, at most so many at a time; bfloat16 as
        its bits.
        """
        _positive(rows)
        for start in range(0, len(self), rows):
            parts = [
                self._shards[unit].rows(self.site, first, count)
                for unit, first, count in self._index.runs(
                    start, min(start + rows, len(self))
                )
            ]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _rows(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            try:
                start, stop, step = rows.indices(len(self))
            except (TypeError, ValueError) as error:
                raise self._cannot(str(error)) from error
            if step == 1:
                return self._range(start, max(start, stop))
            return self._taken(np.arange(start, stop, step))
        indices = np.asarray(rows)
        if indices.dtype.kind == "b" and indices.shape == (len(self),):
            return self._taken(np.flatnonzero(indices))
        if indices.dtype.kind not in "iu" and indices.size:
            raise self._cannot(
                f"{indices.dtype} {list(indices.shape)} is neither a mask nor indices"
            )
        if indices.dtype.kind == "u":
            # Which is outside too, and not negative.
            indices = np.minimum(indices, np.uint64(2**63 - 1))
        taken = self._taken(indices.astype(np.int64).reshape(-1))
        return taken.reshape(*indices.shape, self.shape[1])

    def _range(self, start: int, stop: int) -> NDArray[np.float32]:
        out = np.empty((stop - start, self.shape[1]), np.float32)
        step = max(1, AT_ONCE // self.row_bytes)
        for begin in range(start, stop, step):
            at = begin - start
            for unit, first, count in self._index.runs(begin, min(begin + step, stop)):
                widen(
                    self._shards[unit].rows(self.site, first, count),
                    self.stored,
                    out[at : at + count],
                )
                at += count
        return out

    def _taken(self, rows: Ints) -> NDArray[np.float32]:
        native = self.native(rows)
        out = np.empty(native.shape, np.float32)
        widen(native, self.stored, out)
        return out

    def native(self, rows: Ints) -> NDArray[Any]:
        """Some rows as they lie on disk, in the order in which they are asked for;
        bfloat16 as its bits.
        """
        count = len(self)
        if rows.size and not -count <= rows.min() <= rows.max() < count:
            reason = f"the indices run from {rows.min():,} to {rows.max():,}"
            raise StatesError(
                f"Cannot index {self!r}",
                reason,
                f"Give indices from 0 to {count - 1:,}.",
            )
        wanted, inverse = np.unique(rows % max(1, count), return_inverse=True)
        units, places = self._index.places(wanted)
        native = np.empty((len(wanted), self.shape[1]), DTYPES[self.stored])
        needed = np.unique(units).tolist()
        for begin in range(0, len(needed), FEW):
            self._take(needed[begin : begin + FEW], units, places, native)
        in_order = len(wanted) == len(rows) and bool(
            (inverse == np.arange(len(rows))).all()
        )
        return native if in_order else native[inverse]

    def _take(
        self, needed: list[int], units: Ints, places: Ints, native: NDArray[Any]
    ) -> None:
        """Put the rows that lie in some units into an array with all of them."""
        taken = []
        for unit in needed:
            chosen = np.flatnonzero(units == unit)
            # Copies of earlier texts come later, lie before.
            chosen = chosen[np.argsort(places[chosen], kind="stable")]
            taken.append((self._shards[unit], chosen))
            self._shards[unit].prefetch(self.site, places[chosen])
        for shard, chosen in taken:
            part = np.empty((len(chosen), self.shape[1]), DTYPES[self.stored])
            shard.take(self.site, places[chosen], part)
            native[chosen] = part


def _positive(rows: Any) -> int:
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
        raise StatesError(
            "Cannot read blocks",
            f"rows must be an integer >= 1, got {str(rows)[:40]}",
            "Give 1,024, say.",
        )
    return int(rows)


def widen(native: NDArray[Any], stored: str, out: NDArray[np.float32]) -> None:
    """Put values into float32: exact for each dtype of a store.

    >>> out = np.empty(2, np.float32)
    >>> widen(np.array([0x3F80, 0xC000], np.uint16), "bfloat16", out)
    >>> out.tolist()
    [1.0, -2.0]
    """
    if stored == "bfloat16":
        np.left_shift(
            native, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe"
        )
    else:
        out[...] = native
