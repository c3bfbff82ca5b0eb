"""Reading: one reader for texts and labelled data, from files, stdin, frames, datasets
and lists.

`rows` streams, so that a file may be larger than memory; `read` gives everything at
once, checked.

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
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import FileError, TextError, TooLarge
from hiddenscope.texts.compressed import check_growth, column_values, decompressed
from hiddenscope.texts.folder import COMPRESSIONS, FORMATS, files_in

TEXT_NAMES = ("text", "sentence", "prompt", "content")
LABEL_NAMES = ("label", "class", "target")
SHIPPED = Path(__file__).parent / "datasets"
PARQUET_BATCH = 1024
UNNAMED = "the texts"
# Characters of one line, or one field of a .csv, where the csv module stops at 131,072
# by default.
LONGEST_FIELD = 2**26
MOST_BLANK = 1_000_000  # blank lines in a row
# What `read` holds in memory from one file. `rows` has no such limit.
MOST_TEXTS, MOST_CHARACTERS = 2**22, 2**30
# Items of what is in memory already: a list of more takes 34 GB by itself.
LONGEST_LIST = 2**32

COLUMNS = {
    "text": "The column of the texts.",
    "label": "The column of the labels.",
    "group": (
        "The column that says which texts belong together: paraphrases, a pair, one"
        " document."
    ),
}
"""What can be named in a table, as commands and forms describe it."""


class RawRow(NamedTuple):
    """A row as it was read and not checked yet: its line or number, its text, its label
    and its group.
    """

    line: int
    text: Any
    label: Any = None
    group: Any = None


class Columns(NamedTuple):
    """The columns that a caller named; None where they are to be found, or where there
    is none.
    """

    text: str | None = None
    label: str | None = None
    group: str | None = None


class ChosenColumns(NamedTuple):
    """The columns that are read."""

    text: str
    label: str | None
    group: str | None

    @property
    def names(self) -> list[str]:
        """Each column once."""
        named = (self.text, self.label, self.group)
        return list(dict.fromkeys(name for name in named if name is not None))


Skipped: TypeAlias = Callable[[TextError], None]
"""What is given the error of every row that is left out."""

_csv_limit = threading.Lock()


@dataclass(frozen=True, slots=True)
class Row:
    """One text, with its label and its group if it has them.

    `line` is the line of the file that it begins on, or its number, from 1.
    """

    text: str
    label: Any = None
    line: int = 0
    group: Any = None


@dataclass(frozen=True)
class Labelled:
    """Texts with one label each, or without labels, and a name for what they are.
    Iterating gives the texts.

    `groups` has one value for each text: texts with the same value belong together.
    None means that nobody said so.

    >>> cities = read("cities-incomplete")
    >>> len(cities), next(iter(cities)) == cities.texts[0]
    (50, True)
    """

    texts: tuple[str, ...]
    labels: tuple[Any, ...] | None
    name: str
    groups: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


@dataclass(frozen=True)
class _Origin:
    """What is read, as errors name it: `Line 3 of cities.csv`. `skipped` is given the
    errors of rows to leave out.
    """

    name: str
    unit: str = "row"
    skipped: Skipped | None = None

    def refuse(
        self, line: int, reason: str, remedy: str, cause: Exception | None = None
    ) -> None:
        """Raise the error of a row, or leave the row out."""
        error = TextError(
            f"{self.unit.capitalize()} {line:,} of {self.name}", reason, remedy
        )
        if self.skipped is None:
            raise error from cause
        self.skipped(error)


def shipped() -> tuple[str, ...]:
    """The names of the datasets that come with the package.

    >>> "cities-incomplete" in shipped()
    True
    """
    return tuple(
        sorted(path.stem for path in SHIPPED.iterdir() if path.suffix in FORMATS)
    )


def rows(
    source: Any,
    *,
    text: str | None = None,
    label: str | None = None,
    group: str | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Row]:
    """The rows of a source one after another, never all of them in memory.

    A source is the path of a .txt (one text per line), .jsonl, .csv, .tsv or .parquet
    file, which may be compressed as .gz or .zst; a folder of such files; "-" for stdin
    ("-.csv" names its format); an open file; the name of a shipped dataset; a frame; a
    Hugging Face dataset; a list of strings or of `(text, label)` pairs; `(texts,
    labels)`; or what `read` gave. `text`, `label` and `group` name columns. If text and
    label are not given, a column with an obvious name is taken, or the only one that
    holds text; groups are read only from a column that is named. Labels of a .csv are
    strings; blank lines of a file are skipped. With `skipped`, a broken row is no
    error: it is left out, and the error that names it goes there.

    >>> next(rows("cities-complete")).label
    'Toronto'
    """
    columns = Columns(text, label, group)
    if isinstance(source, str | os.PathLike):
        return _of_name(os.fspath(source), columns, skipped)
    if hasattr(source, "read"):
        named = Path(str(getattr(source, "name", "")))
        kind = _format(named.name) or _without(columns)
        origin = _Origin(
            named.name if _format(named.name) else "the open file",
            "row" if kind == ".parquet" else "line",
            skipped,
        )
        return _checked(_of_file(source, kind, origin, columns), origin)
    if isinstance(source, Labelled):
        return _checked(
            _of_labelled(
                source, columns, origin := _Origin(source.name, skipped=skipped)
            ),
            origin,
        )
    if hasattr(source, "columns") and (
        hasattr(source, "itertuples") or hasattr(source, "iter_rows")
    ):
        return _checked(
            _of_frame(source, columns, origin := _Origin("the frame", skipped=skipped)),
            origin,
        )
    if hasattr(source, "column_names"):
        return _checked(
            _of_dataset(
                source, columns, origin := _Origin("the dataset", skipped=skipped)
            ),
            origin,
        )
    if (
        isinstance(source, tuple)
        and len(source) == 2
        and not any(isinstance(part, str) for part in source)
    ):
        return _checked(
            _of_pair(
                *source, columns, origin := _Origin("(texts, labels)", skipped=skipped)
            ),
            origin,
        )
    return _checked(
        _of_items(source, columns, origin := _Origin("the list", skipped=skipped)),
        origin,
    )


@checked
def read(
    source: Any,
    *,
    text: str | None = None,
    label: str | None = None,
    group: str | Sequence[Any] | None = None,
) -> Labelled:
    """Labelled texts: all rows of a source, each with a label or none with one.

    `source` is whatever `rows` takes: a path, a shipped name, a frame, a Hugging Face
    dataset, `(texts, labels)`, a list. `text` and `label` name its columns. `group`
    says which texts belong together, such as paraphrases or the sentences of one
    document: a column, or a list with one value for each text.

    >>> cities = read("cities-incomplete")
    >>> len(cities.texts), sorted(set(cities.labels))
    (50, ['Montreal', 'Toronto'])
    >>> read([("a cat", "animal"), ("one cat", "animal"), ("a car", "thing")], group=[0, 0, 1]).groups
    (0, 0, 1)
    """
    column = group if isinstance(group, str) else None
    all_rows: list[Row] = []
    with progress.track("Reading") as advance:
        for row in _holdable(
            rows(source, text=text, label=label, group=column), source
        ):
            all_rows.append(row)
            advance(1)
    if not all_rows:
        raise _no_texts(source)
    name = _name(source)
    texts = tuple(row.text for row in all_rows)
    labels = _column(
        [row.label for row in all_rows], all_rows, label is not None, ("label", name)
    )
    if group is None or isinstance(group, str):
        listed = [row.group for row in all_rows]
    else:
        listed = _given_groups(group, len(all_rows), name)
    groups = _column(listed, all_rows, group is not None, ("group", name))
    _check_hashable(groups, name)
    return Labelled(texts, labels, name, groups)


def _no_texts(source: Any) -> TextError:
    remedy = "Give at least one."
    if isinstance(source, str | os.PathLike) and _name(source) != "stdin":
        return TextError(
            f"No texts in {Path(source).name!a}", "the file holds none", remedy
        )
    if _name(source) == UNNAMED:
        return TextError("No texts", "the list is empty", remedy)
    return TextError(f"No texts in {_name(source)}", "it holds none", remedy)


def _column(
    values: list[Any], all_rows: list[Row], required: bool, named: tuple[str, str]
) -> tuple[Any, ...] | None:
    """The labels or the groups of all texts, or None where no text has one; some with
    and some without are an error.
    """
    word, name = named
    missing = [
        row.line for row, value in zip(all_rows, values, strict=True) if value is None
    ]
    if not missing:
        return tuple(values)
    if not required and len(missing) == len(values):
        return None
    others = len(missing) - 1
    more = f", like {others:,} more of {len(values):,}" if others else ""
    reason = f"row {missing[0]:,} has no {word}{more}"
    raise TextError(
        f"Cannot read the {word}s of {name}",
        reason,
        f"Give every text a {word}, or none of them.",
    )


def _given_groups(group: Any, count: int, name: str) -> list[Any]:
    """The groups that a caller listed, one for each text."""
    problem = f"Cannot read the groups of {name}"
    if (
        isinstance(group, bytes | Mapping)
        or not isinstance(group, Collection)
        or getattr(group, "shape", None) == ()
    ):
        remedy = "Name a column, or give a list with one value for each text."
        raise TextError(problem, f"group is {_kind(group)}", remedy)
    if len(group) != count:
        reason = f"there are {count:,} texts and {len(group):,} groups"
        raise TextError(problem, reason, "Give one value for each text.")
    return [_plain(value) for value in group]


def _check_hashable(groups: tuple[Any, ...] | None, name: str) -> None:
    """Refuse groups that cannot be compared with one another, such as lists."""
    for value in groups or ():
        try:
            hash(value)
        except TypeError as error:
            reason = f"a group is {_kind(value)}, which cannot be told from others"
            raise TextError(
                f"Cannot read the groups of {name}", reason, "Give strings or numbers."
            ) from error


def _holdable(found: Iterator[Row], source: Any) -> Iterator[Row]:
    """The rows of a source, as long as they can be held in memory; what is in memory
    already has no limit.
    """
    if not (isinstance(source, str | os.PathLike) or hasattr(source, "read")):
        yield from found
        return
    characters = 0
    for count, row in enumerate(found, 1):
        characters += len(row.text)
        if count > MOST_TEXTS or characters > MOST_CHARACTERS:
            many = (
                f"{MOST_TEXTS:,} texts"
                if count > MOST_TEXTS
                else f"{MOST_CHARACTERS:,} characters"
            )
            reason = f"it has more than {many}, and all of them would be held in memory"
            remedy = (
                "Give it to hs.extract, which reads row by row; or split it, or give a"
                " list of texts."
            )
            raise TooLarge(f"Cannot read {_name(source)} as a whole", reason, remedy)
        yield row


def _name(source: Any) -> str:
    """A name for a source, without its folder and suffixes."""
    if isinstance(source, Labelled):
        return source.name
    given = (
        source
        if isinstance(source, str | os.PathLike)
        else getattr(source, "name", None)
    )
    if not isinstance(given, str | os.PathLike):
        return UNNAMED
    if str(given).partition(".")[0] == "-":
        return "stdin"
    name = Path(given).name
    for suffix in (*COMPRESSIONS, *FORMATS):
        name = name.removesuffix(suffix)
    return name or UNNAMED


def listed(texts: Iterable[Any]) -> list[Any]:
    """Return the texts, or the ids of a text, as a list; what no memory holds is
    refused at once.

    >>> listed(range(3))
    [0, 1, 2]
    >>> listed(range(10**12))
    Traceback (most recent call last):
    hiddenscope.errors.TextError: Cannot read the texts: a range has more than 4,194,304 items. Give a list of texts.
    """
    most = MOST_TEXTS if isinstance(texts, range) else LONGEST_LIST
    if isinstance(texts, Sized) and _has_more_than(texts, most):
        reason = f"a {type(texts).__name__} has more than {most:,} items"
        raise TextError("Cannot read the texts", reason, "Give a list of texts.")
    return list(texts)


def _has_more_than(items: Sized, most: int) -> bool:
    try:
        return len(items) > most
    except OverflowError:  # a range that is longer than any list
        return True


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file; a name that no file system accepts is not one.

    >>> is_file("a" * 9_999)
    False
    """
    return os.path.isfile(path)  # unlike Path's, this one never raises


def names_a_file(text: str) -> bool:
    """Whether a string ends as the name of a file of texts does: whoever has a text,
    not a path, gives it in a list.
    """
    return text.lower().endswith((*FORMATS, *COMPRESSIONS))


def _of_name(name: str, columns: Columns, skipped: Skipped | None) -> Iterator[Row]:
    if name.partition(".")[0] == "-":
        kind = _format(name) or _without(columns)
        if name != "-" and not _format(name):
            reason = "it names no known format"
            raise FileError(
                f"Cannot read stdin as {name!r}",
                reason,
                _formats("Write -.jsonl, for example"),
            )
        stdin = getattr(sys.stdin, "buffer", sys.stdin)
        return _checked(
            _of_file(stdin, kind, origin := _Origin("stdin", "line", skipped), columns),
            origin,
        )
    path = _shipped_path(name) or Path(name)
    kind = _format(path.name)
    if os.path.isdir(path):
        files = files_in(path)
        return chain.from_iterable(
            _of_name(os.fspath(file), columns, skipped) for file in files
        )
    if not is_file(path):
        raise _no_file(name, path)
    if not kind:
        reason = f"{path.suffix!r} is not a known format"
        raise FileError(
            f"Cannot read texts from {name!a}", reason, _formats("Rename it")
        )
    origin = _Origin(path.name, "row" if kind == ".parquet" else "line", skipped)
    return _checked(_of_path(path, kind, origin, columns), origin)


def _of_path(
    path: Path, kind: str, origin: _Origin, columns: Columns
) -> Iterator[RawRow]:
    try:
        stream = path.open("rb")
    except OSError as error:
        reason = str(error.strerror or error)
        raise FileError(
            f"Cannot read {origin.name}", reason, "Give a file that can be read."
        ) from error
    with stream:
        yield from _of_file(stream, kind, origin, columns)


def _shipped_path(name: str) -> Path | None:
    return next(
        (
            path
            for path in SHIPPED.iterdir()
            if path.stem == name and path.suffix in FORMATS
        ),
        None,
    )


def _no_file(name: str, path: Path) -> FileError:
    problem, names = f"Cannot read texts from {name[:80]!a}", shipped()
    near = difflib.get_close_matches(name.lower(), names, 1, 0.6)
    if near:
        reason = "there is no such file, and no shipped dataset of that name"
        return FileError(problem, reason, f"Did you mean {near[0]!r}?")
    remedy = (
        f"Give a path, one of {', '.join(names)}, or for a single text a list: [text]."
    )
    return FileError(problem, "there is no such file", remedy)


def _format(name: str) -> str:
    """The format that a name's suffix says, without its compression; empty if none."""
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    suffix = Path(f"x{name}").suffix.lower()
    return suffix if suffix in FORMATS else ""


def _formats(remedy: str) -> str:
    return (
        f"{remedy}. The formats are {', '.join(FORMATS)}, and each of these with"
        f" {' or '.join(COMPRESSIONS)}."
    )


def _without(columns: Columns) -> str:
    """The format of a source without a suffix: lines of text, or lines of JSON if
    columns are named.
    """
    return ".txt" if columns == Columns() else ".jsonl"


def _of_file(
    stream: Any, kind: str, origin: _Origin, columns: Columns
) -> Iterator[RawRow]:
    with decompressed(stream, origin.name) as plain:
        if kind == ".parquet":
            yield from _parquet(plain, origin, columns)
        elif kind == ".txt":
            _no_columns(columns, origin)
            yield from (RawRow(line, string) for line, string in _lines(plain, origin))
        elif kind == ".jsonl":
            yield from _of_records(_json(plain, origin), columns, origin)
        else:
            yield from _csv(plain, "\t" if kind == ".tsv" else ",", origin, columns)


def _decoded(
    stream: Iterable[bytes | str], origin: _Origin
) -> Iterator[tuple[int, str]]:
    """The lines with their ends, each decoded by itself, so that an error has its
    number.
    """
    for number, line in enumerate(_bounded(stream, origin), 1):
        try:
            string = line if isinstance(line, str) else line.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = (
                f"it is not UTF-8 (byte {error.start + 1} of the line is"
                f" 0x{error.object[error.start]:02x})"
            )
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
            raise FileError(
                f"Cannot read {origin.name}", reason, "Remove them, if it is yours."
            )
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
            origin.refuse(
                number,
                f"it is not JSON ({error})",
                "Correct the line, or remove it.",
                error,
            )
            continue
        yield number, record


def _csv(
    stream: Iterable[bytes | str], delimiter: str, origin: _Origin, columns: Columns
) -> Iterator[RawRow]:
    """The rows of a table of separated values, read strictly, each with the line that
    it begins on.

    pandas would fill up a row that lacks a column, accept characters behind a closing
    quote, and not know the line of a row when a quoted text holds line breaks.
    """
    reader = csv.reader(
        (line for _, line in _decoded(stream, origin)), delimiter=delimiter, strict=True
    )
    header: list[str] | None = None
    chosen: ChosenColumns | None = None
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
            chosen = _chosen(header, header, columns, origin, by_header=True)
        elif cells and header is not None and chosen is not None:
            if len(cells) != len(header):
                reason = (
                    f"it has {len(cells)} columns and the header {len(header)}"
                    f" ({', '.join(header)[:200]})"
                )
                origin.refuse(
                    begin, reason, "Quote what holds a separator, or correct the line."
                )
            else:
                by_name = {
                    name: cell or None for name, cell in zip(header, cells, strict=True)
                }
                yield _of_record(begin, by_name, chosen)._replace(
                    text=by_name[chosen.text] or ""
                )
        begin = reader.line_num + 1


def _next_row(reader: Any) -> list[str] | None:
    """The next row, with longer fields than the csv module accepts by default: its
    limit is the whole process's.
    """
    with _csv_limit:
        before = csv.field_size_limit(LONGEST_FIELD)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)


def _parquet(stream: Any, origin: _Origin, columns: Columns) -> Iterator[RawRow]:
    if not (hasattr(stream, "seekable") and stream.seekable()):
        remedy = "Give the .parquet file itself: it is compressed inside already."
        raise FileError(
            f"Cannot read {origin.name}",
            "parquet is read from its end and cannot be streamed",
            remedy,
        )
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream)
        kinds = {field.name: field.type for field in file.schema_arrow}
        strings = [
            name
            for name, kind in kinds.items()
            if str(kind) in ("string", "large_string", "string_view")
        ]
        chosen = _chosen(list(kinds), strings, columns, origin)
        names = chosen.names
        check_growth(file.metadata, names, origin.name)
        # A page may name one long string a million times: as a dictionary it is in
        # memory once.
        coded = [name for name in names if name in strings]
        file = parquet.ParquetFile(
            stream, metadata=file.metadata, read_dictionary=coded
        )
        number = 0
        for batch in file.iter_batches(PARQUET_BATCH, columns=names):
            values = {name: column_values(batch.column(name)) for name in names}
            for cells in _of_columns(values, chosen, number + 1):
                yield cells
                number = cells.line
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, FileError):
            raise
        reason = f"it is not a complete parquet file ({error})"
        raise FileError(
            f"Cannot read {origin.name}", reason, "Make or download it again."
        ) from error


def _of_records(
    records: Iterator[tuple[int, Any]], columns: Columns, origin: _Origin
) -> Iterator[RawRow]:
    """Rows that are mappings, or all of them strings; the first decides which columns
    are read.
    """
    first = next(records, None)
    if first is None:
        return
    if isinstance(first[1], str):
        _no_columns(columns, origin)
        yield from (
            RawRow(number, record) for number, record in chain([first], records)
        )
        return
    chosen: ChosenColumns | None = None
    for number, record in chain([first], records):
        if not isinstance(record, Mapping):
            reason = f"it is {_kind(record)} and not a row with columns"
            origin.refuse(number, reason, "Correct it, or remove it.")
            continue
        if chosen is None:
            strings = [name for name, value in record.items() if isinstance(value, str)]
            chosen = _chosen(list(record), strings, columns, origin)
        needed = (chosen.text, columns.label, columns.group)
        missing = [name for name in needed if name is not None and name not in record]
        if missing:
            reason = f"it has no {missing[0]!r}, only {_listed(list(record))}"
            origin.refuse(number, reason, "Correct it, or remove it.")
            continue
        yield _of_record(number, record, chosen)


def _of_record(number: int, record: Mapping[Any, Any], chosen: ChosenColumns) -> RawRow:
    """The cells of one row by the names of their columns."""
    label = None if chosen.label is None else record.get(chosen.label)
    group = None if chosen.group is None else record.get(chosen.group)
    return RawRow(number, record[chosen.text], label, group)


def _of_items(source: Any, columns: Columns, origin: _Origin) -> Iterator[RawRow]:
    if isinstance(source, Mapping):
        splits = [
            str(name) for name, part in source.items() if hasattr(part, "column_names")
        ]
        reason = (
            f"it has the splits {_listed(splits)}"
            if splits
            else f"it is a mapping with {_listed(list(source))}"
        )
        remedy = (
            f"Give one of them: data[{splits[0]!r}]."
            if splits
            else "Give (texts, labels), or a list of rows."
        )
        raise TextError("Cannot read texts from a mapping", reason, remedy)
    if (
        not isinstance(source, Iterable)
        or isinstance(source, bytes)
        or getattr(source, "shape", None) == ()
    ):
        remedy = (
            "Give a path, a list of strings, (texts, labels), a frame or a Hugging Face"
            " dataset."
        )
        raise TextError("Cannot read texts", f"the source is {_kind(source)}", remedy)
    items = iter(source)
    first = next(items, UNNAMED)
    if _is_pair(first):
        yield from _of_pairs(chain([first], items), columns, origin)
    elif first is not UNNAMED:
        yield from _of_records(enumerate(chain([first], items), 1), columns, origin)


def _is_pair(item: Any) -> bool:
    """Whether an item of a list is a text with its label."""
    return (
        isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)
    )


def _of_pairs(
    pairs: Iterable[Any], columns: Columns, origin: _Origin
) -> Iterator[RawRow]:
    """Rows that are `(text, label)` each."""
    _no_columns(columns, origin)
    for number, pair in enumerate(pairs, 1):
        if isinstance(pair, tuple | list) and len(pair) == 2:
            yield RawRow(number, *pair)
        else:
            reason = f"it is {_kind(pair)} and not a (text, label) pair like the first"
            origin.refuse(number, reason, "Correct it, or remove it.")


def _of_pair(
    texts: Any, labels: Any, columns: Columns, origin: _Origin
) -> Iterator[RawRow]:
    _no_columns(columns, origin)
    if not (hasattr(texts, "__len__") and hasattr(labels, "__len__")):
        reason = f"the texts are {_kind(texts)} and the labels {_kind(labels)}"
        raise TextError("Cannot read (texts, labels)", reason, "Give two lists.")
    if _has_more_than(texts, LONGEST_LIST):
        reason = f"a {type(texts).__name__} has more than {LONGEST_LIST:,} items"
        raise TextError("Cannot read (texts, labels)", reason, "Give two lists.")
    if len(texts) != len(labels):
        reason = f"there are {len(texts):,} texts and {len(labels):,} labels"
        raise TextError(
            "Cannot read (texts, labels)", reason, "Give one label for each text."
        )
    yield from starmap(
        RawRow, zip(range(1, len(texts) + 1), texts, labels, strict=True)
    )


def _of_labelled(
    source: Labelled, columns: Columns, origin: _Origin
) -> Iterator[RawRow]:
    _no_columns(columns, origin)
    nothing = [None] * len(source)
    labels, groups = source.labels or nothing, source.groups or nothing
    yield from starmap(
        RawRow,
        zip(range(1, len(source) + 1), source.texts, labels, groups, strict=True),
    )


def _of_frame(frame: Any, columns: Columns, origin: _Origin) -> Iterator[RawRow]:
    names = [name for name in frame.columns if isinstance(name, str)]
    once = [name for name, count in Counter(names).items() if count == 1]
    strings = [
        name for name in once if len(frame) and isinstance(next(iter(frame[name])), str)
    ]
    chosen = _chosen(names, strings, columns, origin)
    yield from _of_columns({name: frame[name] for name in chosen.names}, chosen, 1)


def _of_columns(
    values: Mapping[str, Any], chosen: ChosenColumns, first: int
) -> Iterator[RawRow]:
    """Rows from whole columns, numbered from the first."""
    texts = values[chosen.text]
    nothing = [None] * len(texts)
    labels = nothing if chosen.label is None else values[chosen.label]
    groups = nothing if chosen.group is None else values[chosen.group]
    numbers = range(first, first + len(texts))
    yield from starmap(RawRow, zip(numbers, texts, labels, groups, strict=True))


def _of_dataset(dataset: Any, columns: Columns, origin: _Origin) -> Iterator[RawRow]:
    """A Hugging Face dataset; class labels are given by their names."""
    if isinstance(dataset.column_names, Mapping):
        yield from _of_items(dataset, columns, origin)
        return
    features = getattr(dataset, "features", None) or {}
    names = list(dataset.column_names or features)
    # A streamed dataset, whose columns are not known before its first row.
    if not names:
        yield from _of_items(iter(dataset), columns, origin)
        return
    strings = [
        name
        for name in names
        if getattr(features.get(name), "dtype", None) in ("string", "large_string")
    ]
    chosen = _chosen(names, strings, columns, origin)
    class_name = getattr(features.get(chosen.label), "int2str", None)
    for number, row in enumerate(dataset.select_columns(chosen.names), 1):
        cells = _of_record(number, row, chosen)
        if class_name is None:
            yield cells
            continue
        # -1 stands for a label that is missing.
        known = isinstance(cells.label, int) and cells.label >= 0
        yield cells._replace(label=class_name(cells.label) if known else None)


def _chosen(
    names: Sequence[str],
    strings: Sequence[str],
    columns: Columns,
    origin: _Origin,
    *,
    by_header: bool = False,
) -> ChosenColumns:
    """The columns of the texts and of the labels: those that are named, or the obvious
    ones; groups only if named.
    """
    problem = f"Cannot choose the columns of {origin.name}"
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise TextError(
            problem, f"two are called {twice!r}", "Give each a name of its own."
        )
    for column in columns:
        if column is not None and column not in names:
            near = difflib.get_close_matches(column, names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Name one of these."
            raise TextError(
                f"No column {column!r} in {origin.name}",
                f"it has {_listed(names)}",
                remedy,
            )
    label = columns.label or _obvious(names, LABEL_NAMES, problem, "label")
    text = columns.text or _obvious(names, TEXT_NAMES, problem, "text")
    if text is None:
        others = [name for name in strings if name not in (label, columns.group)]
        if len(others) != 1 or (by_header and not re.fullmatch(r"[\w.-]+", others[0])):
            reason = f"they are {_listed(names)}, and none is plainly the text"
            raise TextError(
                problem, reason, 'Name the one that is: text="..." (and label="...").'
            )
        text = others[0]
    if text == label:
        raise TextError(
            problem,
            f"{text!r} would be both text and label",
            'Name another: text="...", label="...".',
        )
    return ChosenColumns(text, label, columns.group)


def _obvious(
    names: Sequence[str], known: Sequence[str], problem: str, what: str
) -> str | None:
    """The column with the first of the known names; several with later ones are
    ambiguous.
    """
    matching = [name for like in known for name in names if name.lower() == like]
    if len(matching) > 1 and matching[0].lower() != known[0]:
        reason = f"{_listed(matching)} could each be the {what}"
        raise TextError(problem, reason, f'Name the one that is: {what}="...".')
    return matching[0] if matching else None


def _no_columns(columns: Columns, origin: _Origin) -> None:
    named = next((name for name in columns if name is not None), None)
    if named is None:
        return
    remedy = "Leave text= and label= out."
    if columns.group is not None:
        remedy = "Give group= a list with one value for each text."
    raise TextError(
        f"No column {named!r} in {origin.name}", "it has no columns", remedy
    )


def _checked(cells: Iterator[RawRow], origin: _Origin) -> Iterator[Row]:
    for line, text, label, group in cells:
        if not isinstance(text, str):
            origin.refuse(line, f"the text is {_kind(text)}", "Give a string.")
        elif not text.strip():
            origin.refuse(line, "the text is empty", "Remove the row, or fill it in.")
        elif broken := _with_surrogates(text, label, group):
            what = broken[0]
            origin.refuse(
                line,
                f"the {what} holds half of a character (a lone surrogate)",
                "Save it as UTF-8 again.",
            )
        else:
            yield Row(str(text), _plain(label), line, _plain(group))


def _with_surrogates(text: Any, label: Any, group: Any) -> list[str]:
    """Which parts of a row hold half of a character."""
    parts = {"text": text, "label": label, "group": group}
    return [name for name, part in parts.items() if _has_surrogate(part)]


def _has_surrogate(part: Any) -> bool:
    return (
        isinstance(part, str)
        and not part.isascii()
        and any("\ud800" <= char <= "\udfff" for char in part)
    )


def _plain(label: Any) -> Any:
    """A label as a plain Python value, None where it is missing."""
    if hasattr(label, "item") and not getattr(label, "shape", ()):
        label = label.item()
    missing = type(label).__name__ in ("NAType", "NaTType") or (
        isinstance(label, float) and label != label
    )
    return None if missing else label


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _listed(names: Sequence[Any]) -> str:
    quoted = [ascii(str(name)[:40]) for name in names[:12]]
    return (
        ", ".join(
            [*quoted, f"and {len(names) - 12} more"] if len(names) > 12 else quoted
        )
        or "none"
    )
