"""Generation: the states of a text while the model writes it, with its cache on.

Each token's state is kept once, in the pass that fed it in. `generate` gives some
models other positions than a full pass does (RoBERTa-like decoders), so it is tried
once on the model itself, and a model that fails is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hiddenscope.discovery import trial_ids
from hiddenscope.errors import Error, PassError, TextError
from hiddenscope.model.batching import disagreement
from hiddenscope.modules import autograd
from hiddenscope.modules.trials import config_values
from hiddenscope.passes import Inputs, PassModel, Recording, record, recording
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, States

TRIAL_PROMPT, TRIAL_TOKENS = 6, 4
# What configurations call the distance that attention looks back.
WINDOW_SETTINGS: tuple[str, ...] = (
    "sliding_window",
    "sliding_window_size",
    "attention_window",
    "window_size",
)
WINDOW_SETTINGS += (
    "attention_chunk_size",
    "chunk_size",
    "local_window",
    "attention_window_size",
    "context_length",
)
WINDOW_SETTINGS += (
    "keep_window_size",
    "local_attention",
    "mamba_chunk_size",
    "block_size",
    "index_block_size",
)
# A cache adds up in another order than a full pass; wrong positions are thousands of
# times off.
CACHE_TOLERANCES = 8
UNASSEMBLED = "Cannot assemble the states of each token"
ONE_TEXT = {
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
    """Let the model continue a prompt, and give the states of every token it was fed.

    One token more is generated than is kept, because the last token that `generate`
    chooses is never fed in; an end-of-text token is not either, and so has no state.
    """
    refused = sorted(
        name for name in ONE_TEXT & options.keys() if options[name] not in (None, 1)
    )
    if refused:
        reason = (
            f"{', '.join(refused)} runs several texts, or another model, in one pass"
        )
        raise PassError(
            "Cannot capture states inside generate",
            reason,
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
        reason = (
            f"with the prompt that makes {length:,} tokens, and {model.anatomy.name}"
            f" takes {window:,}"
        )
        raise TextError(
            f"Cannot generate {max_new_tokens:,} new tokens",
            reason,
            "Ask for fewer, or give a shorter prompt.",
        )
    if not model.anatomy.select(sites):
        raise PassError(
            "No sites to capture",
            "the list is empty",
            "Name at least one, as in sites='layer.*'.",
        )
    ids = torch.tensor([prompt.ids[0]], device=model.device)
    with autograd.restored(), recording(model, sites) as recorded, torch.no_grad():
        written = _written(model, ids, max_new_tokens + 1, options)
    return _assembled(model, recorded, prompt, written, max_new_tokens)


def refusal(model: PassModel, length: int) -> str:
    """Why the states from inside `generate` are not to be trusted for a text of so many
    tokens; empty if they are.

    A cache that looks back only so far (a sliding window) behaves otherwise once a text
    is longer, so that is tried by itself, with a prompt that is longer than the window,
    or than two of them where the text is.
    """
    windows = [window for window in attention_windows(model) if window < length]
    prompt = max(
        [
            TRIAL_PROMPT,
            *(window * (2 if length > 2 * window else 1) + 2 for window in windows),
        ]
    )
    how = repr(config_values(getattr(model.module, "generation_config", None)))
    return model.trials.once(
        "generation", lambda: _try_generation(model, prompt), key=(prompt, how)
    )


def attention_windows(model: PassModel) -> set[int]:
    """How far back attention looks, by every value of the configuration that says so."""
    config: Any = getattr(model.module, "config", None)
    parts = [
        config,
        *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})),
    ]
    for part in list(parts):
        parts += _layer_configs(part)
    values = [
        vars(part).get(name)
        for part in parts
        if hasattr(part, "__dict__")
        for name in WINDOW_SETTINGS
    ]
    flat = [
        item
        for value in values
        for item in (value if isinstance(value, list | tuple) else [value])
    ]
    return {
        item
        for item in flat
        if isinstance(item, int) and not isinstance(item, bool) and item > 0
    }


def _layer_configs(config: Any) -> list[Any]:
    """The configurations of single layers, where a model has them."""
    layers = getattr(config, "per_layer_config", None)
    if layers is None:
        return []
    try:
        return list(layers)
    # transformers gives every configuration such a list, which fails for one that names
    # no depth (MPT's attention).
    except AttributeError:
        return []


def _try_generation(model: PassModel, prompt_length: int) -> str:
    """Why generated states differ from those of one full pass; empty if they do not,
    within rounding.
    """
    if not model.anatomy.stacks[-1].causal:
        return "it is not causal: each new token changes the states of the earlier ones"
    prompt = Inputs(
        (tuple(trial_ids(model.module, 1, prompt_length, seed=4)[0].tolist()),)
    )
    try:
        made = generate(
            model,
            prompt,
            TRIAL_TOKENS,
            "layer.*",
            {"do_sample": False, "min_new_tokens": TRIAL_TOKENS + 1},
        )
        parts = [made.encoder, made.decoder] if isinstance(made, Pair) else [made]
        texts = [part.tokens.ids.tolist() for part in parts]
        whole = record(
            model, [texts[0]], "layer.*", targets=[texts[1]] if len(texts) > 1 else None
        ).states
    except Error as error:
        return str(error)
    except Exception as error:
        return f"its generate stopped with {type(error).__name__}: {error}"
    wholes = [whole.encoder, whole.decoder] if isinstance(whole, Pair) else [whole]
    worst = max(
        disagreement(full, part) for full, part in zip(wholes, parts, strict=True)
    )
    return (
        ""
        if worst <= CACHE_TOLERANCES
        else f"its states there are off by {worst:,.0f} times the rounding tolerance"
    )


def _written(
    model: PassModel, ids: Tensor, count: int, options: Mapping[str, Any]
) -> list[int]:
    """The ids that the model writes after a prompt."""
    write: Any = getattr(model.module, "generate", None)
    if write is None or not getattr(model.module, "can_generate", lambda: True)():
        reason = "it has no language-model head to generate with"
        raise PassError(
            f"Cannot generate with {model.anatomy.name}",
            reason,
            "Load it with task='causal-lm'.",
        )
    fixed = {
        "pad_token_id": model.text_encoder.pad,
        "use_cache": True,
        "num_beams": 1,
        "num_return_sequences": 1,
    }
    given = {**fixed, **options}
    if "generation_config" not in options:
        given.setdefault("do_sample", False)
    try:
        output = write(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **given
        )
    # An option may end in anything: offloaded caches assert that there is CUDA,
    # quantized ones import a package.
    except Exception as error:
        if isinstance(error, Error) or not options:
            raise
        reason = (
            f"transformers' generate stopped with {type(error).__name__}:"
            f" {str(error)[:200]}"
        )
        raise PassError(
            f"Cannot generate with {', '.join(options)}", reason, "Check these options."
        ) from error
    sequence: list[int] = getattr(output, "sequences", output)[0].tolist()
    return sequence


def _assembled(
    model: PassModel,
    recorded: Recording,
    prompt: Inputs,
    written: Sequence[int],
    new: int,
) -> States | Pair:
    """The states of every pass put end to end, as one text for each stack."""
    stacks = dict.fromkeys(
        site.stack for one_pass in recorded.recorded for site in one_pass.states
    )
    texts = {
        stack: prompt.ids[0] if stack == "encoder" else tuple(written)
        for stack in stacks
    }
    made = []
    for stack in stacks:
        start = 1 if stack == "decoder" else len(prompt.ids[0])
        states = _end_to_end(recorded, stack, start, texts[stack])
        most = len(texts[stack]) if stack == "encoder" else start + new
        length = min(next(iter(states.values())).shape[0], most)
        if any(len(value) < length for value in states.values()) or length < start:
            raise PassError(
                UNASSEMBLED,
                "generate did not run the model on some tokens",
                "Use capture() on the text.",
            )
        sites = tuple(sorted(states))
        tokens = model.text_encoder.tokens(Inputs((texts[stack][:length],)))
        values = torch.stack([states[site][:length] for site in sites])
        made.append(States(sites, values, tokens, model.source(stack)))
    for part in made:
        part.check_finite()
    return made[0] if len(made) == 1 else Pair(*made)


def _end_to_end(
    recorded: Recording, stack: str | None, start: int, text: Sequence[int]
) -> dict[Site, Tensor]:
    """One text's states at each site of a stack: `start` tokens of the first pass, and
    one of each that follows.

    A model without a cache is fed the whole text each time, of which only the last
    token is new. What each pass was fed must be what `generate` gave back in the end,
    or its states belong to something else.
    """
    parts: dict[Site, list[Tensor]] = {}
    read = 0
    for seen in recorded.recorded:
        if not any(site.stack == stack for site in seen.states):
            continue
        new = 1 if read else start
        ids = seen.ids(stack)
        if ids is None or ids[:, -new:].tolist() != [list(text[read : read + new])]:
            reason = (
                "generate ran the model on other tokens than those that it returned"
            )
            raise PassError(
                UNASSEMBLED,
                reason,
                "Leave out the option that causes it, or use capture().",
            )
        read += new
        for site, values in seen.states.items():
            if site.stack == stack:
                known = parts.setdefault(site, [])
                known.append(values[0, -1:] if known else values[0, -start:])
    return {site: torch.cat(values) for site, values in parts.items()}
