"""Check planted faults with plain hooks, without hiddenscope.

Does a fault move the output, and which modules are wrong on equal input?
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labs.faults.models import Subject, in_float64, outputs, with_kernel
from labs.faults.planted import ModelParts, Planted

# How far beyond the largest rounding noise of the reference an output must move.
FACTOR = 4.0


def noise(of: Subject) -> float:
    """Return the largest difference of a logit that rounding makes in the reference.

    It is run with another kernel, in another batch, and in float64.
    """
    base = outputs(of.module, of)
    kernel = "eager" if of.module.config._attn_implementation == "sdpa" else None
    others = [outputs(of.module, of, together=True), outputs(in_float64(of.module), of)]
    if kernel is not None:
        others.append(outputs(with_kernel(of.module, kernel), of))
    return max(float((other - base).abs().max()) for other in others)


def moved(of: Subject, candidate: nn.Module) -> float:
    """Return the largest difference of a logit; infinite if one is not finite."""
    difference = (outputs(candidate, of) - outputs(of.module, of)).abs()
    if not bool(difference.isfinite().all()):
        return float("inf")
    return float(difference.max())


@dataclass
class Call:
    """One call of a module in the reference."""

    path: str
    args: Any
    kwargs: Any
    output: Any = None
    depth: int = field(default=0)


def calls(module: nn.Module, arguments: dict[str, Any]) -> list[Call]:
    """Record every call of every module in one pass, in order of their start."""
    recorded: list[Call] = []
    open_calls: list[Call] = []
    handles = []
    for path, part in module.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            call = Call(path, _copied(args), _copied(kwargs), depth=len(open_calls))
            recorded.append(call)
            open_calls.append(call)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            open_calls.pop().output = _copied(output)

        handles += [part.register_forward_pre_hook(before, with_kwargs=True)]
        handles += [part.register_forward_hook(after, with_kwargs=True)]
    try:
        with torch.no_grad():
            module(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    return recorded


def wrong_on_equal_input(of: Subject, candidate: nn.Module) -> list[str]:
    """Return the modules whose output differs on the reference's input, in order."""
    parts = dict(candidate.named_modules())
    wrong: dict[str, None] = {}
    for arguments in _passes(of):
        for call in calls(of.module, arguments):
            if call.path in wrong or call.path not in parts:
                continue
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    output = parts[call.path](
                        *_copied(call.args), **_copied(call.kwargs)
                    )
                    same = _equal(output, call.output)
                except RuntimeError:  # another dtype, or another shape
                    same = False
            if not same:
                wrong[call.path] = None
    return list(wrong)


def deepest(wrong: list[str]) -> list[str]:
    """Return those that hold no other wrong module."""
    return [
        path
        for path in wrong
        if not any(other != path and _within(other, path) for other in wrong)
    ]


def _within(path: str, parent: str) -> bool:
    return not parent or path.startswith(f"{parent}.")


def first_state(
    of: Subject, candidate: nn.Module, blocks: dict[str, str]
) -> str | None:
    """Return the first site that differs in a plain run; `blocks` are sites by path."""
    for arguments in _passes(of):
        ours, theirs = calls(of.module, arguments), calls(candidate, arguments)
        mine = {call.path: call for call in ours if call.path in blocks}
        other = {call.path: call for call in theirs if call.path in blocks}
        for path, call in mine.items():
            if path.endswith(".0") and not _equal(
                _first_input(call), _first_input(other[path])
            ):
                return blocks[path].rpartition(".")[0] + ".0"
            if not _equal(_first(call.output), _first(other[path].output)):
                return blocks[path]
    return None


def objection(of: Subject, planted: Planted) -> str:
    """Say what a fault declares wrongly: its module or its first site."""
    wrong = deepest(wrong_on_equal_input(of, planted.module))
    if not wrong or wrong[0] not in planted.paths:
        return (
            f"declares {' or '.join(planted.paths[:3])}, and on equal input {wrong[:3]}"
            " are wrong"
        )
    parts = ModelParts(of.module)
    sites = {block.path: block.site for block in parts.blocks} | {
        path: parts.site(path) for path in parts.final_norms
    }
    first = first_state(of, planted.module, sites)
    expected = None if planted.first_site == "logits" else planted.first_site
    if first == expected:
        return ""
    return f"declares {planted.first_site}, and {first} differs first"


def _passes(of: Subject) -> Iterator[dict[str, Any]]:
    targets = of.target_ids
    for number, ids in enumerate(of.ids):
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([ids]),
            "use_cache": False,
        }
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        if targets is not None:
            arguments["decoder_input_ids"] = torch.tensor([targets[number]])
        yield arguments


def _first_input(call: Call) -> Any:
    return call.args[0] if call.args else call.kwargs["hidden_states"]


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    return value


def _equal(value: Any, other: Any) -> bool:
    """Check whether two outputs hold the same tensors, bit for bit."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return (
            value.shape == other.shape
            and value.dtype == other.dtype
            and torch.equal(value, other)
        )
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(
            _equal(a, b) for a, b in zip(value, other, strict=True)
        )
    if hasattr(value, "items"):
        return value.keys() == other.keys() and all(
            _equal(value[name], other[name]) for name in value
        )
    return isinstance(value, Tensor) == isinstance(other, Tensor)
