"""Texts: one reader for texts and labelled data, from files, stdin, frames, datasets and lists.

`rows` streams, so that a file may be larger than memory; `read` gives everything at once, checked.

>>> read(["a cat", "a dog"]).texts
('a cat', 'a dog')
>>> [row.label for row in rows((["a cat", "a dog"], [0, 1]))]
[0, 1]
"""

import csv
import difflib
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from hiddenscope import progress
from hiddenscope.errors import FileError, TextError

TEXT_NAMES = ("text", "sentence", "prompt", "content")
LABEL_NAMES = ("label", "class", "target")
FORMATS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
PACKINGS = (".gz", ".zst")
SHELF = Path(__file__).parent / "datasets"
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # how these begin; no text in UTF-8 does
BATCH = 1024

Cells: TypeAlias = tuple[int, Any, Any]
Columns: TypeAlias = tuple[str | None, str | None]


@dataclass(frozen=True)
class Row:
    """One text, its label if it has one, and the line of the file that it begins on (or its number), from 1."""

    text: str
    label: Any = None
    line: int = 0


@dataclass(frozen=True)
class Labelled:
    """Texts with one label each, or with none at all, and a name for what they are."""

    texts: tuple[str, ...]
    labels: tuple[Any, ...] | None
    name: str


@dataclass(frozen=True)
class _Place:
    """What is read, for errors: `line 3 of cities.csv`."""

    name: str
    unit: str = "row"

    def wrong(self, line: int, found: str, do: str) -> TextError:
        return TextError(f"{self.unit.capitalize()} {line:,} of {self.name}", found, do)


def shipped() -> tuple[str, ...]:
    """The names of the datasets that come with the package.

    >>> "cities-incomplete" in shipped()
    True
    """
    return tuple(sorted(path.stem for path in SHELF.iterdir() if path.suffix in FORMATS))


def rows(source: Any, *, text: str | None = None, label: str | None = None) -> Iterator[Row]:
    """The rows of a source one after another, never all of them in memory.

    A source is the path of a .txt (one text a line), .jsonl, .csv, .tsv or .parquet file, packed as .gz or .zst or not;
    "-" for stdin ("-.csv" says its format); an open file; the name of a shipped dataset; a frame; a Hugging Face
    dataset; a list of strings, or `(texts, labels)`. `text` and `label` name columns. If they are not given, a column
    with an obvious name is taken, or the only one that holds text. Labels of a .csv are strings; blank lines of a file
    are passed over.

    >>> next(rows("cities-complete")).label
    'Toronto'
    """
    columns = (text, label)
    if isinstance(source, str | os.PathLike):
        return _of_name(os.fspath(source), columns)
    if hasattr(source, "read"):
        named = Path(str(getattr(source, "name", "")))
        kind = _format(named.name) or _without(columns)
        place = _Place(named.name if _format(named.name) else "the open file", "row" if kind == ".parquet" else "line")
        return _checked(_of_file(source, kind, place, columns), place)
    if hasattr(source, "columns") and (hasattr(source, "itertuples") or hasattr(source, "iter_rows")):
        return _checked(_of_frame(source, columns, place := _Place("the frame")), place)
    if hasattr(source, "column_names"):
        return _checked(_of_dataset(source, columns, place := _Place("the dataset")), place)
    if isinstance(source, tuple) and len(source) == 2 and not any(isinstance(one, str) for one in source):
        return _checked(_of_pair(*source, columns, place := _Place("(texts, labels)")), place)
    return _checked(_of_items(source, columns, place := _Place("the list")), place)


def read(source: Any, *, text: str | None = None, label: str | None = None) -> Labelled:
    """All rows of a source, with a label each or with none at all.

    >>> cities = read("cities-incomplete")
    >>> len(cities.texts), sorted(set(cities.labels))
    (50, ['Montreal', 'Toronto'])
    """
    name = _name(source)
    found: list[Row] = []
    with progress.track("Reading") as advance:
        for row in rows(source, text=text, label=label):
            found.append(row)
            advance(1)
    if not found:
        raise TextError(f"Texts of {name}", "there are none", "Give at least one.")
    without = [row.line for row in found if row.label is None]
    if without and (label is not None or len(without) < len(found)):
        problem = f"Labels of {name}"
        missing = f"row {without[0]:,} has none, like {len(without) - 1:,} more of {len(found):,}"
        raise TextError(problem, missing, "Give every text a label, or none of them.")
    labels = None if without else tuple(row.label for row in found)
    return Labelled(tuple(row.text for row in found), labels, name)


def _name(source: Any) -> str:
    """What a reader would call it."""
    given = source if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
    if not isinstance(given, str | os.PathLike):
        return "the texts"
    if str(given).partition(".")[0] == "-":
        return "stdin"
    name = Path(given).name
    for suffix in (*PACKINGS, *FORMATS):
        name = name.removesuffix(suffix)
    return name or "the texts"


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file; a name that no file system takes is none.

    >>> is_file("a" * 9_999)
    False
    """
    return os.path.isfile(path)  # unlike Path's, this one never raises


def _of_name(name: str, columns: Columns) -> Iterator[Row]:
    if name.partition(".")[0] == "-":
        kind = _format(name) or _without(columns)
        if name != "-" and not _format(name):
            raise FileError(f"Texts of stdin as {name!r}", "no such format", _formats("Give it as -.jsonl, say"))
        return _checked(
            _of_file(getattr(sys.stdin, "buffer", sys.stdin), kind, place := _Place("stdin", "line"), columns), place
        )
    path = _shelved(name) or Path(name)
    kind = _format(path.name)
    if not is_file(path):
        raise _not_there(name, path)
    if not kind:
        raise FileError(
            f"Texts of {name!a}", f"the suffix {path.suffix!r} is of no known format", _formats("Rename it")
        )
    place = _Place(path.name, "row" if kind == ".parquet" else "line")
    return _checked(_of_path(path, kind, place, columns), place)


def _of_path(path: Path, kind: str, place: _Place, columns: Columns) -> Iterator[Cells]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise FileError(
            f"Texts of {place.name}", str(error.strerror or error), "Give a file that can be read."
        ) from error
    with stream:
        yield from _of_file(stream, kind, place, columns)


def _shelved(name: str) -> Path | None:
    return next((path for path in SHELF.iterdir() if path.stem == name and path.suffix in FORMATS), None)


def _not_there(name: str, path: Path) -> FileError:
    problem, names = f"Texts of {name[:80]!a}", shipped()
    if os.path.isdir(path):
        return FileError(problem, "it is a folder", "Give one file.")
    near = difflib.get_close_matches(name.lower(), names, 1, 0.6)
    if near:
        return FileError(
            problem, "no such file, and no dataset of that name comes with it", f"Did you mean {near[0]!r}?"
        )
    remedy = f"Give a path, one of {', '.join(names)}, or for a single text a list: [text]."
    return FileError(problem, "there is no such file", remedy)


def _format(name: str) -> str:
    """The format that a name's suffix says, without its packing; empty if none."""
    for packing in PACKINGS:
        name = name.removesuffix(packing)
    suffix = Path(f"x{name}").suffix.lower()
    return suffix if suffix in FORMATS else ""


def _formats(do: str) -> str:
    return f"{do}: there are {', '.join(FORMATS)}, and {' and '.join(PACKINGS)} of these."


def _without(columns: Columns) -> str:
    """The format of what does not say it: lines of text, or lines of JSON if columns are named."""
    return ".txt" if columns == (None, None) else ".jsonl"


def _of_file(stream: Any, kind: str, place: _Place, columns: Columns) -> Iterator[Cells]:
    with _unpacked(stream, place) as plain:
        if kind == ".parquet":
            yield from _parquet(plain, place, columns)
        elif kind == ".txt":
            _no_columns(columns, place)
            yield from ((line, string, None) for line, string in _lines(plain, place))
        elif kind == ".jsonl":
            yield from _of_records(_json(plain, place), columns, place)
        else:
            yield from _csv(plain, "\t" if kind == ".tsv" else ",", place, columns)


@contextmanager
def _unpacked(stream: Any, place: _Place) -> Iterator[Any]:
    """The stream, unpacked if its first bytes say that it is packed; what was given stays open."""
    if isinstance(stream, io.TextIOBase) or not (hasattr(stream, "peek") or hasattr(stream, "readinto")):
        yield stream
        return
    wrapped = None if hasattr(stream, "peek") else io.BufferedReader(stream)
    peekable = wrapped or stream
    try:
        start = peekable.peek(4)[:4]
        if start.startswith(GZIP):
            with gzip.GzipFile(fileobj=peekable) as plain:
                yield plain
        elif start == ZSTANDARD:
            import zstandard

            reader = zstandard.ZstdDecompressor().stream_reader(peekable, read_across_frames=True, closefd=False)
            yield io.BufferedReader(reader)
        else:
            yield peekable
    except Exception as error:
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) or type(error).__name__ == "ZstdError":
            reason = f"it cannot be unpacked to the end ({error})"
            raise FileError(f"Texts of {place.name}", reason, "Make or fetch the file again.") from error
        raise
    finally:
        if wrapped is not None:
            wrapped.detach()


def _decoded(stream: Iterable[bytes | str], place: _Place) -> Iterator[tuple[int, str]]:
    """The lines with their ends, each decoded by itself, so that what is wrong has a number."""
    for number, line in enumerate(stream, 1):
        try:
            string = line if isinstance(line, str) else line.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"it is not UTF-8 (byte {error.start + 1} of the line is 0x{error.object[error.start]:02x})"
            raise place.wrong(number, found, "Save the file as UTF-8.") from error
        yield number, string.removeprefix("\ufeff") if number == 1 else string


def _lines(stream: Iterable[bytes | str], place: _Place) -> Iterator[tuple[int, str]]:
    for number, line in _decoded(stream, place):
        if line.strip():
            yield number, line.rstrip("\r\n")


def _json(stream: Iterable[bytes | str], place: _Place) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(stream, place):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise place.wrong(number, f"it is no JSON ({error})", "Mend the line, or leave it out.") from error


def _csv(stream: Iterable[bytes | str], delimiter: str, place: _Place, columns: Columns) -> Iterator[Cells]:
    reader = csv.reader((line for _, line in _decoded(stream, place)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    chosen: tuple[int, int | None] = (0, None)
    begin = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise place.wrong(begin, f"it cannot be read as {delimiter!r}-separated ({error})", "Mend it.") from error
        if cells is None:
            return
        if cells and header is None:
            header = cells
            names = _chosen(header, header, columns, place, by_header=True)
            chosen = header.index(names[0]), None if names[1] is None else header.index(names[1])
        elif cells and header is not None:
            if len(cells) != len(header):
                found = f"it has {len(cells)} columns and the header {len(header)} ({', '.join(header)[:200]})"
                raise place.wrong(begin, found, "Quote what holds a separator, or mend the line.")
            yield begin, cells[chosen[0]], None if chosen[1] is None else cells[chosen[1]] or None
        begin = reader.line_num + 1


def _parquet(stream: Any, place: _Place, columns: Columns) -> Iterator[Cells]:
    if not (hasattr(stream, "seekable") and stream.seekable()) or isinstance(stream, gzip.GzipFile):
        remedy = "Give the .parquet itself, from disk: it is packed inside already."
        raise FileError(f"Texts of {place.name}", "parquet is read from its end and cannot be streamed", remedy)
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream)
        kinds = {field.name: field.type for field in file.schema_arrow}
        strings = [name for name, kind in kinds.items() if str(kind) in ("string", "large_string", "string_view")]
        text, label = _chosen(list(kinds), strings, columns, place)
        wanted = [name for name in (text, label) if name is not None]
        number = 0
        for batch in file.iter_batches(BATCH, columns=wanted):
            texts = batch.column(text).to_pylist()
            labels = [None] * len(texts) if label is None else batch.column(label).to_pylist()
            for one, its in zip(texts, labels, strict=True):
                number += 1
                yield number, one, its
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"Texts of {place.name}", f"it is no whole parquet ({error})", "Make or fetch it again."
        ) from error


def _of_records(records: Iterator[tuple[int, Any]], columns: Columns, place: _Place) -> Iterator[Cells]:
    """Rows that are mappings, or all of them strings; the first decides which columns are read."""
    first = next(records, None)
    if first is None:
        return
    if isinstance(first[1], str):
        _no_columns(columns, place)
        yield from ((number, record, None) for number, record in chain([first], records))
        return
    text = label = None
    for number, record in chain([first], records):
        if not isinstance(record, Mapping):
            raise place.wrong(number, f"it is {_kind(record)}, and not a row with columns", "Mend it, or leave it out.")
        if text is None:
            strings = [name for name, value in record.items() if isinstance(value, str)]
            text, label = _chosen(list(record), strings, columns, place)
        missing = [name for name in (text, columns[1]) if name is not None and name not in record]
        if missing:
            raise place.wrong(
                number, f"it has no {missing[0]!r}, only {_listed(list(record))}", "Mend it, or leave it out."
            )
        yield number, record[text], None if label is None else record.get(label)


def _of_items(source: Any, columns: Columns, place: _Place) -> Iterator[Cells]:
    if isinstance(source, Mapping):
        splits = [str(name) for name, part in source.items() if hasattr(part, "column_names")]
        reason = f"it has the splits {_listed(splits)}" if splits else f"it is a mapping with {_listed(list(source))}"
        remedy = f"Give one of them: data[{splits[0]!r}]." if splits else "Give (texts, labels), or a list of rows."
        raise TextError("Texts of a mapping", reason, remedy)
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        remedy = "Give a path, a list of strings, (texts, labels), a frame or a Hugging Face dataset."
        raise TextError("Texts", f"{_kind(source)} was given, in which there are none", remedy)
    yield from _of_records(((number, item) for number, item in enumerate(source, 1)), columns, place)


def _of_pair(texts: Any, labels: Any, columns: Columns, place: _Place) -> Iterator[Cells]:
    _no_columns(columns, place)
    if not (hasattr(texts, "__len__") and hasattr(labels, "__len__")):
        reason = f"{_kind(texts)} and {_kind(labels)} were given"
        raise TextError("(texts, labels)", reason, "Give two lists.")
    if len(texts) != len(labels):
        reason = f"there are {len(texts):,} texts and {len(labels):,} labels"
        raise TextError("(texts, labels)", reason, "Give one label a text.")
    yield from zip(range(1, len(texts) + 1), texts, labels, strict=True)


def _of_frame(frame: Any, columns: Columns, place: _Place) -> Iterator[Cells]:
    names = [name for name in frame.columns if isinstance(name, str)]
    once = [name for name in names if names.count(name) == 1]
    strings = [name for name in once if len(frame) and isinstance(next(iter(frame[name])), str)]
    text, label = _chosen(names, strings, columns, place)
    labels = [None] * len(frame) if label is None else frame[label]
    yield from zip(range(1, len(frame) + 1), frame[text], labels, strict=True)


def _of_dataset(dataset: Any, columns: Columns, place: _Place) -> Iterator[Cells]:
    """A Hugging Face dataset, by what it can do; labels that have names are given by them."""
    if isinstance(dataset.column_names, Mapping):
        yield from _of_items(dataset, columns, place)
        return
    features = getattr(dataset, "features", None) or {}
    names = list(dataset.column_names or features)
    if not names:  # streamed, and not known before its first row
        yield from _of_items(iter(dataset), columns, place)
        return
    strings = [name for name in names if getattr(features.get(name), "dtype", None) in ("string", "large_string")]
    text, label = _chosen(names, strings, columns, place)
    wanted = [name for name in (text, label) if name is not None]
    said = getattr(features.get(label), "int2str", None)
    for number, row in enumerate(dataset.select_columns(wanted), 1):
        its = None if label is None else row[label]
        yield number, row[text], said(its) if said and isinstance(its, int) and its >= 0 else None if said else its


def _chosen(
    names: Sequence[str], strings: Sequence[str], columns: Columns, place: _Place, *, by_header: bool = False
) -> tuple[str, str | None]:
    """The columns of the texts and of the labels: those that are named, or the obvious ones."""
    asked = f"The columns of {place.name}"
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise TextError(asked, f"two have the name {twice!r}", "Give each its own.")
    for wanted in columns:
        if wanted is not None and wanted not in names:
            near = difflib.get_close_matches(wanted, names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Name one of these."
            raise TextError(f"The column {wanted!r} of {place.name}", f"it has {_listed(names)}", remedy)
    label = columns[1] or _obvious(names, LABEL_NAMES, asked, "label")
    text = columns[0] or _obvious(names, TEXT_NAMES, asked, "text")
    if text is None:
        others = [name for name in strings if name != label]
        if len(others) != 1 or (by_header and not re.fullmatch(r"[\w.-]+", others[0])):
            reason = f"it has {_listed(names)}, and none is plainly the text"
            raise TextError(asked, reason, 'Name the one that is: text="..." (and label="...").')
        text = others[0]
    if text == label:
        raise TextError(asked, f"{text!r} would be both text and label", 'Name another: text="...", label="...".')
    return text, label


def _obvious(names: Sequence[str], known: Sequence[str], asked: str, what: str) -> str | None:
    """The column with the best of the known names; several others than the best are one too many."""
    found = [name for like in known for name in names if name.lower() == like]
    if len(found) > 1 and found[0].lower() != known[0]:
        raise TextError(asked, f"{_listed(found)} could each be the {what}", f'Name the one that is: {what}="...".')
    return found[0] if found else None


def _no_columns(columns: Columns, place: _Place) -> None:
    named = next((name for name in columns if name is not None), None)
    if named is not None:
        raise TextError(f"The column {named!r} of {place.name}", "it has no columns", "Leave text= and label= out.")


def _checked(cells: Iterator[Cells], place: _Place) -> Iterator[Row]:
    for line, text, label in cells:
        if not isinstance(text, str):
            raise place.wrong(line, f"the text is {_kind(text)}", "Give a string.")
        if not text.strip():
            raise place.wrong(line, "the text is empty", "Leave the row out, or fill it.")
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise place.wrong(line, "the text holds half of a character (a lone surrogate)", "Save it as UTF-8 again.")
        yield Row(str(text), _plain(label), line)


def _plain(label: Any) -> Any:
    """A label as Python has it, None where it is missing."""
    if hasattr(label, "item") and not getattr(label, "shape", ()):
        label = label.item()
    missing = type(label).__name__ in ("NAType", "NaTType") or (isinstance(label, float) and label != label)
    return None if missing else label


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _listed(names: Sequence[Any]) -> str:
    quoted = [ascii(str(name)[:40]) for name in names[:12]]
    return ", ".join([*quoted, f"and {len(names) - 12} more"] if len(names) > 12 else quoted) or "none"
