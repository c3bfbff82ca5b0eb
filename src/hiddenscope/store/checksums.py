"""Checksums: CRC-32C of every 16 KiB block of a file, and SHA-256 of all its bytes.

The blocks let a reader check what it reads and no more; the whole names the file. Both are computed in threads while
the file is written: hashlib and crc32c let other threads run meanwhile.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK = 16 * 1024
PIECE = 4 * 2**20  # bytes that are written, and hashed, at a time

Sums: TypeAlias = NDArray[np.uint32]


def crc_function() -> Callable[..., int]:
    """The function that computes CRC-32C; it is imported when it is needed."""
    import crc32c

    function: Callable[..., int] = crc32c.crc32c
    return function


def block_sums(content: memoryview) -> list[int]:
    """The checksum of every block of bytes that begin at the border of a block.

    >>> [hex(sum) for sum in block_sums(memoryview(b"123456789"))]
    ['0xe3069283']
    """
    crc = crc_function()
    return [crc(content[start : start + BLOCK]) for start in range(0, len(content), BLOCK)]


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
        self._open = self._length = 0

    def update(self, piece: memoryview) -> None:
        """Add bytes."""
        at = 0
        while at < len(piece):
            part = piece[at : at + BLOCK - self._length]
            self._open = self._crc(part, self._open)
            self._length += len(part)
            at += len(part)
            if self._length == BLOCK:
                self._done.append(self._open)
                self._open = self._length = 0

    def finish(self) -> Sums:
        """The checksums of all blocks, of which the last may be short."""
        return np.array(self._done + [self._open] * bool(self._length), dtype="<u4")


class Digests:
    """Both checksums of a stream of bytes, computed in two threads beside the one that writes it."""

    def __init__(self) -> None:
        self._sums, self._whole = RunningSums(), hashlib.sha256()
        self._threads = ThreadPoolExecutor(1, "crc32c"), ThreadPoolExecutor(1, "sha256")

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def passing(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same pieces, one after another; each has been hashed when the next but one is given."""
        before: list[Future[None]] = []
        for piece in pieces:
            now = [
                self._threads[0].submit(self._sums.update, piece),
                self._threads[1].submit(self._whole.update, piece),
            ]
            yield piece
            for done in before:
                done.result()
            before = now
        for done in before:
            done.result()

    def block_table(self) -> bytes:
        """The checksums of the blocks so far, as the file holds them."""
        return self._sums.finish().tobytes()

    def digest(self, last: bytes) -> str:
        """The SHA-256 of everything that has passed, and of these last bytes."""
        self._whole.update(last)
        return self._whole.hexdigest()


def pieces_of(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Buffers as pieces of a few MiB at most."""
    for buffer in buffers:
        for start in range(0, len(buffer), PIECE):
            yield buffer[start : start + PIECE]
