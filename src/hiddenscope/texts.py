"""Texts: one reader for texts and labelled data, from files, stdin, frames, datasets and lists.

`rows` streams, so that a file may be larger than memory; `read` gives everything at once, checked.

>>> read(["a cat", "a dog"]).texts
('a cat', 'a dog')
>>> [row.label for row in rows((["a cat", "a dog"], [0, 1]))]
[0, 1]
"""

import csv
import difflib
import io
import json
import os
import re
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.compressed import check_growth, column_values, decompressed
from hiddenscope.errors import FileError, TextError, TooLarge

TEXT_NAMES = ("text", "sentence", "prompt", "content")
LABEL_NAMES = ("label", "class", "target")
FORMATS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".zst")
SHIPPED = Path(__file__).parent / "datasets"
PARQUET_BATCH = 1024
UNNAMED = "the texts"
# Characters of one line, or one field of a .csv, where the csv module stops at 131,072 by default.
LONGEST_FIELD = 2**26
MOST_BLANK = 1_000_000  # blank lines in a row
# What `read` holds in memory from one file. `rows` has no such limit.
MOST_TEXTS, MOST_CHARACTERS = 2**22, 2**30

Cells: TypeAlias = tuple[int, Any, Any]
"""A row as it was read: its line or number, its text and its label, not checked yet."""
Columns: TypeAlias = tuple[str | None, str | None]
"""The names of the text and label columns; None where they are to be found."""

Skipped: TypeAlias = Callable[[TextError], None]
"""What is given the error of every row that is left out."""

_csv_limit = threading.Lock()


@dataclass(frozen=True, slots=True)
class Row:
    """One text, its label if it has one, and the line of the file that it begins on (or its number), from 1."""

    text: str
    label: Any = None
    line: int = 0


@dataclass(frozen=True)
class Labelled:
    """Texts with one label each, or without labels, and a name for what they are. Iterating gives the texts.

    >>> cities = read("cities-incomplete")
    >>> len(cities), next(iter(cities)) == cities.texts[0]
    (50, True)
    """

    texts: tuple[str, ...]
    labels: tuple[Any, ...] | None
    name: str

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


@dataclass(frozen=True)
class _Origin:
    """What is read, as errors name it: `Line 3 of cities.csv`. `skipped` is given the errors of rows to leave out."""

    name: str
    unit: str = "row"
    skipped: Skipped | None = None

    def refuse(self, line: int, reason: str, remedy: str, cause: Exception | None = None) -> None:
        """Raise the error of a row, or leave the row out."""
        error = TextError(f"{self.unit.capitalize()} {line:,} of {self.name}", reason, remedy)
        if self.skipped is None:
            raise error from cause
        self.skipped(error)


def shipped() -> tuple[str, ...]:
    """The names of the datasets that come with the package.

    >>> "cities-incomplete" in shipped()
    True
    """
    return tuple(sorted(path.stem for path in SHIPPED.iterdir() if path.suffix in FORMATS))


def rows(
    source: Any, *, text: str | None = None, label: str | None = None, skipped: Skipped | None = None
) -> Iterator[Row]:
    """The rows of a source one after another, never all of them in memory.

    A source is the path of a .txt (one text per line), .jsonl, .csv, .tsv or .parquet file, which may be compressed as
    .gz or .zst; "-" for stdin ("-.csv" names its format); an open file; the name of a shipped dataset; a frame; a
    Hugging Face dataset; a list of strings; `(texts, labels)`; or what `read` gave. `text` and `label` name columns. If
    they are not given, a column with an obvious name is taken, or the only one that holds text. Labels of a .csv are
    strings; blank lines of a file are skipped. With `skipped`, a broken row is no error: it is left out, and the error
    that names it goes there.

    >>> next(rows("cities-complete")).label
    'Toronto'
    """
    columns = (text, label)
    if isinstance(source, str | os.PathLike):
        return _of_name(os.fspath(source), columns, skipped)
    if hasattr(source, "read"):
        named = Path(str(getattr(source, "name", "")))
        kind = _format(named.name) or _without(columns)
        origin = _Origin(
            named.name if _format(named.name) else "the open file", "row" if kind == ".parquet" else "line", skipped
        )
        return _checked(_of_file(source, kind, origin, columns), origin)
    if isinstance(source, Labelled):
        return _checked(_of_labelled(source, columns, origin := _Origin(source.name, skipped=skipped)), origin)
    if hasattr(source, "columns") and (hasattr(source, "itertuples") or hasattr(source, "iter_rows")):
        return _checked(_of_frame(source, columns, origin := _Origin("the frame", skipped=skipped)), origin)
    if hasattr(source, "column_names"):
        return _checked(_of_dataset(source, columns, origin := _Origin("the dataset", skipped=skipped)), origin)
    if isinstance(source, tuple) and len(source) == 2 and not any(isinstance(part, str) for part in source):
        return _checked(_of_pair(*source, columns, origin := _Origin("(texts, labels)", skipped=skipped)), origin)
    return _checked(_of_items(source, columns, origin := _Origin("the list", skipped=skipped)), origin)


@checked
def read(source: Any, *, text: str | None = None, label: str | None = None) -> Labelled:
    """Labelled texts: all rows of a source, each with a label or none with one.

    `source` is whatever `rows` takes: a path, a shipped name, a frame, a Hugging Face dataset, `(texts, labels)`, a
    list. `text` and `label` name its columns.

    >>> cities = read("cities-incomplete")
    >>> len(cities.texts), sorted(set(cities.labels))
    (50, ['Montreal', 'Toronto'])
    """
    name = _name(source)
    all_rows: list[Row] = []
    with progress.track("Reading") as advance:
        for row in _holdable(rows(source, text=text, label=label), source):
            all_rows.append(row)
            advance(1)
    if not all_rows:
        raise TextError("No texts", f"{'the list' if name == UNNAMED else name} is empty", "Give at least one.")
    unlabelled = [row.line for row in all_rows if row.label is None]
    if unlabelled and (label is not None or len(unlabelled) < len(all_rows)):
        reason = f"row {unlabelled[0]:,} has no label, like {len(unlabelled) - 1:,} more of {len(all_rows):,}"
        raise TextError(f"Cannot read the labels of {name}", reason, "Give every text a label, or none of them.")
    labels = None if unlabelled else tuple(row.label for row in all_rows)
    return Labelled(tuple(row.text for row in all_rows), labels, name)


def _holdable(found: Iterator[Row], source: Any) -> Iterator[Row]:
    """The rows of a source, as long as they can be held in memory; what is in memory already has no limit."""
    if not (isinstance(source, str | os.PathLike) or hasattr(source, "read")):
        yield from found
        return
    characters = 0
    for count, row in enumerate(found, 1):
        characters += len(row.text)
        if count > MOST_TEXTS or characters > MOST_CHARACTERS:
            many = f"{MOST_TEXTS:,} texts" if count > MOST_TEXTS else f"{MOST_CHARACTERS:,} characters"
            reason = f"it has more than {many}, and all of them would be held in memory"
            remedy = "Give it to hs.extract, which reads row by row; or split it, or give a list of texts."
            raise TooLarge(f"Cannot read {_name(source)} as a whole", reason, remedy)
        yield row


def _name(source: Any) -> str:
    """A name for a source, without its folder and suffixes."""
    if isinstance(source, Labelled):
        return source.name
    given = source if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
    if not isinstance(given, str | os.PathLike):
        return UNNAMED
    if str(given).partition(".")[0] == "-":
        return "stdin"
    name = Path(given).name
    for suffix in (*COMPRESSIONS, *FORMATS):
        name = name.removesuffix(suffix)
    return name or UNNAMED


def copy_key(text: Any) -> str:
    """The same string for texts that are copies of one another: equal up to case, white space and punctuation.

    A text and its copies must never be on both sides of a split, or what is learnt by heart counts as understood. Lists
    of ids are copies where they are equal.

    >>> copy_key("The cat sat.") == copy_key(" the  cat sat"), copy_key("A cat.") == copy_key("A hat.")
    (True, False)
    """
    if not isinstance(text, str):
        return str(list(text))
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = "".join(char for char in plain if char.isalnum())
    return words or "".join(plain.split())  # a text of punctuation alone is what it is


def copy_groups(texts: Iterable[Any]) -> list[int]:
    """The number of the group of copies that each text belongs to, in the order of their first text.

    >>> copy_groups(["The cat sat.", "A dog", "the cat sat", "A dog "])
    [0, 1, 0, 1]
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(copy_key(text), len(numbers)) for text in texts]


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file; a name that no file system accepts is not one.

    >>> is_file("a" * 9_999)
    False
    """
    return os.path.isfile(path)  # unlike Path's, this one never raises


def names_a_file(text: str) -> bool:
    """Whether a string ends as the name of a file of texts does: whoever has a text, not a path, gives it in a list."""
    return text.lower().endswith((*FORMATS, *COMPRESSIONS))


def _of_name(name: str, columns: Columns, skipped: Skipped | None) -> Iterator[Row]:
    if name.partition(".")[0] == "-":
        kind = _format(name) or _without(columns)
        if name != "-" and not _format(name):
            reason = "it names no known format"
            raise FileError(f"Cannot read stdin as {name!r}", reason, _formats("Write -.jsonl, for example"))
        stdin = getattr(sys.stdin, "buffer", sys.stdin)
        return _checked(_of_file(stdin, kind, origin := _Origin("stdin", "line", skipped), columns), origin)
    path = _shipped_path(name) or Path(name)
    kind = _format(path.name)
    if not is_file(path):
        raise _no_file(name, path)
    if not kind:
        reason = f"{path.suffix!r} is not a known format"
        raise FileError(f"Cannot read texts from {name!a}", reason, _formats("Rename it"))
    origin = _Origin(path.name, "row" if kind == ".parquet" else "line", skipped)
    return _checked(_of_path(path, kind, origin, columns), origin)


def _of_path(path: Path, kind: str, origin: _Origin, columns: Columns) -> Iterator[Cells]:
    try:
        stream = path.open("rb")
    except OSError as error:
        reason = str(error.strerror or error)
        raise FileError(f"Cannot read {origin.name}", reason, "Give a file that can be read.") from error
    with stream:
        yield from _of_file(stream, kind, origin, columns)


def _shipped_path(name: str) -> Path | None:
    return next((path for path in SHIPPED.iterdir() if path.stem == name and path.suffix in FORMATS), None)


def _no_file(name: str, path: Path) -> FileError:
    problem, names = f"Cannot read texts from {name[:80]!a}", shipped()
    if os.path.isdir(path):
        return FileError(problem, "it is a folder", "Give one file.")
    near = difflib.get_close_matches(name.lower(), names, 1, 0.6)
    if near:
        reason = "there is no such file, and no shipped dataset of that name"
        return FileError(problem, reason, f"Did you mean {near[0]!r}?")
    remedy = f"Give a path, one of {', '.join(names)}, or for a single text a list: [text]."
    return FileError(problem, "there is no such file", remedy)


def _format(name: str) -> str:
    """The format that a name's suffix says, without its compression; empty if none."""
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    suffix = Path(f"x{name}").suffix.lower()
    return suffix if suffix in FORMATS else ""


def _formats(remedy: str) -> str:
    return f"{remedy}. The formats are {', '.join(FORMATS)}, and each of these with {' or '.join(COMPRESSIONS)}."


def _without(columns: Columns) -> str:
    """The format of a source without a suffix: lines of text, or lines of JSON if columns are named."""
    return ".txt" if columns == (None, None) else ".jsonl"


def _of_file(stream: Any, kind: str, origin: _Origin, columns: Columns) -> Iterator[Cells]:
    with decompressed(stream, origin.name) as plain:
        if kind == ".parquet":
            yield from _parquet(plain, origin, columns)
        elif kind == ".txt":
            _no_columns(columns, origin)
            yield from ((line, string, None) for line, string in _lines(plain, origin))
        elif kind == ".jsonl":
            yield from _of_records(_json(plain, origin), columns, origin)
        else:
            yield from _csv(plain, "\t" if kind == ".tsv" else ",", origin, columns)


def _decoded(stream: Iterable[bytes | str], origin: _Origin) -> Iterator[tuple[int, str]]:
    """The lines with their ends, each decoded by itself, so that an error has its number."""
    for number, line in enumerate(_bounded(stream, origin), 1):
        try:
            string = line if isinstance(line, str) else line.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"it is not UTF-8 (byte {error.start + 1} of the line is 0x{error.object[error.start]:02x})"
            origin.refuse(number, reason, "Save the file as UTF-8.", error)
            continue
        yield number, string.removeprefix("\ufeff") if number == 1 else string


def _bounded(stream: Iterable[bytes | str], origin: _Origin) -> Iterator[bytes | str]:
    """The lines of a file, none of them read further than it may be long."""
    if not isinstance(stream, io.IOBase):
        yield from stream
        return
    number = blank = 0
    while line := stream.readline(LONGEST_FIELD):
        number += 1
        blank = blank + 1 if len(line) <= 2 and line.isspace() else 0
        if blank > MOST_BLANK:
            reason = f"{MOST_BLANK:,} blank lines stand before line {number:,}"
            raise FileError(f"Cannot read {origin.name}", reason, "Remove them, if it is yours.")
        if len(line) == LONGEST_FIELD:
            reason = f"it has {LONGEST_FIELD:,} characters or more"
            origin.refuse(number, reason, "Split it into lines, one for each text.")
            while len(line) == LONGEST_FIELD and line[-1:] not in (b"\n", "\n"):
                line = stream.readline(LONGEST_FIELD)
            continue
        yield line


def _lines(stream: Iterable[bytes | str], origin: _Origin) -> Iterator[tuple[int, str]]:
    for number, line in _decoded(stream, origin):
        if line.strip():
            yield number, line.rstrip("\r\n")


def _json(stream: Iterable[bytes | str], origin: _Origin) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(stream, origin):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            origin.refuse(number, f"it is not JSON ({error})", "Correct the line, or remove it.", error)
            continue
        yield number, record


def _csv(stream: Iterable[bytes | str], delimiter: str, origin: _Origin, columns: Columns) -> Iterator[Cells]:
    """The rows of a table of separated values, read strictly, each with the line that it begins on.

    pandas would fill up a row that lacks a column, accept characters behind a closing quote, and not know the line of a
    row when a quoted text holds line breaks.
    """
    reader = csv.reader((line for _, line in _decoded(stream, origin)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    chosen: tuple[int, int | None] = (0, None)
    begin = 1
    while True:
        try:
            cells = _next_row(reader)
        except csv.Error as error:
            reason = f"it is not a row of values separated by {delimiter!r} ({error})"
            origin.refuse(begin, reason, "Correct the line.", error)
            begin = reader.line_num + 1
            continue
        if cells is None:
            return
        if cells and header is None:
            header = cells
            names = _chosen(header, header, columns, origin, by_header=True)
            chosen = header.index(names[0]), None if names[1] is None else header.index(names[1])
        elif cells and header is not None:
            if len(cells) != len(header):
                reason = f"it has {len(cells)} columns and the header {len(header)} ({', '.join(header)[:200]})"
                origin.refuse(begin, reason, "Quote what holds a separator, or correct the line.")
            else:
                yield begin, cells[chosen[0]], None if chosen[1] is None else cells[chosen[1]] or None
        begin = reader.line_num + 1


def _next_row(reader: Any) -> list[str] | None:
    """The next row, with longer fields than the csv module accepts by default: its limit is the whole process's."""
    with _csv_limit:
        before = csv.field_size_limit(LONGEST_FIELD)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)


def _parquet(stream: Any, origin: _Origin, columns: Columns) -> Iterator[Cells]:
    if not (hasattr(stream, "seekable") and stream.seekable()):
        remedy = "Give the .parquet file itself: it is compressed inside already."
        raise FileError(f"Cannot read {origin.name}", "parquet is read from its end and cannot be streamed", remedy)
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream)
        kinds = {field.name: field.type for field in file.schema_arrow}
        strings = [name for name, kind in kinds.items() if str(kind) in ("string", "large_string", "string_view")]
        text, label = _chosen(list(kinds), strings, columns, origin)
        names = [name for name in (text, label) if name is not None]
        check_growth(file.metadata, names, origin.name)
        # A page may name one long string a million times: as a dictionary it is in memory once.
        coded = [name for name in names if name in strings]
        file = parquet.ParquetFile(stream, metadata=file.metadata, read_dictionary=coded)
        number = 0
        for batch in file.iter_batches(PARQUET_BATCH, columns=names):
            texts = column_values(batch.column(text))
            labels = [None] * len(texts) if label is None else column_values(batch.column(label))
            for cells in zip(texts, labels, strict=True):
                number += 1
                yield number, *cells
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, FileError):
            raise
        reason = f"it is not a complete parquet file ({error})"
        raise FileError(f"Cannot read {origin.name}", reason, "Make or download it again.") from error


def _of_records(records: Iterator[tuple[int, Any]], columns: Columns, origin: _Origin) -> Iterator[Cells]:
    """Rows that are mappings, or all of them strings; the first decides which columns are read."""
    first = next(records, None)
    if first is None:
        return
    if isinstance(first[1], str):
        _no_columns(columns, origin)
        yield from ((number, record, None) for number, record in chain([first], records))
        return
    text = label = None
    for number, record in chain([first], records):
        if not isinstance(record, Mapping):
            reason = f"it is {_kind(record)} and not a row with columns"
            origin.refuse(number, reason, "Correct it, or remove it.")
            continue
        if text is None:
            strings = [name for name, value in record.items() if isinstance(value, str)]
            text, label = _chosen(list(record), strings, columns, origin)
        missing = [name for name in (text, columns[1]) if name is not None and name not in record]
        if missing:
            reason = f"it has no {missing[0]!r}, only {_listed(list(record))}"
            origin.refuse(number, reason, "Correct it, or remove it.")
            continue
        yield number, record[text], None if label is None else record.get(label)


def _of_items(source: Any, columns: Columns, origin: _Origin) -> Iterator[Cells]:
    if isinstance(source, Mapping):
        splits = [str(name) for name, part in source.items() if hasattr(part, "column_names")]
        reason = f"it has the splits {_listed(splits)}" if splits else f"it is a mapping with {_listed(list(source))}"
        remedy = f"Give one of them: data[{splits[0]!r}]." if splits else "Give (texts, labels), or a list of rows."
        raise TextError("Cannot read texts from a mapping", reason, remedy)
    if not isinstance(source, Iterable) or isinstance(source, bytes) or getattr(source, "shape", None) == ():
        remedy = "Give a path, a list of strings, (texts, labels), a frame or a Hugging Face dataset."
        raise TextError("Cannot read texts", f"the source is {_kind(source)}", remedy)
    yield from _of_records(((number, item) for number, item in enumerate(source, 1)), columns, origin)


def _of_pair(texts: Any, labels: Any, columns: Columns, origin: _Origin) -> Iterator[Cells]:
    _no_columns(columns, origin)
    if not (hasattr(texts, "__len__") and hasattr(labels, "__len__")):
        reason = f"the texts are {_kind(texts)} and the labels {_kind(labels)}"
        raise TextError("Cannot read (texts, labels)", reason, "Give two lists.")
    if len(texts) != len(labels):
        reason = f"there are {len(texts):,} texts and {len(labels):,} labels"
        raise TextError("Cannot read (texts, labels)", reason, "Give one label for each text.")
    yield from zip(range(1, len(texts) + 1), texts, labels, strict=True)


def _of_labelled(source: Labelled, columns: Columns, origin: _Origin) -> Iterator[Cells]:
    _no_columns(columns, origin)
    yield from zip(range(1, len(source) + 1), source.texts, source.labels or [None] * len(source), strict=True)


def _of_frame(frame: Any, columns: Columns, origin: _Origin) -> Iterator[Cells]:
    names = [name for name in frame.columns if isinstance(name, str)]
    once = [name for name, count in Counter(names).items() if count == 1]
    strings = [name for name in once if len(frame) and isinstance(next(iter(frame[name])), str)]
    text, label = _chosen(names, strings, columns, origin)
    labels = [None] * len(frame) if label is None else frame[label]
    yield from zip(range(1, len(frame) + 1), frame[text], labels, strict=True)


def _of_dataset(dataset: Any, columns: Columns, origin: _Origin) -> Iterator[Cells]:
    """A Hugging Face dataset; class labels are given by their names."""
    if isinstance(dataset.column_names, Mapping):
        yield from _of_items(dataset, columns, origin)
        return
    features = getattr(dataset, "features", None) or {}
    names = list(dataset.column_names or features)
    if not names:  # a streamed dataset, whose columns are not known before its first row
        yield from _of_items(iter(dataset), columns, origin)
        return
    strings = [name for name in names if getattr(features.get(name), "dtype", None) in ("string", "large_string")]
    text, label = _chosen(names, strings, columns, origin)
    chosen = [name for name in (text, label) if name is not None]
    class_name = getattr(features.get(label), "int2str", None)
    for number, row in enumerate(dataset.select_columns(chosen), 1):
        value = None if label is None else row[label]
        if class_name is not None:  # -1 stands for a label that is missing
            value = class_name(value) if isinstance(value, int) and value >= 0 else None
        yield number, row[text], value


def _chosen(
    names: Sequence[str], strings: Sequence[str], columns: Columns, origin: _Origin, *, by_header: bool = False
) -> tuple[str, str | None]:
    """The columns of the texts and of the labels: those that are named, or the obvious ones."""
    problem = f"Cannot choose the columns of {origin.name}"
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise TextError(problem, f"two are called {twice!r}", "Give each a name of its own.")
    for column in columns:
        if column is not None and column not in names:
            near = difflib.get_close_matches(column, names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Name one of these."
            raise TextError(f"No column {column!r} in {origin.name}", f"it has {_listed(names)}", remedy)
    label = columns[1] or _obvious(names, LABEL_NAMES, problem, "label")
    text = columns[0] or _obvious(names, TEXT_NAMES, problem, "text")
    if text is None:
        others = [name for name in strings if name != label]
        if len(others) != 1 or (by_header and not re.fullmatch(r"[\w.-]+", others[0])):
            reason = f"they are {_listed(names)}, and none is plainly the text"
            raise TextError(problem, reason, 'Name the one that is: text="..." (and label="...").')
        text = others[0]
    if text == label:
        raise TextError(problem, f"{text!r} would be both text and label", 'Name another: text="...", label="...".')
    return text, label


def _obvious(names: Sequence[str], known: Sequence[str], problem: str, what: str) -> str | None:
    """The column with the first of the known names; several with later ones are ambiguous."""
    matching = [name for like in known for name in names if name.lower() == like]
    if len(matching) > 1 and matching[0].lower() != known[0]:
        reason = f"{_listed(matching)} could each be the {what}"
        raise TextError(problem, reason, f'Name the one that is: {what}="...".')
    return matching[0] if matching else None


def _no_columns(columns: Columns, origin: _Origin) -> None:
    named = next((name for name in columns if name is not None), None)
    if named is not None:
        raise TextError(f"No column {named!r} in {origin.name}", "it has no columns", "Leave text= and label= out.")


def _checked(cells: Iterator[Cells], origin: _Origin) -> Iterator[Row]:
    for line, text, label in cells:
        if not isinstance(text, str):
            origin.refuse(line, f"the text is {_kind(text)}", "Give a string.")
        elif not text.strip():
            origin.refuse(line, "the text is empty", "Remove the row, or fill it in.")
        elif _has_surrogate(text) or _has_surrogate(label):
            what = "text" if _has_surrogate(text) else "label"
            origin.refuse(line, f"the {what} holds half of a character (a lone surrogate)", "Save it as UTF-8 again.")
        else:
            yield Row(str(text), _plain(label), line)


def _has_surrogate(part: Any) -> bool:
    return isinstance(part, str) and not part.isascii() and any("\ud800" <= char <= "\udfff" for char in part)


def _plain(label: Any) -> Any:
    """A label as a plain Python value, None where it is missing."""
    if hasattr(label, "item") and not getattr(label, "shape", ()):
        label = label.item()
    missing = type(label).__name__ in ("NAType", "NaTType") or (isinstance(label, float) and label != label)
    return None if missing else label


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _listed(names: Sequence[Any]) -> str:
    quoted = [ascii(str(name)[:40]) for name in names[:12]]
    return ", ".join([*quoted, f"and {len(names) - 12} more"] if len(names) > 12 else quoted) or "none"
