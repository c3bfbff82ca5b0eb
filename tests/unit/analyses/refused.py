"""A check that a call is refused, which names the case of a table that is not."""

from collections.abc import Callable
from typing import Any

import pytest

from hiddenscope.errors import Error


def check_refused(
    kind: type[Error], words: str, call: Callable[..., Any], *given: Any, **options: Any
) -> None:
    """Check that a call raises an error of this kind, whose message has the words."""
    try:
        call(*given, **options)
    except kind as error:
        assert words in str(error)
    else:
        pytest.fail(f"not refused: {words}")
