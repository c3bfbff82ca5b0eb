"""Find the module at fault in a port, whose modules have other names and layouts.

The port's block runs on the reference's input, and every tensor inside it that has a
counterpart in the reference's block is compared with it (counterparts.py). A module is
at fault if its input is right and its output is not. The innermost such module is
named. If parts of it have no counterpart, the evidence says that nothing smaller is
certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import (
    ModuleCall,
    parts_inside,
    raise_if_out_of_memory,
    record_calls,
    run_exactly,
    run_in_float64,
    tensors_in,
)
from hiddenscope.analyses.drift.counterparts import as_rows, by_weights, learn
from hiddenscope.analyses.drift.facts import Hint
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel, layer_before
from hiddenscope.analyses.drift.noise import Noise, gap
from hiddenscope.analyses.drift.observe import FLOAT64_ERRORS, ObservedState, observe
from hiddenscope.analyses.drift.port_block import BlockRun, BlockTrial, PortBlock
from hiddenscope.analyses.drift.search import (
    CALL_ERRORS,
    FaultyModule,
    Search,
    Verdict,
    calls_around_blocks,
)
from hiddenscope.analyses.drift.weights import (
    all_among,
    cosine,
    equal,
    equal_or_transposed,
    is_column_scaled,
    learn_weights,
    matrices_of,
    weights_of,
    wrong_weights,
)
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# The cosine from which a weight is taken for a changed copy of another.
SIMILAR = 0.5
# Names that a sentence lists before "and 2 more".
MOST_NAMED = 3


class PortSearch(Search):
    """Searches for the module at fault in a port, which runs one text at a time."""

    def __init__(
        self,
        reference: LiveModel,
        candidate: LiveModel,
        inputs: Inputs,
        others: Sequence[Inputs] = (),
    ) -> None:
        super().__init__(reference, candidate, inputs)
        self.texts = [inputs, *others]
        self.noise = Noise.assumed(candidate.dtype)

    def find(
        self, first: str, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        """Find the module behind the first site that differs."""
        site = None if first == LOGITS else Site.parse(first)
        if site is None or not site.layer:
            return self._search_around(site, beyond[first], relative)
        hint, path = self._misuse_of_block(site), self._runner_of_blocks(site)
        if hint is None:
            hint, path = self._other_block(site), self.candidate.blocks[site]
        if hint is not None:
            return FaultyModule(path, beyond[first], relative, hints=(hint,))
        return self._blame_part(site, beyond, relative)

    def _port_calls(self, site: Site, inputs: Inputs) -> list[ModuleCall]:
        """Record the calls of a port's block on the reference's state before it."""
        path = self.candidate.blocks[site]
        before = layer_before(site)
        expected = self._reference_state(before, inputs)

        def put(state: ObservedState) -> Tensor | None:
            return None if state.name == LOGITS else expected

        tapped = [before] if before in self.candidate.taps else []
        return record_calls(
            parts_inside(self.candidate.part(path), path),
            lambda: observe(self.candidate, inputs, tapped, visit=put),
        )

    def _reference_state(self, site: Site, inputs: Inputs) -> Tensor:
        return observe(self.reference, inputs, [site]).rows(str(site))

    def _layers_made_by(self, path: str) -> list[Site]:
        layers = self.candidate.blocks.items()
        return sorted(layer for layer, block in layers if block == path)

    def _call_making(self, site: Site, calls: Sequence[ModuleCall]) -> ModuleCall:
        """Return the call that makes a layer, if one module makes several layers."""
        number = self._layers_made_by(self.candidate.blocks[site]).index(site)
        return calls[min(number, len(calls) - 1)]

    def _misuse_of_block(self, site: Site) -> Hint | None:
        """Say how a block is wrongly called: never, too often, or on a wrong state."""
        path = self.candidate.blocks[site]
        calls = self._port_calls(site, self.inputs)
        if not calls:
            evidence = f"The candidate never calls `{path}`."
            return Hint(fault="layer_skipped", evidence=evidence)
        reference_blocks = list(self.reference.blocks.values())
        expected_calls = reference_blocks.count(self.reference.blocks[site])
        is_shared = len(self._layers_made_by(path)) > 1
        if len(calls) > expected_calls and not is_shared:
            evidence = f"The candidate calls `{path}` {len(calls)} times."
            return Hint(fault="layer_doubled", evidence=evidence)
        before = layer_before(site)
        state = self._call_making(site, calls).state
        if not before.layer or before not in self.candidate.taps or state is None:
            return None
        expected, entered = self._reference_state(before, self.inputs), as_rows(state)
        if expected.shape == entered.shape and not self._same(expected, entered):
            evidence = f"What enters `{path}` is not what the block before returned."
            return Hint(fault="block_input", evidence=evidence)
        return None

    def _same(self, expected: Tensor, other: Tensor) -> bool:
        """Check that two tensors differ by no more than the rounding tolerance."""
        return self.noise.times_over(gap(expected, other)) <= 1

    def _runner_of_blocks(self, site: Site | None) -> str:
        """Return the innermost module that runs the blocks of a site's stack."""
        if site is None:
            return ""
        path = ""
        for layer, block in self.candidate.blocks.items():
            if layer.stack == site.stack:
                path = block
                break
        while path:
            path = path.rpartition(".")[0]
            # Lists have no forward of their own.
            if not isinstance(self.candidate.part(path), LISTS):
                break
        return path

    def _other_block(self, site: Site) -> Hint | None:
        """Say if a block holds the matrices of another block of the reference."""
        weights = matrices_of(self.candidate.part(self.candidate.blocks[site]))
        expected_path = self.reference.blocks[site]
        expected = matrices_of(self.reference.part(expected_path))
        if len(weights) < 2 or all_among(weights, expected):
            return None
        for layer, path in self.reference.blocks.items():
            if path == expected_path:
                continue
            if all_among(weights, matrices_of(self.reference.part(path))):
                evidence = (
                    f"The candidate's block holds the weights of `{path}`, which makes"
                    f" `{layer}`."
                )
                return Hint(fault="swapped_layer", evidence=evidence)
        return None

    def _block(self, site: Site) -> PortBlock | None:
        """Record a block of both sides on equal input, text by text."""
        runs = []
        for inputs in self.texts:
            reference = Search(self.reference, self.candidate, inputs).block_call(site)
            port_calls = self._port_calls(site, inputs)
            if reference is None or not port_calls:
                continue
            exact = self._exact_call(reference)
            port_call = self._call_making(site, port_calls)
            runs.append(BlockRun(reference, exact, port_call))
        return PortBlock(runs) if runs else None

    def _exact_call(self, call: ModuleCall) -> ModuleCall | None:
        """Record the calls inside a float64 copy of a block; None if float64 fails."""
        exact = float64_copy(self.reference.part(call.path))
        try:
            calls = record_calls(
                parts_inside(exact, call.path),
                lambda: run_exactly(exact, call.args, call.kwargs),
            )
        except FLOAT64_ERRORS as error:
            raise_if_out_of_memory(error)
            return None
        return calls[0]

    def _blame_part(
        self, site: Site, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        """Find the part of a block that is at fault, by tensors and then by weights."""
        block = self._block(site)
        if block is None:
            return None
        agreeing = self._agreeing_block(site, beyond)
        if agreeing is not None:
            counterparts = learn(
                agreeing.expected, agreeing.actual, self._same, reordered=True
            )
        else:
            # Without a block that agrees, another order of columns may be the fault.
            counterparts = learn(
                block.expected, block.actual, self._same, reordered=False
            )
            counterparts |= by_weights(
                block.reference, block.port, self.reference.part, self.candidate.part
            )
        weights = self._judge_weights(block, agreeing)
        trial = BlockTrial(self, block, agreeing, counterparts, weights)
        wrong_call = trial.innermost_wrong(block.port)
        if wrong_call is None:
            wrong_call = block.port, Verdict(beyond[str(site)], relative)
        call, verdict = wrong_call
        fault = self._fault_at(trial, call, verdict)
        wrong = []
        for name, is_right in weights.items():
            if not is_right and name.startswith(f"{call.path}."):
                wrong.append(name)
        return self._with_wrong_weights(fault, wrong) if wrong else fault

    def _judge_weights(
        self, block: PortBlock, agreeing: PortBlock | None
    ) -> dict[str, bool]:
        """Return whether weights of a port's block are right, where that is known.

        They must consist of the reference's weights as in the agreeing block.
        """
        reference = self.reference.part(block.reference.path)
        port = self.candidate.part(block.port.path)
        wrong: list[str] = []
        if agreeing is None:
            learned = learn_weights(reference, port, reordered=False)
        else:
            learned = learn_weights(
                self.reference.part(agreeing.reference.path),
                self.candidate.part(agreeing.port.path),
                reordered=True,
            )
            wrong = wrong_weights(reference, port, learned, self.noise.envelope)
        return {f"{block.port.path}.{name}": name not in wrong for name in learned}

    def _with_wrong_weights(
        self, fault: FaultyModule, weights: Sequence[str]
    ) -> FaultyModule:
        """Name the smallest module that holds all weights which are wrong."""
        path = _common_path([name.rpartition(".")[0] for name in weights])
        evidence = (
            "Other than the reference's, unlike in blocks that agree:"
            f" {_listed(weights)}."
        )
        hint = Hint(fault="changed_weight", evidence=evidence)
        if path == fault.path:
            return replace(fault, own_code=False, hints=(hint, *fault.hints))
        return FaultyModule(path, fault.beyond, fault.relative, hints=(hint,))

    def _agreeing_block(
        self, site: Site, beyond: Mapping[str, float]
    ) -> PortBlock | None:
        """Record the nearest block of the same structure that agrees."""
        layers = []
        for layer in self.candidate.blocks:
            agrees = beyond.get(str(layer), torch.inf) <= 1
            if agrees and layer.stack == site.stack and self._same_make(layer, site):
                layers.append(layer)
        if not layers:
            return None
        number = site.layer or 0
        return self._block(min(layers, key=lambda at: abs((at.layer or 0) - number)))

    def _same_make(self, layer: Site, other: Site) -> bool:
        """Check on both sides that two blocks have the same parts and weight shapes."""
        for model in (self.reference, self.candidate):
            block = model.part(model.blocks[layer])
            other_block = model.part(model.blocks[other])
            names = [name for name, _ in block.named_modules()]
            if names != [name for name, _ in other_block.named_modules()]:
                return False
            other_weights = dict(other_block.named_parameters())
            for name, weight in block.named_parameters():
                # A bias that only one of them has may be the fault.
                if other_weights.get(name, weight).shape != weight.shape:
                    return False
        return True

    def _fault_at(
        self, trial: BlockTrial, call: ModuleCall, verdict: Verdict
    ) -> FaultyModule:
        """Describe the module at fault, and say why no smaller one is certain."""
        hints: list[Hint] = []
        unknown = trial.unknown_parts(call)
        if unknown:
            where = ""
            if trial.agreeing is None:
                where = ", and no block agrees to learn from"
            evidence = (
                f"{_listed(unknown)} could not be compared: no tensor of the reference"
                f" matches{where}. So nothing smaller than `{call.path}` is certain."
            )
            hints.append(Hint(fault="not_compared", evidence=evidence))
        hints += self._other_arguments(call, trial.agreeing)
        own_code = not hints and trial.only_code_is_left(call)
        partner = trial.partner(call)
        output = trial.output_on_reference_input(
            trial.keys[id(call)], trial.block.runs[0]
        )
        if output is None:
            output = call.output
        if partner is None or output is None or partner.output is None:
            output = None
        else:
            output = output.reshape(partner.output.shape).to(self.reference.device)
        return FaultyModule(
            call.path,
            verdict.beyond,
            verdict.relative,
            own_code,
            partner,
            output,
            tuple(hints),
        )

    def _other_arguments(
        self, call: ModuleCall, agreeing: PortBlock | None
    ) -> list[Hint]:
        """Name the tensors that a part receives beside the state.

        There is nothing to say if parts of the agreeing block receive the same.
        """
        others = []
        for tensor in tensors_in((call.args, call.kwargs)):
            if tensor is not call.state:
                others.append(tensor)
        known: list[Tensor] = []
        if agreeing is not None:
            for other in agreeing.port.walk():
                known += tensors_in((other.args, other.kwargs))
        for tensor in others:
            if not any(equal(tensor, value) for value in known):
                shapes = ", ".join(str(list(other.shape)) for other in others)
                evidence = (
                    f"`{call.path}` is also given tensors that were not compared"
                    f" ({shapes}): the fault may be in them."
                )
                return [Hint(fault="not_compared", evidence=evidence)]
        return []

    def _search_around(
        self, site: Site | None, beyond: float, relative: float
    ) -> FaultyModule:
        """Find the module at fault before or after the blocks, by weight or output."""
        leaves: list[tuple[ModuleCall, Tensor]] = []
        for call in self.calls_near(self.calls_outside(), site):
            weights = weights_of(self.reference.part(call.path))
            if not call.inner and weights:
                leaves.append((call, next(iter(weights.values()))))
        calls = self._port_calls_around(site)
        changed: list[str] = []
        for path in dict.fromkeys(call.path for call in calls):
            weights = weights_of(self.candidate.part(path))
            if not weights or not leaves:
                continue
            weight = next(iter(weights.values()))
            cosines = [cosine(weight, other) for _, other in leaves]
            place = cosines.index(max(cosines))
            partner, expected = leaves[place]
            # A module with a norm folded into it takes another input.
            is_folded = is_column_scaled(weight, expected, self.noise.envelope)
            if cosines[place] <= SIMILAR or is_folded:
                continue
            del leaves[place]
            fault = self._compare_with(path, partner)
            if fault is not None:
                return fault
            if not equal_or_transposed(weight, expected):
                changed.append(path)
        if not changed:
            return FaultyModule(self._maker_of(site, calls), beyond, relative)
        # Its output is within rounding on this text, or could not be compared.
        evidence = (
            f"The weight of `{changed[0]}` is like one of the reference's, and not"
            " equal to it."
        )
        hint = Hint(fault="changed_weight", evidence=evidence)
        return FaultyModule(changed[0], beyond, relative, hints=(hint,))

    def _maker_of(self, site: Site | None, calls: Sequence[ModuleCall]) -> str:
        """Return the container whose output is the state at a site.

        Without one, return the module that runs the blocks.
        """
        if site is not None and site in self.candidate.taps:
            rows = observe(self.candidate, self.inputs, [site]).rows(str(site))
            for call in calls:
                if not call.inner or call.output is None:
                    continue
                if equal(as_rows(call.output), rows):
                    return call.path
        return self._runner_of_blocks(site)

    def _port_calls_around(self, site: Site | None) -> list[ModuleCall]:
        """Record the calls of the port's modules just before or after its blocks."""
        blocks = set(self.candidate.blocks.values())
        inside = tuple(f"{path}." for path in blocks)
        outside = {}
        for path, part in hooks.parts_of(self.candidate.module).items():
            if path and not path.startswith(inside):
                outside[path] = part
        batch = self.candidate.batch(self.inputs)
        outermost = record_calls(
            outside, lambda: self.candidate.run(batch), opaque=blocks
        )
        calls: list[ModuleCall] = []
        for call in outermost:
            calls += call.walk()
        return calls_around_blocks(calls, self.candidate, site)

    def _compare_with(self, path: str, call: ModuleCall) -> FaultyModule | None:
        """Call a module of the port on the input of one of the reference's.

        The result is None if it agrees or cannot be compared.
        """
        tensor = next(tensors_in((call.args, call.kwargs)), None)
        if tensor is None or call.output is None:
            return None
        port_call = ModuleCall(path, (tensor,))
        try:
            returned = port_call.repeat(
                self.candidate.part(path), self.candidate.device
            )
            exact = run_in_float64(
                self.reference.part(call.path), call.args, call.kwargs
            )
        except CALL_ERRORS as error:
            raise_if_out_of_memory(error)
            return None
        output = hooks.first_tensor(returned)
        if output is None or output.shape != call.output.shape:
            return None
        output = output.to(self.reference.device)
        verdict = self.judge(call.output, output, hooks.first_tensor(exact))
        if not verdict.wrong:
            return None
        return FaultyModule(
            path, verdict.beyond, verdict.relative, call=call, output=output
        )


def _listed(names: Sequence[str]) -> str:
    """List a few names, and count the rest."""
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMED])
    rest = len(names) - MOST_NAMED
    return f"{listed} and {rest} more" if rest > 0 else listed


def _common_path(paths: Sequence[str]) -> str:
    """Return the path of the smallest module that holds all of some modules."""
    shared: list[str] = []
    for names in zip(*[path.split(".") for path in paths], strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
