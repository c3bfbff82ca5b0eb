"""Shards: the safetensors file of one unit.

Every byte of it follows from the plan and the values. The header names the plan and the
unit. Then come, without gaps, what the sequences are (`text`, `start`, `offsets`,
`ids`, `spans`), one tensor for each site, the texts (`strings`), and last the checksum
of every 16 KiB block before it (`blocks.crc32c`). Where each lies is computed from the
plan: nothing that a file says of itself is trusted.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import StoreError
from hiddenscope.store.checksums import (
    BLOCK,
    PIECE,
    RunningSums,
    WholeDigest,
    pieces_of,
)
from hiddenscope.store.plan import DTYPES, StorePlan, StoreSequence, UnitDigest

TABLE = "blocks.crc32c"
FORMAT = "hiddenscope.store/1"
# The first tensor begins at a multiple of this.
ALIGNED = 64
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_INT32 = 2**31
_Tensor: TypeAlias = tuple[str, np.dtype[Any], tuple[int, ...], str]


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in its file, with its shape and its dtype in numpy."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    name: str

    @property
    def row_bytes(self) -> int:
        """Return the length of one row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return its length in bytes."""
        return self.shape[0] * self.row_bytes

    @property
    def end(self) -> int:
        """Return the byte after its last."""
        return self.start + self.nbytes


@dataclass(frozen=True)
class ShardLayout:
    """The header of a shard, and the place of every tensor; the TABLE is the last."""

    header: bytes
    places: Mapping[str, TensorPlace]

    @property
    def size(self) -> int:
        """Return the length of the file."""
        return self.places[TABLE].end

    @property
    def covered(self) -> int:
        """Return how many bytes the checksums of blocks cover: all before them."""
        return self.places[TABLE].start


def layout_of(plan: StorePlan, digest: str, unit: UnitDigest) -> ShardLayout:
    """Compute the layout of a unit's shard; `digest` is that of the plan."""
    tokens = plan.tokens_of(unit)
    rows = plan.rows_of(unit)
    tensors: list[_Tensor] = [
        ("text", np.dtype("<i8"), (unit.sequences,), "I64"),
        ("start", np.dtype("<i8"), (unit.sequences,), "I64"),
        ("offsets", np.dtype("<i8"), (unit.sequences + 1,), "I64"),
        ("strings.offsets", np.dtype("<i8"), (unit.sequences + 1,), "I64"),
        ("ids", np.dtype("<i4"), (tokens,), "I32"),
        ("spans", np.dtype("<i4"), (tokens, 2), "I32"),
    ]
    for site in plan.sites:
        shape = (rows, plan.widths[site])
        tensors.append((site, DTYPES[plan.dtype], shape, NAMES[plan.dtype]))
    tensors.append(("strings", np.dtype("u1"), (unit.text_bytes,), "U8"))
    metadata = {"format": FORMAT, "plan": digest, "unit": unit.name}
    blocks = 0
    # The length of the table depends on that of the header, which names it. From below,
    # this ends at the smallest that fits.
    while True:
        table = (TABLE, np.dtype("u1"), (blocks, 4), "U8")
        layout = _place([*tensors, table], metadata)
        needed = -(-layout.covered // BLOCK)
        if needed == blocks:
            return layout
        blocks = needed


def _place(tensors: Sequence[_Tensor], metadata: Mapping[str, str]) -> ShardLayout:
    """Put tensors one after another, behind the header that describes them."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts = []
    end = 0
    for name, dtype, shape, kind in tensors:
        start = end
        starts.append(start)
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    places = {}
    for (name, dtype, shape, _), start in zip(tensors, starts, strict=True):
        places[name] = TensorPlace(len(header) + start, dtype, shape, name)
    return ShardLayout(header, places)


def sequence_tensors(
    sequences: Sequence[StoreSequence], every: int = 1
) -> dict[str, NDArray[Any]]:
    """Return the sequences of a unit as its shard holds them, with every n-th token."""
    lengths: list[int] = []
    stored_ids: list[int] = []
    stored_spans: list[int] = []
    for sequence in sequences:
        indices = sequence.kept(every)
        stored = slice(indices.start, indices.stop, indices.step)
        lengths.append(len(indices))
        stored_ids += sequence.ids[stored]
        stored_spans += chain.from_iterable(sequence.spans[stored])
    ids = np.array(stored_ids, np.int64)
    spans = np.array(stored_spans, np.int64).reshape(-1, 2)
    for name, values in (("ids", ids), ("spans", spans)):
        if values.size and not -_INT32 <= values.min() <= values.max() < _INT32:
            raise StoreError(
                "Cannot store these texts",
                f"their {name} do not fit in 32 bits",
                "Split long texts.",
            )
    encoded = [sequence.string_bytes for sequence in sequences]
    return {
        "text": np.array([sequence.text for sequence in sequences], dtype="<i8"),
        "start": np.array([sequence.start for sequence in sequences], dtype="<i8"),
        "offsets": np.cumsum([0, *lengths], dtype="<i8"),
        "strings.offsets": np.cumsum([0, *map(len, encoded)], dtype="<i8"),
        "strings": np.frombuffer(b"".join(encoded), dtype="u1"),
        "ids": ids.astype("<i4"),
        "spans": spans.astype("<i4"),
    }


def write_shard(
    path: Path, layout: ShardLayout, tensors: Mapping[str, NDArray[Any]]
) -> tuple[str, str]:
    """Write a shard to the disk; return its SHA-256, and that of its checksums."""
    buffers = [memoryview(layout.header)]
    buffers += [_bytes_of(tensors[name]) for name in layout.places if name != TABLE]
    sums = RunningSums()
    done = 0
    with path.open("r+b", buffering=0) as file, WholeDigest(buffers) as whole:
        for piece in pieces_of(buffers):
            _write(file.fileno(), piece)
            _begin_writeback(file.fileno(), done, len(piece))
            sums.update(piece)
            done += len(piece)
        table = sums.finish().tobytes()
        _write(file.fileno(), memoryview(table))
        # The other thread hashes the rest meanwhile.
        os.fsync(file.fileno())
        return whole.digest(table), hashlib.sha256(table).hexdigest()


def _write(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def _begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Have the disk begin with these bytes at once, while the next are hashed.

    `fsync` would wait for all of them.
    """
    if hasattr(os, "posix_fadvise") and length >= PIECE:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def states_to_store(
    plan: StorePlan, unit: UnitDigest, values: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """Return the values of a unit by site, checked against the plan."""
    problem = f"Cannot commit unit {unit.name}"
    if set(values) != set(plan.sites):
        raise StoreError(
            problem,
            f"the sites are {_listed(values)}, and the plan has {_listed(plan.sites)}",
            "Give the values of each site of the plan.",
        )
    dtype = DTYPES[plan.dtype]
    arrays = {}
    for site in plan.sites:
        array = np.asarray(values[site])
        shape = (plan.rows_of(unit), plan.widths[site])
        if array.shape != shape or array.dtype != dtype:
            actual = f"{array.dtype} {list(array.shape)}"
            raise StoreError(
                problem,
                f"{site} is {actual}, and must be {dtype} {list(shape)}",
                "Give one row a token, or a text where states are pooled.",
            )
        arrays[site] = array
    return arrays


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names))[:200] or "none"
