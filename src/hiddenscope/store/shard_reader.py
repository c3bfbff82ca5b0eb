"""ShardReader: reads rows of a shard, and checks the blocks that it reads.

Bytes are read into memory first and checked there, so that what is given out is what
was checked: a memory map may be read from the disk again after the check, and a file
that became shorter would end the process. A large read is shared between two threads,
each of which checks a piece while it is still in the processor's cache.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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

BLOCKS_PER_READ = 64  # blocks that a thread reads at a time
# One copies while the other checks, which holds the GIL; more of them wait for it.
THREADS = 2
MAX_BLOCKS_HELD = 4096  # blocks that are held for rows here and there

_Bytes = NDArray[np.uint8]


class ShardReader:
    """The open shard of one unit."""

    def __init__(
        self, folder: StoreFolder, commit: Commit, layout: ShardLayout
    ) -> None:
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
            said = (
                f", and its record says {commit.size:,}"
                if commit.size != layout.size
                else ""
            )
            raise self._damaged(
                f"has {size:,} bytes, and must have {layout.size:,}{said}"
            )

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
        return (
            content[start - block * BLOCK : end - block * BLOCK]
            .view(place.dtype)
            .reshape(count, *place.shape[1:])
        )

    def prefetch_index(self) -> None:
        """Have the disk begin with the table of checksums, and with the texts, starts
        and offsets of the rows.
        """
        table = self.layout.covered
        self._will_need(table, self.layout.size - table)
        self._will_need(0, self.layout.places["ids"].start)

    def prefetch(self, tensor: str, rows: NDArray[np.int64]) -> None:
        """Have the disk begin with rows, in ascending order, that are about to be
        taken.
        """
        self._prefetch(self._blocks_of(tensor, rows[: self._portion(tensor)])[0])

    def take(self, tensor: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Put rows here and there, in ascending order, into an array of the tensor's
        dtype.

        They are taken in portions, and `prefetch` has asked for the first.
        """
        width, portion = self.layout.places[tensor].row_bytes, self._portion(tensor)
        blocks, offsets = self._blocks_of(tensor, rows[:portion])
        for done in range(0, len(rows), portion):
            content = self._gather_blocks(blocks)
            target = (
                out[done : done + portion].view(np.uint8).reshape(len(offsets), width)
            )
            for number, offset in enumerate(offsets.tolist()):
                target[number] = content[offset : offset + width]
            blocks, offsets = self._blocks_of(
                tensor, rows[done + portion : done + 2 * portion]
            )
            self._prefetch(blocks)

    def _portion(self, tensor: str) -> int:
        """The rows of a tensor whose blocks may be held at once."""
        return max(
            1, MAX_BLOCKS_HELD // (self.layout.places[tensor].row_bytes // BLOCK + 2)
        )

    def _blocks_of(
        self, tensor: str, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The blocks that hold rows, and where each row begins when those blocks follow
        one another.
        """
        place = self.layout.places[tensor]
        width = place.row_bytes
        starts = place.start + rows * width
        firsts, lasts = starts // BLOCK, np.maximum(starts, starts + width - 1) // BLOCK
        blocks = np.unique(
            np.minimum(firsts[:, None] + np.arange(width // BLOCK + 2), lasts[:, None])
        )
        return blocks, np.searchsorted(blocks, firsts) * BLOCK + starts % BLOCK

    def _prefetch(self, blocks: NDArray[np.int64]) -> None:
        """Have the disk begin with blocks, so that it has all of them to do at once."""
        for _, block, count in _spans(blocks):
            self._will_need(block * BLOCK, count * BLOCK)

    def _will_need(self, start: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def sequences(self) -> list[NDArray[np.int64]]:
        """The text, the start and the offsets of the sequences, checked: in order, and
        adding up.

        The tokens of sequence k are rows `offsets[k]` to `offsets[k + 1]`, so the first
        offset is 0.
        """
        text, start, offsets = (
            self.read_all(name) for name in ("text", "start", "offsets")
        )
        grows = (np.diff(text) > 0) | ((np.diff(text) == 0) & (np.diff(start) > 0))
        rows = self.layout.places["ids"].shape[0]
        counted = (
            offsets[0] == 0 and offsets[-1] == rows and (np.diff(offsets) >= 0).all()
        )
        if not (grows.all() and counted and text[0] >= 0 and start.min() >= 0):
            raise self._damaged(
                "has sequences that are not in the order of the corpus, or do not"
                " add up"
            )
        return [text, start, offsets]

    def string(self, content: _Bytes) -> str:
        """Bytes of `strings` as a text."""
        try:
            return content.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._damaged(
                f"has a text that is not UTF-8 ({error.reason})"
            ) from error

    def read_all(self, tensor: str) -> NDArray[Any]:
        """All rows of a tensor."""
        return self.rows(tensor, 0, self.layout.places[tensor].shape[0])

    def check_header(self) -> None:
        """Check the table of checksums and the header."""
        self._sums = self._load_sums()

    def pieces(self) -> Iterator[_Bytes]:
        """All bytes of the file, some MiB at a time, checked."""
        blocks, at_once = len(self._sums), 256
        for first in range(0, blocks, at_once):
            yield self._blocks(first, min(first + at_once, blocks))
        yield self._table()

    @cached_property
    def _sums(self) -> list[int]:
        """The checksums of the blocks."""
        return self._load_sums()

    def _load_sums(self) -> list[int]:
        """Read the checksums of the blocks and the header, and check both: the header
        is the one the plan makes.
        """
        layout = self.layout
        sums: Sums = self._table().view("<u4")
        listed: list[int] = sums.tolist()
        header = np.empty(
            min(-(-len(layout.header) // BLOCK) * BLOCK, layout.covered), np.uint8
        )
        self._pread_into(header, 0)
        self._check(header, 0, listed)
        if header[: len(layout.header)].tobytes() != layout.header:
            raise self._damaged("has a header that does not follow from the plan")
        return listed

    def _table(self) -> _Bytes:
        """The bytes of the table of checksums, checked."""
        table = np.empty(self.layout.size - self.layout.covered, np.uint8)
        self._pread_into(table, self.layout.covered)
        # The SHA-256 of this table.
        if hashlib.sha256(table.data).hexdigest() != self.commit.blocks:
            raise self._damaged("has a damaged table of checksums")
        return table

    def _blocks(self, first: int, last: int) -> _Bytes:
        """Blocks that follow one another, checked."""
        sums = self._sums
        end = min(last * BLOCK, self.layout.covered)
        content = np.empty(max(0, end - first * BLOCK), np.uint8)

        starts = range(0, len(content), BLOCKS_PER_READ * BLOCK)

        def some(portion: int) -> None:
            for start in starts[portion::THREADS]:
                part = content[start : start + BLOCKS_PER_READ * BLOCK]
                self._pread_into(part, first * BLOCK + start)
                self._check(part, first + start // BLOCK, sums)

        _each(some, range(min(THREADS, len(starts))))
        return content

    def _gather_blocks(self, blocks: NDArray[np.int64]) -> _Bytes:
        """Blocks here and there, in ascending order, one after another, checked.

        The disk has been asked for all of them, so that one thread is enough: each is
        there, or on its way.
        """
        sums = self._sums
        content = np.empty(len(blocks) * BLOCK, np.uint8)
        for at, block, count in _spans(blocks):
            end = min((block + count) * BLOCK, self.layout.covered)
            part = content[at * BLOCK : at * BLOCK + end - block * BLOCK]
            self._pread_into(part, block * BLOCK)
            self._check(part, block, sums)
        return content

    def _pread_into(self, part: _Bytes, start: int) -> None:
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
        for number, start in enumerate(range(0, len(view), BLOCK), block):
            if crc(view[start : start + BLOCK]) != sums[number]:
                raise self._damaged(f"is damaged in block {number:,}")

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self._problem, f"{self._name} {what}", records.VERIFY)


def _spans(blocks: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Ascending blocks as runs that follow one another: the index of the first, the
    first, and how many there are.

    >>> _spans(np.array([3, 4, 9]))
    [(0, 3, 2), (2, 9, 1)]
    """
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    return list(
        zip(
            begins.tolist(),
            blocks[begins].tolist(),
            np.diff(begins, append=len(blocks)).tolist(),
            strict=True,
        )
    )


def _each(work: Callable[[int], None], parts: Sequence[int]) -> None:
    """Do each part: the first in this thread, the others in threads of their own."""
    started = [_threads(os.getpid()).submit(work, part) for part in parts[1:]]
    try:
        for part in parts[:1]:
            work(part)
    finally:
        wait(started)  # they write into memory of the caller
    for other in started:
        other.result()


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process; those of a parent are not there after a fork."""
    return ThreadPoolExecutor(THREADS, "store")
