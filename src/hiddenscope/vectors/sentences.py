"""Vectors of whole texts: what stands for one if nothing is said, and how many of them spread.

>>> import torch
>>> mean_cosine(torch.eye(3)), round(mean_cosine(torch.ones(3, 2)), 9)
(0.0, 1.0)
"""

import os
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor

from hiddenscope import texts as reader
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Readable

Adjust: TypeAlias = Literal["centre", "whiten"]

FILES = (*reader.FORMATS, *reader.PACKINGS)
POOLED = "mean"  # what sentence encoders are mostly trained with
LEAST_SPREAD = 2.0**-20  # of the largest: below it, a direction's spread is the rounding of float32
LEAST_LEFT = 1e-6  # of the mean: a vector that is left with less was the mean, and its direction is rounding


def texts_of(given: Any) -> Any:
    """Strings and ids as they are; a path of a file, an open file, a frame or a Hugging Face dataset is read.

    >>> texts_of(["a cat", "a dog"])
    ['a cat', 'a dog']
    """
    named = isinstance(given, str) and given.lower().endswith(FILES) and reader.is_file(given)
    tabular = named or isinstance(given, os.PathLike)
    tabular = tabular or any(hasattr(given, name) for name in ("read", "columns", "column_names"))
    return list(reader.read(given).texts) if tabular else given


def last_site(source: Model | Readable | Pair) -> Site:
    """The last state there is: `final`, or the last layer; of two stacks, the encoder's."""
    sites = source.anatomy.select("layer.*,final") if isinstance(source, Model) else source.sites
    stack = sites[0].stack
    return max(site for site in sites if site.stack == stack)


def mean_cosine(values: Tensor) -> float:
    """The mean cosine of two different rows: 0 where they point everywhere, near 1 where all point the same way."""
    wide = values.double()
    unit = wide / wide.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    count = len(values)
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1))) if count > 1 else 1.0


@dataclass(frozen=True)
class Adjustment:
    """The mean that is taken away from vectors, and with whitening the matrix that makes their covariance one.

    >>> values = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(torch.cov(Adjustment.fit(values, "whiten").apply(values).T), torch.eye(4, dtype=torch.float64))
    True
    """

    mean: Tensor
    matrix: Tensor | None

    @classmethod
    def fit(cls, values: Tensor, how: Adjust) -> Self:
        """What makes these rows have mean zero and, for "whiten", the identity as their covariance."""
        if how not in ("centre", "whiten"):
            reason = "vectors are taken as they are, centred or whitened"
            raise StatesError(f"No adjustment {str(how)[:40]!r}", reason, "Give 'centre', 'whiten' or None.")
        count, width = values.shape
        wide = values.double()
        mean = wide.mean(0)
        if count < 2:
            reason = "one text is its own mean, and nothing would be left of it"
            raise StatesError(f"To {how} vectors", reason, "Give more texts, or many others as `reference=`.")
        if how == "centre":
            return cls(mean, None)
        _, spread, directions = torch.linalg.svd((wide - mean) / (count - 1) ** 0.5, full_matrices=False)
        rank = int((spread > spread[0] * LEAST_SPREAD).sum())
        if rank < width:
            reason = f"they spread in {rank} of {width} directions only"
            remedy = "Give more texts than the vectors are wide, or many others as `reference=`; or centre them."
            raise StatesError(f"To whiten {count} vectors", reason, remedy)
        return cls(mean, directions.T @ (directions / spread[:, None]))  # of all whitenings, the one that turns nothing

    def apply(self, values: Tensor) -> Tensor:
        """The rows adjusted, in float64."""
        centred = values.double() - self.mean
        return centred if self.matrix is None else centred @ self.matrix

    def check(self, values: Tensor) -> None:
        """Refuse rows of which the mean leaves nothing but rounding: they have no direction."""
        left = (values.double() - self.mean).norm(dim=1)
        lost = (left <= LEAST_LEFT * self.mean.norm()).nonzero()
        if len(lost):
            reason = f"text {int(lost[0])} is the mean of all, and nothing is left of it"
            remedy = "Give texts that differ, or normalize=False."
            raise StatesError("Centred vectors of length one", reason, remedy)


def unit(values: Tensor, what: str = "text") -> Tensor:
    """The rows at length one; a row of zeros has no direction and is refused."""
    lengths: Tensor = values.norm(dim=1, keepdim=True)
    zero = (lengths[:, 0] == 0).nonzero()
    if len(zero):
        reason = f"the vector of {what} {int(zero[0])} is zero, which points nowhere"
        raise StatesError("Vectors of length one", reason, "Leave it out, or take them as they are.")
    return values / lengths
