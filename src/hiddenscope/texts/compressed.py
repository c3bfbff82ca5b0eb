"""Compressed text and parquet columns, decompressed as they are read, and no further
than it is believable.

A few megabytes can hold gigabytes of one letter. Real texts shrink to a third or a
tenth. So what grows beyond some megabytes by more than a factor that no text reaches is
refused.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hiddenscope.errors import FileError

# Their first bytes, with which no UTF-8 text begins.
GZIP, ZSTANDARD = (
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
)
UNSUSPECTED = 2**22
MOST_GROWTH = 250
_BUFFER = 2**17


def believable(packed: int) -> int:
    """How many bytes so many packed ones may become.

    >>> believable(10), believable(10**6)
    (4194304, 250000000)
    """
    return max(UNSUSPECTED, MOST_GROWTH * packed)


@contextmanager
def decompressed(stream: Any, name: str) -> Iterator[Any]:
    """The stream, decompressed if its first bytes say that it is compressed; what was
    given stays open.

    >>> with decompressed(io.BytesIO(gzip.compress(b"a line")), "x.gz") as plain:
    ...     plain.read()
    b'a line'
    """
    if isinstance(stream, io.TextIOBase) or not (
        hasattr(stream, "peek") or hasattr(stream, "readinto")
    ):
        yield stream
        return
    wrapped = None if hasattr(stream, "peek") else io.BufferedReader(stream)
    peekable = wrapped or stream
    try:
        start = peekable.peek(4)[:4]
        if start.startswith(GZIP) or start == ZSTANDARD:
            yield io.BufferedReader(
                _Bounded(peekable, start == ZSTANDARD, name), _BUFFER
            )
        else:
            yield peekable
    except Exception as error:
        if (
            isinstance(error, EOFError | gzip.BadGzipFile | zlib.error)
            or type(error).__name__ == "ZstdError"
        ):
            reason = f"it cannot be decompressed to the end ({error})"
            raise FileError(
                f"Cannot read {name}", reason, "Make or download the file again."
            ) from error
        raise
    finally:
        # A reader that broke off may have closed its file first.
        if wrapped is not None and not wrapped.closed:
            wrapped.detach()


class _Counted(io.RawIOBase):
    """A stream that counts what was read of it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.count = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self.stream.read(len(buffer))
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        return len(chunk)


class _Bounded(io.RawIOBase):
    """A decompressed stream that stops, with FileError, when it has become absurdly
    much longer.
    """

    def __init__(self, stream: Any, zstandard: bool, name: str) -> None:
        self.packed, self.count, self.name = _Counted(stream), 0, name
        self.plain: Any = (
            _zstandard(self.packed) if zstandard else gzip.GzipFile(fileobj=self.packed)
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self.plain.read(len(buffer))
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        if self.count > believable(self.packed.count):
            reason = (
                f"its first {self.packed.count:,} bytes become more than"
                f" {self.count:,}, as no text does"
            )
            raise FileError(
                f"Cannot read {self.name}",
                reason,
                "If it is yours, decompress it first.",
            )
        return len(chunk)


def _zstandard(stream: Any) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(
        stream, read_across_frames=True, closefd=False
    )


def check_growth(metadata: Any, columns: list[str], name: str) -> None:
    """Refuse a parquet file whose columns, by its own account, become absurdly much
    longer when they are unpacked.
    """
    packed = plain = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        parts = [group.column(number) for number in range(group.num_columns)]
        chosen = [
            part for part in parts if part.path_in_schema.partition(".")[0] in columns
        ]
        packed += sum(part.total_compressed_size for part in chosen)
        plain += sum(part.total_uncompressed_size for part in chosen)
    if plain > believable(packed):
        reason = f"{packed:,} bytes of it become {plain:,}, as no text does"
        raise FileError(
            f"Cannot read {name}",
            reason,
            "If it is yours, write it without compression.",
        )


def column_values(column: Any) -> list[Any]:
    """The values of a column of a parquet batch, each string once in memory however
    often it comes.
    """
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    places = column.indices.unique().drop_null()
    strings = dict(
        zip(places.to_pylist(), column.dictionary.take(places).to_pylist(), strict=True)
    )
    return [strings.get(place) for place in column.indices.to_pylist()]
