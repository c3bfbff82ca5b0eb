"""A block of a port beside the reference's block, judged call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenscope.analyses.drift.calls import ModuleCall, parts_inside
from hiddenscope.analyses.drift.counterparts import (
    BlockTensor,
    CallKey,
    Counterpart,
    as_rows,
    calls_by_place,
    pair_calls,
    tensors_by_place,
)
from hiddenscope.analyses.drift.search import Search, Verdict
from hiddenscope.analyses.drift.weights import equal, weights_of
from hiddenscope.modules import hooks


@dataclass
class BlockRun:
    """The calls inside both blocks on one text, and in the reference's float64 copy."""

    reference: ModuleCall
    exact: ModuleCall | None
    port: ModuleCall


class PortBlock:
    """A block of both sides, run on equal input over some texts.

    `expected`, `exact` and `actual` hold the rows of all texts for each tensor of the
    reference, its float64 copy and the port. The calls are those of the first text.
    """

    def __init__(self, runs: Sequence[BlockRun]) -> None:
        self.runs = runs
        self.reference, self.port = runs[0].reference, runs[0].port
        self.expected = _joined([run.reference for run in runs])
        self.actual = _joined([run.port for run in runs])
        exact = [run.exact for run in runs if run.exact is not None]
        self.exact = _joined(exact) if len(exact) == len(runs) else {}

    def shares_input(self, key: CallKey, other: CallKey) -> bool:
        """Check whether two calls receive the same tensor."""
        tensor = self.actual.get(BlockTensor(*key, "input"))
        other_tensor = self.actual.get(BlockTensor(*other, "input"))
        if tensor is None or other_tensor is None:
            return False
        return equal(tensor, other_tensor)


def _joined(blocks: Sequence[ModuleCall]) -> dict[BlockTensor, Tensor]:
    """Join the tensors that all texts have with the same width."""
    texts = [tensors_by_place(block) for block in blocks]
    joined: dict[BlockTensor, Tensor] = {}
    for place in texts[0]:
        parts = [tensors[place] for tensors in texts if place in tensors]
        widths = {part.shape[1] for part in parts}
        if len(parts) == len(texts) and len(widths) == 1:
            joined[place] = torch.cat(parts)
    return joined


class BlockTrial:
    """Judges every call inside a port's block: does it return what it should?

    `agreeing` is another block of the port that agrees with the reference's, and
    `weights` tells which weights of this block are known to be right or wrong.
    """

    def __init__(
        self,
        search: Search,
        block: PortBlock,
        agreeing: PortBlock | None,
        counterparts: Mapping[BlockTensor, Counterpart],
        weights: Mapping[str, bool],
    ) -> None:
        self.search, self.block, self.agreeing = search, block, agreeing
        # What enters and leaves the two blocks are the layers themselves.
        layers = pair_calls(("", 0), block.port, ("", 0), block.reference)
        self.counterparts = {**counterparts, **layers}
        self.weights = weights
        self.calls = calls_by_place(block.port)
        self.keys = {id(call): key for key, call in self.calls.items()}
        self._verdicts: dict[CallKey, Verdict | None] = {}

    def innermost_wrong(self, call: ModuleCall) -> tuple[ModuleCall, Verdict] | None:
        """Find the innermost call that is wrong, first in the order of the pass."""
        for inner in call.inner:
            wrong = self.innermost_wrong(inner)
            if wrong is not None:
                return wrong
        verdict = self.verdict(call)
        if verdict is None or not verdict.wrong:
            return None
        return call, verdict

    def verdict(self, call: ModuleCall) -> Verdict | None:
        """Judge what a call does by itself; None if that cannot be known."""
        key = self.keys[id(call)]
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(key)
        return self._verdicts[key]

    def _judge(self, key: CallKey) -> Verdict | None:
        returned = BlockTensor(*key, "output")
        if returned not in self.counterparts:
            return None
        outputs = []
        for run in self.block.runs:
            output = self.output_on_reference_input(key, run)
            if output is not None:
                outputs.append(as_rows(output))
        if len(outputs) == len(self.block.runs):
            return self._compare(returned, torch.cat(outputs))
        if self._is_input_right(key):
            return self._compare_actual(returned)
        return None

    def output_on_reference_input(self, key: CallKey, run: BlockRun) -> Tensor | None:
        """Call a part of the port on the reference's tensor in place of its input.

        The result is None if the reference has no such tensor.
        """
        place = self._identical_tensor(BlockTensor(*key, "input"))
        call = calls_by_place(run.port).get(key)
        if place is None or call is None or call.state is None:
            return None
        expected = tensors_by_place(run.reference).get(place)
        if expected is None or expected.numel() != call.state.numel():
            return None
        state = expected.reshape(call.state.shape).to(call.state)
        candidate = self.search.candidate
        returned = call.with_state(state).repeat(
            candidate.part(call.path), candidate.device
        )
        return hooks.first_tensor(returned)

    def _identical_tensor(self, place: BlockTensor) -> BlockTensor | None:
        counterpart = self.counterparts.get(place)
        return None if counterpart is None else counterpart.identical_tensor

    def _is_input_right(self, key: CallKey) -> bool:
        """Check the input of a call: directly, or by a right call on the same tensor.

        A shared input counts only if the calls share it in the agreeing block too.
        """
        entered = self._compare_actual(BlockTensor(*key, "input"))
        if entered is not None:
            return not entered.wrong
        if self.agreeing is None:
            return False
        for other, call in self.calls.items():
            if other == key or call.inner:
                continue
            is_shared = self.block.shares_input(key, other)
            if is_shared and self.agreeing.shares_input(key, other):
                verdict = self._compare_actual(BlockTensor(*other, "output"))
                if verdict is not None and not verdict.wrong:
                    return True
        return False

    def _compare_actual(self, place: BlockTensor) -> Verdict | None:
        rows = self.block.actual.get(place)
        return None if rows is None else self._compare(place, rows)

    def _compare(self, place: BlockTensor, rows: Tensor) -> Verdict | None:
        """Compare rows of a tensor with its counterpart; the worst columns count."""
        counterpart = self.counterparts.get(place)
        if counterpart is None:
            return None
        verdicts = []
        for source, reference_columns, columns, _ in counterpart.columns:
            expected, exact = self.block.expected.get(source), None
            if expected is None or len(expected) != len(rows):
                return None
            if source in self.block.exact:
                exact = self.block.exact[source][:, reference_columns]
            verdicts.append(
                self.search.judge(
                    expected[:, reference_columns], rows[:, columns], exact
                )
            )
        return max(verdicts, key=lambda verdict: verdict.beyond)

    def unknown_parts(self, call: ModuleCall) -> list[str]:
        """Return the outermost parts inside a call that could not be judged."""
        unknown: list[str] = []
        for inner in call.inner:
            if self.verdict(inner) is None:
                unknown.append(inner.path)
            else:
                unknown += self.unknown_parts(inner)
        return list(dict.fromkeys(unknown))

    def only_code_is_left(self, call: ModuleCall) -> bool:
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

    def partner(self, call: ModuleCall) -> ModuleCall | None:
        """Return the reference's call whose output corresponds to this call's."""
        place = self._identical_tensor(BlockTensor(*self.keys[id(call)], "output"))
        if place is None or place.side != "output":
            return None
        calls = calls_by_place(self.block.reference)
        return calls.get((place.path, place.number))
