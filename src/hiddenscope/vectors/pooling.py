"""Which rows of states make the vector of each text."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hiddenscope.errors import NotFinite, StatesError, TextError, TooLarge
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.states import Source

Token: TypeAlias = str | int

PLACES = {"last": -1, "first": 0, "cls": 0}


class Rows:
    """Which rows of states make the vector of each text."""

    def __init__(self, lengths: ArrayLike, token: Token, first: int = 0) -> None:
        self.lengths, self.token = np.asarray(lengths, dtype=np.int64), token
        if isinstance(token, int):
            short = np.flatnonzero(self.lengths < (token + 1 if token >= 0 else -token))
            if len(short):
                text = int(short[0])
                reason = f"text {text + first} has {self.lengths[text]} tokens"
                remedy = "Ask for a position that every text has; -1 is the last token."
                raise TextError(f"The token at position {token} of each text", reason, remedy)

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


def begin_with_cls(source: Source | Mapping[str, Any] | None, ids: Any, first: int) -> None:
    """Refuse texts that do not begin with the tokenizer's classification token."""
    cls, remedy = getattr(source, "cls", None), "Ask for mean or last."
    if cls is None:
        raise StatesError("The token cls of each text", "its tokenizer has no such token", remedy)
    other = np.flatnonzero(np.asarray(ids) != cls)
    if len(other):
        raise StatesError("The token cls of each text", f"text {other[0] + first} does not begin with it", remedy)


def not_finite(row: Tensor, where: str) -> NotFinite:
    """The error that names a vector with a NaN or an infinity in it."""
    what = "a NaN" if bool(row.isnan().any()) else "an infinity"
    remedy = "Look at the weights of the block that makes it, or load the model in a wider dtype."
    return NotFinite("Vectors of states", f"{what} at {where}", remedy)


def room_for(sites: int, rows: int, like: Tensor) -> Tensor:
    """Memory for all vectors, refused where there is too little."""
    size, free = sites * rows * like.shape[-1] * like.dtype.itemsize, free_memory()
    if size > free * SHARE_OF_FREE_MEMORY:
        problem = f"{rows:,} vectors at {sites} sites, {like.shape[-1]:,} wide"
        reason = f"that is {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free"
        raise TooLarge(problem, reason, "Ask for fewer sites or texts.")
    return torch.empty(sites, rows, like.shape[-1], dtype=like.dtype)
