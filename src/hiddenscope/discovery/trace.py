"""Trace: one pass with every call of every submodule recorded, and its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.taps import Tap
from hiddenscope.modules import autograd, calls, hooks, operations


def arguments(
    module: nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    targets: Tensor | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments for one pass over `ids` [text, token].

    `targets` are the decoder ids of an encoder-decoder.
    """
    keywords: dict[str, Any] = {"input_ids": ids}
    parameters = calls.plain_parameters(module)
    if parameters is not None:
        given_too = calls.GIVEN_IDS_TOO.get(type(calls.below_wrapper(module)))
        if given_too is not None:
            keywords[given_too] = ids
        return keywords
    names = calls.accepts(module)
    if "attention_mask" in names:
        keywords["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    if "use_cache" in names:
        keywords["use_cache"] = False
    # The layout models want a box for each token.
    if "bbox" in names:
        boxes = torch.zeros(*ids.shape, 4, dtype=torch.long, device=ids.device)
        keywords["bbox"] = boxes
    if targets is not None:
        keywords["decoder_input_ids"] = targets
    return keywords


@dataclass
class Call:
    """One call of one submodule: the states that went in and came out, and when.

    Times are ticks of the pass.
    """

    path: str
    number: int
    entered: int
    into: Tensor | None
    left: int = -1
    out: Tensor | None = None


@dataclass
class TracedOperation:
    """One attention, product or softmax, with copies of what it was made of.

    `places` are the calls of submodules that it was made in, outermost first: the path,
    the number of the call, and the number of the operation among those of its kind in
    that call.
    """

    kind: operations.OperationKind
    time: int
    places: tuple[tuple[str, int, int], ...]
    operands: tuple[Tensor, ...]
    output: Tensor


@dataclass
class Trace:
    """The calls of one pass in order, and the states that Hugging Face reports.

    `operations` are recorded only where they are asked for.
    """

    texts: int
    tokens: int
    output: Any = None
    calls: list[Call] = field(default_factory=list)
    reported_inside: list[tuple[Tensor, ...]] = field(default_factory=list)
    last_hidden_states: list[Tensor] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)

    def reports(self) -> list[tuple[Tensor, ...]]:
        """Return Hugging Face's tuples of hidden states.

        They are the model's own, or, where it returns none, its submodules'.
        """
        return _hidden_states(self.output) or self.reported_inside

    def call_at(self, tap: Tap) -> Call:
        """Return the call that a tap reads."""
        for call in self.calls:
            if call.path == tap.path and call.number == tap.call:
                return call
        raise AssertionError(f"{tap} is in every pass")

    def states_at(self, tap: Tap) -> Tensor:
        """Return the states at a tap [text, token, width]."""
        call = self.call_at(tap)
        tensor = call.into if tap.side == "input" else call.out
        assert tensor is not None, "a tap has a state in every pass"
        return tap.layout.states(tensor, self.tokens)


def trace(
    module: nn.Module, inputs: Mapping[str, Any], *, with_operations: bool = False
) -> Trace:
    """Run the module once and record each call of each submodule, with its states.

    With `with_operations`, attention calls, products and softmaxes are recorded too.
    """
    texts, tokens = inputs["input_ids"].shape
    traced = Trace(texts, tokens)
    clock = count()
    counts: Counter[str] = Counter()
    open_calls: list[Call] = []

    def watch(path: str, part: nn.Module) -> list[hooks.Watch]:
        def before(args: hooks.Args, kwargs: hooks.Kwargs) -> None:
            state = _copy(hooks.state_in(args, kwargs))
            call = Call(path, counts[path], next(clock), state)
            counts[path] += 1
            open_calls.append(call)
            traced.calls.append(call)

        def after(output: Any) -> None:
            call = open_calls.pop()
            call.left = next(clock)
            call.out = _copy(hooks.first_tensor(output))
            if isinstance(output, Mapping):
                for name, value in output.items():
                    if name.endswith("last_hidden_state") and isinstance(value, Tensor):
                        traced.last_hidden_states.append(value)
                traced.reported_inside += _hidden_states(output)

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]

    operation_counts: Counter[tuple[int, operations.OperationKind]] = Counter()

    def record(operation: operations.Operation, run: operations.RunOperation) -> Any:
        places = []
        for call in open_calls:
            key = (call.entered, operation.kind)
            places.append((call.path, call.number, operation_counts[key]))
            operation_counts[key] += 1
        operands: tuple[Tensor, ...] = ()
        # The weights of experts are large, and no state of a token.
        if not any(map(_is_weight, operation.operands)):
            operands = tuple(part.detach().clone() for part in operation.operands)
        output = run(operation)
        if isinstance(output, Tensor):
            copy = output.detach().clone()
            traced.operations.append(
                TracedOperation(
                    operation.kind, next(clock), tuple(places), operands, copy
                )
            )
        return output

    watches: list[hooks.Watch] = []
    for path, part in module.named_modules():
        watches += watch(path, part)
    if with_operations:
        watches.append(hooks.Watch(module, "inside", record))
    with (
        autograd.restored(),
        torch.no_grad(),
        hooks.restoring(module),
        hooks.watching(watches),
    ):
        traced.output = calls.call(
            module, inputs, output_hidden_states=True, return_dict=True
        )
    return traced


def _hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    """Return the tuples of hidden states in a module's output.

    Their names are `hidden_states`, `encoder_hidden_states` and the like.
    """
    if not isinstance(output, Mapping):
        return []
    reports = []
    for name, value in output.items():
        if name.endswith("hidden_states") and isinstance(value, tuple | list):
            entries = [hooks.first_tensor(entry) for entry in value]
            tensors = tuple(entry for entry in entries if entry is not None)
            if tensors and len(tensors) == len(entries):
                reports.append(tensors)
    return reports


def _is_weight(tensor: Tensor) -> bool:
    return any(isinstance(part, nn.Parameter) for part in (tensor, tensor._base))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
