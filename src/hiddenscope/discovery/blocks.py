"""Blocks: what attention, cross-attention and the MLP add to the residual stream, found
as sums that really come out.

    pre-norm    layer.k-1 + attn (+ cross) = mid        mid + mlp = layer.k
    post-norm   norm(layer.k-1 + attn) = mid            norm(mid + mlp) = layer.k
    parallel    layer.k-1 + attn + mlp = layer.k        mid is layer.k-1, which both branches read

A branch is the output of a submodule of the block. Sums are looked for among all inputs
and outputs of its submodules. The first branch must carry something from one token to
another and the last must not; otherwise they are not called attention and MLP here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.proof import fitting_layout, same
from hiddenscope.discovery.taps import Layout, Tap
from hiddenscope.discovery.trace import Call, Trace
from hiddenscope.modules import autograd, hooks

MOST_BRANCHES = 3
ROUNDING = 8  # units in the last place that a sum may be off
# What rounding may change in a pass of the same shape, in units in the last place and
# as a share of a value: nothing, unless the tokens are grouped anew, as mixtures of
# experts do.
UNITS, LEAST_CHANGE = 4, 1e-4


@dataclass(frozen=True)
class Block:
    """One block: its kind, the taps of its parts, or the reason why its parts were
    refused.
    """

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


@dataclass(frozen=True)
class _Step:
    """One branch added to the residual stream: the branch, the stream afterwards, and
    whether a norm came between.
    """

    branch: _Value
    stream: _Value
    normed: bool


def dissect(
    call: Call, before: Tap, trace: Trace, into: Tensor, layout: Layout
) -> Block:
    """Find the parts of one block call; `into` is the state that enters it and `before`
    is that state's tap.
    """
    values = _BlockValues(trace, call, into, layout)
    for steps in values.sequences():
        names = ("attn", "mlp") if len(steps) == 2 else ("attn", "cross", "mlp")
        if len({step.normed for step in steps}) > 1:
            continue
        parts = {name: step.branch.tap for name, step in zip(names, steps, strict=True)}
        kind = "post-norm" if steps[0].normed else "pre-norm"
        return Block(call.path, kind, {**parts, "mid": steps[-2].stream.tap})
    for first, second in values.parallel():
        return Block(
            call.path, "parallel", {"attn": first.tap, "mid": before, "mlp": second.tap}
        )
    if values.single():
        why = (
            "it adds the output of one part only, which is no pair of attention and MLP"
        )
        return Block(call.path, "single", refused=why)
    return Block(
        call.path,
        "other",
        refused="no outputs of its parts sum up to the state it gives back",
    )


class _BlockValues:
    """The values inside one block call, and the sums among them."""

    def __init__(self, trace: Trace, call: Call, into: Tensor, layout: Layout) -> None:
        self.trace, self.layout = trace, layout
        self.eps = torch.finfo(into.dtype).eps
        self.direction = torch.randn(
            into.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        inner = [
            c for c in trace.calls if call.entered < c.entered and c.left < call.left
        ]
        self.entry = self._value(Tap(call.path, call.number, "input"), into)
        self.end = self._end(call)
        self.outputs = self._unique(("output", c, c.out) for c in inner)
        known = {(value.projection, value.size) for value in self.outputs}
        inputs = self._unique(("input", c, c.into) for c in inner)
        self.all = [
            *self.outputs,
            *(value for value in inputs if (value.projection, value.size) not in known),
        ]
        self.norms = [pair for c in inner if (pair := self._norm(c, into)) is not None]

    def sequences(self) -> Iterator[tuple[_Step, ...]]:
        """The ways from what entered to what came out by adding two or three branches
        in turn, the shortest first.
        """
        yield from sorted(self._walk((), self.entry), key=len)

    def parallel(self) -> Iterator[tuple[_Value, _Value]]:
        """Pairs of outputs which, both added to what entered, give what came out; the
        one called first is first.
        """
        if self.end is None:
            return
        for a, b in combinations(self.outputs, 2):
            if self._may_be_sum(self.end, (self.entry, a, b)) and self._is_sum(
                self.end, (self.entry, a, b)
            ):
                yield a, b

    def single(self) -> bool:
        """Whether one output alone, added to what entered, gives what came out."""
        return self.end is not None and any(
            self._is_sum(self.end, (self.entry, a)) for a in self.outputs
        )

    def _walk(
        self, way: tuple[_Step, ...], stream: _Value
    ) -> Iterator[tuple[_Step, ...]]:
        if self.end is None or len(way) == MOST_BRANCHES:
            return
        for branch in self.outputs:
            if branch.size == 0 or any(branch is step.branch for step in way):
                continue
            for after, normed in self._after(stream, branch):
                longer = (*way, _Step(branch, after, normed))
                if not same(after.states, self.end.states):
                    yield from self._walk(longer, after)
                elif len(longer) > 1:
                    yield longer

    def _after(self, stream: _Value, branch: _Value) -> Iterator[tuple[_Value, bool]]:
        """What the stream may be after a branch is added: the sum itself, or what a
        norm makes of the sum.
        """
        terms = (stream, branch)
        for value in (*self.all, *((self.end,) if self.end else ())):
            if (
                self._may_be_sum(value, terms)
                and value is not stream
                and self._is_sum(value, terms)
            ):
                yield value, False
        for before, normed in self.norms:
            if self._may_be_sum(before, terms) and self._is_sum(before, terms):
                yield normed, True

    def _may_be_sum(self, total: _Value, terms: Sequence[_Value]) -> bool:
        """Whether the projections add up, as they do wherever the values do."""
        difference = abs(total.projection - sum(term.projection for term in terms))
        return difference <= ROUNDING * self.eps * sum(term.size for term in terms)

    def _is_sum(self, total: _Value, terms: Sequence[_Value]) -> bool:
        """Whether the terms add up to the total, within rounding of the dtype."""
        added = torch.stack([term.states.double() for term in terms]).sum(0)
        scale = torch.stack(
            [term.states.double().abs() for term in (*terms, total)]
        ).amax(0)
        return bool(
            ((total.states.double() - added).abs() <= ROUNDING * self.eps * scale).all()
        )

    def _end(self, call: Call) -> _Value | None:
        layout = None if call.out is None else self._layout(call.out, self.entry.states)
        if call.out is None or layout is None:
            return None
        return self._value(
            Tap(call.path, call.number, "output", layout),
            layout.states(call.out, self.trace.tokens),
        )

    def _value(self, tap: Tap, states: Tensor) -> _Value:
        products = states.double().cpu() * self.direction
        return _Value(tap, states, products.sum().item(), products.abs().sum().item())

    def _layout(self, tensor: Tensor, like: Tensor) -> Layout | None:
        layout = fitting_layout(tensor, self.trace, self.layout)
        return (
            layout
            if layout is not None
            and layout.states(tensor, self.trace.tokens).shape == like.shape
            else None
        )

    def _unique(
        self, tensors: Iterator[tuple[hooks.Side, Call, Tensor | None]]
    ) -> list[_Value]:
        """Each value once, under the tap with the shortest path."""
        values: dict[tuple[float, float], _Value] = {}
        for side, call, tensor in tensors:
            layout = None if tensor is None else self._layout(tensor, self.entry.states)
            if tensor is None or layout is None:
                continue
            one = self._value(
                Tap(call.path, call.number, side, layout),
                layout.states(tensor, self.trace.tokens),
            )
            known = values.setdefault((one.projection, one.size), one)
            if one.tap.path.count(".") < known.tap.path.count("."):
                values[(one.projection, one.size)] = one
        return list(values.values())

    def _norm(self, call: Call, like: Tensor) -> tuple[_Value, _Value] | None:
        """The input and output of a call that keeps the shape and changes the value, as
        a norm does.
        """
        if (
            call.into is None
            or call.out is None
            or call.into.shape != call.out.shape
            or same(call.into, call.out)
        ):
            return None
        layout = self._layout(call.into, like)
        if layout is None:
            return None
        into, out = (
            layout.states(value, self.trace.tokens) for value in (call.into, call.out)
        )
        taps = [
            Tap(call.path, call.number, side, layout) for side in ("input", "output")
        ]
        return self._value(taps[0], into), self._value(taps[1], out)


def mixes_tokens(
    module: nn.Module,
    inputs: Mapping[str, Any],
    disturbed: Tap,
    watched: Tap,
    plain: Tensor,
) -> bool:
    """Whether a change at one tap's first token reaches later tokens of another, which
    is `plain` without it.
    """
    changed = state_at(module, inputs, watched, plain.shape[1], disturbed)
    return differs(plain[:, 1:], changed[:, 1:])


def differs(plain: Tensor, changed: Tensor, *, steps: int = 1) -> bool:
    """Whether more than one number in eight changed by more than rounding does in so
    many steps.

    Numbers are counted, because a few huge ones would hide what the others do. Those
    smaller than the median are measured by the median.
    """
    eps = torch.finfo(plain.dtype).eps
    plain, changed = plain.double(), changed.double()
    size = plain.abs().clamp(min=plain.abs().median())
    allowed = max(UNITS * steps**0.5 * eps, LEAST_CHANGE)
    return bool(((plain - changed).abs() > allowed * size).double().mean() > 1 / 8)


def state_at(
    module: nn.Module,
    inputs: Mapping[str, Any],
    watched: Tap,
    tokens: int,
    disturbed: Tap | None = None,
) -> Tensor:
    """The state at one tap in a pass; the state at `disturbed`, if given, is changed at
    every text's first token.
    """
    kept: list[Tensor] = []
    stops = not hooks.is_offloaded(module)

    def keep(tensor: Tensor) -> None:
        kept.append(watched.layout.states(tensor, tokens).detach().clone())
        if stops:
            raise hooks.Stopped

    def disturb(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        first = taps[-1].layout.states(new, tokens)[:, 0]
        first += (
            4
            * first.abs().mean()
            * torch.linspace(-1, 1, first.shape[-1], device=first.device).to(
                first.dtype
            )
        )
        return new

    taps = [watched] if disturbed is None else [watched, disturbed]
    watches = [
        tap.watch(module, change)
        for tap, change in zip(taps, (keep, disturb), strict=False)
    ]
    with autograd.restored(), torch.no_grad(), hooks.watching(watches):
        # Where a state lives does not depend on its numbers.
        hooks.run(module, inputs, finite=False)
    return kept[0]
