"""The vectors of states that are read block by block, in bounded memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import StatesError
from hiddenscope.sites import Site
from hiddenscope.states import Readable
from hiddenscope.vectors.pooling import Rows, Token, begin_with_cls, not_finite, room_for


def whole(source: Readable, wanted: tuple[Site, ...], token: Token) -> Tensor:
    """The vectors of states, `[site, row, width]`."""
    count = len(source.tokens) if token == "each" else source.tokens.count
    values: Tensor | None = None
    for number, site in enumerate(wanted):
        done = 0
        for block in read(source, site, token):
            values = room_for(len(wanted), count, block) if values is None else values
            values[number, done : done + len(block)] = block
            done += len(block)
    assert values is not None  # states of no texts were refused
    return values


def read(source: Readable, site: Site, token: Token) -> Iterator[Tensor]:
    """The vectors of one site of states, block by block; a text may lie across the border of two."""
    tokens = source.tokens
    rows = Rows(_lengths(source, token), token)
    pooled = _widened(source, site) if token == "each" else _picked(source, site, rows)
    done = 0
    for block in pooled:
        wrong = ~block.isfinite().all(1)
        if bool(wrong.any()):
            row = done + int(wrong.nonzero()[0])
            where = f"text {tokens.text[row]}, position {tokens.positions[row]}" if token == "each" else f"text {row}"
            raise not_finite(block[row - done], f"{site}, {where}")
        done += len(block)
        yield block


def _lengths(source: Readable, token: Token) -> Any:
    """How many tokens each text has, when the one that is asked for is there."""
    tokens, lengths = source.tokens, source.tokens.lengths
    if not lengths.all() or not len(lengths):
        reason = f"text {int(np.argmin(lengths))} has no tokens here" if len(lengths) else "there are no texts"
        raise StatesError("Vectors of states", reason, "Take them before selecting tokens, or leave that text out.")
    starts = np.cumsum(lengths) - lengths
    if token == "cls":
        begin_with_cls(getattr(source, "source", None), tokens.ids[starts], 0)
    if token in ("first", "cls") or isinstance(token, int):
        rows = starts + Rows(lengths, token).within()
        asked = token if isinstance(token, int) else 0
        if asked >= 0 and (other := np.flatnonzero(tokens.positions[rows] != asked)).size:
            reason = f"text {other[0]} holds only some of its tokens"
            raise StatesError(f"The token at position {asked} of each text", reason, "Give whole texts.")
    return lengths


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
    reason = f"its blocks at {site} hold {read:,} rows, and it says that it has {count:,} tokens"
    return StatesError("Vectors of states", reason, "Give states that are whole.")


def _picked(source: Readable, site: Site, rows: Rows) -> Iterator[Tensor]:
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
