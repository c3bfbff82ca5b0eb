"""The switches of tiny configurations that some value hides.

With it, nothing can tell the switch from an absent one in a text of eleven tokens: a
multiplier of 1, no soft cap, a window as long as the text. `switches.json` has them for
each model type. `hidden` is such a value, and `tiny` the one that the configurations in
`tiny_configs.json.gz` have. `why` says whether published models set it ("published"),
its usual value is too large for small models and short texts ("size"), or only the code
knows it ("code"). What models set is as in the configuration classes and docstrings of
transformers, or as their configurations are known.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
# Where the configuration of a model of several parts holds those of its text models.
INNER = ("text_config", "encoder", "decoder")

Switch = dict[str, Any]


def switches() -> dict[str, dict[str, Switch]]:
    """Return the switches of each model type, by name."""
    found: dict[str, dict[str, Switch]] = json.loads(FILE.read_text("utf-8"))
    return found


def places(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those of the text models inside it."""
    yield config
    for name in INNER:
        if isinstance(config.get(name), dict):
            yield from places(config[name])


def switched(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values, wherever it has their fields.

    A field of no part of the configuration is set in the whole.
    """
    changed = deepcopy(dict(config))
    for path, value in values.items():
        *outer, field = path.split(".")
        holders = []
        for place in places(changed):
            holder: Any = place
            for name in outer:
                holder = holder.get(name) or {}
            if field in holder:
                holders.append(holder)
        for holder in holders or [changed]:
            holder[field] = deepcopy(value)
    return changed


def values(config: dict[str, Any], path: str) -> list[Any]:
    """Return the values of a field in a configuration and in its text models."""
    found = []
    *outer, field = path.split(".")
    for place in places(config):
        holder: Any = place
        for name in outer:
            holder = holder.get(name) or {}
        if field in holder:
            found.append(holder[field])
    return found
