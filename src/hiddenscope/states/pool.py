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
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints
from hiddenscope.states.pooling import POOLINGS, Pooling, position_of
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
        self.rows = rows
        if isinstance(pooling, int) and rows is None:
            self._check_position(pooling, first)

    def _check_position(self, position: int, first: int) -> None:
        needed = position + 1 if position >= 0 else -position
        short = np.flatnonzero(self.lengths < needed)
        if len(short):
            text = int(short[0])
            raise TextError(
                f"No token at position {position} of every text",
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
        if positions is not None:
            starts = np.cumsum(lengths) - lengths
            rows = torch.from_numpy(starts + positions)
            return values[:, rows.to(values.device)]
        assert isinstance(self.pooling, str)
        reduce = POOLINGS[self.pooling].reduce
        assert reduce is not None
        dtype = wide(values.dtype)
        # Text by text, so that a text pooled among others equals the text pooled by
        # itself bit for bit: a sum over padded rows would add in another order.
        parts = torch.split(values, lengths.tolist(), dim=1)
        return torch.stack([reduce(part, dtype) for part in parts], 1)

    def stream(self, blocks: Iterable[Tensor], site: Site) -> Iterator[Tensor]:
        """Pool blocks `[some rows, width]` of one site, as `[some texts, width]`.

        A text is yielded as soon as the last of its rows has been read.
        """
        ends = np.cumsum(self.lengths)
        # The rows of a text that continues in the next block.
        pending: list[Tensor] = []
        text = 0
        rows_read = 0
        for block in blocks:
            rows = block.detach()
            if pending and text < len(ends) and rows_read + len(rows) >= ends[text]:
                missing = int(ends[text]) - rows_read
                whole = torch.cat([*pending, rows[:missing]])
                yield self._vectors(whole, slice(text, text + 1))
                rows = rows[missing:]
                rows_read += missing
                pending = []
                text += 1
            complete = int(np.searchsorted(ends, rows_read + len(rows), side="right"))
            used = 0
            if complete > text:
                used = int(ends[complete - 1]) - rows_read
                yield self._vectors(rows[:used], slice(text, complete))
                text = complete
            if used < len(rows):
                # A view would keep the whole block in memory.
                pending.append(rows[used:].clone())
            rows_read += len(rows)
        if pending or text < len(ends):
            raise not_whole(site, rows_read, int(ends[-1]))

    def _vectors(self, rows: Tensor, texts: slice) -> Tensor:
        return as_vectors(self(rows[None], texts)[0])


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
