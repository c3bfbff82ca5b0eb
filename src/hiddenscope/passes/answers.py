"""Answers: the tokens that an answer is at the position where it is read.

A tokenizer may merge an answer with the text before it, or split it elsewhere, so an
answer is encoded together with that text.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hiddenscope.errors import TextError
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.text_encoder import TextEncoder


def text_before(inputs: Inputs, number: int, at: int) -> str | None:
    """Return the text up to the end of a token; None where it is not known."""
    if not inputs.texts:
        return None
    text = inputs.texts[number]
    # A slow tokenizer does not say which characters a token stands for.
    if inputs.spans is None:
        return text if at == len(inputs.ids[number]) - 1 else None
    ends = [end for _, end in inputs.spans[number][: at + 1]]
    return text[: max(0, *ends)]


def token_after(
    encoder: TextEncoder, answer: str | int, texts: Sequence[str | None]
) -> int:
    """Return the id of an answer that follows each of these texts.

    It must be the same after all of them. None is an unknown text.

    >>> token_after(TextEncoder(None, window=8, vocabulary=100), 7, [None])
    7
    """
    known = dict.fromkeys(text for text in texts if text is not None)
    ids: dict[str, int] = {}
    for text in known or [""]:
        ids[text] = encoder.single(answer, "answer", before=text)
    if len(set(ids.values())) > 1:
        each = [f"it is token {id_} after {text[-40:]!r}" for text, id_ in ids.items()]
        raise TextError(
            f"Cannot use the answer {str(answer)[:40]!r}",
            " and ".join(each),
            "Give the id of the token that you mean.",
        )
    return next(iter(ids.values()))


def notes_on_spaces(tokenizer: Any, answers: Sequence[object]) -> Iterator[str]:
    """Yield notes on answers that are also tokens with a leading space.

    Within a sentence, the token with the space is likelier to come next.
    """
    for answer in answers:
        if tokenizer is None or not isinstance(answer, str) or not answer[:1].isalpha():
            continue
        both = [answer, f" {answer}"]
        ids, spaced = tokenizer(both, add_special_tokens=False, verbose=False).input_ids
        if len(spaced) == 1 and spaced != ids:
            yield f"{answer!r} has no leading space; {both[1]!r} is another token."
