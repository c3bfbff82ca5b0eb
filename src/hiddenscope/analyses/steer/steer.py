"""Can a direction change what the model writes, and what does that cost?"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from hiddenscope import progress, texts
from hiddenscope.analyses.steer.continuations import (
    cannot_generate,
    check_new_tokens,
    continue_prompts,
)
from hiddenscope.analyses.steer.direction import (
    Direction,
    in_model,
    without_first_tokens,
)
from hiddenscope.analyses.steer.findings import (
    Written,
    best_setting,
    put_written,
    steer_dataset,
    steer_facts,
    written_facts,
)
from hiddenscope.analyses.steer.intervention import How
from hiddenscope.analyses.steer.reads import check_head, prompt_reads, quality_reads
from hiddenscope.analyses.steer.sweep import Measured, Sweep
from hiddenscope.arguments import checked
from hiddenscope.errors import NotFinite, PassError, StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.passes.text_encoder import notes_on_spaces
from hiddenscope.results import Result

Answers: TypeAlias = str | int | Sequence[str | int]

STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
NEW_TOKENS = 20


@checked
def steer(
    model: ModelLike,
    prompts: Texts | Inputs,
    direction: Direction,
    *,
    strengths: Sequence[float] | float | Literal["ablate"] = STRENGTHS,
    answers: Answers | None = None,
    quality: Texts | Inputs | None = None,
    new_tokens: int | None = None,
) -> Result:
    """Steer a model along a direction: what it answers, what it writes, what it costs.

    The direction is added to the state of every token, `strengths` times; with
    `strengths="ablate"` it is projected out. `answers` are the tokens to look at, the
    model's most likely ones if not given. `quality` are the texts that the perplexity
    is measured on, 40 plain sentences if not given. `new_tokens` are written after each
    prompt.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> direction = hs.Direction.between(model, [[5, 6]], [[7, 8]])
    >>> quality = [[9, 8, 7, 6]]
    >>> prompts = [[5, 6, 7]]
    >>> result = hs.steer(model, prompts, direction, answers=[3, 4], quality=quality)
    >>> dict(result.data["probability"].sizes)
    {'site': 3, 'strength': 5, 'text': 1, 'answer': 2}
    """
    model = as_model(model)
    check_head(model)
    steered = in_model(direction, model)
    how, multiples = _strengths(strengths)
    prompt_inputs = model.encode(prompts)
    new_tokens = _new_tokens(model, prompt_inputs, new_tokens)
    answer_strings = _answers(model, prompt_inputs, answers)
    answer_reads = prompt_reads(model, prompt_inputs, tuple(answer_strings))
    if quality is None:
        quality = texts.read("plain").texts
    text_reads = quality_reads(model, quality)
    if direction.spare_first:
        all_texts = [*answer_reads.inputs.ids, *text_reads.inputs.ids]
        steered = without_first_tokens(model, steered, all_texts)
    sweep = Sweep(model, steered, how, multiples, direction.upwards)
    listed = [answers] if isinstance(answers, str | int) else answers
    # A tokenizer serves one thread at a time.
    with model.lock:
        sweep.notes += notes_on_spaces(model.tokenizer, listed or ())
    states = model.capture(prompt_inputs, steered.sites)
    total = sweep.tokens(answer_reads)
    with progress.track("Steering the prompts", total=total) as advance:
        on_prompts = sweep.measure(answer_reads, states, advance)
    # The perplexity takes many times as long.
    for line in _first_look(sweep, on_prompts, list(answer_strings.values())):
        progress.note(line)
    total = sweep.tokens(text_reads)
    with progress.track("Measuring the perplexity", total=total) as advance:
        on_quality = sweep.measure(text_reads, sweep.capture(text_reads), advance)
    prompt_strings = prompt_inputs.texts or [
        " ".join(map(model.text_encoder.string, ids)) for ids in prompt_inputs.ids
    ]
    data = steer_dataset(
        sweep, on_prompts, on_quality, states, prompt_strings, answer_strings
    )
    # Texts are written at one site: the best, or else the one that moves most.
    best = best_setting(data, 0) or best_setting(data, 0, within=math.inf)
    if new_tokens:
        place = best[0] if best else 0
        put_written(data, sweep, _written(sweep, prompt_inputs, new_tokens, place))
    facts = {
        **steer_facts(sweep, data, text_reads),
        **written_facts(data, best, cannot_generate(model)),
        "notes": sweep.notes,
    }
    return Result("steer", data, facts, model.source(model.anatomy.sites[-1].stack))


def _strengths(strengths: Any) -> tuple[How, tuple[float, ...]]:
    """Return how states are changed, and the multiples of the direction.

    An ablation has the strength 1.
    """
    if isinstance(strengths, str):
        if strengths != "ablate":
            raise StatesError(
                "strengths must be numbers or 'ablate'",
                f"got {strengths!r:.40}",
                "Give numbers such as [-1, 1].",
            )
        return "ablate", (1.0,)
    try:
        values = [strengths] if np.ndim(strengths) == 0 else strengths
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise StatesError(
            "strengths must be numbers",
            f"got {strengths!r:.60}",
            "Give numbers such as [-1, 1].",
        ) from None
    if not numbers or len(set(numbers)) < len(numbers):
        raise StatesError(
            f"strengths are {numbers}",
            "one comes twice" if numbers else "there are none",
            "Give at least one, and each once.",
        )
    if not all(map(math.isfinite, numbers)):
        raise NotFinite(
            f"strengths are {numbers}", "one is not finite", "Give finite numbers."
        )
    return "add", tuple(sorted(numbers))


def _new_tokens(model: Model, prompts: Inputs, new_tokens: Any) -> int:
    """Return how many tokens are written; by default some, if the model can."""
    if new_tokens is not None and (not isinstance(new_tokens, int) or new_tokens < 0):
        raise TextError(
            "new_tokens must be an integer >= 0",
            f"got {new_tokens!r}",
            "Give 0 to write nothing.",
        )
    reason = cannot_generate(model)
    if reason and new_tokens:
        raise PassError(
            f"{model.name} cannot write {new_tokens} new tokens",
            reason,
            "Leave `new_tokens` out.",
        )
    count = NEW_TOKENS if new_tokens is None else new_tokens
    if reason:
        count = 0
    check_new_tokens(model, prompts, count)
    return int(count)


def _answers(model: Model, prompts: Inputs, answers: Answers | None) -> dict[int, str]:
    """Return the answers as single tokens, each with its string."""
    if answers is None:
        ids = _most_likely(model, prompts)
    else:
        listed = [answers] if isinstance(answers, str | int) else list(answers)
        if not listed:
            raise TextError(
                "answers must not be empty",
                "the list is empty",
                "Give one, or leave `answers` out.",
            )
        with model.lock:
            ids = [model.text_encoder.single(answer, "answer") for answer in listed]
        if len(set(ids)) < len(ids):
            raise TextError(
                f"Cannot use the answers {listed}",
                "two of them are the same token",
                "Give each once.",
            )
    return {token: model.text_encoder.string(token) for token in ids}


def _most_likely(model: Model, prompts: Inputs) -> list[int]:
    """Return the most likely next token of each prompt, each once."""
    tokens: dict[int, None] = {}
    reads = prompt_reads(model, prompts, ())
    for number, (position,) in enumerate(reads.positions):
        logits = record(model, prompts.some([number]), (), logits=True).logits
        assert logits is not None
        tokens[int(logits[position].argmax())] = None
    return list(tokens)


def _first_look(
    sweep: Sweep, on_prompts: Measured, answers: Sequence[str]
) -> Iterator[str]:
    """Yield the lowest and the highest probability of each answer, at any cost.

    Probabilities are averaged over the prompts.
    """
    before = np.exp(on_prompts.prompts_before).mean(0)
    after = np.exp(on_prompts.prompts_after).mean(2)
    for place, answer in enumerate(answers):
        extremes = []
        for name, find in (("lowest", np.argmin), ("highest", np.argmax)):
            site, strength = np.unravel_index(find(after[..., place]), after.shape[:2])
            where = str(sweep.steered.sites[site])
            if sweep.how == "add":
                where += f", strength {sweep.strengths[strength]:g}"
            extremes.append(f"{name} {after[site, strength, place]:.2g} at {where}")
        yield (
            f"{answer!r}: probability {before[place]:.2g} before;"
            f" {'; '.join(extremes)}. The perplexity follows."
        )


def _written(sweep: Sweep, prompts: Inputs, new_tokens: int, place: int) -> Written:
    """Continue the prompts before and after steering at one site."""
    (before,) = continue_prompts(sweep.model, prompts, new_tokens, None)
    steered: list[list[str]] = []
    if sweep.steps:
        intervention = sweep.intervention(sweep.steered.sites[place])
        steered = continue_prompts(sweep.model, prompts, new_tokens, intervention)
    return Written(place, before, sweep.with_unchanged(steered, before))
