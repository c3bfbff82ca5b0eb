"""Shards: the safetensors file of one unit, how it is written and how it is read.

Every byte of it follows from the plan and the values. The header names the plan and the
unit. Then come, without gaps, what the sequences are (`text`, `start`, `offsets`,
`ids`, `spans`), one tensor for each site, the texts (`strings`), and last the CRC-32C
of every 16 KiB block before it (`blocks.crc32c`). Where each lies is computed from the
plan: nothing that a file says of itself is trusted. The SHA-256 of the whole names the
file; the blocks let a reader check what it reads and no more.

Bytes are read into memory first and checked there, so that what is returned is what was
checked: a memory map may be read from the disk again after the check, and a file that
became shorter would end the process. A large read is shared between two threads,
each of which checks a piece while it is still in the processor's cache.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import Damaged, FileError, StoreError
from hiddenscope.files import SAFETENSORS_DTYPES
from hiddenscope.states.arrays import Ints
from hiddenscope.store.folder import VERIFY, StoreFolder
from hiddenscope.store.plan import DTYPES, StorePlan, StoreSequence, UnitDigest
from hiddenscope.store.records import Commit

TABLE = "blocks.crc32c"
FORMAT = "hiddenscope.store/1"
# The first tensor begins at a multiple of this.
ALIGNED = 64
# The dtypes of safetensors, in numpy; states have another one besides.
KINDS: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
# Bytes that have a checksum of their own.
BLOCK = 16 * 1024
# Bytes that are written at a time.
PIECE = 4 * 2**20
# Blocks that a thread reads at a time.
BLOCKS_PER_READ = 64
# Scattered rows that are read at a time, if they lie within a block of one another.
MOST_ROWS = 2048
# One copies while the other checks, which holds the GIL; more of them wait for it.
THREADS = 2

_INT32 = 2**31
_Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in its file, its shape and its dtype in numpy."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True)
class ShardLayout:
    """The header of a shard, the place of every tensor, and the length of the file.

    The checksums of blocks cover the first `covered` bytes: all before the TABLE.
    """

    header: bytes
    places: Mapping[str, TensorPlace]
    covered: int
    size: int


def layout_of(plan: StorePlan, unit: UnitDigest) -> ShardLayout:
    """Compute the layout of a unit's shard."""
    states = SAFETENSORS_DTYPES[plan.dtype]
    kinds = KINDS | {states: DTYPES[plan.dtype]}
    shapes = {
        "text": ("I64", (unit.sequences,)),
        "start": ("I64", (unit.sequences,)),
        "offsets": ("I64", (unit.sequences + 1,)),
        "strings.offsets": ("I64", (unit.sequences + 1,)),
        "ids": ("I32", (unit.kept,)),
        "spans": ("I32", (unit.kept, 2)),
    }
    for site in plan.sites:
        shapes[site] = states, (plan.rows_of(unit), plan.widths[site])
    shapes["strings"] = "U8", (unit.text_bytes,)
    metadata = {"format": FORMAT, "plan": plan.digest, "unit": unit.name}
    blocks = 0
    # The length of the table depends on that of the header, which names it. From below,
    # this ends at the smallest that fits.
    while True:
        shapes[TABLE] = "U8", (blocks, 4)
        entries: dict[str, Any] = {"__metadata__": metadata}
        places = {}
        end = 0
        for name, (kind, shape) in shapes.items():
            row_bytes = math.prod(shape[1:]) * kinds[kind].itemsize
            places[name] = TensorPlace(end, kinds[kind], shape, row_bytes)
            offsets = [end, end + shape[0] * row_bytes]
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        header = len(text).to_bytes(8, "little") + text
        covered = len(header) + places[TABLE].start
        needed = -(-covered // BLOCK)
        if needed == blocks:
            break
        blocks = needed
    for name, place in places.items():
        places[name] = replace(place, start=len(header) + place.start)
    return ShardLayout(header, places, covered, len(header) + end)


def sequence_tensors(
    sequences: Sequence[StoreSequence], every: int = 1
) -> dict[str, NDArray[Any]]:
    """Return the sequences of a unit as its shard holds them, with every n-th token."""
    lengths = []
    stored_ids: list[int] = []
    stored_spans: list[int] = []
    for sequence in sequences:
        indices = sequence.kept(every)
        stored = slice(indices.start, indices.stop, indices.step)
        lengths.append(len(indices))
        stored_ids += sequence.ids[stored]
        stored_spans += chain.from_iterable(sequence.spans[stored])
    numbers = [0, *stored_ids, *stored_spans]
    if not -_INT32 <= min(numbers) <= max(numbers) < _INT32:
        raise StoreError(
            "Cannot store these texts",
            "their ids or spans do not fit in 32 bits",
            "Split long texts.",
        )
    encoded = [sequence.string_bytes for sequence in sequences]
    return {
        "text": np.array([sequence.text for sequence in sequences], dtype="<i8"),
        "start": np.array([sequence.start for sequence in sequences], dtype="<i8"),
        "offsets": np.cumsum([0, *lengths], dtype="<i8"),
        "strings.offsets": np.cumsum([0, *map(len, encoded)], dtype="<i8"),
        "strings": np.frombuffer(b"".join(encoded), dtype="u1"),
        "ids": np.array(stored_ids, dtype="<i4"),
        "spans": np.array(stored_spans, dtype="<i4").reshape(-1, 2),
    }


@cache
def crc_function() -> Callable[..., int]:
    """Return the function that computes CRC-32C, imported when it is needed."""
    import crc32c

    return crc32c.crc32c


def write_shard(
    path: Path, layout: ShardLayout, tensors: Mapping[str, NDArray[Any]]
) -> tuple[str, str]:
    """Write a shard to the disk; return its SHA-256, and that of its checksums."""
    buffers = [memoryview(layout.header)]
    for name in layout.places:
        if name != TABLE:
            flat = np.ascontiguousarray(tensors[name]).reshape(-1)
            buffers.append(flat.view(np.uint8).data)

    def hash_buffers() -> "hashlib._Hash":
        digest = hashlib.sha256()
        for buffer in buffers:
            digest.update(buffer)
        return digest

    crc = crc_function()
    sums = []
    # The checksum of the block that is not whole yet, and how much of it is covered.
    block_sum = 0
    filled = 0
    written = 0
    # SHA-256 is the slowest step (about 1 GB/s on one core), so it has a thread of its
    # own, which never waits for the disk.
    with (
        path.open("r+b", buffering=0) as file,
        ThreadPoolExecutor(1, "sha256") as thread,
    ):
        whole = thread.submit(hash_buffers)
        pieces = []
        for buffer in buffers:
            starts = range(0, len(buffer), PIECE)
            pieces += [buffer[start : start + PIECE] for start in starts]
        for piece in pieces:
            _write(file.fileno(), piece)
            # Have the disk begin with these bytes at once, while the next are hashed:
            # fsync would wait for all of them.
            if hasattr(os, "posix_fadvise") and len(piece) == PIECE:
                os.posix_fadvise(file.fileno(), written, PIECE, os.POSIX_FADV_DONTNEED)
            written += len(piece)
            while len(piece):
                part = piece[: BLOCK - filled]
                piece = piece[len(part) :]
                block_sum = crc(part, block_sum)
                filled += len(part)
                if filled == BLOCK:
                    sums.append(block_sum)
                    block_sum = 0
                    filled = 0
        if filled:
            sums.append(block_sum)
        table = np.array(sums, dtype="<u4").tobytes()
        _write(file.fileno(), memoryview(table))
        # The other thread hashes the rest meanwhile.
        os.fsync(file.fileno())
        digest = whole.result()
    digest.update(table)
    return digest.hexdigest(), hashlib.sha256(table).hexdigest()


def _write(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


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
            raise self._damaged(
                f"has {size:,} bytes, its record says {commit.size:,}, and its plan"
                f" {layout.size:,}"
            )

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
        length = count * place.row_bytes
        block, end = _blocks_of(start, length)
        content = self._blocks(block, end)
        offset = start - block * BLOCK
        values = content[offset : offset + length].view(place.dtype)
        return values.reshape(count, *place.shape[1:])

    def read_all(self, tensor: str) -> NDArray[Any]:
        """Read all rows of a tensor."""
        return self.rows(tensor, 0, self.layout.places[tensor].shape[0])

    def prefetch_index(self) -> None:
        """Have the disk begin with the checksums and the index of the sequences."""
        table = self.layout.covered
        self._will_need(table, self.layout.size - table)
        self._will_need(0, self.layout.places["ids"].start)

    def prefetch(self, tensor: str, rows: Ints) -> None:
        """Have the disk begin at once with rows, in ascending order, to be taken."""
        place = self.layout.places[tensor]
        for first, last, _ in self._runs(tensor, rows[:MOST_ROWS]):
            start = place.start + first * place.row_bytes
            block, end = _blocks_of(start, (last - first + 1) * place.row_bytes)
            self._will_need(block * BLOCK, (end - block) * BLOCK)

    def take(self, tensor: str, rows: Ints) -> NDArray[Any]:
        """Read scattered rows, in ascending order."""
        place = self.layout.places[tensor]
        out = np.empty((len(rows), *place.shape[1:]), place.dtype)
        for first, last, run in self._runs(tensor, rows):
            part = self.rows(tensor, first, last - first + 1)
            out[run] = part if first == last else part[rows[run] - first]
        return out

    def _runs(self, tensor: str, rows: Ints) -> Iterator[tuple[int, int, slice]]:
        """Split rows into runs of a first and a last row, and which rows these are.

        Rows that share a block are in one run, unless there are too many.
        """
        gap = -(-BLOCK // self.layout.places[tensor].row_bytes)
        breaks = np.diff(rows) > gap
        breaks[MOST_ROWS - 1 :: MOST_ROWS] = True
        ends = [*(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
        begin = 0
        for end in ends:
            yield int(rows[begin]), int(rows[end - 1]), slice(begin, end)
            begin = end

    def _will_need(self, start: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def sequences(self) -> list[Ints]:
        """Read the text, the start and the row offsets of the sequences, checked.

        The tokens of sequence k are rows `offsets[k]` to `offsets[k + 1]`, so the first
        offset is 0.
        """
        text = self.read_all("text")
        start = self.read_all("start")
        offsets = self.read_all("offsets")
        rows = self.layout.places["ids"].shape[0]
        adds_up = offsets[0] == 0 and offsets[-1] == rows
        adds_up = adds_up and (np.diff(offsets) >= 0).all()
        in_order = in_corpus_order(text, start)
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

    def pieces(self) -> Iterator[_Bytes]:
        """Yield all bytes of the file, some MiB at a time, checked."""
        blocks = len(self.sums)
        step = PIECE // BLOCK
        for first in range(0, blocks, step):
            yield self._blocks(first, min(first + step, blocks))
        yield self._table()

    @cached_property
    def sums(self) -> list[int]:
        """Read the checksums of the blocks, and check them and the header."""
        header = self.layout.header
        sums: list[int] = self._table().view("<u4").tolist()
        blocks = -(-len(header) // BLOCK)
        content = np.empty(min(blocks * BLOCK, self.layout.covered), np.uint8)
        self._read_blocks(content, 0, sums)
        if content[: len(header)].tobytes() != header:
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
        sums = self.sums
        end = min(last * BLOCK, self.layout.covered)
        content = np.empty(max(0, end - first * BLOCK), np.uint8)
        step = BLOCKS_PER_READ * BLOCK
        if len(content) <= step:
            self._read_blocks(content, first, sums)
            return content

        def read_share(thread: int) -> None:
            for start in range(thread * step, len(content), THREADS * step):
                part = content[start : start + step]
                self._read_blocks(part, first + start // BLOCK, sums)

        list(_threads(os.getpid()).map(read_share, range(THREADS)))
        return content

    def _read_blocks(self, part: _Bytes, block: int, sums: list[int]) -> None:
        """Read bytes from the start of a block on, and check every block of them."""
        self._pread_into(part, block * BLOCK)
        crc = crc_function()
        view = part.data
        for number, start in enumerate(range(0, len(view), BLOCK), block):
            if crc(view[start : start + BLOCK]) != sums[number]:
                raise self._damaged(f"is damaged in block {number:,}")

    def _pread_into(self, part: _Bytes, start: int) -> None:
        """Read bytes of the file into memory."""
        view = part.data
        # The system may read less than it was asked for.
        while len(view):
            try:
                count = os.preadv(self._descriptor, [view], start)
            except OSError as error:
                reason = f"{self._name}: {error.strerror or error}"
                raise FileError(self._problem, reason, VERIFY) from error
            if not count:
                raise self._damaged("is shorter than it was")
            view = view[count:]
            start += count

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self._problem, f"{self._name} {what}", VERIFY)


def in_corpus_order(text: Ints, start: Ints) -> bool:
    """Tell whether texts ascend, and in each text the windows."""
    steps = np.diff(text)
    next_window = (steps == 0) & (np.diff(start) > 0)
    return bool(((steps > 0) | next_window).all())


def _blocks_of(start: int, length: int) -> tuple[int, int]:
    """Return the first block of some bytes, and the one after the last."""
    return start // BLOCK, -(-(start + length) // BLOCK)


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process; after a fork, those of the parent are gone."""
    return ThreadPoolExecutor(THREADS, "store")
