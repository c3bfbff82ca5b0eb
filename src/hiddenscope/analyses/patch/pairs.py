"""Pairs: a clean and a corrupt text, how their tokens stand side by side, and where which answer is read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Columns, Encoded, Texts, in_columns


@dataclass(frozen=True)
class TextPair:
    """Two texts as ids, clean first; an encoder-decoder's decoder has one and the same text in both.

    `columns` are the tokens that stand side by side, for each stack; `at` is the position of each text (or of the
    decoder's) at which the answer is read.
    """

    ids: tuple[tuple[int, ...], tuple[int, ...]]
    targets: tuple[int, ...] | None
    columns: dict[str | None, Columns]
    at: tuple[int, int]
    answer: int
    other: int
    notes: tuple[str, ...] = ()


def pairs(
    model: Model, sides: Sequence[Texts], answers: Sequence[Any], targets: Texts | None, position: int | None
) -> list[TextPair]:
    """The pairs that were given; what cannot be patched is refused."""
    with model.lock:  # a tokenizer serves one thread at a time
        clean, corrupt = (model.encoder.encode(side) for side in sides)
        count = len(clean.ids)
        two = len(model.anatomy.stacks) > 1
        if targets is not None and not two:
            raise TextError("Targets for a decoder", f"{model.name} has one stack", "Leave `targets` out.")
        aims = model.encoder.targets(targets, count) if two else None
        if len(corrupt.ids) != count:
            reason = f"there are {count} clean and {len(corrupt.ids)} corrupt ones"
            raise TextError("Pairs of texts", reason, "Give as many of each.")
        listed = [_listed(given, count, name) for given, name in zip(answers, ("answer", "other"), strict=True)]
        made = [_pair(model, clean, corrupt, aims, number, [one[number] for one in listed], position)
                for number in range(count)]  # fmt: skip
    _alike(made)
    return made


def single(model: Model, answer: Any, befores: Sequence[str | None]) -> int:
    """The one token that an answer is where it is read: after each of these texts the same; None where none is known.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> single(hs.load((tiny_model("llama"), None)), 7, [None])
    7
    """
    known = list(dict.fromkeys(before for before in befores if before is not None)) or [""]
    found = [model.encoder.one(answer, "answer", before=before) for before in known]
    if len(set(found)) > 1:
        said = " and ".join(f"{one} after {before[-40:]!r}" for one, before in zip(found, known, strict=True))
        raise TextError(
            f"The answer {str(answer)[:40]!r}", f"it is token {said}", "Give the id of the token that you mean."
        )
    return found[0]


def text_before(encoded: Encoded, number: int, at: int) -> str | None:
    """The text up to the end of the token at which an answer is read; None where that is not known."""
    if not encoded.texts:
        return None
    if encoded.spans is None:  # a tokenizer that does not say which characters its tokens stand for
        return encoded.texts[number] if at == len(encoded.ids[number]) - 1 else None
    return encoded.texts[number][: max(0, *(end for _, end in encoded.spans[number][: at + 1]))]


def _listed(given: Any, count: int, name: str) -> list[Any]:
    """One answer for each pair: the same for all, or as many as there are."""
    listed = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(listed) != count:
        reason = f"there are {len(listed)} for {count} pairs"
        raise TextError(f"The answers in {name}", reason, "Give one for each pair, or one for all.")
    return listed


def _pair(
    model: Model,
    clean: Encoded,
    corrupt: Encoded,
    aims: Encoded | None,
    number: int,
    answers: Sequence[Any],
    position: int | None,
) -> TextPair:
    ids = clean.ids[number], corrupt.ids[number]
    fed = ids if aims is None else (aims.ids[number],) * 2
    if min(len(side) for side in ids) < 2:
        short = clean if len(ids[0]) < 2 else corrupt
        named = repr(short.texts[number][:40]) if short.texts else f"pair {number}"
        raise TextError(f"Patching {named}", "it has one token", "Give texts of two tokens or more.")
    if ids[0] == ids[1]:
        raise TextError("A clean and a corrupt text", "they are the same", "Give two that differ in what matters.")
    masked = aims is None and not model.anatomy.stacks[-1].causal
    at = tuple(_place(model, side, position, masked=masked) for side in fed)
    sides = () if masked else zip((clean, corrupt) if aims is None else (aims, aims), at, strict=True)
    befores = [text_before(side, number, place) for side, place in sides]
    answer, other = (single(model, one, befores) for one in answers)
    if answer == other:
        reason = f"both are {model.encoder.string(answer)!r}"
        raise TextError("The answer and the other", reason, "Give two different tokens.")
    names = ("encoder", "decoder") if aims is not None else (None,)
    columns = {name: in_columns(*(fed if name == "decoder" else ids)) for name in names}
    notes = () if masked else tuple(_spaceless(model, answers))
    return TextPair(ids, None if aims is None else aims.ids[number], columns, (at[0], at[1]), answer, other, notes)


def _spaceless(model: Model, answers: Sequence[Any]) -> Iterator[str]:
    """A word without a space before it is seldom what comes next; the tokenizer may know it with one."""
    tokenizer: Any = model.tokenizer
    for answer in answers:
        if isinstance(answer, str) and answer[:1].isalpha():
            spaced = tokenizer(f" {answer}", add_special_tokens=False, verbose=False)["input_ids"]
            if len(spaced) == 1:
                yield f"{answer!r} was asked for, and {' ' + answer!r} is another token"


def _place(model: Model, ids: Sequence[int], position: int | None, *, masked: bool) -> int:
    """Where the answer is read: the last token, the mask, or the position that was given."""
    if position is not None:
        if not -len(ids) <= position < len(ids):
            reason = f"the text has {len(ids)} tokens"
            raise TextError(f"The position {position}", reason, f"Give 0 to {len(ids) - 1}, or -1 for the last.")
        return position % len(ids)
    if not masked:
        return len(ids) - 1
    mask = getattr(model.tokenizer, "mask_token_id", None)
    places = [place for place, token in enumerate(ids) if token == mask]
    if len(places) == 1:
        return places[0]
    token = getattr(model.tokenizer, "mask_token", None)
    remedy = f"Put one {token} where the answer belongs, or give position=." if token else "Give position=."
    raise TextError(f"The place of the answer in {model.name}, which fills masks", f"{len(places)} masks", remedy)


def _alike(made: Sequence[TextPair]) -> None:
    """Pairs are averaged column by column, so their columns must be the same."""
    for number, pair in enumerate(made[1:], 1):
        for stack, columns in pair.columns.items():
            first = made[0].columns[stack]
            if len(columns) != len(first) or [None in c for c in columns] != [None in c for c in first]:
                found = f"the first has {len(first)} columns of tokens and pair {number} has {len(columns)}"
                found = found if len(columns) != len(first) else f"pair {number} has its gaps elsewhere"
                remedy = "Give pairs of one form, with as many tokens each, or patch them one by one."
                raise TextError("Pairs that are averaged column by column", found, remedy)
        if pair.at != made[0].at:
            found = f"the first is read at {made[0].at[0]} and pair {number} at {pair.at[0]}"
            raise TextError("Pairs that are averaged column by column", found, "Give pairs of one form.")
