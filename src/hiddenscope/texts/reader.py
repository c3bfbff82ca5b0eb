"""The reader of texts and labelled data, from files, stdin, frames, datasets and lists.

`rows` streams, so that a file may be larger than memory; `read` returns everything at
once, checked. Three small datasets come with the package, and are read by name:

cities-incomplete  50 sentences that stop just before Toronto or Montreal, the label
cities-complete    50 sentences about one city or the other, each ending in a full stop
plain              plain English sentences, without labels

>>> read(["a cat", "a dog"]).texts
('a cat', 'a dog')
>>> [row.label for row in rows((["a cat", "a dog"], [0, 1]))]
[0, 1]
"""

import difflib
import os
import sys
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import FileError, TextError, TooLarge
from hiddenscope.texts.files import (
    COMPRESSIONS,
    FORMATS,
    files_in,
    format_of,
    read_path,
    read_records,
    read_stream,
)
from hiddenscope.texts.row import (
    Columns,
    Labelled,
    Origin,
    RawRow,
    Row,
    Skipped,
    check_rows,
    kind_of,
    plain_value,
    quote_names,
    rows_of_columns,
    select_columns,
)

SHIPPED = Path(__file__).parent / "datasets"
UNNAMED = "the texts"
# A name that no column has.
NO_COLUMN = "?"
# What `read` holds in memory from one file. `rows` has no such limit.
MOST_TEXTS = 2**22
MOST_CHARACTERS = 2**30
# Items of a range that are made a list.
LONGEST_RANGE = 2**22


def shipped() -> tuple[str, ...]:
    """Return the names of the datasets that come with the package.

    >>> "cities-incomplete" in shipped()
    True
    """
    return tuple(sorted(path.stem for path in SHIPPED.iterdir()))


def as_list(texts: Iterable[Any]) -> list[Any]:
    """Return the texts, or the ids of a text, as a list that memory can hold.

    >>> as_list(range(3))
    [0, 1, 2]
    >>> as_list(range(10**12))
    Traceback (most recent call last):
    hiddenscope.errors.TextError: Cannot read the texts: a range has more than 4,194,304 items. Give a list of texts.
    """  # noqa: E501
    # A range takes no memory itself, and may be longer than any list.
    if isinstance(texts, range) and texts[LONGEST_RANGE:]:
        reason = f"a range has more than {LONGEST_RANGE:,} items"
        raise TextError("Cannot read the texts", reason, "Give a list of texts.")
    return list(texts)


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
        if not format_of(name):
            name = "the open file"
        return _rows_of_stream(source, name, format_of(name), columns, skipped)
    name = "the list"
    read_object: Callable[[Any, Columns, Origin], Iterator[RawRow]] = _of_items
    # pandas, and polars.
    iterates = hasattr(source, "itertuples") or hasattr(source, "iter_rows")
    is_two = isinstance(source, tuple) and len(source) == 2
    if isinstance(source, Labelled):
        name, read_object = source.name, _of_labelled
    elif iterates and hasattr(source, "columns"):
        name, read_object = "the frame", _of_frame
    # A Hugging Face dataset; several splits of it are a mapping.
    elif hasattr(source, "column_names") and not isinstance(source, Mapping):
        name, read_object = "the dataset", _of_dataset
    # Two strings are a list of two texts.
    elif is_two and not any(isinstance(part, str) for part in source):
        name, read_object = "(texts, labels)", _of_pair
    origin = Origin(name, skipped=skipped)
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
    name = _name(source)
    is_path = isinstance(source, str | os.PathLike)
    # What is in memory already has no limit.
    is_bounded = is_path or hasattr(source, "read")
    characters = 0
    all_rows = []
    with progress.track("Reading") as advance:
        for row in rows(source, text=text, label=label, group=column):
            all_rows.append(row)
            characters += len(row.text)
            advance(1)
            limit = ""
            if len(all_rows) > MOST_TEXTS:
                limit = f"{MOST_TEXTS:,} texts"
            elif characters > MOST_CHARACTERS:
                limit = f"{MOST_CHARACTERS:,} characters"
            if limit and is_bounded:
                reason = f"it has more than {limit}, and all of them would be held"
                raise TooLarge(
                    f"Cannot read {name} as a whole",
                    f"{reason} in memory",
                    "Give it to hs.extract, which reads row by row; or split it, or"
                    " give a list of texts.",
                )
    if not all_rows and name == UNNAMED:
        raise TextError("No texts", "the list is empty", "Give at least one.")
    if not all_rows:
        file = repr(Path(source).name) if is_path else name
        raise TextError(f"No texts in {file}", "it holds none", "Give at least one.")
    labels = [row.label for row in all_rows]
    groups = [row.group for row in all_rows]
    if group is not None and not isinstance(group, str):
        groups = _listed_groups(group, len(all_rows), name)
    for value in groups:
        if not isinstance(value, Hashable):
            reason = f"a group is {kind_of(value)}, which cannot be told from others"
            raise TextError(
                f"Cannot read the groups of {name}", reason, "Give strings or numbers."
            )
    lines = [row.line for row in all_rows]
    whole_labels = _whole_column("label", labels, lines, label is not None, name)
    return Labelled(
        tuple(row.text for row in all_rows),
        whole_labels,
        name,
        _whole_column("group", groups, lines, group is not None, name),
        # To be named where labels are wanted.
        _columns(source) if whole_labels is None else "",
    )


def _columns(source: Any) -> str:
    """Return the columns of a file or a frame in words, or nothing."""
    is_file = isinstance(source, str | os.PathLike) and os.path.isfile(source)
    if is_file or hasattr(source, "columns"):
        try:
            next(rows(source, label=NO_COLUMN))
        except TextError as refusal:
            if NO_COLUMN in refusal.problem and "no columns" not in refusal.reason:
                return refusal.reason.removeprefix("it has ")
    return ""


def _rows_of_name(
    name: str, columns: Columns, skipped: Skipped | None
) -> Iterator[Row]:
    kind = format_of(name)
    formats = (
        f"The formats are {', '.join(FORMATS)}, and each of these with"
        f" {' or '.join(COMPRESSIONS)}."
    )
    if _is_stdin(name):
        if name != "-" and not kind:
            reason = "it names no known format"
            remedy = f"Write -.jsonl, for example. {formats}"
            raise FileError(f"Cannot read stdin as {name!r}", reason, remedy)
        stdin = getattr(sys.stdin, "buffer", sys.stdin)
        return _rows_of_stream(stdin, "stdin", kind, columns, skipped)
    path = Path(name)
    names = shipped()
    if name in names:
        path = next(SHIPPED.glob(f"{name}.*"))
        kind = path.suffix
    if os.path.isdir(path):
        files = [os.fspath(file) for file in files_in(path)]
        parts = (_rows_of_name(file, columns, skipped) for file in files)
        return chain.from_iterable(parts)
    problem = f"Cannot read texts from {name[:80]!a}"
    # Unlike that of Path, this one raises nothing for a name that no file can have.
    if not os.path.isfile(path):
        near = difflib.get_close_matches(name.lower(), names, 1, 0.6)
        if near:
            reason = "there is no such file, and no shipped dataset of that name"
            raise FileError(problem, reason, f"Did you mean {near[0]!r}?")
        remedy = f"Give a path, one of {', '.join(names)}, or for a single text a list:"
        raise FileError(problem, "there is no such file", f"{remedy} [text].")
    if not kind:
        reason = f"{path.suffix!r} is not a known format"
        raise FileError(problem, reason, f"Rename it. {formats}")
    origin = Origin(path.name, "row" if kind == ".parquet" else "line", skipped)
    return check_rows(read_path(path, kind, origin, columns), origin)


def _rows_of_stream(
    stream: Any, name: str, kind: str, columns: Columns, skipped: Skipped | None
) -> Iterator[Row]:
    if not kind:
        # Lines of text, or lines of JSON if columns are named.
        kind = ".txt" if columns == Columns() else ".jsonl"
    origin = Origin(name, "row" if kind == ".parquet" else "line", skipped)
    return check_rows(read_stream(stream, kind, origin, columns), origin)


def _is_stdin(name: str) -> bool:
    return name.partition(".")[0] == "-"


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


def _whole_column(
    word: str, values: list[object], lines: list[int], required: bool, name: str
) -> tuple[object, ...] | None:
    """Return the labels or groups of all texts, None if no text has one.

    Some with and some without are an error.
    """
    missing = [line for line, value in zip(lines, values, strict=True) if value is None]
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


def _listed_groups(group: Any, count: int, name: str) -> list[Any]:
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


def _of_labelled(
    source: Labelled, columns: Columns, origin: Origin
) -> Iterator[RawRow]:
    columns.refuse_names(origin)
    yield from rows_of_columns(source.texts, source.labels, source.groups)


def _of_frame(frame: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    names = [name for name in frame.columns if isinstance(name, str)]
    # The first cell tells the type.
    first = {name: next(iter(frame[name]), None) for name in names}
    strings = [name for name, cell in first.items() if isinstance(cell, str)]
    selected = select_columns(names, strings, columns, origin)
    values = {name: frame[name] for name in selected.names}
    yield from selected.rows(values)


def _of_dataset(dataset: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    """Yield the rows of a Hugging Face dataset, with class labels by their names."""
    features = getattr(dataset, "features", None) or {}
    names = list(dataset.column_names or features)
    # A streamed dataset, whose columns are not known before its first row.
    if not names:
        yield from _of_items(iter(dataset), columns, origin)
        return
    kinds = {name: getattr(features.get(name), "dtype", None) for name in names}
    strings = [name for name in names if kinds[name] in ("string", "large_string")]
    selected = select_columns(names, strings, columns, origin)
    class_name = getattr(features.get(selected.label), "int2str", None)
    for number, record in enumerate(dataset.select_columns(selected.names), 1):
        row = selected.row(number, record)
        if class_name is not None:
            # -1 stands for a label that is missing.
            known = isinstance(row.label, int) and row.label >= 0
            row = row._replace(label=class_name(row.label) if known else None)
        yield row


def _of_pair(source: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    columns.refuse_names(origin)
    problem = "Cannot read (texts, labels)"
    if not all(hasattr(part, "__len__") for part in source):
        kinds = " and the labels ".join(map(kind_of, source))
        reason = f"the texts are {kinds}"
        raise TextError(problem, reason, "Give two lists.")
    texts, labels = map(as_list, source)
    if len(texts) != len(labels):
        reason = f"there are {len(texts):,} texts and {len(labels):,} labels"
        raise TextError(problem, reason, "Give one label for each text.")
    yield from rows_of_columns(texts, labels)


def _of_items(source: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    if isinstance(source, Mapping):
        reason = f"it is a mapping with {quote_names(list(source))}"
        remedy = "Give (texts, labels), or a list of rows."
        # A Hugging Face dataset with several splits.
        splits = [name for name in source if hasattr(source[name], "column_names")]
        if splits:
            reason = f"it has the splits {quote_names(splits)}"
            remedy = f"Give one of them: data[{splits[0]!r}]."
        raise TextError("Cannot read texts from a mapping", reason, remedy)
    is_scalar = getattr(source, "shape", None) == ()
    if not isinstance(source, Iterable) or isinstance(source, bytes) or is_scalar:
        raise TextError(
            "Cannot read texts",
            f"the source is {kind_of(source)}",
            "Give a path, a list of strings, (texts, labels), a frame or a Hugging Face"
            " dataset.",
        )
    items = iter(source)
    first = list(islice(items, 1))
    every_item = enumerate(chain(first, items), 1)
    if not (first and _is_pair(first[0]) and isinstance(first[0][0], str)):
        yield from read_records(every_item, columns, origin)
        return
    columns.refuse_names(origin)
    for number, pair in every_item:
        if _is_pair(pair):
            yield RawRow(number, *pair)
        else:
            reason = (
                f"it is {kind_of(pair)} and not a (text, label) pair like the first"
            )
            origin.refuse(number, reason, "Correct it, or remove it.")


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2
