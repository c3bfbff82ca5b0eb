"""Take a slice of a long list of cases: `make test` runs a few, `make fuzz` all."""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
THOROUGH = bool(os.environ.get("HIDDENSCOPE_THOROUGH"))
# Marks a test that has a shorter one beside it.
long = pytest.mark.skipif(not THOROUGH, reason="it takes long, and `make fuzz` runs it")


def sliced(cases: Sequence[T], count: int) -> Sequence[T]:
    """Return so many of the cases, evenly spread, or all if HIDDENSCOPE_THOROUGH is set.

    The first and the last are among them; if it is a single case, the last.
    """
    if THOROUGH or len(cases) <= count:
        return cases
    if count == 1:
        return cases[-1:]
    last = len(cases) - 1
    return [cases[round(at * last / (count - 1))] for at in range(count)]
