"""Compute the worked example that the workbench shows on a first visit, and keep it in
the package: `make docs`.

What is asked here is what the page asks (`app/static/place.js`), so the page finds it
as it finds any result that was computed before. A test compares the two.
"""

import shutil
from pathlib import Path

from hiddenscope.app import SHIPPED, Settings
from hiddenscope.app.cache import ResultCache, StoredResult, key_of
from hiddenscope.app.cells import Models
from hiddenscope.app.library import Library
from hiddenscope.app.questions import answer
from hiddenscope.app.schemas import REQUESTS, ModelChoice

MODEL = {"name": "smollm2"}
A, B = "The capital of France is", "The capital of Germany is"
CELL = {"text": A, "site": "layer.24", "token": 4}
CONTRAST = {"clean": A, "corrupt": B, "answer": " Paris", "other": " Berlin"}
CANDIDATE = {"name": "smollm2", "dtype": "bfloat16"}
EXAMPLE = (
    ("lens", {"texts": A}),
    ("grid", {"text": A}),
    ("compare", {"a": A, "b": B}),
    ("visibility", {"texts": A}),
    ("patch", {"contrasts": CONTRAST}),
    ("drift", {"candidate": CANDIDATE, "texts": [A]}),
    ("project", {"data": "cities-incomplete", "method": "pca"}),
    ("state", CELL),
    ("state", {**CELL, "change": {"kind": "ablate"}}),
    ("state", {**CELL, "change": {"kind": "replace", "text": B}}),
)


def main() -> None:
    """Ask, and keep."""
    shutil.rmtree(SHIPPED, ignore_errors=True)
    SHIPPED.mkdir()
    cache, models, library = (
        ResultCache(SHIPPED, 10**8),
        Models(),
        Library(Settings(folder=Path("unused"))),
    )
    for word, arguments in EXAMPLE:
        given = {"analysis": word, "model": MODEL, "arguments": arguments}
        asked = REQUESTS[word](**given).model_dump(exclude_none=True, mode="json")
        choices = [
            MODEL,
            *(value for name, value in arguments.items() if name == "candidate"),
        ]
        identities = [
            library.model_identity(ModelChoice(**choice)) for choice in choices
        ]
        resolved = {
            name: _loadable(value) if name == "candidate" else value
            for name, value in arguments.items()
        }
        request = {"analysis": word, "model": _loadable(MODEL), "arguments": resolved}
        found = answer(request, models, lambda early: None)
        stored = StoredResult(
            {**found.header, "request": asked}, found.payload, found.data
        )
        cache.put(key_of(asked, identities), stored)
        print(f"{word}: {len(stored.to_bytes()):,} bytes", flush=True)


def _loadable(choice: dict[str, str]) -> dict[str, str | None]:
    return {"path": choice["name"], "dtype": choice.get("dtype")}


if __name__ == "__main__":
    main()
