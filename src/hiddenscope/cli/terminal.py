"""What reaches a terminal: escaped text, tables and JSON."""

import json
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from hiddenscope import progress

if TYPE_CHECKING:
    from rich.console import Console


# Columns of a table that goes to a file or another program, so that no line is wrapped.
WIDE = 400


def echo(text: str, *, err: bool = False) -> None:
    """Print a text; the status that stood on the terminal is gone then."""
    progress.clear()
    typer.echo(text, err=err)


def visible(text: str, *, keep: str = "") -> str:
    r"""A text as it may reach a terminal: control, bidirectional and other unseen
    characters are written out.

    >>> print(visible("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return "".join(
        char if char in keep or _harmless(char) else _escaped(char) for char in text
    )


def _harmless(char: str) -> bool:
    return unicodedata.category(char) not in {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _console() -> "Console":
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Collection[int] = (0,),
) -> None:
    """Print a table; the columns at the places in `text` hold text, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(
            Text(visible(name)),
            justify="left" if place in text else "right",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    progress.clear()
    _console().print(table)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    echo(json.dumps(value, indent=2))
