"""Vectors: one row a text, or one a token, of every site that an analysis looks at, without holding all states.

>>> from hiddenscope.model import load
>>> from hiddenscope.testing import tiny_model
>>> vectors(load((tiny_model("gpt2"), None)), [[5, 6, 7], [8, 9]], sites="layer.*").values.shape
torch.Size([4, 2, 64])
"""

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import NotFinite, StatesError, TextError, TooLarge
from hiddenscope.model import ANOTHER_BATCH, BUDGETS, Model
from hiddenscope.model.batching import plan
from hiddenscope.passes import Encoded, Landing, Texts, landings, make_batch, run, watchable
from hiddenscope.passes.buffer import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.sites import STACKS, Site, select
from hiddenscope.states import Pair, Readable, Source, States, Tokens

Token: TypeAlias = str | int

PLACES = {"last": -1, "first": 0, "cls": 0}
TOKENS = ("last", "first", "mean", "max", "cls", "each")
PORTION = 8192  # texts that are encoded, and sorted by length, at a time
ROOM = 64 * 2**20  # bytes of states that are held before they are pooled; one batch may take more


@dataclass(frozen=True, eq=False)
class Vectors:
    """Values `[site, row, width]`, float32 (float64 stays): a row is a text, or with `tokens` a token of one.

    >>> Vectors((Site(0),), torch.zeros(1, 2, 4), None, ("a", "b"), Source("toy"))["layer.0"].shape
    torch.Size([2, 4])
    """

    sites: tuple[Site, ...]
    values: Tensor
    tokens: Tokens | None
    texts: tuple[str, ...] | None
    source: Source | Mapping[str, Any]

    def __getitem__(self, site: str | Site) -> Tensor:
        chosen = select(site, self.sites, owner="these vectors")
        if len(chosen) > 1:
            raise StatesError(f"One site, {str(site)[:60]!r}", f"it names {len(chosen)}", "Ask for one.")
        return self.values[self.sites.index(chosen[0])]


def vectors(
    source: Model | Readable | Pair,
    texts: Texts | None = None,
    *,
    sites: Any = "layer.*,final",
    token: Token = "last",
    truncate: bool = False,
    targets: Texts | None = None,
) -> Vectors:
    """The vectors of texts, one a text in the order given: of a model and texts, or of states.

    `token` is what stands for a text: "last", "first", "cls", a position (negative from the end), or the "mean" or
    "max" over its tokens; "each" gives a row a token. A model's states are pooled as they come, a few batches at a
    time, and equal those of `capture(texts).pool()`: bit for bit up to 8,192 texts, within the rounding of other
    batches beyond. Of two stacks it is the encoder's unless the sites name the other.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> states = load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> torch.equal(vectors(states, token="mean").values, states.pool("mean"))
    True
    """
    token = _known(token)
    if isinstance(source, Model):
        wanted = _wanted(source, sites)
        _given(source, texts)
        if token != "each":
            pooled, kept = _pooled(source, texts, wanted, token, truncate=truncate, targets=targets)
            return Vectors(wanted, pooled, None, kept, source.source(wanted[0].stack))
        source = _states(source.capture(texts, wanted, targets=targets, truncate=truncate))  # type: ignore[arg-type]
    else:
        source = _readable(source, texts, targets, sites)
        wanted = _chosen(source, sites)
    tokens = source.tokens
    values = _whole(source, wanted, token)
    return Vectors(
        wanted, values, tokens if token == "each" else None, tokens.texts, getattr(source, "source", None) or {}
    )


def blocks(
    source: Model | Readable | Pair,
    texts: Texts | None = None,
    *,
    site: str | Site,
    token: Token = "last",
    truncate: bool = False,
    targets: Texts | None = None,
) -> Iterator[Tensor]:
    """The vectors of one site in order, `[some rows, width]` at a time, so that no more than a few are held.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> model = load((tiny_model("gpt2"), None))
    >>> [len(block) for block in blocks(model, [[5, 6, 7], [8, 9]], site="final", token="mean")]
    [2]
    """
    token = _known(token)
    if isinstance(source, Model):
        wanted = _wanted(source, site)
        _one(site, wanted)
        _given(source, texts)
        if token != "each":
            given = _listed(texts), _listed(targets)
            return (block[0] for _, block in _portions(source, given, wanted, token, truncate))
        source = _states(source.capture(texts, wanted, targets=targets, truncate=truncate))  # type: ignore[arg-type]
    else:
        source = _readable(source, texts, targets, site)
        wanted = _chosen(source, site)
        _one(site, wanted)
    return _read(source, wanted[0], token)


def _known(token: Token) -> Token:
    if isinstance(token, str) and token in TOKENS:
        return token
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    do = f"Ask for {', '.join(TOKENS)}, or give a position."
    raise StatesError(f"No token {str(token)[:40]!r}", "it stands for no text", do)


def _given(model: Model, texts: Texts | None) -> None:
    if texts is None:
        found = "there are no texts"
        raise TextError(f"Vectors of {model.name}", found, "Give one or several, or give states.")


def _one(site: str | Site, wanted: Sequence[Site]) -> None:
    if len(wanted) > 1:
        raise StatesError(f"One site, {str(site)[:60]!r}", f"it names {len(wanted)}", "Ask for one.")


def _readable(source: Any, texts: Texts | None, targets: Texts | None, sites: Any) -> Readable:
    """Where the states are read from; of a pair, one stack."""
    if texts is not None or targets is not None:
        raise TextError("Vectors of states", "texts were given too", "Leave them out, or give a model.")
    if isinstance(source, Pair):
        return source.decoder if _stack(sites) == "decoder" else source.encoder
    if isinstance(source, Readable):
        return source
    found = f"{type(source).__name__} is none of what they can be taken from"
    raise StatesError("Vectors", found, "Give a model and texts, or states.")


def _states(captured: States | Pair) -> States:
    assert isinstance(captured, States)  # sites of one stack were asked for
    return captured


def _wanted(model: Model, sites: Any) -> tuple[Site, ...]:
    watchable(model.module)
    return _of_one_stack(model.anatomy.select(sites), sites)


def _chosen(part: Readable, sites: Any) -> tuple[Site, ...]:
    chosen = part.select(sites=sites).sites if isinstance(part, States) else select(sites, part.sites)
    return _of_one_stack(chosen, sites)


def _of_one_stack(chosen: tuple[Site, ...], sites: Any) -> tuple[Site, ...]:
    if len({site.stack for site in chosen}) < 2:
        return chosen
    stack = _stack(sites) or "encoder"
    return tuple(site for site in chosen if site.stack == stack)


def _stack(sites: Any) -> str | None:
    """The stack that the patterns name, if they name one."""
    said = [str(item) for item in ([sites] if isinstance(sites, str | Site) else sites)]
    named = [stack for stack in STACKS if any(stack in item for item in said)]
    if len(named) > 1:
        found = "the sites are of two stacks, whose tokens are not the same"
        raise StatesError("Vectors of one stack", found, "Ask for those of the encoder or of the decoder.")
    return named[0] if named else None


def _pooled(
    model: Model, texts: Any, wanted: tuple[Site, ...], token: Token, *, truncate: bool, targets: Texts | None
) -> tuple[Tensor, tuple[str, ...] | None]:
    """The vectors of a model's texts `[site, text, width]`, and the texts where they were given as such."""
    given = _listed(texts), _listed(targets)
    values, done, read = None, 0, []
    for encoded, block in _portions(model, given, wanted, token, truncate):
        if values is None:
            values = _room(len(wanted), _count(given[0]), block)
        values[:, done : done + block.shape[1]] = block
        done += block.shape[1]
        read += list(encoded.texts or ())
    assert values is not None  # an encoder refuses no texts
    return values, tuple(read) if read else None


def _listed(texts: Any) -> Any:
    """A list of texts; one text, as a string or as ids, and what is no text at all stay as they are."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        return texts
    listed = list(texts)
    return listed if listed and (isinstance(listed[0], str) or np.ndim(listed[0])) else (listed,)


def _count(given: Any) -> int:
    return len(given) if isinstance(given, list) else 1


def _room(sites: int, rows: int, like: Tensor) -> Tensor:
    """Memory for all vectors, refused where there is too little."""
    size, free = sites * rows * like.shape[-1] * like.dtype.itemsize, free_memory()
    if size > free * SHARE_OF_FREE_MEMORY:
        asked = f"{rows:,} vectors at {sites} sites, {like.shape[-1]:,} wide"
        found = f"that is {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free"
        raise TooLarge(asked, found, "Ask for fewer sites or texts.")
    return torch.empty(sites, rows, like.shape[-1], dtype=like.dtype)


def _portions(
    model: Model, given: tuple[Any, Any], wanted: tuple[Site, ...], token: Token, truncate: bool
) -> Iterator[tuple[Encoded, Tensor]]:
    """Portion by portion, in the order given: the texts as they were encoded, and their vectors."""
    texts, aims = given
    if aims is not None and len(model.anatomy.stacks) < 2:
        raise TextError("Targets for a decoder", f"{model.name} has one stack", "Leave `targets` out.")
    if aims is not None and _count(aims) != _count(texts):
        found = f"there are {_count(aims)} targets"
        raise TextError(f"{_count(texts)} texts with targets", found, "Give one for each text.")
    for start in range(0, _count(texts), PORTION):
        encoded, aimed = _encoded(model, _slice(texts, start), _slice(aims, start), start, truncate)
        yield encoded, _vectors_of(model, encoded, aimed, (wanted, token), start)


def _slice(given: Any, start: int) -> Any:
    if isinstance(given, tuple):
        return given[0]
    return given[start : start + PORTION] if isinstance(given, list) else given


def _encoded(model: Model, texts: Any, targets: Any, start: int, truncate: bool) -> tuple[Encoded, Encoded | None]:
    """Texts as ids, and a decoder's; an error names a text by its number among all."""
    two = len(model.anatomy.stacks) > 1
    try:
        with model.lock:  # a tokenizer serves one thread at a time
            encoded = model.encoder.encode(texts, truncate=truncate)
            aims = model.encoder.targets(targets, len(encoded.ids), truncate=truncate) if two else None
        return encoded, aims
    except TextError as error:
        number = re.fullmatch(r"Text (\d+)", error.asked)
        asked = f"Text {int(number[1]) + start}" if number else error.asked
        raise TextError(asked, error.found, error.do) from None


def _vectors_of(
    model: Model, encoded: Encoded, aims: Encoded | None, asked: tuple[tuple[Site, ...], Token], first: int
) -> Tensor:
    """The vectors of some texts `[site, text, width]`, of which the first has this number among all."""
    wanted, token = asked
    own = aims if aims is not None and wanted[0].stack == "decoder" else encoded
    rows = _Rows(own.lengths, token, first)
    if token == "cls":
        _begin_with_cls(model.source(wanted[0].stack), [ids[0] for ids in own.ids], first)
    lengths = encoded.lengths if aims is None else list(map(sum, zip(encoded.lengths, aims.lengths, strict=True)))
    found: Tensor | None = None
    with model.lock, progress.track("Capturing", total=sum(lengths)) as advance:
        for batches in _together(model, lengths, len(wanted)):
            numbers = [number for batch in batches for number in batch]
            landing = _landed(model, encoded, aims, batches, wanted)
            _check(landing, [number + first for number in numbers])
            pooled = rows.pool(landing.buffer.values, numbers)
            found = pooled.new_empty(len(wanted), len(lengths), pooled.shape[2]) if found is None else found
            found[:, numbers] = pooled
            advance(sum(lengths[number] for number in numbers))
    assert found is not None  # an encoder refuses no texts
    return found


def _together(model: Model, lengths: list[int], sites: int) -> Iterator[list[list[int]]]:
    """The batches of a capture, as many at a time as their states have room; on a GPU they overlap."""
    kind = model.device.type if model.device.type in BUDGETS else "cpu"
    row = sites * model.anatomy.stacks[0].proof.width * model.dtype.itemsize
    some: list[list[int]] = []
    size = 0
    for batch in plan(
        lengths, BUDGETS[kind], padded=model.batches, turn=model.batching.turn, another=ANOTHER_BATCH[kind]
    ):
        tokens = sum(lengths[number] for number in batch)
        if some and (size + tokens) * row > ROOM:
            yield some
            some, size = [], 0
        some.append(batch)
        size += tokens
    yield some


def _landed(
    model: Model, encoded: Encoded, aims: Encoded | None, batches: list[list[int]], wanted: tuple[Site, ...]
) -> Landing:
    """The states of some batches, text after text in the order of the batches."""
    numbers = [number for batch in batches for number in batch]
    texts = Encoded(None, tuple(encoded.ids[number] for number in numbers))
    targets = None if aims is None else Encoded(None, tuple(aims.ids[number] for number in numbers))
    landed = landings(model, wanted, texts, targets)
    for start, end in pairwise(accumulate(map(len, batches), initial=0)):
        run(model, make_batch(model, texts, targets, range(start, end)), range(start, end), landed)
    (landing,) = landed.values()
    landing.buffer.finish()
    return landing


def _check(landing: Landing, numbers: list[int]) -> None:
    """Refuse a NaN or an infinity among the states of these texts."""
    if landing.buffer.finite:
        return
    for site, values in zip(landing.sites, landing.buffer.values, strict=True):
        wrong = ~values.isfinite().all(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            ends = np.cumsum(landing.encoded.lengths)
            text = int(np.searchsorted(ends, row, side="right"))
            position = row - int(ends[text]) + landing.encoded.lengths[text]
            raise _not_finite(values[row], f"{site}, text {numbers[text]}, position {position}")


def _not_finite(row: Tensor, where: str) -> NotFinite:
    what = "a NaN" if bool(row.isnan().any()) else "an infinity"
    do = "Look at the weights of the block that makes it, or load the model in a wider dtype."
    return NotFinite("Vectors of states", f"{what} at {where}", do)


class _Rows:
    """Which rows of states make the vector of each text."""

    def __init__(self, lengths: ArrayLike, token: Token, first: int = 0) -> None:
        self.lengths, self.token = np.asarray(lengths, dtype=np.int64), token
        if isinstance(token, int):
            short = np.flatnonzero(self.lengths < (token + 1 if token >= 0 else -token))
            if len(short):
                text = int(short[0])
                found = f"text {text + first} has {self.lengths[text]} tokens"
                do = "Ask for a position that every text has; -1 is the last token."
                raise TextError(f"The token at position {token} of each text", found, do)

    def within(self, texts: Any = slice(None)) -> Any:
        """The row in its text of the one token that stands for each of the texts; None where it is not one."""
        if self.token in ("mean", "max"):
            return None
        place = self.token if isinstance(self.token, int) else PLACES[self.token]
        return self.lengths[texts] + place if place < 0 else np.full_like(self.lengths[texts], place)

    def pool(self, values: Tensor, texts: Any) -> Tensor:
        """The vectors `[site, text, width]` of texts whose rows follow one another in `[site, token, width]`."""
        lengths = self.lengths[texts]
        within = self.within(texts)
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        if within is not None:
            rows = np.cumsum(lengths) - lengths + within
            return values[:, torch.from_numpy(rows).to(values.device)].to("cpu", wide)
        parts = torch.split(values, lengths.tolist(), dim=1)
        pooled = [part.mean(1, dtype=wide) if self.token == "mean" else part.amax(1).to(wide) for part in parts]
        return torch.stack(pooled, 1).cpu()


def _whole(source: Readable, wanted: tuple[Site, ...], token: Token) -> Tensor:
    """The vectors of states, `[site, row, width]`."""
    count = len(source.tokens) if token == "each" else source.tokens.count
    values: Tensor | None = None
    for number, site in enumerate(wanted):
        done = 0
        for block in _read(source, site, token):
            values = _room(len(wanted), count, block) if values is None else values
            values[number, done : done + len(block)] = block
            done += len(block)
    assert values is not None  # states of no texts were refused
    return values


def _read(source: Readable, site: Site, token: Token) -> Iterator[Tensor]:
    """The vectors of one site of states, block by block; a text may lie across the border of two."""
    tokens = source.tokens
    rows = _Rows(_lengths(source, token), token)
    pooled = _widened(source, site) if token == "each" else _picked(source, site, rows)
    done = 0
    for block in pooled:
        wrong = ~block.isfinite().all(1)
        if bool(wrong.any()):
            row = done + int(wrong.nonzero()[0])
            where = f"text {tokens.text[row]}, position {tokens.positions[row]}" if token == "each" else f"text {row}"
            raise _not_finite(block[row - done], f"{site}, {where}")
        done += len(block)
        yield block


def _lengths(source: Readable, token: Token) -> Any:
    """How many tokens each text has, when the one that is asked for is there."""
    tokens, lengths = source.tokens, source.tokens.lengths
    if not lengths.all() or not len(lengths):
        found = f"text {int(np.argmin(lengths))} has no tokens here" if len(lengths) else "there are no texts"
        raise StatesError("Vectors of states", found, "Take them before selecting tokens, or leave that text out.")
    starts = np.cumsum(lengths) - lengths
    if token == "cls":
        _begin_with_cls(getattr(source, "source", None), tokens.ids[starts], 0)
    if token in ("first", "cls") or isinstance(token, int):
        rows = starts + _Rows(lengths, token).within()
        asked = token if isinstance(token, int) else 0
        if asked >= 0 and (other := np.flatnonzero(tokens.positions[rows] != asked)).size:
            found = f"text {other[0]} holds only some of its tokens"
            raise StatesError(f"The token at position {asked} of each text", found, "Give whole texts.")
    return lengths


def _begin_with_cls(source: Source | Mapping[str, Any] | None, ids: Any, first: int) -> None:
    """Refuse texts that do not begin with the tokenizer's classification token."""
    cls, do = getattr(source, "cls", None), "Ask for mean or last."
    if cls is None:
        raise StatesError("The token cls of each text", "its tokenizer has no such token", do)
    other = np.flatnonzero(np.asarray(ids) != cls)
    if len(other):
        raise StatesError("The token cls of each text", f"text {other[0] + first} does not begin with it", do)


def _widened(source: Readable, site: Site) -> Iterator[Tensor]:
    """One vector a token."""
    read, count = 0, len(source.tokens)
    for block in source.blocks(site):
        read += len(block)
        if read > count:
            break
        yield block.detach().to("cpu", torch.float64 if block.dtype == torch.float64 else torch.float32)
    if read != count:
        raise _not_whole(site, read, count)


def _not_whole(site: Site, read: int, count: int) -> StatesError:
    found = f"its blocks at {site} hold {read:,} rows, and it says that it has {count:,} tokens"
    return StatesError("Vectors of states", found, "Give states that are whole.")


def _picked(source: Readable, site: Site, rows: _Rows) -> Iterator[Tensor]:
    """One vector a text, as soon as the last of its rows has been read."""
    ends = np.cumsum(rows.lengths)
    kept: list[Tensor] = []  # rows of a text of which more are to come
    text = read = 0
    for given in source.blocks(site):
        block = given.detach()
        if kept and text < len(ends) and read + len(block) >= ends[text]:
            missing = int(ends[text]) - read
            yield rows.pool(torch.cat([*kept, block[:missing]])[None], slice(text, text + 1))[0]
            block, read, kept, text = block[missing:], read + missing, [], text + 1
        until = max(text, int(np.searchsorted(ends, read + len(block), side="right")))
        taken = int(ends[until - 1]) - read if until > text else 0
        if until > text:
            yield rows.pool(block[None, :taken], slice(text, until))[0]
        if taken < len(block):
            kept.append(block[taken:].clone())  # a view would hold the whole block
        read, text = read + len(block), until
    if kept or text < len(ends):
        raise _not_whole(site, read, int(ends[-1]))
