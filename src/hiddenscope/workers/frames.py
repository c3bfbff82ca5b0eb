"""Frames: how messages travel over a pipe.

A frame is a JSON header and raw bytes, each preceded by its length. Nothing is pickled:
reading a frame never runs code that its sender chose.

>>> import io
>>> read_frame(io.BytesIO(pack_frame({"type": "result"}, b"bytes")))
Frame(header={'type': 'result'}, body=b'bytes')
"""

import json
import struct
import threading
from contextlib import suppress
from typing import IO, Any, NamedTuple, TypeAlias

Header: TypeAlias = dict[str, Any]

LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 * 2**20


class Frame(NamedTuple):
    """One message."""

    header: Header
    body: bytes


def pack_frame(header: Header, body: bytes = b"") -> bytes:
    """Return a message as the bytes of one frame."""
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return LENGTHS.pack(len(text), len(body)) + text + body


def read_frame(stream: IO[bytes], max_body: int | None = None) -> Frame | None:
    """Read the next frame, or return None where the stream ends before it is whole.

    Raise a ValueError where the frame announces more than `max_body` bytes, before any
    memory is allocated for them.
    """
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    body_too_large = max_body is not None and body_bytes > max_body
    if header_bytes > MAX_HEADER_BYTES or body_too_large:
        raise ValueError(
            f"a frame of {header_bytes:,} and {body_bytes:,} bytes is too large"
        )
    text = stream.read(header_bytes)
    body = stream.read(body_bytes)
    if len(text) < header_bytes or len(body) < body_bytes:
        return None
    return Frame(json.loads(text), body)


class Channel:
    """Two pipes, one to read frames from and one to write frames to.

    Several threads may send. Only one may receive.
    """

    def __init__(
        self, incoming: IO[bytes], outgoing: IO[bytes], max_body: int | None = None
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._max_body = max_body
        self._sending = threading.Lock()

    def send(self, header: Header, body: bytes = b"") -> None:
        """Write one frame; raise a BrokenPipeError where the other side has ended."""
        frame = pack_frame(header, body)
        with self._sending:
            self._outgoing.write(frame)
            self._outgoing.flush()

    def receive(self) -> Frame | None:
        """Wait for the next frame; return None once the other side has ended."""
        return read_frame(self._incoming, self._max_body)

    def close_outgoing(self) -> None:
        """Tell the other side that nothing more will be sent."""
        # Closing flushes, which fails where the other side has ended.
        with suppress(OSError):
            self._outgoing.close()

    def close(self) -> None:
        """Close both pipes. No thread may be receiving."""
        self.close_outgoing()
        self._incoming.close()
