"""Continuations: what a model writes after prompts, as it is or while it is steered."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hiddenscope.analyses.steer.intervention import Intervention
from hiddenscope.analyses.steer.reads import masked_model
from hiddenscope.errors import TextError, without_panic
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, editing


def cannot_generate(model: Model) -> str:
    """Return why the model cannot continue a text; empty if it can."""
    if masked_model(model):
        return "it is a masked language model, which does not continue a text"
    can_generate: Any = getattr(model.module, "can_generate", None)
    if can_generate is None or not can_generate():
        return "its module has no generate method"
    return ""


def check_new_tokens(model: Model, prompts: Inputs, new_tokens: int) -> None:
    """Refuse more new tokens than the model takes."""
    window = model.text_encoder.window
    length = max(prompts.lengths) + new_tokens
    if window and prompts.targets is None and length > window:
        reason = (
            f"with the longest prompt that makes {length:,} tokens, and {model.name}"
            f" takes {window:,}"
        )
        raise TextError(
            f"new_tokens is {new_tokens:,}", reason, "Give fewer, or shorter prompts."
        )


def continue_prompts(
    model: Model, prompts: Inputs, new_tokens: int, intervention: Intervention | None
) -> list[list[str]]:
    """Continue each prompt greedily, once for each strength."""
    copies = len(intervention.strengths) if intervention else 1
    texts: list[list[str]] = [[""] * len(prompts) for _ in range(copies)]
    # One length at a time, so that nothing is padded.
    for length in sorted(set(prompts.lengths)):
        numbers = [
            number
            for number, prompt_length in enumerate(prompts.lengths)
            if prompt_length == length
        ]
        rows = [prompts.ids[number] for number in numbers] * copies
        ids = torch.tensor(rows, device=model.device)
        steering: AbstractContextManager[None] = nullcontext()
        if intervention:
            changes = intervention.changes(len(numbers), entry=True)
            steering = editing(model, changes)
        with model.lock, steering:
            sequences = _generated(model, ids, new_tokens)
        # A decoder of its own returns its start token, other models the prompt.
        start = length if prompts.targets is None else 1
        for row, tokens in enumerate(sequences[:, start:].tolist()):
            copy, place = divmod(row, len(numbers))
            texts[copy][numbers[place]] = _decoded(model, tokens)
    return texts


def _generated(model: Model, ids: Tensor, new_tokens: int) -> Tensor:
    module: Any = model.module
    output = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        pad_token_id=model.text_encoder.pad,
    )
    sequences: Tensor = getattr(output, "sequences", output)
    return sequences


def _decoded(model: Model, ids: list[int]) -> str:
    """Return new tokens as text, up to where the model ended it."""
    config = getattr(model.module, "generation_config", None)
    # Hugging Face has one id here, a list of them, or none.
    ends = getattr(config, "eos_token_id", None)
    end_ids = {ends} if isinstance(ends, int) else set(ends or ())
    stop = next((place for place, token in enumerate(ids) if token in end_ids), None)
    if model.tokenizer is None:
        return " ".join(map(str, ids[:stop]))
    with without_panic(
        TextError, f"Cannot decode what {model.name} wrote", "Give new_tokens=0."
    ):
        return str(
            model.tokenizer.decode(ids[:stop], clean_up_tokenization_spaces=False)
        )
