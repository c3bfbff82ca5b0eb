"""Find the module at fault: from the first site that differs down to the module whose
own work differs on equal input.

Inside a block, every module of the candidate is called on exactly what the reference's
module of the same path was given: hidden states, masks, position embeddings. No error
reaches a module from outside, so a module that returns something else is at fault, or
one inside it is. The innermost such module is named. A part of which every matrix is at
fault is named as a whole.

Where a block agrees on equal input, what it was given differed: then the modules
outside the blocks are searched in the same way, and at last the code that runs the
blocks is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import (
    ModuleCall,
    clone,
    map_tensors,
    record_calls,
    structure_of,
    tensors_in,
)
from hiddenscope.analyses.drift.noise import Gap, Noise, gap
from hiddenscope.analyses.drift.observe import (
    LOGITS,
    Side,
    in_float64,
    masks_of,
    real_rows,
)
from hiddenscope.analyses.drift.systematic import SystematicTest
from hiddenscope.discovery import Stack
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

Hint = dict[str, str]
"""What a fault looks like: the name of a `fault`, and the `evidence` in a sentence."""
# Of the error in a whole pass, that the faulty container called by itself must show.
SHARE_OF_ERROR = 0.1


@dataclass(frozen=True)
class FaultyModule:
    """The module at fault: its path in the candidate, how far it is over the noise on
    equal input, and the evidence.

    `own_code` says that its parts and weights agree, so that the fault is in its own
    code. `call` is the call of the reference's module, and `made` what the candidate's
    made of the same input. `hints` are what was seen on the way.
    """

    path: str
    beyond: float
    relative: float
    own_code: bool = False
    call: ModuleCall | None = None
    made: Tensor | None = None
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How far what a module returned is over the noise, and how far it is off."""

    beyond: float
    relative: float

    @property
    def wrong(self) -> bool:
        """Whether that is more than rounding."""
        return self.beyond > 1


RIGHT, INCOMPARABLE = Verdict(0.0, 0.0), Verdict(inf, inf)


class Search:
    """Looks for the module at fault in a batch of texts, in a candidate with the
    reference's modules.
    """

    def __init__(self, reference: Side, candidate: Side, inputs: Inputs) -> None:
        self.reference, self.candidate, self.inputs = reference, candidate, inputs
        self.batch = reference.batch(inputs)
        self.masks = masks_of(self.batch)
        # With the call itself, so that no other call can have its id.
        self._verdicts: dict[int, tuple[ModuleCall, Verdict | None]] = {}

    def find(
        self, first: str, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        """Find the module behind the first site that differs; `relative` is the error
        of a whole pass there.
        """
        layers = [name for name in beyond if name != LOGITS and "final" not in name]
        if len(layers) > 2 and all(beyond[name] > 1 for name in layers):
            return FaultyModule(
                self._container(Site.parse(first)), beyond[first], relative
            )
        site = None if first == LOGITS else Site.parse(first)
        if site is not None and site.layer:
            fault = self._search_block(site)
            if fault is not None:
                return fault
        return self._search_outside(site, relative)

    def _search_block(self, site: Site) -> FaultyModule | None:
        call = self.block_call(site)
        return None if call is None else self._blame(call)

    def block_call(self, site: Site) -> ModuleCall | None:
        """Record the reference's block that makes a layer, with every call inside it."""
        path = self.reference.blocks[site]
        entered = self._arguments_of(path, _occurrence(self._stack(site), site))
        if entered is None:
            return None
        block = self.reference.part(path)
        parts = {path: block}
        for name, part in block.named_modules():
            if name:
                parts[f"{path}.{name}"] = part
        return record_calls(
            parts, lambda: entered.repeat(block, self.reference.device)
        )[0]

    def _arguments_of(self, path: str, number: int) -> ModuleCall | None:
        """Record what the reference gives to one call of a module; the pass stops
        there.
        """
        calls: list[ModuleCall] = []
        may_stop = not hooks.is_offloaded(self.reference.module)

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            calls.append(ModuleCall(path))
            if len(calls) == number + 1:
                calls[-1].args, calls[-1].kwargs = (
                    map_tensors(args, clone),
                    map_tensors(dict(kwargs), clone),
                )
                if may_stop:
                    raise hooks.Stopped

        with hooks.watching([hooks.Watch(self.reference.part(path), "input", before)]):
            self.reference.run(self.batch)
        return calls[number] if len(calls) > number else None

    def _blame(self, call: ModuleCall) -> FaultyModule | None:
        """Find the innermost module at fault within a call, the first in the order of
        the pass.
        """
        verdict = self._verdict(call)
        matrices = [leaf for leaf in call.leaves() if self._has_matrix(leaf.path)]
        distinct = {leaf.path for leaf in matrices}
        if len(distinct) > 1 and all(self._is_wrong(leaf) for leaf in matrices):
            return self._fault(call, verdict or INCOMPARABLE)
        for inner in call.inner:
            fault = self._blame(inner)
            if fault is not None:
                return fault
        if verdict is not None and verdict.wrong:
            return self._fault(call, verdict, own_code=self._is_own_code(call))
        return None

    def _fault(
        self, call: ModuleCall, verdict: Verdict, *, own_code: bool = False
    ) -> FaultyModule:
        path = self._path_in_candidate(call.path)
        return FaultyModule(
            path,
            verdict.beyond,
            verdict.relative,
            own_code,
            call,
            self._candidate_output(call),
        )

    def _candidate_output(self, call: ModuleCall) -> Tensor | None:
        """Call the candidate's module again, for what it makes of the reference's
        input.
        """
        try:
            part = self.candidate.part(self._path_in_candidate(call.path))
            output = hooks.first_tensor(call.repeat(part, self.candidate.device))
        except (AttributeError, TypeError, ValueError, RuntimeError, LookupError):
            return None
        return None if output is None else output.to(self.reference.device)

    def _is_own_code(self, call: ModuleCall) -> bool:
        """Check that nothing but a module's code is left: its parts were all compared
        and agree, and so do its weights.

        A part that the reference calls and the candidate does not have, or the other
        way round, leaves it open.
        """
        part = self.candidate.part(self._path_in_candidate(call.path))
        if not call.inner or not _same_weights(part, self.reference.part(call.path)):
            return False
        compared = set()
        for inner in call.walk():
            if inner is call:
                continue
            verdict = self._verdict(inner)
            if verdict is None or verdict.wrong:
                return False
            compared.add(self._path_in_candidate(inner.path))
        path = self._path_in_candidate(call.path)
        with_weights = [
            name for name, inner in part.named_modules() if name and inner._parameters
        ]
        return all(f"{path}.{name}".lstrip(".") in compared for name in with_weights)

    def _has_matrix(self, path: str) -> bool:
        weights = self.reference.part(path)._parameters.values()
        return any(weight is not None and weight.ndim > 1 for weight in weights)

    def _is_wrong(self, call: ModuleCall) -> bool:
        verdict = self._verdict(call)
        return verdict is not None and verdict.wrong

    def _verdict(self, call: ModuleCall) -> Verdict | None:
        """Tell how far the candidate's module is off on the reference's input; None
        where it has no such module.
        """
        if id(call) not in self._verdicts:
            self._verdicts[id(call)] = call, self._compare(call)
        return self._verdicts[id(call)][1]

    def _compare(self, call: ModuleCall) -> Verdict | None:
        try:
            part = self.candidate.part(self._path_in_candidate(call.path))
        except AttributeError:
            return None
        reference_part = self.reference.part(call.path)
        if part is reference_part:
            return RIGHT
        try:
            output = call.repeat(part, self.candidate.device)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
            # It does not even take what the reference's module takes.
            return INCOMPARABLE
        return self._worst_output(
            call, output, self._exact_outputs(reference_part, call)
        )

    def _exact_outputs(self, part: nn.Module, call: ModuleCall) -> list[Tensor]:
        """Run the reference's module in float64; nothing if a kernel of it knows no
        float64.
        """
        try:
            return list(
                tensors_in(
                    in_float64(
                        part,
                        map_tensors(call.args, clone),
                        map_tensors(call.kwargs, clone),
                    )
                )
            )
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            return []

    def _worst_output(
        self, call: ModuleCall, output: Any, exact: Sequence[Tensor]
    ) -> Verdict:
        """Compare all tensors in an output, and return the worst."""
        verdicts = [RIGHT]
        is_measured = len(exact) == len(call.outputs)
        for place, (expected, other) in enumerate(_paired_outputs(call, output)):
            exact_output = exact[place] if is_measured else None
            verdicts.append(self.judge(expected, other, exact_output))
        return max(verdicts, key=lambda verdict: verdict.beyond)

    def judge(self, expected: Tensor, other: Tensor, exact: Tensor | None) -> Verdict:
        """Hold what a module returned against what it should, by the noise of the
        reference's own module.
        """
        if expected.shape != other.shape:
            return INCOMPARABLE
        if not expected.is_floating_point():
            differs = not other.is_floating_point() and not torch.equal(
                expected.cpu(), other.cpu()
            )
            return INCOMPARABLE if differs else RIGHT
        error = self.gap(expected, other)
        noise, systematic = Noise.assumed(expected.dtype), 0.0
        rounding = (
            self.gap(exact, expected)
            if exact is not None and exact.shape == expected.shape
            else None
        )
        if exact is not None and rounding is not None and rounding.worst < inf:
            noise = Noise.measured([rounding], expected.dtype)
            systematic = self._systematic(expected, other, exact)
        return Verdict(max(noise.times_over(error), systematic), error.worst)

    def _systematic(self, expected: Tensor, other: Tensor, exact: Tensor) -> float:
        """Tell how far a difference that is the same at every token is over what sound
        programs show.
        """
        tensors = [real_rows(tensor, self.masks) for tensor in (expected, other, exact)]
        test = SystematicTest(tensors[0].shape[-1])
        test.add(*tensors)
        return test.result().beyond

    def gap(self, expected: Tensor, other: Tensor) -> Gap:
        """Measure how far two tensors are apart over real tokens."""
        return gap(real_rows(expected, self.masks), real_rows(other, self.masks))

    def _path_in_candidate(self, path: str) -> str:
        """Find the same module in the candidate, where its blocks may have other names."""
        for site, block in self.reference.blocks.items():
            if path == block or path.startswith(f"{block}."):
                return self.candidate.blocks.get(site, block) + path[len(block) :]
        return path

    def _stack(self, site: Site) -> Stack:
        return self.reference.anatomy.stack(site)

    def _search_outside(
        self, site: Site | None, relative: float
    ) -> FaultyModule | None:
        """Find the module outside the blocks that is at fault, or the code that runs
        the blocks.
        """
        whole = self._calls_outside()
        until = self._block_making(site)
        # An error at `layer.0`, at final or in the logits is looked for first where it
        # can only be made.
        nearest = [] if until is not None else self._calls_between(whole, site)
        for call in [*nearest, *whole.walk()]:
            if call.path == until:
                break
            if self.holds_blocks(call.path):
                continue
            fault = self._blame(call)
            if fault is not None:
                return fault
        return self._blame_container(whole, site, relative)

    def _calls_between(self, whole: ModuleCall, site: Site | None) -> list[ModuleCall]:
        calls = list(whole.walk())
        stacks: dict[str, Any] = {
            path: layer.stack for layer, path in self.reference.blocks.items()
        }
        return window(calls, [stacks.get(call.path, ()) for call in calls], site)

    def _block_making(self, site: Site | None) -> str | None:
        if site is None or site.layer is None:
            return None
        return self._stack(site).blocks[max(site.layer, 1) - 1].path

    def _calls_outside(self) -> ModuleCall:
        """Record every call outside the blocks, and those of the blocks without their
        arguments.
        """
        blocks = set(self.reference.blocks.values())
        inside = tuple(f"{path}." for path in blocks)
        parts = hooks.parts_of(self.reference.module)
        outside = {
            path: part for path, part in parts.items() if not path.startswith(inside)
        }
        return record_calls(
            outside, lambda: self.reference.run(self.batch), opaque=blocks
        )[0]

    def holds_blocks(self, path: str) -> bool:
        """Check whether a module of the reference is a block or holds one."""
        return any(
            block == path or _holds(path, block)
            for block in self.reference.blocks.values()
        )

    def _container(self, site: Site) -> str:
        """Find the innermost module that is called and holds the blocks of a site's
        stack.
        """
        block = self._stack(site).blocks[0].path
        holders = [
            call.path
            for call in self._calls_outside().walk()
            if _holds(call.path, block)
        ]
        return max(holders, key=len, default="")

    def _blame_container(
        self, whole: ModuleCall, site: Site | None, relative: float
    ) -> FaultyModule:
        """Name the innermost module with the site in it that shows the error when it is
        called by itself.
        """
        if site is None:
            return FaultyModule(
                self._path_in_candidate(whole.path),
                inf,
                relative,
                own_code=True,
                call=whole,
            )
        tap = self.reference.taps[site]
        holders = [
            call
            for call in whole.walk()
            if _holds(call.path, tap.path) and self.holds_blocks(call.path)
        ]
        for call in sorted(holders, key=lambda call: -len(call.path)):
            if self._shows_error(call, site, relative):
                return FaultyModule(call.path, inf, relative, own_code=True, call=call)
        return FaultyModule("", inf, relative, own_code=True, call=whole)

    def _shows_error(self, call: ModuleCall, site: Site, relative: float) -> bool:
        """Check whether a part of the candidate, called on the reference's input, is
        off at a site as the whole is.
        """
        states: list[Tensor] = []
        for side in (self.reference, self.candidate):
            before = len(states)
            watch = side.taps[site].watch(
                side.module, lambda tensor: states.append(clone(tensor))
            )
            with hooks.watching([watch]):
                try:
                    call.repeat(side.part(call.path), side.device)
                except (
                    TypeError,
                    ValueError,
                    RuntimeError,
                    LookupError,
                    AttributeError,
                ):
                    return True
            if len(states) != before + 1:
                return True
        if states[0].shape != states[1].shape:
            return True
        return self.gap(states[0], states[1]).worst > SHARE_OF_ERROR * relative


def _same_weights(part: nn.Module, other: nn.Module) -> bool:
    """Check that the parameters which two modules hold themselves are equal."""
    weights = {
        name: weight for name, weight in part._parameters.items() if weight is not None
    }
    others = {
        name: weight for name, weight in other._parameters.items() if weight is not None
    }
    if weights.keys() != others.keys():
        return False
    return all(equal(weight, others[name]) for name, weight in weights.items())


def equal(tensor: Tensor, other: Tensor) -> bool:
    """Check that two tensors hold the same numbers, wherever they are."""
    return tensor.shape == other.shape and torch.equal(
        tensor.detach().cpu(), other.detach().cpu()
    )


def window(order: Sequence[Any], stacks: Sequence[Any], site: Site | None) -> list[Any]:
    """Choose the calls before the first block of a site's stack, or those after its
    last one.

    `stacks` has the stack of each call that is a block's, and () for others.
    """
    blocks = [place for place, stack in enumerate(stacks) if stack != ()]
    last_stack = stacks[blocks[-1]] if blocks else None
    stack = last_stack if site is None else site.stack
    within = [place for place in blocks if stacks[place] == stack]
    if not within:
        return list(order)
    first, last = within[0], within[-1]
    if site is not None and site.layer == 0:
        start = max((place + 1 for place in blocks if place < first), default=0)
        return list(order[start:first])
    end = min((place for place in blocks if place > last), default=len(order))
    return list(order[last + 1 : end])


def _paired_outputs(call: ModuleCall, output: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the tensors of two outputs; one kernel may leave out what another returns."""
    others = list(tensors_in(output))
    if structure_of(output) == call.structure or len(call.outputs) == len(others):
        yield from zip(call.outputs, others, strict=False)
    elif call.outputs and others:
        yield call.outputs[0], others[0]


def _holds(path: str, inner: str) -> bool:
    return not path or inner.startswith(f"{path}.")


def _occurrence(stack: Stack, site: Site) -> int:
    """Count the earlier calls of a block's module, where one module is called for
    several layers.
    """
    layer = site.layer or 1
    path = stack.blocks[layer - 1].path
    return sum(block.path == path for block in stack.blocks[: layer - 1])
