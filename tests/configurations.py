"""Build tiny models of the classes that conformance tries."""

import gzip
import json
from functools import cache
from typing import Any

from hiddenscope.testing import build
from tests.places import TESTS


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Return the configuration of every class, by its name."""
    with gzip.open(TESTS / "conformance" / "tiny_configs.json.gz") as file:
        return {row["model_class"]: row for row in json.load(file)}


def configured(name: str, **changes: Any) -> Any:
    """Build a tiny model of a class, with settings of its own if they are named."""
    row = rows()[name]
    return build({**row, "config": {**row["config"], **changes}})
