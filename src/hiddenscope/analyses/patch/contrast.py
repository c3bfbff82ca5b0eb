"""Contrast: a clean and a corrupt prompt, how their tokens align, and where which
answers are read.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hiddenscope.arguments import checked
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Columns, Inputs, in_columns
from hiddenscope.passes.answers import text_before, token_after

Prompt: TypeAlias = str | Sequence[int]
Answer: TypeAlias = str | int

PROBLEM = "Cannot use this contrast"


@checked
@dataclass(frozen=True)
class Contrast:
    """Two prompts that differ in what matters, and the two answers that tell them
    apart.

    The model continues `clean` with `answer` and `corrupt` with `other`. Prompts are
    strings or lists of token ids; answers are single tokens, as strings (with the
    leading space: `" Paris"`) or ids. `targets` is what the decoder of an
    encoder-decoder is given, the same in both runs. The answer is read at position
    `at`: the last one if not given, or the mask token of a masked language model.
    Contrasts of the same `group`, such as paraphrases, are averaged as belonging
    together; others are taken as independent of each other.

    >>> Contrast("The capital of France is", "The capital of Germany is", " Paris", " Berlin").answer
    ' Paris'
    """

    clean: Prompt
    corrupt: Prompt
    answer: Answer
    other: Answer
    targets: Prompt | None = None
    at: int | None = None
    group: Hashable | None = None

    def __post_init__(self) -> None:
        for name in ("clean", "corrupt", "targets"):
            prompt = getattr(self, name)
            if prompt is not None and not isinstance(prompt, str):
                object.__setattr__(self, name, _ids(name, prompt))
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


def _ids(name: str, prompt: Any) -> tuple[int, ...]:
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(listed, list | tuple) or not set(map(type, listed)) <= {int}:
        reason = f"got {type(prompt).__name__}"
        raise TextError(
            f"{name} must be one prompt",
            reason,
            "Give a string or a list of token ids.",
        )
    return tuple(listed)


@dataclass(frozen=True)
class EncodedContrast:
    """A contrast as the model takes it: its inputs are the clean and the corrupt
    prompt.

    `columns` pairs the positions of both prompts, for each stack (None in a model with
    one). `at` is the position of each prompt, or of the decoder's targets, at which the
    answers are read.
    """

    inputs: Inputs
    columns: dict[str | None, Columns]
    at: tuple[int, int]
    answer: int
    other: int
    notes: tuple[str, ...] = ()
    group: Hashable | None = None

    @property
    def key(self) -> Hashable:
        """The same for contrasts that are copies of one another."""
        targets = None if self.inputs.targets is None else self.inputs.targets.ids
        return self.inputs.ids, targets, self.at, self.answer, self.other

    @property
    def prompts(self) -> Hashable:
        """The same for contrasts of the same two prompts, whichever of them is clean."""
        return frozenset(self.inputs.ids)


def encode(model: Model, contrasts: Sequence[Contrast]) -> list[EncodedContrast]:
    """The contrasts as the model takes them; what cannot be patched is refused."""
    targets = [
        contrast.targets for contrast in contrasts if contrast.targets is not None
    ]
    if targets and len(targets) < len(contrasts):
        reason = f"{len(targets)} of {len(contrasts)} contrasts have targets"
        raise TextError(
            "Cannot use the targets",
            reason,
            "Give targets in every contrast or in none.",
        )
    prompts = [
        getattr(contrast, side)
        for contrast in contrasts
        for side in ("clean", "corrupt")
    ]
    both_sides: Any = [target for target in targets for _ in range(2)]
    inputs = model.encode(prompts, targets=both_sides or None)
    encoded = [
        _encoded(model, contrast, inputs.some([2 * number, 2 * number + 1]))
        for number, contrast in enumerate(contrasts)
    ]
    _same_form(encoded)
    return encoded


def _encoded(model: Model, contrast: Contrast, inputs: Inputs) -> EncodedContrast:
    for length, name in zip(inputs.lengths, ("clean", "corrupt"), strict=True):
        if length < 2:
            reason = (
                f"the {name} prompt {str(getattr(contrast, name))[:40]!r} has one token"
            )
            raise TextError(PROBLEM, reason, "Give prompts of two tokens or more.")
    if inputs.ids[0] == inputs.ids[1]:
        reason = "both prompts have the same tokens"
        raise TextError(PROBLEM, reason, "Give two that differ in what matters.")
    stacks = (None,) if len(model.anatomy.stacks) == 1 else ("encoder", "decoder")
    answering = inputs.of(stacks[-1])
    masked = stacks == (None,) and not model.anatomy.stacks[-1].causal
    at = [_position(model, ids, contrast.at, masked=masked) for ids in answering.ids]
    befores = (
        []
        if masked
        else [
            text_before(answering, side, position) for side, position in enumerate(at)
        ]
    )
    with model.lock:  # a tokenizer serves one thread at a time
        answer, other = (
            token_after(model.text_encoder, one, befores)
            for one in (contrast.answer, contrast.other)
        )
        notes = () if masked else tuple(_without_space(model, contrast))
    if answer == other:
        reason = f"both answers are the token {model.text_encoder.string(answer)!r}"
        raise TextError(PROBLEM, reason, "Give two different tokens.")
    columns = {stack: in_columns(*inputs.of(stack).ids) for stack in stacks}
    return EncodedContrast(
        inputs, columns, (at[0], at[1]), answer, other, notes, contrast.group
    )


def _without_space(model: Model, contrast: Contrast) -> Iterator[str]:
    """Notes on answers without a leading space that are also tokens with one, which are
    likelier to come next.
    """
    tokenizer: Any = model.tokenizer
    for answer in (contrast.answer, contrast.other):
        if isinstance(answer, str) and answer[:1].isalpha():
            spaced = tokenizer(f" {answer}", add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            if len(spaced) == 1:
                yield (
                    f"The answer {answer!r} has no leading space; {' ' + answer!r} is"
                    " another token."
                )


def _position(model: Model, ids: Sequence[int], at: int | None, *, masked: bool) -> int:
    """Where the answers are read: at the given position, the mask token, or the last
    one.
    """
    if at is not None:
        if not -len(ids) <= at < len(ids):
            raise TextError(
                f"at must be a position of {len(ids)} tokens",
                f"got {at}",
                "Give -1 for the last token.",
            )
        return at % len(ids)
    if not masked:
        return len(ids) - 1
    mask = getattr(model.tokenizer, "mask_token_id", None)
    positions = [position for position, token in enumerate(ids) if token == mask]
    if len(positions) == 1:
        return positions[0]
    token = getattr(model.tokenizer, "mask_token", None)
    remedy = (
        f"Put one {token} where the answer belongs, or give at=."
        if token
        else "Give at=."
    )
    problem = f"Cannot tell where {model.name}, a masked language model, answers"
    raise TextError(problem, f"the prompt has {len(positions)} mask tokens", remedy)


def _same_form(contrasts: Sequence[EncodedContrast]) -> None:
    """Refuse contrasts that cannot be averaged column by column."""
    first, problem = contrasts[0], "Cannot average these contrasts column by column"
    remedy = (
        "Give contrasts of one form, with the same number of tokens, or patch them one"
        " by one."
    )
    for number, contrast in enumerate(contrasts[1:], 1):
        for stack, columns in contrast.columns.items():
            if len(columns) != len(first.columns[stack]):
                counts = len(first.columns[stack]), len(columns)
                reason = (
                    f"contrast 0 has {counts[0]} columns of tokens, contrast {number}"
                    f" has {counts[1]}"
                )
                raise TextError(problem, reason, remedy)
            if [None in column for column in columns] != [
                None in column for column in first.columns[stack]
            ]:
                raise TextError(
                    problem,
                    f"contrast {number} has its gaps at other tokens than contrast 0",
                    remedy,
                )
        if contrast.at != first.at:
            reason = (
                f"contrast 0 is read at position {first.at[0]}, contrast {number} at"
                f" {contrast.at[0]}"
            )
            raise TextError(problem, reason, remedy)
