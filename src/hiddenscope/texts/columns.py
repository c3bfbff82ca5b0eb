"""Columns: which columns of a table hold the texts, the labels and the groups."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat, starmap
from typing import Any, NamedTuple

from hiddenscope.errors import TextError
from hiddenscope.texts.row import Origin, RawRow, quote_names

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


class Columns(NamedTuple):
    """The columns that a caller named; None if they are to be found, or if none is."""

    text: str | None = None
    label: str | None = None
    group: str | None = None


class SelectedColumns(NamedTuple):
    """The columns that are read."""

    text: str
    label: str | None
    group: str | None

    @property
    def names(self) -> list[str]:
        """Return the name of each column once."""
        named = (self.text, self.label, self.group)
        return list(dict.fromkeys(name for name in named if name is not None))

    def row(self, line: int, record: Mapping[Any, Any]) -> RawRow:
        """Return the row of a record that has its cells by the names of columns."""
        label = None if self.label is None else record.get(self.label)
        group = None if self.group is None else record.get(self.group)
        return RawRow(line, record[self.text], label, group)

    def rows(self, values: Mapping[str, Any], first: int) -> Iterator[RawRow]:
        """Yield the rows of whole columns, numbered from `first`."""
        texts = values[self.text]
        labels = repeat(None, len(texts))
        groups = repeat(None, len(texts))
        if self.label is not None:
            labels = values[self.label]
        if self.group is not None:
            groups = values[self.group]
        numbers = range(first, first + len(texts))
        cells = zip(numbers, texts, labels, groups, strict=True)
        yield from starmap(RawRow, cells)


def select_columns(
    names: Sequence[str],
    strings: Sequence[str],
    columns: Columns,
    origin: Origin,
    *,
    by_header: bool = False,
) -> SelectedColumns:
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
    for column in columns:
        if column is not None and column not in names:
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
        if len(others) != 1 or (by_header and not re.fullmatch(r"[\w.-]+", others[0])):
            reason = f"they are {quote_names(names)}, and none is plainly the text"
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
    return SelectedColumns(text, label, columns.group)


def check_unnamed(columns: Columns, origin: Origin) -> None:
    """Refuse the names of columns of a source that has none."""
    named = [name for name in columns if name is not None]
    if not named:
        return
    remedy = "Leave text= and label= out."
    if columns.group is not None:
        remedy = "Give group= a list with one value for each text."
    raise TextError(
        f"No column {named[0]!r} in {origin.name}", "it has no columns", remedy
    )


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
