"""Foreign: which part of a candidate of somebody else's making is at fault.

Its modules have other names than the reference's. Modules with weights are paired by their weights, which a port takes
over from the reference, and then called on the reference's own input. A part without a partner is at fault if it is
given a tensor that the reference's block has as well, and gives one that it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope import autograd, hooks
from hiddenscope.analyses.drift.dtypes import majority_dtype
from hiddenscope.analyses.drift.localize import (
    FaultyModule,
    Hint,
    ModuleCall,
    Search,
    called,
    tensors_in,
    window,
)
from hiddenscope.analyses.drift.observe import LOGITS, Live, Noise, in_float64, observe
from hiddenscope.analyses.drift.pairing import Pairs, Runner, values_of
from hiddenscope.errors import PassError
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
SIMILAR = 0.5  # the cosine from which a weight is taken for a changed copy of another


@dataclass
class _PartCall:
    """One call of a part of the candidate's block: the state it was given, what it gave, and what else it was given."""

    path: str
    given: Tensor | None
    made: Tensor | None = None
    others: list[Tensor] = field(default_factory=list)


def as_foreign(module: nn.Module, reference: Live, pairs: Pairs) -> Live | None:
    """A module of somebody else's whose blocks are known, so that the reference's states can be put into it."""
    taps = {Site.parse(site): value.tap for site, value in pairs.chosen.items() if value.tap is not None}
    blocks = {site: tap.path for site, tap in taps.items() if site.layer and tap.side == "output"}
    if len(blocks) < 2:
        return None
    return Live(
        type(module).__name__,
        module,
        reference.anatomy,
        reference.pad,
        majority_dtype(module),
        taps=taps,
        blocks=blocks,
        call=Runner(module),
    )


class ForeignSearch(Search):
    """Looks for the module at fault where the modules have other names: by their weights, then by what they give."""

    def find(self, first: str, beyond: Mapping[str, float], total: float) -> FaultyModule | None:
        """The faulty module behind the first site that differs."""
        site = None if first == LOGITS else Site.parse(first)
        if site is not None and site.layer:
            return self._of_block(site, beyond, total)
        own = self._called_between(site)
        calls = self._between(self._trace_outside(), site)
        found = self._weights_at_fault(calls, own, set())
        return found or FaultyModule(self._holder(site), beyond[first], total, own=False)

    def _of_block(self, site: Site, errors: Mapping[str, float], total: float) -> FaultyModule | None:
        """What is at fault in the block that makes a layer, or in the module that calls it."""
        beyond = errors[str(site)]
        block, path = self.reference.blocks[site], self.candidate.blocks[site]
        given = self._given(block, 0)
        if given is None:
            return None
        trace = self._traced(self.reference.module.get_submodule(block), block, given)
        calls = self._part_calls(site, path)
        outside = self._call_at_fault(site, path, [call for call in calls if call.path == path])
        if outside is not None:
            return FaultyModule(self._holder(site), beyond, total, own=False, hints=(outside,))
        other = self._other_block(site, path)
        if other is not None:
            return FaultyModule(path, beyond, total, own=False, hints=(other,))
        names = [f"{path}.{name}".strip(".") for name, _ in self.candidate.module.get_submodule(path).named_modules()]
        right: set[str] = set()
        found = self._weights_at_fault([*_every(trace)], names, right)
        if found is not None:
            return found
        unlike = self._values_at_fault(trace, calls, path, right)
        if unlike is None:
            return FaultyModule(path, beyond, total, own=False)
        agreeing = [self.candidate.blocks[one] for one in self.candidate.blocks if errors.get(str(one), 0.0) <= 1]
        return self._unlike(unlike, trace, path, right, agreeing)

    def _call_at_fault(self, site: Site, path: str, calls: Sequence[_PartCall]) -> Hint | None:
        """What is wrong with how a block is called: never, too often, or on another state than the one before gave."""
        expected = sum(block == self.reference.blocks[site] for block in self.reference.blocks.values())
        shared = sum(block == path for block in self.candidate.blocks.values()) > 1
        if not calls:
            return _hint("layer_skipped", f"The candidate never calls `{path}`.")
        if len(calls) > expected and not shared:
            return _hint("layer_doubled", f"The candidate calls `{path}` {len(calls)} times.")
        before = Site((site.layer or 1) - 1, "", site.stack)
        state = calls[0].given
        if not before.layer or before not in self.candidate.taps or state is None:
            return None
        rows = observe(self.reference, self.inputs, [before]).rows[str(before)]
        if rows.shape == _rows(state).shape and not self._same(rows, _rows(state)):
            return _hint("block_input", f"What enters `{path}` is not what the block before gave.")
        return None

    def _same(self, one: Tensor, two: Tensor) -> bool:
        return Noise.assumed(self.candidate.dtype).beyond(self._gap(one, two)) <= 1

    def _holder(self, site: Site | None) -> str:
        """The innermost module with a forward of its own that holds the blocks of a site's stack."""
        if site is None:
            return ""
        path = next(block for one, block in self.candidate.blocks.items() if one.stack == site.stack)
        while path:
            path = path.rpartition(".")[0]
            if not isinstance(self.candidate.module.get_submodule(path), LISTS):
                break
        return path

    def _called_between(self, site: Site | None) -> list[str]:
        """The candidate's modules that are called where the reference's of `_between` are, by path."""
        blocks = set(self.candidate.blocks.values())
        inside = tuple(f"{path}." for path in blocks)
        order: list[str] = []
        watches = [
            hooks.Watch(part, "input", lambda args, kwargs, path=path: order.append(path))
            for path, part in hooks.parts_of(self.candidate.module).items()
            if path and not path.startswith(inside)
        ]
        with autograd.restored(), torch.no_grad(), hooks.watching(watches):
            self.candidate.run(self.batch)
        stacks = {block: one.stack for one, block in self.candidate.blocks.items()}
        return window(order, [stacks.get(path, ()) for path in order], site)

    def _weights_at_fault(
        self, calls: Sequence[ModuleCall], names: Sequence[str], right: set[str]
    ) -> FaultyModule | None:
        """The first module with weights that gives something else than the one of the reference with its weights.

        Those that give the same are added to `right`.
        """
        theirs = [name for name in dict.fromkeys(names) if self._weights(self.candidate, name)]
        mine = [call for call in calls if self._weights(self.reference, call.path)]
        alone = [call for call in mine if not call.inner]
        taken: set[int] = set()
        for name in theirs:
            call = self._partner(name, alone, taken)
            verdict = None if call is None else self._given_alike(name, call)
            if verdict is not None and verdict[0] > 1:
                return FaultyModule(name, *verdict, own=False, call=call)
            if verdict is None:
                verdict = self._as_slice(name, mine)
                if verdict is not None and verdict[0] > 1:
                    words = "`weight` is like a part of the reference's, and not equal to it."
                    return FaultyModule(name, *verdict, own=False, hints=(_hint("changed_weight", words),))
            if verdict is not None:
                right.add(name)
        return None

    def _weights(self, side: Live, path: str) -> list[Tensor]:
        part = side.module.get_submodule(path)
        return [weight.detach() for weight in part._parameters.values() if weight is not None]

    def _partner(self, name: str, calls: Sequence[ModuleCall], taken: set[int]) -> ModuleCall | None:
        """The call of the reference's module whose weights are most like those of a module of the candidate."""
        weight = self._weights(self.candidate, name)[0]
        scores: dict[int, float] = {}
        for place, call in enumerate(calls):
            other = self._weights(self.reference, call.path)[0]
            if place not in taken and sorted(other.shape) == sorted(weight.shape):
                scores[place] = _alike(weight, other)
        if not scores:
            return None
        best = max(scores, key=lambda place: scores[place])
        taken.add(best)
        return calls[best]

    def _as_slice(self, name: str, calls: Sequence[ModuleCall]) -> tuple[float, float] | None:
        """How far a matrix is from the part of a larger one that it is most like: an expert, one of fused projections.

        None if it is like none. Its bias is not looked at.
        """
        weights = self._weights(self.candidate, name)
        if len(weights) != 1 or weights[0].ndim != 2:
            return None
        unit, best = Noise.assumed(weights[0].dtype).row, None
        for call in calls:
            for other in self._weights(self.reference, call.path):
                for form in (weights[0], weights[0].T):
                    cosine, error = _nearest_slice(form.double().cpu(), other.double().cpu())
                    if cosine > SIMILAR and (best is None or error < best[1]):
                        best = error / unit, error
        return best

    def _given_alike(self, name: str, call: ModuleCall) -> tuple[float, float] | None:
        """How far a module of the candidate is off on what the reference's was given; None if it takes other things."""
        given = next(iter(tensors_in(call.args)), None)
        given = next(iter(tensors_in(call.kwargs)), None) if given is None else given
        if given is None:
            return None
        try:
            output = called(
                self.candidate.module.get_submodule(name), ModuleCall(name, (given,), {}), self.candidate.device
            )
            wide = in_float64(self.reference.module.get_submodule(call.path), call.args, call.kwargs)
        except Exception:
            return None
        made, exact, expected = hooks.first_tensor(output), hooks.first_tensor(wide), call.output[0][0]
        if made is None or exact is None or made.shape != expected.shape:
            return None
        error = self._gap(expected, made)
        return Noise.of([self._gap(exact, expected)], expected.dtype).beyond(error), error.worst

    def _other_block(self, site: Site, path: str) -> Hint | None:
        """A block that holds the matrices of another block of the reference, all of them."""
        theirs = [weight for weight in self.candidate.module.get_submodule(path).parameters() if weight.ndim > 1]
        own = self.reference.blocks[site]
        for other, block in self.reference.blocks.items():
            known = [weight for weight in self.reference.module.get_submodule(block).parameters() if weight.ndim > 1]
            equal = [any(_equal(weight, one) for one in known) for weight in theirs]
            if block != own and len(equal) > 1 and all(equal):
                words = f"The candidate's block holds the weights of `{block}`, which makes `{other}`."
                return _hint("swapped_layer", words)
        return None

    def _part_calls(self, site: Site, path: str) -> list[_PartCall]:
        """Every call of a block of the candidate and of its parts, in a pass that has the reference's state before it.

        Inner calls come before those that hold them.
        """
        before = Site((site.layer or 1) - 1, "", site.stack)
        states = observe(self.reference, self.inputs, [before])
        tapped = [before] if before in self.candidate.taps else []
        parts = self.candidate.module.get_submodule(path).named_modules()
        open_calls: list[_PartCall] = []
        done: list[_PartCall] = []

        def watches(name: str, part: nn.Module) -> list[hooks.Watch]:
            def enter(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
                given = hooks.state_in(args, kwargs)
                others = [one for one in (*tensors_in(args), *tensors_in(kwargs)) if one is not given]
                open_calls.append(_PartCall(name, None if given is None else given.detach().clone(), None, others))

            def leave(output: Any) -> None:
                call = open_calls.pop()
                made = hooks.first_tensor(output)
                call.made = None if made is None else made.detach().clone()
                done.append(call)

            return [hooks.Watch(part, "input", enter), hooks.Watch(part, "output", leave)]

        seen = [watch for name, part in parts for watch in watches(f"{path}.{name}".strip("."), part)]
        with hooks.watching(seen):
            observe(self.candidate, self.inputs, tapped, put=states.rows)
        return done

    def _values_at_fault(
        self, trace: ModuleCall, calls: Sequence[_PartCall], path: str, right: set[str]
    ) -> _PartCall | None:
        """The first part of the candidate's block that gives what is nowhere in the reference's, of what is there."""
        every = [*_every(trace)]
        known = [tensor for call in every for tensor in (*tensors_in(call.args), *call.output[0])]
        known += [tensor for call in every for tensor in tensors_in(call.kwargs)]
        rows = [_rows(tensor) for tensor in known if tensor.is_floating_point() and tensor.ndim > 1]
        suspect: _PartCall | None = None
        for call in calls:
            if call.path == path:  # the whole block must give what the reference's gives
                expected = [_rows(tensor) for tensor in trace.output[0][:1]]
                return suspect or (call if self._is_unlike(call, expected, entered=True) else None)
            unlike = call.path not in right and self._is_unlike(call, rows)
            if suspect is None:
                suspect = call if unlike else None
            elif suspect.path.startswith(f"{call.path}."):  # what holds a part is believed before the part
                suspect = call if unlike else suspect if unlike is None else None
        return suspect

    def _is_unlike(self, call: _PartCall, known: Sequence[Tensor], *, entered: bool = False) -> bool | None:
        """Whether a part makes what is not known of what is; None if that cannot be told."""
        if call.given is None or call.made is None:
            return None
        given, made = _rows(call.given), _rows(call.made)
        alike = [one for one in known if one.shape == made.shape]
        entered = entered or any(self._same(one, given) for one in known if one.shape == given.shape)
        return not any(self._same(one, made) for one in alike) if alike and entered else None

    def _unlike(
        self, call: _PartCall, trace: ModuleCall, block: str, right: set[str], agreeing: Sequence[str]
    ) -> FaultyModule:
        """A part that gives what the reference has not, beside the call of the reference that has the same input."""
        partner = trace if call.path == block else self._same_input(call, trace)
        parts = [f"{call.path}.{name}" for name, _ in self.candidate.module.get_submodule(call.path).named_modules()]
        inner = [name for name in parts[1:] if self._weights(self.candidate, name)]
        hints = () if self._also_given(call, agreeing) else tuple(_given_besides(call))
        own = bool(inner) and all(name in right for name in inner) and not hints
        if partner is None or call.made is None:
            return FaultyModule(call.path, torch.inf, torch.inf, own, hints=hints)
        expected = partner.output[0][0]
        made = call.made.reshape(expected.shape)
        error = self._gap(expected.cpu(), made.cpu())
        beyond = Noise.assumed(self.candidate.dtype).beyond(error)
        return FaultyModule(call.path, beyond, error.worst, own, partner, made=made, hints=hints)

    def _same_input(self, call: _PartCall, trace: ModuleCall) -> ModuleCall | None:
        """The outermost call of the reference on the same input that gives something of the same shape."""
        if call.given is None or call.made is None:
            return None
        given, made = _rows(call.given), _rows(call.made)
        for other in _every(trace):
            state = hooks.state_in(other.args, other.kwargs)
            outputs = [tensor for tensor in other.output[0] if tensor.is_floating_point()]
            if state is None or not outputs or _rows(outputs[0]).shape != made.shape:
                continue
            if _rows(state).shape == given.shape and self._same(_rows(state), given):
                return other
        return None

    def _also_given(self, call: _PartCall, agreeing: Sequence[str]) -> bool:
        """Whether a block that agrees with the reference's is given the same tensors beside its state."""
        found: list[bool] = []

        def seen(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            theirs = [*tensors_in(args), *tensors_in(kwargs)]
            found.append(all(any(_identical(one, other) for other in theirs) for one in call.others))

        watches = [hooks.Watch(self.candidate.module.get_submodule(path), "input", seen) for path in agreeing]
        with autograd.restored(), torch.no_grad(), hooks.watching(watches):
            self.candidate.run(self.batch)
        return any(found)


def _identical(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)


def _given_besides(call: _PartCall) -> Iterator[Hint]:
    """Tensors that a part is given beside the state: nobody compared them."""
    shapes = ", ".join(str(list(tensor.shape)) for tensor in call.others)
    if shapes:
        words = f"`{call.path}` is also given tensors that were not compared ({shapes}): the fault may be in them."
        yield _hint("not_compared", words)


def _hint(fault: str, evidence: str) -> Hint:
    return {"fault": fault, "evidence": evidence}


def _rows(tensor: Tensor) -> Tensor:
    """A tensor of one text as rows."""
    return tensor.reshape(-1, tensor.shape[-1])


def _equal(one: Tensor, two: Tensor) -> bool:
    a, b = one.detach().cpu(), two.detach().cpu()
    return any(a.shape == form.shape and torch.equal(a, form) for form in (b, b.mT))


def _nearest_slice(small: Tensor, large: Tensor) -> tuple[float, float]:
    """The cosine with the run of rows of a larger weight that a matrix is most like, and how far it is from that."""
    height, width = small.shape
    if large.ndim < 2 or large.shape[-1] != width or large[..., 0].numel() % height or large.numel() <= small.numel():
        return 0.0, torch.inf
    parts = large.reshape(-1, height * width)
    flat = small.reshape(1, -1)
    cosines = torch.nn.functional.cosine_similarity(parts, flat, dim=1)
    best = int(cosines.argmax())
    return float(cosines[best]), float((parts[best] - flat[0]).norm() / parts[best].norm())


def _every(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for inner in call.inner:
        yield from _every(inner)


def _alike(one: Tensor, two: Tensor) -> float:
    """How much alike two weights are: 1 if they are equal, as they are or transposed."""
    a, b = one.double().cpu().flatten(), two.double().cpu()
    forms = [b.flatten()] if one.shape == b.shape else []
    forms += [b.T.flatten()] if b.ndim == 2 and one.shape == b.T.shape else []
    scores = [
        float(torch.nn.functional.cosine_similarity(a, form, dim=0)) - float((a - form).norm() > 0) * 1e-6
        for form in forms
    ]
    return max(scores, default=-1.0)


def rows_of_function(
    function: Callable[..., Any], names: Mapping[str, str], side: Live, inputs: Inputs
) -> dict[str, Tensor]:
    """The paired tensors of a function over all texts, by site."""
    values = {
        value.name: value.rows
        for value in values_of(function, [side.batch(inputs.some([t])) for t in range(len(inputs))])
    }
    missing = [name for name in names.values() if name not in values]
    if missing:
        reason = f"{missing[0]} has no row for each token of every text"
        raise PassError("Cannot compare the candidate", reason, "Pair tensors that every text gives.")
    return {site: values[name] for site, name in names.items()}
