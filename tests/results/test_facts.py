"""Facts are for programs: every key is a snake_case identifier, at every level, and the
page of its analysis names it.

A page names a key in backticks: `` `first_difference` ``. The page's table "Facts" says
what each means.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiddenscope.catalog import ANALYSES
from tests.every import CASES, RUNS, result_of

DOCS = Path(__file__).parents[2] / "docs"
KEY = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def keys(facts: Any) -> Iterator[str]:
    """Every key, at every level."""
    if isinstance(facts, dict):
        yield from facts
    for inner in (
        facts.values()
        if isinstance(facts, dict)
        else facts
        if isinstance(facts, list)
        else ()
    ):
        yield from keys(inner)


def test_every_analysis_is_run() -> None:
    assert set(RUNS) == {analysis.word for analysis in ANALYSES if analysis.result}


@pytest.mark.parametrize(("word", "place"), CASES)
def test_facts_have_documented_identifiers_for_keys(word: str, place: int) -> None:
    result = result_of(word, place)
    found = set(keys(result.facts))
    assert {key for key in found if not KEY.fullmatch(key)} == set()
    page = (DOCS / f"{word}.md").read_text("utf-8")
    assert {key for key in found if f"`{key}`" not in page} == set()
    assert all(result.summary().splitlines()), "no finding is empty"
