"""Which texts are nearest to this one?"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from hiddenscope.interface import POOL, SITE, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Inputs,
        Model,
        Pooling,
        Query,
        Result,
        Searchable,
        Site,
        Texts,
    )

ONLY_FILES = "`hiddenscope search` searches a file."


@analysis(
    details="Prints them, the nearest first; --out found.html keeps the picture, .csv"
    " the numbers. Queries are read by the model that states were made with, if no"
    " other way to load the same model is given.",
)
def search(
    source: "Searchable",
    query: Annotated[
        "Query | tuple[Model, Texts | Inputs]",
        ask(kind="texts", of_model=True, form_help="", python_only=ONLY_FILES),
    ],
    k: Annotated[
        int, ask("How many of the nearest.", spelling=("-k",), label="How many")
    ] = 10,
    *,
    texts: Annotated[
        "Texts | Inputs | Any", ask(kind="texts", python_only=ONLY_FILES)
    ] = None,
    site: Annotated["str | Site | None", SITE] = None,
    pool: Annotated["Pooling | None", POOL] = None,
    nearness: Annotated[
        Literal["cosine", "dot", "l2"], ask("How near two vectors are.")
    ] = "cosine",
) -> "Result":
    """Find the k texts nearest to a query.

    The search is exact: no text is left out, and of equals the first comes first.
    `source` is a model with `texts`, states of any size, or an array `[text, width]`;
    with `hs.each_token(source)` every token is a row. `query` is a text, several, or
    vectors. The model that is searched reads texts; with states or an array, give
    `(model, texts)`. Both sides are taken at `site`, by default the last there is, and
    pooled. Texts that are longer than the model's window go through
    `model.encode(texts, truncate=True)` first.

    >>> import numpy as np
    >>> import hiddenscope as hs
    >>> data = hs.search(np.eye(3), [0.0, 2.0, 1.0], k=2).data
    >>> data["number"].values.tolist(), data["score"].values.round(2).tolist()
    ([[1, 2]], [[0.89, 0.45]])
    """
    from hiddenscope.analyses.search.compute import find_nearest

    return find_nearest(source, query, k, texts, site, pool, nearness)
