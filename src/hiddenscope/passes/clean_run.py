"""Clean runs: unpatched passes over some texts, with all that a sweep starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hiddenscope.discovery import accepts, trial_ids
from hiddenscope.errors import PassError, is_out_of_memory
from hiddenscope.modules import hooks, trials
from hiddenscope.passes.buffers import buffers_for
from hiddenscope.passes.inputs import Inputs, Texts
from hiddenscope.passes.protocol import PassModel, require_recordable
from hiddenscope.passes.record import (
    batch_logits,
    check_targets,
    load_with_head,
    run_pass,
)
from hiddenscope.passes.resume import with_cache
from hiddenscope.sites import Site

# Enough for a first token, a middle one and some after it, which the trials of a sweep
# patch and read. Encoder and decoder differ in length, so that a mix-up shows.
TRIAL_TOKENS = 7
TRIAL_TARGETS = 5
# Any number does: each trial has its own, and draws the same texts each time.
TRIAL_SEED = 9


@dataclass(frozen=True, eq=False)
class CleanRun:
    """The unpatched pass of one text: its states, and its logits [token, vocabulary].

    `row` is its number in the batch that it was run in, and `padded_length` the length
    of that batch, in an encoder-decoder that of the targets. `cache` holds the keys and
    values of the whole batch, and `encoder_output` the encoder's last state of this
    text alone.
    """

    inputs: Inputs
    states: Mapping[Site, Tensor]
    logits: Tensor
    row: int
    padded_length: int
    cache: Any = None
    encoder_output: Tensor | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the token ids of the text."""
        return self.inputs.ids[0]

    @property
    def targets(self) -> tuple[int, ...] | None:
        """Return the token ids of the decoder's text, in an encoder-decoder."""
        return None if self.inputs.targets is None else self.inputs.targets.ids[0]

    def input_ids(self, stack: str | None) -> tuple[int, ...]:
        """Return the token ids that a stack works on."""
        return self.inputs.of(stack).ids[0]


def run_clean(
    model: PassModel,
    texts: Texts | Inputs,
    sites: Sequence[Site],
    *,
    targets: Texts | Inputs | None = None,
) -> list[CleanRun]:
    """Run some texts unpatched, in one batch where that is safe.

    Every layer is kept besides the requested sites, because a variant joins the batch
    with the clean state of the last layer before its first patch, or of the patched
    layer.
    """
    require_recordable(model.module)
    inputs = model.encode(texts, targets=targets)
    if not model.anatomy.makes_logits:
        raise PassError(
            f"No logits of {model.anatomy.name}",
            "it has no language-model head",
            load_with_head(model),
        )
    check_targets(model, inputs, (), logits=True)
    recorded = tuple(sorted({*model.anatomy.select("layer.*"), *sites}))
    cached = _keeps_cache(model)
    if _may_share_batch(model, inputs):
        return list(_run_batch(model, inputs, recorded, cached))
    runs: list[CleanRun] = []
    for text in range(len(inputs)):
        runs += _run_batch(model, inputs.some([text]), recorded, cached)
    return runs


def logits_tolerance(model: PassModel) -> float:
    """Return how far rounding may move logits, as a share of their norm."""
    depth = sum(stack.depth for stack in model.anatomy.stacks)
    return trials.tolerance(model.dtype, depth)


def trial_inputs(model: PassModel) -> Inputs:
    """Return two short texts for a trial, with targets for a decoder."""
    length = min(TRIAL_TOKENS, model.text_encoder.window or TRIAL_TOKENS)
    ids = trial_ids(model.module, 4, length, seed=TRIAL_SEED).tolist()
    texts = tuple(tuple(row) for row in ids[:2])
    if not model.encoder_decoder:
        return Inputs(texts)
    targets = tuple(tuple(row[:TRIAL_TARGETS]) for row in ids[2:])
    return Inputs(texts, targets=Inputs(targets))


def _may_share_batch(model: PassModel, inputs: Inputs) -> bool:
    if inputs.pad(model).has_padding and not model.batching.padding_safe:
        return False
    # With LongRoPE, a text beyond the switch changes the rotary frequencies of its
    # whole batch.
    switch = model.batching.rope_switch
    return switch is None or not min(inputs.lengths) <= switch < max(inputs.lengths)


def _keeps_cache(model: PassModel) -> bool:
    """Tell whether a pass over a whole text may keep a cache.

    With a cache FSMT has no causal mask, and ProphetNet stops with an error.
    """
    if "use_cache" not in accepts(model.module):
        return False
    return model.trials.once("keep cache", lambda: _try_cache(model), form=bool)


def _try_cache(model: PassModel) -> bool:
    inputs = trial_inputs(model)
    try:
        plain = list(_run_batch(model, inputs, (), cached=False))
        cached = list(_run_batch(model, inputs, (), cached=True))
    except Exception as error:
        # The model's own code may raise anything.
        if isinstance(error, PassError) or is_out_of_memory(error):
            raise
        return False
    tolerance = logits_tolerance(model)
    for a, b in zip(plain, cached, strict=True):
        difference = (a.logits - b.logits).norm()
        # `not <=` refuses a NaN as well, which `>` would let through.
        if not difference <= tolerance * a.logits.norm():
            return False
    return True


def _run_batch(
    model: PassModel, inputs: Inputs, sites: Sequence[Site], cached: bool
) -> Iterator[CleanRun]:
    """Run some texts as one batch; their states stay on the device."""
    batch = inputs.pad(model)
    buffers = buffers_for(model, sites, inputs, keep="device")
    with model.lock, hooks.watching([with_cache(model.module, cached)]):
        output = run_pass(model, batch, range(len(inputs)), buffers, logits=True)
    states = {stack: buffer.states() for stack, buffer in buffers.items()}
    answering = batch.of_stack("decoder")
    logits = batch_logits(output, batch, model)
    encoded = getattr(output, "encoder_last_hidden_state", None)
    # Texts are padded on the right, so that the first rows are those of their tokens.
    for row in range(len(inputs)):
        encoder_output = None
        if encoded is not None:
            encoder_output = encoded[row : row + 1, : len(inputs.ids[row])]
        yield CleanRun(
            inputs.some([row]),
            {site: states[site.stack].of(row)[site] for site in sites},
            logits[row, : answering.lengths[row]],
            row,
            answering.ids.shape[1],
            getattr(output, "past_key_values", None),
            encoder_output,
        )
