"""Continuations: what a model writes after prompts, as it is or while it is steered."""

from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

from hiddenscope.analyses.steer.sweep import Intervention, masked_model
from hiddenscope.errors import TextError, without_panic
from hiddenscope.model import Model
from hiddenscope.model.generation import continue_texts
from hiddenscope.passes import Inputs, editing


def cannot_generate(model: Model) -> str:
    """Return why the model cannot continue a text; empty if it can."""
    if masked_model(model):
        return "it is a masked language model, which does not continue a text"
    module: Any = model.module
    if not hasattr(module, "can_generate") or not module.can_generate():
        return "its module has no generate method"
    return ""


def check_new_tokens(model: Model, prompts: Inputs, new_tokens: int) -> None:
    """Refuse more new tokens than the model takes."""
    encoder = model.text_encoder
    window = encoder.window
    if prompts.targets is not None:
        window = encoder.target_window or window
    length = max(prompts.of("decoder").lengths) + new_tokens
    if window and length > window:
        reason = (
            f"with the longest prompt that makes {length:,} tokens, and {model.name}"
            f" takes {window:,}"
        )
        raise TextError(
            f"new_tokens is {new_tokens:,}", reason, "Give fewer, or shorter prompts."
        )


def continue_prompts(
    model: Model,
    prompts: Inputs,
    new_tokens: int,
    intervention: Intervention | None = None,
) -> list[list[str]]:
    """Continue each prompt greedily, once for each strength."""
    tokenizer: Any = model.tokenizer
    problem = f"Cannot decode what {model.name} wrote"
    config = getattr(model.module, "generation_config", None)
    # Hugging Face has one id here, a list of them, or none.
    ends = getattr(config, "eos_token_id", None)
    end_ids = {ends} if isinstance(ends, int) else set(ends or ())
    copies = len(intervention.strengths) if intervention else 1
    texts = [[""] * len(prompts) for _ in range(copies)]
    decoded = prompts.of("decoder").lengths
    lengths = list(zip(prompts.lengths, decoded, strict=True))
    # One length at a time, so that nothing is padded.
    for length in sorted(set(lengths)):
        numbers = [number for number, other in enumerate(lengths) if other == length]
        steering: AbstractContextManager[None] = nullcontext()
        if intervention:
            steering = editing(model, intervention.changes(len(numbers)))
        with model.lock, steering:
            rows = prompts.some(numbers * copies)
            sequences = continue_texts(model, rows, new_tokens, {})
        for row, tokens in enumerate(sequences):
            copy, place = divmod(row, len(numbers))
            fresh = tokens[length[1] :]
            written = list(takewhile(lambda token: token not in end_ids, fresh))
            texts[copy][numbers[place]] = " ".join(map(str, written))
            if tokenizer is not None:
                with without_panic(TextError, problem, "Give new_tokens=0."):
                    texts[copy][numbers[place]] = tokenizer.decode(
                        written, clean_up_tokenization_spaces=False
                    )
    return texts
