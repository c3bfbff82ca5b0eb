"""Vectors of texts, and how they are centred or whitened."""

from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError
from hiddenscope.measures.neighbours import mean_cosine, told_apart
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results.sentences import neighbours, ruled
from hiddenscope.sites import Site
from hiddenscope.states import Pooling
from hiddenscope.states.pooling import vector_pooling
from hiddenscope.vectors import vectors
from hiddenscope.vectors.collection import as_trained, last_site
from hiddenscope.vectors.dataset import texts_of
from hiddenscope.vectors.vectors import single_site

Adjust: TypeAlias = Literal["centre", "whiten"]

# A standard deviation below this share of the largest is the rounding of float32.
SMALLEST_DEVIATION = 2.0**-20
# If less than this share of the mean is left without it, it is rounding, and has no
# direction.
ROUNDING = 1e-6


def embed_texts(
    model: ModelLike | Any,
    texts: Texts | Inputs | Any,
    site: str | Site | None,
    pool: Pooling | None,
    normalize: bool,
    adjust: "Adjust | Adjustment | None",
    truncate: bool,
) -> NDArray[np.float32]:
    """Return one vector for each text."""
    model = as_source(model)
    if not isinstance(model, Model):
        reason = f"{type(model).__name__} is not a model"
        raise StatesError(
            "Cannot embed texts", reason, "Give a model; for states call states.pool()."
        )
    sites = last_site(model) if site is None else site
    if pool is not None:
        pool = vector_pooling(pool)
    listed, pooling, limit = as_trained(model, texts_of(texts), pool, truncate)
    rows = vectors(model, listed, sites=sites, pool=pooling, truncate=limit)
    single_site(site, rows.sites)
    values = rows.values[0]
    if len(values) > 1:
        progress.note(
            f"{model.name}, {pooling} of {rows.sites[0]}: the mean cosine of two of the"
            f" {len(values):,} texts is {mean_cosine(values):.2f}"
        )
    for sentence in (*ruled(rows.pooled), *neighbours(told_apart(values))):
        progress.note(sentence)
    if adjust is not None:
        if not isinstance(adjust, Adjustment):
            adjust = Adjustment.fit(values, adjust)
        if normalize:
            adjust.check(values)
        values = adjust.apply(values)
    if normalize:
        norms = values.norm(dim=1, keepdim=True)
        zero = (norms[:, 0] == 0).nonzero()
        if len(zero):
            reason = f"the vector of text {int(zero[0])} is zero and has no direction"
            raise StatesError(
                "Cannot normalize", reason, "Leave it out, or use normalize=False."
            )
        values = values / norms
    return values.float().numpy()


@checked
@dataclass(frozen=True, eq=False)
class Adjustment:
    """The mean to subtract from vectors, and for whitening a matrix.

    The matrix makes their covariance the identity.

    >>> values = torch.from_numpy(np.random.default_rng(0).normal(size=(100, 4)))
    >>> white = Adjustment.fit(values, "whiten").apply(values)
    >>> np.allclose(np.cov(white.T), np.eye(4))
    True
    """

    mean: Tensor
    matrix: Tensor | None

    @classmethod
    def fit(cls, values: Tensor | NDArray[Any], how: Adjust) -> Self:
        """Fit the adjustment that centres or whitens these rows."""
        if how not in ("centre", "whiten"):
            problem = f"No adjustment {str(how)[:40]!r}"
            raise StatesError(
                problem, "there are two kinds", 'Use "centre", "whiten" or None.'
            )
        wide = torch.as_tensor(values).double()
        if wide.ndim != 2:
            raise StatesError(
                f"Cannot {how} these values",
                f"their shape is {list(wide.shape)}",
                "Give [text, width].",
            )
        count, width = wide.shape
        mean = wide.mean(0)
        if count < 2:
            reason = "subtracting the mean of one text from itself leaves zero"
            remedy = (
                "Give more texts, or an hs.Adjustment that was fitted to many others."
            )
            raise StatesError(f"Cannot {how} one vector", reason, remedy)
        if how == "centre":
            return cls(mean, None)
        scaled = (wide - mean) / (count - 1) ** 0.5
        _, deviations, directions = torch.linalg.svd(scaled, full_matrices=False)
        rank = int((deviations > deviations[0] * SMALLEST_DEVIATION).sum())
        if rank < width:
            reason = f"they vary in only {rank} of {width} directions"
            remedy = (
                "Give more texts than the width, or an hs.Adjustment that was fitted to"
                " many others; or centre them."
            )
            raise StatesError(f"Cannot whiten {count} vectors", reason, remedy)
        # ZCA: of all whitenings, the one that changes the vectors least.
        return cls(mean, directions.T @ (directions / deviations[:, None]))

    def apply(self, values: Tensor) -> Tensor:
        """Return the adjusted rows in float64."""
        centred = values.double() - self.mean
        if self.matrix is None:
            return centred
        return centred @ self.matrix

    def check(self, values: Tensor) -> None:
        """Refuse rows that equal the mean: without it they have no direction."""
        left = (values.double() - self.mean).norm(dim=1)
        lost = (left <= ROUNDING * self.mean.norm()).nonzero()
        if len(lost):
            reason = (
                f"text {int(lost[0])} equals the mean of all texts, and subtracting"
                " that leaves zero"
            )
            raise StatesError(
                "Cannot normalize",
                reason,
                "Give texts that differ, or normalize=False.",
            )
