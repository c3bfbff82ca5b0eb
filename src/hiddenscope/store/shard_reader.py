"""ShardReader: reads rows of a shard, and checks the blocks that it reads.

Bytes are read into memory first and checked there, so that what is given out is what was checked: a memory map may be
read from the disk again after the check, and a file that became shorter would end the process. Large reads go through
a few threads, each of which checks a piece while it is still in the processor's cache.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import Damaged, FileError
from hiddenscope.store import records
from hiddenscope.store.checksums import BLOCK, Sums, crc_function
from hiddenscope.store.commits import Commit
from hiddenscope.store.folder import StoreFolder
from hiddenscope.store.shard import ShardLayout

PIECE = 16  # blocks that a thread reads at a time
THREADS = 4
AT_ONCE = 4096  # blocks that are held for rows here and there

_Bytes = NDArray[np.uint8]


class ShardReader:
    """The open shard of one unit."""

    def __init__(self, folder: StoreFolder, commit: Commit, layout: ShardLayout) -> None:
        self.layout, self.commit = layout, commit
        self._problem = f"Cannot read unit {commit.unit} of {folder.shown}"
        path = folder.data(commit.sha256)
        self._name = f"data/{path.name}"
        self._descriptor = -1
        try:
            self._descriptor = folder.opened(path)
        except Damaged as error:
            raise Damaged(self._problem, error.reason, error.remedy) from error
        size = os.fstat(self._descriptor).st_size
        if not size == layout.size == commit.size:
            raise self._damaged(f"has {size:,} bytes, and must have {layout.size:,}")

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def rows(self, tensor: str, first: int, count: int) -> NDArray[Any]:
        """Rows of a tensor that follow one another."""
        place = self.layout.places[tensor]
        width = place.row_bytes
        start, end = place.start + first * width, place.start + (first + count) * width
        block = start // BLOCK
        content = self._blocks(block, -(-end // BLOCK))
        return content[start - block * BLOCK : end - block * BLOCK].view(place.dtype).reshape(count, *place.shape[1:])

    def prefetch(self, tensor: str, rows: NDArray[np.int64]) -> None:
        """Have the disk begin with rows that are about to be taken, and with the checksums of their blocks."""
        place, table = self.layout.places[tensor], self.layout.covered
        starts = place.start + rows[:AT_ONCE] * place.row_bytes
        self._will_need(table, self.layout.size - table)
        for start in starts.tolist():
            self._will_need(start, place.row_bytes)

    def _will_need(self, start: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def take(self, tensor: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Put rows here and there, in ascending order, into an array of the tensor's dtype."""
        place = self.layout.places[tensor]
        width = place.row_bytes
        per_row = width // BLOCK + 2
        portion = max(1, AT_ONCE // per_row)
        for done in range(0, len(rows), portion):
            some = rows[done : done + portion]
            starts = place.start + some * width
            firsts, lasts = starts // BLOCK, np.maximum(starts, starts + width - 1) // BLOCK
            spread = np.minimum(firsts[:, None] + np.arange(per_row), lasts[:, None])
            blocks = np.unique(spread)
            content = self._scattered(blocks)
            offsets = np.searchsorted(blocks, firsts) * BLOCK + starts % BLOCK
            target = out[done : done + portion].view(np.uint8).reshape(len(some), width)
            for number, offset in enumerate(offsets.tolist()):
                target[number] = content[offset : offset + width]

    def check_header(self) -> None:
        """Check the table of checksums and the header."""
        assert self._sums is not None

    def pieces(self) -> Iterator[_Bytes]:
        """All bytes of the file, some MiB at a time, checked."""
        blocks, at_once = len(self._sums), 256
        for first in range(0, blocks, at_once):
            yield self._blocks(first, min(first + at_once, blocks))
        yield self._table()

    @cached_property
    def _sums(self) -> list[int]:
        """The checksums of the blocks, themselves checked; and the header is the one that the plan makes."""
        layout = self.layout
        sums: Sums = self._table().view("<u4")
        listed: list[int] = sums.tolist()
        header = np.empty(min(-(-len(layout.header) // BLOCK) * BLOCK, layout.covered), np.uint8)
        self._fill(header, 0)
        self._check(header, 0, listed)
        if header[: len(layout.header)].tobytes() != layout.header:
            raise self._damaged("has a header that does not follow from the plan")
        return listed

    def _table(self) -> _Bytes:
        """The bytes of the table of checksums, checked."""
        table = np.empty(self.layout.size - self.layout.covered, np.uint8)
        self._fill(table, self.layout.covered)
        if hashlib.sha256(table.data).hexdigest() != self.commit.blocks:
            raise self._damaged("has a damaged table of checksums")
        return table

    def _blocks(self, first: int, last: int) -> _Bytes:
        """Blocks that follow one another, checked."""
        sums = self._sums
        end = min(last * BLOCK, self.layout.covered)
        content = np.empty(max(0, end - first * BLOCK), np.uint8)

        def piece(start: int) -> None:
            part = content[start : start + PIECE * BLOCK]
            self._fill(part, first * BLOCK + start)
            self._check(part, first + start // BLOCK, sums)

        _each(piece, range(0, len(content), PIECE * BLOCK))
        return content

    def _scattered(self, blocks: NDArray[np.int64]) -> _Bytes:
        """Blocks here and there, in ascending order, one after another, checked."""
        sums = self._sums
        content = np.empty(len(blocks) * BLOCK, np.uint8)
        groups = np.split(np.arange(len(blocks)), np.flatnonzero(np.diff(blocks) != 1) + 1)
        spans = [(int(group[0]), int(blocks[group[0]]), len(group)) for group in groups if len(group)]

        for _, block, count in spans:  # so that the disk has all of them to do at once
            self._will_need(block * BLOCK, count * BLOCK)

        def some(portion: int) -> None:
            for at, block, count in spans[portion::THREADS]:
                end = min((block + count) * BLOCK, self.layout.covered)
                part = content[at * BLOCK : at * BLOCK + end - block * BLOCK]
                self._fill(part, block * BLOCK)
                self._check(part, block, sums)

        _each(some, range(min(THREADS, len(spans))))
        return content

    def _fill(self, part: _Bytes, start: int) -> None:
        """Read bytes of the file into memory."""
        view, at = part.data, 0
        try:
            while at < len(view):
                read = os.preadv(self._descriptor, [view[at:]], start + at)
                if not read:
                    raise self._damaged("is shorter than it was")
                at += read
        except OSError as error:
            if isinstance(error, FileError):
                raise
            reason = f"{self._name}: {error.strerror or error}"
            raise FileError(self._problem, reason, records.VERIFY) from error

    def _check(self, part: _Bytes, block: int, sums: list[int]) -> None:
        crc, view = crc_function(), part.data
        for start in range(0, len(view), BLOCK):
            if crc(view[start : start + BLOCK]) != sums[block + start // BLOCK]:
                raise self._damaged(f"is damaged in block {block + start // BLOCK:,}")

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self._problem, f"{self._name} {what}", records.VERIFY)


def _each(work: Callable[[int], None], parts: Iterable[int]) -> None:
    """Do each part, in threads where there are several."""
    listed = list(parts)
    if len(listed) < 2:
        for part in listed:
            work(part)
        return
    for done in _threads(os.getpid()).map(work, listed):
        assert done is None


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process; those of a parent are not there after a fork."""
    return ThreadPoolExecutor(THREADS, "store")
