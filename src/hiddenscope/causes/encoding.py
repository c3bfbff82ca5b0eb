"""Contrasts as tokens: the ids of both prompts, how they align, and the answers."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from hiddenscope.causes.contrast import AnswerPair, Contrast, Interchange
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, TokenColumns, in_columns
from hiddenscope.passes.text_encoder import notes_on_spaces, text_before, token_after
from hiddenscope.states.arrays import Ints
from hiddenscope.texts import number_groups


class EncodedContrast(NamedTuple):
    """A contrast as token ids: its inputs are the clean and the corrupt prompt.

    `columns` pairs the positions of both prompts, for each stack (None in a model with
    one). `at` is the position of each prompt, or of the decoder's targets, at which the
    answers are read.
    """

    inputs: Inputs
    columns: dict[str | None, TokenColumns]
    at: tuple[int, int]
    answer: int
    other: int
    notes: tuple[str, ...] = ()
    group: Hashable | None = None

    @property
    def key(self) -> Hashable:
        """Return a key that is the same for copies of a contrast."""
        targets = None if self.inputs.targets is None else self.inputs.targets.ids
        return self.inputs.ids, targets, self.at, self.answer, self.other

    def answers(self, model: Model) -> AnswerPair:
        """Return the two answers as strings."""
        string = model.text_encoder.string
        return AnswerPair(answer=string(self.answer), other=string(self.other))

    @property
    def prompts(self) -> Hashable:
        """Return a key of the two prompts, whichever of them is clean."""
        return frozenset(self.inputs.ids)


class AskedContrasts(NamedTuple):
    """Distinct contrasts, the number of the group of each, and how many are copies."""

    encodings: list[EncodedContrast]
    groups: Ints
    copies: int

    @property
    def group_count(self) -> int:
        """Return how many groups are independent of each other."""
        return int(self.groups.max()) + 1

    def notes(self) -> Iterator[str]:
        """Yield what was unusual about the contrasts."""
        if self.copies == 1:
            yield "One pair of prompts is a copy of another and counted once."
        elif self.copies:
            copies = f"{self.copies:,} pairs of prompts are copies of another"
            yield f"{copies} and counted once."
        if self.group_count == 1 < len(self.encodings):
            yield "All pairs of prompts belong together, so there is no standard error."
        for encoded in self.encodings:
            yield from encoded.notes

    def texts(self) -> dict[str, list[str]]:
        """Return the clean and the corrupt prompts, as attributes of a dataset."""
        texts = [encoded.inputs.texts or () for encoded in self.encodings]
        sides = zip(*texts, strict=True)
        names = zip(("texts", "other_texts"), sides, strict=False)
        return {name: list(side) for name, side in names}


def ask_contrasts(
    model: Model,
    contrasts: Contrast | Sequence[Contrast],
    *,
    one_form: bool = True,
) -> AskedContrasts:
    """Encode the contrasts of a question."""
    asked = [contrasts] if isinstance(contrasts, Contrast) else contrasts
    if (
        not isinstance(asked, list | tuple)
        or not asked
        or not all(isinstance(contrast, Contrast) for contrast in asked)
    ):
        raise TextError(
            "contrasts must be a Contrast or a list of them",
            f"got {contrasts!r:.60}",
            "Give hs.Contrast(clean, corrupt, answer, other).",
        )
    return encode_distinct(model, asked, one_form=one_form)


def encode_distinct(
    model: Model, pairs: Sequence[Contrast | Interchange], *, one_form: bool
) -> AskedContrasts:
    """Encode pairs of prompts, each once, and number their groups.

    Those of one named group, or of the same prompts, belong together.
    """
    # A copy says nothing new: the first of its kind stands for it.
    distinct: dict[Hashable, EncodedContrast] = {}
    for encoded in encode_contrasts(model, pairs, one_form=one_form):
        distinct.setdefault(encoded.key, encoded)
    encodings = list(distinct.values())
    names: list[Hashable] = []
    for number, encoded in enumerate(encodings):
        if encoded.group is None:
            names.append(("contrast", number))
        else:
            names.append(("group", encoded.group))
    groups = number_groups([encoded.prompts for encoded in encodings], names)
    return AskedContrasts(encodings, groups, len(pairs) - len(encodings))


def encode_contrasts(
    model: Model,
    contrasts: Sequence[Contrast | Interchange],
    *,
    one_form: bool = True,
) -> list[EncodedContrast]:
    """Encode the contrasts; refuse those that cannot be patched or averaged.

    To be averaged token by token they must have `one_form`.
    """
    prompts = []
    targets = []
    for contrast in contrasts:
        prompts += [contrast.clean, contrast.corrupt]
        if contrast.targets is not None:
            targets += [contrast.targets, contrast.targets]
    if targets and len(targets) < len(prompts):
        raise TextError(
            "Cannot use the targets",
            f"{len(targets) // 2} of {len(contrasts)} contrasts have targets",
            "Give targets in every contrast or in none.",
        )
    # A list of prompts is all strings or all ids; `encode` refuses a mixed one.
    inputs = model.encode(cast(Any, prompts), targets=cast(Any, targets) or None)
    encoded = []
    for number, contrast in enumerate(contrasts):
        both = inputs.some([2 * number, 2 * number + 1])
        encoded.append(_encoded(model, contrast, both))
    # Averaged column by column, all must have the form of the first.
    first = encoded[0]
    for number, other in enumerate(encoded if one_form else ()):
        reason = ""
        if other.at != first.at:
            reason = (
                f"contrast 0 is read at position {first.at[0]}, contrast {number} at"
                f" {other.at[0]}"
            )
        for stack, columns in other.columns.items():
            first_columns = first.columns[stack]
            if len(columns) != len(first_columns):
                reason = (
                    f"contrast 0 has {len(first_columns)} columns of tokens, contrast"
                    f" {number} has {len(columns)}"
                )
                break
            if _gaps(columns) != _gaps(first_columns):
                reason = (
                    f"contrast {number} has its gaps at other tokens than contrast 0"
                )
                break
        if reason:
            raise TextError(
                "Cannot average these contrasts column by column",
                reason,
                "Give contrasts of one form, with the same number of tokens, or patch"
                " them one by one.",
            )
    return encoded


def _encoded(
    model: Model, contrast: Contrast | Interchange, inputs: Inputs
) -> EncodedContrast:
    prompts = contrast.clean, contrast.corrupt
    for length, prompt in zip(inputs.lengths, prompts, strict=True):
        if length < 2:
            reason = f"the prompt {str(prompt)[:40]!r} has one token"
            remedy = "Give prompts of two tokens or more."
            raise TextError(contrast.problem, reason, remedy)
    if inputs.ids[0] == inputs.ids[1]:
        reason = "both prompts have the same tokens"
        raise TextError(
            contrast.problem, reason, "Give two that differ in what matters."
        )
    stacks = (None,) if len(model.anatomy.stacks) == 1 else ("encoder", "decoder")
    answering = inputs.of(stacks[-1])
    masked = stacks == (None,) and not model.anatomy.stacks[-1].causal
    at = [_position(model, ids, contrast.at, masked=masked) for ids in answering.ids]
    texts_before = []
    notes: list[str] = []
    if not masked:
        for side, position in enumerate(at):
            texts_before.append(text_before(answering, side, position))
    # A tokenizer serves one thread at a time.
    with model.lock:
        answer = token_after(model.text_encoder, contrast.answer, texts_before)
        other = token_after(model.text_encoder, contrast.other, texts_before)
        if not masked:
            answers = (contrast.answer, contrast.other)
            notes += notes_on_spaces(model.tokenizer, answers)
    if answer == other and contrast.answer != contrast.other:
        reason = f"both answers are the token {model.text_encoder.string(answer)!r}"
        raise TextError(contrast.problem, reason, "Give two different tokens.")
    columns = {stack: in_columns(*inputs.of(stack).ids) for stack in stacks}
    return EncodedContrast(
        inputs, columns, (at[0], at[1]), answer, other, tuple(notes), contrast.group
    )


def _position(model: Model, ids: Sequence[int], at: int | None, *, masked: bool) -> int:
    """Return where the answers are read: at `at`, the mask token, or the last one."""
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
    remedy = "Give at=."
    mask_token = getattr(model.tokenizer, "mask_token", None)
    if mask_token:
        remedy = f"Put one {mask_token} where the answer belongs, or give at=."
    problem = f"Cannot tell where {model.name}, a masked language model, answers"
    raise TextError(problem, f"the prompt has {len(positions)} mask tokens", remedy)


def _gaps(columns: TokenColumns) -> list[bool]:
    return [None in column for column in columns]
