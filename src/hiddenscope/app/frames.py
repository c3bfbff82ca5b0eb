"""Frames: how the server and its worker talk over pipes. A JSON header and bytes, each
with its length; no pickle.

>>> import io
>>> read_frame(io.BytesIO(frame({"type": "result"}, b"bytes")))
({'type': 'result'}, b'bytes')
"""

import json
import struct
from typing import IO, Any, TypeAlias

Header: TypeAlias = dict[str, Any]

LENGTHS = struct.Struct("<IQ")
MOST_HEADER = 64 * 2**20


def frame(header: Header, body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return b"".join([LENGTHS.pack(len(text), len(body)), text, body])


def lengths(start: bytes, most_body: int) -> tuple[int, int]:
    """The lengths of the header and of the body, within limits."""
    header, body = LENGTHS.unpack(start)
    if header > MOST_HEADER or body > most_body:
        raise ValueError(f"a frame of {header:,} and {body:,} bytes is too large")
    return header, body


def read_frame(
    stream: IO[bytes], most_body: int = 2**30
) -> tuple[Header, bytes] | None:
    """The next frame of a stream; None at its end."""
    start = stream.read(LENGTHS.size)
    if len(start) < LENGTHS.size:
        return None
    header, body = lengths(start, most_body)
    text, content = stream.read(header), stream.read(body)
    return (json.loads(text), content) if len(content) == body else None
