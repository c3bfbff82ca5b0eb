"""Blocks: what attention, cross-attention and the MLP add to the residual stream.

    pre-norm    layer.k-1 + attn (+ cross) = mid        mid + mlp = layer.k
    post-norm   norm(layer.k-1 + attn) = mid            norm(mid + mlp) = layer.k
    parallel    layer.k-1 + attn + mlp = layer.k        mid is layer.k-1

A branch is the output of a submodule of the block. Sums are looked for among all inputs
and outputs of its submodules. The first branch must carry something from one token to
another and the last must not; otherwise they are not called attention and MLP here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, compress
from math import inf
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.proof import differs, fitting_layout, same
from hiddenscope.discovery.trace import Call, Layout, Tap, Trace
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.trials import tolerance

MOST_BRANCHES = 3
ROUNDING = 8  # units in the last place that a sum may be off
# How many numbers of each value are looked at before all of them are added up.
SAMPLE = 64
# How far a state is moved to see what depends on it, in multiples of its mean size.
DISTURBANCES = (4.0, -4.0)


@dataclass(frozen=True)
class Block:
    """One block: its kind, and the taps of its parts or the reason to refuse them."""

    path: str
    kind: str
    parts: Mapping[str, Tap] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class _Value:
    """A value inside the block, with the tap that shows it.

    `projection` is its product with a fixed random direction and `size` the sum of the
    absolute terms of that product: projections that do not add up rule out a sum of
    values at the price of one addition.
    """

    tap: Tap
    states: Tensor
    projection: float
    size: float

    @cached_property
    def sample(self) -> Tensor:
        """Some of its numbers, from all over it, in float64."""
        numbers = self.states.flatten()
        step = max(1, len(numbers) // SAMPLE)
        return numbers[::step][:SAMPLE].double().cpu()

    def times(self, scale: float) -> _Value:
        """Return the value times a number, as a tap shows it whose layout has it."""
        layout = replace(self.tap.layout, scale=scale)
        products = scale * self.projection, abs(scale) * self.size
        return _Value(replace(self.tap, layout=layout), scale * self.states, *products)


@dataclass(frozen=True)
class _Step:
    """One branch that is added to the residual stream, and the stream afterwards.

    `normed` says that a norm came between, and `off` by how much the sum is off.
    """

    branch: _Value
    stream: _Value
    normed: bool
    off: float


def dissect(
    call: Call,
    before: Tap,
    trace: Trace,
    into: Tensor,
    layout: Layout,
    scales: Sequence[float] = (),
) -> Block:
    """Find the parts of one block call.

    `into` is the state that enters it, and `before` is that state's tap. Branches may
    be added times one of the `scales`.
    """
    values = _BlockValues(trace, call, into, layout, scales)
    # Ways of adding two or three branches in turn, the shortest first. In half
    # precision other values may pass for a sum, such as a norm of it, but these are
    # farther off.
    for steps in sorted(values.walk((), values.entry), key=_rank):
        if len({step.normed for step in steps}) > 1:
            continue
        names = ("attn", "mlp") if len(steps) == 2 else ("attn", "cross", "mlp")
        parts = {name: step.branch.tap for name, step in zip(names, steps, strict=True)}
        parts["mid"] = values.changeable(steps[-2].stream)
        kind = "post-norm" if steps[0].normed else "pre-norm"
        return Block(call.path, kind, parts)
    for _, first, second in sorted(values.parallel(), key=itemgetter(0)):
        parts = {"attn": first.tap, "mid": before, "mlp": second.tap}
        return Block(call.path, "parallel", parts)
    kind = "other"
    refused = "no outputs of its parts sum up to the state it gives back"
    if values.is_single():
        kind = "single"
        refused = (
            "it adds the output of one part only, which is no pair of attention and MLP"
        )
    return Block(call.path, kind, refused=refused)


def _rank(steps: Sequence[_Step]) -> tuple[int, float]:
    return len(steps), sum(step.off for step in steps)


class _BlockValues:
    """The values inside one block call, and the sums among them."""

    def __init__(
        self,
        trace: Trace,
        call: Call,
        into: Tensor,
        layout: Layout,
        scales: Sequence[float],
    ) -> None:
        self.trace = trace
        self.layout = layout
        self.eps = torch.finfo(into.dtype).eps
        generator = torch.Generator().manual_seed(0)
        self.direction = torch.randn(
            into.shape, generator=generator, dtype=torch.float64
        )
        # The block itself is entered before its parts.
        inner = trace.within(call).calls[1:]
        self.entry = self._value(Tap(call.path, call.number, "input"), into)
        self.end = self._value_of(call, "output")
        self.outputs = self._distinct(inner, "output")
        self.inputs = self._distinct(inner, "input")
        self.all = [*self.outputs.values()]
        for key, value in self.inputs.items():
            if key not in self.outputs:
                self.all.append(value)
        if self.end is not None:
            self.all.append(self.end)
        self.branches = [*self.outputs.values()]
        for scale in scales:
            self.branches += [value.times(scale) for value in self.outputs.values()]
        self.norms = []
        for other in inner:
            if other.into is None or other.out is None:
                continue
            # Like a norm, it keeps the shape alone.
            if other.into.shape != other.out.shape or same(other.into, other.out):
                continue
            before, after = (
                self._value_of(other, "input"),
                self._value_of(other, "output"),
            )
            if before is not None and after is not None:
                self.norms.append((before, after))

    def parallel(self) -> Iterator[tuple[float, _Value, _Value]]:
        """Yield pairs of branches that, both added to the input, give the output.

        Before them stands by how much the sum is off. The one that was called first
        comes first. A part that writes nothing is no branch: adding it would prove
        nothing of where it is added.
        """
        if self.end is None:
            return
        for first, second in combinations(self.branches, 2):
            if first.size == 0 or second.size == 0:
                continue
            off = self._off(self.end, (self.entry, first, second))
            if off < inf:
                yield off, first, second

    def changeable(self, value: _Value) -> Tap:
        """Return the tap of a value at which a change of it is read by all its readers.

        DBRX norms it inside the module that gives it out: what comes out is too late.
        """
        read = self.inputs.get((value.projection, value.size))
        if read is not None and read.tap.path.startswith(f"{value.tap.path}."):
            return read.tap
        return value.tap

    def is_single(self) -> bool:
        """Tell whether one branch, added to the input, gives the output."""
        if self.end is None:
            return False
        sums = [self._off(self.end, (self.entry, value)) for value in self.branches]
        return min(sums, default=inf) < inf

    def walk(
        self, way: tuple[_Step, ...], stream: _Value
    ) -> Iterator[tuple[_Step, ...]]:
        """Yield the ways from the stream to the output by adding further branches."""
        if self.end is None or len(way) == MOST_BRANCHES:
            return
        for branch in self.branches:
            if branch.size == 0 or any(branch.tap == step.branch.tap for step in way):
                continue
            for step in self._after(stream, branch):
                longer = (*way, step)
                if not same(step.stream.states, self.end.states):
                    yield from self.walk(longer, step.stream)
                elif len(longer) > 1:
                    yield longer

    def _after(self, stream: _Value, branch: _Value) -> Iterator[_Step]:
        """Yield what the stream may be after a branch: the sum, or its norm."""
        terms = (stream, branch)
        for total, after in self._may_be(terms):
            is_normed = after is not total
            if total is stream and not is_normed:
                continue
            off = self._off(total, terms)
            if off < inf:
                yield _Step(branch, after, is_normed, off)

    @cached_property
    def sums(self) -> list[tuple[_Value, _Value]]:
        """What may be a sum, and the stream after it: the same, or the norm of it."""
        return [*((value, value) for value in self.all), *self.norms]

    @cached_property
    def samples(self) -> Tensor:
        """A few numbers of each of the sums."""
        return torch.stack([total.sample for total, _ in self.sums])

    def _may_be(self, terms: Sequence[_Value]) -> Iterator[tuple[_Value, _Value]]:
        """Yield those of the sums that a few numbers of each do not rule out."""
        added = torch.stack([term.sample for term in terms])
        sizes = self.samples.abs().maximum(added.abs().amax(0))
        missing = (self.samples - added.sum(0)).abs()
        close = (missing <= ROUNDING * self.eps * sizes).all(1)
        return compress(self.sums, close.tolist())

    def _off(self, total: _Value, terms: Sequence[_Value]) -> float:
        """Return by how much terms miss a total; infinity if by more than rounding."""
        # Projections add up wherever the values do, and cost far less.
        difference = abs(total.projection - sum(term.projection for term in terms))
        if difference > ROUNDING * self.eps * sum(term.size for term in terms):
            return inf
        added = torch.stack([term.states.double() for term in terms]).sum(0)
        sizes = [value.states.double().abs() for value in (*terms, total)]
        allowed = ROUNDING * self.eps * torch.stack(sizes).amax(0)
        missing = (total.states.double() - added).abs()
        return float(missing.norm()) if (missing <= allowed).all() else inf

    def _value(self, tap: Tap, states: Tensor) -> _Value:
        products = states.double().cpu() * self.direction
        return _Value(tap, states, products.sum().item(), products.abs().sum().item())

    def _value_of(self, call: Call, side: hooks.Side) -> _Value | None:
        """Return the state on one side of a call; None if it has another shape."""
        tensor = call.into if side == "input" else call.out
        if tensor is None:
            return None
        layout = fitting_layout(tensor, self.trace, self.layout)
        if layout is None:
            return None
        states = layout.states(tensor, self.trace.tokens)
        if states.shape != self.entry.states.shape:
            return None
        return self._value(Tap(call.path, call.number, side, layout), states)

    def _distinct(
        self, calls: Iterable[Call], side: hooks.Side
    ) -> dict[tuple[float, float], _Value]:
        """Return each value once, under the tap with the shortest path."""
        values: dict[tuple[float, float], _Value] = {}
        for call in calls:
            value = self._value_of(call, side)
            if value is None:
                continue
            key = (value.projection, value.size)
            known = values.setdefault(key, value)
            if value.tap.path.count(".") < known.tap.path.count("."):
                values[key] = value
        return values


def mixes_tokens(
    module: nn.Module,
    inputs: Mapping[str, Any],
    disturbed: Tap,
    observed: Tap,
    plain: Tensor,
) -> bool:
    """Tell whether a change of the first token at one tap shows in later tokens.

    They are observed at another tap, whose state without the change is `plain`. Two
    opposite changes are tried: attention that is sharp may look away from one of them.
    """
    tokens = plain.shape[1]
    for size in DISTURBANCES:
        watch = _disturb(module, disturbed, tokens, size)
        changed = state_at(module, inputs, observed, tokens, watch)
        if differs(plain[:, 1:], changed[:, 1:]):
            return True
    return False


def _disturb(module: nn.Module, tap: Tap, tokens: int, size: float) -> hooks.Watch:
    """Return a watch that moves the state of the first token at a tap."""

    def change(tensor: Tensor) -> Tensor:
        states = tap.layout.states(tensor, tokens).clone()
        first = states[:, 0]
        ramp = torch.linspace(-1, 1, first.shape[-1], device=first.device)
        first += size * first.abs().mean() * ramp.to(first.dtype)
        return tap.layout.with_states(tensor, states)

    return tap.watch(module, change)


def decides(module: nn.Module, traced: Trace, taps: Sequence[Tap]) -> bool:
    """Tell whether one tap alone decides what another shows, in a pass traced before.

    Of the three taps the state at the first is moved. With the second held as it was,
    the third must show what it showed.
    """
    disturbed, held, observed = taps
    plain, expected = traced.states_at(held), traced.states_at(observed)
    disturbing = _disturb(module, disturbed, traced.tokens, DISTURBANCES[0])
    holding = held.watch(module, lambda new: held.layout.with_states(new, plain))
    shown = state_at(
        module, traced.inputs, observed, traced.tokens, disturbing, holding
    )
    allowed = tolerance(expected.dtype, 1) * expected.abs().max()
    # A NaN, of rows that are 0/0, is told by nothing.
    return bool(((shown - expected).abs() <= allowed).all())


def state_at(
    module: nn.Module,
    inputs: Mapping[str, Any],
    observed: Tap,
    tokens: int,
    *others: hooks.Watch,
) -> Tensor:
    """Return the state at one tap in a pass, with other watches in place or none."""
    states = []
    stops = not hooks.is_offloaded(module)

    def keep(tensor: Tensor) -> None:
        states.append(observed.layout.states(tensor, tokens).detach().clone())
        if stops:
            raise hooks.Stopped

    watches = [observed.watch(module, keep), *others]
    with autograd.restored(), torch.no_grad(), hooks.watching(watches):
        # Where a state lives does not depend on its numbers.
        hooks.call_module(module, inputs, finite=False)
    return states[0]
