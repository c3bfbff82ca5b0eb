"""Prompts: what both models are asked, each prompt once, with the right answer."""

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from hiddenscope import texts
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.text_encoder import text_before, token_after
from hiddenscope.states.arrays import Ints


class Prompts(NamedTuple):
    """The prompts, the token that answers each, and which belong together.

    `copies` is how many further prompts were the same again, with the same answer.
    """

    inputs: Inputs
    answers: list[int]
    groups: Ints
    copies: int


class _Row(NamedTuple):
    """A prompt, its answer, and its group; None where the data do not say."""

    prompt: Any
    answer: Any
    group: Hashable | None = None


def encode_prompts(model: Model, donor: Model, data: Any) -> Prompts:
    """Encode the prompts and their answers, and leave out copies."""
    rows = list(_rows(data))
    inputs = model.encode([row.prompt for row in rows])
    if inputs.texts and donor.tokenizer:
        prompts = list(inputs.texts or ())
        donor_ids = donor.encode(prompts).ids
        for prompt, ids, other_ids in zip(prompts, inputs.ids, donor_ids, strict=True):
            if ids != other_ids:
                raise TextError(
                    f"Cannot use the prompt {prompt[:40]!r}",
                    f"{model.name} and {donor.name} tokenize it differently",
                    "Give a donor with the same tokenizer.",
                )
    firsts: dict[Hashable, int] = {}
    answers = []
    # A tokenizer serves one thread at a time.
    with model.lock:
        for number, row in enumerate(rows):
            before = text_before(inputs, number, inputs.lengths[number] - 1)
            answer = token_after(model.text_encoder, row.answer, [before])
            answers.append(answer)
            firsts.setdefault((inputs.ids[number], answer), number)
    numbers = list(firsts.values())
    inputs = inputs.some(numbers)
    named_groups = [rows[number].group for number in numbers]
    # A prompt with two answers, or in other letters, is no further evidence.
    groups = texts.number_groups(
        inputs.ids,
        texts.copy_groups(inputs.texts or inputs.ids),
        None if None in named_groups else named_groups,
    )
    copies = len(rows) - len(numbers)
    return Prompts(inputs, [answers[number] for number in numbers], groups, copies)


def _rows(data: Any) -> Iterator[_Row]:
    """Yield prompts with answers and groups, from pairs or from labelled texts."""
    if (
        isinstance(data, list)
        and data
        and all(isinstance(row, list | tuple) and len(row) == 2 for row in data)
    ):
        for prompt, answer in data:
            yield _Row(prompt, answer)
        return
    labelled = data if isinstance(data, texts.Labelled) else texts.read(data)
    if labelled.labels is None:
        raise TextError(
            f"Cannot use the prompts of {labelled.name}",
            "they have no labels",
            "Label each prompt with its answer, or give [(prompt, answer), ...].",
        )
    groups = labelled.groups or [None] * len(labelled)
    yield from map(_Row, labelled.texts, labelled.labels, groups)
