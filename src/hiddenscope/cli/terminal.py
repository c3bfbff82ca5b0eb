"""What reaches a terminal: escaped text, tables and JSON; and the lines of stdin."""

import json
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from hiddenscope import errors

if TYPE_CHECKING:
    from rich.console import Console


WIDE = 400  # columns of a table that goes to a file or another program, so that no line is wrapped


def visible(text: str, *, keep: str = "") -> str:
    r"""A text as it may reach a terminal: control, bidirectional and other unseen characters are written out.

    >>> print(visible("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return "".join(char if char in keep or _harmless(char) else _escaped(char) for char in text)


def _harmless(char: str) -> bool:
    return unicodedata.category(char) not in {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _console() -> "Console":
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, text: Collection[int] = (0,)) -> None:
    """Print a table; the columns at the places in `text` hold text, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(Text(visible(name)), justify="left" if place in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    _console().print(table)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def lines_of(texts: list[str]) -> list[str]:
    """The texts, where - stands for the lines of stdin."""
    if "-" in texts and sys.stdin is None:
        raise errors.FileError("Cannot read stdin", "it is closed", "Pipe texts into the command, or give them here.")
    return [line for text in texts for line in ([text] if text != "-" else _lines(sys.stdin.read()))]


def _lines(text: str) -> list[str]:
    """The lines of a file; only a newline ends a line, not the other separators of Unicode."""
    return text.removesuffix("\n").split("\n") if text else []
