"""A pool: the computation of a pooling, for texts whose rows follow one another.

It works on all rows at once, or on blocks of rows as they are read from a file.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hiddenscope.errors import StatesError, TextError
from hiddenscope.measures.massive import sinks_of
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints
from hiddenscope.states.pooling import POOLINGS, SINKLESS, Pooling, position_of
from hiddenscope.states.tokens import Source, terminal_safe

Indices: TypeAlias = slice | list[int]
"""Some of the texts, by number."""


class Pool:
    """The pooling of texts of these lengths.

    `first` is the number of the first text, which errors name. `rows` says which row
    stands for each text where that does not follow from its position.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        pooling: Pooling,
        first: int = 0,
        rows: Ints | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.pooling = pooling
        # Tokens of each site that outweigh all others of their text.
        self.sinks: Tensor | None = None
        self.rows = rows
        if not isinstance(pooling, int) or rows is not None:
            return
        needed = pooling + 1 if pooling >= 0 else -pooling
        short = np.flatnonzero(self.lengths < needed)
        if len(short):
            text = int(short[0])
            raise TextError(
                f"No token at position {pooling} of every text",
                f"text {text + first} has {self.lengths[text]} tokens",
                "Choose a position that every text has; -1 is the last token.",
            )

    def positions(self, texts: Indices = slice(None)) -> Ints | None:
        """Return the row that stands for each text, counted from its first.

        A reduction over tokens has none.
        """
        position = position_of(self.pooling)
        if position is None:
            return None
        if self.rows is not None:
            return self.rows[texts]
        lengths = self.lengths[texts]
        if position < 0:
            return lengths + position
        return np.full_like(lengths, position)

    def __call__(self, values: Tensor, texts: Indices = slice(None)) -> Tensor:
        """Pool the states `[site, token, width]` of some texts: `[site, text, width]`.

        The result keeps device and gradient. A mean is computed and returned in float32
        (float64 stays), everything else in the dtype of the states.
        """
        lengths = self.lengths[texts]
        positions = self.positions(texts)
        rows = None
        if positions is not None:
            starts = np.cumsum(lengths) - lengths
            rows = torch.from_numpy(starts + positions).to(values.device)
        sizes = lengths.tolist()
        left_out = None
        if self.pooling == SINKLESS or self.sinks is not None:
            by_text = torch.split(values.detach(), sizes, dim=1)
            sinks = torch.cat([sinks_of(states) for states in by_text], 1)
            if self.pooling == SINKLESS:
                left_out = sinks
            if rows is not None:
                sinks = sinks[:, rows]
            if self.sinks is not None:
                self.sinks += sinks.sum(1).cpu()
        if rows is not None:
            return values[:, rows]
        assert isinstance(self.pooling, str)
        reduce = POOLINGS[self.pooling].reduce
        assert reduce is not None
        dtype = wide(values.dtype)
        # Text by text, so that a text pooled among others equals the text pooled by
        # itself bit for bit: a sum over padded rows would add in another order.
        if left_out is not None:
            values = values.masked_fill(left_out[..., None], 0)
        parts = torch.split(values, sizes, dim=1)
        vectors = torch.stack([reduce(part, dtype) for part in parts], 1)
        if left_out is None:
            return vectors
        kept = torch.split(~left_out, sizes, dim=1)
        # Of all tokens the mean is that of `pool("mean")`, bit for bit.
        shares = torch.stack([reduce(part.to(dtype), dtype) for part in kept], 1)
        return vectors / shares[..., None]

    def stream(self, blocks: Iterable[Tensor], site: Site) -> Iterator[Tensor]:
        """Pool blocks `[some rows, width]` of one site, as `[some texts, width]`.

        A text is yielded as soon as the last of its rows has been read.
        """
        ends = np.cumsum(self.lengths)
        # Rows whose texts were not yielded yet, and the number of those that were.
        pending = []
        done = 0
        text = 0
        for block in blocks:
            pending.append(block.detach())
            rows_read = done + sum(map(len, pending))
            complete = int(np.searchsorted(ends, rows_read, side="right"))
            if complete == text:
                continue
            rows = pending[0] if len(pending) == 1 else torch.cat(pending)
            used = int(ends[complete - 1]) - done
            yield as_vectors(self(rows[None, :used], slice(text, complete))[0])
            # A view would keep the whole block in memory.
            pending = [rows[used:].clone()]
            done += used
            text = complete
        rest = sum(map(len, pending))
        if rest or text < len(ends):
            raise not_whole(site, done + rest, int(ends[-1]))


def as_vectors(rows: Tensor) -> Tensor:
    """Copy rows to host memory in float32 (float64 stays)."""
    return rows.detach().to("cpu", wide(rows.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for float64: the dtype that sums are computed in."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def check_lengths(lengths: Ints) -> None:
    """Refuse to make vectors of no texts, or of a text without tokens."""
    if len(lengths) and lengths.all():
        return
    reason = "there are no texts"
    if len(lengths):
        reason = f"text {int(np.argmin(lengths))} has no tokens here"
    raise StatesError(
        "No vector for every text",
        reason,
        "Pool before selecting tokens, or leave that text out.",
    )


def check_cls(
    source: Source | Mapping[str, object] | None, ids: ArrayLike, first: int
) -> None:
    """Refuse texts that do not begin with the tokenizer's classification token.

    `ids` holds the first token of each text, `first` is the number of the first text.
    """
    problem = "Cannot pool by cls"
    remedy = 'Use pool="mean" or "last".'
    cls = getattr(source, "cls", None)
    if cls is None:
        owner = ""
        if isinstance(source, Source):
            owner = f" of {terminal_safe(source.model)}"
        reason = f"the tokenizer{owner} has no such token"
        raise StatesError(problem, reason, remedy)
    others = np.flatnonzero(np.asarray(ids) != cls)
    if len(others):
        reason = f"text {others[0] + first} does not begin with that token"
        raise StatesError(problem, reason, remedy)


def not_whole(site: Site, rows: int, tokens: int) -> StatesError:
    """Return the error for states that have more or fewer rows than tokens."""
    return StatesError(
        "States are not whole",
        f"the blocks at {site} have {rows:,} rows for {tokens:,} tokens",
        "Give all of them.",
    )
