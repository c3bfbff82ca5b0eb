"""Facts are for programs: every key is a snake_case identifier, at every level, and the
page of its analysis names it.

A page names a key in backticks: `` `first_difference` ``. The page's table "Facts" says
what each means, and `analyses/<word>/facts.py` says of what type it is.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pytest

from hiddenscope.catalog import ANALYSES, ANALYSIS
from tests.every import CASES, RUNS, result_of
from tests.places import ROOT
from tests.slices import sliced

DOCS = ROOT / "docs"
KEY = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def keys(facts: Any) -> Iterator[str]:
    """Yield every key, at every level."""
    if isinstance(facts, dict):
        yield from facts
        facts = list(facts.values())
    if isinstance(facts, list):
        for inner in facts:
            yield from keys(inner)


def mistyped(value: Any, expected: Any, where: str) -> Iterator[str]:
    """Yield every place at which a value is not of its type."""
    if is_typeddict(expected):
        if not isinstance(value, dict):
            yield f"{where} is {value!r}, not {expected.__name__}"
            return
        for key in expected.__required_keys__ - set(value):
            yield f"{where} has no {key}"
        hints = get_type_hints(expected)
        for key, inner in value.items():
            if key not in hints:
                yield f"{where} has {key}, which {expected.__name__} has not"
            else:
                yield from mistyped(inner, hints[key], f"{where}.{key}")
    elif get_origin(expected) is list:
        if not isinstance(value, list):
            yield f"{where} is {value!r}, not a list"
            return
        for inner in value:
            yield from mistyped(inner, get_args(expected)[0], where)
    elif get_origin(expected) in (Union, UnionType):
        problems = [[*mistyped(value, kind, where)] for kind in get_args(expected)]
        yield from min(problems, key=len)
    elif get_origin(expected) is Literal:
        if value not in get_args(expected):
            yield f"{where} is {value!r}, none of {get_args(expected)}"
    else:
        # JSON writes 1.0 as a float, but an analysis may count in floats.
        kinds = {float: (float, int), int: int, None: NoneType}.get(expected, expected)
        is_flag = isinstance(value, bool) and expected is not bool
        if is_flag or not isinstance(value, kinds):
            yield f"{where} is {value!r}, not {expected}"


def facts_type(word: str) -> Any:
    """Return the TypedDict of an analysis."""
    package = ANALYSIS[word].package
    module = import_module(f"hiddenscope.{package}{word}.facts")
    return getattr(module, f"{word.capitalize()}Facts")


def test_every_analysis_is_run() -> None:
    assert set(RUNS) == {analysis.word for analysis in ANALYSES if analysis.result}


@pytest.mark.parametrize(("word", "place"), sliced(CASES, 22))
def test_facts_have_documented_identifiers_for_keys(word: str, place: int) -> None:
    result = result_of(word, place)
    found = set(keys(result.facts))
    assert {key for key in found if not KEY.fullmatch(key)} == set()
    page = (DOCS / f"{word}.md").read_text("utf-8")
    assert {key for key in found if f"`{key}`" not in page} == set()
    assert all(result.summary().splitlines()), "no finding is empty"


@pytest.mark.parametrize(("word", "place"), CASES)
def test_facts_are_of_their_types(word: str, place: int) -> None:
    facts = result_of(word, place).facts
    assert [*mistyped(facts, facts_type(word), word)] == []


def test_a_mistyped_fact_is_found() -> None:
    facts = {"texts": 2, "width": "wide", "hight": 1}
    assert [*mistyped(facts, facts_type("embed"), "embed")] == [
        "embed has no mean_cosine",
        "embed.width is 'wide', not <class 'int'>",
        "embed has hight, which EmbedFacts has not",
    ]
