"""One payload for all three views: a JSON header and typed arrays, gzipped, as base64 text.

>>> from hiddenscope.views.values import Lines, Series
>>> text = pack([Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))])
>>> unpack(text)[0].series[0].y.tolist()
[1.0, 2.5]

Before gzip: the four bytes `HSV1`, the header's length as a little-endian uint32, the header (ASCII JSON), and the
sections. The header's `views` are the fields of the values, each array in them a number into `arrays`, which give
dtype, shape, offset (from the end of the header) and length. The bytes of a section lie in planes, all first bytes
before all second bytes: neighbouring numbers have like exponents, so gzip finds more to save.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import StatesError
from hiddenscope.views.values import Grid, Lines, Measure, Panels, Series, View, Words

MAGIC = b"HSV1"
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Grid, Panels, Lines, Measure, Words, Series)}
DTYPES = {"float32": "<f4", "float16": "<f2", "int32": "<i4", "uint16": "<u2", "uint8": "|u1"}
INFLUENCE_BITS = 14  # of 23 in a float32's fraction: one part in 32,000, for a map that is looked at and not measured


def pack(views: Sequence[View]) -> str:
    """The views as base64 text: ASCII letters, digits, `+`, `/` and `=`, which are safe anywhere in HTML."""
    sections = _Sections()
    header = {"views": [sections.fields(view) for view in views], "arrays": sections.said}
    said = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    raw = b"".join([MAGIC, len(said).to_bytes(4, "little"), said, *sections.planes])
    return base64.b64encode(gzip.compress(raw, compresslevel=9, mtime=0)).decode("ascii")


def unpack(text: str) -> list[View]:
    """What `pack` was given.

    A number comes back as it was, but for an `influence`, which keeps four digits and a half; so does a string, but for
    two lone surrogates that together make a character, which come back as that character.
    """
    try:
        raw = gzip.decompress(base64.b64decode(text, validate=True))
        if raw[:4] != MAGIC:
            raise ValueError(f"it begins with {raw[:4]!r}")
        start = 8 + int.from_bytes(raw[4:8], "little")
        header = json.loads(raw[8:start])
        arrays = [_array(said, raw[start:]) for said in header["arrays"]]
        return [_made(view, arrays) for view in header["views"]]
    except (ValueError, LookupError, TypeError, OSError, EOFError) as error:
        raise StatesError("A payload of views", f"it is damaged ({error})", "Make it again with pack().") from error


class _Sections:
    """The arrays met on the way, in order."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.planes: list[bytes] = []
        self.end = 0

    def fields(self, value: Any) -> dict[str, Any]:
        said: dict[str, Any] = {"kind": type(value).__name__}
        for field in fields(value):
            given = getattr(value, field.name)
            if field.name == "influence" and given is not None and given.dtype == np.float32:
                given = rounded(given)
            if field.name == "labels":
                said["classes"], given = _coded(given)
            said[field.name] = self.one(given)
        return said

    def one(self, given: Any) -> Any:
        if isinstance(given, np.ndarray):
            return {"array": self.add(given)}
        if isinstance(given, tuple):
            return [self.one(inner) for inner in given]
        return self.fields(given) if type(given).__name__ in KINDS else given

    def add(self, array: NDArray[Any]) -> int:
        dtype = array.dtype.name
        plain = np.ascontiguousarray(array, dtype=DTYPES[dtype])
        planes = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T.tobytes()
        said = {"dtype": dtype, "shape": list(array.shape), "offset": self.end, "length": len(planes)}
        self.said.append(said)
        self.planes.append(planes)
        self.end += len(planes)
        return len(self.said) - 1


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers with a short fraction, whose last bytes gzip then saves.

    >>> rounded(np.float32([1 / 3, 0.0, 1024.0])).tolist()
    [0.3333282470703125, 0.0, 1024.0]
    """
    spare = 23 - INFLUENCE_BITS
    bits = values.view(np.uint32)
    short = (bits + np.uint32(1 << (spare - 1))) & np.uint32(0xFFFFFFFF ^ ((1 << spare) - 1))
    near = short.view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(near), near, values)


def _coded(labels: tuple[str, ...]) -> tuple[list[str], NDArray[Any] | tuple[()]]:
    """The classes in the order they are met, and for each label which it is."""
    if not labels:
        return [], ()
    places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    kind = next(kind for kind in (np.uint8, np.uint16, np.int32) if len(places) <= np.iinfo(kind).max)
    return list(places), np.array([places[label] for label in labels], dtype=kind)


def _array(said: dict[str, Any], sections: bytes) -> NDArray[Any]:
    dtype = np.dtype(DTYPES[said["dtype"]])
    planes = np.frombuffer(sections, np.uint8, said["length"], said["offset"]).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(said["shape"])


def _made(said: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(said, list):
        return tuple(_made(inner, arrays) for inner in said)
    if not isinstance(said, dict):
        return said
    if "array" in said:
        return arrays[said["array"]]
    inner = {name: _made(field, arrays) for name, field in said.items() if name not in ("kind", "classes")}
    if said.get("classes"):
        inner["labels"] = tuple(said["classes"][place] for place in inner["labels"])
    return KINDS[said["kind"]](**inner)
