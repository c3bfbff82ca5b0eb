"""The reader of texts and labelled data, from files, stdin, frames, datasets and lists.

`rows` streams, so that a file may be larger than memory; `read` returns everything at
once, checked.

>>> read(["a cat", "a dog"]).texts
('a cat', 'a dog')
>>> [row.label for row in rows((["a cat", "a dog"], [0, 1]))]
[0, 1]
"""

import difflib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import FileError, TextError, TooLarge
from hiddenscope.texts.columns import Columns
from hiddenscope.texts.files import (
    COMPRESSIONS,
    FORMATS,
    files_in,
    format_of,
    is_file,
    read_path,
    read_stream,
    unit_of,
)
from hiddenscope.texts.objects import describe_object, read_object
from hiddenscope.texts.row import (
    Labelled,
    Origin,
    Row,
    Skipped,
    check_rows,
    kind_of,
    plain_value,
)

SHIPPED = Path(__file__).parent / "datasets"
UNNAMED = "the texts"
# What `read` holds in memory from one file. `rows` has no such limit.
MOST_TEXTS = 2**22
MOST_CHARACTERS = 2**30


def shipped() -> tuple[str, ...]:
    """Return the names of the datasets that come with the package.

    >>> "cities-incomplete" in shipped()
    True
    """
    return tuple(sorted(_shipped_paths()))


def rows(
    source: Any,
    *,
    text: str | None = None,
    label: str | None = None,
    group: str | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Row]:
    """Yield the rows of a source one after another, never all of them in memory.

    A source is the path of a .txt (one text per line), .jsonl, .csv, .tsv or .parquet
    file, which may be compressed as .gz or .zst; a folder of such files; "-" for stdin
    ("-.csv" names its format); an open file; the name of a shipped dataset; a frame; a
    Hugging Face dataset; a list of strings or of `(text, label)` pairs; `(texts,
    labels)`; or the result of `read`. `text`, `label` and `group` name columns. If text
    and label are not named, a column with an obvious name is taken, or the only one
    that holds text; groups are read only from a column that is named. Of a .txt file,
    text="file" takes the whole as one text, and label="folder" the name of its folder.
    Labels of a .csv are strings; blank lines of a file are skipped. With `skipped`, a
    broken row is not an error: it is left out, and that function is given the error
    that names it.

    >>> next(rows("cities-complete")).label
    'Toronto'
    """
    columns = Columns(text, label, group)
    if isinstance(source, str | os.PathLike):
        return _rows_of_name(os.fspath(source), columns, skipped)
    if hasattr(source, "read"):
        name = Path(str(getattr(source, "name", ""))).name
        kind = format_of(name)
        if not kind:
            name = "the open file"
        return _rows_of_stream(source, kind, name, columns, skipped)
    origin = Origin(describe_object(source), skipped=skipped)
    return check_rows(read_object(source, columns, origin), origin)


@checked
def read(
    source: Any,
    *,
    text: str | None = None,
    label: str | None = None,
    group: str | Sequence[object] | None = None,
) -> Labelled:
    """Read all texts of a source, each with a label or none with one.

    `source` is whatever `rows` takes: a path, a shipped name, a frame, a Hugging Face
    dataset, `(texts, labels)`, a list. `text` and `label` name its columns. `group`
    says which texts belong together, such as paraphrases or the sentences of one
    document: a column, or a list with one value for each text.

    >>> cities = read("cities-incomplete")
    >>> len(cities.texts), sorted(set(cities.labels))
    (50, ['Montreal', 'Toronto'])
    >>> pairs = [("a cat", "animal"), ("one cat", "animal"), ("a car", "thing")]
    >>> read(pairs, group=[0, 0, 1]).groups
    (0, 0, 1)
    """
    column = group if isinstance(group, str) else None
    source_rows = rows(source, text=text, label=label, group=column)
    # What is in memory already has no limit.
    if isinstance(source, str | os.PathLike) or hasattr(source, "read"):
        source_rows = _bounded(source_rows, source)
    all_rows: list[Row] = []
    with progress.track("Reading") as advance:
        for row in source_rows:
            all_rows.append(row)
            advance(1)
    if not all_rows:
        raise _no_texts(source)
    name = _name(source)
    labels = _whole_column(
        [row.label for row in all_rows], all_rows, label is not None, "label", name
    )
    if group is None or isinstance(group, str):
        values: list[object] = [row.group for row in all_rows]
    else:
        values = _check_groups(group, len(all_rows), name)
    groups = _whole_column(values, all_rows, group is not None, "group", name)
    _check_hashable(groups, name)
    return Labelled(tuple(row.text for row in all_rows), labels, name, groups)


def _rows_of_name(
    name: str, columns: Columns, skipped: Skipped | None
) -> Iterator[Row]:
    if _is_stdin(name):
        kind = format_of(name)
        if name != "-" and not kind:
            raise FileError(
                f"Cannot read stdin as {name!r}",
                "it names no known format",
                _list_formats("Write -.jsonl, for example"),
            )
        stdin = getattr(sys.stdin, "buffer", sys.stdin)
        return _rows_of_stream(stdin, kind, "stdin", columns, skipped)
    path = _shipped_paths().get(name, Path(name))
    if os.path.isdir(path):
        files = [os.fspath(file) for file in files_in(path)]
        parts = (_rows_of_name(file, columns, skipped) for file in files)
        return chain.from_iterable(parts)
    if not is_file(path):
        raise _no_file(name)
    kind = format_of(path.name)
    if not kind:
        raise FileError(
            f"Cannot read texts from {name!a}",
            f"{path.suffix!r} is not a known format",
            _list_formats("Rename it"),
        )
    origin = Origin(path.name, unit_of(kind), skipped)
    return check_rows(read_path(path, kind, origin, columns), origin)


def _rows_of_stream(
    stream: Any, kind: str, name: str, columns: Columns, skipped: Skipped | None
) -> Iterator[Row]:
    if not kind:
        # Lines of text, or lines of JSON if columns are named.
        kind = ".txt" if columns == Columns() else ".jsonl"
    unit = "line" if name == "stdin" else unit_of(kind)
    origin = Origin(name, unit, skipped)
    return check_rows(read_stream(stream, kind, origin, columns), origin)


def _is_stdin(name: str) -> bool:
    return name.partition(".")[0] == "-"


def _shipped_paths() -> dict[str, Path]:
    paths = {}
    for path in SHIPPED.iterdir():
        if path.suffix in FORMATS:
            paths[path.stem] = path
    return paths


def _no_file(name: str) -> FileError:
    problem = f"Cannot read texts from {name[:80]!a}"
    names = shipped()
    near = difflib.get_close_matches(name.lower(), names, 1, 0.6)
    if near:
        reason = "there is no such file, and no shipped dataset of that name"
        return FileError(problem, reason, f"Did you mean {near[0]!r}?")
    remedy = (
        f"Give a path, one of {', '.join(names)}, or for a single text a list: [text]."
    )
    return FileError(problem, "there is no such file", remedy)


def _list_formats(remedy: str) -> str:
    return (
        f"{remedy}. The formats are {', '.join(FORMATS)}, and each of these with"
        f" {' or '.join(COMPRESSIONS)}."
    )


def _no_texts(source: object) -> TextError:
    name = _name(source)
    remedy = "Give at least one."
    if isinstance(source, str | os.PathLike) and name != "stdin":
        file = Path(source).name
        return TextError(f"No texts in {file!a}", "the file holds none", remedy)
    if name == UNNAMED:
        return TextError("No texts", "the list is empty", remedy)
    return TextError(f"No texts in {name}", "it holds none", remedy)


def _name(source: object) -> str:
    """Return a name for a source, without its folder and suffixes."""
    if isinstance(source, Labelled):
        return source.name
    path = source
    if not isinstance(source, str | os.PathLike):
        path = getattr(source, "name", None)
    if not isinstance(path, str | os.PathLike):
        return UNNAMED
    if _is_stdin(str(path)):
        return "stdin"
    name = Path(path).name
    for suffix in (*COMPRESSIONS, *FORMATS):
        name = name.removesuffix(suffix)
    return name or UNNAMED


def _bounded(source_rows: Iterator[Row], source: object) -> Iterator[Row]:
    """Yield the rows of a file as long as they can be held in memory."""
    characters = 0
    for count, row in enumerate(source_rows, 1):
        characters += len(row.text)
        limit = ""
        if count > MOST_TEXTS:
            limit = f"{MOST_TEXTS:,} texts"
        elif characters > MOST_CHARACTERS:
            limit = f"{MOST_CHARACTERS:,} characters"
        if limit:
            raise TooLarge(
                f"Cannot read {_name(source)} as a whole",
                f"it has more than {limit}, and all of them would be held in memory",
                "Give it to hs.extract, which reads row by row; or split it, or give a"
                " list of texts.",
            )
        yield row


def _whole_column(
    values: list[object], all_rows: list[Row], required: bool, word: str, name: str
) -> tuple[object, ...] | None:
    """Return the labels or groups of all texts, None if no text has one.

    Some with and some without are an error.
    """
    missing = []
    for row, value in zip(all_rows, values, strict=True):
        if value is None:
            missing.append(row.line)
    if not missing:
        return tuple(values)
    if not required and len(missing) == len(values):
        return None
    reason = f"row {missing[0]:,} has no {word}"
    if len(missing) > 1:
        reason += f", like {len(missing) - 1:,} more of {len(values):,}"
    raise TextError(
        f"Cannot read the {word}s of {name}",
        reason,
        f"Give every text a {word}, or none of them.",
    )


def _check_groups(group: Any, count: int, name: str) -> list[Any]:
    """Return the groups that a caller listed, one for each text."""
    problem = f"Cannot read the groups of {name}"
    is_scalar = getattr(group, "shape", None) == ()
    is_list = isinstance(group, Collection) and not isinstance(group, bytes | Mapping)
    if is_scalar or not is_list:
        remedy = "Name a column, or give a list with one value for each text."
        raise TextError(problem, f"group is {kind_of(group)}", remedy)
    if len(group) != count:
        reason = f"there are {count:,} texts and {len(group):,} groups"
        raise TextError(problem, reason, "Give one value for each text.")
    return [plain_value(value) for value in group]


def _check_hashable(groups: tuple[object, ...] | None, name: str) -> None:
    """Refuse groups that cannot be compared with one another, such as lists."""
    for value in groups or ():
        try:
            hash(value)
        except TypeError as error:
            reason = f"a group is {kind_of(value)}, which cannot be told from others"
            raise TextError(
                f"Cannot read the groups of {name}", reason, "Give strings or numbers."
            ) from error
