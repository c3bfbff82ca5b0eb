"""Batching: whether texts may go through a model in padded batches.

Padding is not safe in every model, so it is tried on the model itself: texts of
different lengths together and apart. A model that gives a text other states, or other
logits, in a batch than alone is run text by text.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hiddenscope.discovery import state_at, trial_ids
from hiddenscope.errors import PassError
from hiddenscope.modules import trials
from hiddenscope.passes import (
    Batching,
    Inputs,
    PaddedBatch,
    Pass,
    PassModel,
    buffers_for,
    run,
    states_in,
    token_logits,
)
from hiddenscope.passes.resume import trial_texts
from hiddenscope.states import Pair, States

LENGTHS = (3, 11)
TARGET_LENGTHS = (6, 2)


def try_batching(model: PassModel) -> Batching:
    """Run texts of different lengths together and apart, and compare every state and
    logit of every token.
    """
    window = model.text_encoder.window or max(LENGTHS)
    inputs = trial_texts(model, [min(length, window) for length in LENGTHS], seed=2)
    if model.encoder_decoder:
        inputs = inputs.with_targets(trial_texts(model, TARGET_LENGTHS, seed=3))
    try:
        together = _one_batch(model, inputs)
        worst = max(
            _difference(model, together, inputs, text) for text in range(len(inputs))
        )
    except Exception as error:
        return Batching(
            False,
            math.inf,
            f"a padded batch stopped with {type(error).__name__}: {error}",
        )
    masked = not _same_without_mask(model)
    config: Any = getattr(model.module, "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird
        return Batching(
            False,
            worst,
            "its sparse attention depends on the longest text of a batch",
            masked,
        )
    if _breaks_ties(config, model.text_encoder.window):
        reason = (
            "of many tokens its attention keeps some, and which of two equal ones"
            " depends on the padding"
        )
        return Batching(False, worst, reason, masked)
    if worst <= 1:
        reason = (
            "texts padded on the right gave the same states as alone, within rounding"
        )
        return Batching(True, worst, reason, masked, _rope_switch(config))
    reason = (
        f"texts in a padded batch were off by {worst:,.0f} times the rounding tolerance"
    )
    return Batching(False, worst, reason, masked)


def _breaks_ties(config: Any, window: int | None) -> bool:
    """Whether a text may be so long that Doge keeps the best tokens alone: the same
    word twice has the same score.
    """
    kept = getattr(config, "keep_window_size", None)
    return isinstance(kept, int) and (window is None or window > kept)


def _rope_switch(config: Any) -> int | None:
    """The length beyond which LongRoPE scales rotary positions: one such text does it
    to its whole batch.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    length = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return length if isinstance(length, int) else None


def _same_without_mask(model: PassModel) -> bool:
    """Whether a mask that hides nothing changes nothing, bit for bit, even where the
    text holds the padding token.
    """
    texts = trial_ids(model.module, 2, min(6, model.text_encoder.window or 6), seed=5)
    texts[:, 1:2] = model.pad  # a window of one token has no second
    targets = Inputs(((1, 2), (3, 4))) if model.encoder_decoder else None
    batch = Inputs(tuple(map(tuple, texts.tolist())), targets=targets).pad(model)
    tap = model.anatomy.stacks[0].proof.taps[-1]
    given = [batch.arguments(model.module, masked=masked) for masked in (True, False)]
    with_mask, without = (
        state_at(model.module, inputs, tap, texts.shape[1]) for inputs in given
    )
    return torch.equal(with_mask, without)


def _difference(model: PassModel, together: Pass, inputs: Inputs, text: int) -> float:
    """How far one text of a batch is off what it gives alone, in units of the rounding
    tolerance.
    """
    one = inputs.some([text])
    alone, batched = _one_batch(model, one), _text_of(together, inputs, text)
    worst = max(map(difference, alone_parts := _tensors(alone), batched))
    if worst <= 1:
        return worst
    doubled = _text_of(
        _one_batch(model, inputs.some([text, text])), inputs.some([text, text]), 0
    )
    return max(map(difference, alone_parts, batched, doubled))


def difference(
    one: tuple[Tensor, list[int]],
    other: tuple[Tensor, list[int]],
    repeated: tuple[Tensor, list[int]] | None = None,
) -> float:
    """The disagreement of two computations of values [row, token, width], each with the
    depths of its rows.
    """
    return trials.disagreement(
        one[0], other[0], one[1], None if repeated is None else repeated[0]
    )


def disagreement(one: States, other: States) -> float:
    """The largest difference between two computations of the same states, in units of
    the rounding tolerance.
    """
    return trials.disagreement(one.values, other.values, depths_of(one))


def depths_of(states: States) -> list[int]:
    """After how many blocks each site of some states comes."""
    return [
        len(states.sites) if site.layer is None else site.layer for site in states.sites
    ]


def _tensors(made: Pass) -> list[tuple[Tensor, list[int]]]:
    """The states of each stack and the logits, with the depths of their rows."""
    states = made.states
    parts = [states.encoder, states.decoder] if isinstance(states, Pair) else [states]
    tensors = [(part.values, depths_of(part)) for part in parts]
    depth = sum(max(depths) for _, depths in tensors)
    return tensors if made.logits is None else [*tensors, (made.logits[None], [depth])]


def _text_of(made: Pass, inputs: Inputs, text: int) -> list[tuple[Tensor, list[int]]]:
    """The states and logits of one text of a batch."""
    states = made.states
    one = (
        Pair(states.encoder.of(text), states.decoder.of(text))
        if isinstance(states, Pair)
        else states.of(text)
    )
    logits = made.logits
    if logits is not None:
        logits = torch.split(logits, inputs.of("decoder").lengths)[text]
    return _tensors(Pass(one, logits))


def _one_batch(model: PassModel, inputs: Inputs) -> Pass:
    """The layers, and the logits where there is a head, of one pass over the texts,
    whether padding is safe or not.
    """
    batch = inputs.pad(model)
    buffers = buffers_for(model, model.anatomy.select("layer.*"), inputs)
    output = run(
        model, batch, range(len(inputs)), buffers, logits=model.anatomy.makes_logits
    )
    return Pass(states_in(buffers), _logits(output, batch, model))


def _logits(output: Any, batch: PaddedBatch, model: PassModel) -> Tensor | None:
    """The logits where the head gives one row per token."""
    if not model.anatomy.makes_logits:
        return None
    try:
        return token_logits(output, batch, model)
    except PassError:
        return None
