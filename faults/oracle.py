"""What is true of a planted fault, found with plain hooks and without hiddenscope: does
it move the output, and what is wrong on equal input?"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from faults.models import Subject, in_float64, outputs, with_kernel
from faults.planted import ModelParts, Planted

# How far beyond the largest rounding noise of the reference an output must move.
FACTOR = 4.0


def noise(of: Subject) -> float:
    """The largest difference of a logit between runs of the reference that differ in
    rounding alone.

    Another kernel, another batch, and the same in float64.
    """
    base = outputs(of.module, of)
    kernel = "eager" if of.module.config._attn_implementation == "sdpa" else None
    others = [outputs(of.module, of, together=True), outputs(in_float64(of.module), of)]
    if kernel is not None:
        others.append(outputs(with_kernel(of.module, kernel), of))
    return max(float((other - base).abs().max()) for other in others)


def moved(of: Subject, candidate: nn.Module) -> float:
    """The largest difference of a logit, of every text by itself; infinite where one is
    not finite.
    """
    difference = (outputs(candidate, of) - outputs(of.module, of)).abs()
    return (
        float(difference.max()) if bool(difference.isfinite().all()) else float("inf")
    )


@dataclass
class Call:
    """One call of a module in the reference."""

    path: str
    args: Any
    kwargs: Any
    output: Any = None
    depth: int = field(default=0)


def calls(module: nn.Module, given: dict[str, Any]) -> list[Call]:
    """Every call of every module in one pass, in the order in which they began."""
    seen: list[Call] = []
    open_calls: list[Call] = []
    handles = []
    for path, part in module.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            call = Call(path, _copied(args), _copied(kwargs), depth=len(open_calls))
            seen.append(call)
            open_calls.append(call)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            open_calls.pop().output = _copied(output)

        handles += [part.register_forward_pre_hook(before, with_kwargs=True)]
        handles += [part.register_forward_hook(after, with_kwargs=True)]
    try:
        with torch.no_grad():
            module(**given)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def wrong_on_equal_input(of: Subject, candidate: nn.Module) -> list[str]:
    """The paths of the modules that do not give the reference's output for the
    reference's input, the first first.
    """
    parts = dict(candidate.named_modules())
    found: dict[str, None] = {}
    for given in _passes(of):
        for call in calls(of.module, given):
            if call.path in found or call.path not in parts:
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
                found[call.path] = None
    return list(found)


def deepest(wrong: list[str]) -> list[str]:
    """Those of which no module inside is wrong."""
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
    """The first block output that differs in a plain run: its site; `blocks` are sites
    by path, with what enters.
    """
    for given in _passes(of):
        ours, theirs = calls(of.module, given), calls(candidate, given)
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
    """What a fault declares that is not so: its module, or its first site; nothing if
    all of it is.
    """
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
    return (
        ""
        if first == expected
        else f"declares {planted.first_site}, and {first} differs first"
    )


def _passes(of: Subject) -> Iterator[dict[str, Any]]:
    targets = of.target_ids
    for number, ids in enumerate(of.ids):
        given: dict[str, Any] = {"input_ids": torch.tensor([ids]), "use_cache": False}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if targets is not None:
            given["decoder_input_ids"] = torch.tensor([targets[number]])
        yield given


def _first_input(call: Call) -> Any:
    return call.args[0] if call.args else call.kwargs["hidden_states"]


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    return (
        {name: _copied(item) for name, item in value.items()}
        if type(value) is dict
        else value
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether two outputs hold the same tensors, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(
            _equal(a, b) for a, b in zip(one, other, strict=True)
        )
    if hasattr(one, "items"):
        return one.keys() == other.keys() and all(
            _equal(one[name], other[name]) for name in one
        )
    return isinstance(one, Tensor) == isinstance(other, Tensor)
