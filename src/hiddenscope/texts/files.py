"""Files of texts: .txt, .jsonl, .csv, .tsv and .parquet, each read row by row."""

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
from hiddenscope.texts.columns import (
    Columns,
    SelectedColumns,
    check_unnamed,
    select_columns,
)
from hiddenscope.texts.compressed import check_growth, column_values, decompressed
from hiddenscope.texts.row import Origin, RawRow, kind_of, quote_names

FORMATS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".zst")
PARQUET_BATCH = 1024
# Characters of one line, or one field of a .csv, where the csv module stops at 131,072
# by default.
LONGEST_FIELD = 2**26
# Blank lines in a row.
MOST_BLANK = 1_000_000

# The longest field is a setting of the csv module, and so of the whole process.
_csv_limit = threading.Lock()


def format_of(name: str) -> str:
    """Return the format that a name ends with, without its compression; "" if none."""
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    # With a letter before it, a name such as "-.csv" or ".csv" has a suffix too.
    suffix = Path(f"x{name}").suffix.lower()
    return suffix if suffix in FORMATS else ""


def unit_of(kind: str) -> str:
    """Return what errors count in a file of this format: "row" or "line"."""
    return "row" if kind == ".parquet" else "line"


def names_a_file(text: str) -> bool:
    """Tell whether a string ends as the name of a file of texts does.

    Whoever has such a text, not a path, gives it in a list.
    """
    return text.lower().endswith((*FORMATS, *COMPRESSIONS))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is such a file, also of a name that no file system accepts.

    >>> is_file("a" * 9_999)
    False
    """
    # Unlike that of Path, this one never raises.
    return os.path.isfile(path)


def files_in(folder: Path) -> list[Path]:
    """List the files of texts in a folder and below, by name; not the hidden ones."""
    files: list[Path] = []
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
        raise FileError(
            problem,
            f"no file in it ends with {', '.join(FORMATS)}",
            "Give a folder of such files.",
        )
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
    """Yield the rows of an open file of this format, which may be compressed."""
    with decompressed(stream, origin.name) as plain:
        if kind == ".parquet":
            yield from _parquet(plain, origin, columns)
        elif kind == ".txt" and columns.text == "file":
            check_unnamed(columns._replace(text=None), origin)
            yield from _whole(plain, origin)
        elif kind == ".txt":
            check_unnamed(columns, origin)
            for line, string in _lines(plain, origin):
                yield RawRow(line, string)
        elif kind == ".jsonl":
            yield from read_records(_json(plain, origin), columns, origin)
        else:
            yield from _csv(plain, "\t" if kind == ".tsv" else ",", origin, columns)


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
        check_unnamed(columns, origin)
        for number, record in every_record:
            yield RawRow(number, record)
        return
    selected: SelectedColumns | None = None
    remedy = "Correct it, or remove it."
    for number, record in every_record:
        if not isinstance(record, Mapping):
            reason = f"it is {kind_of(record)} and not a row with columns"
            origin.refuse(number, reason, remedy)
            continue
        if selected is None:
            strings = [name for name, value in record.items() if isinstance(value, str)]
            selected = select_columns(list(record), strings, columns, origin)
        required = (selected.text, columns.label, columns.group)
        missing = [name for name in required if name is not None and name not in record]
        if missing:
            reason = f"it has no {missing[0]!r}, only {quote_names(list(record))}"
            origin.refuse(number, reason, remedy)
            continue
        yield selected.row(number, record)


def _decoded(
    stream: Iterable[bytes | str], origin: Origin
) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, each decoded by itself so that an error has its number."""
    for number, line in enumerate(_bounded(stream, origin), 1):
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


def _bounded(stream: Iterable[bytes | str], origin: Origin) -> Iterator[bytes | str]:
    """Yield the lines of a file, and read none of them further than LONGEST_FIELD."""
    if not isinstance(stream, io.IOBase):
        yield from stream
        return
    number = 0
    blank = 0
    while line := stream.readline(LONGEST_FIELD):
        number += 1
        if len(line) <= 2 and line.isspace():
            blank += 1
        else:
            blank = 0
        if blank > MOST_BLANK:
            reason = f"{MOST_BLANK:,} blank lines stand before line {number:,}"
            raise FileError(
                f"Cannot read {origin.name}", reason, "Remove them, if it is yours."
            )
        if len(line) < LONGEST_FIELD:
            yield line
            continue
        reason = f"it has {LONGEST_FIELD:,} characters or more"
        origin.refuse(number, reason, "Split it into lines, one for each text.")
        while len(line) == LONGEST_FIELD and line[-1:] not in (b"\n", "\n"):
            line = stream.readline(LONGEST_FIELD)


def _lines(stream: Iterable[bytes | str], origin: Origin) -> Iterator[tuple[int, str]]:
    for number, line in _decoded(stream, origin):
        if line.strip():
            yield number, line.rstrip("\r\n")


def _whole(stream: Iterable[bytes | str], origin: Origin) -> Iterator[RawRow]:
    """Yield all lines of a file as one text."""
    text = ""
    for _, line in _decoded(stream, origin):
        text += line
        if len(text) >= LONGEST_FIELD:
            reason = f"it has {LONGEST_FIELD:,} characters or more"
            origin.refuse(1, reason, "Split the file.")
            return
    yield RawRow(1, text.rstrip("\r\n"))


def _json(
    stream: Iterable[bytes | str], origin: Origin
) -> Iterator[tuple[int, object]]:
    for number, line in _lines(stream, origin):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"it is not JSON ({error})"
            origin.refuse(number, reason, "Correct the line, or remove it.", error)
            continue
        yield number, record


def _csv(
    stream: Iterable[bytes | str], delimiter: str, origin: Origin, columns: Columns
) -> Iterator[RawRow]:
    """Yield the rows of separated values, read strictly, with the line each begins on.

    pandas would fill up a row that lacks a column, accept characters behind a closing
    quote, and not know the line of a row when a quoted text holds line breaks.
    """
    lines = (line for _, line in _decoded(stream, origin))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    selected: SelectedColumns | None = None
    next_line = 1
    while True:
        line = next_line
        try:
            cells = _next_row(reader)
        except csv.Error as error:
            reason = f"it is not a row of values separated by {delimiter!r} ({error})"
            origin.refuse(line, reason, "Correct the line.", error)
            next_line = reader.line_num + 1
            continue
        if cells is None:
            return
        next_line = reader.line_num + 1
        if not cells:
            continue
        if selected is None:
            header = cells
            selected = select_columns(header, header, columns, origin, by_header=True)
            continue
        if len(cells) != len(header):
            names = ", ".join(header)[:200]
            reason = (
                f"it has {len(cells)} columns and the header {len(header)} ({names})"
            )
            remedy = "Quote what holds a separator, or correct the line."
            origin.refuse(line, reason, remedy)
            continue
        # An empty cell is a missing label, but an empty text.
        record = {name: cell or None for name, cell in zip(header, cells, strict=True)}
        row = selected.row(line, record)
        yield row._replace(text=row.text or "")


def _next_row(reader: Any) -> list[str] | None:
    """Read the next row, with longer fields than the csv module accepts by default."""
    with _csv_limit:
        before = csv.field_size_limit(LONGEST_FIELD)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)


def _parquet(stream: Any, origin: Origin, columns: Columns) -> Iterator[RawRow]:
    problem = f"Cannot read {origin.name}"
    if not (hasattr(stream, "seekable") and stream.seekable()):
        raise FileError(
            problem,
            "parquet is read from its end and cannot be streamed",
            "Give the .parquet file itself: it is compressed inside already.",
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
        check_growth(file.metadata, names, origin.name)
        # A page may name one long string a million times: as a dictionary it is in
        # memory once.
        coded = [name for name in names if name in strings]
        file = parquet.ParquetFile(
            stream, metadata=file.metadata, read_dictionary=coded
        )
        first = 1
        for batch in file.iter_batches(PARQUET_BATCH, columns=names):
            values = {name: column_values(batch.column(name)) for name in names}
            yield from selected.rows(values, first)
            first += len(values[selected.text])
    except FileError:
        raise
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = f"it is not a complete parquet file ({error})"
        raise FileError(problem, reason, "Make or download it again.") from error
