"""List what goes wrong in any module: its attributes, its parts, and what becomes of
its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.analyses.drift.calls import ModuleCall
from hiddenscope.analyses.drift.suspect import Suspect, Trial
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import private_copy

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the exact GELU (erf)": functional.gelu,
    "GELU by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "GELU by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": functional.silu,
    "ReLU": functional.relu,
    "squared ReLU": lambda x: functional.relu(x).square(),
    "no activation": lambda x: x,
}
PLAIN = (bool, int, float, str)
# A fitted number that is nearer to 1 than this is no change.
NEAR_ONE = 1e-3


def attributes(suspect: Suspect) -> Iterator[Trial]:
    """Give the reference the candidate's attributes, one by one."""
    for name, value in vars(suspect.reference).items():
        other = vars(suspect.candidate).get(name)
        is_plain = isinstance(value, PLAIN) and isinstance(other, PLAIN)
        if not is_plain or value == other or name == "training" or name.startswith("_"):
            continue
        module = private_copy(suspect.reference)
        setattr(module, name, other)
        evidence = (
            f"`{name}` is {other!r} in the candidate and {value!r} in the reference."
        )
        yield "attribute", evidence, suspect.run(module)


def effects(suspect: Suspect) -> Iterator[Trial]:
    """Compare the output with simple functions of the input and of the reference's
    output.
    """
    expected, state = suspect.expected, suspect.state
    scale = _fit(expected, suspect.made)
    if not isclose(scale, 1.0, rel_tol=NEAR_ONE):
        yield (
            "scale",
            f"The output is the reference's times {scale:.6g}.",
            scale * expected,
        )
    rows = ~suspect.made.any(-1, keepdim=True) & expected.any(-1, keepdim=True)
    yield (
        "zero_rows",
        f"{int(rows.sum()):,} rows of the output are exactly zero.",
        expected.masked_fill(rows, 0),
    )
    if state is None:
        return
    block = suspect.role == "block"
    args, kwargs = hooks.with_state_in(suspect.call.args, suspect.call.kwargs, expected)
    again = suspect.run(
        suspect.reference, replace(suspect.call, args=args, kwargs=kwargs)
    )
    yield (
        "layer_skipped" if block else "not_applied",
        f"The {suspect.role} returns its input.",
        state,
    )
    yield (
        "layer_doubled" if block else "applied_twice",
        f"The {suspect.role} is applied twice.",
        again,
    )
    factor = _fit(expected - state, suspect.made - state)
    if block and abs(factor) > NEAR_ONE:
        evidence = (
            f"What the block adds to its input is the reference's times {factor:.6g}."
        )
        yield "residual_scale", evidence, state + factor * (expected - state)


def _fit(expected: Tensor, output: Tensor) -> float:
    """Fit the number that one tensor is multiplied by to give another, by least
    squares.
    """
    wide, other = expected.double(), output.double()
    return float(
        (wide * other).sum()
        / wide.square().sum().clamp_min(torch.finfo(wide.dtype).tiny)
    )


def biases(suspect: Suspect) -> Iterator[Trial]:
    """Leave the bias of the module out, or add it twice."""
    bias = suspect.reference._parameters.get("bias")
    if bias is not None and bias.shape == suspect.expected.shape[-1:]:
        added = bias.detach()
        yield (
            "missing_bias",
            "The output is the reference's without its bias.",
            suspect.expected - added,
        )
        yield (
            "bias_twice",
            "The output is the reference's with its bias added twice.",
            suspect.expected + added,
        )


def other_blocks(suspect: Suspect) -> Iterator[Trial]:
    """Call the reference's other blocks."""
    for site, block in suspect.blocks.items():
        if suspect.role == "block" and type(block) is type(suspect.reference):
            yield (
                "swapped_layer",
                f"The output is that of the block that makes `{site}`.",
                suspect.run(block),
            )


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(x)


def activations(suspect: Suspect) -> Iterator[Trial]:
    """Put another activation in the place of one in the reference, or of the module
    itself.
    """
    for call in suspect.call.leaves():
        path = call.path.removeprefix(suspect.call.path).lstrip(".")
        if not _is_activation(call):
            continue
        place = f" in the place of `{path}`" if path else ""
        parent, _, name = path.rpartition(".")
        for words, function in ACTIVATIONS.items():
            module = private_copy(suspect.reference) if path else _Function(function)
            if path:
                setattr(module.get_submodule(parent), name, _Function(function))
            yield (
                "activation",
                f"The output is that of {words}{place}.",
                suspect.run(module),
            )


def _is_activation(call: ModuleCall) -> bool:
    """Tell whether a module did roughly what a known activation does."""
    state, output = call.state, call.output
    if state is None or output is None or state.shape != output.shape:
        return False
    return any(
        torch.allclose(function(state), output, 0.01, 0.01)
        for function in ACTIVATIONS.values()
    )


def exchanged_parts(suspect: Suspect) -> Iterator[Trial]:
    """Exchange two parts of one make and size, such as queries and keys, or gate and
    up.
    """
    module = private_copy(suspect.reference)
    for parent in module.modules():
        pairs = combinations(parent.named_children(), 2)
        for (name, part), (other_name, other) in pairs:
            if isinstance(parent, nn.ModuleList) or _make(part) != _make(other):
                continue
            setattr(parent, name, other)
            setattr(parent, other_name, part)
            evidence = f"The output is that of `{name}` and `{other_name}` exchanged."
            yield "exchanged_parts", evidence, suspect.run(module)
            setattr(parent, name, part)
            setattr(parent, other_name, other)


def _make(part: nn.Module) -> list[Any]:
    return [type(part), *(weight.shape for weight in part.parameters())]


HYPOTHESES = (effects, biases, other_blocks, activations, exchanged_parts)
