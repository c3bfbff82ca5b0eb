"""The workbench that these tests ask, and the browser that looks at it."""

from collections.abc import Callable

import pytest

from tests.workbench.fixtures import (
    _offline,
    another,
    bench,
    dictionaries,
    kept,
    look,
    root,
    store,
    tiny_name,
)
from tests.workbench.pages import Opener, Workbench, fragment

__all__ = [
    "_offline",
    "another",
    "bench",
    "dictionaries",
    "kept",
    "look",
    "root",
    "store",
    "tiny_name",
]
TEXTS = {"a": "The rest is here", "b": "The best is here"}


@pytest.fixture
def grid(look: Opener, tiny_name: str) -> Callable[..., Workbench]:
    """Open the grid of the tiny model, with its norms unless told otherwise."""

    def opened(parts: dict[str, str] | None = None, **options: object) -> Workbench:
        address = {"model": tiny_name, **TEXTS, "overlay": "norm", **(parts or {})}
        shown = look(fragment(**address), **options)
        if parts is None or "overlay" not in parts:
            shown.heading("The norm")
        return shown

    return opened
