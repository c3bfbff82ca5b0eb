"""The oracles of analyses of states agree with what these say, on several families."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import hiddenscope as hs
from tests.registry import OTHER, TEXT, tiny

FAMILIES = ("llama", "gpt2", "gemma3_text", "bert", "t5", "granite")


def disagreements(expected: Mapping[str, Any], result: Any) -> list[str]:
    """Name what an oracle expects and a result does not hold."""
    wrong = []
    for name, value in expected.items():
        value = np.asarray(value, dtype=float)
        found = np.asarray(found_in(result, name), dtype=float)
        if found.shape != value.shape:
            wrong.append(f"{name}: shape {found.shape}, expected {value.shape}")
            continue
        finite = np.abs(value[np.isfinite(value)])
        scale = finite.max() if finite.size else 1.0
        near = np.isclose(found, value, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
        if not near.all():
            place = tuple(np.argwhere(~near)[0]) if near.ndim else ()
            wrong.append(f"{name}{list(map(int, place))}: {found[place]}, expected {value[place]} ({(~near).sum()} of {near.size})")
    return wrong


def found_in(result: Any, name: str) -> Any:
    """Return a variable of a result, or the number at a path of its facts."""
    if not name:
        return result
    head, _, path = name.partition(".")
    if head != "facts":
        return result.data[name].to_numpy()
    value = result.facts
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return np.nan if value is None else value


def check(word: str, model: Any, asked: Mapping[str, Any]) -> None:
    """Ask, and compare with the oracle."""
    result = getattr(hs, word)(model, **asked)
    oracle = getattr(importlib.import_module(f"tests.oracles.{word}"), word)
    expected = oracle(model, asked, result)
    assert expected
    assert disagreements(expected, result) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_profile(family: str) -> None:
    check("profile", tiny(family), {"texts": [TEXT, OTHER]})


@pytest.mark.parametrize("family", FAMILIES)
def test_profile_of_neurons(family: str) -> None:
    texts = [f"{TEXT} {OTHER} {number}" for number in range(4)]
    sites = "encoder.*.mlp.neurons" if family == "t5" else "*.mlp.neurons"
    check("profile", tiny(family), {"texts": texts, "sites": sites})


@pytest.mark.parametrize("family", FAMILIES)
def test_compare(family: str) -> None:
    check("compare", tiny(family), {"a": TEXT, "b": OTHER})


@pytest.mark.parametrize("family", FAMILIES)
def test_compare_of_two_models(family: str) -> None:
    check("compare", tiny(family), {"a": TEXT, "other": tiny(family, 1)})
