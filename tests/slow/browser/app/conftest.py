"""The workbench that these tests ask, and the browser that looks at it."""

from tests.workbench.fixtures import (
    _offline,
    another,
    bench,
    contexts,
    here,
    kept,
    look,
    root,
    store,
    tiny_name,
)

__all__ = [
    "_offline",
    "another",
    "bench",
    "contexts",
    "here",
    "kept",
    "look",
    "root",
    "store",
    "tiny_name",
]
