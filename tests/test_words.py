"""Sentences that readers had to read twice stay gone, in the docs, on the pages and in errors."""

import re
from pathlib import Path

import pytest

from hiddenscope.catalog import ANALYSES
from hiddenscope.results import Result

ROOT = Path(__file__).parents[1]
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN += [path for kind in ("py", "js") for path in sorted((ROOT / "src").rglob(f"*.{kind}"))]
TWICE = [
    r"took? the place of its own",
    r"\bis seen of\b|\bsees of\b",
    r"proved to be it",
    r"[Ff]or 1 on\b",
    r"[Cc]ompare of\b",
    r"half or more layer\.",
    r"\bnine tenths\b",
    r"reaches one half",
    r"\bdiffer nowhere\b",
    r"\bbest words?\b",  # top token
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_has_to_be_read_twice(path: Path) -> None:
    if path.name in {"log.md", "bench.md"}:  # what was tried, and the names of rows that were measured
        pytest.skip("a record of what was")
    text = re.sub(r"\s+", " ", path.read_text("utf-8"))
    assert [found[0] for pattern in TWICE for found in re.finditer(pattern, text)] == []


def test_the_title_of_a_result_is_not_a_verb() -> None:
    import xarray

    verbs = {"compare", "project", "patch", "steer", "cluster", "probe", "graft"}
    for analysis in ANALYSES:
        title = Result(analysis.word, xarray.Dataset(), {}, {"model": "toy"}).title
        assert title.endswith(" toy")
        assert title.split()[0] not in verbs
        bare = Result(analysis.word, xarray.Dataset(), {}, {}).title
        assert bare and not bare.endswith((" in", " of")), bare
