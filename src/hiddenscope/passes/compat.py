"""Old names, until every room has moved to Inputs; then this file goes."""

from collections.abc import Sequence
from typing import Any

from hiddenscope.passes.buffers import StackBuffer, buffers_for, states_in
from hiddenscope.passes.inputs import Inputs, PaddedBatch, compose
from hiddenscope.passes.protocol import ModelLike, recordable
from hiddenscope.passes.record import make_pass

Batch, Landing, Subject = PaddedBatch, StackBuffer, ModelLike
watchable, together = recordable, states_in


class Encoded(Inputs):  # noqa: D101
    def __init__(self, texts: Any, ids: Any, spans: Any = None) -> None:
        super().__init__(tuple(ids), texts, spans)


def make_batch(model: ModelLike, encoded: Inputs, targets: Inputs | None, texts: Sequence[int]) -> PaddedBatch:  # noqa: D103
    return encoded.with_targets(targets).some(texts).pad(model)


def prepare(model: ModelLike, texts: Any, targets: Any) -> tuple[Inputs, Inputs | None, PaddedBatch]:  # noqa: D103
    inputs = model.encode(texts, targets=targets)
    return inputs, inputs.targets, inputs.pad(model)


def landings(model: ModelLike, sites: Any, encoded: Inputs, targets: Inputs | None, dtype: Any = None) -> Any:  # noqa: D103
    return buffers_for(model, sites, encoded.with_targets(targets), dtype)


def make(model: ModelLike, prepared: Any, wanted: Any, *, logits: bool, grad: bool = False) -> Any:  # noqa: D103
    return make_pass(model, prepared[0].with_targets(prepared[1]), wanted, logits=logits, grad=grad)


def plan(lengths: Any, budget: int, *, padded: bool = True, turn: Any = None, another: int = 64) -> Any:  # noqa: D103
    return compose(lengths, budget, padded=padded, rope_switch=turn, overhead=another)
