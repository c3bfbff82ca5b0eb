"""Checksums: CRC-32C of every 16 KiB block of a file, and SHA-256 of all its bytes.

The blocks let a reader check what it reads and no more; the whole names the file.
SHA-256 is the slowest step of writing (about 1 GB/s on one core), so it has a thread of
its own, which never waits for the disk.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Thread
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK = 16 * 1024
# Bytes that are written at a time.
PIECE = 4 * 2**20
# Bytes that are hashed at a time: the GIL is taken once for each.
HASHED = 16 * 2**20

Sums: TypeAlias = NDArray[np.uint32]


def crc_function() -> Callable[..., int]:
    """Return the function that computes CRC-32C, imported when it is needed."""
    import crc32c

    function: Callable[..., int] = crc32c.crc32c
    return function


def block_sums(content: memoryview) -> list[int]:
    """Return the checksum of every block of bytes that begin where a block does.

    >>> [hex(sum) for sum in block_sums(memoryview(b"123456789"))]
    ['0xe3069283']
    """
    crc = crc_function()
    starts = range(0, len(content), BLOCK)
    return [crc(content[start : start + BLOCK]) for start in starts]


class RunningSums:
    """The checksums of the blocks of bytes that come in pieces of any length.

    >>> running = RunningSums()
    >>> running.update(memoryview(b"1234")); running.update(memoryview(b"56789"))
    >>> hex(running.finish()[0])
    '0xe3069283'
    """

    def __init__(self) -> None:
        self._crc = crc_function()
        self._done: list[int] = []
        # The checksum and length of the block that is not whole yet.
        self._open = 0
        self._length = 0

    def update(self, piece: memoryview) -> None:
        """Add bytes."""
        while len(piece):
            part = piece[: BLOCK - self._length]
            piece = piece[len(part) :]
            self._open = self._crc(part, self._open)
            self._length += len(part)
            if self._length == BLOCK:
                self._done.append(self._open)
                self._open = 0
                self._length = 0

    def finish(self) -> Sums:
        """Return the checksums of all blocks, of which the last may be short."""
        sums = list(self._done)
        if self._length:
            sums.append(self._open)
        return np.array(sums, dtype="<u4")


class WholeDigest:
    """The SHA-256 of buffers, computed in a thread while they are written.

    The buffers must not change meanwhile.

    >>> with WholeDigest([memoryview(b"12345"), memoryview(b"6789")]) as whole:
    ...     whole.digest(b"0")[:8]
    'c775e7b7'
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._sha256 = hashlib.sha256()
        self._buffers = buffers
        self._stopped = False
        self._thread = Thread(target=self._run, name="sha256", daemon=True)

    def __enter__(self) -> "WholeDigest":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        for piece in pieces_of(self._buffers, HASHED):
            # The file could not be written, and nobody needs its digest.
            if self._stopped:
                return
            self._sha256.update(piece)

    def digest(self, last: bytes) -> str:
        """Return the SHA-256 of all buffers, followed by these last bytes."""
        self._thread.join()
        self._sha256.update(last)
        return self._sha256.hexdigest()


def pieces_of(
    buffers: Iterable[memoryview], length: int = PIECE
) -> Iterator[memoryview]:
    """Split buffers into pieces of a few MiB at most."""
    for buffer in buffers:
        for start in range(0, len(buffer), length):
            yield buffer[start : start + length]
