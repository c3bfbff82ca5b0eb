"""Make notebooks of pages: the prose becomes cells of text, and the code cells of code.

A page is the source of its notebook. It is shown by GitHub and by the site, it is
compared line by line, and it holds no output that could be out of date.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Cell: TypeAlias = dict[str, object]

CODE = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
# What only the page needs: the link to its notebook, and notes to generators.
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PAGE_ONLY = re.compile(r"<!-- not in the notebook -->\n.*?<!-- end -->\n", re.DOTALL)
# A notebook is one file, which has neither the pictures of the page nor its neighbours.
PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook_text(page: Path) -> str:
    """Return the notebook of a page as the text of an .ipynb file."""
    cells = []
    for number, cell in enumerate(_cells(page.read_text("utf-8"))):
        cells.append({"id": f"cell-{number}", **cell})
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": KERNEL, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cells(text: str) -> Iterator[Cell]:
    end = 0
    for block in CODE.finditer(text):
        yield from _prose(text[end : block.start()])
        yield {
            "cell_type": "code",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "source": _lines(block[1]),
        }
        end = block.end()
    yield from _prose(text[end:])


def _prose(text: str) -> Iterator[Cell]:
    for pattern in (PAGE_ONLY, COMMENT, PICTURE):
        text = pattern.sub("", text)
    text = LINK.sub(r"\1", text)
    if text.strip():
        yield {"cell_type": "markdown", "metadata": {}, "source": _lines(text)}


def _lines(text: str) -> list[str]:
    return text.strip().splitlines(keepends=True)
