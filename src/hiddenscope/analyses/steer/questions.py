"""Questions: what is read off the logits of a text, next to a prompt's end, at its mask, or all along a plain text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Texts

EVERY = 6  # of a masked model's plain texts every so many tokens are hidden, and told from the others


@dataclass(frozen=True)
class Question:
    """A text as ids (and a decoder's own), the rows of its logits that are read, and for each the ids looked at."""

    ids: tuple[int, ...]
    aim: tuple[int, ...] | None
    rows: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Answers:
    """Tokens whose probability is told, by id and as a reader knows them."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]


def masked(model: Model) -> bool:
    """Whether the model fills masks, and does not go on with a text."""
    return not model.anatomy.stacks[-1].causal


def check_head(model: Model) -> None:
    """Refuse a model that gives no logits, or that hides tokens by a mask nobody knows."""
    if model.anatomy.head is None:
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(f"Steering what {model.name} says", "it has no head, and says nothing", remedy)
    if masked(model) and _mask(model) is None:
        reason = "it fills masks, and its tokenizer has no mask token"
        raise PassError(f"Steering what {model.name} says", reason, "Load it with the tokenizer that has one.")


def _mask(model: Model) -> int | None:
    mask = getattr(model.tokenizer, "mask_token_id", None)
    return mask if isinstance(mask, int) else None


def prompts_of(model: Model, prompts: Texts, targets: tuple[int, ...] = ()) -> tuple[list[Question], list[str]]:
    """A question for each prompt: the next token, or the one at its mask; and the prompts as a reader knows them."""
    with model.lock:
        encoded = model.encoder.encode(prompts)
    aim = (_start(model),) if len(model.anatomy.stacks) > 1 else None
    asked = []
    for number, ids in enumerate(encoded.ids):
        row = 0 if aim else _masked_row(model, number, ids) if masked(model) else len(ids) - 1
        asked.append(Question(ids, aim, (row,), (targets,)))
    return asked, list(encoded.texts or (" ".join(map(model.encoder.string, ids)) for ids in encoded.ids))


def _masked_row(model: Model, number: int, ids: Sequence[int]) -> int:
    places = [place for place, one in enumerate(ids) if one == _mask(model)]
    if len(places) != 1:
        reason = f"it has {len(places)} mask tokens, and {model.name} is asked for one"
        raise TextError(f"Prompt {number}", reason, f"Put one {model.tokenizer.mask_token} where the answer goes.")  # type: ignore[union-attr]
    return places[0]


def _start(model: Model) -> int:
    return model.encoder.targets(None, 1).ids[0][0]


def answers_of(model: Model, answers: Any) -> Answers:
    """The answers as single tokens: strings, or ids."""
    listed = [answers] if isinstance(answers, str | int) else list(answers)
    if not listed:
        raise TextError("Answers", "there are none", "Give one at least, or leave `answers` out.")
    with model.lock:
        ids = tuple(model.encoder.one(answer, "answer") for answer in listed)
    if len(set(ids)) < len(ids):
        raise TextError(f"The answers {listed}", "two of them are one token", "Give each once.")
    return Answers(ids, tuple(map(model.encoder.string, ids)))


def plain_texts_of(model: Model, texts: Texts) -> list[Question]:
    """A question for each text that general quality is measured on: every token that the model can be asked for."""
    with model.lock:
        encoded = model.encoder.encode(texts)
    if len(model.anatomy.stacks) > 1:
        asked = [_second_half(_start(model), ids) for ids in encoded.ids]
    elif masked(model):
        asked = [_hidden(model, number, ids) for number, ids in enumerate(encoded.ids)]
    else:
        asked = [
            Question(ids, None, tuple(range(len(ids) - 1)), tuple((one,) for one in ids[1:])) for ids in encoded.ids
        ]
    for number, question in enumerate(asked):
        if not question.rows:
            reason = "it is one token long, and there is nothing to foretell"
            raise TextError(f"Text {number} for the perplexity", reason, "Give a longer one.")
    return asked


def _second_half(start: int, ids: Sequence[int]) -> Question:
    """An encoder reads the first half of a text and the decoder is asked for the second."""
    half = len(ids) // 2
    rest = ids[half:] if half else ()
    aim = (start, *rest[:-1])
    return Question(tuple(ids[: max(half, 1)]), aim, tuple(range(len(rest))), tuple((one,) for one in rest))


def _hidden(model: Model, number: int, ids: Sequence[int]) -> Question:
    """Every sixth token is hidden, begun at another place in each text; what the tokenizer puts around it is not."""
    special = set(getattr(model.tokenizer, "all_special_ids", ()))
    words = [place for place, one in enumerate(ids) if one not in special]
    places = words[number % EVERY :: EVERY] or words[:1]
    mask = _mask(model)
    assert mask is not None
    shown = tuple(mask if place in places else one for place, one in enumerate(ids))
    return Question(shown, None, tuple(places), tuple((ids[place],) for place in places))
