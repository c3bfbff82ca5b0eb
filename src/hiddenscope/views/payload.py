"""One payload for all three views: a JSON header and typed arrays, gzipped, as base64
text.

>>> from hiddenscope.views.values import Lines, Series
>>> text = pack([Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))])
>>> unpack(text)[0].series[0].y.tolist()
[1.0, 2.5]

Before gzip: the four bytes `HSV1`, the header's length as a little-endian uint32, the
header (ASCII JSON), and the sections. The header's `views` are the fields of the
values, each array in them a number into `arrays`, which give dtype, shape, offset (from
the end of the header) and length. The bytes of a section lie in planes, all first bytes
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
from hiddenscope.views.values import Grid, Lines, Measure, Panels, Series, View, Words

MAGIC = b"HSV1"
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Grid, Panels, Lines, Measure, Words, Series)
}
DTYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "int32": "<i4",
    "uint16": "<u2",
    "uint8": "|u1",
}
# Of 23 in a float32's fraction: one part in 32,000, for a map that is looked at and not
# measured.
INFLUENCE_BITS = 14


def pack(views: Sequence[View]) -> str:
    """The views as base64 text: ASCII letters, digits, `+`, `/` and `=`, which are safe
    anywhere in HTML.
    """
    sections = _Sections()
    header = {
        "views": [sections.fields(view) for view in views],
        "arrays": sections.records,
    }
    text = json.dumps(
        header, ensure_ascii=True, allow_nan=False, separators=(",", ":")
    ).encode("ascii")
    raw = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *sections.planes])
    return base64.b64encode(gzip.compress(raw, compresslevel=9, mtime=0)).decode(
        "ascii"
    )


def unpack(text: str) -> list[View]:
    """The views that `pack` was given.

    Numbers come back exactly, except those of an `influence`, which keeps four digits
    and a half. Strings come back exactly, except two lone surrogates that together make
    a character, which come back as that character.
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


class _Array(TypedDict):
    """Where an array lies in the payload."""

    dtype: str
    shape: list[int]
    offset: int
    length: int


class _Sections:
    """The arrays of the views, in the order in which they are met."""

    def __init__(self) -> None:
        self.records: list[_Array] = []
        self.planes: list[bytes] = []
        self.end = 0

    def fields(self, view: Any) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": type(view).__name__}
        for field in fields(view):
            value = getattr(view, field.name)
            if (
                field.name == "influence"
                and value is not None
                and value.dtype == np.float32
            ):
                value = rounded(value)
            if field.name == "labels":
                record["classes"], value = _coded(value)
            record[field.name] = self.value(value)
        return record

    def value(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"array": self.add(value)}
        if isinstance(value, tuple):
            return [self.value(inner) for inner in value]
        return self.fields(value) if type(value).__name__ in KINDS else value

    def add(self, array: NDArray[Any]) -> int:
        dtype = array.dtype.name
        plain = np.ascontiguousarray(array, dtype=DTYPES[dtype])
        planes = (
            plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T.tobytes()
        )
        self.records.append(
            {
                "dtype": dtype,
                "shape": list(array.shape),
                "offset": self.end,
                "length": len(planes),
            }
        )
        self.planes.append(planes)
        self.end += len(planes)
        return len(self.records) - 1


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers with a short fraction, whose last bytes gzip then saves.

    >>> rounded(np.float32([1 / 3, 0.0, 1024.0])).tolist()
    [0.3333282470703125, 0.0, 1024.0]
    """
    spare = 23 - INFLUENCE_BITS
    bits = values.view(np.uint32)
    short = (bits + np.uint32(1 << (spare - 1))) & np.uint32(
        0xFFFFFFFF ^ ((1 << spare) - 1)
    )
    near = short.view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(near), near, values)


def _coded(labels: tuple[str, ...]) -> tuple[list[str], NDArray[Any] | tuple[()]]:
    """The classes in the order they are met, and for each label which it is."""
    if not labels:
        return [], ()
    places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    kind = next(
        kind
        for kind in (np.uint8, np.uint16, np.int32)
        if len(places) <= np.iinfo(kind).max
    )
    return list(places), np.array([places[label] for label in labels], dtype=kind)


def _array(record: _Array, sections: bytes) -> NDArray[Any]:
    dtype = np.dtype(DTYPES[record["dtype"]])
    planes = np.frombuffer(
        sections, np.uint8, record["length"], record["offset"]
    ).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(record["shape"])


def _restored(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return tuple(_restored(inner, arrays) for inner in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    inner = {
        name: _restored(field, arrays)
        for name, field in value.items()
        if name not in ("kind", "classes")
    }
    if value.get("classes"):
        inner["labels"] = tuple(value["classes"][place] for place in inner["labels"])
    return KINDS[value["kind"]](**inner)
