"""Findings: the facts of a result as lines of text, and the tables beneath them.

Strings in a result come from models and files, so everything here is safe to print on a
terminal.

>>> for line in fact_lines({"largest": 2.5, "at": "layer.1"}):
...     print(line)
largest  2.5
at       layer.1
"""

from collections.abc import Iterator

from hiddenscope.results.report import Facts

# Items of a list, and characters of a text, that one line shows.
MOST_ITEMS = 12
LONGEST_TEXT = 200


def fact_lines(facts: Facts, indent: str = "") -> Iterator[str]:
    """Yield one line for each fact; inner mappings are indented beneath their key."""
    widths = [0]
    for key, value in facts.items():
        if not isinstance(value, dict):
            widths.append(len(printable(key)))
    for key, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{printable(key)}"
            yield from fact_lines(value, indent + "  ")
        else:
            yield f"{indent}{printable(key):<{max(widths)}}  {in_words(value)}"


def in_words(value: object) -> str:
    """Return a fact as one short line."""
    if isinstance(value, list):
        items = [in_words(item) for item in value[:MOST_ITEMS]]
        if len(value) > MOST_ITEMS:
            items.append("…")
        return ", ".join(items) or "none"
    if isinstance(value, dict):
        return "; ".join(
            f"{printable(key)} {in_words(inner)}" for key, inner in value.items()
        )
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # Escaped before it is cut, since an escape may take ten characters.
    text = printable(text)
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 1] + "…"
    return text


def printable(text: str) -> str:
    """Return the text with every character escaped that a terminal cannot print."""
    return "".join(map(_printable_char, text))


def _printable_char(char: str) -> str:
    return char if char.isprintable() else ascii(char)[1:-1]
