"""Localize a fault: from the first site that differs down to the module whose own work differs on equal input.

Inside a block, every module of the candidate is called on exactly what the reference's module of the same path was
given: hidden states, masks, position embeddings. No error reaches a module from outside, so a module that gives
something else is at fault, or one inside it is. The innermost such module is named; where none of its parts is at
fault, the fault is in its own code. A part of which every matrix is at fault is named as a whole.

Where a block agrees on equal input, what it was given differed: then the modules outside the blocks are looked at in
the same way, and at last the code that runs the blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope import autograd, hooks
from hiddenscope.analyses.drift.observe import (
    LOGITS,
    Gap,
    Live,
    Noise,
    gap,
    in_float64,
    mapped,
    masks_of,
    real_rows,
)
from hiddenscope.anatomy import Stack
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

Hint = dict[str, str]
"""What a fault looks like: the name of a `fault`, and the `evidence` in a sentence."""
SHARE_OF_ERROR = 0.1  # of the error in a whole pass, that the faulty container called by itself must show


@dataclass
class ModuleCall:
    """One call of a module of the reference: what it was given, what it gave, and the calls inside it."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: tuple[list[Tensor], Any] = field(default_factory=lambda: ([], None))
    inner: list[ModuleCall] = field(default_factory=list)


@dataclass(frozen=True)
class FaultyModule:
    """The module at fault: its path in the candidate, how far beyond noise it is on equal input, and the call.

    `own` says that all modules inside it agree, so that the fault is in its own code. `made` is what it gave on that
    input, where it cannot be called as the reference's module can; `hints` are what was seen on the way to it.
    """

    path: str
    beyond: float
    relative: float
    own: bool
    call: ModuleCall | None = None
    made: Tensor | None = None
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class _Verdict:
    beyond: float
    relative: float

    @property
    def wrong(self) -> bool:
        return self.beyond > 1


class Search:
    """Looks for the module at fault in a batch of texts."""

    def __init__(self, reference: Live, candidate: Live, inputs: Inputs) -> None:
        self.reference, self.candidate = reference, candidate
        self.batch = reference.batch(inputs)
        self.masks = masks_of(self.batch)
        self.inputs = inputs
        self._known: dict[int, tuple[ModuleCall, _Verdict | None]] = {}  # with the call, so that its id stays its own

    def find(self, first: str, beyond: Mapping[str, float], total: float) -> FaultyModule | None:
        """The faulty module behind the first site that differs; `total` is the relative error of a whole pass there."""
        everything = [name for name in beyond if name != LOGITS and "final" not in name]
        if len(everything) > 2 and all(beyond[name] > 1 for name in everything):
            return FaultyModule(self._container(Site.parse(first)), beyond[first], total, own=False)
        site = None if first == LOGITS else Site.parse(first)
        if site is not None and site.layer:
            found = self._in_block(site)
            if found is not None:
                return found
        return self._outside(first, site, total)

    def _in_block(self, site: Site) -> FaultyModule | None:
        block = self._stack(site).blocks[(site.layer or 1) - 1]
        call = self._given(block.path, _occurrence(self._stack(site), site))
        if call is None:
            return None
        calls = self._traced(self.reference.module.get_submodule(block.path), block.path, call)
        return self._blame(calls)

    def _given(self, path: str, number: int) -> ModuleCall | None:
        """What the reference gives to a call of a module; the pass stops there."""
        kept: list[ModuleCall] = []
        calls: list[None] = []

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            calls.append(None)
            if len(calls) == number + 1:
                kept.append(ModuleCall(path, mapped(args, _copy), mapped(dict(kwargs), _copy)))
                if not hooks.is_offloaded(self.reference.module):
                    raise hooks.Stopped

        module = self.reference.module
        with (
            autograd.restored(),
            torch.no_grad(),
            hooks.watching([hooks.Watch(module.get_submodule(path), "input", before)]),
        ):
            self.reference.run(self.batch)
        return kept[0] if kept else None

    def _traced(self, module: nn.Module, path: str, call: ModuleCall) -> ModuleCall:
        """A module of the reference, called again, with every call inside it."""
        parts = {f"{path}.{name}" if path else name: part for name, part in module.named_modules() if name}
        tracer = _Tracer({path: module, **parts})
        with autograd.restored(), torch.no_grad(), hooks.watching(tracer.watches()):
            module(*mapped(call.args, _copy), **mapped(call.kwargs, _copy))
        return tracer.top[0]

    def _blame(self, call: ModuleCall) -> FaultyModule | None:
        """The innermost module at fault within a call, the first in the order of the pass; None if none is."""
        verdict = self._verdict(call)
        matrices = [leaf for leaf in leaves(call) if self._has_matrix(leaf.path)]
        wrong = [leaf for leaf in matrices if self._is_wrong(leaf)]
        if len({leaf.path for leaf in matrices}) > 1 and len(wrong) == len(matrices):
            return self._faulty(call, verdict, own=False)
        for inner in call.inner:
            found = self._blame(inner)
            if found is not None:
                return found
        if verdict is not None and verdict.wrong:
            return self._faulty(call, verdict, own=bool(call.inner))
        return None

    def _faulty(self, call: ModuleCall, verdict: _Verdict | None, *, own: bool) -> FaultyModule:
        numbers = (inf, inf) if verdict is None else (verdict.beyond, verdict.relative)
        return FaultyModule(self._path_in_candidate(call.path), *numbers, own, call)

    def _has_matrix(self, path: str) -> bool:
        part = self.reference.module.get_submodule(path)
        return any(weight is not None and weight.ndim > 1 for weight in part._parameters.values())

    def _is_wrong(self, call: ModuleCall) -> bool:
        verdict = self._verdict(call)
        return verdict is not None and verdict.wrong

    def _verdict(self, call: ModuleCall) -> _Verdict | None:
        """How far the candidate's module is off on the reference's input; None where it has no such module."""
        if id(call) not in self._known:
            self._known[id(call)] = call, self._compared(call)
        return self._known[id(call)][1]

    def _compared(self, call: ModuleCall) -> _Verdict | None:
        try:
            part = self.candidate.module.get_submodule(self._path_in_candidate(call.path))
        except AttributeError:
            return None
        own = self.reference.module.get_submodule(call.path)
        if part is own:
            return _Verdict(0.0, 0.0)
        try:
            output = called(part, call, self.candidate.device)
        except Exception:
            return _Verdict(inf, inf)  # it does not even take what the reference's takes
        try:
            wide = in_float64(own, mapped(call.args, _copy), mapped(call.kwargs, _copy))
        except Exception:
            wide = None
        return self._worst(call.output, output, wide)

    def _worst(self, expected: tuple[list[Tensor], Any], output: Any, wide: Any) -> _Verdict:
        """The worst of all tensors in an output."""
        worst = _Verdict(0.0, 0.0)
        exact = [] if wide is None else list(tensors_in(wide))
        measurable = len(exact) == len(expected[0])
        for place, (one, two) in enumerate(paired(expected, output)):
            if one.shape != two.shape:
                return _Verdict(inf, inf)
            if not one.is_floating_point():
                if not torch.equal(one.cpu(), two.cpu()) and not two.is_floating_point():
                    return _Verdict(inf, inf)
                continue
            error = self._gap(one, two)
            noise = Noise.assumed(one.dtype)
            if measurable and exact[place].shape == one.shape:
                noise = Noise.of([self._gap(exact[place], one)], one.dtype)
            worst = max(worst, _Verdict(noise.beyond(error), error.worst), key=lambda one: one.beyond)
        return worst

    def _gap(self, one: Tensor, two: Tensor) -> Gap:
        return gap(real_rows(one, self.masks), real_rows(two, self.masks))

    def _path_in_candidate(self, path: str) -> str:
        """The path of the same module in the candidate, where its blocks may have other names."""
        for site, block in self.reference.blocks.items():
            if path == block or path.startswith(f"{block}."):
                return self.candidate.blocks.get(site, block) + path[len(block) :]
        return path

    def _stack(self, site: Site) -> Stack:
        return self.reference.anatomy.stack(site)

    def _outside(self, first: str, site: Site | None, total: float) -> FaultyModule | None:
        """The module outside the blocks that is at fault, or the code that runs the blocks."""
        top = self._trace_outside()
        until = self._limit(first, site)
        near = [] if until is not None else self._between(top, site)
        for call in [*near, *_flat(top)]:
            if call.path == until:
                break
            if self._holds_blocks(call.path):
                continue
            found = self._blame(call)
            if found is not None:
                return found
        return self._container_at_fault(top, first, site, total)

    def _between(self, top: ModuleCall, site: Site | None) -> list[ModuleCall]:
        """The calls outside the blocks in which an error at `layer.0`, at final or in the logits can only be made."""
        calls = [*_flat(top)]
        stacks = {path: one.stack for one, path in self.reference.blocks.items()}
        return window(calls, [stacks.get(call.path, ()) for call in calls], site)

    def _limit(self, first: str, site: Site | None) -> str | None:
        """The block before which the fault must lie."""
        if site is None or site.layer is None:
            return None
        return self._stack(site).blocks[max(site.layer, 1) - 1].path

    def _trace_outside(self) -> ModuleCall:
        """Every call outside the blocks, with the blocks themselves as calls without inner ones."""
        module = self.reference.module
        inside = tuple(f"{path}." for path in self.reference.blocks.values())
        parts = {path: part for path, part in hooks.parts_of(module).items() if not path.startswith(inside)}
        tracer = _Tracer(parts, hollow=set(self.reference.blocks.values()))
        with autograd.restored(), torch.no_grad(), hooks.watching(tracer.watches()):
            self.reference.run(self.batch)
        return tracer.top[0]

    def _holds_blocks(self, path: str) -> bool:
        prefix = f"{path}." if path else ""
        return any(block.startswith(prefix) or block == path for block in self.reference.blocks.values())

    def _container(self, site: Site) -> str:
        """The innermost module that is called and holds the blocks of a site's stack."""
        block = self._stack(site).blocks[0].path
        holders = [call.path for call in _flat(self._trace_outside()) if _holds(call.path, block)]
        return max(holders, key=len) if holders else ""

    def _container_at_fault(self, top: ModuleCall, first: str, site: Site | None, total: float) -> FaultyModule:
        """The innermost module with the site in it that shows the error when it is called by itself."""
        if site is None:
            return FaultyModule(self._path_in_candidate(top.path), inf, total, own=True, call=top)
        tap = self.reference.taps[site]
        holders = [call for call in _flat(top) if _holds(call.path, tap.path) and call.path != tap.path]
        holders = [call for call in holders if self._holds_blocks(call.path)]
        for call in sorted(holders, key=lambda call: -len(call.path)):
            if self._shows(call, site, total):
                return FaultyModule(call.path, inf, total, own=True, call=call)
        return FaultyModule("", inf, total, own=True, call=top)

    def _shows(self, call: ModuleCall, site: Site, total: float) -> bool:
        """Whether a part of the candidate, called on the reference's input, is off at a site as the whole is."""
        rows = []
        for side, device in ((self.reference, self.reference.device), (self.candidate, self.candidate.device)):
            kept: list[Tensor] = []
            tap = side.taps[site]
            watch = tap.watch(side.module, lambda tensor, kept=kept: kept.append(tensor.detach().clone()))  # type: ignore[misc]
            with autograd.restored(), torch.no_grad(), hooks.watching([watch]):
                try:
                    called(side.module.get_submodule(call.path), call, device)
                except Exception:
                    return True
            if not kept:
                return True
            rows.append(kept[0])
        return rows[0].shape != rows[1].shape or self._gap(*rows).worst > SHARE_OF_ERROR * total


def window(order: Sequence[Any], stacks: Sequence[Any], site: Site | None) -> list[Any]:
    """Of calls in order, those before the first block of a site's stack, or after its last one.

    `stacks` has the stack of each call that is a block's, and () for others.
    """
    stack = site.stack if site is not None else next((one for one in reversed(stacks) if one != ()), None)
    blocks = [place for place, one in enumerate(stacks) if one != ()]
    own = [place for place in blocks if stacks[place] == stack]
    if not own:
        return list(order)
    if site is not None and site.layer == 0:
        return list(order[max((place + 1 for place in blocks if place < own[0]), default=0) : own[0]])
    return list(order[own[-1] + 1 : min((place for place in blocks if place > own[-1]), default=len(order))])


class _Tracer:
    """Keeps every call of some modules as a tree, with copies of what went in and came out except of `hollow` ones."""

    def __init__(self, parts: Mapping[str, nn.Module], hollow: Collection[str] = ()) -> None:
        self.parts, self.hollow = parts, hollow
        self.top: list[ModuleCall] = []
        self._open: list[ModuleCall] = []

    def watches(self) -> list[hooks.Watch]:
        """What is watched."""
        return [watch for path, part in self.parts.items() for watch in self._watch(path, part)]

    def _watch(self, path: str, part: nn.Module) -> list[hooks.Watch]:
        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if path in self.hollow:
                args, kwargs = (), {}
            call = ModuleCall(path, mapped(args, _copy), mapped(dict(kwargs), _copy))
            (self._open[-1].inner if self._open else self.top).append(call)
            self._open.append(call)

        def after(output: Any) -> None:
            call = self._open.pop()
            if path not in self.hollow:
                call.output = [tensor.detach().clone() for tensor in tensors_in(output)], form_of(output)

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]


def called(part: nn.Module, call: ModuleCall, device: torch.device) -> Any:
    """What a module makes of what another was given."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    with autograd.restored(), torch.no_grad():
        return part(*mapped(call.args, moved), **mapped(call.kwargs, moved))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in an output, in order."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    for part in parts:
        yield from tensors_in(part)


def form_of(value: Any) -> Any:
    """The places of an output: True for a tensor, None for nothing."""
    if isinstance(value, Tensor):
        return True
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else None
    return None if parts is None else [form_of(part) for part in parts]


def paired(expected: tuple[list[Tensor], Any], output: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that two outputs have in the same places; a kernel may leave out what another gives."""
    tensors, form = expected
    others = list(tensors_in(output))
    if form_of(output) == form or len(tensors) == len(others):
        yield from zip(tensors, others, strict=False)
    elif tensors and others:
        yield tensors[0], others[0]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _holds(path: str, inner: str) -> bool:
    return not path or inner.startswith(f"{path}.")


def leaves(call: ModuleCall) -> Iterator[ModuleCall]:
    """The calls inside a call, and itself, that hold no others."""
    if not call.inner:
        yield call
    for inner in call.inner:
        yield from leaves(inner)


def _flat(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for inner in call.inner:
        yield from _flat(inner)


def _occurrence(stack: Stack, site: Site) -> int:
    """Which call of its module a block is, where one module is called for several layers."""
    layer = site.layer or 1
    path = stack.blocks[layer - 1].path
    return sum(block.path == path for block in stack.blocks[: layer - 1])
