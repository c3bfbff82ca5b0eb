"""The question: a text, and the tokens of its answers, each at its position."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from hiddenscope.directions.direction import Direction
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.text_encoder import notes_on_spaces, text_before

AnswerTokens: TypeAlias = str | int | Sequence[int]


# In place of the token of an answer: a direction.
NO_TOKEN = -1


class Question(NamedTuple):
    """A text that goes on with an answer, and the tokens that are asked for.

    `inputs` are the text and the answer without its last token. At each of the `rows`,
    which are positions in it, the model predicts one of the `answers`; `others` are the
    tokens that they are compared with.
    """

    inputs: Inputs
    text: Inputs
    rows: tuple[int, ...]
    answers: tuple[int, ...]
    others: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[int, ...]:
        """Return the ids of all tokens that are asked for."""
        return (*self.answers, *(self.others or ()))


def encode_question(
    model: Model,
    text: Texts | Inputs,
    answer: AnswerTokens | Direction,
    other: AnswerTokens | None,
    targets: Texts | None,
) -> Question:
    """Encode a text and its answers; refuse what cannot be asked."""
    if isinstance(answer, Direction) and other is not None:
        raise TextError(
            "Cannot compare a direction with another answer",
            "the parts are split along the direction alone",
            "Leave `other` out.",
        )
    encoded = model.encode(text, targets=targets)
    if len(encoded) != 1:
        raise TextError(
            f"Cannot take {len(encoded):,} texts",
            "the parts that write an answer are those of one text",
            "Ask for each text by itself.",
        )
    encoder = model.text_encoder
    answering, window = encoded, encoder.window
    if model.encoder_decoder:
        encoder.required_start()
        answering = encoded.of("decoder")
        window = encoder.target_window or window
    start = len(answering.ids[0]) - 1
    before = text_before(answering, 0, start)
    notes: list[str] = []
    # A tokenizer serves one thread at a time.
    with model.lock:
        tokens: Sequence[int] = (NO_TOKEN,)
        if not isinstance(answer, Direction):
            tokens = encoder.several(answer, "answer", before=before or "")
        others = None
        if other is not None:
            others = encoder.several(other, "other answer", before=before or "")
        notes += notes_on_spaces(model.tokenizer, (answer, other))
    shared, compared = 0, None
    if others is not None:
        shared = _first_difference(answer, tokens, others)
        if len(tokens) > 1 or len(others) > 1:
            first, second = (
                encoder.string(tokens[shared]),
                encoder.string(others[shared]),
            )
            notes.append(
                f"The answers are compared at {first!r} and {second!r}, the first"
                " tokens that differ; the tokens after them are left out."
            )
        tokens, compared = tokens[: shared + 1], (others[shared],)
    ids = (*answering.ids[0], *tokens[:-1])
    if window and len(ids) > window:
        raise TextError(
            "The text and its answer are too long",
            f"they have {len(ids):,} tokens and {model.name} takes at most {window:,}",
            "Give a shorter text.",
        )
    inputs = Inputs((ids,))
    if model.encoder_decoder:
        inputs = encoded.with_targets(inputs)
    rows = range(start + shared, start + len(tokens))
    return Question(
        inputs, encoded, tuple(rows), tuple(tokens[shared:]), compared, tuple(notes)
    )


def _first_difference(
    answer: AnswerTokens | Direction, tokens: Sequence[int], others: Sequence[int]
) -> int:
    """Return the first token at which two answers differ."""
    for number, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return number
    problem = f"Cannot compare the answer {str(answer)[:40]!r} with the other"
    if len(tokens) == len(others):
        raise TextError(
            problem, "both are the same tokens", "Give two different answers."
        )
    raise TextError(
        problem,
        "one begins with all tokens of the other",
        "Give two answers that differ in a token of both.",
    )
