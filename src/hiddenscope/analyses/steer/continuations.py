"""Continuations: what a model writes after prompts, as it is or while it is steered."""

from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

import torch

from hiddenscope.analyses.steer.sweep import Intervention, masked_model
from hiddenscope.errors import TextError, without_panic
from hiddenscope.model import Model
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
    model: Model,
    prompts: Inputs,
    new_tokens: int,
    intervention: Intervention | None = None,
) -> list[list[str]]:
    """Continue each prompt greedily, once for each strength."""
    module: Any = model.module
    tokenizer: Any = model.tokenizer
    problem = f"Cannot decode what {model.name} wrote"
    config = getattr(module, "generation_config", None)
    # Hugging Face has one id here, a list of them, or none.
    ends = getattr(config, "eos_token_id", None)
    end_ids = {ends} if isinstance(ends, int) else set(ends or ())
    copies = len(intervention.strengths) if intervention else 1
    texts = [[""] * len(prompts) for _ in range(copies)]
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
            steering = editing(model, intervention.changes(len(numbers)))
        with model.lock, steering:
            output = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                pad_token_id=model.text_encoder.pad,
            )
        sequences = getattr(output, "sequences", output)
        # A decoder of its own returns its start token, other models the prompt.
        start = length if prompts.targets is None else 1
        for row, tokens in enumerate(sequences[:, start:].tolist()):
            copy, place = divmod(row, len(numbers))
            written = list(takewhile(lambda token: token not in end_ids, tokens))
            texts[copy][numbers[place]] = " ".join(map(str, written))
            if tokenizer is not None:
                with without_panic(TextError, problem, "Give new_tokens=0."):
                    texts[copy][numbers[place]] = tokenizer.decode(
                        written, clean_up_tokenization_spaces=False
                    )
    return texts
