"""Objects that hold texts: lists, pairs, frames and Hugging Face datasets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain, repeat, starmap
from typing import Any

from hiddenscope.errors import TextError
from hiddenscope.texts.columns import Columns, check_unnamed, select_columns
from hiddenscope.texts.files import read_records
from hiddenscope.texts.row import Labelled, Origin, RawRow, kind_of, quote_names

# Items of a range, which takes no memory itself, that are made a list.
LONGEST_RANGE = 2**22
# Items of what is in memory already: a list of more takes 34 GB by itself.
LONGEST_LIST = 2**32


def as_list(texts: Iterable[Any]) -> list[Any]:
    """Return the texts, or the ids of a text, as a list that memory can hold.

    >>> as_list(range(3))
    [0, 1, 2]
    >>> as_list(range(10**12))
    Traceback (most recent call last):
    hiddenscope.errors.TextError: Cannot read the texts: a range has more than 4,194,304 items. Give a list of texts.
    """  # noqa: E501
    most = LONGEST_RANGE if isinstance(texts, range) else LONGEST_LIST
    if isinstance(texts, Sized):
        _check_length(texts, most, "Cannot read the texts", "Give a list of texts.")
    return list(texts)


def read_object(source: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    """Yield the rows of an object, whatever holds its texts."""
    if isinstance(source, Labelled):
        return _of_labelled(source, columns, origin)
    if is_frame(source):
        return _of_frame(source, columns, origin)
    if hasattr(source, "column_names"):
        return _of_dataset(source, columns, origin)
    if is_texts_and_labels(source):
        texts, labels = source
        return _of_pair(texts, labels, columns, origin)
    return _of_items(source, columns, origin)


def describe_object(source: object) -> str:
    """Return the name of an object in errors."""
    if isinstance(source, Labelled):
        return source.name
    if is_frame(source):
        return "the frame"
    if hasattr(source, "column_names"):
        return "the dataset"
    if is_texts_and_labels(source):
        return "(texts, labels)"
    return "the list"


def is_frame(source: object) -> bool:
    """Tell a frame of pandas or polars."""
    iterates = hasattr(source, "itertuples") or hasattr(source, "iter_rows")
    return iterates and hasattr(source, "columns")


def is_texts_and_labels(source: object) -> bool:
    """Tell a pair of two lists from a list of two texts."""
    if not isinstance(source, tuple) or len(source) != 2:
        return False
    return not any(isinstance(part, str) for part in source)


def _of_labelled(
    source: Labelled, columns: Columns, origin: Origin
) -> Iterator[RawRow]:
    check_unnamed(columns, origin)
    labels = source.labels or repeat(None, len(source))
    groups = source.groups or repeat(None, len(source))
    numbers = range(1, len(source) + 1)
    cells = zip(numbers, source.texts, labels, groups, strict=True)
    yield from starmap(RawRow, cells)


def _of_frame(frame: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    names = [name for name in frame.columns if isinstance(name, str)]
    counts = Counter(names)
    strings = []
    for name in counts:
        # The first cell tells the type; a name that comes twice gives a frame.
        if (
            counts[name] == 1
            and len(frame)
            and isinstance(next(iter(frame[name])), str)
        ):
            strings.append(name)
    selected = select_columns(names, strings, columns, origin)
    values = {name: frame[name] for name in selected.names}
    yield from selected.rows(values, 1)


def _of_dataset(dataset: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    """Yield the rows of a Hugging Face dataset, with class labels by their names."""
    # Several splits.
    if isinstance(dataset.column_names, Mapping):
        yield from _of_items(dataset, columns, origin)
        return
    features = getattr(dataset, "features", None) or {}
    names = list(dataset.column_names or features)
    # A streamed dataset, whose columns are not known before its first row.
    if not names:
        yield from _of_items(iter(dataset), columns, origin)
        return
    strings = []
    for name in names:
        if getattr(features.get(name), "dtype", None) in ("string", "large_string"):
            strings.append(name)
    selected = select_columns(names, strings, columns, origin)
    class_name = getattr(features.get(selected.label), "int2str", None)
    for number, record in enumerate(dataset.select_columns(selected.names), 1):
        row = selected.row(number, record)
        if class_name is not None:
            # -1 stands for a label that is missing.
            known = isinstance(row.label, int) and row.label >= 0
            row = row._replace(label=class_name(row.label) if known else None)
        yield row


def _of_pair(
    texts: Any, labels: Any, columns: Columns, origin: Origin
) -> Iterator[RawRow]:
    check_unnamed(columns, origin)
    problem = "Cannot read (texts, labels)"
    if not (hasattr(texts, "__len__") and hasattr(labels, "__len__")):
        reason = f"the texts are {kind_of(texts)} and the labels {kind_of(labels)}"
        raise TextError(problem, reason, "Give two lists.")
    _check_length(texts, LONGEST_LIST, problem, "Give two lists.")
    if len(texts) != len(labels):
        reason = f"there are {len(texts):,} texts and {len(labels):,} labels"
        raise TextError(problem, reason, "Give one label for each text.")
    cells = zip(range(1, len(texts) + 1), texts, labels, strict=True)
    yield from starmap(RawRow, cells)


def _of_items(source: Any, columns: Columns, origin: Origin) -> Iterator[RawRow]:
    if isinstance(source, Mapping):
        raise _is_mapping(source)
    is_scalar = getattr(source, "shape", None) == ()
    if not isinstance(source, Iterable) or isinstance(source, bytes) or is_scalar:
        raise TextError(
            "Cannot read texts",
            f"the source is {kind_of(source)}",
            "Give a path, a list of strings, (texts, labels), a frame or a Hugging Face"
            " dataset.",
        )
    items = iter(source)
    try:
        first = next(items)
    except StopIteration:
        return
    every_item = enumerate(chain([first], items), 1)
    if not (_is_pair(first) and isinstance(first[0], str)):
        yield from read_records(every_item, columns, origin)
        return
    check_unnamed(columns, origin)
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


def _is_mapping(source: Mapping[str, object]) -> TextError:
    """Return the error for a mapping, which may be a dataset with several splits."""
    reason = f"it is a mapping with {quote_names(list(source))}"
    remedy = "Give (texts, labels), or a list of rows."
    splits = []
    for name, part in source.items():
        if hasattr(part, "column_names"):
            splits.append(str(name))
    if splits:
        reason = f"it has the splits {quote_names(splits)}"
        remedy = f"Give one of them: data[{splits[0]!r}]."
    return TextError("Cannot read texts from a mapping", reason, remedy)


def _check_length(items: Sized, most: int, problem: str, remedy: str) -> None:
    try:
        too_long = len(items) > most
    except OverflowError:
        # A range that is longer than any list.
        too_long = True
    if too_long:
        reason = f"a {type(items).__name__} has more than {most:,} items"
        raise TextError(problem, reason, remedy)
