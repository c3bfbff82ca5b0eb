"""Hypotheses about modules of any kind: their weights, attributes, parts and outputs.

Each function yields hypotheses about one topic. A note about a topic that could not be
tested takes its name from the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.analyses.drift.calls import ModuleCall
from hiddenscope.analyses.drift.suspect import Hypothesis, Suspect
from hiddenscope.modules.module_copy import named_weights, private_copy

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
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# A fitted factor that is nearer to 1 than this is no change.
NEAR_ONE = 1e-3


def weights(suspect: Suspect) -> Iterator[Hypothesis]:
    """Give the reference the candidate's weights, and say how each one differs."""
    if not suspect.same_make:
        return
    candidates = dict(named_weights(suspect.candidate))

    def convert(name: str, weight: Tensor) -> Tensor:
        other = candidates.get(name, weight)
        return other.detach().to(weight) if other.shape == weight.shape else weight

    output = suspect.run(private_copy(suspect.reference, convert))
    for name, parameter in named_weights(suspect.reference):
        other = candidates.get(name, parameter).detach()
        weight = parameter.detach()
        # If the whole candidate is narrower, its weights are compared in its dtype.
        if other.dtype == suspect.output.dtype:
            weight = weight.to(other.dtype)
        other = other.to(weight)
        if torch.equal(weight, other):
            continue
        fault, words = _relation(suspect, weight, other)
        if name.endswith("inv_freq"):
            fault, words = _rotary_relation(fault, words, other)
        # The reference cannot run with another shape, which is a fault by itself.
        predicted = suspect.output if other.shape != weight.shape else output
        yield Hypothesis(fault, f"`{name}` of the candidate {words}.", predicted)


def _relation(suspect: Suspect, weight: Tensor, other: Tensor) -> tuple[str, str]:
    """Say how a weight was made from the reference's: a fault and a clause."""
    if weight.shape != other.shape:
        expected, actual = list(weight.shape), list(other.shape)
        return "other_shape", f"has the shape {actual}, and the reference's {expected}"
    if weight.is_floating_point():
        tolerance = 4 * torch.finfo(weight.dtype).eps
        for fault, words, changed in _changed_weights(suspect, weight, other):
            is_same_shape = changed.shape == other.shape
            if is_same_shape and torch.allclose(changed, other, tolerance, 0.0):
                return fault, words
    share = (weight != other).double().mean()
    change, norm = (other - weight).double().norm(), weight.double().norm()
    words = (
        f"differs in {share:.1%} of its elements, by a norm of {change:.2g}; the"
        f" reference's norm is {norm:.2g}"
    )
    return "changed_weight", words


def _changed_weights(
    suspect: Suspect, weight: Tensor, other: Tensor
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield a fault, a clause and the weight that it would leave."""
    value = other.flatten()[0]
    fault = "constant_weight" if value else "zeroed_weight"
    yield fault, f"is {value:g} everywhere", value.expand_as(weight)
    for dtype in NARROW:
        words = f"is the reference's, rounded to {dtype}"
        yield "rounded_weight", words, weight.to(dtype).to(weight)
    for name, parameter in suspect.model.named_parameters():
        if parameter.shape == weight.shape:
            words = f"is the reference's `{name}`"
            yield "exchanged_weight", words, parameter.detach().to(weight)
    scale = (weight * other).double().sum() / weight.double().square().sum()
    words = f"is the reference's times {scale:.6g}"
    yield "scaled_weight", words, scale.to(weight) * weight
    if weight.ndim > 1:
        yield "transposed_weight", "is the reference's, transposed", weight.mT
    for axis, slices in enumerate(("rows", "columns")[: weight.ndim]):
        order = _slice_keys(other, axis).argsort().argsort()
        permuted = weight.index_select(axis, _slice_keys(weight, axis).argsort()[order])
        words = f"has the reference's {slices} in another order"
        yield "permuted_weight", words, permuted


def _slice_keys(weight: Tensor, axis: int) -> Tensor:
    """Return a key for each slice along an axis: a sum with a factor per element.

    Two different slices hardly ever have the same key.
    """
    slices = weight.movedim(axis, 0).reshape(weight.shape[axis], -1).double()
    factors = torch.linspace(1, 2, slices.shape[1], dtype=slices.dtype)
    factors = factors.to(slices.device)
    return (slices * factors).sum(1)


def _rotary_relation(fault: str, words: str, frequencies: Tensor) -> tuple[str, str]:
    """Say how the frequencies of rotary positions differ."""
    if fault == "scaled_weight":
        return "rope_scaling", words
    count = len(frequencies)
    exponents = torch.arange(count, device=frequencies.device).double() / count
    logarithms = -frequencies.double().log()
    log_base = (logarithms @ exponents) / exponents.square().sum()
    if not torch.allclose(logarithms, log_base * exponents, atol=1e-3):
        return fault, words
    return "rope_base", f"has the base {float(log_base.exp()):,.0f}"


def attributes(suspect: Suspect) -> Iterator[Hypothesis]:
    """Give the reference the candidate's attributes, one at a time."""
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
        yield Hypothesis("attribute", evidence, suspect.run(module))


def effects(suspect: Suspect) -> Iterator[Hypothesis]:
    """Compare the output with functions of the input and of the reference's output."""
    expected, state = suspect.expected, suspect.state
    scale = _fit_factor(expected, suspect.output)
    if not isclose(scale, 1.0, rel_tol=NEAR_ONE):
        evidence = f"The output is the reference's times {scale:.6g}."
        yield Hypothesis("scale", evidence, scale * expected)
    is_zero = ~suspect.output.any(-1, keepdim=True) & expected.any(-1, keepdim=True)
    evidence = f"{int(is_zero.sum()):,} rows of the output are exactly zero."
    yield Hypothesis("zero_rows", evidence, expected.masked_fill(is_zero, 0))
    if state is None:
        return
    role = suspect.role
    skipped, doubled = "not_applied", "applied_twice"
    if role == "block":
        skipped, doubled = "layer_skipped", "layer_doubled"
    yield Hypothesis(skipped, f"The {role} returns its input.", state)
    again = suspect.run(suspect.reference, suspect.call.with_state(expected))
    yield Hypothesis(doubled, f"The {role} is applied twice.", again)
    factor = _fit_factor(expected - state, suspect.output - state)
    if role == "block" and abs(factor) > NEAR_ONE:
        evidence = (
            f"What the block adds to its input is the reference's times {factor:.6g}."
        )
        scaled = state + factor * (expected - state)
        yield Hypothesis("residual_scale", evidence, scaled)


def _fit_factor(expected: Tensor, output: Tensor) -> float:
    """Fit by least squares the factor that turns one tensor into another."""
    wide = expected.double()
    size = wide.square().sum().clamp_min(torch.finfo(wide.dtype).tiny)
    return float((wide * output.double()).sum() / size)


def biases(suspect: Suspect) -> Iterator[Hypothesis]:
    """Omit the bias of the module, or add it twice."""
    parameter = suspect.reference._parameters.get("bias")
    if parameter is None or parameter.shape != suspect.expected.shape[-1:]:
        return
    expected, bias = suspect.expected, parameter.detach()
    words = "The output is the reference's"
    yield Hypothesis("missing_bias", f"{words} without its bias.", expected - bias)
    yield Hypothesis(
        "bias_twice", f"{words} with its bias added twice.", expected + bias
    )


def other_blocks(suspect: Suspect) -> Iterator[Hypothesis]:
    """Call the reference's other blocks."""
    for site, block in suspect.blocks.items():
        if suspect.role == "block" and type(block) is type(suspect.reference):
            evidence = f"The output is that of the block that makes `{site}`."
            yield Hypothesis("swapped_layer", evidence, suspect.run(block))


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(x)


def activations(suspect: Suspect) -> Iterator[Hypothesis]:
    """Replace an activation in the reference, or the module itself."""
    for call in suspect.call.leaves():
        if not _is_activation(call):
            continue
        path = call.path.removeprefix(suspect.call.path).lstrip(".")
        place = f" in the place of `{path}`" if path else ""
        parent, _, name = path.rpartition(".")
        for words, function in ACTIVATIONS.items():
            module: nn.Module = _Function(function)
            if path:
                module = private_copy(suspect.reference)
                setattr(module.get_submodule(parent), name, _Function(function))
            evidence = f"The output is that of {words}{place}."
            yield Hypothesis("activation", evidence, suspect.run(module))


def _is_activation(call: ModuleCall) -> bool:
    """Check whether a module roughly computed a known activation."""
    state, output = call.state, call.output
    if state is None or output is None or state.shape != output.shape:
        return False
    for function in ACTIVATIONS.values():
        if torch.allclose(function(state), output, 0.01, 0.01):
            return True
    return False


def exchanged_parts(suspect: Suspect) -> Iterator[Hypothesis]:
    """Exchange two equal parts, such as queries and keys, or gate and up."""
    module = private_copy(suspect.reference)
    for parent in module.modules():
        pairs = combinations(parent.named_children(), 2)
        for (name, part), (other_name, other) in pairs:
            if isinstance(parent, nn.ModuleList) or not _is_same_make(part, other):
                continue
            setattr(parent, name, other)
            setattr(parent, other_name, part)
            evidence = f"The output is that of `{name}` and `{other_name}` exchanged."
            yield Hypothesis("exchanged_parts", evidence, suspect.run(module))
            setattr(parent, name, part)
            setattr(parent, other_name, other)


def _is_same_make(part: nn.Module, other: nn.Module) -> bool:
    shapes = [weight.shape for weight in part.parameters()]
    other_shapes = [weight.shape for weight in other.parameters()]
    return type(part) is type(other) and shapes == other_shapes


class Norm(NamedTuple):
    """A norm over the last axis; with `outside`, eps is added to the root."""

    centred: bool
    gain: Tensor
    shift: Tensor
    eps: float
    outside: bool = False

    def __call__(self, state: Tensor) -> Tensor:
        """Normalise in float64."""
        x, variance = self.moments(state)
        root = (variance + self.eps).sqrt()
        if self.outside:
            root = variance.sqrt() + self.eps
        return x / root * self.gain + self.shift

    def moments(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state, centred if the norm centres, and its variance."""
        x = state.double()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x, x.square().mean(-1, keepdim=True)


def norms(suspect: Suspect) -> Iterator[Hypothesis]:
    """Normalise as other norms do."""
    state, norm = suspect.state, _norm_of(suspect)
    if state is None or norm is None:
        return
    eps = _fit_eps(norm, state, suspect.output)
    mean = "does not take" if norm.centred else "takes"
    gain, ones = norm.gain, torch.ones_like(norm.gain)
    change = norm._replace
    changes = [
        ("kind", f"that {mean} the mean off", change(centred=not norm.centred)),
        (
            "weight_less_one",
            "without the 1 that is added to its weight",
            change(gain=gain - 1),
        ),
        ("weight_plus_one", "with 1 added to its weight", change(gain=gain + 1)),
        ("weight_missing", "without its weight", change(gain=ones)),
        ("weight_twice", "with its weight applied twice", change(gain=gain**2)),
        (
            "eps",
            f"with eps {eps:.2g}; the reference's is {norm.eps:.2g}",
            change(eps=eps),
        ),
        ("eps_outside", "with eps added to the root", change(outside=True)),
        (
            "root_eps",
            "with the root of eps added to the root",
            change(outside=True, eps=norm.eps**0.5),
        ),
    ]
    for fault, words, changed in changes:
        evidence = f"The output is that of a norm {words}."
        yield Hypothesis(f"norm_{fault}", evidence, changed(state))


def _norm_of(suspect: Suspect) -> Norm | None:
    """Return the norm that reproduces the output of the reference's module."""
    state, weight = suspect.state, suspect.reference._parameters.get("weight")
    values = vars(suspect.reference)
    eps = values.get("eps", values.get("variance_epsilon"))
    if state is None or weight is None or eps is None:
        return None
    gain = weight.detach().double()
    bias = suspect.reference._parameters.get("bias")
    shift = torch.zeros_like(gain) if bias is None else bias.detach().double()
    # Gemma adds 1 to its weight.
    for centred, added in product((True, False), (0, 1)):
        norm = Norm(centred, gain + added, shift, eps)
        if suspect.distance(suspect.expected, norm(state)) <= suspect.rounding:
            return norm
    return None


def _fit_eps(norm: Norm, state: Tensor, output: Tensor) -> float:
    """Fit the eps that explains the size of the rows."""
    x, variance = norm.moments(state)
    scaled = x * norm.gain
    roots = scaled.square().sum(-1) / (scaled * (output - norm.shift)).sum(-1)
    fitted = float((roots**2 - variance[..., 0]).nanmedian())
    return max(fitted, 0.0)
