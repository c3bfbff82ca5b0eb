"""Sides: both sides of every text, one text at a time, and which of their tokens stand
in one column.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Columns, Inputs, Texts, in_columns, record, recordable
from hiddenscope.passes.resume import trial_texts
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Pair, Readable, Source, States, Tokens

Side: TypeAlias = States | Pair
Run: TypeAlias = Literal["together", "apart", "two_models", "states"]

TRIAL_TOKENS = 7
UNKNOWN = Source("states of no named model")


@dataclass(frozen=True)
class Sides:
    """The two sides of every text, how many texts there are, and how they were run.

    Where a text cannot share a batch with the one that it is compared with, or the
    texts of a batch are not rounded alike, `note` says so, and `repeat` runs the first
    text twice, to show what rounding alone does: once alone, and again in "two_copies"
    or in "two_runs".
    """

    pairs: Iterator[tuple[Side, Side]]
    count: int
    run: Run
    note: str = ""
    repeat: Callable[[], tuple[Side, Side, str]] | None = None


def from_model(model: Model, a: Inputs, b: Inputs, sites: SitePatterns) -> Sides:
    """Two texts in one model, in one batch wherever possible: what is the same is then
    mostly so bit for bit.
    """
    recordable(model.module)
    model.anatomy.select(sites)
    if len(a) != len(b):
        reason = f"there are {len(a)} on one side and {len(b)} on the other"
        raise TextError(
            "Cannot compare texts one by one",
            reason,
            "Give the same number on each side.",
        )
    batching = model.batching
    switch = batching.rope_switch
    scaled = switch is not None and any(
        (one > switch) != (two > switch)
        for one, two in zip(a.lengths, b.lengths, strict=True)
    )
    first = a.some([0])

    def repeat() -> tuple[Side, Side, str]:
        alone = record(model, first, sites).states
        try:
            return (
                alone,
                record(model, _joined(first, first), sites).states,
                "two_copies",
            )
        except Exception:
            return alone, record(model, first, sites).states, "two_runs"

    if batching.padding_safe and not scaled:
        together = _together(model, a, b, sites)
        if model.trials.once("equal rows", lambda: _rounds_alike(model), form=bool):
            return Sides(together, len(a), "together")
        note = (
            "The texts of a batch are not rounded alike in this model; differences"
            " below the rounding floor are none."
        )
        return Sides(together, len(a), "together", note, repeat)
    why = (
        "one side of a pair is so long that its positions are scaled"
        if batching.padding_safe
        else batching.reason
    )
    note = (
        f"The two sides were run apart, because {why}; differences below the rounding"
        " floor are none."
    )
    return Sides(_apart((model, model), (a, b), sites), len(a), "apart", note, repeat)


def from_two_models(
    models: tuple[Model, Model],
    texts: Texts | Inputs,
    sites: SitePatterns,
    targets: Texts | Inputs | None,
    truncate: bool,
) -> Sides:
    """One text in two models, each with its own tokenizer."""
    for model in models:
        recordable(model.module)
        model.anatomy.select(sites)
    first = models[0].encode(texts, targets=targets, truncate=truncate)
    targets = (
        texts.targets if targets is None and isinstance(texts, Inputs) else targets
    )
    if (
        isinstance(targets, Inputs)
        and targets.texts is None
        and set(targets.lengths) == {1}
    ):
        targets = None  # a start token alone: the other model has its own
    second = models[1].encode(_plain(texts), targets=_plain(targets), truncate=truncate)
    return Sides(_apart(models, (first, second), sites), len(first), "two_models")


def _plain(texts: Any) -> Any:
    """The strings of encoded texts, or else their ids, for another model to encode;
    anything else as it is.
    """
    if not isinstance(texts, Inputs):
        return texts
    return (
        list(texts.texts)
        if texts.texts is not None
        else [list(ids) for ids in texts.ids]
    )


def _together(
    model: Model, a: Inputs, b: Inputs, sites: SitePatterns
) -> Iterator[tuple[Side, Side]]:
    for number in range(len(a)):
        one, two = a.some([number]), b.some([number])
        if one.ids == two.ids and (one.targets and one.targets.ids) == (
            two.targets and two.targets.ids
        ):
            # Once: two rows of a batch may be rounded otherwise.
            states = record(model, one, sites).states
            yield states, states
        else:
            both = record(model, _joined(one, two), sites).states
            yield _one_text(both, 0), _one_text(both, 1)


def _rounds_alike(model: Model) -> bool:
    """Whether a text in two copies gives the same states twice, bit for bit; experts
    and scans may not.
    """
    text = trial_texts(model, [TRIAL_TOKENS], seed=13)
    text = (
        text.with_targets(trial_texts(model, [TRIAL_TOKENS], seed=14))
        if model.encoder_decoder
        else text
    )
    both = record(model, _joined(text, text)).states
    sides = [both.encoder, both.decoder] if isinstance(both, Pair) else [both]
    return all(torch.equal(side.of(0).values, side.of(1).values) for side in sides)


def _apart(
    models: tuple[Model, Model], inputs: tuple[Inputs, Inputs], sites: SitePatterns
) -> Iterator[tuple[Side, Side]]:
    for number in range(len(inputs[0])):
        one, two = (
            record(model, side.some([number]), sites).states
            for model, side in zip(models, inputs, strict=True)
        )
        yield one, two


def _joined(a: Inputs, b: Inputs) -> Inputs:
    """Two texts as one batch, with their strings and spans where both sides have them."""
    texts = a.texts + b.texts if a.texts and b.texts else None
    spans = a.spans + b.spans if texts and a.spans and b.spans else None
    targets = (
        _joined(a.targets, b.targets)
        if a.targets is not None and b.targets is not None
        else None
    )
    return Inputs(a.ids + b.ids, texts, spans, targets)


def from_states(a: Any, b: Any, sites: SitePatterns) -> Sides:
    """States that were captured before, text by text."""
    tokens = [
        (side.encoder if isinstance(side, Pair) else side).tokens for side in (a, b)
    ]
    counts, stacks = (
        [one.count for one in tokens],
        [2 if isinstance(side, Pair) else 1 for side in (a, b)],
    )
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
    return Sides(
        zip(_by_text(a, sites), _by_text(b, sites), strict=True), counts[0], "states"
    )


def _by_text(side: Any, sites: SitePatterns) -> Iterator[Side]:
    """One text after another; of a source that is read in blocks, one block for each
    site is held at a time.
    """
    if isinstance(side, States | Pair):
        count = (side.encoder if isinstance(side, Pair) else side).tokens.count
        yield from (_one_text(side, number) for number in range(count))
        return
    chosen, source = select(sites, side.sites), getattr(side, "source", None)
    readers = [_RowReader(side, site) for site in chosen]
    for number in range(side.tokens.count):
        tokens = side.tokens.of(number)
        rows = [reader.take(len(tokens)) for reader in readers]
        if len({one.shape for one in rows}) > 1:
            reason = "they are not all of one width"
            raise StatesError(
                f"Cannot compare {len(chosen)} sites",
                reason,
                "Choose sites of one width.",
            )
        yield States(
            chosen,
            torch.stack(rows),
            tokens,
            source if isinstance(source, Source) else UNKNOWN,
        )


class _RowReader:
    """The rows of one site in order, as many at a time as are asked for."""

    def __init__(self, source: Readable, site: Site) -> None:
        self.site, self._blocks = site, source.blocks(site)
        self._held = next(self._blocks, torch.zeros(0))

    def take(self, count: int) -> torch.Tensor:
        """The next so many rows."""
        parts, missing = [self._held[:count]], count - len(self._held)
        while missing > 0:
            self._held = next(self._blocks, self._held[:0])
            if not len(self._held):
                reason = "its blocks have fewer rows than there are tokens"
                raise StatesError(
                    f"Cannot read the states at {self.site}",
                    reason,
                    "Give one row for each token.",
                )
            parts.append(self._held[:missing])
            missing -= len(self._held)
        self._held = self._held[len(parts[-1]) :]
        return torch.cat(parts)


def _one_text(side: Side, number: int) -> Side:
    if isinstance(side, Pair):
        return Pair(side.encoder.of(number), side.decoder.of(number))
    return side.of(number)


def aligned(a: Tokens, b: Tokens, *, by_spans: bool) -> Columns:
    """Which tokens stand in one column: by their ids, or for two tokenizers by where in
    the text they end.
    """
    same = np.array_equal(a.ids, b.ids) and a.strings == b.strings
    if same or not by_spans or a.texts is None or a.texts != b.texts:
        _check_vocabulary(a, b)
        return in_columns(a.ids.tolist(), b.ids.tolist(), pair=True)
    ends = [_ends(tokens) for tokens in (a, b)]
    if any(all(end < 0 for end, _ in side) for side in ends):
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


def _check_vocabulary(a: Tokens, b: Tokens) -> None:
    """Ids of two texts can be compared only if they mean the same."""
    strings = dict(zip(a.ids.tolist(), a.strings, strict=True))
    pairs = [
        (strings.get(i, string), string)
        for i, string in zip(b.ids.tolist(), b.strings, strict=True)
    ]
    different = [(one, two) for one, two in pairs if one != two]
    if different and a.texts is not None and b.texts is not None:
        reason = (
            f"one id means {different[0][0]!r} in one and {different[0][1]!r} in the"
            " other"
        )
        remedy = "Compare one text, or give states of one model."
        raise StatesError(
            "Cannot compare different texts of two tokenizers", reason, remedy
        )


def _ends(tokens: Tokens) -> list[tuple[int, int]]:
    """The character after each token, and how many more tokens end there; -1 for one
    that stands for none.
    """
    seen: Counter[int] = Counter()
    ends = []
    for end in reversed(tokens.spans[:, 1].tolist()):
        ends.append((end, seen[end] if end >= 0 else 0))
        seen[end] += 1
    return ends[::-1]
