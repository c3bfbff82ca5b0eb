"""Answers: the single token that an answer is at the position where it is read.

A tokenizer may merge an answer with the text before it, or split it elsewhere, so an
answer is encoded together with that text.
"""

from collections.abc import Sequence

from hiddenscope.errors import TextError
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.text_encoder import TextEncoder


def text_before(inputs: Inputs, number: int, at: int) -> str | None:
    """The text up to the end of the token at one position; None where it is not known."""
    if not inputs.texts:
        return None
    # A slow tokenizer does not say which characters a token stands for.
    if inputs.spans is None:
        return inputs.texts[number] if at == len(inputs.ids[number]) - 1 else None
    return inputs.texts[number][
        : max(0, *(end for _, end in inputs.spans[number][: at + 1]))
    ]


def token_after(
    encoder: TextEncoder, answer: str | int, befores: Sequence[str | None]
) -> int:
    """The id of an answer that follows each of these texts; it must be the same after
    all. None is an unknown text.

    >>> token_after(TextEncoder(None, window=8, vocabulary=100), 7, [None])
    7
    """
    known = list(dict.fromkeys(before for before in befores if before is not None)) or [
        ""
    ]
    ids = [encoder.single(answer, "answer", before=before) for before in known]
    if len(set(ids)) > 1:
        reason = " and ".join(
            f"it is token {one} after {before[-40:]!r}"
            for one, before in zip(ids, known, strict=True)
        )
        raise TextError(
            f"Cannot use the answer {str(answer)[:40]!r}",
            reason,
            "Give the id of the token that you mean.",
        )
    return ids[0]
