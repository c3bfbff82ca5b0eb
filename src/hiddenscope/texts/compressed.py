"""Compressed texts and parquet columns, decompressed while they are read.

A few megabytes can hold gigabytes of one letter, while real texts shrink to a third or
a tenth. So a file that grows beyond some megabytes, by a factor that no text reaches,
is refused.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hiddenscope.errors import FileError
from hiddenscope.files import believable

# The first bytes of both formats, with which no UTF-8 text begins.
GZIP = b"\x1f\x8b"
ZSTANDARD = b"\x28\xb5\x2f\xfd"
_BUFFER = 2**17


@contextmanager
def decompressed(stream: Any, name: str) -> Iterator[Any]:
    """Decompress a stream if its first bytes say so; the stream itself stays open.

    >>> with decompressed(io.BytesIO(gzip.compress(b"a line")), "x.gz") as plain:
    ...     plain.read()
    b'a line'
    """
    can_peek = hasattr(stream, "peek")
    is_binary = can_peek or hasattr(stream, "readinto")
    if isinstance(stream, io.TextIOBase) or not is_binary:
        yield stream
        return
    wrapped = None if can_peek else io.BufferedReader(stream)
    peekable = wrapped or stream
    try:
        start = peekable.peek(4)[:4]
        if start.startswith(GZIP) or start == ZSTANDARD:
            bounded = _BoundedStream(peekable, start == ZSTANDARD, name)
            yield io.BufferedReader(bounded, _BUFFER)
        else:
            yield peekable
    except Exception as error:
        broken = isinstance(error, EOFError | gzip.BadGzipFile | zlib.error)
        # By its name, so that zstandard is imported only for files that need it.
        if not broken and type(error).__name__ != "ZstdError":
            raise
        reason = f"it cannot be decompressed to the end ({error})"
        raise FileError(
            f"Cannot read {name}", reason, "Make or download the file again."
        ) from error
    finally:
        # A reader that broke off may have closed its file first.
        if wrapped is not None and not wrapped.closed:
            wrapped.detach()


class _CountedStream(io.RawIOBase):
    """A stream that counts the bytes that were read from it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self.stream.read(len(buffer))
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        return len(chunk)


class _BoundedStream(io.RawIOBase):
    """A decompressed stream that raises FileError once it is unbelievably long."""

    def __init__(self, stream: Any, is_zstandard: bool, name: str) -> None:
        self.packed = _CountedStream(stream)
        self.count = 0
        self.name = name
        self.plain: Any = gzip.GzipFile(fileobj=self.packed)
        if is_zstandard:
            self.plain = _read_zstandard(self.packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self.plain.read(len(buffer))
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        if self.count > believable(self.packed.count):
            raise FileError(
                f"Cannot read {self.name}",
                f"its first {self.packed.count:,} bytes become more than"
                f" {self.count:,}, as no text does",
                "If it is yours, decompress it first.",
            )
        return len(chunk)


def _read_zstandard(stream: Any) -> Any:
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    return decompressor.stream_reader(stream, read_across_frames=True, closefd=False)


def check_growth(metadata: Any, columns: list[str], name: str) -> None:
    """Refuse a parquet file that says that its columns unpack to far too much."""
    packed = 0
    plain = 0
    for row_group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(row_group.column, range(row_group.num_columns)):
            if column.path_in_schema.partition(".")[0] in columns:
                packed += column.total_compressed_size
                plain += column.total_uncompressed_size
    if plain > believable(packed):
        reason = f"{packed:,} bytes of it become {plain:,}, as no text does"
        raise FileError(
            f"Cannot read {name}",
            reason,
            "If it is yours, write it without compression.",
        )


def column_values(column: Any) -> list[Any]:
    """Return the values of a column of a parquet batch, each string once in memory."""
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    places = column.indices.unique().drop_null()
    distinct = column.dictionary.take(places).to_pylist()
    strings = dict(zip(places.to_pylist(), distinct, strict=True))
    return [strings.get(place) for place in column.indices.to_pylist()]
