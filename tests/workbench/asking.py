"""One question for every analysis, small enough for a tiny model."""

from typing import Any

from tests.registry import ENTRIES
from tests.workbench.serving import Bench

TEXT = "The rest is here."
# A question that takes minutes: every text by itself takes seconds.
SLOW: dict[str, Any] = {
    "texts": ["a b c d e f g h i j " * 5 + str(k) for k in range(10, 99)],
    "influence": "frobenius",
}
QUESTIONS: dict[str, dict[str, Any]] = {
    word: entry.request for word, entry in ENTRIES.items() if entry.request is not None
}
# Several texts, which are averaged, with every option of how.
MANY_TEXTS: dict[str, Any] = {
    "texts": [f"The rest of number {k} is over here." for k in range(3)],
    "influence": "frobenius",
    "sites": "layer.*",
    "sampling": {"per_text": 2, "probes": 4, "baseline": "random"},
}


def named(bench: Bench, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with opaque names in place of what they stand for."""
    given = dict(arguments)
    for name in ("candidate", "donor", "other"):
        # The other answer of contributions is a word.
        if isinstance(given.get(name), dict):
            given[name] = {"name": bench.folder(f"models/{given[name]['name']}")}
    if given.get("data") == "upload":
        rows = b"text,label\nThe rest is,a\nThe best is,b\nThe test is,a\n"
        given["data"] = bench.ask("POST", "/api/datasets?file=rows.csv", rows).json[
            "name"
        ]
    return given
