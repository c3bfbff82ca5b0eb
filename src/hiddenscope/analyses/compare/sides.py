"""Sides: pair the two sides of every text, and align their tokens in columns."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import (
    Inputs,
    Texts,
    TokenColumns,
    in_columns,
    record,
    require_recordable,
)
from hiddenscope.passes.buffers import stacks_in
from hiddenscope.passes.resume import trial_texts
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Pair, Readable, Source, States, Tokens
from hiddenscope.states.mixed import one_tensor, stack_sites

Side: TypeAlias = list[States]
"""The states of one text on one side of a comparison, stack by stack."""
Sides: TypeAlias = tuple[Side, Side]
Run: TypeAlias = Literal["together", "apart", "two_models", "states"]
Repeated: TypeAlias = tuple[Side, Side, Literal["two_copies", "two_runs"]]

TRIAL_TOKENS = 7
UNKNOWN = Source("states of no named model")


@dataclass(frozen=True)
class TextPairs:
    """The two sides of every text, how many texts there are, and how they were run.

    Where a text cannot share a batch with the one that it is compared with, or the
    texts of a batch are not rounded alike, `note` says so, and `repeat` runs the first
    text twice, to show what rounding alone does: once in a pass of its own, and again
    in "two_copies" or in "two_runs".
    """

    pairs: Iterator[Sides]
    count: int
    run: Run
    note: str = ""
    repeat: Callable[[], Repeated] | None = None


def from_model(model: Model, a: Inputs, b: Inputs, sites: SitePatterns) -> TextPairs:
    """Pair two texts in one model, in one batch wherever possible.

    In one batch, most states that are the same are so bit for bit.
    """
    require_recordable(model.module)
    model.anatomy.select(sites)
    if len(a) != len(b):
        reason = f"there are {len(a)} on one side and {len(b)} on the other"
        raise TextError(
            "Cannot compare texts one by one",
            reason,
            "Give the same number on each side.",
        )
    first = a.some([0])

    def repeat() -> Repeated:
        single = _run(model, first, sites)
        try:
            # Not every model runs two copies in one batch.
            copies = _run(model, _joined(first, first), sites)
        except Exception:
            return single, _run(model, first, sites), "two_runs"
        return single, copies, "two_copies"

    batching = model.batching
    reason = "" if batching.padding_safe else batching.reason
    # LongRoPE scales the positions of a whole batch if one of its texts is long.
    switch = batching.rope_switch
    if not reason and switch is not None:
        for length, other_length in zip(a.lengths, b.lengths, strict=True):
            if (length > switch) != (other_length > switch):
                reason = "one side of a pair is so long that its positions are scaled"
    if reason:
        note = (
            f"The two sides were run apart, because {reason}; differences below the"
            " rounding floor are none."
        )
        apart = _apart((model, model), (a, b), sites)
        return TextPairs(apart, len(a), "apart", note, repeat)
    together = _together(model, a, b, sites)
    if model.trials.once("equal rows", lambda: _rounds_alike(model), form=bool):
        return TextPairs(together, len(a), "together")
    note = (
        "The texts of a batch are not rounded alike in this model; differences below"
        " the rounding floor are none."
    )
    return TextPairs(together, len(a), "together", note, repeat)


def from_two_models(
    models: tuple[Model, Model],
    texts: Texts | Inputs,
    sites: SitePatterns,
    targets: Texts | Inputs | None,
    truncate: bool,
) -> TextPairs:
    """Pair one text in two models, each with its own tokenizer."""
    for model in models:
        require_recordable(model.module)
        model.anatomy.select(sites)
    first = models[0].encode(texts, targets=targets, truncate=truncate)
    if targets is None and isinstance(texts, Inputs):
        targets = texts.targets
    if (
        isinstance(targets, Inputs)
        and targets.texts is None
        and set(targets.lengths) == {1}
    ):
        # Only a start token: the other model has its own.
        targets = None
    second = models[1].encode(_plain(texts), targets=_plain(targets), truncate=truncate)
    apart = _apart(models, (first, second), sites)
    return TextPairs(apart, len(first), "two_models")


def _plain(texts: Any) -> Any:
    """Return encoded texts as strings, or else ids, for another model to encode."""
    if not isinstance(texts, Inputs):
        return texts
    if texts.texts is not None:
        return list(texts.texts)
    return [list(ids) for ids in texts.ids]


def _together(
    model: Model, a: Inputs, b: Inputs, sites: SitePatterns
) -> Iterator[Sides]:
    for number in range(len(a)):
        first, second = a.some([number]), b.some([number])
        targets = [side.targets and side.targets.ids for side in (first, second)]
        if first.ids == second.ids and targets[0] == targets[1]:
            # Run it once: two rows of a batch may be rounded differently.
            states = _run(model, first, sites)
            yield states, states
        else:
            both = _run(model, _joined(first, second), sites)
            yield _of_text(both, 0), _of_text(both, 1)


def _rounds_alike(model: Model) -> bool:
    """Try whether a text in two copies gives the same states twice, bit for bit.

    Experts and scans may not.
    """
    text = trial_texts(model, [TRIAL_TOKENS], seed=13)
    if model.encoder_decoder:
        text = text.with_targets(trial_texts(model, [TRIAL_TOKENS], seed=14))
    for stack in _run(model, _joined(text, text), "layer.*,final"):
        first, second = stack.of(0).values, stack.of(1).values
        if not torch.equal(one_tensor(first), one_tensor(second)):
            return False
    return True


def _apart(
    models: tuple[Model, Model], inputs: tuple[Inputs, Inputs], sites: SitePatterns
) -> Iterator[Sides]:
    for number in range(len(inputs[0])):
        first, second = (side.some([number]) for side in inputs)
        yield _run(models[0], first, sites), _run(models[1], second, sites)


def _run(model: Model, inputs: Inputs, sites: SitePatterns) -> Side:
    return stacks_in(record(model, inputs, sites).states)


def _of_text(side: Side, number: int) -> Side:
    return [stack.of(number) for stack in side]


def _joined(a: Inputs, b: Inputs) -> Inputs:
    """Join two texts to one batch, with strings and spans if both sides have them."""
    texts = spans = targets = None
    if a.texts and b.texts:
        texts = a.texts + b.texts
        if a.spans and b.spans:
            spans = a.spans + b.spans
    if a.targets is not None and b.targets is not None:
        targets = _joined(a.targets, b.targets)
    return Inputs(a.ids + b.ids, texts, spans, targets)


def from_states(
    a: Readable | Pair, b: Readable | Pair, sites: SitePatterns
) -> TextPairs:
    """Pair states that were captured before, text by text."""
    counts = _text_count(a), _text_count(b)
    stacks = isinstance(a, Pair) + 1, isinstance(b, Pair) + 1
    if counts[0] != counts[1] or stacks[0] != stacks[1]:
        reason = (
            f"there are {counts[0]} texts of {stacks[0]} stacks and {counts[1]} of"
            f" {stacks[1]}"
        )
        raise StatesError(
            "Cannot compare states text by text",
            reason,
            "Give the same number of texts, in models of the same kind.",
        )
    pairs = zip(_by_text(a, sites), _by_text(b, sites), strict=True)
    return TextPairs(pairs, counts[0], "states")


def _text_count(side: Readable | Pair) -> int:
    if isinstance(side, Pair):
        side = side.encoder
    return side.tokens.count


def _by_text(side: Readable | Pair, sites: SitePatterns) -> Iterator[Side]:
    """Yield one text after another.

    Of a source that is read in blocks, one block for each site is held at a time.
    """
    if isinstance(side, States | Pair):
        for number in range(_text_count(side)):
            yield _of_text(stacks_in(side), number)
        return
    selected = select(sites, side.sites)
    source = getattr(side, "source", None)
    if not isinstance(source, Source):
        source = UNKNOWN
    by_site = [_rows_by_text(side, site) for site in selected]
    for number, rows in enumerate(zip(*by_site, strict=True)):
        values = stack_sites(selected, rows)
        yield [States(selected, values, side.tokens.of(number), source)]


def _rows_by_text(source: Readable, site: Site) -> Iterator[torch.Tensor]:
    """Yield the rows of one site, text by text."""
    blocks = source.blocks(site)
    rest = next(blocks, torch.zeros(0))
    for length in source.tokens.lengths.tolist():
        while len(rest) < length:
            block = next(blocks, None)
            if block is None:
                raise StatesError(
                    f"Cannot read the states at {site}",
                    "its blocks have fewer rows than there are tokens",
                    "Give one row for each token.",
                )
            rest = torch.cat([rest, block])
        yield rest[:length]
        rest = rest[length:]


def align_tokens(a: Tokens, b: Tokens, *, by_spans: bool) -> TokenColumns:
    """Pair tokens in columns by their ids, or by where in the text they end.

    The latter is for one text in two tokenizers.
    """
    same = np.array_equal(a.ids, b.ids) and a.strings == b.strings
    if same or not by_spans or a.texts is None or a.texts != b.texts:
        if a.texts is not None and b.texts is not None:
            # An id must mean the same on both sides.
            strings = dict(zip(a.ids.tolist(), a.strings, strict=True))
            for token, string in zip(b.ids.tolist(), b.strings, strict=True):
                other = strings.get(token, string)
                if other != string:
                    raise StatesError(
                        "Cannot compare different texts of two tokenizers",
                        f"one id means {other!r} in one and {string!r} in the other",
                        "Compare one text, or give states of one model.",
                    )
        return in_columns(a.ids.tolist(), b.ids.tolist(), pair=True)
    ends = _ends(a), _ends(b)
    for side in ends:
        if all(end < 0 for end, _ in side):
            reason = (
                "the tokenizers differ and one does not say which characters its tokens"
                " stand for"
            )
            raise TextError(
                "Cannot compare one text in two models",
                reason,
                "Use a fast tokenizer, or give ids.",
            )
    return in_columns(*ends, pair=False)


def _ends(tokens: Tokens) -> list[tuple[int, int]]:
    """Return the character after each token, and how many later tokens end there too.

    The character is -1 for a token that stands for none.
    """
    later: Counter[int] = Counter()
    ends = []
    for end in reversed(tokens.spans[:, 1].tolist()):
        ends.append((end, later[end] if end >= 0 else 0))
        later[end] += 1
    return ends[::-1]
