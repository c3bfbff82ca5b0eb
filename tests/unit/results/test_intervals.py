"""Intervals hold their own estimates: in the data, between `<name>_low` and
`<name>_high`; in the facts, between `low` and `high` or the ends of `interval`.

What varies in another way, such as a weight over the folds, must not look like an
interval.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xarray

from tests.every import CASES, result_of
from tests.slices import sliced

# The number that the facts put beside an interval has one of these keys.
ESTIMATES = ("value", "accuracy", "r2")
# Ends in float32 may be rounded away from an estimate in float64.
ROUNDING = 1e-6


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


@pytest.mark.parametrize(("word", "place"), sliced(CASES, 15))
def test_every_interval_holds_its_estimate(word: str, place: int) -> None:
    result = result_of(word, place)
    assert not [*excluding_variables(result.data)]
    assert not [*excluding_facts(result.facts)]


def test_an_interval_that_excludes_its_estimate_is_seen() -> None:
    ends = {"norm_low": ("site", [0.5, 1.5]), "norm_high": ("site", [2.0, np.nan])}
    data = xarray.Dataset({"norm": ("site", [1.0, 2.0]), **ends})
    assert not [*excluding_variables(data)]
    data["norm_low"][1] = 2.5
    assert [*excluding_variables(data)] == ["norm"]
    facts: dict[str, Any] = {
        "best": {"r2": 0.5, "interval": [0.6, 0.7]},
        "law": [{"value": 1.0}],
    }
    assert [*excluding_facts(facts)] == ["facts.best.r2"]
    facts["law"] = [{"value": 1.0, "low": 2.0, "high": 3.0}]
    assert [*excluding_facts(facts)] == ["facts.best.r2", "facts.law[0].value"]
