"""Batching: whether texts may go through a model in padded batches.

Padding is not safe in every model, so it is tried on the model itself: texts of
different lengths together and apart. A model that gives a text other states, or other
logits, in a batch than by itself is run text by text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hiddenscope.discovery import state_at, trial_ids
from hiddenscope.errors import PassError, is_out_of_memory
from hiddenscope.modules import trials
from hiddenscope.modules.quantised import batch_dependence
from hiddenscope.passes import (
    Batching,
    Inputs,
    PaddedBatch,
    Pass,
    PassModel,
    buffers_for,
    run_pass,
    states_in,
    token_logits,
)
from hiddenscope.passes.buffers import one_or_pair, stacks_in
from hiddenscope.passes.resume import trial_texts
from hiddenscope.states import States
from hiddenscope.states.mixed import one_tensor

TRIAL_LENGTHS = (3, 11)
TRIAL_TARGET_LENGTHS = (6, 2)


def try_batching(model: PassModel) -> Batching:
    """Compare every state and logit of texts that are run together and apart."""
    inputs = trial_texts(model, TRIAL_LENGTHS, seed=2)
    if model.encoder_decoder:
        inputs = inputs.with_targets(trial_texts(model, TRIAL_TARGET_LENGTHS, seed=3))
    try:
        together = _run_batch(model, inputs)
        worst = max(
            _disagreement_of_text(model, together, inputs, text)
            for text in range(len(inputs))
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"a padded batch stopped with {type(error).__name__}: {error}"
        return Batching(False, math.inf, reason)
    needs_mask = not _same_without_mask(model)
    config: Any = getattr(model.module, "config", None)
    # BigBird.
    if getattr(config, "attention_type", None) == "block_sparse":
        reason = "its sparse attention depends on the longest text of a batch"
        return Batching(False, worst, reason, needs_mask)
    dependence = batch_dependence(model.module)
    if dependence:
        return Batching(False, worst, dependence, needs_mask)
    if _breaks_ties(config, model.text_encoder.window):
        reason = (
            "of many tokens its attention keeps some, and which of two equal ones"
            " depends on the padding"
        )
        return Batching(False, worst, reason, needs_mask)
    if worst <= 1:
        reason = (
            "texts padded on the right gave the same states as alone, within rounding"
        )
        return Batching(True, worst, reason, needs_mask, _rope_switch(config))
    reason = (
        f"texts in a padded batch were off by {worst:,.0f} times the rounding tolerance"
    )
    return Batching(False, worst, reason, needs_mask)


def _breaks_ties(config: Any, window: int | None) -> bool:
    """Tell whether a text may be so long that attention drops tokens.

    Doge keeps the tokens with the best scores, and the same word has the same score
    twice.
    """
    most = getattr(config, "keep_window_size", None)
    return isinstance(most, int) and (window is None or window > most)


def _rope_switch(config: Any) -> int | None:
    """Return the length beyond which LongRoPE scales rotary positions.

    One such text changes its whole batch.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    name = "original_max_position_embeddings"
    length = rope.get(name) or getattr(config, name, None)
    return length if isinstance(length, int) else None


def _same_without_mask(model: PassModel) -> bool:
    """Tell whether a mask that hides nothing changes nothing, bit for bit."""
    texts = trial_ids(model.module, 2, min(6, model.text_encoder.window or 6), seed=5)
    # The padding token may be part of a text; a window of one token has no second.
    texts[:, 1:2] = model.pad
    targets = Inputs(((1, 2), (3, 4))) if model.encoder_decoder else None
    ids = tuple(tuple(row) for row in texts.tolist())
    batch = Inputs(ids, targets=targets).pad(model)
    tap = model.anatomy.stacks[0].proof.taps[-1]
    masked = batch.arguments(model.module, masked=True)
    unmasked = batch.arguments(model.module, masked=False)
    with_mask = state_at(model.module, masked, tap, texts.shape[1])
    without_mask = state_at(model.module, unmasked, tap, texts.shape[1])
    return torch.equal(with_mask, without_mask)


class _Rows(NamedTuple):
    """Values [row, token, width], with the depth of each row."""

    values: Tensor
    depths: list[int]


def _disagreement_of_text(
    model: PassModel, together: Pass, inputs: Inputs, text: int
) -> float:
    """Return how far one text of a batch is off its own pass, in tolerances."""
    single = _rows(_run_batch(model, inputs.some([text])))
    batched = _rows_of_text(together, inputs, text)
    worst = _largest_disagreement(single, batched)
    if worst <= 1:
        return worst
    # A batch of another shape differs by rounding, even of the same text twice.
    twice = inputs.some([text, text])
    doubled = _rows_of_text(_run_batch(model, twice), twice, 0)
    return _largest_disagreement(single, batched, doubled)


def _largest_disagreement(
    single: Sequence[_Rows],
    batched: Sequence[_Rows],
    doubled: Sequence[_Rows] | None = None,
) -> float:
    worst = []
    for number, (rows, others) in enumerate(zip(single, batched, strict=True)):
        repeated = None if doubled is None else doubled[number].values
        worst.append(
            trials.disagreement(rows.values, others.values, rows.depths, repeated)
        )
    return max(worst)


def states_disagreement(states: States, others: States) -> float:
    """Return the largest difference between the same states computed twice.

    It is in units of the rounding tolerance.
    """
    values, other_values = one_tensor(states.values), one_tensor(others.values)
    return trials.disagreement(values, other_values, _depths(states))


def _depths(states: States) -> list[int]:
    """Return the number of blocks before each site of some states."""
    depths = []
    for site in states.sites:
        depths.append(len(states.sites) if site.layer is None else site.layer)
    return depths


def _rows(result: Pass) -> list[_Rows]:
    """Return the states of each stack and the logits."""
    rows = []
    for part in stacks_in(result.states):
        rows.append(_Rows(one_tensor(part.values), _depths(part)))
    if result.logits is not None:
        depth = sum(max(part.depths) for part in rows)
        rows.append(_Rows(result.logits[None], [depth]))
    return rows


def _rows_of_text(result: Pass, inputs: Inputs, text: int) -> list[_Rows]:
    """Return the states and logits of one text of a batch."""
    states = one_or_pair([part.of(text) for part in stacks_in(result.states)])
    logits = result.logits
    if logits is not None:
        logits = torch.split(logits, inputs.of("decoder").lengths)[text]
    return _rows(Pass(states, logits))


def _run_batch(model: PassModel, inputs: Inputs) -> Pass:
    """Run the texts as one batch, whether padding is safe or not."""
    batch = inputs.pad(model)
    has_logits = model.anatomy.makes_logits
    buffers = buffers_for(model, model.anatomy.select("layer.*"), inputs)
    output = run_pass(model, batch, range(len(inputs)), buffers, logits=has_logits)
    return Pass(states_in(buffers), _logits(output, batch, model))


def _logits(output: Any, batch: PaddedBatch, model: PassModel) -> Tensor | None:
    """Return the logits if the head gives one row per token."""
    if not model.anatomy.makes_logits:
        return None
    try:
        return token_logits(output, batch, model)
    except PassError:
        return None
