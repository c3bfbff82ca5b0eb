"""Contrasts and interchanges: two prompts, and the answers that tell them apart."""

import csv
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from hiddenscope.arguments import checked
from hiddenscope.errors import FileError, TextError
from hiddenscope.files import check_file
from hiddenscope.interface import ask, declared, readable
from hiddenscope.results.report import frozen

Prompt: TypeAlias = str | Sequence[int]
Answer: TypeAlias = str | int


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
    problem: ClassVar[str] = "Cannot use this contrast"

    def __post_init__(self) -> None:
        _check(self, ("clean", "corrupt", "targets"), ("answer", "other"))
        if self.answer == self.other:
            raise TextError(
                self.problem,
                f"both answers are {self.answer!r}",
                "Give two different tokens.",
            )


@checked
@dataclass(frozen=True)
class Interchange:
    """Two prompts, and what follows if one variable alone is exchanged between them.

    The model continues `base` with `answer`. If the variable took the value that it has
    in `source`, and all else stayed, `counterfactual` would follow: where other things
    differ too, that need not be what `source` itself is continued with. `value` and
    `source_value` name the values; where they are equal, so are both answers. Prompts,
    answers, `at` and `group` are as in a `Contrast`: pairs of one group, such as a
    template, are never split between those that are learned from and those that are
    held out.

    >>> france, germany = "The capital of France is", "The capital of Germany is"
    >>> Interchange(france, germany, " Paris", " Berlin").counterfactual
    ' Berlin'
    """

    base: Prompt
    source: Prompt
    answer: Answer
    counterfactual: Answer
    value: Hashable | None = None
    source_value: Hashable | None = None
    group: Hashable | None = None
    at: int | None = None
    problem: ClassVar[str] = "Cannot use this pair"
    targets: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check(self, ("base", "source"), ("answer", "counterfactual"))
        same = self.value is not None and self.value == self.source_value
        if same and self.answer != self.counterfactual:
            reason = (
                f"the variable is {self.value!r:.40} in both, and the answers differ"
            )
            raise TextError(self.problem, reason, "Correct the values or the answers.")

    @property
    def clean(self) -> Prompt:
        """Return the prompt whose run is changed."""
        return self.base

    @property
    def corrupt(self) -> Prompt:
        """Return the prompt that states are taken from."""
        return self.source

    @property
    def other(self) -> Answer:
        """Return the answer that follows if the variable is exchanged."""
        return self.counterfactual


def read_interchanges(path: str) -> list[Interchange]:
    """Read pairs from a .jsonl or .csv file, whose columns are the fields."""
    problem = f"Cannot read pairs from {path[:80]!a}"
    check_file(path, problem)
    try:
        with Path(path).open(encoding="utf-8", newline="") as lines:
            if path.endswith(".jsonl"):
                return interchanges(lines)
            rows = [*csv.DictReader(lines)]
    except (OSError, UnicodeError, csv.Error) as error:
        remedy = "Give a .jsonl or .csv file with base, source, answer, counterfactual."
        raise FileError(problem, f"{error}"[:120], remedy) from error
    return [_interchange(row) for row in rows]


def interchanges(lines: str | Iterable[str]) -> list[Interchange]:
    """Return the pairs of JSON lines, whose keys are the fields.

    >>> line = '{"base": [5, 6], "source": [7, 6], "answer": 1, "counterfactual": 2}'
    >>> interchanges([line])[0].source
    (7, 6)
    """
    pairs = []
    if isinstance(lines, str):
        lines = lines.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise TextError(
                f"Line {number} is no pair",
                f"it is no JSON object: {line.strip()!a:.60}",
                'Write {"base": "...", "source": "...", "answer": "...",'
                ' "counterfactual": "..."}.',
            ) from error
        pairs.append(_interchange(row))
    return pairs


def _interchange(row: Mapping[str, Any]) -> Interchange:
    # An empty field of a table was not given.
    fields = {str(name): value for name, value in row.items() if value != ""}
    return Interchange(**fields)


def _check(pair: Any, prompts: Sequence[str], answers: Sequence[str]) -> None:
    """Check what is said of two prompts, and keep ids as tuples."""
    for name in prompts:
        prompt: Any = getattr(pair, name)
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
        object.__setattr__(pair, name, tuple(ids))
    first, second = (getattr(pair, name) for name in prompts[:2])
    if isinstance(first, str) != isinstance(second, str):
        raise TextError(
            pair.problem,
            "one prompt is a string and the other token ids",
            "Give two of the same kind.",
        )
    if first == second:
        raise TextError(
            pair.problem,
            "both prompts are the same",
            "Give two that differ in what matters.",
        )
    for name in answers:
        answer = getattr(pair, name)
        if isinstance(answer, bool) or not isinstance(answer, str | int):
            raise TextError(
                f"{name} must be one token",
                f"got {type(answer).__name__}",
                "Give a string or an id.",
            )
    if pair.at is not None and (
        isinstance(pair.at, bool) or not isinstance(pair.at, int)
    ):
        raise TextError(
            "at must be a position",
            f"got {pair.at!r}",
            "Give an integer, -1 for the last token.",
        )
    try:
        hash(pair.group)
    except TypeError as error:
        reason = f"got {type(pair.group).__name__}, which cannot be told from others"
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
