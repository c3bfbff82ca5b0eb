"""Pooling: one vector for each text, from a model's passes as they go, or from states
that are read block by block.

Never all states are held: a model's batches are pooled when their states have filled
some memory, and states that lie in a file are read in blocks, of which a text may lie
across the border.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import NotFinite, StatesError, TextError, TooLarge
from hiddenscope.model import Model
from hiddenscope.passes import (
    Inputs,
    StackBuffer,
    Texts,
    buffers_for,
    check_targets,
    run,
)
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.sites import Site
from hiddenscope.states import Readable, Source, Tokens
from hiddenscope.states.tokens import Ints

Token: TypeAlias = str | int
"""What stands for a text: "last", "first", "cls", "mean", "max", "each", or a position.
"""

POSITIONS = {"last": -1, "first": 0, "cls": 0}
PORTION = 8192  # texts that are encoded, and sorted by length, at a time
# Bytes of states that are held before they are pooled; one batch may take more.
HELD = 64 * 2**20


class Pool:
    """How the rows of each text become its vector; `first` is the number of the first
    text among all.

    `rows` says which row of each text stands for it, where that does not follow from
    its position.
    """

    def __init__(
        self, lengths: ArrayLike, token: Token, first: int = 0, rows: Ints | None = None
    ) -> None:
        self.lengths, self.token, self.rows = (
            np.asarray(lengths, dtype=np.int64),
            token,
            rows,
        )
        if isinstance(token, int) and rows is None:
            short = np.flatnonzero(self.lengths < (token + 1 if token >= 0 else -token))
            if len(short):
                text = int(short[0])
                reason = f"text {text + first} has {self.lengths[text]} tokens"
                remedy = "Choose a position that every text has; -1 is the last token."
                raise TextError(
                    f"No token at position {token} of every text", reason, remedy
                )

    def positions(self, texts: Any = slice(None)) -> Any:
        """The position of the one token that stands for each of the texts; None for a
        mean or maximum.
        """
        if self.token in ("mean", "max"):
            return None
        if self.rows is not None:
            return self.rows[texts]
        position = self.token if isinstance(self.token, int) else POSITIONS[self.token]
        return (
            self.lengths[texts] + position
            if position < 0
            else np.full_like(self.lengths[texts], position)
        )

    def __call__(self, values: Tensor, texts: Any) -> Tensor:
        """The vectors `[site, text, width]` of texts whose rows follow one another in
        `[site, token, width]`.
        """
        lengths = self.lengths[texts]
        positions = self.positions(texts)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        if positions is not None:
            rows = np.cumsum(lengths) - lengths + positions
            return values[:, torch.from_numpy(rows).to(values.device)].to("cpu", dtype)
        parts = torch.split(values, lengths.tolist(), dim=1)
        pooled = [
            (
                part.mean(1, dtype=dtype)
                if self.token == "mean"
                else part.amax(1).to(dtype)
            )
            for part in parts
        ]
        return torch.stack(pooled, 1).cpu()


def check_cls(source: Source | Mapping[str, Any] | None, ids: Any, first: int) -> None:
    """Refuse texts that do not begin with the tokenizer's classification token."""
    cls, remedy = getattr(source, "cls", None), 'Use token="mean" or "last".'
    if cls is None:
        raise StatesError('No token "cls"', "the tokenizer has no such token", remedy)
    other = np.flatnonzero(np.asarray(ids) != cls)
    if len(other):
        raise StatesError(
            'No token "cls"', f"text {other[0] + first} does not begin with it", remedy
        )


def not_finite(row: Tensor, where: str) -> NotFinite:
    """The error that names a vector with a NaN or an infinity in it."""
    what = "a NaN" if bool(row.isnan().any()) else "an infinity"
    remedy = (
        "Look at the weights of the block that computes it, or load the model in a"
        " wider dtype."
    )
    return NotFinite("States are not finite", f"{what} at {where}", remedy)


def allocate(sites: int, rows: int, like: Tensor) -> Tensor:
    """Memory for all vectors, refused where there is too little."""
    size, free = sites * rows * like.shape[-1] * like.dtype.itemsize, free_memory()
    if size > free * SHARE_OF_FREE_MEMORY:
        problem = (
            f"Too little memory for {rows:,} vectors at {sites} sites,"
            f" {like.shape[-1]:,} wide"
        )
        reason = (
            f"they take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free"
        )
        raise TooLarge(problem, reason, "Choose fewer sites or texts.")
    return torch.empty(sites, rows, like.shape[-1], dtype=like.dtype)


def pooled(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    token: Token,
    *,
    targets: Texts | Inputs | None = None,
    truncate: bool | int = False,
) -> Iterator[tuple[Inputs, Tensor]]:
    """The vectors of a model's texts, portion by portion in the order given: its Inputs
    and `[site, text, width]`.
    """
    if targets is not None and count(targets) != count(texts):
        reason = f"there are {count(texts)} texts and {count(targets)} targets"
        raise TextError(
            "Targets do not fit the texts", reason, "Give one for each text."
        )
    starts, cut = range(0, count(texts), PORTION), 0
    for start in starts or (0,):  # an empty list is refused by the encoder
        some, own_targets = (
            _slice(texts, start),
            None if targets is None else _slice(targets, start),
        )
        try:
            inputs = model.encode(some, targets=own_targets, truncate=truncate)
            check_targets(model, inputs, sites, logits=False)
        except TextError as error:  # names a text by its number in the portion
            number = re.fullmatch(r"Text (\d+)", error.problem)
            problem = f"Text {int(number[1]) + start}" if number else error.problem
            raise TextError(problem, error.reason, error.remedy) from None
        yield inputs, _vectors_of(model, inputs, sites, token, start)
        cut += (
            0
            if isinstance(truncate, bool)
            else sum(length >= truncate for length in inputs.lengths)
        )
    if cut:
        whole = f"{cut:,} of {count(texts):,} texts have {truncate} tokens or more"
        progress.note(
            f"{model.name}: {whole}; the vector is that of the first {truncate}, as in"
            " sentence-transformers"
        )


def count(texts: Texts | Inputs) -> int:
    """The number of texts; a string or a list of ids is one."""
    return len(texts) if _many(texts) else 1


def _many(texts: Any) -> bool:
    if isinstance(texts, Inputs):
        return True
    sized = isinstance(texts, Sequence | np.ndarray | Tensor) and not isinstance(
        texts, str | bytes
    )
    if not sized or getattr(texts, "shape", None) == ():
        return False
    if not len(texts) or isinstance(texts[0], str | list | tuple):
        return True
    return getattr(texts[0], "ndim", 0) > 0  # a list of ids is one text


def _slice(texts: Any, start: int) -> Any:
    if not _many(texts) or len(texts) <= PORTION:
        return texts
    end = min(len(texts), start + PORTION)
    return (
        texts.some(range(start, end)) if isinstance(texts, Inputs) else texts[start:end]
    )


def _vectors_of(
    model: Model, inputs: Inputs, sites: tuple[Site, ...], token: Token, first: int
) -> Tensor:
    """The vectors of some texts `[site, text, width]`, of which the first has this
    number among all.
    """
    of_stack = inputs.of(sites[0].stack)
    pool = Pool(of_stack.lengths, token, first)
    if token == "cls":
        check_cls(model.source(sites[0].stack), [ids[0] for ids in of_stack.ids], first)
    costs = inputs.costs
    values: Tensor | None = None
    with model.lock, progress.track("Capturing", total=sum(costs)) as advance:
        for batches in _groups(model, inputs, sites):
            numbers = [number for batch in batches for number in batch]
            states = _states(
                model, inputs.some(numbers), list(map(len, batches)), sites
            )
            _check(states, [number + first for number in numbers])
            block = pool(states.buffer.values, numbers)
            values = (
                block.new_empty(len(sites), len(inputs), block.shape[2])
                if values is None
                else values
            )
            values[:, numbers] = block
            advance(sum(costs[number] for number in numbers))
    assert values is not None  # there is at least one text
    return values


def _groups(
    model: Model, inputs: Inputs, sites: tuple[Site, ...]
) -> Iterator[list[list[int]]]:
    """The batches of a capture, as many at a time as HELD has room for: on a GPU their
    passes and copies overlap.
    """
    row = len(sites) * model.anatomy.width(sites[0]) * model.dtype.itemsize
    lengths = inputs.of(sites[0].stack).lengths
    group: list[list[int]] = []
    size = 0
    for indices, _ in inputs.batches(model):
        batch = row * sum(lengths[index] for index in indices)
        if group and size + batch > HELD:
            yield group
            group, size = [], 0
        group.append(indices)
        size += batch
    yield group


def _states(
    model: Model, inputs: Inputs, sizes: list[int], sites: tuple[Site, ...]
) -> StackBuffer:
    """The states of some batches of these sizes, text after text."""
    buffers = buffers_for(model, sites, inputs)
    for start, end in pairwise(accumulate(sizes, initial=0)):
        run(
            model, inputs.some(range(start, end)).pad(model), range(start, end), buffers
        )
    (buffer,) = buffers.values()
    buffer.buffer.finish()
    return buffer


def _check(states: StackBuffer, numbers: list[int]) -> None:
    """Refuse a NaN or an infinity among the states of these texts."""
    if states.buffer.finite:
        return
    lengths = states.inputs.lengths
    for site, values in zip(states.sites, states.buffer.values, strict=True):
        wrong = ~values.isfinite().all(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            ends = np.cumsum(lengths)
            text = int(np.searchsorted(ends, row, side="right"))
            position = row - int(ends[text]) + lengths[text]
            raise not_finite(
                values[row], f"{site}, text {numbers[text]}, position {position}"
            )


def read_all(source: Readable, sites: tuple[Site, ...], token: Token) -> Tensor:
    """The vectors of states, `[site, row, width]`."""
    count = len(source.tokens) if token == "each" else source.tokens.count
    values: Tensor | None = None
    for number, site in enumerate(sites):
        done = 0
        for block in read(source, site, token):
            values = allocate(len(sites), count, block) if values is None else values
            values[number, done : done + len(block)] = block
            done += len(block)
    assert values is not None  # states of no texts were refused
    return values


def read(source: Readable, site: Site, token: Token) -> Iterator[Tensor]:
    """The vectors of one site of states, block by block."""
    tokens = source.tokens
    pool = _pool_of(source, _among_pooled(source, token))
    blocks = (
        _each_token(source, site) if token == "each" else _each_text(source, site, pool)
    )
    done = 0
    for block in blocks:
        wrong = ~block.isfinite().all(1)
        if bool(wrong.any()):
            row = done + int(wrong.nonzero()[0])
            where = (
                f"text {tokens.text[row]}, position {tokens.positions[row]}"
                if token == "each"
                else f"text {row}"
            )
            raise not_finite(block[row - done], f"{site}, {where}")
        done += len(block)
        yield block


def pooled_as(source: Any) -> Token | None:
    """What each row of a store of pooled states is of its text (or window); None where
    every row is a token.
    """
    how = getattr(source, "pooled", None)
    return (
        None if how is None else int(how) if how.lstrip("-").isdecimal() else str(how)
    )


def _among_pooled(source: Readable, token: Token) -> Token:
    """Of states that were pooled when they were stored, which row stands for a text; of
    others, the token itself.

    A long text has a row for each window: what was kept of its start is in the first,
    of its end in the last.
    """
    how = pooled_as(source)
    if how is None or token == "each":
        return token
    asked, kept = (
        one if isinstance(one, int) else POSITIONS.get(one, one) for one in (token, how)
    )
    # A "first" token may be another than "cls".
    if asked != kept or (token == "cls" != how):
        reason = f"the store keeps {_named(how)} of each text, and nothing else"
        remedy = f"Give {how!r}, or extract the states of every token."
        raise StatesError(
            f"Cannot take {_named(token)} of pooled states", reason, remedy
        )
    return kept if isinstance(kept, str) else "last" if kept < 0 else "first"


def _named(token: Token) -> str:
    """A token in words."""
    if isinstance(token, int):
        return f"the token at position {token}"
    return {"mean": "the mean", "max": "the maximum", "cls": "the cls token"}.get(
        token, f"the {token} token"
    )


def _pool_of(source: Readable, token: Token) -> Pool:
    """The pool of the tokens that lie here, checked: the token that stands for a text
    must be among them.
    """
    tokens, lengths = source.tokens, source.tokens.lengths
    if not lengths.all() or not len(lengths):
        reason = (
            f"text {int(np.argmin(lengths))} has no tokens here"
            if len(lengths)
            else "there are no texts"
        )
        raise StatesError(
            "No vector for every text",
            reason,
            "Pool before selecting tokens, or leave that text out.",
        )
    starts = np.cumsum(lengths) - lengths
    row = _row_in_text(token, getattr(source, "every", 1), lengths)
    if isinstance(token, int) and pooled_as(source) is None and _overlap(tokens):
        return Pool(lengths, token, rows=_rows_at(tokens, token, starts))
    pool = Pool(lengths, row)
    if token == "cls":
        check_cls(getattr(source, "source", None), tokens.ids[starts], 0)
    position = 0 if token in ("first", "cls") else token
    if isinstance(position, int) and position >= 0:
        other = np.flatnonzero(tokens.positions[starts + pool.positions()] != position)
        if other.size:
            reason = f"text {other[0]} has only some of its tokens here"
            raise StatesError(
                f"No token at position {position} of every text",
                reason,
                "Give whole texts.",
            )
    return pool


def _overlap(tokens: Tokens) -> bool:
    """Whether a text lies here in windows that overlap, so that a position may be there
    twice.
    """
    return bool(((np.diff(tokens.text) == 0) & (np.diff(tokens.positions) <= 0)).any())


def _rows_at(tokens: Tokens, position: int, starts: Ints) -> Ints:
    """The row of each text that has a position, in the first of its windows that does.

    Special tokens frame every window: where one window has such a token at the position
    and another one a token of the text, the latter is meant.
    """
    last = np.maximum.reduceat(tokens.positions, starts)
    wanted = np.full_like(last, position) if position >= 0 else last + 1 + position
    rows = np.flatnonzero(tokens.positions == wanted[tokens.text])
    special = (tokens.spans[rows] < 0).all(1)
    rows = rows[np.lexsort((rows, special, tokens.text[rows]))]
    texts, firsts = np.unique(tokens.text[rows], return_index=True)
    if len(texts) < len(starts):
        text = int(np.flatnonzero(~np.isin(np.arange(len(starts)), texts))[0])
        reason = f"the last of text {text} is at {last[text]:,}"
        remedy = "Choose a position that every text has; -1 is the last token."
        raise TextError(
            f"No token at position {position} of every text", reason, remedy
        )
    found: Ints = rows[firsts] - starts
    return found


def _row_in_text(token: Token, every: int, lengths: Any) -> Token:
    """A position as the row of a text that holds it, where only positions 0, n, 2n and
    so on are kept.

    >>> _row_in_text(6, 2, np.array([5, 4])), _row_in_text("mean", 2, np.array([5, 4]))
    (3, 'mean')
    """
    if every == 1 or token in ("mean", "max", "each", "first", "cls"):
        return token
    kept = f"the store keeps positions 0, {every}, {2 * every} and so on"
    if not isinstance(token, int) or token < 0:
        reason = f"{kept}, and the last may not be among them"
        raise StatesError(
            "No last token of every text",
            reason,
            'Use token="mean", "max", "first" or "each".',
        )
    problem = f"No token at position {token} of every text"
    if token % every:
        raise StatesError(problem, kept, f"Give a multiple of {every}.")
    short = np.flatnonzero(lengths <= token // every)
    if len(short):
        raise TextError(
            problem,
            f"text {short[0]} ends before it",
            "Choose a position that every text has.",
        )
    return token // every


def _each_token(source: Readable, site: Site) -> Iterator[Tensor]:
    """One vector for each token."""
    rows, count = 0, len(source.tokens)
    for block in source.blocks(site):
        rows += len(block)
        if rows > count:
            break
        yield block.detach().to(
            "cpu", torch.float64 if block.dtype == torch.float64 else torch.float32
        )
    if rows != count:
        raise _not_whole(site, rows, count)


def _not_whole(site: Site, rows: int, count: int) -> StatesError:
    reason = f"the blocks at {site} have {rows:,} rows for {count:,} tokens"
    return StatesError("States are not whole", reason, "Give all of them.")


def _each_text(source: Readable, site: Site, pool: Pool) -> Iterator[Tensor]:
    """One vector for each text, as soon as the last of its rows has been read."""
    ends = np.cumsum(pool.lengths)
    begun: list[Tensor] = []  # rows of a text of which more are to come
    text = read = 0
    for given in source.blocks(site):
        block = given.detach()
        if begun and text < len(ends) and read + len(block) >= ends[text]:
            missing = int(ends[text]) - read
            yield pool(
                torch.cat([*begun, block[:missing]])[None], slice(text, text + 1)
            )[0]
            block, read, begun, text = block[missing:], read + missing, [], text + 1
        until = max(text, int(np.searchsorted(ends, read + len(block), side="right")))
        taken = int(ends[until - 1]) - read if until > text else 0
        if until > text:
            yield pool(block[None, :taken], slice(text, until))[0]
        if taken < len(block):
            begun.append(block[taken:].clone())  # a view would keep the whole block
        read, text = read + len(block), until
    if begun or text < len(ends):
        raise _not_whole(site, read, int(ends[-1]))
