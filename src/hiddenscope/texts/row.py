"""Rows: one text each, with its label and its group, before and after the check."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from hiddenscope.errors import TextError

Skipped: TypeAlias = Callable[[TextError], None]
"""A function that is given the error of every row that is left out."""

_MOST_NAMES = 12


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


@dataclass(frozen=True)
class Labelled:
    """Texts with one label each, or without labels, and a name for what they are.
    Iterating gives the texts.

    `groups` has one value for each text: texts with the same value belong together.
    None means that nobody said so.

    >>> from hiddenscope.texts import read
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
        broken = [name for name, part in parts.items() if _has_surrogate(part)]
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
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, float) and value != value:
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


def _has_surrogate(part: object) -> bool:
    if not isinstance(part, str) or part.isascii():
        return False
    return any("\ud800" <= char <= "\udfff" for char in part)
