"""Rows: one text each, with its label and its group, and the columns that hold them."""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, starmap
from typing import Any, NamedTuple, TypeAlias

from hiddenscope.errors import TextError
from hiddenscope.files import printable

Skipped: TypeAlias = Callable[[TextError], None]
"""A function that is given the error of every row that is left out."""

TEXT_NAMES = ("text", "sentence", "prompt", "content")
LABEL_NAMES = ("label", "class", "target")

COLUMNS = {
    "text": "The column of the texts.",
    "label": "The column of the labels.",
    "group": (
        "The column that says which texts belong together: paraphrases, a pair, one"
        " document."
    ),
}
"""What can be named in a table, as commands and forms describe it."""

_MOST_NAMES = 12
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Row:
    """One text, with its label and its group if it has them.

    `line` is the line of the file that it begins on, or its number, from 1.
    """

    text: str
    label: Any = None
    line: int = 0
    group: Any = None


class RawRow(NamedTuple):
    """A row that was read and not checked yet; `line` is its line or number."""

    line: int
    text: object
    label: object = None
    group: object = None


@dataclass(frozen=True, repr=False)
class Labelled:
    """Texts with one label each, or without labels, and a name for what they are.
    Iterating gives the texts.

    `groups` has one value for each text: texts with the same value belong together.
    None means that nobody said so. `header` names the columns of a file without labels.

    >>> from hiddenscope.texts import read
    >>> cities = read("cities-incomplete")
    >>> cities
    Labelled(cities-incomplete: 50 texts, 2 labels)
    >>> len(cities), next(iter(cities)) == cities.texts[0]
    (50, True)
    """

    texts: tuple[str, ...]
    labels: tuple[Any, ...] | None
    name: str
    groups: tuple[Any, ...] | None = None
    header: str = field(default="", compare=False)

    def __repr__(self) -> str:
        parts = [f"{len(self.texts):,} texts"]
        for word, values in (("labels", self.labels), ("groups", self.groups)):
            if values is not None:
                # A label may be a list, which has no hash.
                parts.append(f"{len(set(map(repr, values))):,} {word}")
        return f"Labelled({printable(self.name)}: {', '.join(parts)})"

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


@dataclass(frozen=True)
class Origin:
    """Where rows come from, as errors name it: `Line 3 of cities.csv`."""

    name: str
    unit: str = "row"
    skipped: Skipped | None = None

    def refuse(
        self, line: int, reason: str, remedy: str, cause: Exception | None = None
    ) -> None:
        """Raise the error of a row, or hand it to `skipped` and leave the row out."""
        error = TextError(
            f"{self.unit.capitalize()} {line:,} of {self.name}", reason, remedy
        )
        if self.skipped is None:
            raise error from cause
        self.skipped(error)


class Columns(NamedTuple):
    """The columns that are read; None for those to be found, or if there is none."""

    text: str | None = None
    label: str | None = None
    group: str | None = None

    @property
    def names(self) -> list[str]:
        """Return the name of each column once."""
        return list(dict.fromkeys(name for name in self if name is not None))

    def row(self, line: int, record: Mapping[Any, Any]) -> RawRow:
        """Return the row of a record that has its cells by the names of columns."""
        label, group = record.get(self.label), record.get(self.group)
        return RawRow(line, record[self.text], label, group)

    def rows(self, values: Mapping[Any, Any], first: int = 1) -> Iterator[RawRow]:
        """Return the rows of whole columns, numbered from `first`."""
        cells = [values.get(name) for name in self]
        return rows_of_columns(*cells, first=first)

    def refuse_names(self, origin: Origin) -> None:
        """Raise if columns are named, because the source has none."""
        if not self.names:
            return
        remedy = "Leave text= and label= out."
        if self.group is not None:
            remedy = "Give group= a list with one value for each text."
        raise TextError(
            f"No column {self.names[0]!r} in {origin.name}", "it has no columns", remedy
        )


def rows_of_columns(
    texts: Any, labels: Any = None, groups: Any = None, *, first: int = 1
) -> Iterator[RawRow]:
    """Return the rows of whole columns, numbered from `first`.

    >>> list(rows_of_columns(["a cat"], ["x"]))
    [RawRow(line=1, text='a cat', label='x', group=None)]
    """
    columns = [range(first, first + len(texts)), texts]
    for column in (labels, groups):
        columns.append(repeat(None, len(texts)) if column is None else column)
    return starmap(RawRow, zip(*columns, strict=True))


def select_columns(
    names: Sequence[str],
    strings: Sequence[str],
    columns: Columns,
    origin: Origin,
    *,
    by_header: bool = False,
) -> Columns:
    """Select the columns that are named, or the obvious ones; groups only if named.

    `strings` are the columns that hold text. With `by_header` that is not known, and a
    single column is taken only if its name looks like one.
    """
    problem = f"Cannot choose the columns of {origin.name}"
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise TextError(
            problem, f"two are called {twice!r}", "Give each a name of its own."
        )
    for column in columns.names:
        if column not in names:
            near = difflib.get_close_matches(column, names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Name one of these."
            raise TextError(
                f"No column {column!r} in {origin.name}",
                f"it has {quote_names(names)}",
                remedy,
            )
    label = columns.label or _obvious(names, LABEL_NAMES, problem, "label")
    text = columns.text or _obvious(names, TEXT_NAMES, problem, "text")
    if text is None:
        others = [name for name in strings if name not in (label, columns.group)]
        # The header of a .csv may be a text itself.
        is_name = not by_header or re.fullmatch(r"[\w.-]+", "".join(others))
        if len(others) == 1 and is_name:
            text = others[0]
    if text is None:
        reason = f"they are {quote_names(names)}, and none is plainly the text"
        raise TextError(
            problem, reason, 'Name the one that is: text="..." (and label="...").'
        )
    if text == label:
        reason = f"{text!r} would be both text and label"
        raise TextError(problem, reason, 'Name another: text="...", label="...".')
    return Columns(text, label, columns.group)


def _obvious(
    names: Sequence[str], known: Sequence[str], problem: str, what: str
) -> str | None:
    """Return the column with the first of the known names; refuse several others."""
    matches = [name for name in names if name.lower() in known]
    matches.sort(key=lambda name: known.index(name.lower()))
    if len(matches) > 1 and matches[0].lower() != known[0]:
        reason = f"{quote_names(matches)} could each be the {what}"
        raise TextError(problem, reason, f'Name the one that is: {what}="...".')
    return matches[0] if matches else None


def check_rows(raw_rows: Iterator[RawRow], origin: Origin) -> Iterator[Row]:
    """Yield the rows whose text is a string of whole characters; refuse the others."""
    for line, text, label, group in raw_rows:
        if not isinstance(text, str):
            origin.refuse(line, f"the text is {kind_of(text)}", "Give a string.")
            continue
        if not text.strip():
            origin.refuse(line, "the text is empty", "Remove the row, or fill it in.")
            continue
        parts = {"text": text, "label": label, "group": group}
        strings = {name: part for name, part in parts.items() if isinstance(part, str)}
        broken = [name for name, part in strings.items() if _SURROGATE.search(part)]
        if broken:
            reason = f"the {broken[0]} holds half of a character (a lone surrogate)"
            origin.refuse(line, reason, "Save it as UTF-8 again.")
            continue
        yield Row(str(text), plain_value(label), line, plain_value(group))


def plain_value(value: Any) -> Any:
    """Return a label as a plain Python value, None if it is missing."""
    # A scalar of numpy or torch.
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()
    # pandas marks what is missing by values of its own.
    is_missing = type(value).__name__ in ("NAType", "NaTType")
    if is_missing or (isinstance(value, float) and value != value):
        return None
    return value


def kind_of(value: object) -> str:
    """Describe a value of an unexpected type."""
    return "missing" if value is None else f"of type {type(value).__name__}"


def quote_names(names: Sequence[object]) -> str:
    """List names in quotes, of many the first few.

    >>> quote_names(["a", "b"]), quote_names([])
    ("'a', 'b'", 'none')
    """
    if not names:
        return "none"
    parts = [ascii(str(name)[:40]) for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        parts.append(f"and {len(names) - _MOST_NAMES} more")
    return ", ".join(parts)
