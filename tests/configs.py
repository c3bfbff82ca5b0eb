"""Tiny models of any text class of transformers, by the configurations of conformance."""

import gzip
import json
from functools import cache
from typing import Any

from torch import nn

from hiddenscope.testing import build
from tests.places import TESTS

CONFIGS = TESTS / "conformance" / "tiny_configs.json.gz"


@cache
def _rows() -> dict[str, dict[str, Any]]:
    with gzip.open(CONFIGS) as file:
        return {row["model_class"]: row for row in json.load(file)}


def configured(name: str, **changes: Any) -> nn.Module:
    """Build a tiny model of a class, with changes of its configuration."""
    row = _rows()[name]
    return build({**row, "config": {**row["config"], **changes}})
