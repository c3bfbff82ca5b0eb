"""Row blocks: all that a store knows of some rows, read in bounded memory.

`Store.tokens` holds what is known of every row at once, as Python strings; a corpus of
a billion tokens needs it some rows at a time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hiddenscope.states.arrays import Ints
from hiddenscope.store.plan import DTYPES, StorePlan
from hiddenscope.store.shard_reader import ShardReader
from hiddenscope.store.site_array import widen
from hiddenscope.store.text_index import PlannedSequences, TextIndex

# Bytes of states, of all sites together, and rows that are held at a time.
BLOCK_BYTES = 16 * 2**20
BLOCK_ROWS = 16_384
# Characters of the text that are shown on either side of a token.
CONTEXT = 80
# Units whose texts are held: copies are read from where their texts lie.
MOST_UNITS = 4


class IndexedShards(Protocol):
    """The shards of a store, with the index of their sequences."""

    plan: StorePlan

    def __getitem__(self, number: int) -> ShardReader:
        """Return the open shard of a unit."""

    @property
    def planned(self) -> PlannedSequences:
        """Return the sequences of all committed units."""

    @property
    def strings(self) -> Mapping[int, str]:
        """Return the strings of token ids."""


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows: columns by name, and the states `[row, width]` of each site."""

    start: int
    columns: Mapping[str, NDArray[Any]]
    values: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["text_index"])


@dataclass(frozen=True, eq=False)
class RowReader:
    """Reads the rows of a store block by block.

    A row has the index of its text and its position. A token's also has its id, its
    string, its characters and the text around it; a pooled one has the whole text.
    Values are in the dtype on disk, bfloat16 widened to float32, which is exact; with
    `wide` all are float32.
    """

    shards: IndexedShards
    index: TextIndex
    sites: tuple[str, ...]
    wide: bool = False

    @property
    def plan(self) -> StorePlan:
        """Return the plan of the store."""
        return self.shards.plan

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the values that are read."""
        if self.wide or self.plan.dtype == "bfloat16":
            return np.dtype(np.float32)
        return DTYPES[self.plan.dtype]

    @property
    def widths(self) -> dict[str, int]:
        """Return the width of each site."""
        return {site: self.plan.widths[site] for site in self.sites}

    @property
    def has_texts(self) -> bool:
        """Tell whether the texts were stored."""
        return any(unit.text_bytes for unit in self.plan.units)

    @property
    def column_kinds(self) -> dict[str, type]:
        """Return the columns, and whether they hold integers or strings."""
        kinds: dict[str, type] = {"text_index": int, "position": int}
        if self.plan.pool is None:
            kinds |= {"id": int, "token": str, "start": int, "end": int}
        if self.has_texts:
            kinds["context" if self.plan.pool is None else "text"] = str
        return kinds

    @property
    def block_rows(self) -> int:
        """Return how many rows a block has."""
        numbers = sum(self.widths.values())
        # As if all were float32, because narrower ones may be widened.
        row_bytes = max(1, 4 * numbers)
        return max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))

    def blocks(self) -> Iterator[RowBlock]:
        """Yield all rows in order, some at a time."""
        texts = _Texts(self.shards)
        for start in range(0, self.index.count, self.block_rows):
            end = min(start + self.block_rows, self.index.count)
            values = {site: self._values(site, start, end) for site in self.sites}
            yield RowBlock(start, self._columns(start, end, texts), values)

    def _values(self, site: str, start: int, end: int) -> NDArray[Any]:
        out = np.empty((end - start, self.plan.widths[site]), self.dtype)
        done = 0
        for unit, first, count in self.index.runs(start, end):
            native = self.shards[unit].rows(site, first, count)
            if self.dtype == np.float32:
                widen(native, self.plan.dtype, out[done : done + count])
            else:
                out[done : done + count] = native
            done += count
        return out

    @cached_property
    def _begins(self) -> Ints:
        """Return the first row of each sequence."""
        lengths = self.shards.planned.length[self.index.order]
        begins: Ints = np.cumsum(lengths) - lengths
        return begins

    def _columns(
        self, start: int, end: int, texts: "_Texts"
    ) -> dict[str, NDArray[Any]]:
        planned, index = self.shards.planned, self.index
        rows = np.arange(start, end)
        # Of sequences without rows, which begin where the next does, the last counts.
        places = np.searchsorted(self._begins, rows, side="right") - 1
        sequences = index.order[places]
        text_index = index.texts[index.owner[places]]
        starts = planned.start[sequences]
        if self.plan.pool is not None:
            columns: dict[str, Any] = {"text_index": text_index, "position": starts}
            if self.has_texts:
                found = [texts[number] for number in self._firsts[places].tolist()]
                columns["text"] = as_strings(found)
            return columns
        every = self.plan.every
        # The first position of each window that is a multiple of `every`.
        firsts = -(-starts // every) * every
        positions = firsts + (rows - self._begins[places]) * every
        ids = self._of_tokens("ids", start, end)
        spans = self._of_tokens("spans", start, end)
        known = self.shards.strings
        tokens = [known.get(token) or str(token) for token in ids.tolist()]
        columns = {
            "text_index": text_index,
            "position": positions,
            "id": ids.astype(np.int64),
            "token": as_strings(tokens),
            "start": spans[:, 0].astype(np.int64),
            "end": spans[:, 1].astype(np.int64),
        }
        if self.has_texts:
            numbers = self._firsts[places].tolist()
            around = []
            for number, span in zip(numbers, spans.tolist(), strict=True):
                around.append(context(texts[number], *span))
            columns["context"] = as_strings(around)
        return columns

    @cached_property
    def _firsts(self) -> Ints:
        """Return, for each sequence in order, the first of its text, which has it."""
        index = self.index
        first_places = np.searchsorted(index.owner, index.owner)
        firsts: Ints = index.order[first_places]
        return firsts

    def _of_tokens(self, name: str, start: int, end: int) -> NDArray[Any]:
        parts = []
        for unit, first, count in self.index.runs(start, end):
            parts.append(self.shards[unit].rows(name, first, count))
        return np.concatenate(parts)


class _Texts:
    """The texts of sequences, of the last few units that were read."""

    def __init__(self, shards: IndexedShards) -> None:
        self._shards = shards
        self._units: OrderedDict[int, tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()
        self._last = (-1, "")

    def __getitem__(self, sequence: int) -> str:
        if sequence != self._last[0]:
            self._last = (sequence, self._read(sequence))
        return self._last[1]

    def _read(self, sequence: int) -> str:
        units = self._shards.planned.unit
        unit = int(units[sequence])
        held = self._units.pop(unit, None)
        if held is None:
            shard = self._shards[unit]
            held = shard.read_all("strings"), shard.read_all("strings.offsets")
        self._units[unit] = held
        while len(self._units) > MOST_UNITS:
            self._units.popitem(last=False)
        content, offsets = held
        place = sequence - int(np.searchsorted(units, unit))
        encoded = content[offsets[place] : offsets[place + 1]]
        return self._shards[unit].string(encoded)


def context(text: str, start: int, end: int) -> str:
    """Return a token with the text around it; the text's beginning if it has none.

    >>> context("a long text " * 20, 100, 104) == ("a long text " * 20)[20:184]
    True
    >>> context("short", -1, -1)
    'short'
    """
    if start < 0:
        return text[: 2 * CONTEXT]
    return text[max(0, start - CONTEXT) : end + CONTEXT]


def as_strings(strings: Sequence[str]) -> NDArray[Any]:
    """Return strings that UTF-8 can hold: half of a surrogate pair becomes a mark.

    >>> as_strings(["a", "\\ud800"]).tolist()
    ['a', '\\ufffd\\ufffd\\ufffd']
    """
    array = np.empty(len(strings), dtype=object)
    for number, string in enumerate(strings):
        encoded = string.encode("utf-8", "surrogatepass")
        array[number] = encoded.decode("utf-8", "replace")
    return array
