"""Trials: whatever a model may or may not do is tried on it, once, and remembered.

Padding a batch, skipping blocks, reusing keys and values, running the head on single
tokens: none of it is assumed. Each is tried on the model at hand and held against a
plain pass within one rounding tolerance. The outcome is remembered in memory, and on
disk too for a model that was loaded from a folder, under a key of everything that could
change it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from functools import cache
from math import inf, isnan, sqrt
from pathlib import Path
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn

from hiddenscope.files import identity, replacing
from hiddenscope.modules import hooks

Outcome = TypeVar("Outcome")

# A sum in a different order differs by some units in the last place, and the
# differences of the blocks of a residual stream add up like a random walk. In float32 a
# wrong mask or position is thousands of times farther off.
ULPS = 64
MOST_PER_BLOCK = 0.05  # for dtypes of few digits, before the factor of depth
# Two runs of the same texts in batches of different shapes differ by rounding alone: a
# few times that is allowed too.
NOISE_FACTOR = 8


def tolerance(dtype: torch.dtype, depth: int) -> float:
    """What rounding may change of a state after `depth` blocks, or of the logits, as a
    share of its norm.

    >>> round(tolerance(torch.float32, 0) / torch.finfo(torch.float32).eps)
    64
    """
    return min(ULPS * torch.finfo(dtype).eps, MOST_PER_BLOCK) * sqrt(depth + 1)


def disagreement(
    states: Tensor,
    others: Tensor,
    depths: list[int],
    repeated: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> float:
    """The largest difference between two computations of states [site, token, width],
    in units of the tolerance.

    `repeated` are `states` computed again in a batch of a different shape: some times
    their difference is allowed too. A NaN on either side is an infinite disagreement.

    >>> disagreement(torch.ones(1, 2, 4), torch.ones(1, 2, 4), [3])
    0.0
    """
    worst = 0.0
    for row, depth in enumerate(depths):
        one, other = states[row].double(), others[row].double()
        norm = one.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        allowed = torch.full_like(norm, tolerance(dtype or states.dtype, depth))
        if repeated is not None:
            allowed = allowed.maximum(
                NOISE_FACTOR * (one - repeated[row].double()).norm(dim=-1) / norm
            )
        share = ((one - other).norm(dim=-1) / norm / allowed).max().item()
        worst = max(worst, inf if isnan(share) else share)
    return worst


class Trials:
    """What was tried on one module, and what came out.

    >>> trials = Trials(nn.Linear(2, 2))
    >>> trials.once("answer", lambda: 42), trials.once("answer", lambda: 43)
    (42, 42)
    """

    def __init__(self, module: nn.Module, memory: Memory | None = None) -> None:
        self.module, self.memory = module, memory
        self._outcomes: dict[Hashable, Any] = {}
        self._known_config: tuple[Any, str] | None = None

    def once(
        self,
        name: str,
        attempt: Callable[[], Outcome],
        *,
        key: Hashable = (),
        form: type[Outcome] | None = None,
    ) -> Outcome:
        """The outcome of an attempt, made once for the module as it is configured now.

        `key` tells apart trials of one name. With `form`, the type of the outcome, it
        is kept on disk too, where the module has a memory there and the outcome is made
        of plain values.
        """
        full_key = (name, key, self._configuration())
        if full_key not in self._outcomes:
            self._outcomes[full_key] = self._recalled_or_tried(full_key, attempt, form)
        return cast(Outcome, self._outcomes[full_key])

    def recalled(self, name: str) -> bool:
        """Whether an outcome of this name comes from an earlier process."""
        return self.memory is not None and any(
            title.startswith(f"{name} ") for title in self.memory.recalled
        )

    def forget(self) -> None:
        """Drop every outcome, on disk too, so that everything is tried again."""
        self._outcomes.clear()
        if self.memory is not None:
            self.memory.forget()

    def _recalled_or_tried(
        self,
        key: tuple[str, Hashable, str],
        attempt: Callable[[], Any],
        form: type | None,
    ) -> Any:
        if self.memory is None or form is None or hooks.foreign_hooks(self.module):
            # What somebody's hook does is not known in another process.
            return attempt()
        title = f"{key[0]} {hashlib.sha256(repr(key[1:]).encode()).hexdigest()[:16]}"
        recalled = self.memory.recall(title, form)
        if recalled is None:
            recalled = attempt()
            self.memory.keep(title, recalled)
        return recalled

    def _configuration(self) -> str:
        """What may be changed on a loaded module and would change an outcome: its
        config, device, dtype and hooks.
        """
        weight = next(self.module.parameters(), None)
        place = "" if weight is None else f"{weight.device} {weight.dtype}"
        return f"{place} {hooks.foreign_hooks(self.module)} {self._config_text()}"

    def _config_text(self) -> str:
        """The configuration as text, made again after a change only: that takes longer
        than a short pass's hooks.
        """
        values = config_values(getattr(self.module, "config", None))
        if self._known_config is None or self._known_config[0] != values:
            self._known_config = deepcopy(values), repr(values)
        return self._known_config[1]


def config_values(value: Any) -> Any:
    """A configuration as plain values, nested ones included; the attention kernel is
    among them.

    Two configurations may be equal and differ: transformers compares declared fields
    alone, and refuses to compare those that it keeps for each layer.
    """
    if hasattr(value, "to_diff_dict") or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        value = {
            name: part for name, part in vars(value).items() if name != "_name_or_path"
        }
    if type(value) is dict:
        return {key: config_values(part) for key, part in value.items()}
    return list(map(config_values, value)) if type(value) in (list, tuple) else value


class Memory:
    """Outcomes on disk, in one JSON file for one key. A file that cannot be read counts
    as none.
    """

    def __init__(self, folder: Path, *identity: object) -> None:
        text = json.dumps([_own_code(), *map(str, identity)])
        self.path = (
            folder / "trials" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        )
        self.recalled: set[str] = set()
        self._outcomes: dict[str, Any] = self._read()

    def knows(self, name: str) -> bool:
        """Whether there is any outcome of this name."""
        return any(title.startswith(f"{name} ") for title in self._outcomes)

    def recall(self, title: str, form: type[Outcome]) -> Outcome | None:
        """An outcome of this class that was kept under a title; None if there is none."""
        if title not in self._outcomes:
            return None
        try:
            outcome = cast(Outcome, _decoded(self._outcomes[title], form))
        except (TypeError, ValueError, LookupError, AttributeError):
            return None
        self.recalled.add(title)
        return outcome

    def keep(self, title: str, outcome: Any) -> None:
        """Keep an outcome, if it is of plain values and the folder can be written."""
        try:
            self._outcomes[title] = _encoded(outcome)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as fresh:
                fresh.write_text(json.dumps(self._sealed(), allow_nan=True), "utf-8")
        except (
            TypeError,
            OSError,
            # A memory is a convenience: without it the trial is made again.
        ):
            self._outcomes.pop(title, None)

    def forget(self) -> None:
        """Drop everything that was kept under this key."""
        self._outcomes.clear()
        self.recalled.clear()
        self.path.unlink(missing_ok=True)

    def _sealed(self) -> dict[str, Any]:
        body = json.dumps(self._outcomes, sort_keys=True)
        return {
            "outcomes": self._outcomes,
            "sha256": hashlib.sha256(body.encode()).hexdigest(),
        }

    def _read(self) -> dict[str, Any]:
        try:
            stored = json.loads(self.path.read_text("utf-8"))
            outcomes: dict[str, Any] = stored["outcomes"]
            body = json.dumps(outcomes, sort_keys=True)
            intact = hashlib.sha256(body.encode()).hexdigest() == stored["sha256"]
            return outcomes if intact else {}
        except (OSError, ValueError, LookupError, TypeError):
            return {}


def weights_identity(folder: Path) -> str | None:
    """What tells the weights of a folder from others without reading them."""
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")
    )
    return (
        identity(files)
        if any(path.suffix == ".safetensors" for path in files)
        else None
    )


@cache
def _own_code() -> str:
    """Which version of our own code an outcome comes from: another may try it
    differently.
    """
    stats = []
    for entry in sorted(Path(__file__).parents[1].glob("**/*.py")):
        stat = os.stat(entry)
        stats.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    """A dataclass of plain values as JSON. An empty tensor marks where the state goes
    in an output of `hooks.form`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _encoded(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor) and not value.numel():
        return {"$": "state"}
    if type(value) is tuple or type(value) is list:
        return {"$": type(value).__name__, "items": [_encoded(item) for item in value]}
    if (
        isinstance(value, Mapping)
        and type(value) is dict
        and all(isinstance(key, str) for key in value)
    ):
        return {
            "$": "dict",
            "items": {key: _encoded(item) for key, item in value.items()},
        }
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _decoded(value: Any, form: Any) -> Any:
    """The inverse of `_encoded`: a value of type `form`, from its JSON."""
    origin = get_origin(form)
    if origin in (Union, types.UnionType):
        present = next(part for part in get_args(form) if part is not type(None))
        return None if value is None else _decoded(value, present)
    if dataclasses.is_dataclass(form) and isinstance(form, type):
        hints = _hints(form)
        names = [field.name for field in dataclasses.fields(form)]
        return form(**{name: _decoded(value[name], hints[name]) for name in names})
    if form is torch.dtype:
        return getattr(torch, value)
    if isinstance(value, dict):
        return _decoded_container(value, form)
    if origin is Literal and value not in get_args(form):
        raise ValueError(f"{value!r} is none of {get_args(form)}")
    return value


@cache
def _hints(form: type) -> dict[str, Any]:
    return get_type_hints(form)


def _decoded_container(value: dict[str, Any], form: Any) -> Any:
    inner = get_args(form)
    if value["$"] == "state":
        return torch.empty(0)
    if value["$"] == "dict":
        return {
            key: _decoded(item, inner[1] if len(inner) == 2 else Any)
            for key, item in value["items"].items()
        }
    repeated = len(inner) == 1 or (len(inner) == 2 and inner[1] is Ellipsis)
    forms = (
        [inner[0]] * len(value["items"])
        if repeated
        else inner or [Any] * len(value["items"])
    )
    items = [
        _decoded(item, part) for item, part in zip(value["items"], forms, strict=True)
    ]
    return tuple(items) if value["$"] == "tuple" else items
