"""The rows of a store: where each lies in the shards, and one site of them as an array.

A text is there when all its sequences are committed; a copy of another text is there
when that one is, and its rows are those of that one. Rows are counted in the order of
the corpus, so that a store reads like the states of its texts.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.arguments import integer
from hiddenscope.errors import Error, StatesError
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints
from hiddenscope.states.tokens import Source, Tokens, coordinates
from hiddenscope.store.folder import StoreFolder
from hiddenscope.store.plan import (
    DTYPES,
    StorePlan,
    read_copies,
    read_sequences,
    read_strings,
)
from hiddenscope.store.records import Commit
from hiddenscope.store.shard import (
    ShardReader,
    TensorPlace,
    in_corpus_order,
    layout_of,
)

if TYPE_CHECKING:
    import xarray

# Shards that are kept open.
MOST_OPEN = 64
# Shards that are prefetched together, fewer than are kept open.
FEW = 32
# At most this much of one site is read at a time.
BLOCK_BYTES = 64 * 2**20
BLOCK_ROWS = 65_536
# Units whose texts are held: copies are read from where their texts lie.
MOST_UNITS = 4


@dataclass(frozen=True, eq=False)
class PlannedSequences:
    """Sequences of committed units.

    Each has its text, the position of its first token, its unit and its number in that
    unit. `first` is its first row of states in the unit's shard, and `length` the
    number of its rows.
    """

    text: Ints
    start: Ints
    unit: Ints
    number: Ints
    first: Ints
    length: Ints

    def take(self, which: Ints | slice) -> "PlannedSequences":
        """Return some of the sequences, in this order."""
        return PlannedSequences(*[column[which] for column in vars(self).values()])


@dataclass(frozen=True, eq=False)
class TextIndex:
    """The texts that are there, by their numbers in the corpus, and their rows.

    `sequences` go text after text (a copy has those of another text again), and `owner`
    is the text of each, counted among those that are there. Rows are counted through
    all sequences.
    """

    texts: Ints
    owner: Ints
    sequences: PlannedSequences

    @cached_property
    def begins(self) -> Ints:
        """Return the first row of each sequence."""
        lengths = self.sequences.length
        return np.asarray(np.cumsum(lengths) - lengths)

    @cached_property
    def count(self) -> int:
        """Return the number of rows."""
        return int(self.sequences.length.sum())

    @property
    def firsts(self) -> Ints:
        """Return the first sequence of each text, with which its string is stored."""
        return np.searchsorted(self.owner, np.arange(len(self.texts)))

    def part(self, number: int) -> "TextIndex":
        """Return the index of one of the texts."""
        start, end = np.searchsorted(self.owner, [number, number + 1])
        return TextIndex(
            self.texts[number : number + 1],
            self.owner[start:end] - number,
            self.sequences.take(slice(start, end)),
        )

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the rows from start to end as unit, first row and number of rows."""
        if start >= end:
            return
        inside = slice(*np.searchsorted(self.begins, [start + 1, end]))
        begins = np.concatenate([[start], self.begins[inside]])
        units, places = self.places(begins)
        # Sequences that follow one another in one shard are read together.
        breaks = (np.diff(units) != 0) | (np.diff(places) != np.diff(begins))
        firsts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        ends = [*begins[firsts[1:]].tolist(), end]
        for first, stop in zip(firsts, ends, strict=True):
            count = stop - int(begins[first])
            yield int(units[first]), int(places[first]), count

    def places(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each row, and the row in its shard."""
        sequence = self.sequences_of(rows)
        shifts = self.sequences.first[sequence] - self.begins[sequence]
        return self.sequences.unit[sequence], rows + shifts

    def sequences_of(self, rows: Ints) -> Ints:
        """Return the sequence of each row."""
        # Of sequences without rows, which begin where the next does, the last counts.
        return np.searchsorted(self.begins, rows, side="right") - 1


def index_texts(
    planned: PlannedSequences, copies: Mapping[int, int], partial: Sequence[int]
) -> TextIndex:
    """Index sequences by their texts.

    Texts in `partial` have sequences that are not committed, and are left out.

    >>> texts, zeros = np.arange(3), np.zeros(3, np.int64)
    >>> columns = texts, zeros, zeros, texts, texts * 2, zeros + 2
    >>> index = index_texts(PlannedSequences(*columns), {3: 0}, [])
    >>> index.texts.tolist(), index.count, list(index.runs(4, 8))
    ([0, 1, 2, 3], 8, [(0, 4, 2), (0, 0, 2)])
    """
    originals, firsts, counts = np.unique(
        planned.text, return_index=True, return_counts=True
    )
    is_whole = ~np.isin(originals, np.array(partial, dtype=np.int64))
    originals, firsts, counts = originals[is_whole], firsts[is_whole], counts[is_whole]
    pairs = np.array(sorted(copies.items()), dtype=np.int64).reshape(-1, 2)
    pairs = pairs[np.isin(pairs[:, 1], originals)]
    texts = np.concatenate([originals, pairs[:, 0]])
    # Which of the originals each text is.
    origin = np.searchsorted(originals, np.concatenate([originals, pairs[:, 1]]))
    sorting = np.argsort(texts, kind="stable")
    origin = origin[sorting]
    order = spread(firsts[origin], counts[origin])
    owner = np.repeat(np.arange(len(texts)), counts[origin])
    return TextIndex(texts[sorting], owner, planned.take(order))


def spread(starts: Ints, counts: Ints) -> Ints:
    """Return every number from each start on, as many as its count.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    shifts = starts - (np.cumsum(counts) - counts)
    return np.repeat(shifts, counts) + np.arange(counts.sum())


class Shards:
    """The shards of the committed units by their numbers, some of them open."""

    def __init__(
        self, folder: StoreFolder, plan: StorePlan, commits: dict[str, Commit]
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.commits = commits
        self.units = tuple(plan.by_name[unit] for unit in sorted(commits))
        # A shard that is dropped is not closed: another thread may still read from it.
        self._reader = lru_cache(MOST_OPEN)(self._open)

    def __getitem__(self, number: int) -> ShardReader:
        return self._reader(number)

    def _open(self, number: int) -> ShardReader:
        unit = self.units[number]
        layout = layout_of(self.plan, unit)
        return ShardReader(self.folder, self.commits[unit.name], layout)

    def close(self) -> None:
        """Close the files, each as soon as nobody reads from it."""
        self._reader.cache_clear()

    def read(
        self, tensor: str, index: TextIndex, start: int, end: int
    ) -> Iterator[NDArray[Any]]:
        """Yield rows of a tensor from start to end, run by run, as they lie on disk."""
        for unit, first, count in index.runs(start, end):
            yield self[unit].rows(tensor, first, count)

    def take(self, tensor: str, index: TextIndex, rows: Ints) -> NDArray[Any]:
        """Read scattered rows of a tensor, as they lie on disk and in this order."""
        place = self._places[tensor]
        taken = np.empty((len(rows), *place.shape[1:]), place.dtype)
        units, places = index.places(rows)
        # A copy comes later than its text, but its states lie where the text's do.
        order = np.lexsort((places, units))
        ends = np.flatnonzero(np.diff(units[order])) + 1
        in_units = np.split(order, ends) if len(rows) else []
        for begin in range(0, len(in_units), FEW):
            some = []
            for in_unit in in_units[begin : begin + FEW]:
                shard = self[int(units[in_unit[0]])]
                shard.prefetch(tensor, places[in_unit])
                some.append((shard, in_unit))
            for shard, in_unit in some:
                taken[in_unit] = shard.take(tensor, places[in_unit])
        return taken

    @cached_property
    def _places(self) -> Mapping[str, TensorPlace]:
        # The dtype and the width of a tensor are those of any unit.
        return layout_of(self.plan, self.plan.units[0]).places

    def tokens(
        self, index: TextIndex, rows: Ints, texts: tuple[str, ...] | None = None
    ) -> Tokens:
        """Return the tokens of rows in order; of pooled ones, the texts or windows.

        Pooled rows have ids and spans of -1.
        """
        sequences = index.sequences_of(rows)
        positions = index.sequences.start[sequences]
        if self.plan.pool is None:
            every = self.plan.every
            # The first position of each window that is a multiple of `every`.
            firsts = -(-positions // every) * every
            positions = firsts + (rows - index.begins[sequences]) * every
            ids = self.take("ids", index, rows)
            spans = self.take("spans", index, rows)
            known = self.strings
            strings = tuple(known.get(token) or str(token) for token in ids.tolist())
        else:
            ids = np.full(len(rows), -1)
            spans = np.stack([ids, ids], 1)
            strings = (f"({self.plan.pool})",) * len(rows)
        owner = index.owner[sequences]
        count = len(index.texts)
        return Tokens(texts, owner, positions, ids, strings, spans, count)

    def text_reader(self) -> Callable[[int, int], str]:
        """Return a function that reads the text of a sequence, holding a few units.

        It takes the unit of the sequence, and the sequence's number in that unit.
        """

        @lru_cache(maxsize=MOST_UNITS)
        def texts_of(unit: int) -> tuple[NDArray[Any], NDArray[Any]]:
            shard = self[unit]
            return shard.read_all("strings"), shard.read_all("strings.offsets")

        @lru_cache(maxsize=1)
        def text_of(unit: int, number: int) -> str:
            content, offsets = texts_of(unit)
            start, end = offsets[number : number + 2]
            return self[unit].string(content[start:end])

        return text_of

    @property
    def has_texts(self) -> bool:
        """Tell whether the texts were stored."""
        return any(unit.text_bytes for unit in self.plan.units)

    @cached_property
    def strings(self) -> dict[int, str]:
        """Return the strings of token ids."""
        return read_strings(self.folder, self.plan)

    @cached_property
    def index(self) -> TextIndex:
        """Return the index of the texts that are there."""
        partial = set()
        for unit in self.plan.units:
            if unit.name not in self.commits:
                # Of its texts, only the first and the last may have sequences in
                # another unit.
                sequences = read_sequences(self.folder, unit)
                partial |= {sequences[0].text, sequences[-1].text}
        return index_texts(self.sequences(), self._copies, sorted(partial))

    @cached_property
    def _copies(self) -> dict[int, int]:
        return read_copies(self.folder, self.plan)

    def sequences(self) -> PlannedSequences:
        """Read the sequences of all committed units, in the order of the corpus."""
        columns = [np.empty((6, 0), np.int64)]
        for unit in range(len(self.units)):
            # Many at once, so that the disk can work on them side by side.
            if unit % FEW == 0:
                for ahead in range(unit, min(unit + FEW, len(self.units))):
                    self[ahead].prefetch_index()
            texts, starts, offsets = self[unit].sequences()
            lengths = np.diff(offsets)
            if self.plan.pool is not None:
                lengths = np.ones_like(lengths)
            units = np.full(len(texts), unit)
            numbers = np.arange(len(texts))
            firsts = np.cumsum(lengths) - lengths
            columns.append(np.stack([texts, starts, units, numbers, firsts, lengths]))
        planned = PlannedSequences(*np.concatenate(columns, axis=1))
        in_order = in_corpus_order(planned.text, planned.start)
        if not in_order or np.isin(planned.text, list(self._copies)).any():
            raise self.folder.damaged(
                "a text is in two units that do not follow one another, or is a copy"
                " and has states of its own"
            )
        return planned


class SiteArray:
    """A lazy array that numpy's indices read: `array[3]`, `array[[5, 900], :8]`.

    Values are float32, to which float16 and bfloat16 are widened exactly. Every block
    that is read is checked.
    """

    def __init__(self, shards: Shards, index: TextIndex, site: str) -> None:
        self._shards = shards
        self._index = index
        self.site = site
        self.stored = shards.plan.dtype
        self.shape = (index.count, shards.plan.widths[site])
        self.dtype = np.dtype(np.float32)
        self.row_bytes = self.shape[1] * DTYPES[self.stored].itemsize

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
        try:
            parts = list(key) if isinstance(key, tuple) else [key]
            # Compared by identity: == with an array gives an array.
            dots = [place for place, part in enumerate(parts) if part is Ellipsis]
            place = dots[0] if dots else len(parts)
            missing = [slice(None)] * (2 - len(parts) + len(dots))
            both = [*parts[:place], *missing, *parts[place + 1 :]]
            if len(both) != 2:
                raise IndexError(f"{len(parts)} indices were given")
            rows, columns = both
            values = self._rows(rows)
            if isinstance(columns, slice) and columns == slice(None):
                return values
            # The rows that were read take the place of those in the key, in the same
            # shape: numpy combines them with the columns.
            shape = values.shape[:-1]
            places: Any = slice(None)
            if not isinstance(rows, slice):
                places = np.arange(math.prod(shape)).reshape(shape)
            return values.reshape(-1, self.shape[1])[places, columns]
        except Error:
            raise
        except (IndexError, TypeError, ValueError) as error:
            raise StatesError(
                f"Cannot index {self!r}",
                str(error)[:200],
                "Give a number, a slice, a mask or indices of its rows.",
            ) from error

    def _rows(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            numbers = range(len(self))[rows]
            if numbers.step == 1:
                return self.read(numbers.start, max(numbers.start, numbers.stop))
            indices = np.arange(numbers.start, numbers.stop, numbers.step)
            return self._widened(self.native(indices))
        indices = np.asarray(rows)
        if indices.dtype.kind == "b" and indices.shape == (len(self),):
            return self._widened(self.native(np.flatnonzero(indices)))
        if indices.dtype.kind not in "iu" and indices.size:
            raise IndexError(
                f"{indices.dtype} {list(indices.shape)} is neither a mask nor indices"
            )
        taken = self._widened(self.native(indices.reshape(-1)))
        return taken.reshape(*indices.shape, self.shape[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = self.read(0, len(self))
        return values if dtype is None else values.astype(dtype, copy=False)

    def blocks(self, rows: int | None = None) -> Iterator[NDArray[np.float32]]:
        """Yield all rows in order, some at a time, so that only those are held."""
        return (self.read(start, end) for start, end in self._ranges(rows))

    def native_blocks(self, rows: int | None = None) -> Iterator[NDArray[Any]]:
        """Yield all rows in order as they lie on disk, at most this many at a time.

        bfloat16 is given as its bits.
        """
        for start, end in self._ranges(rows):
            parts = list(self._shards.read(self.site, self._index, start, end))
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ranges(self, rows: int | None) -> Iterator[tuple[int, int]]:
        step = self._step if rows is None else integer(rows, "rows", 1)
        for start in range(0, len(self), step):
            yield start, min(start + step, len(self))

    @property
    def _step(self) -> int:
        return max(1, min(BLOCK_ROWS, BLOCK_BYTES // self.row_bytes))

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the rows from start to stop."""
        out = np.empty((stop - start, self.shape[1]), np.float32)
        done = 0
        for begin in range(start, stop, self._step):
            end = min(begin + self._step, stop)
            for native in self._shards.read(self.site, self._index, begin, end):
                widen(native, self.stored, out[done : done + len(native)])
                done += len(native)
        return out

    def _widened(self, native: NDArray[Any]) -> NDArray[np.float32]:
        out = np.empty(native.shape, np.float32)
        widen(native, self.stored, out)
        return out

    def native(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return some rows as they lie on disk, in this order; bfloat16 as its bits."""
        count = len(self)
        # Before they become int64: a larger number would be a negative index then.
        if rows.size and not -count <= rows.min() <= rows.max() < count:
            raise StatesError(
                f"Cannot index {self!r}",
                f"the indices run from {rows.min():,} to {rows.max():,}",
                f"Give indices from 0 to {count - 1:,}.",
            )
        wanted = rows.astype(np.int64) % max(1, count)
        return self._shards.take(self.site, self._index, wanted)


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
