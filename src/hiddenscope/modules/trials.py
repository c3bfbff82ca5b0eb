"""Trials: whatever a model may or may not do is tried on it, once, and remembered.

Padding a batch, skipping blocks, reusing keys and values, running the head on single
tokens: none of it is assumed. Each is tried on the model and compared with a plain pass
within one rounding tolerance. The outcome is remembered in memory, and on disk too for
a model that was loaded from a folder, under a key of everything that could change it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
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
    """Return how far rounding may move a state after `depth` blocks, or the logits.

    It is a share of the norm.

    >>> round(tolerance(torch.float32, 0) / torch.finfo(torch.float32).eps)
    64
    """
    return min(ULPS * torch.finfo(dtype).eps, MOST_PER_BLOCK) * sqrt(depth + 1)


def disagreement(
    states: Tensor,
    others: Tensor,
    depths: Sequence[int],
    repeated: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> float:
    """Return the largest difference between two computations of the same states.

    It is in units of the tolerance, for states [site, token, width] after some depths.
    `repeated` are `states` computed again in a batch of a different shape: some times
    their difference is allowed too. A NaN on either side is an infinite disagreement.

    >>> disagreement(torch.ones(1, 2, 4), torch.ones(1, 2, 4), [3])
    0.0
    """
    worst = 0.0
    for row, depth in enumerate(depths):
        reference = states[row].double()
        norm = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        allowed = torch.full_like(norm, tolerance(dtype or states.dtype, depth))
        if repeated is not None:
            noise = (reference - repeated[row].double()).norm(dim=-1) / norm
            allowed = allowed.maximum(NOISE_FACTOR * noise)
        difference = (reference - others[row].double()).norm(dim=-1) / norm
        excess = (difference / allowed).max().item()
        worst = max(worst, inf if isnan(excess) else excess)
    return worst


class Trials:
    """The outcomes of what was tried on one module.

    >>> trials = Trials(nn.Linear(2, 2))
    >>> trials.once("answer", lambda: 42), trials.once("answer", lambda: 43)
    (42, 42)
    """

    def __init__(self, module: nn.Module, memory: Memory | None = None) -> None:
        self.module = module
        self.memory = memory
        self._outcomes: dict[Hashable, Any] = {}
        self._config: tuple[Any, str] | None = None

    def once(
        self,
        name: str,
        attempt: Callable[[], Outcome],
        *,
        key: Hashable = (),
        form: type[Outcome] | None = None,
    ) -> Outcome:
        """Return the outcome of an attempt, made once for the module as it is now.

        `key` tells apart trials of one name. With `form`, the type of the outcome, it
        is kept on disk too, where the module has a memory there and the outcome is made
        of plain values.
        """
        full_key = (name, key, self._configuration())
        if full_key not in self._outcomes:
            self._outcomes[full_key] = self._recall_or_try(full_key, attempt, form)
        return cast(Outcome, self._outcomes[full_key])

    def recalled(self, name: str) -> bool:
        """Tell whether an outcome of this name comes from an earlier process."""
        if self.memory is None:
            return False
        return any(title.startswith(f"{name} ") for title in self.memory.recalled)

    def forget(self) -> None:
        """Drop every outcome, on disk too, so that everything is tried again."""
        self._outcomes.clear()
        if self.memory is not None:
            self.memory.forget()

    def _recall_or_try(
        self,
        key: tuple[str, Hashable, str],
        attempt: Callable[[], Any],
        form: type | None,
    ) -> Any:
        # What a user's hook does is not known in another process.
        if self.memory is None or form is None or hooks.foreign_hooks(self.module):
            return attempt()
        title = f"{key[0]} {hashlib.sha256(repr(key[1:]).encode()).hexdigest()[:16]}"
        outcome = self.memory.recall(title, form)
        if outcome is None:
            outcome = attempt()
            self.memory.keep(title, outcome)
        return outcome

    def _configuration(self) -> str:
        """Describe what can be changed on a loaded module and would change an outcome.

        That is its config, its device, its dtype and its hooks.
        """
        weight = next(self.module.parameters(), None)
        place = "" if weight is None else f"{weight.device} {weight.dtype}"
        return f"{place} {hooks.foreign_hooks(self.module)} {self._config_text()}"

    def _config_text(self) -> str:
        # Made again only after a change: that takes longer than a short pass's hooks.
        values = config_values(getattr(self.module, "config", None))
        if self._config is None or self._config[0] != values:
            self._config = deepcopy(values), repr(values)
        return self._config[1]


def config_values(value: Any) -> Any:
    """Return a configuration as plain values, the attention kernel among them.

    Two configurations may be equal and differ: transformers compares declared fields
    alone, and refuses to compare those that it keeps for each layer.
    """
    if hasattr(value, "to_diff_dict") or _is_dataclass(value):
        value = {**vars(value)}
        value.pop("_name_or_path", None)
    if type(value) is dict:
        return {key: config_values(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return [config_values(part) for part in value]
    return value


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class Memory:
    """Outcomes on disk, in one JSON file for each key.

    A file that cannot be read counts as none.
    """

    def __init__(self, folder: Path, *identity: object) -> None:
        text = json.dumps([_code_version(), *map(str, identity)])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = folder / "trials" / f"{name}.json"
        self.recalled: set[str] = set()
        self._outcomes: dict[str, Any] = self._read()

    def knows(self, name: str) -> bool:
        """Tell whether there is any outcome of this name."""
        return any(title.startswith(f"{name} ") for title in self._outcomes)

    def recall(self, title: str, form: type[Outcome]) -> Outcome | None:
        """Return the outcome of a title, of this class; None if there is none."""
        if title not in self._outcomes:
            return None
        try:
            outcome = cast(Outcome, _decoded(self._outcomes[title], form))
        except (TypeError, ValueError, LookupError, AttributeError):
            return None
        self.recalled.add(title)
        return outcome

    def keep(self, title: str, outcome: object) -> None:
        """Keep an outcome, if it is of plain values and the folder can be written."""
        try:
            self._outcomes[title] = _encoded(outcome)
            sealed = {"outcomes": self._outcomes, "sha256": _checksum(self._outcomes)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as fresh:
                fresh.write_text(json.dumps(sealed, allow_nan=True), "utf-8")
        except (TypeError, OSError):
            # A memory is a convenience: without it the trial is made again.
            self._outcomes.pop(title, None)

    def forget(self) -> None:
        """Drop everything that was kept under this key."""
        self._outcomes.clear()
        self.recalled.clear()
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            stored = json.loads(self.path.read_text("utf-8"))
            outcomes: dict[str, Any] = stored["outcomes"]
            intact = _checksum(outcomes) == stored["sha256"]
        except (OSError, ValueError, LookupError, TypeError):
            return {}
        return outcomes if intact else {}


def _checksum(outcomes: Mapping[str, Any]) -> str:
    body = json.dumps(outcomes, sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()


def weights_identity(folder: Path) -> str | None:
    """Tell the weights of a folder from others without reading them."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return None
    return identity(sorted([*weights, *folder.glob("*.json")]))


@cache
def _code_version() -> str:
    """Identify our own code: another version may try things differently."""
    stats = []
    for entry in sorted(Path(__file__).parents[1].glob("**/*.py")):
        stat = os.stat(entry)
        stats.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    """Return a dataclass of plain values as JSON.

    An empty tensor marks the place of the state in an output of `hooks.form`.
    """
    if _is_dataclass(value):
        fields = {}
        for field in dataclasses.fields(value):
            # What the constructor does not take is no part of the value.
            if field.init:
                fields[field.name] = _encoded(getattr(value, field.name))
        return fields
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor) and not value.numel():
        return {"$": "state"}
    if type(value) is tuple or type(value) is list:
        return {"$": type(value).__name__, "items": [_encoded(item) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        items = {key: _encoded(item) for key, item in value.items()}
        return {"$": "dict", "items": items}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _decoded(value: Any, form: Any) -> Any:
    """Return a value of type `form` from its JSON; the inverse of `_encoded`."""
    origin = get_origin(form)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _decoded_union(value, get_args(form))
    if dataclasses.is_dataclass(form) and isinstance(form, type):
        hints = _hints(form)
        fields = {}
        for field in filter(lambda field: field.init, dataclasses.fields(form)):
            fields[field.name] = _decoded(value[field.name], hints[field.name])
        return form(**fields)
    if form is torch.dtype:
        return getattr(torch, value)
    if isinstance(value, dict):
        return _decoded_container(value, get_args(form))
    if origin is Literal and value not in get_args(form):
        raise ValueError(f"{value!r} is none of {get_args(form)}")
    return value


def _decoded_union(value: Any, forms: tuple[Any, ...]) -> Any:
    """Return a value of the first of several types that it can be."""
    for form in forms:
        if form is type(None):
            continue
        try:
            return _decoded(value, form)
        except (TypeError, LookupError, AttributeError):
            # Another type has other fields.
            continue
    raise ValueError(f"{value!r:.60} is of none of these types")


@cache
def _hints(form: type) -> dict[str, Any]:
    return get_type_hints(form)


def _decoded_container(value: dict[str, Any], inner: tuple[Any, ...]) -> Any:
    """Return a container from its JSON; `inner` are the type's own arguments."""
    kind = value["$"]
    if kind == "state":
        return torch.empty(0)
    items = value["items"]
    if kind == "dict":
        form = inner[1] if len(inner) == 2 else Any
        return {key: _decoded(item, form) for key, item in items.items()}
    if not inner:
        forms = [Any] * len(items)
    elif len(inner) == 1 or inner[1] is Ellipsis:
        forms = [inner[0]] * len(items)
    else:
        forms = list(inner)
    pairs = zip(items, forms, strict=True)
    decoded = [_decoded(item, form) for item, form in pairs]
    return tuple(decoded) if kind == "tuple" else decoded
