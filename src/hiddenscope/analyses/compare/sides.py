"""Sides: both sides of every text, one text at a time: from one model, from two, or as they were given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hiddenscope.errors import PassError, StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Encoded, Texts, make_batch, watchable
from hiddenscope.passes.compat import make
from hiddenscope.sites import Site, select
from hiddenscope.states import Pair, Readable, Source, States

Side: TypeAlias = States | Pair
Sides: TypeAlias = tuple[Side, Side]

TOGETHER = "both in one batch, so that what is the same comes out the same bit for bit"
ANYWHERE = Source("states of no named model")


@dataclass(frozen=True)
class Asked:
    """What is compared besides a model: texts or states, the decoders' texts, and which sites."""

    a: Any
    b: Any
    other: Model | None
    sites: Any
    targets: Texts | None
    other_targets: Texts | None
    truncate: bool


@dataclass(frozen=True)
class Both:
    """The two sides of every text, how many there are, how they are run, and what rounding alone makes, if asked."""

    sides: Iterator[Sides]
    count: int
    run: str
    floor: Callable[[], tuple[Side, Side, str]] | None = None


@dataclass(frozen=True)
class _Given:
    """The texts of one side as its model takes them, with its decoder's if it has one."""

    texts: Encoded
    aims: Encoded | None

    def one(self, number: int) -> "_Given":
        return _Given(_one(self.texts, number), self.aims and _one(self.aims, number))

    def beside(self, other: "_Given") -> "_Given":
        aims = None if self.aims is None or other.aims is None else _joined(self.aims, other.aims)
        return _Given(_joined(self.texts, other.texts), aims)


def sides_of(model: Model | Readable | Pair, asked: Asked) -> Both:
    """Both sides, once it is clear what they are."""
    aimed = asked.targets is not None or asked.other_targets is not None
    if not isinstance(model, Model):
        if not isinstance(asked.a, Pair | Readable) or asked.b is not None or asked.other is not None or aimed:
            reason = "states are compared with states, and with nothing else"
            raise StatesError("A comparison of states", reason, "Give compare(states, others).")
        return _given(model, asked.a, asked.sites)
    if isinstance(asked.a, Pair | Readable) or isinstance(asked.b, Pair | Readable):
        reason = "states were given with it, and need none"
        raise StatesError(f"A comparison in {model.name}", reason, "Give compare(states, others), or texts.")
    if (asked.b is None) == (asked.other is None):
        reason = "there is no second text and no other model" if asked.b is None else "a second text and another model"
        raise TextError(f"A comparison in {model.name}", reason, "Give b, or give other=.")
    second = asked.targets if asked.other_targets is None else asked.other_targets
    if asked.other is not None:
        models = model, asked.other
        given = [_encoded(*pair, asked.a, asked) for pair in zip(models, (asked.targets, second), strict=True)]
        sides = _apart(models, given, asked.sites)
        return Both(sides, len(given[0].texts.ids), "each model by itself, text by text")
    given = [_encoded(model, *pair, asked) for pair in ((asked.targets, asked.a), (second, asked.b))]
    return _in_one_model(model, given, asked.sites)


def _encoded(model: Model, targets: Texts | None, texts: Texts, asked: Asked) -> _Given:
    """The texts of one side, and whether the model has what is asked of it."""
    watchable(model.module)
    model.anatomy.select(asked.sites)
    two = len(model.anatomy.stacks) > 1
    if targets is not None and not two:
        raise PassError("Targets for a decoder", f"{model.name} has one stack", "Leave `targets` out.")
    with model.lock:  # a tokenizer serves one thread at a time
        encoded = model.encoder.encode(texts, truncate=asked.truncate)
        aims = model.encoder.targets(targets, len(encoded.ids), truncate=asked.truncate) if two else None
    return _Given(encoded, aims)


def _in_one_model(model: Model, given: list[_Given], sites: Any) -> Both:
    counts = [len(side.texts.ids) for side in given]
    if counts[0] != counts[1]:
        reason = f"there are {counts[0]} on one side and {counts[1]} on the other"
        raise TextError("Texts compared one by one", reason, "Give as many on each side.")
    if _may_share(model, given):
        return Both(_together(model, given, sites), counts[0], TOGETHER)
    why = model.batching.reason if not model.batches else "one side of a pair is so long that its positions are scaled"
    one = given[0].one(0)

    def floor() -> tuple[Side, Side, str]:
        alone = _run(model, one, sites)
        try:
            return alone, _run(model, one.beside(one), sites), "the first text alone and in two copies"
        except Exception:
            return alone, _run(model, one, sites), "the first text run twice"

    return Both(_apart((model, model), given, sites), counts[0], f"apart: {why}", floor)


def _may_share(model: Model, given: list[_Given]) -> bool:
    """Whether each text may go through the model with the one that it is compared with."""
    turn = model.batching.rope_switch
    if not model.batches or turn is None:
        return model.batches
    lengths = zip(*(side.texts.lengths for side in given), strict=True)
    return all((a > turn) == (b > turn) for a, b in lengths)


def _together(model: Model, given: list[_Given], sites: Any) -> Iterator[Sides]:
    for number in range(len(given[0].texts.ids)):
        both = _run(model, given[0].one(number).beside(given[1].one(number)), sites)
        yield _of(both, 0), _of(both, 1)


def _apart(models: tuple[Model, Model], given: list[_Given], sites: Any) -> Iterator[Sides]:
    for number in range(len(given[0].texts.ids)):
        first, second = (_run(model, side.one(number), sites) for model, side in zip(models, given, strict=True))
        yield first, second


def _run(model: Model, given: _Given, sites: Any) -> Side:
    batch = make_batch(model, given.texts, given.aims, range(len(given.texts.ids)))
    return make(model, (given.texts, given.aims, batch), model.anatomy.select(sites), logits=False).states


def _one(encoded: Encoded, number: int) -> Encoded:
    some = slice(number, number + 1)
    return Encoded(encoded.texts and encoded.texts[some], encoded.ids[some], encoded.spans and encoded.spans[some])


def _joined(a: Encoded, b: Encoded) -> Encoded:
    """Two texts as one batch: strings and their characters, where both sides have them."""
    texts = a.texts + b.texts if a.texts and b.texts else None
    return Encoded(texts, a.ids + b.ids, a.spans + b.spans if texts and a.spans and b.spans else None)


def _given(a: Any, b: Any, sites: Any) -> Both:
    """States that were given, text by text."""
    tokens = [(side.encoder if isinstance(side, Pair) else side).tokens for side in (a, b)]
    counts, stacks = [some.count for some in tokens], [2 if isinstance(side, Pair) else 1 for side in (a, b)]
    if counts[0] != counts[1] or stacks[0] != stacks[1]:
        reason = f"there are {counts[0]} texts of {stacks[0]} stacks and {counts[1]} of {stacks[1]}"
        raise StatesError("States compared text by text", reason, "Give as many texts, in models of one kind.")
    texts = zip(_text_by_text(a, sites), _text_by_text(b, sites), strict=True)
    return Both(texts, counts[0], "states as they were given")


def _text_by_text(side: Any, sites: Any) -> Iterator[Side]:
    """One text after another; of a source that is read in blocks, no more than a block a site is held."""
    if isinstance(side, States | Pair):
        count = (side.encoder if isinstance(side, Pair) else side).tokens.count
        yield from (_of(side, number) for number in range(count))
        return
    chosen, known = select(sites, side.sites), getattr(side, "source", None)
    readers = [_Reader(side, site) for site in chosen]
    for number in range(side.tokens.count):
        tokens = side.tokens.of(number)
        rows = [reader.take(len(tokens)) for reader in readers]
        if len({one.shape for one in rows}) > 1:
            reason = "they are not all of one width"
            raise StatesError(f"States at {len(chosen)} sites", reason, "Choose sites of one width.")
        yield States(chosen, torch.stack(rows), tokens, known if isinstance(known, Source) else ANYWHERE)


class _Reader:
    """The rows of one site, so many at a time as are asked for."""

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
                raise StatesError(f"The states at {self.site}", reason, "Give a source with one row a token.")
            parts.append(self._held[:missing])
            missing -= len(self._held)
        self._held = self._held[len(parts[-1]) :]
        return torch.cat(parts)


def _of(side: Side, number: int) -> Side:
    if isinstance(side, Pair):
        return Pair(side.encoder.of(number), side.decoder.of(number))
    return side.of(number)
