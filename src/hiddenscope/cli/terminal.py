"""A terminal: what is typed there, and escaped text, tables and JSON printed to it."""

import json
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import typer

from hiddenscope import progress

# A table on stdin.
STDIN = re.compile(r"-(?:\.\w+)+")
# Columns of a table that goes to a file or another program, so that no line is wrapped.
WIDE = 400
# The Unicode categories of characters that a terminal obeys, or does not show.
INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def with_stdin(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with @-.csv in place of -.csv.

    typer would read -.csv as a bundle of options, and not as a table on stdin.

    >>> with_stdin(["embed", "-.csv", "-k", "3"])
    ['embed', '@-.csv', '-k', '3']
    """
    marked = []
    for word in words:
        if STDIN.fullmatch(word):
            word = f"@{word}"
        marked.append(word)
    return marked


def echo(text: str, *, err: bool = False) -> None:
    """Print a text in place of the status line."""
    progress.clear()
    typer.echo(text, err=err)


def visible(text: str, *, keep: str = "") -> str:
    r"""Return a text that is safe to print.

    Control, bidirectional and other invisible characters are written as escapes.

    >>> print(visible("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    characters = []
    for char in text:
        if char not in keep and unicodedata.category(char) in INVISIBLE:
            char = char.encode("unicode_escape").decode("ascii")
        characters.append(char)
    return "".join(characters)


def in_bytes(count: int) -> str:
    """Return a size as people write it.

    >>> in_bytes(912), in_bytes(249_300), in_bytes(5_400_000)
    ('912 bytes', '249 kB', '5.4 MB')
    """
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 999.5 * size:
            return f"{count / size:,.0f} {unit}"
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Collection[int] = (0,),
) -> None:
    """Print a table; the columns at the places in `text` hold text, others numbers."""
    # rich alone would double the time that --help takes.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        justify: Literal["left", "right"] = "left" if place in text else "right"
        table.add_column(Text(visible(name)), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    progress.clear()
    width = None if sys.stdout.isatty() else WIDE
    Console(markup=False, emoji=False, highlight=False, width=width).print(table)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    echo(json.dumps(value, indent=2))
