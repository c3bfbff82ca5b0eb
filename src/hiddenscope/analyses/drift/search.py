"""Find the module at fault, starting from the first site that differs.

Inside a block, every module of the candidate is called with exactly the arguments of
the reference's module at the same path: hidden states, masks, position embeddings. No
error reaches a module from outside, so if a module returns something else, it or a
module inside it is at fault. The innermost such module is named. If all matrices of a
part are wrong, the whole part is named.

If a block agrees on equal input, its arguments must have differed. Then the modules
outside the blocks are searched in the same way, and finally the code that runs the
blocks is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from hiddenscope.analyses.drift.calls import (
    ModuleCall,
    clone,
    parts_inside,
    raise_if_out_of_memory,
    record_calls,
    run_in_float64,
    structure_of,
    tensors_in,
)
from hiddenscope.analyses.drift.facts import Hint
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.noise import Gap, Noise, gap
from hiddenscope.analyses.drift.observe import FLOAT64_ERRORS, masks_of, real_rows
from hiddenscope.analyses.drift.systematic import SystematicTest
from hiddenscope.analyses.drift.weights import equal, same_weights
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

# A faulty container called by itself must show this share of the error of a whole pass.
SHARE_OF_ERROR = 0.1
# Errors of a module whose forward takes other arguments.
CALL_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)


@dataclass(frozen=True)
class FaultyModule:
    """The module at fault: its path in the candidate and the evidence.

    `beyond` is how many times its error on equal input exceeds the noise. It is
    infinite if the outputs cannot be compared, or if the module is blamed because
    nothing inside it is at fault. `relative` is the relative error of a token, on equal
    input where that was measured, and else in a whole pass.

    With `own_code` its parts and weights agree, so the fault is in its own code. `call`
    is the call of the reference's module, and `output` what the candidate's returned on
    the same input. `hints` are what the search itself learned about the fault.
    """

    path: str
    beyond: float
    relative: float
    own_code: bool = False
    call: ModuleCall | None = None
    output: Tensor | None = None
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How far a returned tensor is over the noise, and its relative error."""

    beyond: float
    relative: float

    @property
    def wrong(self) -> bool:
        """Return whether the error is more than rounding."""
        return self.beyond > 1


RIGHT, INCOMPARABLE = Verdict(0.0, 0.0), Verdict(inf, inf)


class Search:
    """Searches for the module at fault in a candidate with the reference's modules."""

    def __init__(
        self, reference: LiveModel, candidate: LiveModel, inputs: Inputs
    ) -> None:
        self.reference, self.candidate, self.inputs = reference, candidate, inputs
        self.batch = reference.batch(inputs)
        self.masks = masks_of(self.batch)
        # The calls are kept with their verdicts, so that no other call gets their id.
        self._verdicts: dict[int, tuple[ModuleCall, Verdict | None]] = {}

    def find(
        self, first: str, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        """Find the module behind the first site that differs.

        `relative` is the error of a whole pass there.
        """
        site = None if first == LOGITS else Site.parse(first)
        layers = [name for name in beyond if name != LOGITS and "final" not in name]
        # Nothing agrees, so the blocks differ in what all of them are given. One or two
        # layers that differ would be too few to say so.
        if len(layers) > 2 and all(beyond[name] > 1 for name in layers):
            path = self._container(Site.parse(first))
            return FaultyModule(path, beyond[first], relative)
        call = None
        # No block makes layer.0: those are the embeddings.
        if site is not None and site.layer:
            call = self.block_call(site)
        fault = None if call is None else self._blame(call)
        return fault or self._search_outside(site, relative)

    def block_call(self, site: Site) -> ModuleCall | None:
        """Record the reference's block that makes a layer, and every call inside."""
        path = self.reference.blocks[site]
        # One module may be called for several layers.
        layers = [
            layer for layer, block in self.reference.blocks.items() if block == path
        ]
        call = self._enter(path, layers.index(site))
        if call is None:
            return None
        block = self.reference.part(path)
        parts = parts_inside(block, path)
        return record_calls(parts, lambda: call.repeat(block, self.reference.device))[0]

    def _enter(self, path: str, number: int) -> ModuleCall | None:
        """Record the arguments of one call of a module; the pass stops there."""
        calls: list[ModuleCall] = []
        # accelerate moves weights back after each call: a pass must not be left.
        may_stop = not hooks.is_offloaded(self.reference.module)

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if len(calls) != number:
                calls.append(ModuleCall(path))
                return
            calls.append(ModuleCall.copied(path, args, kwargs))
            if may_stop:
                raise hooks.Stopped

        with hooks.watching([hooks.Watch(self.reference.part(path), "input", before)]):
            self.reference.run(self.batch)
        return calls[number] if len(calls) > number else None

    def _blame(self, call: ModuleCall) -> FaultyModule | None:
        """Find the innermost module at fault within a call, first in the pass."""
        verdict = self._verdict(call)
        matrices = [leaf for leaf in call.leaves() if self._has_matrix(leaf.path)]
        distinct = {leaf.path for leaf in matrices}
        if len(distinct) > 1 and all(self._is_wrong(leaf) for leaf in matrices):
            return self._fault(call, verdict or INCOMPARABLE)
        for inner in call.inner:
            fault = self._blame(inner)
            if fault is not None:
                return fault
        if verdict is None or not verdict.wrong:
            return None
        return self._fault(call, verdict, own_code=self._is_own_code(call))

    def _fault(
        self, call: ModuleCall, verdict: Verdict, *, own_code: bool = False
    ) -> FaultyModule:
        path = self._path_in_candidate(call.path)
        output = None
        # Verdicts hold no outputs, and the hints need that of the module at fault.
        try:
            returned = call.repeat(self.candidate.part(path), self.candidate.device)
            output = hooks.first_tensor(returned)
        except CALL_ERRORS as error:
            raise_if_out_of_memory(error)
        if output is not None:
            output = output.to(self.reference.device)
        return FaultyModule(
            path, verdict.beyond, verdict.relative, own_code, call, output
        )

    def _is_own_code(self, call: ModuleCall) -> bool:
        """Check that all parts and weights of a module agree: only its code is left."""
        path = self._path_in_candidate(call.path)
        part = self.candidate.part(path)
        if not call.inner or not same_weights(part, self.reference.part(call.path)):
            return False
        compared = set()
        for inner in call.walk():
            if inner is call:
                continue
            verdict = self._verdict(inner)
            if verdict is None or verdict.wrong:
                return False
            compared.add(self._path_in_candidate(inner.path))
        # If only one of the two models calls a part, that part stays a suspect.
        for inner_path, inner_part in parts_inside(part, path).items():
            is_part = inner_part is not part and bool(inner_part._parameters)
            if is_part and inner_path not in compared:
                return False
        return True

    def _has_matrix(self, path: str) -> bool:
        weights = self.reference.part(path)._parameters.values()
        return any(weight is not None and weight.ndim > 1 for weight in weights)

    def _is_wrong(self, call: ModuleCall) -> bool:
        verdict = self._verdict(call)
        return verdict is not None and verdict.wrong

    def _verdict(self, call: ModuleCall) -> Verdict | None:
        """Judge the candidate's module on the reference's input.

        The verdict is None if the candidate has no such module.
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
        except CALL_ERRORS as error:
            raise_if_out_of_memory(error)
            # It does not even take the arguments of the reference's module.
            return INCOMPARABLE
        try:
            exact_output = run_in_float64(reference_part, call.args, call.kwargs)
            exact = list(tensors_in(exact_output))
        except FLOAT64_ERRORS as error:
            raise_if_out_of_memory(error)
            exact = []
        verdicts = [RIGHT]
        is_measured = len(exact) == len(call.outputs)
        for place, (expected, other) in enumerate(_paired_outputs(call, output)):
            exact_tensor = exact[place] if is_measured else None
            verdicts.append(self.judge(expected, other, exact_tensor))
        return max(verdicts, key=lambda verdict: verdict.beyond)

    def judge(self, expected: Tensor, other: Tensor, exact: Tensor | None) -> Verdict:
        """Compare a returned tensor with the expected one, by the reference's noise.

        `exact` is the expected tensor in float64.
        """
        if expected.shape != other.shape:
            return INCOMPARABLE
        if expected.is_complex() or other.is_complex():
            if exact is not None:
                exact = _real_and_imaginary(exact)
            return self.judge(
                _real_and_imaginary(expected), _real_and_imaginary(other), exact
            )
        if not expected.is_floating_point():
            if other.is_floating_point() and _may_be_mask(expected):
                return RIGHT
            return RIGHT if equal(expected, other) else INCOMPARABLE
        error = self.gap(expected, other)
        if exact is not None and exact.shape == expected.shape:
            rounding = self.gap(exact, expected)
            if rounding.worst < inf:
                noise = Noise.measured([rounding], expected.dtype)
                systematic = self._systematic(expected, other, exact)
                beyond = max(noise.times_over(error), systematic)
                return Verdict(beyond, error.worst)
        noise = Noise.assumed(expected.dtype)
        return Verdict(noise.times_over(error), error.worst)

    def _systematic(self, expected: Tensor, other: Tensor, exact: Tensor) -> float:
        """Return how many times a shared difference exceeds what correct programs show.

        A shared difference has the same pattern at all tokens.
        """
        rows = [real_rows(tensor, self.masks) for tensor in (expected, other, exact)]
        test = SystematicTest(rows[0].shape[-1])
        test.add(*rows)
        return test.result().beyond

    def gap(self, expected: Tensor, other: Tensor) -> Gap:
        """Measure how far two tensors are apart over real tokens."""
        return gap(real_rows(expected, self.masks), real_rows(other, self.masks))

    def _path_in_candidate(self, path: str) -> str:
        """Return the path of the same module in the candidate.

        Its blocks may have other paths.
        """
        for site, block in self.reference.blocks.items():
            if path == block or path.startswith(f"{block}."):
                return self.candidate.blocks.get(site, block) + path[len(block) :]
        return path

    def _search_outside(
        self, site: Site | None, relative: float
    ) -> FaultyModule | None:
        """Find the module at fault outside the blocks, or the code that runs them."""
        whole = self.calls_outside()
        calls = list(whole.walk())
        making_block = None
        if site is None or site.layer is None:
            # An error at final or in the logits is most likely made after the blocks.
            calls = [*self.calls_near(whole, site), *calls]
        else:
            blocks = self.reference.anatomy.stack(site).blocks
            making_block = blocks[max(site.layer, 1) - 1].path
        for call in calls:
            if call.path == making_block:
                break
            if self.is_or_holds_block(call.path):
                continue
            fault = self._blame(call)
            if fault is not None:
                return fault
        return self._blame_container(whole, site, relative)

    def calls_near(self, whole: ModuleCall, site: Site | None) -> list[ModuleCall]:
        """Return the reference's calls just before or after the blocks of a site."""
        return calls_around_blocks(list(whole.walk()), self.reference, site)

    def calls_outside(self) -> ModuleCall:
        """Record the calls outside the blocks; block calls without their arguments."""
        blocks = set(self.reference.blocks.values())
        inside = tuple(f"{path}." for path in blocks)
        outside = {}
        for path, part in hooks.parts_of(self.reference.module).items():
            if not path.startswith(inside):
                outside[path] = part
        calls = record_calls(
            outside, lambda: self.reference.run(self.batch), opaque=blocks
        )
        return calls[0]

    def is_or_holds_block(self, path: str) -> bool:
        """Check whether a module of the reference is a block or holds one."""
        for block in self.reference.blocks.values():
            if block == path or _holds(path, block):
                return True
        return False

    def _container(self, site: Site) -> str:
        """Return the innermost called module that holds the blocks of a stack."""
        block = self.reference.anatomy.stack(site).blocks[0].path
        holders = []
        for call in self.calls_outside().walk():
            if _holds(call.path, block):
                holders.append(call.path)
        return max(holders, key=len, default="")

    def _blame_container(
        self, whole: ModuleCall, site: Site | None, relative: float
    ) -> FaultyModule:
        """Name the innermost module around a site that shows the error by itself.

        All modules inside it agree, so there is no ratio to its noise: it is infinite.
        """
        holders = []
        if site is not None:
            path = self.reference.taps[site].path
            for call in whole.walk():
                if _holds(call.path, path) and self.is_or_holds_block(call.path):
                    holders.append(call)
            holders.sort(key=lambda call: -len(call.path))
        for call in holders:
            if site is not None and self._shows_error(call, site, relative):
                return FaultyModule(call.path, inf, relative, own_code=True, call=call)
        path = self._path_in_candidate(whole.path)
        return FaultyModule(path, inf, relative, own_code=True, call=whole)

    def _shows_error(self, call: ModuleCall, site: Site, relative: float) -> bool:
        """Check whether a module called by itself is off at a site as the whole is."""
        states: list[Tensor] = []
        for model in (self.reference, self.candidate):
            before = len(states)
            watch = model.taps[site].watch(
                model.module, lambda tensor: states.append(clone(tensor))
            )
            try:
                with hooks.watching([watch]):
                    call.repeat(model.part(call.path), model.device)
            except CALL_ERRORS as error:
                raise_if_out_of_memory(error)
                return True
            if len(states) != before + 1:
                return True
        if states[0].shape != states[1].shape:
            return True
        return self.gap(states[0], states[1]).worst > SHARE_OF_ERROR * relative


def calls_around_blocks(
    calls: Sequence[ModuleCall], model: LiveModel, site: Site | None
) -> list[ModuleCall]:
    """Return the calls just before the blocks of a stack, or just after them.

    Before them if the site is `layer.0` of the stack, and else after them. Without a
    site the last stack counts.
    """
    stacks = {path: layer.stack for layer, path in model.blocks.items()}
    blocks = [place for place, call in enumerate(calls) if call.path in stacks]
    if not blocks:
        return list(calls)
    stack = stacks[calls[blocks[-1]].path] if site is None else site.stack
    within = [place for place in blocks if stacks[calls[place].path] == stack]
    if not within:
        return list(calls)
    first, last = within[0], within[-1]
    if site is not None and site.layer == 0:
        start = max((place + 1 for place in blocks if place < first), default=0)
        return list(calls[start:first])
    end = min((place for place in blocks if place > last), default=len(calls))
    return list(calls[last + 1 : end])


def _paired_outputs(
    call: ModuleCall, output: object
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of two outputs in pairs."""
    others = list(tensors_in(output))
    if structure_of(output) == call.structure or len(call.outputs) == len(others):
        yield from zip(call.outputs, others, strict=True)
    # An attention kernel may omit the weights that another returns.
    elif call.outputs and others:
        yield call.outputs[0], others[0]


def _real_and_imaginary(tensor: Tensor) -> Tensor:
    """Return a tensor with the real and imaginary parts of each number side by side."""
    if not tensor.is_complex():
        tensor = tensor + 0j
    # Still one row for each token: the last axis becomes twice as long.
    pairs = torch.view_as_real(tensor.resolve_conj())
    return pairs.reshape(*tensor.shape[:-1], -1)


def _may_be_mask(tensor: Tensor) -> bool:
    """Check whether a tensor of integers or truth values holds only zeros and ones.

    Another program may return the same mask as numbers that are added to the scores:
    0 for the tokens that are seen. Such values cannot be compared with these.
    """
    return bool(((tensor == 0) | (tensor == 1)).all())


def _holds(path: str, inner: str) -> bool:
    return not path or inner.startswith(f"{path}.")
