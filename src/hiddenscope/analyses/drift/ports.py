"""Find the module at fault in a port, whose modules have other names and layouts.

A port may split what the reference fuses, fuse what it splits, permute the rows of a
projection or fold a norm into it. Its layout is learned from a block that agrees with
the reference's: a tensor of the port is the counterpart of one of the reference's if it
equals that tensor, some of its columns, or its columns in another order. The same must
then hold in every block of the port. A tensor without a counterpart is a matter of
layout and says nothing. If no block agrees, the layout is unknown. Then only modules
with exactly the weights of one of the reference's modules have counterparts, and
containers of exactly the same weights.

The port's block runs on the reference's input, and every tensor inside it that has a
counterpart is compared with it. A module is at fault if its input is right and its
output is not. The innermost such module is named. If parts of it have no counterpart,
the evidence says that nothing smaller is certain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, takewhile
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.compare import is_column_scaled
from hiddenscope.analyses.drift.errors import Noise, gap
from hiddenscope.analyses.drift.live_model import LOGITS, layer_before
from hiddenscope.analyses.drift.observe import (
    FLOAT64_ERRORS,
    ModuleCall,
    ObservedState,
    observe,
    parts_inside,
    record_calls,
    run_exactly,
    tensors_in,
    tolerating,
)
from hiddenscope.analyses.drift.search import (
    INCOMPARABLE,
    FaultyModule,
    Search,
    Verdict,
    calls_near,
    equal,
    weights_of,
)
from hiddenscope.analyses.drift.story import Hint
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# The cosine from which a weight is taken for a changed copy of another.
SIMILAR = 0.5
# Names that a sentence lists before "and 2 more".
MOST_NAMED = 3
# Wider tensors are not searched for columns in another order.
MOST_COLUMNS = 8192
# Tokens by which columns are told apart.
SAMPLE = 64
ALL = slice(None)
Side = Literal["input", "output"]
CallKey = tuple[str, int]
"""The path of a module within a block, and the number of its call."""


class BlockTensor(NamedTuple):
    """A tensor in a block: the state that enters a call, or its output."""

    call: CallKey
    side: Side


class SharedColumns(NamedTuple):
    """Columns of a tensor of the reference and the equal columns of the port's."""

    place: BlockTensor
    reference: slice | Tensor
    port: slice


Counterparts = dict[BlockTensor, list[SharedColumns]]
"""The columns of the reference's tensors that make up each tensor of the port."""


class BlockCalls:
    """The calls inside one run of a block, by path within the block and number.

    `tensors` are the states that enter and leave every call, as rows.
    """

    def __init__(self, block: ModuleCall) -> None:
        self.block = block
        self.calls: dict[CallKey, ModuleCall] = {}
        self.tensors: dict[BlockTensor, Tensor] = {}
        numbers: Counter[str] = Counter()
        for call in block.walk():
            path = call.path[len(block.path) :].lstrip(".")
            key = path, numbers[path]
            numbers[path] += 1
            self.calls[key] = call
            sides: dict[Side, Tensor | None] = {
                "input": call.state,
                "output": call.output,
            }
            for side, tensor in sides.items():
                if tensor is not None:
                    self.tensors[BlockTensor(key, side)] = _as_rows(tensor)


class PortBlock:
    """A block of both sides, run on equal input over some texts.

    `runs` hold the calls of the reference, those of its float64 copy, if any, and those
    of the port for each text. `expected`, `exact` and `actual` are the rows of all
    texts for each tensor in them.
    """

    def __init__(
        self, runs: Sequence[tuple[BlockCalls, BlockCalls | None, BlockCalls]]
    ) -> None:
        self.runs = runs
        self.reference, _, self.port = runs[0]
        self.expected = _joined([reference for reference, _, _ in runs])
        self.actual = _joined([port for _, _, port in runs])
        self.exact = _joined([exact for _, exact, _ in runs])

    def share_input(self, key: CallKey, other: CallKey) -> bool:
        """Check whether two calls of the port receive the same tensor."""
        places = BlockTensor(key, "input"), BlockTensor(other, "input")
        tensors = [self.actual[place] for place in places if place in self.actual]
        return len(tensors) == 2 and equal(*tensors)


def _joined(texts: Sequence[BlockCalls | None]) -> dict[BlockTensor, Tensor]:
    """Join the tensors that all texts have with the same width."""
    joined = {}
    tensors = [calls.tensors for calls in texts if calls is not None]
    for place in tensors[0] if tensors else ():
        parts = [of_text[place] for of_text in tensors if place in of_text]
        widths = {part.shape[1] for part in parts}
        if len(parts) == len(texts) and len(widths) == 1:
            joined[place] = torch.cat(parts)
    return joined


def _as_rows(tensor: Tensor) -> Tensor:
    """Flatten a tensor of one text to rows, on the CPU."""
    return tensor.reshape(-1, tensor.shape[-1]).cpu()


@dataclass
class PortSearch(Search):
    """Searches for the module at fault in a port, which runs one text at a time."""

    others: Sequence[Inputs]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noise = Noise.assumed(self.candidate.dtype)

    def find(
        self, first: str, beyond: Mapping[str, float], relative: float
    ) -> FaultyModule | None:
        """Find the module behind the first site that differs."""
        site = None if first == LOGITS else Site.parse(first)
        if site is None or not site.layer:
            return self._search_around(site)
        hint = self._misuse_of_block(site)
        path = self._runner_of_blocks(site)
        if hint is None:
            hint = self._other_block(site)
            path = self.candidate.blocks[site]
        if hint is not None:
            return FaultyModule(path, hints=(hint,))
        block = self._block(site)
        if block is None:
            return None
        # The nearest block of the same structure that agrees.
        distances = {}
        for layer in self.candidate.blocks:
            agrees = beyond.get(str(layer), math.inf) <= 1
            if agrees and layer.stack == site.stack and self._same_make(layer, site):
                distances[layer] = abs((layer.layer or 0) - site.layer)
        agreeing = None
        if distances:
            agreeing = self._block(min(distances, key=distances.__getitem__))
        trial = BlockTrial(self, block, agreeing)
        whole = block.port.block
        return trial.fault(trial.innermost_wrong(whole) or whole)

    def same(self, expected: Tensor, other: Tensor) -> bool:
        """Check that two tensors of one shape differ by rounding alone."""
        return self.noise.times_over(gap(expected, other)) <= 1

    def _port_calls(self, site: Site, inputs: Inputs) -> list[ModuleCall]:
        """Record the calls of a port's block on the reference's state before it."""
        path = self.candidate.blocks[site]
        before = layer_before(site)
        expected = self._reference_rows(before, inputs)

        def put(state: ObservedState) -> Tensor | None:
            return None if state.name == LOGITS else expected

        tapped = [before] if before in self.candidate.taps else []
        return record_calls(
            parts_inside(self.candidate.part(path), path),
            lambda: observe(self.candidate, inputs, tapped, visit=put),
        )

    def _reference_rows(self, site: Site, inputs: Inputs) -> Tensor:
        return observe(self.reference, inputs, [site]).rows(str(site))

    def _call_making(self, site: Site, calls: Sequence[ModuleCall]) -> ModuleCall:
        """Return the call that makes a layer, if one module makes several layers."""
        layers = self.candidate.layers_of(self.candidate.blocks[site])
        number = sorted(layers).index(site)
        return calls[min(number, len(calls) - 1)]

    def _misuse_of_block(self, site: Site) -> Hint | None:
        """Say how a block is wrongly called: never, too often, or on a wrong state."""
        path = self.candidate.blocks[site]
        calls = self._port_calls(site, self.inputs)
        if not calls:
            evidence = f"The candidate never calls `{path}`."
            return Hint(fault="layer_skipped", evidence=evidence)
        expected_calls = self.reference.layers_of(self.reference.blocks[site])
        makes_one = len(self.candidate.layers_of(path)) == 1
        if makes_one and len(calls) > len(expected_calls):
            evidence = f"The candidate calls `{path}` {len(calls)} times."
            return Hint(fault="layer_doubled", evidence=evidence)
        before = layer_before(site)
        state = self._call_making(site, calls).state
        if not before.layer or before not in self.candidate.taps or state is None:
            return None
        expected = self._reference_rows(before, self.inputs)
        entered = _as_rows(state)
        if expected.shape == entered.shape and not self.same(expected, entered):
            evidence = f"What enters `{path}` is not what the block before returned."
            return Hint(fault="block_input", evidence=evidence)
        return None

    def _runner_of_blocks(self, site: Site | None) -> str:
        """Return the innermost module that runs the blocks of a site's stack."""
        for layer, path in self.candidate.blocks.items():
            if site is None or layer.stack != site.stack:
                continue
            while path:
                path = path.rpartition(".")[0]
                # Lists have no forward of their own.
                if not isinstance(self.candidate.part(path), LISTS):
                    break
            return path
        return ""

    def _other_block(self, site: Site) -> Hint | None:
        """Say if a block holds the matrices of another block of the reference."""
        weights = _matrices(self.candidate.part(self.candidate.blocks[site]))
        expected_path = self.reference.blocks[site]
        expected = _matrices(self.reference.part(expected_path))
        if len(weights) < 2 or _all_among(weights, expected):
            return None
        for layer, path in self.reference.blocks.items():
            others = _matrices(self.reference.part(path))
            if path != expected_path and _all_among(weights, others):
                evidence = (
                    f"The candidate's block holds the weights of `{path}`, which makes"
                    f" `{layer}`."
                )
                return Hint(fault="swapped_layer", evidence=evidence)
        return None

    def _block(self, site: Site) -> PortBlock | None:
        """Record a block of both sides on equal input, text by text."""
        runs = []
        for inputs in (self.inputs, *self.others):
            reference = self.block_call(site, inputs)
            port_calls = self._port_calls(site, inputs)
            if reference is None or not port_calls:
                continue
            runs.append(
                (
                    BlockCalls(reference),
                    self._exact_calls(reference),
                    BlockCalls(self._call_making(site, port_calls)),
                )
            )
        return PortBlock(runs) if runs else None

    def _exact_calls(self, call: ModuleCall) -> BlockCalls | None:
        """Record the calls inside a float64 copy of a block; None if float64 fails."""
        exact = float64_copy(self.reference.part(call.path))
        calls = []
        with tolerating(FLOAT64_ERRORS):
            calls = record_calls(
                parts_inside(exact, call.path),
                lambda: run_exactly(exact, call.args, call.kwargs),
            )
        return BlockCalls(calls[0]) if calls else None

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

    def _search_around(self, site: Site | None) -> FaultyModule:
        """Find the module at fault before or after the blocks, by weight or output."""
        leaves = []
        outside = self.calls_outside(self.reference)
        for call in calls_near(outside, self.reference, site):
            weights = weights_of(self.reference.part(call.path))
            if not call.inner and weights:
                leaves.append((call, next(iter(weights.values()))))
        calls = self.calls_outside(self.candidate)[1:]
        calls = calls_near(calls, self.candidate, site)
        changed = []
        for path in dict.fromkeys(call.path for call in calls):
            weights = weights_of(self.candidate.part(path))
            if not weights or not leaves:
                continue
            weight = next(iter(weights.values()))
            cosines = [_cosine(weight, other) for _, other in leaves]
            place = cosines.index(max(cosines))
            partner, expected = leaves[place]
            # A module with a norm folded into it takes another input.
            is_folded = is_column_scaled(weight, expected, self.noise.envelope)
            if cosines[place] <= SIMILAR or is_folded:
                continue
            del leaves[place]
            # The port's module is called on the input of the reference's.
            tensors = tensors_in((partner.args, partner.kwargs))
            port_call = replace(partner, path=path, args=tuple(tensors[:1]), kwargs={})
            verdict = self.verdict_on(partner, port_call)
            if tensors and 1 < verdict < INCOMPARABLE:
                return self.fault_of(partner, port_call)
            if not _all_among([weight], [expected]):
                changed.append(path)
        if not changed:
            path = self._runner_of_blocks(site)
            # A container may return the state at the site itself.
            if site is not None and site in self.candidate.taps:
                rows = observe(self.candidate, self.inputs, [site]).rows(str(site))
                makers = []
                for call in calls:
                    output = call.output if call.inner else None
                    if output is not None and equal(_as_rows(output), rows):
                        makers.append(call.path)
                path = next(iter(makers), path)
            return FaultyModule(path)
        # Its output is within rounding on this text, or could not be compared.
        evidence = (
            f"The weight of `{changed[0]}` is like one of the reference's, and not"
            " equal to it."
        )
        hint = Hint(fault="changed_weight", evidence=evidence)
        return FaultyModule(changed[0], hints=(hint,))


@dataclass
class BlockTrial:
    """Judges every call inside a port's block: does it return what it should?

    `agreeing` is another block of the port that agrees with the reference's. `weights`
    tells which weights of this block are known to be right or wrong.
    """

    search: PortSearch
    block: PortBlock
    agreeing: PortBlock | None

    def __post_init__(self) -> None:
        search, block, agreeing = self.search, self.block, self.agreeing
        parts = self._parts(block)
        wrong = []
        if agreeing is not None:
            self.counterparts = self._learn(agreeing, reordered=True)
            # Weights must consist of the reference's as in the agreeing block.
            learned = learn_weights(*self._parts(agreeing), reordered=True)
            known = _oriented_weights(parts[0])
            for name, weight in parts[1].named_parameters():
                if name not in learned:
                    continue
                rows = [
                    known[row.weight, row.transposed][row.number]
                    for row in learned[name]
                ]
                source = torch.stack(rows).double()
                difference = (_matrix(weight).double() - source).norm()
                if float(difference) > search.noise.envelope * float(source.norm()):
                    wrong.append(name)
        else:
            # Without a block that agrees, another order of columns may be the fault.
            learned = learn_weights(*parts, reordered=False)
            self.counterparts = self._learn(block, reordered=False)
            # Modules that hold exactly the weights of one of the reference's are pairs.
            # They may be split, fused or transposed.
            holders = {}
            for key, call in block.reference.calls.items():
                # Inner calls come later, so the smallest module with these weights
                # remains.
                part = search.reference.part(call.path)
                holders[frozenset(_weight_paths(key, part))] = key
            for key, call in block.port.calls.items():
                part = search.candidate.part(call.path)
                names = _weight_paths(key, part)
                if not names or not learned.keys() >= set(names):
                    continue
                sources = set()
                for name in names:
                    sources |= {row.weight for row in learned[name]}
                partner = holders.get(frozenset(sources))
                if partner is None:
                    continue
                other = search.reference.part(block.reference.calls[partner].path)
                count = sum(weight.numel() for weight in part.parameters())
                if count == sum(weight.numel() for weight in other.parameters()):
                    self._pair_calls(key, partner)
        path = block.port.block.path
        self.weights = {f"{path}.{name}": name not in wrong for name in learned}
        # What enters and leaves the two blocks are the layers themselves.
        self._pair_calls(("", 0), ("", 0))
        self.keys = {call: key for key, call in block.port.calls.items()}
        self._verdicts: dict[ModuleCall, Verdict | None] = {}

    def _parts(self, block: PortBlock) -> tuple[nn.Module, nn.Module]:
        """Return the modules of a block."""
        return (
            self.search.reference.part(block.reference.block.path),
            self.search.candidate.part(block.port.block.path),
        )

    def _pair_calls(self, key: CallKey, partner: CallKey) -> None:
        """Pair what enters and leaves two calls, where it has the same shape."""
        sides: tuple[Side, ...] = ("input", "output")
        for side in sides:
            place = BlockTensor(key, side)
            other = BlockTensor(partner, side)
            tensor = self.block.port.tensors.get(place)
            expected = self.block.reference.tensors.get(other)
            if tensor is None or expected is None or tensor.shape != expected.shape:
                continue
            self.counterparts[place] = [SharedColumns(other, ALL, ALL)]

    def _learn(self, block: PortBlock, *, reordered: bool) -> Counterparts:
        """Find the counterpart of every tensor in a port's block.

        With `reordered`, a tensor may have the reference's columns in another order.
        """
        counterparts = {}
        for place, rows in block.actual.items():
            known = {
                other: values
                for other, values in block.expected.items()
                if len(values) == len(rows)
            }
            columns = self._columns(rows, known, reordered=reordered)
            if columns:
                counterparts[place] = columns
        return counterparts

    def _columns(
        self, rows: Tensor, known: Mapping[BlockTensor, Tensor], *, reordered: bool
    ) -> list[SharedColumns]:
        """Find a tensor of the port among those of the reference."""
        same = self.search.same
        width = rows.shape[1]
        for place, values in known.items():
            if values.shape == rows.shape and same(values, rows):
                return [SharedColumns(place, ALL, ALL)]
        # It may be a part of a wider tensor: one of fused projections. These have equal
        # or related widths, so slices start at multiples.
        for place, values in known.items():
            whole = values.shape[1]
            for start in range(0, whole - width + 1, math.gcd(width, whole)):
                columns = slice(start, start + width)
                if whole > width and same(values[:, columns], rows):
                    return [SharedColumns(place, columns, ALL)]
        # It may consist of several tensors: projections that the port fuses.
        tiles = []
        start = 0
        while start < width:
            for place, values in known.items():
                columns = slice(start, start + values.shape[1])
                fits = place.side == "output" and columns.stop <= width
                if fits and same(values, rows[:, columns]):
                    tiles.append(SharedColumns(place, ALL, columns))
                    start = columns.stop
                    break
            else:
                break
        if start == width:
            return tiles
        # It may have the columns of another in another order, as in Meta's layout of
        # rotary positions.
        for place, values in known.items():
            is_output = values.shape == rows.shape and place.side == "output"
            if not reordered or width > MOST_COLUMNS or not is_output:
                continue
            samples = rows[:SAMPLE].T.double(), values[:SAMPLE].T.double()
            order = torch.cdist(*samples).argmin(1)
            is_permutation = len(set(order.tolist())) == width
            if is_permutation and same(values[:, order], rows):
                return [SharedColumns(place, order, ALL)]
        return []

    def innermost_wrong(self, call: ModuleCall) -> ModuleCall | None:
        """Find the innermost call that is wrong, first in the order of the pass."""
        for inner in call.inner:
            wrong = self.innermost_wrong(inner)
            if wrong is not None:
                return wrong
        verdict = self.verdict(call)
        return None if verdict is None or verdict <= 1 else call

    def verdict(self, call: ModuleCall) -> Verdict | None:
        """Judge what a call does by itself; None if that cannot be known."""
        if call not in self._verdicts:
            self._verdicts[call] = self._judge(self.keys[call])
        return self._verdicts[call]

    def _judge(self, key: CallKey) -> Verdict | None:
        returned = BlockTensor(key, "output")
        if returned not in self.counterparts:
            return None
        outputs = []
        for reference, _, port in self.block.runs:
            output = self._output_on_reference_input(key, reference, port)
            if output is not None:
                outputs.append(_as_rows(output))
        if len(outputs) == len(self.block.runs):
            return self._compare(returned, torch.cat(outputs))
        return self._compare(returned) if self._is_input_right(key) else None

    def _output_on_reference_input(
        self, key: CallKey, reference: BlockCalls, port: BlockCalls
    ) -> Tensor | None:
        """Call a part of the port on the reference's tensor in place of its input.

        The result is None if the reference has no such tensor.
        """
        place = self._identical_tensor(BlockTensor(key, "input"))
        call = port.calls.get(key)
        if place is None or call is None or call.state is None:
            return None
        expected = reference.tensors.get(place)
        if expected is None or expected.numel() != call.state.numel():
            return None
        state = expected.reshape(call.state.shape).to(call.state)
        return hooks.first_tensor(self.search.repeat(call.with_state(state)))

    def _identical_tensor(self, place: BlockTensor) -> BlockTensor | None:
        """Return the reference's tensor if the port's is the same, column by column."""
        for source, columns, port_columns in self.counterparts.get(place, ()):
            if columns is ALL and port_columns is ALL:
                return source
        return None

    def _is_input_right(self, key: CallKey) -> bool:
        """Check the input of a call: directly, or by a right call on the same tensor.

        A shared input counts only if the calls share it in the agreeing block too.
        """
        entered = self._compare(BlockTensor(key, "input"))
        if entered is not None:
            return entered <= 1
        if self.agreeing is None:
            return False
        for other, call in self.block.port.calls.items():
            if other == key or call.inner:
                continue
            is_shared = self.block.share_input(key, other)
            if is_shared and self.agreeing.share_input(key, other):
                verdict = self._compare(BlockTensor(other, "output"))
                if verdict is not None and verdict <= 1:
                    return True
        return False

    def _compare(
        self, place: BlockTensor, rows: Tensor | None = None
    ) -> Verdict | None:
        """Compare rows of a tensor with its counterpart; the worst columns count.

        The rows are the tensor's own, or those that are given.
        """
        if rows is None:
            rows = self.block.actual.get(place)
        if rows is None or place not in self.counterparts:
            return None
        verdicts = []
        for source, selected, columns in self.counterparts[place]:
            expected = self.block.expected.get(source)
            if expected is None or len(expected) != len(rows):
                return None
            exact = self.block.exact.get(source)
            exact = None if exact is None else exact[:, selected]
            actual = rows[:, columns]
            verdicts.append(self.search.judge(expected[:, selected], actual, exact))
        return max(verdicts)

    def fault(self, call: ModuleCall) -> FaultyModule:
        """Describe the module at fault, and say why no smaller one is certain."""
        hints = []
        unknown = list(dict.fromkeys(self._unknown_parts(call)))
        if unknown:
            where = ""
            if self.agreeing is None:
                where = ", and no block agrees to learn from"
            evidence = (
                f"{_listed(unknown)} could not be compared: no tensor of the reference"
                f" matches{where}. So nothing smaller than `{call.path}` is certain."
            )
            hints.append(Hint(fault="not_compared", evidence=evidence))
        hints += self._other_arguments(call)
        own_code = not hints and self._only_code_is_left(call)
        key = self.keys[call]
        (reference, _, port) = self.block.runs[0]
        place = self._identical_tensor(BlockTensor(key, "output"))
        partner = None
        if place is not None and place.side == "output":
            partner = reference.calls.get(place.call)
        returned = self._output_on_reference_input(key, reference, port)
        if returned is None:
            returned = call.output
        output = None
        if partner is not None and partner.output is not None and returned is not None:
            output = returned.reshape(partner.output.shape)
            output = output.to(self.search.reference.device)
        fault = FaultyModule(call.path, own_code, partner, output, tuple(hints))
        wrong = [
            name
            for name, is_right in self.weights.items()
            if not is_right and name.startswith(f"{call.path}.")
        ]
        if not wrong:
            return fault
        words = "Other than the reference's, unlike in blocks that agree"
        evidence = f"{words}: {_listed(wrong)}."
        hint = Hint(fault="changed_weight", evidence=evidence)
        # The smallest module that holds all weights which are wrong.
        levels = zip(*[name.split(".")[:-1] for name in wrong], strict=False)
        shared = takewhile(lambda names: len(set(names)) == 1, levels)
        path = ".".join(names[0] for names in shared)
        if path == call.path:
            return replace(fault, own_code=False, hints=(hint, *hints))
        return FaultyModule(path, hints=(hint,))

    def _unknown_parts(self, call: ModuleCall) -> list[str]:
        """Return the outermost parts inside a call that could not be judged."""
        unknown = []
        for inner in call.inner:
            is_unknown = self.verdict(inner) is None
            unknown += [inner.path] if is_unknown else self._unknown_parts(inner)
        return unknown

    def _only_code_is_left(self, call: ModuleCall) -> bool:
        """Check that a module has parts and that uncalled ones have right weights.

        A part may be used without being called, by its weights alone.
        """
        part = self.search.candidate.part(call.path)
        called = {inner.path for inner in call.walk() if inner is not call}
        for path, inner_part in parts_inside(part, call.path).items():
            if path in called:
                continue
            for name in weights_of(inner_part):
                if not self.weights.get(f"{path}.{name}", False):
                    return False
        return bool(part._modules)

    def _other_arguments(self, call: ModuleCall) -> list[Hint]:
        """Name the tensors that a part receives beside the state.

        There is nothing to say if parts of the agreeing block receive the same.
        """
        tensors = tensors_in((call.args, call.kwargs))
        others = [tensor for tensor in tensors if tensor is not call.state]
        known = []
        if self.agreeing is not None:
            for other in self.agreeing.port.block.walk():
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


def _listed(names: Sequence[str]) -> str:
    """List a few names, and count the rest."""
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMED])
    rest = len(names) - MOST_NAMED
    return f"{listed} and {rest} more" if rest > 0 else listed


def _weight_paths(key: CallKey, part: nn.Module) -> list[str]:
    """Return the weights inside a module by their paths within the block."""
    return [f"{key[0]}.{name}".lstrip(".") for name, _ in part.named_parameters()]


def _all_among(weights: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    """Check that every weight is among the known ones, possibly transposed."""
    for weight in weights:
        forms = [weight, weight.mT] if weight.ndim > 1 else [weight]
        if not any(equal(*pair) for pair in product(forms, known)):
            return False
    return True


def _matrices(part: nn.Module) -> list[Tensor]:
    """Return all matrices inside a module."""
    return [weight.detach() for weight in part.parameters() if weight.ndim > 1]


def _cosine(weight: Tensor, other: Tensor) -> float:
    """Return the cosine of two weights, as they are or transposed; -1 if none fits."""
    values = weight.double().cpu()
    expected = other.double().cpu()
    best = -1.0
    for form in [expected, expected.T] if expected.ndim == 2 else [expected]:
        if form.shape == values.shape:
            flat = values.flatten(), form.flatten()
            best = max(best, float(nn.functional.cosine_similarity(*flat, dim=0)))
    return best


class SourceRow(NamedTuple):
    """A row of a weight of the reference, perhaps of the transposed weight."""

    weight: str
    transposed: bool
    number: int


def learn_weights(
    reference: nn.Module, port: nn.Module, *, reordered: bool
) -> dict[str, list[SourceRow]]:
    """Find the rows of each weight of a port's block among those of the reference's.

    With `reordered`, the rows may be in another order. A weight with a row that the
    reference has several times is left out, unless it is the next row of a weight.
    """
    known: dict[bytes, list[SourceRow]] = {}
    for (name, transposed), rows in _oriented_weights(reference).items():
        for number, row in enumerate(_bytes_of_rows(rows)):
            known.setdefault(row, []).append(SourceRow(name, transposed, number))
    learned = {}
    for name, weight in port.named_parameters():
        sources: list[SourceRow] = []
        for row in _bytes_of_rows(_matrix(weight)):
            places = known.get(row, [])
            if sources:
                following = sources[-1]._replace(number=sources[-1].number + 1)
                if following in places:
                    places = [following]
            if len(places) != 1:
                sources = []
                break
            sources += places
        breaks = []
        for source, following in pairwise(sources):
            is_next = following.number == source.number + 1
            breaks.append(source.weight == following.weight and not is_next)
        if sources and (reordered or not any(breaks)):
            learned[name] = sources
    return learned


def _oriented_weights(module: nn.Module) -> dict[tuple[str, bool], Tensor]:
    """Return each weight as a matrix, and each matrix also transposed."""
    oriented = {}
    for name, weight in module.named_parameters():
        oriented[name, False] = _matrix(weight)
        if weight.ndim > 1:
            oriented[name, True] = _matrix(weight.mT)
    return oriented


def _matrix(weight: Tensor) -> Tensor:
    """Flatten a weight to rows; a vector is a single row."""
    width = weight.shape[-1] if weight.ndim else 1
    rows = weight.detach().cpu().reshape(-1, width)
    # `contiguous` would keep odd strides of axes with a single element, and these have
    # no bytes to view.
    return rows.clone(memory_format=torch.contiguous_format)


def _bytes_of_rows(rows: Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]
