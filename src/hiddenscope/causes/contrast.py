"""Contrasts: a clean and a corrupt prompt, and the answers that tell them apart."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from hiddenscope.arguments import checked
from hiddenscope.errors import TextError
from hiddenscope.interface import ask, declared, readable
from hiddenscope.results.report import frozen

Prompt: TypeAlias = str | Sequence[int]
Answer: TypeAlias = str | int

PROBLEM = "Cannot use this contrast"


@frozen
class AnswerPair:
    """The two answers of a contrast."""

    answer: str
    other: str


@readable
@checked
@dataclass(frozen=True)
class Contrast:
    """Two prompts that differ in what matters, and two answers that tell them apart.

    The model continues `clean` with `answer` and `corrupt` with `other`. Prompts are
    strings or lists of token ids; answers are single tokens, as strings (with the
    leading space: `" Paris"`) or ids. `targets` is what the decoder of an
    encoder-decoder is given, the same in both runs. The answer is read at position
    `at`: the last one if not given, or the mask token of a masked language model.
    Contrasts of the same `group`, such as paraphrases, are averaged as belonging
    together; others are taken as independent of each other.

    >>> france, germany = "The capital of France is", "The capital of Germany is"
    >>> Contrast(france, germany, " Paris", " Berlin").answer
    ' Paris'
    """

    clean: Annotated[
        Prompt,
        ask(
            "A prompt that the model continues with the answer.",
            kind="text",
            label="Clean prompt",
            form_help="",
        ),
    ]
    corrupt: Annotated[
        Prompt,
        ask(
            "A prompt that it continues with the other answer.",
            kind="text",
            label="Corrupt prompt",
            form_help="",
        ),
    ]
    answer: Annotated[
        Answer,
        ask(
            "One token, with its leading space: ' Paris'.",
            kind="word",
            spelling=("--answer",),
            label="Its answer, with the space",
            form_help="",
        ),
    ]
    other: Annotated[
        Answer,
        ask(
            "The answer to the corrupt prompt: ' Berlin'.",
            kind="word",
            spelling=("--other",),
            label="The other answer",
            form_help="",
        ),
    ]
    targets: Annotated[
        Prompt | None,
        ask(
            "The decoder's text, in an encoder-decoder.",
            kind="text",
            spelling=("--target",),
        ),
    ] = None
    at: Annotated[
        int | None,
        ask(
            "The position at which the answer is read; the last if not given.",
            least=None,
            spelling=("--at",),
        ),
    ] = None
    group: Hashable | None = None

    def __post_init__(self) -> None:
        for name in ("clean", "corrupt", "targets"):
            prompt: Any = getattr(self, name)
            if prompt is None or isinstance(prompt, str):
                continue
            # A list, a tuple, an array or a tensor.
            ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not isinstance(ids, list | tuple) or not set(map(type, ids)) <= {int}:
                raise TextError(
                    f"{name} must be one prompt",
                    f"got {type(prompt).__name__}",
                    "Give a string or a list of token ids.",
                )
            object.__setattr__(self, name, tuple(ids))
        if isinstance(self.clean, str) != isinstance(self.corrupt, str):
            raise TextError(
                PROBLEM,
                "one prompt is a string and the other token ids",
                "Give two of the same kind.",
            )
        if self.clean == self.corrupt:
            raise TextError(
                PROBLEM,
                "both prompts are the same",
                "Give two that differ in what matters.",
            )
        for name in ("answer", "other"):
            answer = getattr(self, name)
            if isinstance(answer, bool) or not isinstance(answer, str | int):
                raise TextError(
                    f"{name} must be one token",
                    f"got {type(answer).__name__}",
                    "Give a string or an id.",
                )
        if self.answer == self.other:
            raise TextError(
                PROBLEM,
                f"both answers are {self.answer!r}",
                "Give two different tokens.",
            )
        if self.at is not None and (
            isinstance(self.at, bool) or not isinstance(self.at, int)
        ):
            raise TextError(
                "at must be a position",
                f"got {self.at!r}",
                "Give an integer, -1 for the last token.",
            )
        try:
            hash(self.group)
        except TypeError as error:
            reason = (
                f"got {type(self.group).__name__}, which cannot be told from others"
            )
            raise TextError(
                "group must name what belongs together",
                reason,
                "Give a string or a number.",
            ) from error


CONTRASTS = ask(
    "Two prompts that differ in what matters, and the two answers that tell them"
    " apart.",
    kind="contrast",
    fields=tuple(declared(Contrast)),
    constructor="Contrast",
    label="Contrast",
)
