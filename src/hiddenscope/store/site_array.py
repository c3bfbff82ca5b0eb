"""SiteArray: the states of one site of a store, `[row, width]`, read when needed."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hiddenscope.arguments import integer
from hiddenscope.errors import StatesError
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints
from hiddenscope.states.tokens import Source, Tokens, coordinates
from hiddenscope.store.plan import DTYPES
from hiddenscope.store.shard_reader import ShardReader
from hiddenscope.store.text_index import TextIndex

if TYPE_CHECKING:
    import xarray

# Shards that are prefetched together, fewer than are kept open.
FEW = 32
# Bytes that are widened at a time.
BLOCK_BYTES = 32 * 2**20


class Shards(Protocol):
    """The shards of a store by the numbers of their units."""

    def __getitem__(self, number: int) -> ShardReader:
        """Return the open shard of a unit."""


class SiteArray:
    """A lazy array that numpy's indices read: `array[3]`, `array[[5, 900], :8]`.

    Values are float32, to which float16 and bfloat16 are widened exactly. Every block
    that is read is checked.
    """

    def __init__(
        self, shards: Shards, index: TextIndex, site: str, width: int, stored: str
    ) -> None:
        self._shards = shards
        self._index = index
        self.site = site
        self.stored = stored
        self.shape = (index.count, width)
        self.dtype = np.dtype(np.float32)
        self.row_bytes = width * DTYPES[stored].itemsize

    ndim = 2

    @property
    def size(self) -> int:
        """Return the number of values."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Return the bytes that all values take in memory."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SiteArray({self.site}, {list(self.shape)}, {self.stored} on disk)"

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        for block in self.blocks():
            yield from block

    def __getitem__(self, key: Any) -> Any:
        rows, columns = self._split(key)
        values = self._rows(rows)
        if isinstance(columns, slice) and columns == slice(None):
            return values
        # The rows that were read take the place of those in the key, in the same
        # shape: numpy combines them with the columns.
        shape = values.shape[:-1]
        places: Any = slice(None)
        if not isinstance(rows, slice):
            places = np.arange(math.prod(shape)).reshape(shape)
        try:
            return values.reshape(-1, self.shape[1])[places, columns]
        except (IndexError, TypeError, ValueError) as error:
            raise self._cannot(str(error)[:200]) from error

    def _split(self, key: Any) -> tuple[Any, Any]:
        """Return the index of the rows, and that of the columns."""
        parts = list(key) if isinstance(key, tuple) else [key]
        # Compared by identity: == with an array gives an array.
        dots = [place for place, part in enumerate(parts) if part is Ellipsis]
        if len(dots) > 1 or len(parts) - len(dots) > 2:
            raise self._cannot(f"{len(parts)} indices were given")
        missing = [slice(None)] * (2 - len(parts) + len(dots))
        place = dots[0] if dots else len(parts)
        both: list[Any] = [*parts[:place], *missing, *parts[place + 1 :]]
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
        """Yield all rows in order, some at a time, so that only those are held."""
        step = self._step if rows is None else integer(rows, "rows", 1)
        starts = range(0, len(self), step)
        return (self._range(start, min(start + step, len(self))) for start in starts)

    @property
    def _step(self) -> int:
        return max(1, BLOCK_BYTES // self.row_bytes)

    def native_blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all rows in order as they lie on disk, at most so many at a time.

        bfloat16 is given as its bits.
        """
        integer(rows, "rows", 1)
        for start in range(0, len(self), rows):
            parts = []
            runs = self._index.runs(start, min(start + rows, len(self)))
            for unit, first, count in runs:
                parts.append(self._shards[unit].rows(self.site, first, count))
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
            # A larger number would become a negative index, and is outside anyway.
            indices = np.minimum(indices, np.uint64(2**63 - 1))
        taken = self._taken(indices.astype(np.int64).reshape(-1))
        return taken.reshape(*indices.shape, self.shape[1])

    def _range(self, start: int, stop: int) -> NDArray[np.float32]:
        out = np.empty((stop - start, self.shape[1]), np.float32)
        done = 0
        for begin in range(start, stop, self._step):
            end = min(begin + self._step, stop)
            for unit, first, count in self._index.runs(begin, end):
                native = self._shards[unit].rows(self.site, first, count)
                widen(native, self.stored, out[done : done + count])
                done += count
        return out

    def _taken(self, rows: Ints) -> NDArray[np.float32]:
        native = self.native(rows)
        out = np.empty(native.shape, np.float32)
        widen(native, self.stored, out)
        return out

    def native(self, rows: Ints) -> NDArray[Any]:
        """Return some rows as they lie on disk, in this order; bfloat16 as its bits."""
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
        if np.array_equal(inverse, np.arange(len(wanted))):
            return native
        return native[inverse]

    def _take(
        self, needed: list[int], units: Ints, places: Ints, native: NDArray[Any]
    ) -> None:
        """Put the rows that lie in some units into an array with all of them."""
        shard_rows = []
        for unit in needed:
            rows = np.flatnonzero(units == unit)
            # A copy comes later than its text, but its states lie where the text's do.
            rows = rows[np.argsort(places[rows], kind="stable")]
            shard = self._shards[unit]
            shard_rows.append((shard, rows))
            shard.prefetch(self.site, places[rows])
        for shard, rows in shard_rows:
            part = np.empty((len(rows), self.shape[1]), DTYPES[self.stored])
            shard.take(self.site, places[rows], part)
            native[rows] = part


def as_xarray(
    arrays: Sequence[SiteArray], sites: Sequence[Site], tokens: Tokens, source: Source
) -> "xarray.DataArray":
    """Return a DataArray with dims site, token, width that is read when needed."""
    import xarray
    from xarray.backends import BackendArray
    from xarray.core import indexing

    if len({array.shape for array in arrays}) > 1:
        raise StatesError(
            "Cannot label these sites",
            "their widths differ",
            "Choose sites of one width.",
        )

    # xarray knows a lazy array by this base class.
    class LazySites(BackendArray):
        shape = (len(arrays), *arrays[0].shape)
        dtype = arrays[0].dtype

        def __getitem__(self, key: Any) -> Any:
            return indexing.explicit_indexing_adapter(
                key, self.shape, indexing.IndexingSupport.OUTER, self._outer
            )

        def _outer(self, key: tuple[Any, ...]) -> NDArray[Any]:
            site_key, rows, channels = key
            numbers = np.arange(len(arrays))[site_key]
            if numbers.ndim == 0:
                return np.asarray(arrays[int(numbers)][rows][..., channels])
            parts = [arrays[number][rows][..., channels] for number in numbers]
            if parts:
                return np.stack(parts)
            # No sites: the other dimensions are still those of the key.
            return np.asarray(arrays[0][rows][..., channels][None][:0])

    lazy = indexing.LazilyIndexedArray(LazySites())
    return xarray.DataArray(
        xarray.Variable(("site", "token", "width"), lazy),
        coordinates(sites, tokens),
        name="states",
        attrs={"source": json.dumps(source.to_json())},
    )


def widen(native: NDArray[Any], stored: str, out: NDArray[np.float32]) -> None:
    """Widen values to float32, which is exact for each dtype of a store.

    >>> out = np.empty(2, np.float32)
    >>> widen(np.array([0x3F80, 0xC000], np.uint16), "bfloat16", out)
    >>> out.tolist()
    [1.0, -2.0]
    """
    if stored == "bfloat16":
        # bfloat16 is the upper half of a float32.
        np.left_shift(
            native, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe"
        )
    else:
        out[...] = native
