"""Take a slice of a long list of cases: `make test` runs a few, `make fuzz` all."""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
THOROUGH = bool(os.environ.get("HIDDENSCOPE_THOROUGH"))
# Marks a test that has a shorter one beside it.
long = pytest.mark.skipif(not THOROUGH, reason="it takes long, and `make fuzz` runs it")


def with_slow(fast: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """Return cases for `make test`, and those that only `make test-all` runs."""
    return [*fast, *(pytest.param(case, marks=pytest.mark.slow) for case in slow)]


def sliced(cases: Sequence[T], count: int) -> Sequence[T]:
    """Return this many of the cases, evenly spread, or all if HIDDENSCOPE_THOROUGH is set.

    The first and the last are among them; if it is a single case, the last.
    """
    if THOROUGH or len(cases) <= count:
        return cases
    if count == 1:
        return cases[-1:]
    last = len(cases) - 1
    return [cases[round(at * last / (count - 1))] for at in range(count)]
