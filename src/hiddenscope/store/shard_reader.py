"""The reader of a shard, which checks every block that it reads.

Bytes are read into memory first and checked there, so that what is returned is what was
checked: a memory map may be read from the disk again after the check, and a file that
became shorter would end the process. A large read is shared between two threads,
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

# Blocks that a thread reads at a time.
BLOCKS_PER_READ = 64
# One copies while the other checks, which holds the GIL; more of them wait for it.
THREADS = 2
# Blocks that are held for scattered rows.
MAX_BLOCKS_HELD = 4096

_Bytes = NDArray[np.uint8]


class ShardReader:
    """The open shard of one unit."""

    def __init__(
        self, folder: StoreFolder, commit: Commit, layout: ShardLayout
    ) -> None:
        self.layout = layout
        self.commit = commit
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
            reason = f"has {size:,} bytes, and must have {layout.size:,}"
            if commit.size != layout.size:
                reason += f", and its record says {commit.size:,}"
            raise self._damaged(reason)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def rows(self, tensor: str, first: int, count: int) -> NDArray[Any]:
        """Read rows of a tensor that follow one another."""
        place = self.layout.places[tensor]
        start = place.start + first * place.row_bytes
        end = start + count * place.row_bytes
        block = start // BLOCK
        content = self._blocks(block, -(-end // BLOCK))
        offset = block * BLOCK
        values = content[start - offset : end - offset].view(place.dtype)
        return values.reshape(count, *place.shape[1:])

    def prefetch_index(self) -> None:
        """Have the disk begin with the checksums and the index of the sequences."""
        table = self.layout.covered
        self._will_need(table, self.layout.size - table)
        self._will_need(0, self.layout.places["ids"].start)

    def prefetch(self, tensor: str, rows: NDArray[np.int64]) -> None:
        """Have the disk begin with rows, in ascending order, that will be taken."""
        blocks, _ = self._blocks_of(tensor, rows[: self._portion(tensor)])
        self._prefetch(blocks)

    def take(self, tensor: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Read scattered rows, in ascending order, into an array of the tensor's dtype.

        They are read in portions, of which `prefetch` has begun the first.
        """
        width = self.layout.places[tensor].row_bytes
        portion = self._portion(tensor)
        blocks, offsets = self._blocks_of(tensor, rows[:portion])
        for done in range(0, len(rows), portion):
            end = done + portion
            content = self._gather_blocks(blocks)
            target = out[done:end].view(np.uint8).reshape(len(offsets), width)
            for number, offset in enumerate(offsets.tolist()):
                target[number] = content[offset : offset + width]
            blocks, offsets = self._blocks_of(tensor, rows[end : end + portion])
            self._prefetch(blocks)

    def _portion(self, tensor: str) -> int:
        """Return how many rows of a tensor may be held, with their blocks, at once."""
        blocks_per_row = self.layout.places[tensor].row_bytes // BLOCK + 2
        return max(1, MAX_BLOCKS_HELD // blocks_per_row)

    def _blocks_of(
        self, tensor: str, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks that hold rows, and where each row begins in them.

        The rows' offsets are those in the blocks one after another.
        """
        place = self.layout.places[tensor]
        width = place.row_bytes
        starts = place.start + rows * width
        firsts = starts // BLOCK
        lasts = np.maximum(starts, starts + width - 1) // BLOCK
        most = np.arange(width // BLOCK + 2)
        blocks = np.unique(np.minimum(firsts[:, None] + most, lasts[:, None]))
        offsets = np.searchsorted(blocks, firsts) * BLOCK + starts % BLOCK
        return blocks, offsets

    def _prefetch(self, blocks: NDArray[np.int64]) -> None:
        """Have the disk begin with all blocks at once."""
        for _, block, count in _spans(blocks):
            self._will_need(block * BLOCK, count * BLOCK)

    def _will_need(self, start: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def sequences(self) -> list[NDArray[np.int64]]:
        """Read the text, the start and the row offsets of the sequences, checked.

        The tokens of sequence k are rows `offsets[k]` to `offsets[k + 1]`, so the first
        offset is 0.
        """
        text = self.read_all("text")
        start = self.read_all("start")
        offsets = self.read_all("offsets")
        next_window = (np.diff(text) == 0) & (np.diff(start) > 0)
        in_order = ((np.diff(text) > 0) | next_window).all()
        rows = self.layout.places["ids"].shape[0]
        adds_up = offsets[0] == 0 and offsets[-1] == rows
        adds_up = adds_up and (np.diff(offsets) >= 0).all()
        if not (in_order and adds_up and text[0] >= 0 and start.min() >= 0):
            raise self._damaged(
                "has sequences that are not in the order of the corpus, or do not"
                " add up"
            )
        return [text, start, offsets]

    def string(self, content: _Bytes) -> str:
        """Decode bytes of `strings`."""
        try:
            return content.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            reason = f"has a text that is not UTF-8 ({error.reason})"
            raise self._damaged(reason) from error

    def read_all(self, tensor: str) -> NDArray[Any]:
        """Read all rows of a tensor."""
        return self.rows(tensor, 0, self.layout.places[tensor].shape[0])

    def check_header(self) -> None:
        """Check the table of checksums and the header."""
        self._sums = self._load_sums()

    def pieces(self) -> Iterator[_Bytes]:
        """Yield all bytes of the file, some MiB at a time, checked."""
        blocks = len(self._sums)
        step = 256
        for first in range(0, blocks, step):
            yield self._blocks(first, min(first + step, blocks))
        yield self._table()

    @cached_property
    def _sums(self) -> list[int]:
        """Return the checksums of the blocks."""
        return self._load_sums()

    def _load_sums(self) -> list[int]:
        """Read the checksums of the blocks, and check them and the header."""
        layout = self.layout
        table: Sums = self._table().view("<u4")
        sums: list[int] = table.tolist()
        header_blocks = -(-len(layout.header) // BLOCK)
        size = min(header_blocks * BLOCK, layout.covered)
        header = np.empty(size, np.uint8)
        self._pread_into(header, 0)
        self._check(header, 0, sums)
        if header[: len(layout.header)].tobytes() != layout.header:
            raise self._damaged("has a header that does not follow from the plan")
        return sums

    def _table(self) -> _Bytes:
        """Read the bytes of the table of checksums, checked."""
        table = np.empty(self.layout.size - self.layout.covered, np.uint8)
        self._pread_into(table, self.layout.covered)
        if hashlib.sha256(table.data).hexdigest() != self.commit.blocks:
            raise self._damaged("has a damaged table of checksums")
        return table

    def _blocks(self, first: int, last: int) -> _Bytes:
        """Read blocks that follow one another, checked."""
        sums = self._sums
        end = min(last * BLOCK, self.layout.covered)
        content = np.empty(max(0, end - first * BLOCK), np.uint8)
        step = BLOCKS_PER_READ * BLOCK
        starts = range(0, len(content), step)

        def read_share(thread: int) -> None:
            for start in starts[thread::THREADS]:
                part = content[start : start + step]
                self._pread_into(part, first * BLOCK + start)
                self._check(part, first + start // BLOCK, sums)

        _run_shares(read_share, range(min(THREADS, len(starts))))
        return content

    def _gather_blocks(self, blocks: NDArray[np.int64]) -> _Bytes:
        """Read scattered blocks, in ascending order, one after another, checked."""
        # All of them are prefetched, or on their way, so that one thread is enough.
        sums = self._sums
        content = np.empty(len(blocks) * BLOCK, np.uint8)
        for index, block, count in _spans(blocks):
            start = block * BLOCK
            end = min((block + count) * BLOCK, self.layout.covered)
            part = content[index * BLOCK : index * BLOCK + end - start]
            self._pread_into(part, start)
            self._check(part, block, sums)
        return content

    def _pread_into(self, part: _Bytes, start: int) -> None:
        """Read bytes of the file into memory."""
        view = part.data
        done = 0
        try:
            # The system may read less than it was asked for.
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], start + done)
                if not count:
                    raise self._damaged("is shorter than it was")
                done += count
        except FileError:
            raise
        except OSError as error:
            reason = f"{self._name}: {error.strerror or error}"
            raise FileError(self._problem, reason, records.VERIFY) from error

    def _check(self, part: _Bytes, block: int, sums: list[int]) -> None:
        crc = crc_function()
        view = part.data
        for number, start in enumerate(range(0, len(view), BLOCK), block):
            if crc(view[start : start + BLOCK]) != sums[number]:
                raise self._damaged(f"is damaged in block {number:,}")

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self._problem, f"{self._name} {what}", records.VERIFY)


def _spans(blocks: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Split ascending blocks into runs: index of the first, the first, and their count.

    >>> _spans(np.array([3, 4, 9]))
    [(0, 3, 2), (2, 9, 1)]
    """
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    counts = np.diff(begins, append=len(blocks))
    columns = (begins.tolist(), blocks[begins].tolist(), counts.tolist())
    return list(zip(*columns, strict=True))


def _run_shares(work: Callable[[int], None], shares: Sequence[int]) -> None:
    """Run the first share in this thread, the others in threads of their own."""
    futures = [_threads(os.getpid()).submit(work, share) for share in shares[1:]]
    try:
        for share in shares[:1]:
            work(share)
    finally:
        # They write into memory of the caller.
        wait(futures)
    for future in futures:
        future.result()


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process; after a fork, those of the parent are gone."""
    return ThreadPoolExecutor(THREADS, "store")
