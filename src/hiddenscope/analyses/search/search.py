"""Which texts are nearest to this one?"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.vectors import EachToken, vectors
from hiddenscope.vectors.collection import (
    Collection,
    as_trained,
    collection_of,
    last_site,
)
from hiddenscope.vectors.nearest import NEARNESSES, Nearest, Nearness

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[Any]
Query: TypeAlias = Texts | Inputs | Array | Tensor

LOOKS = {
    "cosine": {"long_name": "cosine", "meaning": "diverging"},
    "dot": {"long_name": "dot product", "meaning": "diverging"},
    "l2": {"long_name": "distance", "units": "L2"},
}
LISTED, SHORT = 5, 100  # queries, and characters of a text, that the facts list


@checked
def search(
    source: ModelLike | Readable | Pair | EachToken | Array | Tensor,
    query: Query | tuple[Model, Texts | Inputs],
    k: int = 10,
    *,
    texts: Texts | Inputs | Any = None,
    site: str | Site | None = None,
    pool: Pooling | None = None,
    nearness: Nearness = "cosine",
) -> Result:
    """The k texts nearest to a query, exactly: none is left out, and of equals the
    first comes first.

    `source` is a model with `texts`, states of any size, or an array `[text, width]`;
    with `hs.each_token(source)` every token is a row. `query` is a text, several, or
    vectors. The model that is searched reads texts; with states or an array, give
    `(model, texts)`. Both sides are taken at `site`, by default the last there is, and
    pooled. Texts that are longer than the model's window go through
    `model.encode(texts, truncate=True)` first.

    >>> import hiddenscope as hs
    >>> found = hs.search(np.eye(3), [0.0, 2.0, 1.0], k=2)
    >>> found.data["number"].values.tolist(), found.data["score"].values.round(2).tolist()
    ([[1, 2]], [[0.89, 0.45]])
    """
    source = as_source(source)
    count = integer(k, "k", 1)
    if nearness not in NEARNESSES:
        problem = f"No nearness {str(nearness)[:40]!r}"
        raise StatesError(
            problem, "there are three measures", f"Use one of {', '.join(NEARNESSES)}."
        )
    collection = collection_of(source, texts, site, pool)
    queries, names = _queries(
        collection, query, source if isinstance(source, Model) else None, nearness
    )
    nearest = Nearest(_checked(queries, nearness), count, nearness)
    with progress.track("Searching", total=collection.count) as advance:
        for block in collection.blocks():
            nearest.see(block)
            advance(len(block))
    return Result(
        "search",
        _data(collection, nearest, names),
        _facts(collection, nearest, names),
        collection.source,
    )


def _queries(
    collection: Collection, query: Any, model: Model | None, nearness: Nearness
) -> tuple[Tensor, list[str]]:
    """The vectors of the queries, and a name for each."""
    if isinstance(query, tuple) and len(query) == 2 and isinstance(query[0], Model):
        model, query = query
    if isinstance(query, Inputs):
        names = query.texts or [f"query {number}" for number in range(len(query))]
        return _of_texts(collection, query, model, nearness), list(names)
    listed = [query] if isinstance(query, str) else query
    if (
        isinstance(listed, list | tuple)
        and listed
        and all(isinstance(one, str) for one in listed)
    ):
        return _of_texts(collection, list(listed), model, nearness), list(listed)
    try:
        given = (
            query.detach().cpu()
            if isinstance(query, Tensor)
            else torch.as_tensor(np.asarray(query, dtype=float))
        )
        rows = given.double().reshape(1, -1) if given.ndim == 1 else given.double()
    except (
        TypeError,
        ValueError,
        NotImplementedError,
        # The last is a meta tensor's, which has no values.
    ):
        rows = torch.zeros(0)
    if rows.ndim != 2 or not rows.numel():
        reason = f"{type(query).__name__} is neither texts nor vectors"
        raise StatesError(
            "No query",
            reason,
            "Give a text, a list of texts, or vectors [query, width].",
        )
    return rows, [f"query {number}" for number in range(len(rows))]


def _of_texts(
    collection: Collection,
    texts: list[str] | Inputs,
    model: Model | None,
    nearness: Nearness,
) -> Tensor:
    problem = "Cannot search for a text"
    if model is None:
        raise StatesError(
            problem,
            "no model was given to embed it",
            "Give (model, text), or a vector.",
        )
    if collection.tokens is not None:
        reason = "every row is a token, and a text has several"
        raise StatesError(
            problem, reason, "Give a vector, such as states['layer.3'][5]."
        )
    if nearness != "cosine" and collection.site is None:
        reason = "the rows of an array may have been scaled"
        raise StatesError(
            f"Cannot search for a text by {nearness}",
            reason,
            "Search by cosine, or give its vector.",
        )
    weights = getattr(collection.source, "weights", "")
    own_weights = model.source(
        collection.site.stack if collection.site else None
    ).weights
    if weights and own_weights and weights != own_weights:
        reason = (
            f"the states are of {getattr(collection.source, 'model', 'a model')}, not"
            f" of {model.name}: other weights"
        )
        raise StatesError(problem, reason, "Give the model that computed the states.")
    site = collection.site or last_site(model)
    if collection.of_states and collection.pool is not None:
        return vectors(model, texts, sites=site, pool=collection.pool).values[0]
    listed, pooling, limit = as_trained(model, texts, collection.pool, False)
    return vectors(model, listed, sites=site, pool=pooling, truncate=limit).values[0]


def _checked(queries: Tensor, nearness: Nearness) -> Tensor:
    wrong = (~queries.isfinite().all(1)).nonzero()
    if len(wrong):
        raise NotFinite(
            "Cannot search",
            f"query {int(wrong[0])} has a NaN or an infinity",
            "Give finite numbers.",
        )
    zero = (queries == 0).all(1).nonzero()
    if nearness == "cosine" and len(zero):
        reason = f"query {int(zero[0])} is a vector of zeros, without a direction"
        raise StatesError(
            "Cannot search by cosine",
            reason,
            "Give another, or search by 'l2' or 'dot'.",
        )
    return queries


def _data(
    collection: Collection, nearest: Nearest, names: list[str]
) -> "xarray.Dataset":
    import xarray

    dims, numbers = ("query", "rank"), nearest.numbers
    columns: dict[str, Any] = {
        "score": (dims, nearest.scores, LOOKS[nearest.nearness]),
        "number": (dims, numbers, {"long_name": f"number of the {collection.unit}"}),
    }
    if collection.tokens is not None:
        columns["text"] = (
            dims,
            collection.tokens.text[numbers],
            {"long_name": "number of the text"},
        )
        columns["position"] = (
            dims,
            collection.tokens.positions[numbers],
            {"long_name": "position in the text"},
        )
    if collection.strings is not None:
        strings = np.empty(numbers.shape, dtype=object)
        strings.reshape(-1)[:] = [
            collection.strings[number] for number in numbers.ravel().tolist()
        ]
        columns["string"] = (dims, strings, {"long_name": collection.unit})
    ranks = np.arange(1, numbers.shape[1] + 1)
    return xarray.Dataset(
        columns, {"query": np.array(names, dtype=object), "rank": ranks}
    )


def _facts(collection: Collection, nearest: Nearest, names: list[str]) -> Facts:
    """What was searched and how, and the nearest to each of the first few queries."""
    facts: dict[str, Any] = {
        "searched": nearest.seen,
        "unit": collection.unit,
        "nearness": nearest.nearness,
    }
    if collection.site is not None:
        facts |= {"site": collection.site, "token": collection.token}
    first = []
    for query, name in enumerate(names[:LISTED]):
        number = int(nearest.numbers[query, 0])
        record: dict[str, Any] = {
            "query": name[:SHORT],
            "number": number,
            "score": float(nearest.scores[query, 0]),
        }
        if collection.strings is not None:
            record["string"] = collection.strings[number][:SHORT]
        first.append(record)
    return facts | {"nearest": first}
