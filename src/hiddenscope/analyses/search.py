"""Which texts are nearest to this one?"""

import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Readable
from hiddenscope.vectors import vectors
from hiddenscope.vectors.nearest import NEARNESSES, Nearest, Nearness
from hiddenscope.vectors.sentences import POOLED, last_site
from hiddenscope.vectors.shelf import Shelf, shelf_of

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[Any]

LOOKS = {
    "cosine": {"long_name": "cosine", "meaning": "diverging"},
    "dot": {"long_name": "dot product", "meaning": "diverging"},
    "l2": {"long_name": "distance", "units": "L2"},
}
FEW, SHORT = 5, 100  # queries, and characters of a text, that the facts name
COMPUTED = "float32 products; the nearest, and all that rounding leaves in question, again in float64"


def search(
    source: Model | Readable | Pair | Array | Tensor,
    query: Any,
    k: int = 10,
    *,
    texts: Any = None,
    model: Model | None = None,
    site: str | Site | None = None,
    pool: str | int | None = None,
    nearness: Nearness = "cosine",
    truncate: bool = False,
) -> Result:
    """The k texts nearest to a query, exactly: none is left out, and of equals the first comes first.

    `source` is a model with `texts`, states of any size (with `pool="each"` one row a token), or an array
    `[text, width]`. `query` is a text, several, or vectors; texts need a model: the source, or `model=`. Both are taken
    at `site`, the last there is if not given, and pooled by the mean if not said otherwise.

    >>> import hiddenscope as hs
    >>> found = hs.search(np.eye(3), [0.0, 2.0, 1.0], k=2)
    >>> found.data["number"].values.tolist(), found.data["score"].values.round(2).tolist()
    ([[1, 2]], [[0.89, 0.45]])
    """
    wanted = _whole_number(k)
    if nearness not in NEARNESSES:
        remedy = f"Ask for {', '.join(NEARNESSES)}."
        raise StatesError(f"No nearness {str(nearness)[:40]!r}", "there are three", remedy)
    shelf = shelf_of(source, texts, site, POOLED if pool is None else pool, truncate)
    asker = model or (source if isinstance(source, Model) else None)
    asked, names = _queries(shelf, query, asker, nearness, truncate)
    best = Nearest(_checked(asked, nearness), wanted, nearness)
    with progress.track("Searching", total=shelf.count) as advance:
        for block in shelf.blocks():
            best.see(block)
            advance(len(block))
    return Result("search", _data(shelf, best, names), _facts(shelf, best, names), shelf.source)


def _whole_number(k: Any) -> int:
    try:
        wanted = operator.index(k)
    except TypeError:
        wanted = 0
    if wanted < 1 or isinstance(k, bool):
        raise StatesError(f"The {str(k)[:40]} nearest", "that is no number of texts", "Give a whole number from 1 up.")
    return wanted


def _queries(
    shelf: Shelf, query: Any, model: Model | None, nearness: Nearness, truncate: bool
) -> tuple[Tensor, list[str]]:
    """The vectors of the queries, and what each is called."""
    listed = [query] if isinstance(query, str) else query
    if isinstance(listed, list | tuple) and listed and all(isinstance(one, str) for one in listed):
        return _of_texts(shelf, list(listed), model, nearness, truncate), list(listed)
    try:
        given = query.detach().cpu() if isinstance(query, Tensor) else torch.as_tensor(np.asarray(query, dtype=float))
        rows = given.double().reshape(1, -1) if given.ndim == 1 else given.double()
    except (TypeError, ValueError):
        rows = torch.zeros(0)
    if rows.ndim != 2 or not rows.numel():
        reason = f"{type(query).__name__} is neither texts nor vectors"
        raise StatesError("A query", reason, "Give a text, a list of texts, or vectors [query, width].")
    return rows, [f"query {number}" for number in range(len(rows))]


def _of_texts(shelf: Shelf, texts: list[str], model: Model | None, nearness: Nearness, truncate: bool) -> Tensor:
    if model is None:
        raise StatesError("A text as a query", "there is no model to read it", "Give model=, or give a vector.")
    if shelf.token == "each":
        reason = "one row a token is searched, and a text has several"
        raise StatesError("A text as a query", reason, "Give a vector: states['layer.3'][5], say.")
    if nearness != "cosine" and shelf.site is None:
        reason = "whether the rows of an array were scaled is not known"
        raise StatesError(f"A text as a query by {nearness}", reason, "Search by cosine, or give its vector.")
    mine = model.source(shelf.site.stack if shelf.site else None)
    theirs = getattr(shelf.source, "weights", "")
    if theirs and mine.weights and theirs != mine.weights:
        reason = f"the states are of {shelf.source.model}, and {model.name} has other weights"
        raise StatesError("A text as a query", reason, "Give the model that made the states.")
    place = shelf.site or last_site(model)
    return vectors(model, texts, sites=place, token=shelf.token, truncate=truncate).values[0]


def _checked(queries: Tensor, nearness: Nearness) -> Tensor:
    wrong = (~queries.isfinite().all(1)).nonzero()
    if len(wrong):
        raise NotFinite("A query", f"query {int(wrong[0])} holds a NaN or an infinity", "Give finite numbers.")
    zero = (queries == 0).all(1).nonzero()
    if nearness == "cosine" and len(zero):
        reason = f"query {int(zero[0])} is a vector of zeros, which points nowhere"
        raise StatesError("Cosines", reason, "Give another, or search by 'l2' or 'dot'.")
    return queries


def _data(shelf: Shelf, best: Nearest, names: list[str]) -> "xarray.Dataset":
    import xarray

    dims = ("query", "rank")
    columns: dict[str, Any] = {
        "score": (dims, best.scores, LOOKS[best.nearness]),
        "number": (dims, best.numbers, {"long_name": "number of the text" if shelf.tokens is None else "row"}),
    }
    if shelf.tokens is not None:
        columns["text"] = (dims, shelf.tokens.text[best.numbers], {"long_name": "number of the text"})
        columns["position"] = (dims, shelf.tokens.positions[best.numbers], {"long_name": "position in the text"})
    strings = shelf.strings
    if strings is not None:
        found = np.empty(best.numbers.shape, dtype=object)
        found.reshape(-1)[:] = [strings[number] for number in best.numbers.ravel().tolist()]
        columns["string"] = (dims, found, {"long_name": "text" if shelf.tokens is None else "token"})
    ranks = np.arange(1, best.numbers.shape[1] + 1)
    return xarray.Dataset(columns, {"query": np.array(names, dtype=object), "rank": ranks})


def _facts(shelf: Shelf, best: Nearest, names: list[str]) -> dict[str, Any]:
    """What was searched and how, and the nearest to each of the first few queries."""
    facts: dict[str, Any] = {"searched": f"{best.seen:,} {'texts' if shelf.tokens is None else 'tokens'}"}
    if shelf.site is not None:
        facts |= {"site": shelf.site, "token": shelf.token}
    facts |= {"nearness": best.nearness, "computed in": COMPUTED}
    strings = shelf.strings
    nearest = {}
    for query, name in list(enumerate(names))[:FEW]:
        number, score = int(best.numbers[query, 0]), float(best.scores[query, 0])
        text = {"text": strings[number][:SHORT]} if strings else {}
        nearest[name[:SHORT]] = {best.nearness: score, "number": number} | text
    return facts | {"nearest": nearest}
