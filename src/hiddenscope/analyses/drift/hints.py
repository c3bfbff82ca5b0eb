"""Describe a fault by changes of the reference's module that reproduce it.

Hints never decide where the fault is: the search has measured that before. A hypothesis
is a change of the reference's module, made on a private copy, or of its output. It
becomes a hint if its output equals the candidate's up to rounding and no other
hypothesis is much nearer. `HYPOTHESES` lists them by topic; one function tests all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, product
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.errors import SIDES, Noise, gap
from hiddenscope.analyses.drift.observe import (
    ModuleCall,
    real_rows,
    record_calls,
    tensors_in,
)
from hiddenscope.analyses.drift.search import FaultyModule, Search
from hiddenscope.analyses.drift.story import Hint
from hiddenscope.modules.module_copy import named_weights, private_copy

# A hypothesis is named beside the nearest one if it leaves at most this many times as
# much of the error.
AS_NEAR = 3.0
# The share of the error that a hypothesis may leave unexplained, beyond rounding.
UNEXPLAINED = 0.02
# The share that it may leave including rounding: a change that leaves nearly all of the
# error explains nothing.
LARGEST_REST = 0.25
# A fitted factor that is nearer to 1 than this is no change.
NEAR_ONE = 1e-3
# A fit of attention's scale takes this many steps. Its slope is measured over this
# factor, and a step is at most this many factors long: beyond that it does not hold.
STEPS, FACTOR, LARGEST_STEP = 6, 1.01, 100.0
KERNEL = "hiddenscope_trial"
PLAIN = (bool, int, float, str)
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# The names that transformers has for activations.
ACTIVATIONS = {
    "the exact GELU (erf)": "gelu",
    "GELU by tanh": "gelu_pytorch_tanh",
    "GELU by a sigmoid": "quick_gelu",
    "SiLU": "silu",
    "ReLU": "relu",
    "squared ReLU": "relu2",
    "no activation": "linear",
}
_SHAPE_ERROR = re.compile("shape|size|dimension", re.IGNORECASE)


class Hypothesis(NamedTuple):
    """A possible fault, a sentence about it, and the output that it would lead to.

    There is no output if the module does not accept the change.
    """

    fault: str
    evidence: str
    output: Tensor | None


@dataclass(frozen=True)
class Suspect:
    """A module at fault, the reference's module of the same role, and a call of it.

    `path` is its path in the candidate, and `output` what it returned on the input of
    `call`. With `same_make`, weights of the same name can be compared. `masks` [text,
    token] are True for the real tokens of each stack. All tensors are on the
    reference's device.
    """

    path: str
    reference: nn.Module
    candidate: nn.Module
    call: ModuleCall
    output: Tensor
    same_make: bool
    masks: Sequence[Tensor]
    blocks: Mapping[str, nn.Module]
    model: nn.Module

    @property
    def expected(self) -> Tensor:
        """Return what the reference's module returned."""
        return self.call.outputs[0]

    @property
    def state(self) -> Tensor | None:
        """Return the hidden state that both received, if it has the output's shape."""
        state = self.call.state
        if state is None or state.shape != self.expected.shape:
            return None
        return state

    @property
    def role(self) -> str:
        """Return whether it is a block or another module."""
        is_block = any(block is self.reference for block in self.blocks.values())
        return "block" if is_block else "module"

    @property
    def mask(self) -> Tensor:
        """Return the real tokens of its stack."""
        # Encoder and decoder read different texts.
        shape = self.output.shape[:2]
        fitting = [mask for mask in self.masks if mask.shape == shape]
        return next(iter(fitting), self.masks[-1])

    @property
    def rounding(self) -> float:
        """Return the distance that rounding alone can make."""
        return Noise.assumed(self.output.dtype).envelope

    def distance(self, expected: Tensor, other: Tensor) -> float:
        """Return the relative distance of two outputs over real tokens."""
        rows = real_rows(expected, self.masks), real_rows(other, self.masks)
        return gap(*rows).worst

    @cached_property
    def error(self) -> float:
        """Return how far the output is off: at most 1, and 1 for another shape."""
        if self.output.shape != self.expected.shape:
            return 1.0
        return min(1.0, self.distance(self.expected, self.output))

    @property
    def largest_rest(self) -> float:
        """Return how much of the error a hypothesis may leave unexplained."""
        if self.error <= self.rounding:
            return self.rounding
        allowed = max(self.rounding, UNEXPLAINED * self.error)
        return min(allowed, LARGEST_REST * self.error)

    def rest(self, output: Tensor | None) -> float:
        """Return how much of the error the output of a hypothesis leaves."""
        if output is None or output.shape != self.output.shape:
            return torch.inf
        return self.distance(self.output, output.to(self.output))

    def run(self, module: nn.Module, call: ModuleCall | None = None) -> Tensor | None:
        """Call a module with the recorded arguments, or with those of another call.

        The result is None if the module does not accept them.
        """
        try:
            returned = (call or self.call).repeat(module, self.output.device)
        except (TypeError, ValueError, IndexError):
            return None
        except RuntimeError as error:
            # A shape that does not fit is an answer. Anything else, such as tensors on
            # two devices, is a mistake of the hypothesis.
            if not _SHAPE_ERROR.search(str(error)):
                raise
            return None
        return next(iter(tensors_in(returned)), None)


def describe_hint(search: Search, fault: FaultyModule) -> tuple[list[Hint], list[str]]:
    """Return what a fault looks like, most certain first, and notes on failed tests."""
    hints = []
    notes: list[str] = []
    call = fault.call
    reference = search.reference
    if call is None:
        return [*fault.hints], notes
    blocks = reference.blocks
    if search.is_or_holds_block(call.path) and call.path not in blocks.values():
        # The named arguments of the first block inside the module, in both models.
        prefix = f"{call.path}." if call.path else ""
        recorded: list[Mapping[str, Any]] = []
        for model in (search.reference, search.candidate):
            paths = [path for path in model.blocks.values() if path.startswith(prefix)]
            parts = {path: model.part(path) for path in paths[:1]}
            run = partial(model.run, model.batch(search.inputs))
            calls = record_calls(parts, run)
            recorded.append(calls[0].kwargs if calls else {})
        hints = argument_hints(*recorded)
    elif fault.output is not None:
        suspect = Suspect(
            fault.path,
            reference.part(call.path),
            search.candidate.part(fault.path),
            call,
            fault.output,
            not search.candidate.is_port,
            search.masks,
            {str(site): reference.part(path) for site, path in blocks.items()},
            reference.module,
        )
        hints, notes = explain_fault(suspect)
    return [*hints, *fault.hints], notes


def explain_fault(suspect: Suspect) -> tuple[list[Hint], list[str]]:
    """Return the hypotheses that explain a fault, and notes on those that failed.

    Each kind of fault is named at most once.
    """
    measured = []
    notes = []
    topics = HYPOTHESES
    is_comparable = suspect.output.shape == suspect.expected.shape
    # Within rounding, any hypothesis that changes little would fit. Weights and
    # attributes are read from the modules themselves.
    if not is_comparable or suspect.error <= suspect.rounding:
        topics = HYPOTHESES[:2]
    for topic in topics:
        try:
            for fault, evidence, output in topic(suspect):
                hint = Hint(fault=fault, evidence=evidence)
                measured.append((hint, suspect.rest(output)))
        # A hypothesis runs modules of any make with arguments they do not expect.
        except Exception as error:
            name = topic.__name__.strip("_").replace("_", " ")
            reason, _, _ = f"{type(error).__name__}: {error}".partition("\n")
            notes.append(
                f"Hints on {name} of `{suspect.path}` could not be tried: {reason}"
            )
    nearest = min((rest for _, rest in measured), default=0.0)
    bound = min(suspect.largest_rest, max(suspect.rounding, AS_NEAR * nearest))
    hints: dict[str, Hint] = {}
    for hint, rest in measured:
        if rest <= bound:
            hints.setdefault(hint.fault, hint)
    return list(hints.values()), notes


def argument_hints(
    reference: Mapping[str, Any], candidate: Mapping[str, Any]
) -> list[Hint]:
    """Return hints on arguments that differ between the blocks of two models."""
    hints = []
    for name, value in reference.items():
        other = candidate.get(name)
        evidence = ""
        if (value is None) != (other is None):
            here, there = SIDES if other is None else SIDES[::-1]
            evidence = (
                f"The blocks are given `{name}` in the {here} and not in the {there}."
            )
        for tensor, theirs in zip(tensors_in(value), tensors_in(other), strict=False):
            moved = theirs.to(tensor)
            if evidence or moved.shape != tensor.shape or torch.equal(moved, tensor):
                continue
            shift = (moved.double() - tensor.double()).flatten()
            differing = int((tensor != moved).sum())
            words = f"differs in {differing:,} of {tensor.numel():,} elements"
            if (shift == shift[0]).all():
                words = f"is the reference's plus {float(shift[0]):g}"
            evidence = f"`{name}`, which the blocks are given, {words}."
        if evidence:
            hints.append(Hint(fault="block_argument", evidence=evidence))
    return hints


def _weights(suspect: Suspect) -> Iterator[Hypothesis]:
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
        is_rotary = name.endswith("inv_freq")
        if is_rotary and fault == "scaled_weight":
            fault = "rope_scaling"
        elif is_rotary:
            count = len(other)
            exponents = torch.arange(count, device=other.device).double() / count
            logarithms = -other.double().log()
            log_base = (logarithms @ exponents) / exponents.square().sum()
            if torch.allclose(logarithms, log_base * exponents, atol=1e-3):
                fault = "rope_base"
                words = f"has the base {float(log_base.exp()):,.0f}"
        # The reference cannot run with another shape, which is a fault by itself.
        predicted = suspect.output if other.shape != weight.shape else output
        yield Hypothesis(fault, f"`{name}` of the candidate {words}.", predicted)


def _relation(suspect: Suspect, weight: Tensor, other: Tensor) -> tuple[str, str]:
    """Say how a weight was made from the reference's: a fault and a clause."""
    if weight.shape != other.shape:
        expected = list(weight.shape)
        actual = list(other.shape)
        return "other_shape", f"has the shape {actual}, and the reference's {expected}"
    if weight.is_floating_point():
        tolerance = 4 * torch.finfo(weight.dtype).eps
        for fault, words, changed in _changed_weights(suspect, weight, other):
            is_same_shape = changed.shape == other.shape
            if is_same_shape and torch.allclose(changed, other, tolerance, 0.0):
                return fault, words
    share = (weight != other).double().mean()
    change = (other - weight).double().norm()
    norm = weight.double().norm()
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

    # A sum with a factor per element: two different slices hardly ever have the same.
    def keys(tensor: Tensor, axis: int) -> Tensor:
        slices = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1).double()
        factors = torch.linspace(1, 2, slices.shape[1], dtype=slices.dtype)
        return (slices * factors.to(slices.device)).sum(1)

    for axis, slices in enumerate(("rows", "columns")[: weight.ndim]):
        order = keys(other, axis).argsort().argsort()
        permuted = weight.index_select(axis, keys(weight, axis).argsort()[order])
        words = f"has the reference's {slices} in another order"
        yield "permuted_weight", words, permuted


def _attributes(suspect: Suspect) -> Iterator[Hypothesis]:
    """Give the reference the candidate's attributes, one at a time."""
    for name, value in vars(suspect.reference).items():
        other = vars(suspect.candidate).get(name)
        is_plain = isinstance(value, PLAIN) and isinstance(other, PLAIN)
        if not is_plain or value == other or name == "training" or name.startswith("_"):
            continue
        module = private_copy(suspect.reference)
        setattr(module, name, other)
        yield Hypothesis(
            "attribute",
            f"`{name}` is {other!r} in the candidate and {value!r} in the reference.",
            suspect.run(module),
        )


def _effects(suspect: Suspect) -> Iterator[Hypothesis]:
    """Compare the output with functions of the input and of the reference's output."""
    expected = suspect.expected
    state = suspect.state
    output = suspect.output
    scale = _fit_factor(expected, output)
    if not isclose(scale, 1.0, rel_tol=NEAR_ONE):
        evidence = f"The output is the reference's times {scale:.6g}."
        yield Hypothesis("scale", evidence, scale * expected)
    is_zero = ~output.any(-1, keepdim=True) & expected.any(-1, keepdim=True)
    evidence = f"{int(is_zero.sum()):,} rows of the output are exactly zero."
    yield Hypothesis("zero_rows", evidence, expected.masked_fill(is_zero, 0))
    if state is not None:
        role = suspect.role
        skipped, doubled = "not_applied", "applied_twice"
        if role == "block":
            skipped, doubled = "layer_skipped", "layer_doubled"
        yield Hypothesis(skipped, f"The {role} returns its input.", state)
        again = suspect.run(suspect.reference, suspect.call.with_state(expected))
        yield Hypothesis(doubled, f"The {role} is applied twice.", again)
        factor = _fit_factor(expected - state, output - state)
        if role == "block" and abs(factor) > NEAR_ONE:
            words = "What the block adds to its input is the reference's times"
            scaled = state + factor * (expected - state)
            yield Hypothesis("residual_scale", f"{words} {factor:.6g}.", scaled)
    parameter = suspect.reference._parameters.get("bias")
    if parameter is not None and parameter.shape == expected.shape[-1:]:
        words = "The output is the reference's"
        bias = parameter.detach()
        yield Hypothesis("missing_bias", f"{words} without its bias.", expected - bias)
        evidence = f"{words} with its bias added twice."
        yield Hypothesis("bias_twice", evidence, expected + bias)


def _fit_factor(expected: Tensor, output: Tensor) -> float:
    """Fit by least squares the factor that turns one tensor into another."""
    wide = expected.double()
    size = wide.square().sum().clamp_min(torch.finfo(wide.dtype).tiny)
    return float((wide * output.double()).sum() / size)


def _other_blocks(suspect: Suspect) -> Iterator[Hypothesis]:
    """Call the reference's other blocks."""
    for site, block in suspect.blocks.items():
        if suspect.role == "block" and type(block) is type(suspect.reference):
            evidence = f"The output is that of the block that makes `{site}`."
            yield Hypothesis("swapped_layer", evidence, suspect.run(block))


def _activations(suspect: Suspect) -> Iterator[Hypothesis]:
    """Replace an activation in the reference, or the module itself."""
    from transformers.activations import ACT2FN

    activations = {words: ACT2FN[name] for words, name in ACTIVATIONS.items()}
    for call in suspect.call.leaves():
        state = call.state
        output = call.output
        if state is None or output is None or state.shape != output.shape:
            continue
        # It must roughly compute a known activation.
        known = [activation(state) for activation in activations.values()]
        if not any(torch.allclose(near, output, 0.01, 0.01) for near in known):
            continue
        path = call.path.removeprefix(suspect.call.path).lstrip(".")
        place = f" in the place of `{path}`" if path else ""
        parent, _, name = path.rpartition(".")
        for words, activation in activations.items():
            module = activation
            if path:
                module = private_copy(suspect.reference)
                setattr(module.get_submodule(parent), name, activation)
            evidence = f"The output is that of {words}{place}."
            yield Hypothesis("activation", evidence, suspect.run(module))


def _exchanged_parts(suspect: Suspect) -> Iterator[Hypothesis]:
    """Exchange two equal parts, such as queries and keys, or gate and up."""
    module = private_copy(suspect.reference)
    for parent in module.modules():
        pairs = combinations(parent.named_children(), 2)
        for (name, part), (other_name, other) in pairs:
            shapes = [weight.shape for weight in part.parameters()]
            is_equal = type(part) is type(other)
            is_equal &= shapes == [weight.shape for weight in other.parameters()]
            if isinstance(parent, nn.ModuleList) or not is_equal:
                continue
            setattr(parent, name, other)
            setattr(parent, other_name, part)
            evidence = f"The output is that of `{name}` and `{other_name}` exchanged."
            yield Hypothesis("exchanged_parts", evidence, suspect.run(module))
            setattr(parent, name, part)
            setattr(parent, other_name, other)


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


def _norms(suspect: Suspect) -> Iterator[Hypothesis]:
    """Normalise as other norms do."""
    state = suspect.state
    norm = _norm_of(suspect)
    if state is None or norm is None:
        return
    # The eps that explains the size of the rows.
    x, variance = norm.moments(state)
    scaled = x * norm.gain
    roots = scaled.square().sum(-1) / (scaled * (suspect.output - norm.shift)).sum(-1)
    eps = max(float((roots**2 - variance[..., 0]).nanmedian()), 0.0)
    mean = "does not take" if norm.centred else "takes"
    added = "without the 1 that is added to its weight"
    fitted = f"with eps {eps:.2g}; the reference's is {norm.eps:.2g}"
    rooted = "with the root of eps added to the root"
    gain = norm.gain
    change = norm._replace
    for fault, words, changed in (
        ("kind", f"that {mean} the mean off", change(centred=not norm.centred)),
        ("weight_less_one", added, change(gain=gain - 1)),
        ("weight_plus_one", "with 1 added to its weight", change(gain=gain + 1)),
        ("weight_missing", "without its weight", change(gain=torch.ones_like(gain))),
        ("weight_twice", "with its weight applied twice", change(gain=gain**2)),
        ("eps", fitted, change(eps=eps)),
        ("eps_outside", "with eps added to the root", change(outside=True)),
        ("root_eps", rooted, change(outside=True, eps=norm.eps**0.5)),
    ):
        evidence = f"The output is that of a norm {words}."
        yield Hypothesis(f"norm_{fault}", evidence, changed(state))


def _norm_of(suspect: Suspect) -> Norm | None:
    """Return the norm that reproduces the output of the reference's module."""
    state = suspect.state
    weight = suspect.reference._parameters.get("weight")
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


@dataclass(frozen=True)
class Heads:
    """What enters attention: heads [text, head, token, width] and the score settings.

    `visible` tells which keys a query sees, `bias` is added to the scores, and `cap`
    bounds them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor
    bias: Tensor
    scale: float
    cap: float | None
    flattened: bool = False

    def attend(self) -> Tensor:
        """Return the mixed values [text, token, head, width]."""
        groups = self.query.shape[1] // self.key.shape[1]
        key = self.key.repeat_interleave(groups, 1)
        value = self.value.repeat_interleave(groups, 1)
        scores = self.query @ key.mT * self.scale
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        hidden = torch.finfo(scores.dtype).min
        scores = (scores + self.bias).masked_fill(~self.visible, hidden)
        mixed = scores.softmax(-1) @ value
        if self.flattened:
            return mixed.reshape(mixed.transpose(1, 2).shape)
        return mixed.transpose(1, 2).contiguous()

    def rotated(self, cos: Tensor, sin: Tensor) -> Heads:
        """Rotate queries and keys."""
        query, key = (_rotate(part, cos, sin) for part in (self.query, self.key))
        return replace(self, query=query, key=key)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head, by halves."""
    width = cos.shape[-1]
    turned = heads[..., :width]
    left, right = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned, heads[..., width:]], -1)


class _AttentionTrial:
    """A private copy of the reference's module that attends through our kernel.

    transformers looks kernels up by name, so this works for fused and split
    projections, wherever a family keeps its scale. `heads` is what entered its first
    attention in the last run.
    """

    def __init__(self, suspect: Suspect) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(KERNEL, _attend)
        self.suspect = suspect
        self.module = private_copy(suspect.reference, attention=KERNEL)
        self.heads: Heads | None = None
        self._replacement: Heads | None = None
        for part in self.module.modules():
            part.trial = self  # type: ignore[assignment]

    def run(self, replacement: Heads | None = None) -> Tensor | None:
        """Run the module, with other heads in its first attention if any are given."""
        self.heads = None
        self._replacement = replacement
        return self.suspect.run(self.module)

    def enter(self, heads: Heads) -> Heads:
        """Return the heads that an attention of the module must use."""
        if self.heads is None:
            self.heads = heads = self._replacement or heads
        return heads


def _attend(
    part: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend through the interface that transformers has for kernels."""
    # Kernels accumulate in float32 at least, whatever the dtype of their arguments.
    wide = torch.promote_types(query.dtype, torch.float32)
    device = query.device
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).to(device)
    bias = torch.zeros((), dtype=wide, device=device)
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(part, "is_causal", True)
    if mask is None and causal:
        visible = visible.tril()
    elif mask is not None and mask.dtype == torch.bool:
        visible = mask
    elif mask is not None:
        visible = mask > torch.finfo(mask.dtype).min / 2
        bias = mask.to(wide).where(visible, bias)
    if options.get("position_bias") is not None:
        bias = bias + options["position_bias"]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    cap = options.get("softcap")
    heads = Heads(
        query.to(wide), key.to(wide), value.to(wide), visible, bias, scale, cap
    )
    return part.trial.enter(heads).attend().to(query.dtype), None


def _attention(suspect: Suspect) -> Iterator[Hypothesis]:
    """Attend with another scale, mask, order of heads or rotation."""
    trial = _AttentionTrial(suspect)
    output = trial.run()
    heads = trial.heads
    if heads is None or output is None:
        return
    # If our kernel does not reproduce the model's, it lacks something that the model
    # does, and nothing can be tested.
    if suspect.distance(suspect.expected, output) > suspect.rounding:
        return
    changes = [*_heads(heads), *_masks(suspect, heads), *_rotations(suspect, heads)]
    for fault, words, changed in changes:
        evidence = f"The output is that of attention with {words}."
        yield Hypothesis(fault, evidence, trial.run(changed))
    width = heads.query.shape[-1]
    hidden_width = suspect.expected.shape[-1]
    # A known mistake is preferred to a fitted factor.
    for words, ratio in {
        ", as without a scale of 1/sqrt(d)": width**0.5,
        ", as with one more scale of 1/sqrt(d)": width**-0.5,
        ", as scaled by 1/sqrt(hidden size)": (width / hidden_width) ** 0.5,
        "": None,
    }.items():
        ratio = ratio or _fit_ratio(trial, heads)
        rescaled = trial.run(replace(heads, scale=heads.scale * ratio))
        if words and suspect.rest(rescaled) > suspect.largest_rest:
            continue
        evidence = (
            f"The output is that of attention with scores {ratio:.6g} times the"
            f" reference's{words}."
        )
        yield Hypothesis("attention_scale", evidence, rescaled)
        return


def _fit_ratio(trial: _AttentionTrial, heads: Heads) -> float:
    """Fit the scores' scale over the reference's, by least squares along the slope."""
    suspect = trial.suspect
    ratio = 1.0
    real = suspect.mask.to(suspect.output.device)
    for _ in range(STEPS):
        scale = heads.scale * ratio
        output = trial.run(replace(heads, scale=scale))
        ahead = trial.run(replace(heads, scale=scale * FACTOR))
        if output is None or ahead is None or output.shape[:2] != real.shape:
            break
        slope = (ahead - output)[real].double()
        rest = (suspect.output - output)[real].double()
        step = float((slope * rest).sum() / slope.square().sum())
        ratio *= FACTOR ** max(-LARGEST_STEP, min(step, LARGEST_STEP))
    return ratio


Change = tuple[str, str, Heads]
"""The name of a fault, what attention is with, and the heads that it would see."""


def _heads(heads: Heads) -> Iterator[Change]:
    """Yield mistakes in heads and scores."""
    words = "heads that are flattened before tokens are put first"
    yield "heads_flattened", words, replace(heads, flattened=True)
    yield "softcap_missing", "scores that are not capped", replace(heads, cap=None)
    unbiased = replace(heads, bias=torch.zeros_like(heads.bias))
    yield "position_bias_missing", "no bias of the scores", unbiased
    count = heads.key.shape[1]
    groups = heads.query.shape[1] // count
    order = ", ".join(str(head % count) for head in range(min(groups * count, 8)))
    words = f"keys and values repeated in turn: the query heads read heads {order}"
    key = heads.key.repeat(1, groups, 1, 1)
    value = heads.value.repeat(1, groups, 1, 1)
    yield "kv_heads", words, replace(heads, key=key, value=value)


def _masks(suspect: Suspect, heads: Heads) -> Iterator[Change]:
    """Yield mistakes in the mask, which is True where a key is visible."""
    mask = heads.visible
    tokens, keys = mask.shape[-2:]
    if tokens != keys or suspect.mask.shape[-1] != keys:
        return
    real = suspect.mask.to(mask.device)[:, None, None, :]
    is_padded = not real.all()
    places = torch.arange(tokens, device=mask.device)
    distance = places[:, None] - places
    causal = distance >= 0

    def seeing(fault: str, words: str, visible: Tensor) -> Change:
        return fault, words, replace(heads, visible=visible)

    padding = "padding_not_masked", "padding that is not masked"
    if (mask & ~causal).any():
        yield seeing("causal_mask_added", "a causal mask", mask & causal)
        if is_padded:
            yield seeing(*padding, mask | ~real)
        return
    others = mask & (distance != 0)
    sees_none = ~others.any(-1, keepdim=True)
    # A kernel that hides the token itself shows the first token itself, or everything.
    for shown in (mask, real):
        words = "a mask that hides the token itself"
        yield seeing("mask_off_by_one", words, others | (sees_none & shown))
    yield seeing("window_ignored", "a causal mask without a window", causal & real)
    window = int(mask.sum(-1).max())
    words = "a window that is one token short"
    yield seeing("window_short", words, mask & (distance < window - 1))
    # A mistake in the causal mask may or may not show padding.
    for shown in (real, torch.ones_like(real)):
        yield seeing("mask_missing", "no causal mask", mask | (~causal & shown))
        words = "a mask that shows the next token"
        yield seeing("mask_looks_ahead", words, mask | ((distance == -1) & shown))
    if is_padded:
        yield seeing(*padding, mask | (causal & ~real))


def _rotations(suspect: Suspect, heads: Heads) -> Iterator[Change]:
    """Yield mistakes in rotary positions, starting from heads without rotation."""
    tables = suspect.call.kwargs.get("position_embeddings")
    if not isinstance(tables, tuple) or len(tables) != 2:
        return
    cos, sin = (table.to(heads.query)[:, None] for table in tables)
    size = cos.square() + sin.square()
    unrotated = heads.rotated(cos / size, -sin / size)
    yield "rope_missing", "no rotary positions", unrotated
    words = "rotary positions in the queries alone"
    yield "rope_keys_missing", words, replace(heads, key=unrotated.key)
    late = _rotate(unrotated.query, cos.roll(1, -2), sin.roll(1, -2))
    words = "queries that are one position late"
    yield "query_off_by_one", words, replace(heads, query=late)
    words = "positions that turn the other way"
    yield "rope_direction", words, unrotated.rotated(cos, -sin)
    half = cos.shape[-1] // 2
    mixed = [table[..., :half].repeat_interleave(2, -1) for table in (cos, sin)]
    words = "rotary tables in the interleaved order"
    yield "rope_interleaved", words, unrotated.rotated(*mixed)
    shifted = unrotated.rotated(cos.roll(-1, -2), sin.roll(-1, -2))
    yield "position_off_by_one", "positions that are one off", shifted
    # Neighbouring channels are put into two halves; unrotated channels stay.
    places = torch.arange(heads.query.shape[-1], device=cos.device)
    pairs = places[: cos.shape[-1]].reshape(-1, 2)
    order = torch.cat([*pairs.T, places[cos.shape[-1] :]])
    query, key = unrotated.query[..., order], unrotated.key[..., order]
    paired = replace(heads, query=query, key=key).rotated(cos, sin)
    yield "rope_pairs", "rotary positions for neighbouring channels", paired


HYPOTHESES: Sequence[Callable[[Suspect], Iterator[Hypothesis]]] = (
    _weights,
    _attributes,
    _effects,
    _other_blocks,
    _activations,
    _exchanged_parts,
    _norms,
    _attention,
)
