"""Stored vectors: one for each text or token of states, read block by block.

States that lie in a file are never held as a whole. A store may have been written with
a pooling, or with every n-th token only: then the row that stands for a text is another
one, or there is none.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite, StatesError, TextError, TooLarge
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.sites import Site
from hiddenscope.states import Pooling, Readable, Tokens
from hiddenscope.states.arrays import Ints
from hiddenscope.states.mixed import check_one_width
from hiddenscope.states.pool import (
    Pool,
    as_vectors,
    check_cls,
    check_lengths,
    not_whole,
)
from hiddenscope.states.pooling import (
    meaning_of,
    parse_pooling,
    position_of,
    requires_cls,
)


def read_all(source: Readable, sites: tuple[Site, ...], pool: Pooling | None) -> Tensor:
    """Return the vectors of states, `[site, row, width]`."""
    tokens = source.tokens
    count = len(tokens) if pool is None else tokens.count
    values: Tensor | None = None
    for number, site in enumerate(sites):
        done = 0
        for block in read_vectors(source, site, pool):
            if values is None:
                values = allocate(len(sites), count, block)
            check_one_width((sites[0], site), (values.shape[2], block.shape[1]))
            values[number, done : done + len(block)] = block
            done += len(block)
    assert values is not None  # states of no texts were refused
    return values


def read_vectors(
    source: Readable, site: Site, pool: Pooling | None
) -> Iterator[Tensor]:
    """Yield the vectors of one site, block by block; of each token if not pooled."""
    tokens = source.tokens
    if pool is None:
        check_lengths(tokens.lengths)
        blocks = _each_token(source, site)
    else:
        blocks = _pool_of(source, pool).stream(source.blocks(site), site)
    done = 0
    for block in blocks:
        infinite = ~block.isfinite().all(1)
        if bool(infinite.any()):
            row = int(infinite.nonzero()[0])
            where = f"text {done + row}"
            if pool is None:
                token = done + row
                position = tokens.positions[token]
                where = f"text {tokens.text[token]}, position {position}"
            raise not_finite(block[row], f"{site}, {where}")
        done += len(block)
        yield block


def pooled_as(source: object) -> Pooling | None:
    """Return how a store pooled each text (or window); None if every row is a token."""
    pool = getattr(source, "pooled", None)
    if pool is None:
        return None
    return parse_pooling(pool)


def allocate(sites: int, rows: int, like: Tensor) -> Tensor:
    """Allocate memory for all vectors, or refuse if too little is free."""
    width = like.shape[-1]
    size = sites * rows * width * like.dtype.itemsize
    free = free_memory()
    if size > free * SHARE_OF_FREE_MEMORY:
        needed = f"{size / 2**30:,.1f} GiB"
        raise TooLarge(
            f"Too little memory for {rows:,} vectors at {sites} sites, {width:,} wide",
            f"they take {needed}, and {free / 2**30:,.1f} GiB are free",
            "Choose fewer sites or texts.",
        )
    return torch.empty(sites, rows, width, dtype=like.dtype)


def not_finite(row: Tensor, where: str) -> NotFinite:
    """Return the error that names a vector with a NaN or an infinity in it."""
    what = "a NaN" if bool(row.isnan().any()) else "an infinity"
    return NotFinite(
        "States are not finite",
        f"{what} at {where}",
        "Look at the weights of the block that computes it, or load the model in a"
        " wider dtype.",
    )


def _each_token(source: Readable, site: Site) -> Iterator[Tensor]:
    rows = 0
    count = len(source.tokens)
    for block in source.blocks(site):
        rows += len(block)
        if rows > count:
            break
        yield as_vectors(block)
    if rows != count:
        raise not_whole(site, rows, count)


def _pool_of(source: Readable, pool: Pooling) -> Pool:
    """Return the pool of states, once the rows that it takes are known to be there."""
    tokens = source.tokens
    lengths = tokens.lengths
    check_lengths(lengths)
    stored_as = pooled_as(source)
    if stored_as is not None:
        pool = _of_pooled_rows(pool, stored_as)
    starts = np.cumsum(lengths) - lengths
    row = _row_in_text(pool, getattr(source, "every", 1), lengths)
    if isinstance(pool, int) and _windows_overlap(tokens):
        return Pool(lengths, pool, rows=_rows_at(tokens, pool, starts))
    if requires_cls(pool):
        check_cls(getattr(source, "source", None), tokens.ids[starts], 0)
    result = Pool(lengths, row)
    rows = result.positions()
    position = position_of(pool)
    if rows is not None and position is not None and position >= 0:
        others = np.flatnonzero(tokens.positions[starts + rows] != position)
        if others.size:
            raise StatesError(
                f"No token at position {position} of every text",
                f"text {others[0]} has only some of its tokens here",
                "Give whole texts.",
            )
    return result


def _of_pooled_rows(pool: Pooling, stored_as: Pooling) -> Pooling:
    """Return the pooling of rows that were pooled when they were stored.

    A long text has a row for each window: what was kept of its start is in the first
    window, of its end in the last.
    """
    position = position_of(pool)
    stored_position = position_of(stored_as)
    same = pool == stored_as
    if position is not None and not requires_cls(pool):
        # The first token need not be a classification token.
        same = position == stored_position
    if not same:
        raise StatesError(
            f"Cannot take {meaning_of(pool)} from pooled states",
            f"the store keeps {meaning_of(stored_as)}, and nothing else",
            f"Give {stored_as!r}, or extract the states of every token.",
        )
    if position is None:
        return pool
    return "last" if position < 0 else "first"


def _windows_overlap(tokens: Tokens) -> bool:
    """Tell whether windows of one text overlap: a position may then be there twice."""
    same_text = np.diff(tokens.text) == 0
    not_after = np.diff(tokens.positions) <= 0
    return bool((same_text & not_after).any())


def _rows_at(tokens: Tokens, position: int, starts: Ints) -> Ints:
    """Return the row of each text at a position, in the first window that has it.

    Special tokens frame every window: where one window has such a token at the position
    and another one a token of the text, the latter is meant.
    """
    last = np.maximum.reduceat(tokens.positions, starts)
    wanted = last + 1 + position
    if position >= 0:
        wanted = np.full_like(last, position)
    rows = np.flatnonzero(tokens.positions == wanted[tokens.text])
    special = (tokens.spans[rows] < 0).all(1)
    rows = rows[np.lexsort((rows, special, tokens.text[rows]))]
    texts, firsts = np.unique(tokens.text[rows], return_index=True)
    if len(texts) < len(starts):
        text = int(np.setdiff1d(np.arange(len(starts)), texts)[0])
        raise TextError(
            f"No token at position {position} of every text",
            f"the last of text {text} is at {last[text]:,}",
            "Choose a position that every text has; -1 is the last token.",
        )
    in_text: Ints = rows[firsts] - starts
    return in_text


def _row_in_text(pool: Pooling, every: int, lengths: Ints) -> Pooling:
    """Return the row that holds a position, where positions 0, n, 2n ... are kept.

    >>> _row_in_text(6, 2, np.array([5, 4])), _row_in_text("mean", 2, np.array([5, 4]))
    (3, 'mean')
    """
    position = position_of(pool)
    if every == 1 or position is None or position == 0:
        return pool
    stored = f"the store keeps positions 0, {every}, {2 * every} and so on"
    if position < 0:
        raise StatesError(
            "No last token of every text",
            f"{stored}, and the last may not be among them",
            'Use pool="mean", "max" or "first", or hs.each_token.',
        )
    problem = f"No token at position {position} of every text"
    if position % every:
        raise StatesError(problem, stored, f"Give a multiple of {every}.")
    short = np.flatnonzero(lengths <= position // every)
    if len(short):
        raise TextError(
            problem,
            f"text {short[0]} ends before it",
            "Choose a position that every text has.",
        )
    return position // every
