"""Facts are for programs: every key is a snake_case identifier, at every level, the
page of its analysis names it in backticks, and its value is of the type that
`analyses/<word>/facts.py` says.

Intervals hold their own estimates: in the data, between `<name>_low` and
`<name>_high`; in the facts, between `low` and `high` or the ends of `interval`.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
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

import numpy as np
import pytest
import xarray

from hiddenscope.analyses.embed.story import EmbedReport
from hiddenscope.catalog import ANALYSES, ANALYSIS
from hiddenscope.errors import StatesError
from hiddenscope.results.export import to_plain
from hiddenscope.results.report import read_report
from hiddenscope.results.story import report_of
from tests.places import ROOT
from tests.registry import NUMBERED, RUNS, result_of

KEY = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# The number that the facts put beside an interval has one of these keys.
ESTIMATES = ("value", "accuracy", "r2")
SLOW = [("probe", 2), ("series", 3), ("contributions", 4)]
# Ends in float32 may be rounded away from an estimate in float64.
ROUNDING = 1e-6


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
    package = f"hiddenscope.{ANALYSIS[word].package}{word}"
    if find_spec(f"{package}.facts") is None:
        return None
    module = import_module(f"{package}.facts")
    return getattr(module, f"{word.capitalize()}Facts")


def excluding_variables(data: xarray.Dataset) -> Iterator[str]:
    """Yield each variable that leaves its interval somewhere."""
    for name in data.data_vars:
        if not {f"{name}_low", f"{name}_high"} <= set(data.data_vars):
            continue
        # Quartiles over the tokens have no dim of tokens: they are no intervals.
        if data[name].dims != data[f"{name}_low"].dims:
            continue
        value = data[name].to_numpy()
        low = data[f"{name}_low"].to_numpy()
        high = data[f"{name}_high"].to_numpy()
        slack = ROUNDING * np.maximum(1, np.abs(value))
        # NaN, where an end is not known, excludes nothing.
        outside = (value < low - slack) | (value > high + slack)
        if outside.any():
            yield str(name)


def excluding_facts(facts: Any, where: str = "facts") -> Iterator[str]:
    """Yield each place in the facts whose number is outside its interval."""
    if isinstance(facts, list):
        for place, inner in enumerate(facts):
            yield from excluding_facts(inner, f"{where}[{place}]")
    if not isinstance(facts, dict):
        return
    low, high = facts.get("interval") or (facts.get("low"), facts.get("high"))
    if low is not None and high is not None:
        for key in ESTIMATES:
            value = facts.get(key)
            if value is not None and not low - ROUNDING <= value <= high + ROUNDING:
                yield f"{where}.{key}"
    for key, inner in facts.items():
        yield from excluding_facts(inner, f"{where}.{key}")


def test_every_analysis_is_run() -> None:
    assert set(RUNS) == {analysis.word for analysis in ANALYSES if analysis.result}


@pytest.mark.parametrize(
    ("word", "place"),
    [
        *(case for case in NUMBERED if case not in SLOW),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_facts_are_documented_and_typed_and_intervals_hold_estimates(
    word: str, place: int
) -> None:
    result = result_of(word, place)
    found = set(keys(result.facts))
    assert {key for key in found if not KEY.fullmatch(key)} == set()
    page = (ROOT / "docs" / f"{word}.md").read_text("utf-8")
    assert {key for key in found if f"`{key}`" not in page} == set()
    assert all(result.summary().splitlines()), "no finding is empty"
    expected = facts_type(word)
    if expected is None:
        assert to_plain(report_of(result), "facts") == result.facts
    else:
        assert [*mistyped(result.facts, expected, word)] == []
    assert [*excluding_variables(result.data)] == []
    assert [*excluding_facts(result.facts)] == []


def test_what_breaks_the_law_is_seen() -> None:
    for wrong, said in ({"width": "wide"}, "width is 'wide'"), ({}, "no width"):
        with pytest.raises(StatesError, match=said):
            read_report(EmbedReport, {"texts": 2, **wrong})
    ends = {"norm_low": ("site", [0.5, 1.5]), "norm_high": ("site", [2.0, np.nan])}
    data = xarray.Dataset({"norm": ("site", [1.0, 2.0]), **ends})
    assert not [*excluding_variables(data)]
    data["norm_low"][1] = 2.5
    assert [*excluding_variables(data)] == ["norm"]
    law = [{"value": 1.0}, {"value": 1.0, "low": 2.0, "high": 3.0}]
    facts: dict[str, Any] = {"best": {"r2": 0.5, "interval": [0.6, 0.7]}, "law": law}
    assert [*excluding_facts(facts)] == ["facts.best.r2", "facts.law[1].value"]
