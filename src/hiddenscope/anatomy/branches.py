"""Branches: what attention, cross-attention and the MLP add inside a block, found as sums that really come out.

    pre-norm    layer.k-1 + attn (+ cross) = mid        mid + mlp = layer.k
    post-norm   norm(layer.k-1 + attn) = mid            norm(mid + mlp) = layer.k
    parallel    layer.k-1 + attn + mlp = layer.k        mid is layer.k-1, which both branches read

A branch is the output of a part inside the block; a sum is looked for among everything that goes into or comes out of
one. The first branch must carry something from one token to another and the last must not, or they are not called
attention and MLP here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy.chains import same
from hiddenscope.anatomy.proof import fitting
from hiddenscope.anatomy.taps import Layout, Tap
from hiddenscope.anatomy.trace import Call, Trace

MOST_STEPS = 3
ROUNDING = 8
# What rounding may change in a pass of the same shape, in units in the last place and as a share: nothing, unless the
# tokens are grouped anew, as experts do.
UNITS, LEAST_CHANGE = 4, 1e-4


@dataclass(frozen=True)
class Block:
    """One block: what kind it is, where its parts are, or why it has none."""

    path: str
    kind: str
    parts: Mapping[str, Tap] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class _Seen:
    """One value that passed inside the block, the tap that shows it best, and a number to tell it by."""

    tap: Tap
    value: Tensor
    sign: float
    size: float


@dataclass(frozen=True)
class _Step:
    """One branch joined to the stream: the branch, what the stream is afterwards, and whether a norm came between."""

    branch: _Seen
    stream: _Seen
    normed: bool


def dissect(call: Call, before: Tap, trace: Trace, into: Tensor, layout: Layout) -> Block:
    """Find the branches of one block call; `into` is the state that entered it and `before` is that state's tap."""
    bench = _Bench(trace, call, into, layout)
    for steps in bench.sequences():
        names = ("attn", "mlp") if len(steps) == 2 else ("attn", "cross", "mlp")
        if len({step.normed for step in steps}) > 1:
            continue
        parts = {name: step.branch.tap for name, step in zip(names, steps, strict=True)}
        kind = "post-norm" if steps[0].normed else "pre-norm"
        return Block(call.path, kind, {**parts, "mid": steps[-2].stream.tap})
    for first, second in bench.parallel():
        return Block(call.path, "parallel", {"attn": first.tap, "mid": before, "mlp": second.tap})
    if bench.single():
        return Block(
            call.path, "single", refused="it adds the output of one part only, which is no pair of attention and MLP"
        )
    return Block(call.path, "other", refused="no outputs of its parts sum up to the state it gives back")


class _Bench:
    """The values seen inside one block call, ready to be added up."""

    def __init__(self, trace: Trace, call: Call, into: Tensor, layout: Layout) -> None:
        self.trace, self.layout = trace, layout
        self.eps = torch.finfo(into.dtype).eps
        self.probe = torch.randn(into.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        inner = [c for c in trace.calls if call.entered < c.entered and c.left < call.left]
        self.entry = self._see(Tap(call.path, call.number, "input"), into)
        self.end = self._end(call)
        self.outputs = self._unique(("output", c, c.out) for c in inner)
        self.values = self._unique(("input", c, c.into) for c in inner)
        known = {(seen.sign, seen.size) for seen in self.outputs}
        self.values = [*self.outputs, *(seen for seen in self.values if (seen.sign, seen.size) not in known)]
        self.norms = [pair for c in inner if (pair := self._norm(c, into)) is not None]

    def _end(self, call: Call) -> _Seen | None:
        layout = None if call.out is None else self._laid(call.out, self.entry.value)
        if call.out is None or layout is None:
            return None
        return self._see(Tap(call.path, call.number, "output", layout), layout.states(call.out, self.trace.tokens))

    def sequences(self) -> Iterator[tuple[_Step, ...]]:
        """The ways to get from what entered to what came out, joining two or three branches one after another."""
        ways = self._walk((), self.entry)
        yield from sorted(ways, key=len)

    def parallel(self) -> Iterator[tuple[_Seen, _Seen]]:
        """Pairs of outputs which, added together to what entered, give what came out; the first called comes first."""
        if self.end is None:
            return
        for a, b in combinations(self.outputs, 2):
            if self._close(self.end.sign, (self.entry, a, b)) and self._equal(self.end, (self.entry, a, b)):
                yield a, b

    def single(self) -> bool:
        """Whether one output alone, added to what entered, gives what came out."""
        return self.end is not None and any(self._equal(self.end, (self.entry, a)) for a in self.outputs)

    def _walk(self, way: tuple[_Step, ...], at: _Seen) -> Iterator[tuple[_Step, ...]]:
        if self.end is None or len(way) == MOST_STEPS:
            return
        for branch in self.outputs:
            if branch.size == 0 or any(branch is step.branch for step in way):
                continue
            for stream, normed in self._joined(at, branch):
                step = (*way, _Step(branch, stream, normed))
                if same(stream.value, self.end.value):
                    if len(step) > 1:
                        yield step
                else:
                    yield from self._walk(step, stream)

    def _joined(self, at: _Seen, branch: _Seen) -> Iterator[tuple[_Seen, bool]]:
        """What the stream may be after the branch is added: the sum itself, or what a norm makes of it."""
        for seen in (*self.values, *((self.end,) if self.end else ())):
            if self._close(seen.sign, (at, branch)) and seen is not at and self._equal(seen, (at, branch)):
                yield seen, False
        for before, after in self.norms:
            if self._close(before.sign, (at, branch)) and self._equal(before, (at, branch)):
                yield after, True

    def _close(self, sign: float, terms: Sequence[_Seen]) -> bool:
        """Whether the numbers that values are told by add up: quick, and true wherever the values themselves do."""
        return abs(sign - sum(term.sign for term in terms)) <= ROUNDING * self.eps * sum(term.size for term in terms)

    def _equal(self, total: _Seen, terms: Sequence[_Seen]) -> bool:
        """Whether the terms add up to the total, to within rounding of the dtype."""
        added = torch.stack([term.value.double() for term in terms]).sum(0)
        scale = torch.stack([term.value.double().abs() for term in (*terms, total)]).amax(0)
        return bool(((total.value.double() - added).abs() <= ROUNDING * self.eps * scale).all())

    def _see(self, tap: Tap, value: Tensor) -> _Seen:
        weighed = value.double().cpu() * self.probe
        return _Seen(tap, value, weighed.sum().item(), weighed.abs().sum().item())

    def _laid(self, tensor: Tensor, like: Tensor) -> Layout | None:
        layout = fitting(tensor, self.trace, self.layout)
        return layout if layout is not None and layout.states(tensor, self.trace.tokens).shape == like.shape else None

    def _unique(self, seen: Iterator[tuple[hooks.Side, Call, Tensor | None]]) -> list[_Seen]:
        """Each value once, under the tap with the shortest path."""
        found: dict[tuple[float, float], _Seen] = {}
        for side, call, tensor in seen:
            layout = None if tensor is None else self._laid(tensor, self.entry.value)
            if tensor is None or layout is None:
                continue
            one = self._see(Tap(call.path, call.number, side, layout), layout.states(tensor, self.trace.tokens))
            known = found.setdefault((one.sign, one.size), one)
            if one.tap.path.count(".") < known.tap.path.count("."):
                found[(one.sign, one.size)] = one
        return list(found.values())

    def _norm(self, call: Call, like: Tensor) -> tuple[_Seen, _Seen] | None:
        """A call that keeps the shape and changes the value, as a norm does: what went in and what came out."""
        if call.into is None or call.out is None or call.into.shape != call.out.shape or same(call.into, call.out):
            return None
        layout = self._laid(call.into, like)
        if layout is None:
            return None
        into, out = (layout.states(value, self.trace.tokens) for value in (call.into, call.out))
        return self._see(Tap(call.path, call.number, "input", layout), into), self._see(
            Tap(call.path, call.number, "output", layout), out
        )


def mixes(module: nn.Module, inputs: Mapping[str, Any], disturbed: Tap, watched: Tap, plain: Tensor) -> bool:
    """Whether a change of one tap at the first token reaches another, which gives `plain` without it, at later ones."""
    changed = shown(module, inputs, watched, plain.shape[1], disturbed)
    return differs(plain[:, 1:], changed[:, 1:])


def differs(plain: Tensor, changed: Tensor, *, steps: int = 1) -> bool:
    """Whether a value changed by more than rounding in so many steps: one number in eight, and by more than its share.

    Numbers are counted, for a few huge ones would hide what the others do; the small are measured by the middle one.
    """
    eps = torch.finfo(plain.dtype).eps
    plain, changed = plain.double(), changed.double()
    size = plain.abs().clamp(min=plain.abs().median())
    allowed = max(UNITS * steps**0.5 * eps, LEAST_CHANGE)
    return bool(((plain - changed).abs() > allowed * size).double().mean() > 1 / 8)


def shown(
    module: nn.Module, inputs: Mapping[str, Any], watched: Tap, tokens: int, disturbed: Tap | None = None
) -> Tensor:
    """What one tap gives in a pass, in which another may be changed at the first token of every text."""
    kept: list[Tensor] = []
    stops = not hooks.is_offloaded(module)

    def keep(tensor: Tensor) -> None:
        kept.append(watched.layout.states(tensor, tokens).detach().clone())
        if stops:
            raise hooks.Stopped

    def disturb(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        first = taps[-1].layout.states(new, tokens)[:, 0]
        first += 4 * first.abs().mean() * torch.linspace(-1, 1, first.shape[-1], device=first.device).to(first.dtype)
        return new

    taps = [watched] if disturbed is None else [watched, disturbed]
    watches = [tap.watch(module, change) for tap, change in zip(taps, (keep, disturb), strict=False)]
    with torch.no_grad(), hooks.watching(watches):
        hooks.run(module, inputs, finite=False)  # where a state lives does not depend on its numbers
    return kept[0]
