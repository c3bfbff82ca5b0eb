"""One pass with every call of every part written down."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope import hooks


@dataclass
class Call:
    """One call of one part: the state that went in, the state that came out, and when."""

    path: str
    number: int
    entered: int
    into: Tensor | None
    left: int = -1
    out: Tensor | None = None


@dataclass
class Trace:
    """The calls of one pass, in the order they were entered, and what Hugging Face itself reports of it."""

    texts: int
    tokens: int
    output: Any = None
    calls: list[Call] = field(default_factory=list)
    tuples: list[tuple[Tensor, ...]] = field(default_factory=list)
    lasts: list[Tensor] = field(default_factory=list)

    def reports(self) -> list[tuple[Tensor, ...]]:
        """Hugging Face's tuples of hidden states: the model's own, or, where it gives none, those of its parts."""
        return _tuples(self.output) or self.tuples


def trace(module: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    """Run once and write down each call of each part, with copies of the states."""
    seen = Trace(*inputs["input_ids"].shape)
    clock = _clock()
    counts: Counter[str] = Counter()
    open_calls: list[Call] = []

    def watches(path: str, part: nn.Module) -> list[hooks.Watch]:
        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            call = Call(path, counts[path], next(clock), _copy(hooks.state_in(args, kwargs)))
            counts[path] += 1
            open_calls.append(call)
            seen.calls.append(call)

        def after(output: Any) -> None:
            call = open_calls.pop()
            call.left, call.out = next(clock), _copy(hooks.first_tensor(output))
            _note_reports(output, seen)

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]

    all_parts = [watch for path, part in module.named_modules() for watch in watches(path, part)]
    asked = {**inputs, "output_hidden_states": True, "return_dict": True}
    with torch.no_grad(), hooks.as_it_was(module), hooks.watching(all_parts):
        seen.output = module(**asked)
    return seen


def _note_reports(output: Any, seen: Trace) -> None:
    if isinstance(output, Mapping):
        named = [value for name, value in output.items() if name.endswith("last_hidden_state")]
        seen.lasts += [value for value in named if isinstance(value, Tensor)]
        seen.tuples += _tuples(output)


def _tuples(output: Any) -> list[tuple[Tensor, ...]]:
    if not isinstance(output, Mapping):
        return []
    found = []
    for name, value in output.items():
        if name.endswith("hidden_states") and isinstance(value, tuple | list):
            entries = [hooks.first_tensor(entry) for entry in value]
            if entries and all(entry is not None for entry in entries):
                found.append(tuple(entry for entry in entries if entry is not None))
    return found


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _clock() -> Iterator[int]:
    tick = 0
    while True:
        yield tick
        tick += 1
