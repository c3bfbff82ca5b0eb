"""Which vector stands for a text?"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.sites import Site
from hiddenscope.vectors import vectors
from hiddenscope.vectors.sentences import POOLED, Adjust, Adjustment, last_site, mean_cosine, texts_of, unit

NARROW = 0.5  # a mean cosine beyond which most of what the vectors say is what all of them share


def embed(
    model: Model | Any,
    texts: Any,
    *,
    pool: str | int | None = None,
    site: str | Site | None = None,
    normalize: bool = True,
    adjust: Adjust | None = None,
    reference: Any = None,
    truncate: bool = False,
) -> NDArray[np.float32]:
    """One vector a text, `[text, width]` in float32: the mean over its tokens of the last state, at length one.

    That is what sentence encoders are trained for. States of a causal model are not: they point nearly the same way,
    and how nearly is said on stderr. `adjust="centre"` takes away the mean, `"whiten"` also makes the covariance one;
    both are taken from the texts, or from those given as `reference`. Texts are strings, lists of ids, a path, a frame
    or a dataset.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> hs.embed(hs.load((tiny_model("bert"), None)), [[5, 6, 7], [8, 9]]).shape
    (2, 64)
    """
    if not isinstance(model, Model):
        given = f"{type(model).__name__} makes no states of texts"
        raise StatesError("Vectors of texts", given, "Give a model; hiddenscope.vectors takes those of states.")
    if reference is not None and adjust is None:
        raise StatesError("Texts for reference", "nothing is adjusted to them", "Give adjust= too, or leave them out.")
    where: dict[str, Any] = {"sites": site or last_site(model), "token": POOLED if pool is None else pool}
    if where["token"] == "each":
        raise StatesError("One vector a text", "'each' gives one a token", "Ask for model.capture(texts, site).")
    raw = vectors(model, texts_of(texts), truncate=truncate, **where)
    if len(raw.sites) > 1:
        raise StatesError(f"One site, {str(site)[:60]!r}", f"it names {len(raw.sites)}", "Ask for one.")
    values = raw.values[0]
    _report(model, mean_cosine(values), len(values), adjust)
    if adjust is not None:
        others = (
            values if reference is None else vectors(model, texts_of(reference), truncate=truncate, **where).values[0]
        )
        adjustment = Adjustment.fit(others, adjust)
        if normalize:
            adjustment.check(values)
        values = adjustment.apply(values)
    found: NDArray[np.float32] = (unit(values) if normalize else values).float().numpy()
    return found


def _report(model: Model, cosine: float, count: int, adjust: Adjust | None) -> None:
    """Say on stderr how nearly the vectors point the same way."""
    if count < 2:
        return
    said = f"{model.name}: the mean cosine of two of the {count:,} texts is {cosine:.2f}"
    if cosine > NARROW and adjust is None:
        said += "; states that point so nearly the same way are no embeddings as they are: try adjust='centre'"
    progress.note(said)
