"""Run the examples of a page of the docs, as a reader does."""

import re
from pathlib import Path

import pytest

import hiddenscope as hs
from docs.outputs import run_example
from tests.places import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
# These run in a kernel: tests/slow/docs/test_notebooks.py.
NOTEBOOKS = DOCS / "notebooks"
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def with_examples() -> list[Path]:
    """Return the pages that have examples."""
    pages = [page for page in PAGES if page.parent != NOTEBOOKS]
    return [page for page in pages if EXAMPLE.search(page.read_text("utf-8"))]


def run_page(page: Path) -> list[str]:
    """Run the examples of a page from top to bottom, and return what each prints."""
    try:
        hs.load()
    except hs.errors.Unreachable as error:
        pytest.skip(f"the docs use the default model: {error}")
    text = page.read_text("utf-8")
    namespace: dict[str, object] = {"__name__": "example"}
    printed = []
    for example in EXAMPLE.finditer(text):
        # So that a traceback points at the line of the page.
        above = text[: example.start(1)].count("\n")
        code = "\n" * above + example[1]
        printed.append(run_example(code, str(page), namespace))
    return printed
