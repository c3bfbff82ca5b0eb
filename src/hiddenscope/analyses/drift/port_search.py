"""Find the module at fault in a port, whose modules have other names, and perhaps
another layout, than the reference's.

The port's block is run on the reference's input, and every tensor inside it that has a
counterpart in the reference's block is compared with it (counterparts.py). A module is
at fault if what it is given is right and what it returns is not. The innermost such
module is named; where parts of it have no counterpart, the evidence says that nothing
smaller is certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import (
    ModuleCall,
    map_tensors,
    record_calls,
    tensors_in,
    to_float64,
)
from hiddenscope.analyses.drift.counterparts import (
    BlockTensor,
    CallKey,
    Counterpart,
    SharedColumns,
    as_rows,
    by_weights,
    calls_by_place,
    is_column_scaled,
    learn,
    learn_weights,
    tensors_by_place,
    wrong_weights,
)
from hiddenscope.analyses.drift.noise import Noise, gap
from hiddenscope.analyses.drift.observe import (
    LOGITS,
    ObservedState,
    Side,
    in_float64,
    observe,
)
from hiddenscope.analyses.drift.search import (
    FaultyModule,
    Hint,
    Search,
    Verdict,
    equal,
    window,
)
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
SIMILAR = 0.5  # the cosine from which a weight is taken for a changed copy of another
MOST_NAMED = 3  # parts that a sentence names


@dataclass
class _Run:
    """The calls inside the reference's block, in its float64 copy, and inside the
    port's, on one text.
    """

    reference: ModuleCall
    exact: ModuleCall | None
    port: ModuleCall


class _Block:
    """A block of both sides, run on equal input over some texts. The calls are those of
    the first.
    """

    def __init__(self, runs: Sequence[_Run]) -> None:
        self.runs = runs
        self.reference, self.port = runs[0].reference, runs[0].port
        self.expected = _joined([run.reference for run in runs])
        self.made = _joined([run.port for run in runs])
        exact = [run.exact for run in runs if run.exact is not None]
        self.exact = _joined(exact) if len(exact) == len(runs) else {}

    def shares_input(self, key: CallKey, other: CallKey) -> bool:
        """Check whether two calls are given the same tensor."""
        tensor, other_tensor = (
            self.made.get(BlockTensor(*which, "input")) for which in (key, other)
        )
        return (
            tensor is not None
            and other_tensor is not None
            and equal(tensor, other_tensor)
        )


def _joined(blocks: Sequence[ModuleCall]) -> dict[BlockTensor, Tensor]:
    """Join the tensors of several texts, where all have them."""
    tensors = [tensors_by_place(block) for block in blocks]
    joined: dict[BlockTensor, Tensor] = {}
    for place in tensors[0]:
        parts = [text[place] for text in tensors if place in text]
        if len(parts) == len(tensors) and len({part.shape[1] for part in parts}) == 1:
            joined[place] = torch.cat(parts)
    return joined


class PortSearch(Search):
    """Looks for the module at fault in a module of somebody else's making, which runs
    one text at a time.
    """

    def __init__(
        self,
        reference: Side,
        candidate: Side,
        inputs: Inputs,
        others: Sequence[Inputs] = (),
    ) -> None:
        super().__init__(reference, candidate, inputs)
        self.texts = [inputs, *others]

    def find(
        self, first: str, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        """Find the module behind the first site that differs."""
        site = None if first == LOGITS else Site.parse(first)
        if site is None or not site.layer:
            return self._search_around(site, beyond[first], relative)
        misuse = self._misuse_of_block(site)
        if misuse is not None:
            return FaultyModule(
                self._runner_of_blocks(site), beyond[first], relative, hints=(misuse,)
            )
        other_block = self._other_block(site)
        if other_block is not None:
            return FaultyModule(
                self.candidate.blocks[site],
                beyond[first],
                relative,
                hints=(other_block,),
            )
        return self._blame_part(site, beyond, relative)

    def _port_calls(self, site: Site, inputs: Inputs) -> list[ModuleCall]:
        """Record the calls of a block of the port, in a pass that has the reference's
        state before it.
        """
        path = self.candidate.blocks[site]
        before = Site((site.layer or 1) - 1, "", site.stack)
        expected = self._reference_state(before, inputs)

        def put(state: ObservedState) -> Tensor | None:
            return None if state.name == LOGITS else expected

        parts = {}
        for name, part in self.candidate.part(path).named_modules():
            parts[f"{path}.{name}".rstrip(".")] = part
        tapped = [before] if before in self.candidate.taps else []
        return record_calls(
            parts, lambda: observe(self.candidate, inputs, tapped, visit=put)
        )

    def _reference_state(self, site: Site, inputs: Inputs) -> Tensor:
        return observe(self.reference, inputs, [site]).rows(str(site))

    def _misuse_of_block(self, site: Site) -> Hint | None:
        """Say how a block is wrongly called: never, too often, or on something else
        than the block before returned.
        """
        path = self.candidate.blocks[site]
        calls = self._port_calls(site, self.inputs)
        expected = list(self.reference.blocks.values()).count(
            self.reference.blocks[site]
        )
        is_shared = list(self.candidate.blocks.values()).count(path) > 1
        if not calls:
            return hint("layer_skipped", f"The candidate never calls `{path}`.")
        if len(calls) > expected and not is_shared:
            return hint(
                "layer_doubled", f"The candidate calls `{path}` {len(calls)} times."
            )
        before = Site((site.layer or 1) - 1, "", site.stack)
        state = self._call_making(site, calls).state
        if not before.layer or before not in self.candidate.taps or state is None:
            return None
        rows = self._reference_state(before, self.inputs)
        if rows.shape == as_rows(state).shape and not self._same(rows, as_rows(state)):
            return hint(
                "block_input",
                f"What enters `{path}` is not what the block before returned.",
            )
        return None

    def _same(self, expected: Tensor, other: Tensor) -> bool:
        """Check that two tensors differ by no more than the rounding tolerance."""
        return Noise.assumed(self.candidate.dtype).times_over(gap(expected, other)) <= 1

    @property
    def _rounding(self) -> float:
        return Noise.assumed(self.candidate.dtype).envelope

    def _runner_of_blocks(self, site: Site | None) -> str:
        """Find the innermost module with a forward of its own that holds the blocks of
        a site's stack.
        """
        if site is None:
            return ""
        path = next(
            block
            for layer, block in self.candidate.blocks.items()
            if layer.stack == site.stack
        )
        while path:
            path = path.rpartition(".")[0]
            if not isinstance(self.candidate.part(path), LISTS):
                break
        return path

    def _other_block(self, site: Site) -> Hint | None:
        """Say so where a block holds all matrices of another block of the reference,
        and not those of its own.
        """
        weights = _matrices(self.candidate.part(self.candidate.blocks[site]))
        own_path = self.reference.blocks[site]
        if len(weights) < 2 or _holds_all(
            _matrices(self.reference.part(own_path)), weights
        ):
            return None
        for layer, path in self.reference.blocks.items():
            if path != own_path and _holds_all(
                _matrices(self.reference.part(path)), weights
            ):
                words = (
                    f"The candidate's block holds the weights of `{path}`, which makes"
                    f" `{layer}`."
                )
                return hint("swapped_layer", words)
        return None

    def _block(self, site: Site) -> _Block | None:
        """Record a block of both sides on equal input, text by text."""
        runs = []
        for inputs in self.texts:
            reference = Search(self.reference, self.candidate, inputs).block_call(site)
            port_calls = self._port_calls(site, inputs)
            if reference is not None and port_calls:
                port_call = self._call_making(site, port_calls)
                runs.append(_Run(reference, self._exact_call(reference), port_call))
        return _Block(runs) if runs else None

    def _call_making(self, site: Site, calls: Sequence[ModuleCall]) -> ModuleCall:
        """Choose the call of a block that makes a layer, where one module of the port
        makes several layers.
        """
        path = self.candidate.blocks[site]
        layers = [
            layer for layer, block in self.candidate.blocks.items() if block == path
        ]
        number = sorted(layers).index(site)
        return calls[min(number, len(calls) - 1)]

    def _exact_call(self, reference: ModuleCall) -> ModuleCall | None:
        """Record the calls inside a float64 copy of the reference's block; None if a
        kernel knows no float64.
        """
        exact = float64_copy(self.reference.part(reference.path))
        parts = {}
        for name, part in exact.named_modules():
            parts[f"{reference.path}.{name}".rstrip(".")] = part
        args, kwargs = (
            map_tensors(reference.args, to_float64),
            map_tensors(reference.kwargs, to_float64),
        )
        try:
            calls = record_calls(
                parts,
                lambda: reference.with_arguments(
                    exact, args, kwargs, self.reference.device
                ),
            )
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None
        return calls[0]

    def _blame_part(
        self, site: Site, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        block = self._block(site)
        if block is None:
            return None
        agreeing = self._agreeing_block(site, beyond)
        if agreeing is not None:
            counterparts = learn(
                agreeing.expected, agreeing.made, self._same, reordered=True
            )
        else:
            # Another order of columns may be the fault.
            counterparts = learn(
                block.expected, block.made, self._same, reordered=False
            )
            counterparts |= by_weights(
                block.reference, block.port, self.reference.part, self.candidate.part
            )
        trial = _BlockTrial(
            self, block, agreeing, {**counterparts, **_whole_block(block)}
        )
        trial.weights = self._weights_of_block(block, agreeing)
        call, verdict = trial.innermost_wrong(block.port) or (
            block.port,
            Verdict(beyond[str(site)], relative),
        )
        fault = self._fault_of(trial, call, verdict, agreeing)
        wrong = [
            name
            for name, is_right in trial.weights.items()
            if not is_right and name.startswith(f"{call.path}.")
        ]
        return self._with_weights(fault, wrong) if wrong else fault

    def _weights_of_block(
        self, block: _Block, agreeing: _Block | None
    ) -> dict[str, bool]:
        """Tell of the weights of a port's block whether they are the reference's, where
        that is known.

        Where a block agrees, they must be made of the reference's weights as they are
        there.
        """
        reference, port = (
            self.reference.part(block.reference.path),
            self.candidate.part(block.port.path),
        )
        learned = learn_weights(reference, port, reordered=False)
        wrong: list[str] = []
        if agreeing is not None:
            parts = (
                self.reference.part(agreeing.reference.path),
                self.candidate.part(agreeing.port.path),
            )
            learned = learn_weights(*parts, reordered=True)
            wrong = wrong_weights(reference, port, learned, self._rounding)
        return {f"{block.port.path}.{name}": name not in wrong for name in learned}

    def _with_weights(
        self, fault: FaultyModule, weights: Sequence[str]
    ) -> FaultyModule:
        """Name the smallest module that holds all weights which are not the
        reference's.
        """
        path = _common_path([name.rpartition(".")[0] for name in weights])
        named = ", ".join(f"`{name}`" for name in weights[:MOST_NAMED])
        more = (
            f" and {len(weights) - MOST_NAMED} more"
            if len(weights) > MOST_NAMED
            else ""
        )
        words = (
            f"Other than the reference's, unlike in blocks that agree: {named}{more}."
        )
        changed = hint("changed_weight", words)
        if path == fault.path:
            return replace(fault, own_code=False, hints=(changed, *fault.hints))
        return FaultyModule(path, fault.beyond, fault.relative, hints=(changed,))

    def _agreeing_block(self, site: Site, beyond: Mapping[str, float]) -> _Block | None:
        """Record the nearest block of the same make that agrees with the reference's."""
        layers = [
            layer
            for layer in self.candidate.blocks
            if beyond.get(str(layer), torch.inf) <= 1
        ]
        layers = [
            layer
            for layer in layers
            if layer.stack == site.stack and self._same_make(layer, site)
        ]
        nearest = min(
            layers,
            key=lambda layer: abs((layer.layer or 0) - (site.layer or 0)),
            default=None,
        )
        return None if nearest is None else self._block(nearest)

    def _same_make(self, layer: Site, other: Site) -> bool:
        """Check that two blocks have the same parts, with weights of the same shapes,
        on both sides.
        """
        for side in (self.reference, self.candidate):
            if not _is_of_one_make(
                side.part(side.blocks[layer]), side.part(side.blocks[other])
            ):
                return False
        return True

    def _fault_of(
        self,
        trial: _BlockTrial,
        call: ModuleCall,
        verdict: Verdict,
        agreeing: _Block | None,
    ) -> FaultyModule:
        """Describe the module that was found, and say why no smaller one is certain."""
        hints: list[Hint] = []
        unknown = trial.unknown_parts(call)
        if unknown:
            named = ", ".join(f"`{path}`" for path in unknown[:MOST_NAMED])
            more = (
                f" and {len(unknown) - MOST_NAMED} more"
                if len(unknown) > MOST_NAMED
                else ""
            )
            where = (
                "" if agreeing is not None else ", and no block agrees to learn from"
            )
            words = (
                f"{named}{more} could not be compared: no tensor of the reference"
                f" matches{where}."
            )
            hints.append(
                hint(
                    "not_compared",
                    f"{words} So nothing smaller than `{call.path}` is certain.",
                )
            )
        besides = self._given_besides(call, agreeing)
        if besides is not None:
            hints.append(besides)
        own_code = not hints and trial.only_code_is_left(call)
        partner = trial.partner(call)
        made = None
        output = trial.output_on_reference_input(
            trial.keys[id(call)], trial.block.runs[0]
        )
        output = call.output if output is None else output
        if partner is not None and output is not None and partner.output is not None:
            made = output.reshape(partner.output.shape).to(self.reference.device)
        return FaultyModule(
            call.path,
            verdict.beyond,
            verdict.relative,
            own_code,
            partner,
            made,
            tuple(hints),
        )

    def _given_besides(self, call: ModuleCall, agreeing: _Block | None) -> Hint | None:
        """Say which tensors a part is given beside the state, unless an agreeing block
        is given the same.
        """
        others = [
            tensor
            for tensor in (*tensors_in(call.args), *tensors_in(call.kwargs))
            if tensor is not call.state
        ]
        if not others:
            return None
        if agreeing is not None:
            known: list[Tensor] = []
            for other in agreeing.port.walk():
                known += [*tensors_in(other.args), *tensors_in(other.kwargs)]
            if all(any(equal(tensor, value) for value in known) for tensor in others):
                return None
        shapes = ", ".join(str(list(tensor.shape)) for tensor in others)
        words = (
            f"`{call.path}` is also given tensors that were not compared ({shapes}):"
            " the fault may be in them."
        )
        return hint("not_compared", words)

    def _search_around(
        self, site: Site | None, beyond: float, relative: float
    ) -> FaultyModule:
        """Find the module before or after the blocks that is at fault: by its weights,
        or by what it returns.
        """
        reference_calls = self._calls_between(self._calls_outside(), site)
        leaves = [
            call
            for call in reference_calls
            if not call.inner and self._weights(self.reference, call.path)
        ]
        calls = self._calls_around(site)
        changed: list[str] = []
        for path in dict.fromkeys(call.path for call in calls):
            partner = (
                self._most_alike(path, leaves)
                if self._weights(self.candidate, path)
                else None
            )
            if partner is None or self._may_be_folded(path, partner):
                continue
            leaves.remove(partner)
            fault = self._compare_with(path, partner)
            if fault is not None:
                return fault
            if not self._has_same_weight(path, partner):
                changed.append(path)
        if changed:
            # What it returns is within rounding on this text, or could not be compared.
            words = (
                f"The weight of `{changed[0]}` is like one of the reference's, and not"
                " equal to it."
            )
            return FaultyModule(
                changed[0], beyond, relative, hints=(hint("changed_weight", words),)
            )
        return FaultyModule(self._maker_of(site, calls), beyond, relative)

    def _has_same_weight(self, path: str, partner: ModuleCall) -> bool:
        weight, other = (
            self._weights(self.candidate, path)[0],
            self._weights(self.reference, partner.path)[0],
        )
        return equal(weight, other) or (weight.ndim == 2 and equal(weight.mT, other))

    def _may_be_folded(self, path: str, partner: ModuleCall) -> bool:
        """Check whether a norm may be folded into a module, so that it takes another
        input than the reference's.
        """
        weight, other = (
            self._weights(self.candidate, path)[0],
            self._weights(self.reference, partner.path)[0],
        )
        return is_column_scaled(weight, other, self._rounding)

    def _maker_of(self, site: Site | None, calls: Sequence[ModuleCall]) -> str:
        """Find the module whose output is the state at a site; else the module that
        runs the blocks.
        """
        if site is not None and site in self.candidate.taps:
            rows = observe(self.candidate, self.inputs, [site]).rows(str(site))
            for call in calls:
                if (
                    call.inner
                    and call.output is not None
                    and equal(as_rows(call.output), rows)
                ):
                    return call.path
        return self._runner_of_blocks(site)

    def _calls_around(self, site: Site | None) -> list[ModuleCall]:
        """Record the calls of the port's modules before its blocks, or after them."""
        blocks = {path: layer.stack for layer, path in self.candidate.blocks.items()}
        inside = tuple(f"{path}." for path in blocks)
        parts = hooks.parts_of(self.candidate.module)
        outside = {
            path: part
            for path, part in parts.items()
            if path and not path.startswith(inside)
        }
        batch = self.candidate.batch(self.inputs)
        order: list[ModuleCall] = []
        for call in record_calls(
            outside, lambda: self.candidate.run(batch), opaque=set(blocks)
        ):
            order += call.walk()
        stacks: list[Any] = [blocks.get(call.path, ()) for call in order]
        return window(order, stacks, site)

    def _weights(self, side: Side, path: str) -> list[Tensor]:
        weights = side.part(path)._parameters.values()
        return [weight.detach() for weight in weights if weight is not None]

    def _most_alike(self, path: str, calls: Sequence[ModuleCall]) -> ModuleCall | None:
        """Choose the call of the reference's module whose weight is most like that of a
        module of the port.
        """
        weight = self._weights(self.candidate, path)[0]
        best: tuple[float, ModuleCall] | None = None
        for call in calls:
            cosine = _cosine(weight, self._weights(self.reference, call.path)[0])
            if cosine > SIMILAR and (best is None or cosine > best[0]):
                best = cosine, call
        return None if best is None else best[1]

    def _compare_with(self, path: str, call: ModuleCall) -> FaultyModule | None:
        """Call a module of the port on what the reference's was given; None if it
        agrees or cannot be compared.
        """
        part, reference_part = self.candidate.part(path), self.reference.part(call.path)
        tensor = next(tensors_in((call.args, call.kwargs)), None)
        if tensor is None or call.output is None:
            return None
        alone = ModuleCall(path, (tensor,))
        try:
            made = hooks.first_tensor(alone.repeat(part, self.candidate.device))
            exact = hooks.first_tensor(
                in_float64(reference_part, call.args, call.kwargs)
            )
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
            return None
        if made is None or made.shape != call.output.shape:
            return None
        verdict = self.judge(call.output, made.to(self.reference.device), exact)
        if not verdict.wrong:
            return None
        return FaultyModule(
            path,
            verdict.beyond,
            verdict.relative,
            call=call,
            made=made.to(self.reference.device),
        )


class _BlockTrial:
    """Tells of every call inside a port's block whether it returns what it should,
    given what it should be given.
    """

    def __init__(
        self,
        search: PortSearch,
        block: _Block,
        agreeing: _Block | None,
        counterparts: Mapping[BlockTensor, Counterpart],
    ) -> None:
        self.search, self.block, self.agreeing, self.counterparts = (
            search,
            block,
            agreeing,
            counterparts,
        )
        self.calls = calls_by_place(block.port)
        self.keys = {id(call): key for key, call in self.calls.items()}
        self.reference_calls = calls_by_place(block.reference)
        self.weights: Mapping[str, bool] = {}
        self._verdicts: dict[CallKey, Verdict | None] = {}

    def innermost_wrong(self, call: ModuleCall) -> tuple[ModuleCall, Verdict] | None:
        """Find the innermost call that is wrong, the first in the order of the pass."""
        for inner in call.inner:
            wrong = self.innermost_wrong(inner)
            if wrong is not None:
                return wrong
        verdict = self.verdict(call)
        if verdict is None or not verdict.wrong:
            return None
        return call, verdict

    def verdict(self, call: ModuleCall) -> Verdict | None:
        """Judge what a call does by itself; None where that cannot be told."""
        key = self.keys[id(call)]
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(key)
        return self._verdicts[key]

    def _judge(self, key: CallKey) -> Verdict | None:
        returned = BlockTensor(*key, "output")
        if returned not in self.counterparts:
            return None
        output = self._on_reference_input(key)
        if output is not None:
            return self._compare(returned, output)
        if self._is_input_right(key):
            return self._compare(returned, self.block.made.get(returned))
        return None

    def _on_reference_input(self, key: CallKey) -> Tensor | None:
        """Call a part of the port on what the reference has in the place of its input,
        text by text.
        """
        outputs = []
        for run in self.block.runs:
            output = self.output_on_reference_input(key, run)
            if output is None:
                return None
            outputs.append(as_rows(output))
        return torch.cat(outputs)

    def output_on_reference_input(self, key: CallKey, run: _Run) -> Tensor | None:
        """Call a part of the port on the reference's tensor in one text; None where it
        has no such tensor there.
        """
        counterpart = self.counterparts.get(BlockTensor(*key, "input"))
        place = None if counterpart is None else counterpart.identical_tensor
        call = calls_by_place(run.port).get(key)
        expected = None if place is None else tensors_by_place(run.reference).get(place)
        if (
            call is None
            or call.state is None
            or expected is None
            or expected.numel() != call.state.numel()
        ):
            return None
        state = expected.reshape(call.state.shape).to(call.state)
        args, kwargs = hooks.with_state_in(call.args, call.kwargs, state)
        part, device = (
            self.search.candidate.part(call.path),
            self.search.candidate.device,
        )
        return hooks.first_tensor(call.with_arguments(part, args, kwargs, device))

    def _is_input_right(self, key: CallKey) -> bool:
        """Check what a call was given: by itself, or by a call on the same tensor that
        returns what it should.

        Sharing a tensor counts only if the two calls share it in the block that agrees
        too.
        """
        entered = self._compare(
            BlockTensor(*key, "input"), self.block.made.get(BlockTensor(*key, "input"))
        )
        if entered is not None:
            return not entered.wrong
        for other, call in self.calls.items():
            is_beside = other != key and not call.inner and self.agreeing is not None
            if is_beside and self._share_input(key, other):
                returned = BlockTensor(*other, "output")
                verdict = self._compare(returned, self.block.made.get(returned))
                if verdict is not None and not verdict.wrong:
                    return True
        return False

    def _share_input(self, key: CallKey, other: CallKey) -> bool:
        assert self.agreeing is not None
        return self.block.shares_input(key, other) and self.agreeing.shares_input(
            key, other
        )

    def _compare(self, place: BlockTensor, rows: Tensor | None) -> Verdict | None:
        """Compare the rows of a tensor with their counterpart in the reference's block;
        the worst columns count.
        """
        counterpart = self.counterparts.get(place)
        if counterpart is None or rows is None:
            return None
        verdicts = []
        for columns in counterpart.columns:
            expected, exact = (
                self.block.expected.get(columns.place),
                self.block.exact.get(columns.place),
            )
            if expected is None or len(expected) != len(rows):
                return None
            is_exact = exact is not None and exact.shape == expected.shape
            exact_columns = (
                exact[:, columns.reference] if exact is not None and is_exact else None
            )
            made = rows[:, columns.port]
            verdicts.append(
                self.search.judge(expected[:, columns.reference], made, exact_columns)
            )
        return max(verdicts, key=lambda verdict: verdict.beyond)

    def unknown_parts(self, call: ModuleCall) -> list[str]:
        """List the parts inside a call that could not be judged and are not inside
        another such part.
        """
        unknown: list[str] = []
        for inner in call.inner:
            if self.verdict(inner) is None:
                unknown.append(inner.path)
            else:
                unknown += self.unknown_parts(inner)
        return list(dict.fromkeys(unknown))

    def only_code_is_left(self, call: ModuleCall) -> bool:
        """Check that a module has parts, which agree if they are called and else hold
        the reference's weights.
        """
        part = self.search.candidate.part(call.path)
        called = {inner.path for inner in call.walk() if inner is not call}
        for name, inner in part.named_modules():
            path = f"{call.path}.{name}".rstrip(".")
            names = [
                f"{path}.{weight}"
                for weight, values in inner._parameters.items()
                if values is not None
            ]
            if path not in called and not all(
                self.weights.get(weight, False) for weight in names
            ):
                return False
        return bool(part._modules)

    def partner(self, call: ModuleCall) -> ModuleCall | None:
        """Find the reference's call that returns the counterpart of what a call
        returns.
        """
        counterpart = self.counterparts.get(BlockTensor(*self.keys[id(call)], "output"))
        place = None if counterpart is None else counterpart.identical_tensor
        if place is None or place.side != "output":
            return None
        return self.reference_calls.get((place.path, place.number))


def _whole_block(block: _Block) -> dict[BlockTensor, Counterpart]:
    """Pair what goes into and comes out of the two blocks: these are the layers
    themselves.
    """
    pairs: dict[BlockTensor, Counterpart] = {}
    for side in ("input", "output"):
        place = BlockTensor("", 0, side)
        both = block.expected.get(place), block.made.get(place)
        if (
            both[0] is not None
            and both[1] is not None
            and both[0].shape == both[1].shape
        ):
            every = torch.arange(both[0].shape[1])
            pairs[place] = Counterpart(
                (SharedColumns(place, every, every, len(every)),)
            )
    return pairs


def _common_path(paths: Sequence[str]) -> str:
    """Find the path of the smallest module that holds all of some modules."""
    parts = [path.split(".") for path in paths]
    shared: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def hint(fault: str, evidence: str) -> Hint:
    """Make a hint."""
    return {"fault": fault, "evidence": evidence}


def _holds_all(known: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Check that every matrix is among the known ones, as it is or transposed."""
    return all(
        any(equal(weight, other) or equal(weight.mT, other) for other in known)
        for weight in weights
    )


def _is_of_one_make(block: nn.Module, other: nn.Module) -> bool:
    """Check that two blocks have the same parts, and weights of one shape wherever both
    have them.
    """
    names = [name for name, _ in block.named_modules()]
    other_names = [name for name, _ in other.named_modules()]
    shapes = {name: weight.shape for name, weight in other.named_parameters()}
    for name, weight in block.named_parameters():
        # A bias that is missing in one of them may be the fault.
        if shapes.get(name, weight.shape) != weight.shape:
            return False
    return names == other_names


def _matrices(part: nn.Module) -> list[Tensor]:
    return [weight.detach() for weight in part.parameters() if weight.ndim > 1]


def _cosine(weight: Tensor, other: Tensor) -> float:
    """Measure how much alike two weights are, as they are or transposed."""
    values, expected = weight.double().cpu(), other.double().cpu()
    forms = [expected] if expected.shape == values.shape else []
    if expected.ndim == 2 and expected.T.shape == values.shape:
        forms.append(expected.T)
    cosines = [
        torch.nn.functional.cosine_similarity(values.flatten(), form.flatten(), dim=0)
        for form in forms
    ]
    return max(map(float, cosines), default=-1.0)
