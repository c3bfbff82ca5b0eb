"""Generation: the states of a text while the model writes it, with its cache on.

Each token's state is kept once, in the pass that first read the token. `generate` gives
some models other positions than a full pass does (RoBERTa-like decoders), so it is
tried once on the model itself, and a model that fails is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hiddenscope.discovery import trial_ids
from hiddenscope.errors import Error, PassError, TextError, is_out_of_memory
from hiddenscope.model.batching import states_disagreement
from hiddenscope.modules import autograd
from hiddenscope.modules.trials import config_values
from hiddenscope.passes import (
    Inputs,
    PassModel,
    Recording,
    load_with_head,
    record,
    recording,
)
from hiddenscope.passes.buffers import one_or_pair, stacks_in
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, States, join

TRIAL_PROMPT, TRIAL_TOKENS = 6, 4
# The names that configurations have for the distance that attention looks back.
WINDOW_SETTINGS = {
    "sliding_window",
    "sliding_window_size",
    "attention_window",
    "window_size",
    "attention_chunk_size",
    "chunk_size",
    "local_window",
    "attention_window_size",
    "context_length",
    "keep_window_size",
    "local_attention",
    "mamba_chunk_size",
    "block_size",
    "index_block_size",
}
# A cache adds up in another order than a full pass; wrong positions are thousands of
# times off.
CACHE_TOLERANCES = 8
# These options run several texts, or another model, in one pass.
REFUSED_OPTIONS = {
    "num_beams",
    "num_return_sequences",
    "num_beam_groups",
    "assistant_model",
    "prompt_lookup_num_tokens",
}


def generate(
    model: PassModel,
    prompt: Inputs,
    max_new_tokens: int,
    sites: SitePatterns,
    options: Mapping[str, Any],
) -> States | Pair:
    """Let the model continue a prompt, and return the states of every token it read.

    One token more is generated than is kept, because the model never reads the last
    token that `generate` chooses. Nor does it read an end-of-text token, which
    therefore has no state.
    """
    refused = []
    for name in sorted(REFUSED_OPTIONS & options.keys()):
        if options[name] not in (None, 1):
            refused.append(name)
    if refused:
        raise PassError(
            "Cannot capture states inside generate",
            f"{', '.join(refused)} runs several texts, or another model, in one pass",
            "Leave it out: one text is written, token by token.",
        )
    if max_new_tokens < 1:
        raise TextError(
            f"Cannot generate {max_new_tokens} new tokens",
            "there must be at least one",
            "Ask for more.",
        )
    length, window = len(prompt.ids[0]) + max_new_tokens, model.text_encoder.window
    if window and length > window and len(model.anatomy.stacks) == 1:
        raise TextError(
            f"Cannot generate {max_new_tokens:,} new tokens",
            f"with the prompt that makes {length:,} tokens, and {model.anatomy.name}"
            f" takes {window:,}",
            "Ask for fewer, or give a shorter prompt.",
        )
    if model.encoder_decoder and prompt.targets is None:
        start = Inputs(((model.text_encoder.required_start(),),))
        prompt = prompt.with_targets(start)
    with autograd.restored(), recording(model, sites) as recorded, torch.no_grad():
        (written,) = continue_texts(model, prompt, max_new_tokens + 1, options)
    return _assemble(model, recorded, prompt, written, max_new_tokens)


def refusal(model: PassModel, length: int) -> str:
    """Say why states from inside `generate` cannot be trusted; empty if they can.

    A cache with a limited view back (a sliding window) changes its behaviour once a
    text is longer, so that is tried by itself, with a prompt that is longer than the
    window, or than two of them where the text is.
    """
    prompt = TRIAL_PROMPT
    for window in attention_windows(model):
        if window < length:
            times = 2 if length > 2 * window else 1
            prompt = max(prompt, times * window + 2)
    settings = repr(config_values(getattr(model.module, "generation_config", None)))
    return model.trials.once(
        "generation", lambda: _try_generation(model, prompt), key=(prompt, settings)
    )


def attention_windows(model: PassModel) -> set[int]:
    """Return how far back attention looks, by every setting that says so."""
    windows: set[int] = set()
    for path, value in config_values(getattr(model.module, "config", None)):
        is_window = not WINDOW_SETTINGS.isdisjoint(path.split("."))
        if is_window and type(value) is int and value > 0:
            windows.add(value)
    return windows


def _try_generation(model: PassModel, prompt_length: int) -> str:
    """Say why generated states differ from those of one full pass; empty if not."""
    if not model.anatomy.stacks[-1].causal:
        return "it is not causal: each new token changes the states of the earlier ones"
    ids = trial_ids(model.module, 1, prompt_length, seed=4)[0].tolist()
    options = {"do_sample": False, "min_new_tokens": TRIAL_TOKENS + 1}
    try:
        generated = stacks_in(
            generate(model, Inputs((tuple(ids),)), TRIAL_TOKENS, "layer.*", options)
        )
        texts = [part.tokens.ids.tolist() for part in generated]
        targets = [texts[1]] if len(texts) > 1 else None
        whole = stacks_in(record(model, [texts[0]], "layer.*", targets=targets).states)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, Error):
            return str(error)
        return f"its generate stopped with {type(error).__name__}: {error}"
    pairs = zip(whole, generated, strict=True)
    worst = max(states_disagreement(full, part) for full, part in pairs)
    if worst <= CACHE_TOLERANCES:
        return ""
    return f"its states there are off by {worst:,.0f} times the rounding tolerance"


def continue_texts(
    model: PassModel, texts: Inputs, count: int, options: Mapping[str, Any]
) -> list[list[int]]:
    """Return texts of one length with the ids that the model writes after them.

    A decoder beside an encoder goes on after its targets, which are of one length too.
    """
    write: Any = getattr(model.module, "generate", None)
    if write is None or not getattr(model.module, "can_generate", lambda: True)():
        remedy = "Load it with task='causal-lm'."
        if model.encoder_decoder:
            remedy = load_with_head(model)
        raise PassError(
            f"Cannot generate with {model.anatomy.name}",
            "it has no language-model head, or no `generate` of transformers",
            remedy,
        )
    settings = {
        "pad_token_id": model.text_encoder.pad,
        "use_cache": True,
        "num_beams": 1,
        "num_return_sequences": 1,
        **options,
    }
    if "generation_config" not in options:
        settings.setdefault("do_sample", False)
    if texts.targets is not None:
        rows = texts.targets.ids
        settings = {
            "decoder_input_ids": torch.tensor(rows, device=model.device),
            # transformers would put its own start token before another.
            "decoder_start_token_id": [row[0] for row in rows],
            **settings,
        }
    ids = torch.tensor(texts.ids, device=model.device)
    mask = torch.ones_like(ids)
    try:
        output = write(ids, attention_mask=mask, max_new_tokens=count, **settings)
    except Exception as error:
        # An option may end in anything: offloaded caches assert that there is CUDA,
        # quantized ones import a package.
        if isinstance(error, Error) or is_out_of_memory(error):
            raise
        raise PassError(
            f"Cannot generate with {', '.join(options) or model.anatomy.name}",
            f"transformers' generate stopped with {type(error).__name__}:"
            f" {str(error)[:200]}",
            "Check the options, and the model's generation_config.",
        ) from error
    sequences: list[list[int]] = getattr(output, "sequences", output).tolist()
    return sequences


def _assemble(
    model: PassModel,
    recorded: Recording,
    prompt: Inputs,
    written: Sequence[int],
    max_new_tokens: int,
) -> States | Pair:
    """Join the states of every pass, as one text for each stack.

    They are those of the prompt in the first pass, and one of each that follows: a
    model without a cache reads the whole text each time, of which only the last token
    is new.
    """
    parts = []
    for stack, passes in recorded.by_stack().items():
        text, most = list(written), max_new_tokens
        (start,) = prompt.of(stack).lengths
        if stack == "encoder":
            text, most = list(prompt.ids[0]), 0
        read = 0
        pieces = []
        for states in passes:
            new = 1 if read else start
            piece = states.select(tokens=slice(-new, None))
            # Otherwise the states belong to another text than the one that is returned.
            if piece.tokens.ids.tolist() != text[read : read + new]:
                raise PassError(
                    "Cannot assemble the states of each token",
                    "generate ran the model on other tokens than those that it"
                    " returned",
                    "Leave out the option that causes it, or use capture().",
                )
            read += new
            pieces.append(piece)
        joined = join(pieces).select(tokens=slice(0, start + most))
        ids = tuple(text[: len(joined.tokens)])
        tokens = model.text_encoder.tokens(Inputs((ids,)))
        parts.append(replace(joined, tokens=tokens))
    for part in parts:
        part.check_finite()
    return one_or_pair(parts)
