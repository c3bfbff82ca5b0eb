"""Which texts belong together?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import NotFinite, StatesError, TextError
from hiddenscope.measures.grouped import joined, numbered
from hiddenscope.model import ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.texts import copy_key
from hiddenscope.vectors import EachToken
from hiddenscope.vectors.collection import Collection, collection_of

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[Any]
Ints: TypeAlias = NDArray[np.int64]

MOST = 10_000  # rows; the cost of HDBSCAN grows with their square
# Principal directions, one for so many rows: in more, all distances are alike.
MOST_DIRECTIONS, ROWS_EACH = (
    15,
    10,
)
ROUNDS, KEPT = 8, 0.8  # how often clustering is repeated, on which share of the rows
# Texts of a cluster, their characters, and clusters that the facts list.
TYPICAL, SHORT, LISTED = (
    3,
    100,
    20,
)
# A vector of which this share of the largest norm is left was the mean: its direction
# is rounding.
LEAST_LEFT = 1e-6
SEED = 0


@checked
def cluster(
    source: ModelLike | Readable | Pair | EachToken | Array | Tensor,
    texts: Texts | Inputs | Any = None,
    *,
    site: str | Site | None = None,
    pool: Pooling | None = None,
    smallest: int = 5,
    truncate: bool = False,
) -> Result:
    """The clusters of texts by HDBSCAN, with the texts most typical of each; texts in
    no cluster are noise.

    `source` is a model with texts, states, or an array `[text, width]`. The vectors are
    centred, scaled to norm 1 and projected on their principal directions: one for every
    ten texts, at least 2 and at most 15. A cluster has at least `smallest` texts. Its
    stability is how much of it comes back, on average, when a fifth of the texts is
    left out and all of this is done again; copies of a text, its tokens, and texts of a
    group (`hs.read(..., group=)`) are left out together. Of more than 10,000 rows, a
    random sample of as many is clustered, and the facts say so.

    >>> import hiddenscope as hs
    >>> points = np.repeat([[1.0, 0, 0], [0, 1.0, 0]], 20, axis=0) + np.random.default_rng(0).normal(0, 0.01, (40, 3))
    >>> hs.cluster(points).data["size"].values.tolist()
    [20, 20]
    """
    source = as_source(source)
    smallest = integer(smallest, "smallest", 2)
    collection = collection_of(source, texts, site, pool, truncate)
    rows = _sample(collection.count)
    if len(rows) < 2 * smallest:
        reason = (
            f"there are {len(rows)} {collection.unit}s, and two clusters of {smallest}"
            f" need {2 * smallest}"
        )
        remedy = "Give more, or a smaller number as smallest=."
        raise TextError(f"Too few {collection.unit}s to cluster", reason, remedy)
    values = _checked(collection.pick(rows), collection.unit)
    directions = _directions(values)
    places = _places(directions)
    labels, strengths = _clustered(places, smallest)
    units = _units(collection, rows, getattr(texts, "groups", None))
    groups = _groups(directions, labels, _stability(values, labels, smallest, units))
    return Result(
        "cluster",
        _data(collection, rows, places, (labels, strengths), groups),
        _facts(collection, rows, labels, groups, smallest),
        collection.source,
    )


@dataclass(frozen=True)
class _Group:
    """One cluster: its rows, the most typical first, and its stability."""

    rows: Ints
    stability: float


def _sample(count: int) -> Ints:
    """All rows, or a random sample of them in order."""
    if count <= MOST:
        return np.arange(count)
    return np.sort(np.random.default_rng(SEED).choice(count, MOST, replace=False))


def _checked(values: Tensor, unit: str) -> Tensor:
    """The vectors in float64, all finite and not all the same."""
    wide = values.double()
    wrong = (~wide.isfinite().all(1)).nonzero()
    if len(wrong):
        raise NotFinite(
            "Cannot cluster",
            f"row {int(wrong[0])} has a NaN or an infinity",
            "Leave it out.",
        )
    if not bool(_directions(wide).any()):
        reason = f"the vectors of all {len(values):,} {unit}s are the same"
        raise StatesError(
            "Cannot cluster", reason, "Give others, or choose another site or pool."
        )
    return wide


def _directions(values: Tensor) -> Tensor:
    """The direction of each row from the mean, with norm 1; zero for a row that is the
    mean itself.
    """
    centred = values - values.mean(0)
    norms = centred.norm(dim=1, keepdim=True)
    least = max(
        LEAST_LEFT * float(values.norm(dim=1).max()), torch.finfo(values.dtype).tiny
    )
    return torch.where(norms > least, centred / norms.clamp_min(least), 0)


def _places(directions: Tensor) -> Array:
    """The coordinates of each row along the principal directions."""
    centred = (directions - directions.mean(0)).numpy()
    rows, width = centred.shape
    kept = min(MOST_DIRECTIONS, max(2, rows // ROWS_EACH), width)
    if rows < width:  # of the two products the smaller one, which has the same spectrum
        values, vectors = _largest(centred @ centred.T, kept)
        places = vectors * np.sqrt(np.maximum(values, 0))
        axes = centred.T @ vectors
    else:
        axes = _largest(centred.T @ centred, kept)[1]
        places = centred @ axes
    # Or the picture could be mirrored.
    signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], 0))
    placed: Array = places * signs
    return placed


def _largest(square: Array, count: int) -> tuple[Array, Array]:
    """The largest eigenvalues of a symmetric matrix and their vectors: half the time of
    all of them.
    """
    from scipy.linalg import eigh

    values, vectors = eigh(
        square, subset_by_index=[len(square) - count, len(square) - 1]
    )
    return values[::-1], vectors[:, ::-1]


def _clustered(places: Array, smallest: int) -> tuple[Ints, Array]:
    """The cluster of each row, -1 for none, the largest first; and how firmly each row
    belongs to its cluster.
    """
    from sklearn.cluster import HDBSCAN

    if len(places) < 2 * smallest:
        return np.full(len(places), -1), np.zeros(len(places))
    fitted = HDBSCAN(min_cluster_size=smallest, copy=True).fit(places)
    labels: Ints = fitted.labels_.astype(np.int64)
    sizes = np.bincount(labels[labels >= 0], minlength=labels.max() + 1)
    first = np.array(
        [np.argmax(labels == label) for label in range(len(sizes))], dtype=np.int64
    )
    order = np.lexsort((first, -sizes))
    renamed = np.empty(len(order) + 1, dtype=np.int64)
    renamed[order], renamed[-1] = np.arange(len(order)), -1
    return renamed[labels], fitted.probabilities_


def _groups(
    directions: Tensor, labels: Ints, stabilities: Sequence[float]
) -> list[_Group]:
    """The clusters, each with its rows in descending order of their summed cosine with
    the others of the cluster.
    """
    groups, unit = [], directions.numpy()
    for label, stability in enumerate(stabilities):
        rows = np.flatnonzero(labels == label)
        cosines = unit[rows] @ unit[rows].sum(0)
        groups.append(_Group(rows[np.lexsort((rows, -cosines.round(12)))], stability))
    return groups


def _units(collection: Collection, rows: Ints, groups: Sequence[Any] | None) -> Ints:
    """Number what is left out together: the tokens of a text, copies of it, and texts
    that belong together.
    """
    if collection.tokens is not None:
        return numbered(collection.tokens.text[rows].tolist())
    keys = (
        rows.tolist()
        if collection.strings is None
        else [copy_key(collection.strings[row]) for row in rows]
    )
    return joined(keys, None if groups is None else [groups[row] for row in rows])


def _stability(values: Tensor, labels: Ints, smallest: int, units: Ints) -> list[float]:
    """How much of each cluster comes back from a part of the rows: its best Jaccard
    index, averaged over rounds.

    In every round all is done again from the vectors on. Axes that were fitted with the
    rows that are left out would bring them back: clusters of noise then seem twice as
    stable as they are.
    """
    clusters = range(int(labels.max()) + 1)
    generator = np.random.default_rng(SEED)
    fewer = max(2, round(KEPT * smallest))
    overlaps: list[list[float]] = []
    with progress.track("Clustering again", total=ROUNDS) as advance:
        for _ in range(ROUNDS if len(clusters) else 0):
            count = int(units.max()) + 1
            drawn = generator.choice(count, max(1, round(KEPT * count)), replace=False)
            rows = np.flatnonzero(np.isin(units, drawn))
            directions = _directions(values[torch.from_numpy(rows)])
            again, _strengths = _clustered(_places(directions), fewer)
            overlaps.append(
                [
                    max(_overlaps(labels[rows] == label, again), default=0.0)
                    for label in clusters
                ]
            )
            advance(1)
    return np.mean(overlaps, axis=0).tolist() if overlaps else []


def _overlaps(members: NDArray[np.bool_], again: Ints) -> Iterator[float]:
    """The Jaccard index of a cluster with each of the others that share a row with it."""
    for label in np.unique(again[members & (again >= 0)]):
        other = again == label
        yield float((members & other).sum() / (members | other).sum())


def _data(
    collection: Collection,
    rows: Ints,
    places: Array,
    clustered: tuple[Ints, Array],
    groups: Sequence[_Group],
) -> "xarray.Dataset":
    import xarray

    unit = collection.unit
    plane = np.pad(places, ((0, 0), (0, max(0, 2 - places.shape[1]))))[:, :2]
    columns: dict[str, Any] = {
        "cluster_of": (unit, clustered[0], {"long_name": "cluster, -1 for none"}),
        "strength": (
            unit,
            clustered[1].astype(np.float32),
            {"long_name": "how firmly it belongs to its cluster"},
        ),
        "place": (
            (unit, "axis"),
            plane.astype(np.float32),
            {"long_name": "coordinates along two principal directions"},
        ),
        "size": (
            "cluster",
            np.array([len(group.rows) for group in groups], dtype=np.int64),
            {"long_name": "size"},
        ),
        "stability": (
            "cluster",
            np.array([group.stability for group in groups], dtype=np.float32),
            {"long_name": "how much of it comes back without a fifth of the rows"},
        ),
        "typical": (
            ("cluster", "rank"),
            _typical(rows, groups),
            {
                "long_name": (
                    f"the {unit}s most like the others of the cluster, -1 where it has"
                    " no more"
                )
            },
        ),
    }
    coords: dict[str, Any] = {
        unit: rows,
        "axis": ["first", "second"],
        "cluster": np.arange(len(groups)),
    }
    if collection.strings is not None:
        strings = np.empty(len(rows), dtype=object)
        strings[:] = [collection.strings[row] for row in rows]
        coords["string"] = (unit, strings)
    return xarray.Dataset(columns, coords)


def _typical(rows: Ints, groups: Sequence[_Group]) -> Ints:
    """The most typical rows of each cluster, -1 where it has fewer."""
    typical = np.full((len(groups), TYPICAL), -1, dtype=np.int64)
    for number, group in enumerate(groups):
        first = rows[group.rows[:TYPICAL]]
        typical[number, : len(first)] = first
    return typical


def _facts(
    collection: Collection,
    rows: Ints,
    labels: Ints,
    groups: Sequence[_Group],
    smallest: int,
) -> Facts:
    facts: dict[str, Any] = {
        "unit": collection.unit,
        "rows": collection.count,
        "clustered": len(rows),
    }
    if collection.site is not None:
        facts |= {"site": collection.site, "token": collection.token}
    facts |= {
        "smallest": smallest,
        "cluster_count": len(groups),
        "noise": int((labels < 0).sum()),
    }
    clusters = []
    for number, group in enumerate(groups[:LISTED]):
        record: dict[str, Any] = {
            "cluster": number,
            "size": len(group.rows),
            "stability": group.stability,
        }
        if collection.strings is not None:
            record["typical"] = [
                collection.strings[rows[row]][:SHORT] for row in group.rows[:TYPICAL]
            ]
        clusters.append(record)
    return facts | {"clusters": clusters}
