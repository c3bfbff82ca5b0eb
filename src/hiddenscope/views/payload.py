"""The payload of views: a JSON header and typed arrays, gzipped, as base64 text.

>>> from hiddenscope.results.pictures import Lines, Series
>>> text = pack([Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))])
>>> unpack(text)[0].series[0].y.tolist()
[1.0, 2.5]

Before gzip: the four bytes `HSV1`, the header's length as a little-endian uint32, the
header (ASCII JSON), and the arrays. The header's `views` are the fields of the values;
an array in them is an index into `arrays`, which have dtype, shape, offset (from the
end of the header) and length. The bytes of an array lie in planes, all first bytes
before all second bytes: neighbouring numbers have similar exponents, so gzip saves
more.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import StatesError
from hiddenscope.results.pictures import (
    FINE_STEPS,
    Graph,
    Grid,
    HeadScore,
    Lines,
    Measure,
    PackedFloats,
    Panels,
    Patterns,
    Series,
    View,
    Words,
    steps_of,
)

MAGIC = b"HSV1"
PACKED = (Grid, Panels, Lines, Patterns, Graph, Measure, Words, Series, HeadScore)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in PACKED}
# Fields of the header that are no fields of a value.
ADDED = ("kind", "classes", "steps")
# Little-endian on every machine, as the page's typed arrays read them.
DTYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "int32": "<i4",
    "uint16": "<u2",
    "uint8": "|u1",
}
# Of the 23 bits of a float32's fraction: one part in 32,000 is enough for a map that is
# only looked at.
INFLUENCE_BITS = 14


def pack(views: Sequence[View]) -> str:
    """Return the views as base64 text: ASCII letters, digits, `+`, `/` and `=`, which
    are safe anywhere in HTML.
    """
    packer = _Packer()
    # The records of the arrays are complete only after the views are packed.
    header = {
        "views": [packer.fields(view) for view in views],
        "arrays": packer.records,
    }
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode("ascii")
    raw = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *packer.planes])
    # Without a time, the same views give the same bytes.
    compressed = gzip.compress(raw, compresslevel=9, mtime=0)
    return base64.b64encode(compressed).decode("ascii")


def unpack(text: str) -> list[View]:
    """Return the views that `pack` was given.

    Numbers come back exactly, except those of an `influence`, which keeps four digits
    and a half, and attention weights, whose square root has `steps_of` steps. Strings
    come back exactly, except two lone surrogates that together make a character, which
    come back as that character.
    """
    try:
        raw = gzip.decompress(base64.b64decode(text, validate=True))
        if raw[:4] != MAGIC:
            raise ValueError(f"it begins with {raw[:4]!r}")
        start = 8 + int.from_bytes(raw[4:8], "little")
        header = json.loads(raw[8:start])
        arrays = [_array(record, raw[start:]) for record in header["arrays"]]
        return [_restored(view, arrays) for view in header["views"]]
    except (ValueError, LookupError, TypeError, OSError, EOFError) as error:
        raise StatesError(
            "Cannot read a payload of views",
            f"it is damaged ({error})",
            "Make it again with pack().",
        ) from error


class _ArrayRecord(TypedDict):
    """Where an array lies in the payload."""

    dtype: str
    shape: list[int]
    offset: int
    length: int


class _Packer:
    """Collects the arrays of the views while their other fields become JSON."""

    def __init__(self) -> None:
        self.records: list[_ArrayRecord] = []
        self.planes: list[bytes] = []
        self.end = 0

    def fields(self, value: Any) -> dict[str, Any]:
        """Return a view, or a part of one, as JSON."""
        record: dict[str, Any] = {"kind": type(value).__name__}
        for field in fields(value):
            inner = getattr(value, field.name)
            if field.name == "influence" and getattr(inner, "dtype", "") == np.float32:
                inner = rounded(inner)
            elif field.name == "labels":
                record["classes"], inner = _coded(inner)
            elif field.name == "weights":
                record["steps"] = steps_of(inner)
                inner = quantised(inner)
            record[field.name] = self.value(inner)
        return record

    def value(self, value: Any) -> Any:
        """Return the value of a field as JSON."""
        if isinstance(value, np.ndarray):
            return {"array": self.add(value)}
        if isinstance(value, tuple):
            return [self.value(inner) for inner in value]
        return self.fields(value) if type(value).__name__ in KINDS else value

    def add(self, array: NDArray[Any]) -> int:
        """Add an array, and return its index."""
        dtype = array.dtype.name
        packed = np.ascontiguousarray(array, dtype=DTYPES[dtype])
        numbers = packed.reshape(-1).view(np.uint8).reshape(-1, packed.itemsize)
        planes = numbers.T.tobytes()
        record: _ArrayRecord = {
            "dtype": dtype,
            "shape": list(array.shape),
            "offset": self.end,
            "length": len(planes),
        }
        self.records.append(record)
        self.planes.append(planes)
        self.end += len(planes)
        return len(self.records) - 1


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to numbers with a short fraction, whose last bytes gzip then saves.

    >>> rounded(np.float32([1 / 3, 0.0, 1024.0])).tolist()
    [0.3333282470703125, 0.0, 1024.0]
    """
    spare_bits = 23 - INFLUENCE_BITS
    half = np.uint32(1 << (spare_bits - 1))
    mask = np.uint32(0xFFFFFFFF ^ ((1 << spare_bits) - 1))
    near = ((values.view(np.uint32) + half) & mask).view(np.float32)
    # Rounding up the largest numbers would make them infinite.
    return np.where(np.isfinite(values) & np.isfinite(near), near, values)


def quantised(weights: PackedFloats) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Return each weight from 0 to 1 as the nearest step of its square root, 0 where
    there is none.

    Roots keep small weights apart, which count where large norms multiply them. The
    error is at most the root divided by the number of steps.

    >>> quantised(np.float32([[[[0.0, 0.25, 1.0]]]])).tolist()
    [[[[0, 32768, 65535]]]]
    """
    steps = steps_of(weights)
    dtype = np.uint16 if steps == FINE_STEPS else np.uint8
    levels = np.empty(weights.shape, dtype)
    # Layer by layer: the roots of all at once would take much memory.
    for layer, packed in zip(weights, levels, strict=True):
        roots = np.sqrt(np.clip(np.nan_to_num(layer), 0.0, 1.0))
        packed[...] = np.rint(roots * np.float32(steps))
    return levels


def _coded(labels: tuple[str, ...]) -> tuple[list[str], NDArray[Any] | tuple[()]]:
    """Return the distinct labels, and for each label its index among them."""
    if not labels:
        return [], ()
    index_of = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    dtypes = (np.uint8, np.uint16, np.int32)
    smallest = next(d for d in dtypes if len(index_of) <= np.iinfo(d).max)
    indices = np.array([index_of[label] for label in labels], dtype=smallest)
    return list(index_of), indices


def _array(record: _ArrayRecord, content: bytes) -> NDArray[Any]:
    dtype = np.dtype(DTYPES[record["dtype"]])
    planes = np.frombuffer(content, np.uint8, record["length"], record["offset"])
    numbers = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T)
    return numbers.view(dtype).reshape(record["shape"])


def _restored(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return tuple(_restored(inner, arrays) for inner in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    restored = {
        name: _restored(field, arrays)
        for name, field in value.items()
        if name not in ADDED
    }
    classes = value.get("classes")
    if classes:
        restored["labels"] = tuple(classes[index] for index in restored["labels"])
    if "steps" in value:
        roots = restored["weights"].astype(np.float32) / np.float32(value["steps"])
        weights = np.square(roots)
        # Heads that are missing have no norms.
        weights[np.isnan(restored["norms"]).all(axis=2)] = np.nan
        restored["weights"] = weights
    return KINDS[value["kind"]](**restored)
