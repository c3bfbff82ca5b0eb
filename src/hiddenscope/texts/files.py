"""Files of texts: .txt, .jsonl, .csv, .tsv and .parquet, each read row by row.

Files may be hostile. A line and a row of blank lines have a longest length. A few
megabytes can hold gigabytes of one letter, while real texts shrink to a third or a
tenth: so a compressed file that grows beyond some megabytes, by a factor that no text
reaches, is refused.
"""

import csv
import io
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from hiddenscope.errors import FileError
from hiddenscope.files import believable
from hiddenscope.texts.row import (
    Columns,
    Origin,
    RawRow,
    kind_of,
    quote_names,
    select_columns,
)

FORMATS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".zst")
# The first bytes of both, with which no UTF-8 text begins.
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PARQUET_BATCH = 1024
# Characters of one line, or one field of a .csv, where the csv module stops at 131,072
# by default.
LONGEST_FIELD = 2**26
# Blank lines in a row.
MOST_BLANK = 1_000_000

_BUFFER = 2**17
# The longest field is a setting of the csv module, and so of the whole process.
_csv_limit = threading.Lock()


def format_of(name: str) -> str:
    """Return the format that a name ends with, without its compression; "" if none."""
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    # With a letter before it, a name such as "-.csv" or ".csv" has a suffix too.
    suffix = Path(f"x{name}").suffix.lower()
    return suffix if suffix in FORMATS else ""


def names_a_file(text: str) -> bool:
    """Tell whether a string ends as the name of a file of texts does.

    A text that ends so, and is no path, is given in a list.
    """
    return text.lower().endswith((*FORMATS, *COMPRESSIONS))


def files_in(folder: Path) -> list[Path]:
    """List the files of texts in a folder and below, by name; not the hidden ones."""
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and format_of(name):
                files.append(Path(place, name))
    problem = f"Cannot read texts from {str(folder)[:80]!a}"
    if all(os.path.lexists(folder / name) for name in ("plan.json", "commits")):
        remedy = "Give it as --states, or hs.open(path) in place of a model."
        raise FileError(problem, "it is a store of states", remedy)
    if not files:
        reason = f"no file in it ends with {', '.join(FORMATS)}"
        raise FileError(problem, reason, "Give a folder of such files.")
    return sorted(files)


def read_path(
    path: Path, kind: str, origin: Origin, columns: Columns
) -> Iterator[RawRow]:
    """Yield the rows of a file of this format."""
    try:
        stream = path.open("rb")
    except OSError as error:
        reason = str(error.strerror or error)
        raise FileError(
            f"Cannot read {origin.name}", reason, "Give a file that can be read."
        ) from error
    with stream:
        # A .txt file has no columns: "file" and "folder" name what it has.
        if kind != ".txt" or columns.label != "folder":
            yield from read_stream(stream, kind, origin, columns)
            return
        label = path.absolute().parent.name
        for row in read_stream(stream, kind, origin, columns._replace(label=None)):
            yield row._replace(label=label)


def read_stream(
    stream: Any, kind: str, origin: Origin, columns: Columns
) -> Iterator[RawRow]:
    """Yield the rows of an open file of this format, which stays open."""
    if kind == ".parquet":
        yield from _parquet(stream, origin, columns)
        return
    lines = _lines(_decompressed(stream, origin.name), origin)
    if kind == ".txt" and columns.text == "file":
        # All lines are one text.
        columns._replace(text=None).refuse_names(origin)
        text = ""
        for _, line in lines:
            text += line
            if len(text) >= LONGEST_FIELD:
                reason = f"it has {LONGEST_FIELD:,} characters or more"
                origin.refuse(1, reason, "Split the file.")
                return
        yield RawRow(1, text.rstrip("\r\n"))
    elif kind == ".txt":
        columns.refuse_names(origin)
        for number, line in lines:
            if line.strip():
                yield RawRow(number, line.rstrip("\r\n"))
    elif kind == ".jsonl":
        yield from read_records(_json(lines, origin), columns, origin)
    else:
        yield from _csv(lines, "\t" if kind == ".tsv" else ",", origin, columns)


def read_records(
    records: Iterator[tuple[int, Any]], columns: Columns, origin: Origin
) -> Iterator[RawRow]:
    """Yield the rows of numbered records, which are mappings or all of them strings.

    The first record decides which columns are read.
    """
    first = next(records, None)
    if first is None:
        return
    every_record = chain([first], records)
    if isinstance(first[1], str):
        columns.refuse_names(origin)
        for number, record in every_record:
            yield RawRow(number, record)
        return
    selected = None
    remedy = "Correct it, or remove it."
    for number, record in every_record:
        if not isinstance(record, Mapping):
            reason = f"it is {kind_of(record)} and not a row with columns"
            origin.refuse(number, reason, remedy)
            continue
        if selected is None:
            strings = [name for name, value in record.items() if isinstance(value, str)]
            selected = select_columns(list(record), strings, columns, origin)
        # A label that nobody named may be missing.
        required = selected._replace(label=columns.label).names
        missing = [name for name in required if name not in record]
        if missing:
            reason = f"it has no {missing[0]!r}, only {quote_names(list(record))}"
            origin.refuse(number, reason, remedy)
            continue
        yield selected.row(number, record)


class _Stream(io.RawIOBase):
    """What is read from another stream, which stays open, and how many bytes it was.

    With `packed`, the other one decompresses what is read there, and FileError is
    raised once that is unbelievably long.
    """

    def __init__(self, stream: Any, name: str, packed: "_Stream | None" = None) -> None:
        self.stream = stream
        self.name = name
        self.packed = packed
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        problem = f"Cannot read {self.name}"
        try:
            chunk = self.stream.read(len(buffer))
        except OSError as error:
            if self.packed is None:
                raise
            reason = f"it cannot be decompressed to the end ({error})"
            remedy = "Make or download the file again."
            raise FileError(problem, reason, remedy) from error
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        if self.packed is not None and self.count > believable(self.packed.count):
            reason = (
                f"its first {self.packed.count:,} bytes become more than"
                f" {self.count:,}, as no text does"
            )
            raise FileError(problem, reason, "If it is yours, decompress it first.")
        return len(chunk)


def _decompressed(stream: Any, name: str) -> Any:
    """Return a stream, decompressed while it is read if its first bytes say so."""
    # A stream of text.
    if not hasattr(stream, "readinto"):
        return stream
    raw = _Stream(stream, name)
    buffered = io.BufferedReader(raw, _BUFFER)
    start = buffered.peek(4)
    for mark, codec in CODECS.items():
        if start.startswith(mark):
            import pyarrow

            file = pyarrow.PythonFile(buffered, mode="r")
            plain = _Stream(pyarrow.CompressedInputStream(file, codec), name, raw)
            return io.BufferedReader(plain, _BUFFER)
    return buffered


def _lines(stream: Any, origin: Origin) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, each decoded by itself so that an error has its number."""
    number = 0
    blank = 0
    while line := stream.readline(LONGEST_FIELD):
        number += 1
        blank = blank + 1 if len(line) <= 2 and line.isspace() else 0
        if blank > MOST_BLANK:
            reason = f"{MOST_BLANK:,} blank lines stand before line {number:,}"
            raise FileError(
                f"Cannot read {origin.name}", reason, "Remove them, if it is yours."
            )
        if len(line) >= LONGEST_FIELD:
            reason = f"it has {LONGEST_FIELD:,} characters or more"
            origin.refuse(number, reason, "Split it into lines, one for each text.")
            while len(line) == LONGEST_FIELD and line[-1:] not in (b"\n", "\n"):
                line = stream.readline(LONGEST_FIELD)
            continue
        try:
            string = line if isinstance(line, str) else line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            reason = (
                f"it is not UTF-8 (byte {error.start + 1} of the line is 0x{byte:02x})"
            )
            origin.refuse(number, reason, "Save the file as UTF-8.", error)
            continue
        # Windows begins a UTF-8 file with a byte-order mark.
        if number == 1:
            string = string.removeprefix("\ufeff")
        yield number, string


def _json(
    lines: Iterable[tuple[int, str]], origin: Origin
) -> Iterator[tuple[int, object]]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"it is not JSON ({error})"
            origin.refuse(number, reason, "Correct the line, or remove it.", error)
            continue
        yield number, record


def _csv(
    lines: Iterable[tuple[int, str]], delimiter: str, origin: Origin, columns: Columns
) -> Iterator[RawRow]:
    """Yield the rows of separated values, read strictly, with the line each begins on.

    pandas would fill up a row that lacks a column, accept characters behind a closing
    quote, and not know the line of a row when a quoted text holds line breaks.
    """
    strings = (line for _, line in lines)
    reader = csv.reader(strings, delimiter=delimiter, strict=True)
    header: list[str] = []
    selected = columns
    cells: list[str] | None = []
    while cells is not None:
        line = reader.line_num + 1
        try:
            with _csv_limit:
                limit = csv.field_size_limit(LONGEST_FIELD)
                try:
                    cells = next(reader, None)
                finally:
                    csv.field_size_limit(limit)
        except csv.Error as error:
            reason = f"it is not a row of values separated by {delimiter!r} ({error})"
            origin.refuse(line, reason, "Correct the line.", error)
            continue
        if not cells:
            continue
        if not header:
            header = cells
            selected = select_columns(header, header, columns, origin, by_header=True)
        elif len(cells) != len(header):
            names = ", ".join(header)[:200]
            reason = (
                f"it has {len(cells)} columns and the header {len(header)} ({names})"
            )
            remedy = "Quote what holds a separator, or correct the line."
            origin.refuse(line, reason, remedy)
        else:
            row = selected.row(line, dict(zip(header, cells, strict=True)))
            # An empty cell is a missing label, but an empty text.
            yield row._replace(label=row.label or None, group=row.group or None)


def _parquet(stream: Any, origin: Origin, columns: Columns) -> Iterator[RawRow]:
    problem = f"Cannot read {origin.name}"
    if not (hasattr(stream, "seekable") and stream.seekable()):
        raise FileError(
            problem,
            "parquet is read from its end and cannot be streamed",
            "Give the .parquet file itself.",
        )
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream)
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        text_kinds = ("string", "large_string", "string_view")
        strings = [name for name, kind in kinds.items() if kind in text_kinds]
        selected = select_columns(list(kinds), strings, columns, origin)
        names = selected.names
        # Refuse a parquet file that says that its columns unpack to far too much.
        packed = 0
        plain = 0
        for number in range(file.metadata.num_row_groups):
            row_group = file.metadata.row_group(number)
            for column in map(row_group.column, range(row_group.num_columns)):
                if column.path_in_schema.partition(".")[0] in names:
                    packed += column.total_compressed_size
                    plain += column.total_uncompressed_size
        if plain > believable(packed):
            reason = f"{packed:,} bytes of it become {plain:,}, as no text does"
            remedy = "If it is yours, write it without compression."
            raise FileError(problem, reason, remedy)
        # A page may name one long string a million times: as a dictionary it is in
        # memory once.
        coded = [name for name in names if name in strings]
        file = parquet.ParquetFile(
            stream, metadata=file.metadata, read_dictionary=coded
        )
        first = 1
        for batch in file.iter_batches(PARQUET_BATCH, columns=names):
            values = {name: _column_values(batch.column(name)) for name in names}
            yield from selected.rows(values, first)
            first += batch.num_rows
    except FileError:
        raise
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = f"it is not a complete parquet file ({error})"
        remedy = "Make or download it again; it needs no compression around it."
        raise FileError(problem, reason, remedy) from error


def _column_values(column: Any) -> list[Any]:
    """Return the values of a column of a parquet batch, each string once in memory."""
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    places = column.indices.unique().drop_null()
    distinct = column.dictionary.take(places).to_pylist()
    strings = dict(zip(places.to_pylist(), distinct, strict=True))
    return [strings.get(place) for place in column.indices.to_pylist()]
