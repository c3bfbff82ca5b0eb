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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.errors import Gap, Noise, gap
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.observe import (
    FLOAT64_ERRORS,
    ModuleCall,
    clone,
    masks_of,
    parts_inside,
    real_rows,
    record_calls,
    run_exactly,
    tensors_in,
    tolerating,
)
from hiddenscope.analyses.drift.story import Hint
from hiddenscope.analyses.drift.systematic import SystematicTest
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

# A faulty container called by itself must show this share of the error of a whole pass.
SHARE_OF_ERROR = 0.1
# Errors of a module whose forward takes other arguments.
CALL_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)


@dataclass(frozen=True)
class FaultyModule:
    """The module at fault: its path in the candidate and the evidence.

    With `own_code` its parts and weights agree, so the fault is in its own code. `call`
    is the call of the reference's module, and `output` what the candidate's returned on
    the same input. `hints` are what the search itself learned about the fault.
    """

    path: str
    own_code: bool = False
    call: ModuleCall | None = None
    output: Tensor | None = None
    hints: tuple[Hint, ...] = ()


Verdict = float
"""How many times a returned tensor is over the noise: more than 1 is wrong."""

RIGHT, INCOMPARABLE = 0.0, inf


@dataclass
class Search:
    """Searches for the module at fault in a candidate with the reference's modules."""

    reference: LiveModel
    candidate: LiveModel
    inputs: Inputs

    def __post_init__(self) -> None:
        self.masks = masks_of(self.reference.batch(self.inputs))
        self._verdicts: dict[ModuleCall, Verdict] = {}

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
            block = self.reference.anatomy.stack(Site.parse(first)).blocks[0].path
            calls = self.calls_outside(self.reference)
            holders = [call.path for call in calls if _holds(call.path, block)]
            return FaultyModule(max(holders, key=len, default=""))
        fault = None
        # No block makes layer.0: those are the embeddings.
        if site is not None and site.layer:
            call = self.block_call(site, self.inputs)
            fault = None if call is None else self._blame(call)
        return fault or self._search_outside(site, relative)

    def block_call(self, site: Site, inputs: Inputs) -> ModuleCall | None:
        """Record the reference's block that makes a layer, and every call inside."""
        path = self.reference.blocks[site]
        # One module may be called for several layers.
        number = self.reference.layers_of(path).index(site)
        run = partial(self.reference.run, self.reference.batch(inputs))
        calls = record_calls(parts_inside(self.reference.part(path), path), run)
        return calls[number] if number < len(calls) else None

    def _blame(self, call: ModuleCall) -> FaultyModule | None:
        """Find the innermost module at fault within a call, first in the pass."""
        verdict = self._verdict(call)
        repeated = self._in_candidate(call)
        matrices = []
        for leaf in call.leaves():
            weights = weights_of(self.reference.part(leaf.path)).values()
            if any(weight.ndim > 1 for weight in weights):
                matrices.append(leaf)
        verdicts = (self._verdict(leaf) or RIGHT for leaf in matrices)
        are_several = len({leaf.path for leaf in matrices}) > 1
        if are_several and all(leaf_verdict > 1 for leaf_verdict in verdicts):
            return self.fault_of(call, repeated)
        for inner in call.inner:
            fault = self._blame(inner)
            if fault is not None:
                return fault
        if verdict is None or verdict <= 1:
            return None
        return self.fault_of(call, repeated, own_code=self._is_own_code(call))

    def fault_of(
        self, call: ModuleCall, repeated: ModuleCall, *, own_code: bool = False
    ) -> FaultyModule:
        """Blame the candidate's module of a call that is repeated on it."""
        output = None
        # Verdicts hold no outputs, and the hints need that of the module at fault.
        with tolerating(CALL_ERRORS):
            output = hooks.first_tensor(self.repeat(repeated))
        if output is not None:
            output = output.to(self.reference.device)
        return FaultyModule(repeated.path, own_code, call, output)

    def _is_own_code(self, call: ModuleCall) -> bool:
        """Check that all parts and weights of a module agree: only its code is left."""
        path = self._path_in_candidate(call.path)
        part = self.candidate.part(path)
        weights = weights_of(part)
        others = weights_of(self.reference.part(call.path))
        if not call.inner or weights.keys() != others.keys():
            return False
        if not all(equal(weight, others[name]) for name, weight in weights.items()):
            return False
        compared = {path}
        for inner in call.walk():
            verdict = self._verdict(inner)
            if inner is not call and (verdict is None or verdict > 1):
                return False
            compared.add(self._path_in_candidate(inner.path))
        # If only one of the two models calls a part, that part stays a suspect.
        for inner_path, inner_part in parts_inside(part, path).items():
            if inner_part._parameters and inner_path not in compared:
                return False
        return True

    def _verdict(self, call: ModuleCall) -> Verdict | None:
        """Judge the candidate's module on the reference's input.

        The verdict is None if the candidate has no such module.
        """
        if call not in self._verdicts:
            repeated = self._in_candidate(call)
            try:
                self.candidate.part(repeated.path)
            except AttributeError:
                return None
            self._verdicts[call] = self.verdict_on(call, repeated)
        return self._verdicts[call]

    def _in_candidate(self, call: ModuleCall) -> ModuleCall:
        """Return a call of the reference's as one of the candidate's module."""
        return replace(call, path=self._path_in_candidate(call.path))

    def repeat(self, call: ModuleCall) -> object:
        """Repeat a call on the candidate's module at its path."""
        return call.repeat(self.candidate.part(call.path), self.candidate.device)

    def verdict_on(self, call: ModuleCall, repeated: ModuleCall) -> Verdict:
        """Judge what the candidate returns for a call of the reference's."""
        reference_part = self.reference.part(call.path)
        if self.candidate.part(repeated.path) is reference_part:
            return RIGHT
        returned = []
        with tolerating(CALL_ERRORS):
            returned.append(self.repeat(repeated))
        if not returned:
            # It does not even take the arguments of the reference's module.
            return INCOMPARABLE
        others = tensors_in(returned)
        count = len(call.outputs)
        if len(others) == count and all(map(equal, others, call.outputs)):
            return RIGHT
        exact = []
        with tolerating(FLOAT64_ERRORS):
            wide = float64_copy(reference_part)
            exact = tensors_in(run_exactly(wide, call.args, call.kwargs))
        verdicts = [RIGHT]
        for place, outputs in enumerate(zip(call.outputs, others, strict=False)):
            # An attention kernel may omit the weights that another returns.
            if len(others) == count or not place:
                truth = exact[place] if len(exact) == count else None
                verdicts.append(self.judge(*outputs, truth))
        return max(verdicts)

    def judge(self, expected: Tensor, other: Tensor, exact: Tensor | None) -> Verdict:
        """Compare a returned tensor with the expected one, by the reference's noise.

        `exact` is the expected tensor in float64.
        """
        if expected.shape != other.shape:
            return INCOMPARABLE
        if expected.is_complex() or other.is_complex():
            exact = None if exact is None else _real_and_imaginary(exact)
            return self.judge(
                _real_and_imaginary(expected), _real_and_imaginary(other), exact
            )
        if not expected.is_floating_point():
            # Another program may return the same mask as numbers that are added to the
            # scores: 0 for the tokens that are seen. These cannot be compared.
            may_be_mask = bool(((expected == 0) | (expected == 1)).all())
            is_right = other.is_floating_point() and may_be_mask
            return RIGHT if is_right or equal(expected, other) else INCOMPARABLE
        error = self.gap(expected, other)
        noise = Noise.assumed(expected.dtype)
        systematic = 0.0
        if exact is not None and exact.shape == expected.shape:
            rounding = self.gap(exact, expected)
            if rounding.worst < inf:
                noise = Noise.measured([rounding], expected.dtype)
                rows = [
                    real_rows(part, self.masks) for part in (expected, other, exact)
                ]
                test = SystematicTest(rows[0].shape[-1])
                test.add(*rows)
                systematic = test.result().beyond
        return max(noise.times_over(error), systematic)

    def gap(self, expected: Tensor, other: Tensor) -> Gap:
        """Measure how far two tensors are apart over real tokens."""
        return gap(real_rows(expected, self.masks), real_rows(other, self.masks))

    def _path_in_candidate(self, path: str) -> str:
        return path_in(self.candidate, self.reference, path)

    def _search_outside(self, site: Site | None, relative: float) -> FaultyModule:
        """Find the module at fault outside the blocks, or the code that runs them."""
        calls = self.calls_outside(self.reference)
        suspects = calls
        making_block = None
        if site is None or site.layer is None:
            # An error at final or in the logits is most likely made after the blocks.
            suspects = [*calls_near(calls, self.reference, site), *calls]
        else:
            making_block = self.reference.blocks[
                replace(site, layer=max(site.layer, 1))
            ]
        for call in suspects:
            if call.path == making_block:
                break
            if self.is_or_holds_block(call.path):
                continue
            fault = self._blame(call)
            if fault is not None:
                return fault
        # Name the innermost module around the site that shows the error by itself. All
        # modules inside it agree.
        for call in sorted(calls, key=lambda call: -len(call.path)):
            if site is None or not _holds(call.path, self.reference.taps[site].path):
                continue
            is_container = self.is_or_holds_block(call.path)
            if is_container and self._shows_error(call, site, relative):
                return FaultyModule(call.path, own_code=True, call=call)
        path = self._path_in_candidate(calls[0].path)
        return FaultyModule(path, own_code=True, call=calls[0])

    def calls_outside(self, model: LiveModel) -> list[ModuleCall]:
        """Record the calls outside the blocks; block calls without their arguments."""
        blocks = set(model.blocks.values())
        run = partial(model.run, model.batch(self.inputs))
        (whole,) = record_calls(model.outer_parts, run, opaque=blocks)
        return list(whole.walk())

    def is_or_holds_block(self, path: str) -> bool:
        """Check whether a module of the reference is a block or holds one."""
        for block in self.reference.blocks.values():
            if block == path or _holds(path, block):
                return True
        return False

    def _shows_error(self, call: ModuleCall, site: Site, relative: float) -> bool:
        """Check whether a module called by itself is off at a site as the whole is."""
        states = []
        for model in (self.reference, self.candidate):
            watch = model.taps[site].watch(
                model.module, lambda tensor: states.append(clone(tensor))
            )
            with tolerating(CALL_ERRORS), hooks.watching([watch]):
                call.repeat(model.part(call.path), model.device)
        if len(states) < 2 or states[0].shape != states[1].shape:
            return True
        return self.gap(*states).worst > SHARE_OF_ERROR * relative


def path_in(candidate: LiveModel, reference: LiveModel, path: str) -> str:
    """Return the path of a module or weight in the candidate.

    Its blocks may have other paths than the reference's.
    """
    for site, block in reference.blocks.items():
        if f"{path}.".startswith(f"{block}."):
            return candidate.blocks.get(site, block) + path[len(block) :]
    return path


def calls_near(
    calls: Sequence[ModuleCall], model: LiveModel, site: Site | None
) -> list[ModuleCall]:
    """Return the calls just before the blocks of a stack, or just after them.

    Before them if the site is `layer.0` of the stack, and else after them. Without a
    site the last stack counts.
    """
    stacks = {path: layer.stack for layer, path in model.blocks.items()}
    blocks = [place for place, call in enumerate(calls) if call.path in stacks]
    within = blocks
    if site is not None:
        within = [at for at in blocks if stacks[calls[at].path] == site.stack]
    if not within:
        return list(calls)
    first = within[0]
    last = within[-1]
    if site is not None and site.layer == 0:
        start = max((place + 1 for place in blocks if place < first), default=0)
        return list(calls[start:first])
    end = min((place for place in blocks if place > last), default=len(calls))
    return list(calls[last + 1 : end])


def weights_of(part: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a module holds itself, by name."""
    return {
        name: weight.detach() for name, weight in part.named_parameters(recurse=False)
    }


def equal(tensor: Tensor, other: Tensor) -> bool:
    """Check that two tensors hold the same numbers, on any devices."""
    if tensor.shape != other.shape:
        return False
    return torch.equal(tensor.detach().cpu(), other.detach().cpu())


def _real_and_imaginary(tensor: Tensor) -> Tensor:
    """Return a tensor with the real and imaginary parts of each number side by side."""
    # Still one row for each token: the last axis becomes twice as long.
    return torch.view_as_real(tensor + 0j).flatten(-2)


def _holds(path: str, inner: str) -> bool:
    return not path or inner.startswith(f"{path}.")
