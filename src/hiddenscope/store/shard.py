"""Shards: the safetensors file of one unit, whose every byte follows from the plan and
the values.

The header names the plan and the unit. Then come, without gaps, what the sequences are
(`text`, `start`, `offsets`, `ids`, `spans`), one tensor for each site, the texts
(`strings`), and last the checksum of every 16 KiB block before it (`blocks.crc32c`).
Where each lies is computed from the plan, so nothing that a file says of itself is
trusted.
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
ALIGNED = 64  # the first tensor begins at a multiple of this
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_INT32 = 2**31
_Tensor: TypeAlias = tuple[str, np.dtype[Any], tuple[int, ...], str]


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in its file: the first byte, the dtype in which numpy holds
    it, and the shape.
    """

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    name: str

    @property
    def row_bytes(self) -> int:
        """The length of one row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.shape[0] * self.row_bytes

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.start + self.nbytes


@dataclass(frozen=True)
class ShardLayout:
    """The header of a shard, and the place of every tensor; `places[TABLE]` is the
    last.
    """

    header: bytes
    places: Mapping[str, TensorPlace]

    @property
    def size(self) -> int:
        """The length of the file."""
        return self.places[TABLE].end

    @property
    def covered(self) -> int:
        """The bytes that the checksums of blocks cover: all before them."""
        return self.places[TABLE].start


def layout_of(plan: StorePlan, digest: str, unit: UnitDigest) -> ShardLayout:
    """The layout of a unit's shard, in the store of the plan with this digest."""
    states = DTYPES[plan.dtype]
    tensors: list[_Tensor] = [
        ("text", np.dtype("<i8"), (unit.sequences,), "I64"),
        ("start", np.dtype("<i8"), (unit.sequences,), "I64"),
        ("offsets", np.dtype("<i8"), (unit.sequences + 1,), "I64"),
        ("strings.offsets", np.dtype("<i8"), (unit.sequences + 1,), "I64"),
        ("ids", np.dtype("<i4"), (plan.tokens_of(unit),), "I32"),
        ("spans", np.dtype("<i4"), (plan.tokens_of(unit), 2), "I32"),
        *(
            (site, states, (plan.rows_of(unit), plan.widths[site]), NAMES[plan.dtype])
            for site in plan.sites
        ),
        ("strings", np.dtype("u1"), (unit.text_bytes,), "U8"),
    ]
    said = {"format": FORMAT, "plan": digest, "unit": unit.name}
    blocks = 0
    # The table's length depends on the header's, which names it: from below, this ends
    # at the least.
    while True:
        header, places = _placed(
            [*tensors, (TABLE, np.dtype("u1"), (blocks, 4), "U8")], said
        )
        if (needed := -(-places[TABLE].start // BLOCK)) == blocks:
            return ShardLayout(header, places)
        blocks = needed


def _placed(
    tensors: Sequence[_Tensor], said: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorPlace]]:
    entries: dict[str, Any] = {"__metadata__": said}
    at, starts = 0, []
    for name, dtype, shape, kind in tensors:
        starts.append(at)
        at += math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [starts[-1], at],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    placed = zip(tensors, starts, strict=True)
    return header, {
        name: TensorPlace(len(header) + start, dtype, shape, name)
        for (name, dtype, shape, _), start in placed
    }


def sequence_tensors(
    sequences: Sequence[StoreSequence], every: int = 1
) -> dict[str, NDArray[Any]]:
    """What the sequences of a unit are, as its shard holds it, with every n-th of their
    tokens.
    """
    kept = [sequence.kept(every) for sequence in sequences]
    lengths = [len(indices) for indices in kept]
    pairs = list(zip(sequences, kept, strict=True))
    flat = np.fromiter(
        chain.from_iterable(
            _some(sequence.ids, indices) for sequence, indices in pairs
        ),
        np.int64,
    )
    listed = chain.from_iterable(
        _some(sequence.spans, indices) for sequence, indices in pairs
    )
    spans = np.fromiter(chain.from_iterable(listed), np.int64).reshape(-1, 2)
    for name, values in (("ids", flat), ("spans", spans)):
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
        "ids": flat.astype("<i4"),
        "spans": spans.astype("<i4"),
    }


def _some(values: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    return (
        values if len(indices) == len(values) else [values[index] for index in indices]
    )


def write_shard(
    path: Path, layout: ShardLayout, tensors: Mapping[str, NDArray[Any]]
) -> tuple[str, str]:
    """Write a shard and bring it to the disk; the SHA-256 of the file, and that of its
    table of checksums.
    """
    buffers = [memoryview(layout.header)]
    buffers += [_bytes_of(tensors[name]) for name in layout.places if name != TABLE]
    sums, done = RunningSums(), 0
    with path.open("r+b", buffering=0) as file, WholeDigest(buffers) as whole:
        for piece in pieces_of(buffers):
            _write(file.fileno(), piece)
            _begin_writeback(file.fileno(), done, len(piece))
            sums.update(piece)
            done += len(piece)
        table = sums.finish().tobytes()
        _write(file.fileno(), memoryview(table))
        os.fsync(file.fileno())  # while the rest is hashed
        return whole.digest(table), hashlib.sha256(table).hexdigest()


def _write(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def _begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Have the disk begin with these bytes at once, while the next are hashed; `fsync`
    would wait for all of them.
    """
    if hasattr(os, "posix_fadvise") and length >= PIECE:
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def states_to_store(
    plan: StorePlan, unit: UnitDigest, values: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """The values of a unit by site, checked against the plan."""
    problem = f"Cannot commit unit {unit.name}"
    if set(values) != set(plan.sites):
        reason = (
            f"the sites are {_listed(values)}, and the plan has {_listed(plan.sites)}"
        )
        raise StoreError(problem, reason, "Give the values of each site of the plan.")
    dtype, checked = DTYPES[plan.dtype], {}
    for site in plan.sites:
        array, shape = np.asarray(values[site]), (plan.rows_of(unit), plan.widths[site])
        if array.shape != shape or array.dtype != dtype:
            reason = (
                f"{site} is {array.dtype} {list(array.shape)}, and must be {dtype}"
                f" {list(shape)}"
            )
            raise StoreError(
                problem,
                reason,
                "Give one row a token, or a text where states are pooled.",
            )
        checked[site] = array
    return checked


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names))[:200] or "none"
