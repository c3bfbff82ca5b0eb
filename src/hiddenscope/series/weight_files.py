"""The hash of the weights in files, before any of them is loaded.

The tensors are hashed and not the files: the same weights in other shards, in another
order or with another header have the same hash. Nothing is held but one piece of a
file.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hiddenscope import progress
from hiddenscope.errors import Damaged

PIECE = 2**22
LONGEST_HEADER = 100 * 2**20


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file: its name, what it is, and where it lies."""

    name: str
    kind: str
    path: Path
    start: int
    stop: int


def hash_tensors(paths: Iterable[Path]) -> str:
    """Return the hash of all tensors of some safetensors files.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> a, b = torch.ones(2), torch.zeros(3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     whole, first, second = (Path(folder, name) for name in "wfs")
    ...     save_file({"a": a, "b": b}, whole, {"step": "1000"})
    ...     save_file({"b": b}, first)
    ...     save_file({"a": a}, second)
    ...     hash_tensors([whole]) == hash_tensors([first, second])
    True
    """
    tensors: list[StoredTensor] = []
    for path in paths:
        tensors += _tensors_of(path)
    total = sum(tensor.stop - tensor.start for tensor in tensors)
    hashed = hashlib.sha256()
    with progress.track("Hashing weights", total=total, unit="bytes") as advance:
        for tensor in sorted(tensors):
            digest = hashlib.sha256(f"{tensor.name} {tensor.kind}".encode())
            for piece in _pieces(tensor):
                digest.update(piece)
                advance(len(piece))
            hashed.update(digest.digest())
    return f"sha256:{hashed.hexdigest()}"


def hash_file(path: Path) -> str:
    """Return the hash of the bytes of a file."""
    hashed = hashlib.sha256()
    size = path.stat().st_size
    bar = progress.track(f"Hashing {path.name}", total=size, unit="bytes")
    with path.open("rb") as file, bar as advance:
        while piece := file.read(PIECE):
            hashed.update(piece)
            advance(len(piece))
    return f"sha256:{hashed.hexdigest()}"


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    """Read the table of a safetensors file: its length in 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError("its header is too long")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, stop = tensor["data_offsets"]
            kind = f"{tensor['dtype']} {tensor['shape']}"
            yield StoredTensor(name, kind, path, 8 + length + start, 8 + length + stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"Cannot read {path.name}",
            "it is not a whole safetensors file",
            "Save or download the model again.",
        ) from error


def _pieces(tensor: StoredTensor) -> Iterator[bytes]:
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        missing = tensor.stop - tensor.start
        while missing > 0:
            piece = file.read(min(PIECE, missing))
            if not piece:
                raise Damaged(
                    f"Cannot read {tensor.path.name}",
                    f"it ends within the tensor {tensor.name[:80]!r}",
                    "Save or download the model again.",
                )
            missing -= len(piece)
            yield piece
