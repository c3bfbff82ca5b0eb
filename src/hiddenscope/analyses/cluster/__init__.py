"""Which texts belong together?"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from hiddenscope.interface import POOL, SITE, TEXTS, TRUNCATE, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Inputs,
        Pooling,
        Result,
        Searchable,
        Site,
        Texts,
    )

TEXTS_OR_VECTORS = replace(
    TEXTS,
    help="The texts; @FILE reads texts, states (.safetensors) or vectors (.npy), -"
    " reads lines of stdin.",
    vectors=True,
)


@analysis(
    states=True,
    details="Prints every cluster with its most typical texts; --out clusters.html"
    " keeps the picture, .csv the numbers. States (--states) and vectors (@FILE.npy)"
    " need no model.",
    promise="You will see which texts lie together, the texts most typical of each"
    " cluster, and how stable each is.",
)
def cluster(
    source: "Searchable",
    texts: Annotated["Texts | Inputs | Any", TEXTS_OR_VECTORS] = None,
    *,
    site: Annotated["str | Site | None", SITE] = None,
    pool: Annotated["Pooling | None", POOL] = None,
    smallest: Annotated[
        int, ask("The least texts that make a cluster.", least=2, aside=True)
    ] = 5,
    truncate: Annotated[bool, TRUNCATE] = False,
) -> "Result":
    """Cluster texts by HDBSCAN, and name the most typical texts of each cluster.

    Texts in no cluster are noise. `source` is a model with texts, states, or an array
    `[text, width]`. The vectors are centred, scaled to norm 1 and projected on their
    principal directions: one for every ten texts, at least 2 and at most 15. A cluster
    has at least `smallest` texts. Its stability is how much of it comes back, on
    average, when a fifth of the texts is left out and all of this is done again; copies
    of a text, its tokens, and texts of a group (`hs.read(..., group=)`) are left out
    together. Of more than 10,000 rows, a random sample of as many is clustered, and the
    facts say so.

    >>> import numpy as np
    >>> import hiddenscope as hs
    >>> centres = np.repeat([[1.0, 0, 0], [0, 1.0, 0]], 20, axis=0)
    >>> points = centres + np.random.default_rng(0).normal(0, 0.01, (40, 3))
    >>> hs.cluster(points).data["size"].values.tolist()
    [20, 20]
    """
    from hiddenscope.analyses.cluster.compute import find_clusters

    return find_clusters(source, texts, site, pool, smallest, truncate)
