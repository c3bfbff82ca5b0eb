"""Batching: whether texts may go through a model in padded batches.

Padding is not safe in every model, so it is tried on the model itself: texts of
different lengths together and apart. A model that gives a text other states, or other
logits, in a batch than by itself is run text by text.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hiddenscope.discovery import state_at, text_config, trial_ids
from hiddenscope.errors import PassError, is_out_of_memory
from hiddenscope.modules import trials
from hiddenscope.modules.quantised import batch_dependence
from hiddenscope.passes import (
    Batching,
    Inputs,
    PassModel,
    buffers_for,
    run_pass,
    states_in,
    token_logits,
)
from hiddenscope.passes.buffers import stacks_in
from hiddenscope.passes.resume import trial_texts
from hiddenscope.states import States
from hiddenscope.states.mixed import one_tensor

Rows: TypeAlias = list[tuple[Tensor, list[int]]]
"""What a pass gave for one text: values [row, token, width] of each stack and of the
logits, with the number of blocks before each row.
"""

TRIAL_LENGTHS = (3, 11)
TRIAL_TARGET_LENGTHS = (6, 2)


def try_batching(model: PassModel) -> Batching:
    """Compare every state and logit of texts that are run together and apart."""
    inputs = trial_texts(model, TRIAL_LENGTHS, seed=2)
    if model.encoder_decoder:
        inputs = inputs.with_targets(trial_texts(model, TRIAL_TARGET_LENGTHS, seed=3))
    worst = 0.0
    try:
        for text, batched in enumerate(_run_batch(model, inputs)):
            (single,) = _run_batch(model, inputs.some([text]))
            distance = _disagreement(single, batched)
            if distance > 1:
                # A batch of another shape differs by rounding, even of the same text
                # twice.
                doubled, _ = _run_batch(model, inputs.some([text, text]))
                distance = _disagreement(single, batched, doubled)
            worst = max(worst, distance)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"a padded batch stopped with {type(error).__name__}: {error}"
        return Batching(False, math.inf, reason)
    needs_mask = not _same_without_mask(model)
    reason = _reason_against(model, worst)
    if reason:
        return Batching(False, worst, reason, needs_mask)
    reason = "texts padded on the right gave the same states as alone, within rounding"
    return Batching(True, worst, reason, needs_mask, _rope_switch(model))


def _reason_against(model: PassModel, worst: float) -> str:
    """Say why texts must not share a batch; nothing if they may."""
    config: Any = getattr(model.module, "config", None)
    # BigBird.
    if getattr(config, "attention_type", None) == "block_sparse":
        return "its sparse attention depends on the longest text of a batch"
    dependence = batch_dependence(model.module)
    if dependence:
        return dependence
    # Doge keeps the tokens with the best scores, and the same word has the same score
    # twice.
    most = getattr(config, "keep_window_size", None)
    window = model.text_encoder.window
    if isinstance(most, int) and (window is None or window > most):
        return (
            "of many tokens its attention keeps some, and which of two equal ones"
            " depends on the padding"
        )
    if worst <= 1:
        return ""
    return (
        f"texts in a padded batch were off by {worst:,.0f} times the rounding tolerance"
    )


def _rope_switch(model: PassModel) -> int | None:
    """Return the length beyond which LongRoPE scales rotary positions.

    One such text changes its whole batch.
    """
    config = text_config(model.module)
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


def _run_batch(model: PassModel, inputs: Inputs) -> list[Rows]:
    """Run texts as one batch, padded whether that is safe or not."""
    batch = inputs.pad(model)
    has_logits = model.anatomy.makes_logits
    buffers = buffers_for(model, model.anatomy.select("layer.*"), inputs)
    output = run_pass(model, batch, range(len(inputs)), buffers, logits=has_logits)
    texts: list[Rows] = []
    parts = stacks_in(states_in(buffers))
    for text in range(len(inputs)):
        rows = []
        for part in parts:
            rows.append((one_tensor(part.of(text).values), _depths(part)))
        texts.append(rows)
    if not has_logits:
        return texts
    try:
        logits = token_logits(output, batch, model)
    except PassError:
        # The head gives no row per token.
        return texts
    depth = sum(max(_depths(part)) for part in parts)
    lengths = inputs.of("decoder").lengths
    for rows, values in zip(texts, torch.split(logits, lengths), strict=True):
        rows.append((values[None], [depth]))
    return texts


def _disagreement(single: Rows, batched: Rows, doubled: Rows | None = None) -> float:
    worst = []
    for number, (values, depths) in enumerate(single):
        repeated = None if doubled is None else doubled[number][0]
        others, _ = batched[number]
        worst.append(trials.disagreement(values, others, depths, repeated))
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
