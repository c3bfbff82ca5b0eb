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
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from functools import cache
from math import inf, isnan, sqrt
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hiddenscope.files import UNSEALED, check_seal, identity, replacing, seal
from hiddenscope.modules import hooks
from hiddenscope.results.report import read_report

Outcome = TypeVar("Outcome")

# A sum in a different order differs by some units in the last place, and the
# differences of the blocks of a residual stream add up like a random walk. In float32 a
# wrong mask or position is thousands of times farther off.
ULPS = 64
MOST_PER_BLOCK = 0.05  # for dtypes of few digits, before the factor of depth
# Two runs of the same texts in batches of different shapes differ by rounding alone: a
# few times that is allowed too.
NOISE_FACTOR = 8
# The key of a dtype in JSON, which has none.
DTYPE = "torch.dtype"


def tolerance(dtype: torch.dtype, depth: int) -> float:
    """Return how far rounding may move a state after `depth` blocks, or the logits.

    It is a share of the norm.

    >>> round(tolerance(torch.float32, 0) / torch.finfo(torch.float32).eps)
    64
    """
    return min(ULPS * torch.finfo(dtype).eps, MOST_PER_BLOCK) * sqrt(depth + 1)


def rounded_to(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose rounding shows in a pass with norms.

    Those of transformers compute in float32, whatever the dtype of the model.

    >>> rounded_to(torch.float64), rounded_to(torch.bfloat16)
    (torch.float32, torch.bfloat16)
    """
    return max((dtype, torch.float32), key=lambda dtype: torch.finfo(dtype).eps)


def without_excluded(expected: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Put zeros where both sides exclude a word by the same infinity.

    There they agree, and their difference would be a NaN.

    >>> without_excluded(torch.tensor([1.0, -inf]), torch.tensor([2.0, -inf]))
    (tensor([1., 0.]), tensor([2., 0.]))
    """
    excluded = expected.isinf() & (expected == other)
    if not excluded.any():
        return expected, other
    return expected.masked_fill(excluded, 0), other.masked_fill(excluded, 0)


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
        reference, other = without_excluded(states[row].double(), others[row].double())
        norm = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        allowed = torch.full_like(norm, tolerance(dtype or states.dtype, depth))
        if repeated is not None:
            again = without_excluded(states[row].double(), repeated[row].double())
            noise = (again[0] - again[1]).norm(dim=-1) / norm
            allowed = allowed.maximum(NOISE_FACTOR * noise)
        difference = (reference - other).norm(dim=-1) / norm
        excess = (difference / allowed).max().item()
        worst = max(worst, inf if isnan(excess) else excess)
    return worst


@dataclasses.dataclass(eq=False, repr=False)
class Trials:
    """The outcomes of what was tried on one module.

    >>> trials = Trials(nn.Linear(2, 2))
    >>> trials.once("answer", lambda: 42), trials.once("answer", lambda: 43)
    (42, 42)
    """

    module: nn.Module
    memory: Memory | None = None
    _outcomes: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    _config: tuple[Any, str] | None = None

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
        of plain values: for trials that take a large model seconds.
        """
        weight = next(self.module.parameters(), None)
        place = "" if weight is None else f"{weight.device} {weight.dtype}"
        foreign = hooks.foreign_hooks(self.module)
        values = config_values(getattr(self.module, "config", None))
        # Written out again only after a change: that takes longer than a short pass's
        # hooks.
        if self._config is None or self._config[0] != values:
            self._config = deepcopy(values), repr(values)
        # What can be changed on a loaded module, and would change an outcome.
        configuration = f"{place} {foreign} {self._config[1]}"
        full_key = (name, key, configuration)
        if full_key in self._outcomes:
            return cast(Outcome, self._outcomes[full_key])
        memory, outcome = self.memory, None
        # What a user's hook does is not known in another process.
        if memory is None or form is None or foreign:
            outcome = attempt()
        else:
            digest = hashlib.sha256(repr(full_key[1:]).encode()).hexdigest()
            title = f"{name} {digest[:16]}"
            outcome = memory.recall(title, form)
            if outcome is None:
                outcome = attempt()
                memory.keep(title, outcome)
        self._outcomes[full_key] = outcome
        return outcome

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


def config_values(config: Any) -> list[tuple[str, Any]]:
    """Return a configuration as plain values by path, the attention kernel among them.

    Two configurations may be equal and differ: transformers compares declared fields
    alone, and refuses to compare those that it keeps for each layer.
    """
    values = []
    waiting = [("", config)]
    for path, value in waiting:
        kind = type(value)
        if hasattr(kind, "to_diff_dict") or dataclasses.is_dataclass(kind):
            value = {**vars(value)}
            value.pop("_name_or_path", None)
        if type(value) is dict:
            waiting += [(f"{path}.{key}", part) for key, part in value.items()]
        elif type(value) in (list, tuple):
            waiting += [(f"{path}.{key}", part) for key, part in enumerate(value)]
        else:
            values.append((path, value))
    return values


class Memory:
    """Outcomes on disk, in one JSON file for each key.

    A file that cannot be read counts as none.
    """

    def __init__(self, folder: Path, *identity: object) -> None:
        text = json.dumps([_code_version(), *map(str, identity)])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = folder / "trials" / f"{name}.json"
        self.recalled: set[str] = set()
        self._outcomes = self._read()

    def knows(self, name: str) -> bool:
        """Tell whether there is any outcome of this name."""
        return any(title.startswith(f"{name} ") for title in self._outcomes)

    def recall(self, title: str, form: type[Outcome]) -> Outcome | None:
        """Return the outcome of a title, of this class; None if there is none."""
        if title not in self._outcomes:
            return None
        text = json.dumps(self._outcomes[title])
        try:
            outcome = read_report(form, json.loads(text, object_hook=_with_dtypes))
        except (TypeError, ValueError, LookupError, AttributeError):
            return None
        self.recalled.add(title)
        return outcome

    def keep(self, title: str, outcome: object) -> None:
        """Keep an outcome, if it is of plain values and the folder can be written."""
        try:
            self._outcomes[title] = json.loads(json.dumps(outcome, default=_fields))
            content = {"outcomes": self._outcomes, "seal": UNSEALED}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as fresh:
                fresh.write_text(json.dumps(content), "utf-8")
                seal(fresh)
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
            check_seal(self.path, f"Cannot read {self.path.name}")
            outcomes: dict[str, Any] = json.loads(self.path.read_bytes())["outcomes"]
            return outcomes
        except (OSError, ValueError, LookupError, TypeError):
            return {}


def weights_identity(folder: Path) -> str | None:
    """Tell the weights of a folder from others without reading them."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return None
    return identity(sorted([*weights, *folder.glob("*.json")]))


@cache
def _code_version() -> str:
    """Identify our own code: another version may try things differently."""
    return identity(sorted(Path(__file__).parents[1].glob("**/*.py")))


def _fields(value: Any) -> dict[str, Any]:
    """Return what JSON keeps of a dtype or of a dataclass; others are a TypeError."""
    if isinstance(value, torch.dtype):
        return {DTYPE: str(value).removeprefix("torch.")}
    # What the constructor does not take is no part of the value.
    fields = filter(lambda field: field.init, dataclasses.fields(value))
    return {field.name: getattr(value, field.name) for field in fields}


def _with_dtypes(part: dict[str, Any]) -> Any:
    return getattr(torch, part[DTYPE]) if DTYPE in part else part
