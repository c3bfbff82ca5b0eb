"""Results of every analysis, by its older name."""

from tests.registry import (
    CASES,
    CLASSES,
    ENTRIES,
    NUMBERED,
    TEXT,
    placed,
    points,
    result_of,
    tiny,
)

__all__ = [
    "CASES",
    "CLASSES",
    "NUMBERED",
    "RUNS",
    "TEXT",
    "placed",
    "points",
    "result_of",
    "tiny",
]
RUNS = {word: entry.results for word, entry in ENTRIES.items() if entry.results}
