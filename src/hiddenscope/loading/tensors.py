"""The header of a safetensors file, checked before any library trusts it.

A safetensors file is eight bytes of length, a JSON header of that length, and the values. Nothing in it is code, but a
length can lie: `read_header` believes only what the size of the file allows.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hiddenscope.errors import Damaged

LARGEST_HEADER = 64 * 2**20
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Header:
    """What a safetensors file says that it holds: the name of each tensor, with its dtype and its bytes."""

    dtypes: dict[str, str]
    bytes: dict[str, int]


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise _damaged(path, f"its header claims {length:,} bytes and the whole file has {size:,}")
        if length > LARGEST_HEADER:
            raise _damaged(path, f"its header claims {length:,} bytes; the limit is {LARGEST_HEADER:,}")
        text = file.read(length)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is no JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is no table of tensors")
    entries.pop("__metadata__", None)
    spans = {name: _span(path, name, entry) for name, entry in entries.items()}
    _check_cover(path, sorted(spans.values()), size - 8 - length)
    return Header(
        {name: entry["dtype"] for name, entry in entries.items()},
        {name: end - begin for name, (begin, end) in spans.items()},
    )


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its entry for {name[:80]!r} is no dtype, shape and offsets") from error
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or begin > end:
        raise _damaged(path, f"the shape or the offsets of {name[:80]!r} are no counts")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _damaged(path, f"the dtype of {name[:80]!r}, {str(dtype)[:40]!r}, is none of safetensors'")
    if (end - begin) * 8 != prod(shape) * _BITS[dtype]:
        raise _damaged(path, f"{name[:80]!r} has {end - begin:,} bytes, which is not what its shape {shape} needs")
    return begin, end


def _check_cover(path: Path, spans: list[tuple[int, int]], available: int) -> None:
    reached = 0
    for begin, end in spans:
        if begin != reached:
            raise _damaged(path, f"its tensors overlap or leave a gap at byte {min(begin, reached):,}")
        reached = end
    if reached != available:
        raise _damaged(path, f"its tensors need {reached:,} bytes and the file holds {available:,}")


def _damaged(path: Path, found: str) -> Damaged:
    return Damaged(f"Cannot read {path.name}", found, "Fetch the file again; it is cut short or was tampered with.")
