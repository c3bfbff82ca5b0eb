"""The rows nearest to queries, and the vectors of queries that are texts."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.search.story import NearestRow, SearchReport
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.measures.neighbours import drawn, explained_by_chance, mean_cosine
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Variables,
    text_array,
    to_dataset,
)
from hiddenscope.results.sentences import standing
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.states.arrays import AnyArray
from hiddenscope.vectors import EachToken, vectors
from hiddenscope.vectors.collection import (
    Collection,
    as_trained,
    collection_of,
    last_site,
)
from hiddenscope.vectors.nearest import Nearest, Nearness

Query: TypeAlias = (
    Texts | Inputs | AnyArray | Tensor | Sequence[float] | Sequence[Sequence[float]]
)
Searchable: TypeAlias = ModelLike | Readable | Pair | EachToken | AnyArray | Tensor

LOOKS: dict[str, Attributes] = {
    "cosine": {"long_name": "cosine", "meaning": "diverging"},
    "dot": {"long_name": "dot product", "meaning": "diverging"},
    "l2": {"long_name": "distance", "units": "L2"},
}
# Queries, and characters of a text, that the facts list.
LISTED = 5
SHORT = 100


def find_nearest(
    source: Searchable,
    query: Query | tuple[Model, Texts | Inputs],
    k: int,
    texts: Texts | Inputs | Any,
    site: str | Site | None,
    pool: Pooling | None,
    nearness: Nearness,
) -> Result:
    """Return the k rows nearest to every query."""
    source = as_source(source)
    collection = collection_of(source, texts, site, pool)
    model = source if isinstance(source, Model) else None
    queries, names, embedded = _queries(collection, query, model, nearness)
    if model is not None or collection.of_states:
        # They are pooled as the rows are.
        embedded = None
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
    nearest, rows, by_chance = _search(collection, queries, k, nearness)
    first = []
    for row, name in enumerate(names[:LISTED]):
        number = int(nearest.numbers[row, 0])
        string = None
        if collection.strings is not None:
            string = collection.strings[number][:SHORT]
        score = float(nearest.scores[row, 0])
        first.append(
            NearestRow(
                query=name[:SHORT],
                number=number,
                score=score,
                string=string,
                by_chance=by_chance is not None and bool(by_chance[row]),
            )
        )
    dims = ("query", "rank")
    numbers = nearest.numbers
    variables: Variables = {
        "score": (dims, nearest.scores, LOOKS[nearest.nearness]),
        "number": (dims, numbers, f"number of the {collection.unit}"),
    }
    if collection.tokens is not None:
        token_texts = collection.tokens.text[numbers]
        positions = collection.tokens.positions[numbers]
        variables["text"] = dims, token_texts, "number of the text"
        variables["position"] = dims, positions, "position in the text"
    if collection.strings is not None:
        row_strings = [
            collection.strings[number] for number in numbers.ravel().tolist()
        ]
        strings = text_array(row_strings).reshape(numbers.shape)
        variables["string"] = dims, strings, collection.unit
    ranks = np.arange(1, numbers.shape[1] + 1)
    report = SearchReport(
        searched=nearest.seen,
        unit=collection.unit,
        nearness=nearest.nearness,
        **collection.place,
        nearest=first,
        typical=mean_cosine(rows) if nearness == "cosine" else None,
        pooled=collection.pooled(rows, drawn(collection.count)),
        embedded=embedded,
    )
    data = to_dataset(variables, {"query": text_array(names), "rank": ranks})
    return Result("search", data, report, collection.source)


def _search(
    collection: Collection, queries: Tensor, k: int, nearness: Nearness
) -> tuple[Nearest, Tensor, Tensor | None]:
    """Return the nearest, rows at random, and which queries chance explains."""
    nearest = Nearest(queries, k, nearness)
    closest = torch.empty(queries.shape, dtype=torch.float64)
    numbers = drawn(collection.count)
    sample = []
    done = 0
    with progress.track("Searching", total=collection.count) as advance:
        for block in collection.blocks():
            nearest.see(block)
            new = nearest.numbers[:, 0] >= done
            closest[new] = block[nearest.numbers[new, 0] - done].cpu().double()
            here = (numbers >= done) & (numbers < done + len(block))
            sample.append(block[numbers[here] - done].cpu())
            done += len(block)
            advance(len(block))
    rows = torch.cat(sample)
    by_chance = None
    if nearness == "cosine":
        by_chance = explained_by_chance(rows, queries, closest, done)
    return nearest, rows, by_chance


def _queries(
    collection: Collection, query: Any, model: Model | None, nearness: Nearness
) -> tuple[Tensor, list[str], str | None]:
    """Return the vectors of the queries, a name for each, and how texts were pooled."""
    if isinstance(query, tuple) and len(query) == 2 and isinstance(query[0], Model):
        model, query = query
    if isinstance(query, Inputs):
        names = list(query.texts or _numbered(len(query)))
        values, embedded = _embed(collection, query, model, nearness)
        return values, names, embedded
    texts = []
    if isinstance(query, str):
        texts = [query]
    elif isinstance(query, list | tuple) and all(isinstance(q, str) for q in query):
        texts = list(query)
    if texts:
        values, embedded = _embed(collection, texts, model, nearness)
        return values, texts, embedded
    try:
        if isinstance(query, Tensor):
            rows = query.detach().cpu().double()
        else:
            rows = torch.as_tensor(np.asarray(query, dtype=float)).double()
        if rows.ndim == 1:
            rows = rows.reshape(1, -1)
    # A meta tensor has no values, and no memory holds a range of 10**12.
    except (TypeError, ValueError, NotImplementedError, OverflowError, MemoryError):
        rows = torch.zeros(0)
    if rows.ndim != 2 or not rows.numel():
        reason = f"{type(query).__name__} is neither texts nor vectors"
        raise StatesError(
            "No query",
            reason,
            "Give a text, a list of texts, or vectors [query, width].",
        )
    return rows, _numbered(len(rows)), None


def _numbered(count: int) -> list[str]:
    return [f"query {number}" for number in range(count)]


def _embed(
    collection: Collection,
    texts: list[str] | Inputs,
    model: Model | None,
    nearness: Nearness,
) -> tuple[Tensor, str]:
    """Return the vectors of texts, made like those of the collection, and how."""
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
    stack = collection.site.stack if collection.site else None
    model_weights = model.source(stack).weights
    if weights and model_weights and weights != model_weights:
        name = getattr(collection.source, "model", "a model")
        reason = f"the states are of {name}, not of {model.name}: other weights"
        raise StatesError(problem, reason, "Give the model that computed the states.")
    site = collection.site or last_site(model)
    # A query against states is pooled as they are, without the prefix and the limit
    # that a folder of sentence-transformers names.
    pooling = collection.pool
    limit: bool | int = False
    if pooling is None or not collection.of_states:
        texts, pooling, limit = as_trained(model, texts, pooling, limit)
    made = vectors(model, texts, sites=site, pool=pooling, truncate=limit)
    return made.values[0], f"{standing(pooling)} at {site}"
