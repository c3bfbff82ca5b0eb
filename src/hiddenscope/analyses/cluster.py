"""Which texts belong together?"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import NotFinite, StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Readable
from hiddenscope.vectors.sentences import LEAST_LEFT, POOLED
from hiddenscope.vectors.shelf import Shelf, shelf_of

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[Any]
Labels: TypeAlias = NDArray[np.int64]

MOST = 10_000  # rows; what HDBSCAN costs grows with their square
WIDE, EACH = 15, 10  # directions that are kept, one for so many rows: in more, all distances are alike
AGAIN, KEPT = 8, 0.8  # how often the clusters are made again, from which share of the rows
TYPICAL, SHORT = 3, 100  # texts that are named for a cluster, and how much of each
SEED = 0


def cluster(
    source: Model | Readable | Pair | Array | Tensor,
    texts: Any = None,
    *,
    site: str | Site | None = None,
    pool: str | int | None = None,
    smallest: int = 5,
    truncate: bool = False,
) -> Result:
    """The clusters of texts by HDBSCAN, with the texts most typical of each; what belongs to none is noise.

    `source` is a model with texts, states, or an array `[text, width]`. The vectors are centred, brought to length one
    and taken along their widest directions: one for every ten texts, at least 2 and at most 15. A cluster has at least
    `smallest` texts. Its stability is how much of it comes back, on average, when a fifth of the texts is left out. Of
    more than 10,000 rows, as many drawn at random are clustered, and the facts say so.

    >>> import hiddenscope as hs
    >>> points = np.repeat([[1.0, 0, 0], [0, 1.0, 0]], 20, axis=0) + np.random.default_rng(0).normal(0, 0.01, (40, 3))
    >>> hs.cluster(points).data["size"].values.tolist()
    [20, 20]
    """
    least = _whole_number(smallest)
    shelf = shelf_of(source, texts, site, POOLED if pool is None else pool, truncate)
    numbers = _drawn(shelf.count)
    if len(numbers) < 2 * least:
        reason = f"there are {len(numbers)}, and two clusters of {least} take {2 * least}"
        raise TextError(f"Clusters of {shelf.unit}s", reason, "Give more, or a smaller number as smallest=.")
    directions, places = _spread(shelf.pick(numbers), shelf.unit)
    labels, strengths = _clustered(places, least)
    groups = _groups(directions, places, labels, least)
    return Result(
        "cluster",
        _data(shelf, numbers, places, (labels, strengths), groups),
        _facts(shelf, numbers, labels, groups, least),
        shelf.source,
    )


@dataclass(frozen=True)
class _Group:
    """One cluster: its rows, the most typical first, and how well it keeps together."""

    rows: Labels
    stability: float


def _whole_number(smallest: Any) -> int:
    try:
        least = operator.index(smallest)
    except TypeError:
        least = 0
    if least < 2 or isinstance(smallest, bool):
        reason = "a cluster has two texts at least"
        raise StatesError(f"Clusters of {str(smallest)[:40]}", reason, "Give a whole number from 2 up.")
    return least


def _drawn(count: int) -> Labels:
    """All rows, or as many of them as are clustered, drawn at random and in order."""
    if count <= MOST:
        return np.arange(count)
    return np.sort(np.random.default_rng(SEED).choice(count, MOST, replace=False))


def _spread(values: Tensor, unit: str) -> tuple[Array, Array]:
    """Each row's direction from the mean, and its place along the widest of these directions."""
    wide = values.double()
    wrong = (~wide.isfinite().all(1)).nonzero()
    if len(wrong):
        raise NotFinite("Clusters", f"row {int(wrong[0])} holds a NaN or an infinity", "Leave it out.")
    centred = wide - wide.mean(0)
    lengths = centred.norm(dim=1, keepdim=True)
    scale = float(wide.norm(dim=1).max())
    if float(lengths.max()) <= LEAST_LEFT * scale:
        reason = f"the vectors of all {len(values):,} {unit}s are the same"
        raise StatesError("Clusters", reason, "Give others, or ask for another site or token.")
    directions = torch.where(lengths > LEAST_LEFT * scale, centred / lengths.clamp_min(LEAST_LEFT * scale), 0)
    again = directions - directions.mean(0)
    _, axes = torch.linalg.eigh(again.T @ again)
    axes = axes.flip(1)[:, : min(WIDE, max(2, len(values) // EACH))]
    signs = axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # or the picture could come out mirrored
    return directions.numpy(), (again @ (axes * signs)).numpy()


def _clustered(places: Array, least: int) -> tuple[Labels, Array]:
    """The cluster of each row, -1 for none, the largest first; and how firmly each row belongs to its own."""
    from sklearn.cluster import HDBSCAN

    if len(places) < 2 * least:
        return np.full(len(places), -1), np.zeros(len(places))
    fitted = HDBSCAN(min_cluster_size=least, copy=True).fit(places)
    found: Labels = fitted.labels_.astype(np.int64)
    sizes = np.bincount(found[found >= 0], minlength=found.max() + 1)
    first = np.array([np.argmax(found == label) for label in range(len(sizes))], dtype=np.int64)
    order = np.lexsort((first, -sizes))
    renamed = np.empty(len(order) + 1, dtype=np.int64)
    renamed[order], renamed[-1] = np.arange(len(order)), -1
    return renamed[found], fitted.probabilities_


def _groups(directions: Array, places: Array, labels: Labels, least: int) -> list[_Group]:
    """The clusters, each with its rows in the order of their cosine with all of its others."""
    stability = _stability(places, labels, least)
    groups = []
    for label, steady in enumerate(stability):
        rows = np.flatnonzero(labels == label)
        near = directions[rows] @ directions[rows].sum(0)
        groups.append(_Group(rows[np.lexsort((rows, -near.round(12)))], steady))
    return groups


def _stability(places: Array, labels: Labels, least: int) -> list[float]:
    """How much of each cluster comes back from a part of the rows: the overlap with the most alike, on average."""
    clusters = range(int(labels.max()) + 1)
    generator = np.random.default_rng(SEED)
    fewer = max(2, round(KEPT * least))
    overlaps: list[list[float]] = []
    with progress.track("Clustering again", total=AGAIN) as advance:
        for _ in range(AGAIN if len(clusters) else 0):
            rows = np.sort(generator.choice(len(labels), round(KEPT * len(labels)), replace=False))
            again, _strength = _clustered(places[rows], fewer)
            overlaps.append([max(_overlaps(labels[rows] == one, again), default=0.0) for one in clusters])
            advance(1)
    return np.mean(overlaps, axis=0).tolist() if overlaps else []


def _overlaps(own: NDArray[np.bool_], again: Labels) -> Iterator[float]:
    """The Jaccard index of a cluster with each of others."""
    for label in np.unique(again[own & (again >= 0)]):
        other = again == label
        yield float((own & other).sum() / (own | other).sum())


def _data(
    shelf: Shelf, numbers: Labels, places: Array, found: tuple[Labels, Array], groups: Sequence[_Group]
) -> "xarray.Dataset":
    import xarray

    unit = shelf.unit
    padded = np.pad(places, ((0, 0), (0, max(0, 2 - places.shape[1]))))[:, :2]
    columns: dict[str, Any] = {
        "cluster_of": (unit, found[0], {"long_name": "cluster, -1 for none"}),
        "strength": (unit, found[1].astype(np.float32), {"long_name": "how firmly it belongs to its cluster"}),
        "place": ((unit, "axis"), padded.astype(np.float32), {"long_name": "place along the two widest directions"}),
        "size": ("cluster", np.array([len(group.rows) for group in groups], dtype=np.int64), {"long_name": "size"}),
        "stability": (
            "cluster",
            np.array([group.stability for group in groups], dtype=np.float32),
            {"long_name": "how much of it comes back without a fifth of the rows"},
        ),
        "typical": (
            ("cluster", "rank"),
            _typical(numbers, groups),
            {"long_name": f"the {unit}s most like the others of the cluster, -1 where it has no more"},
        ),
    }
    coords: dict[str, Any] = {unit: numbers, "axis": ["first", "second"], "cluster": np.arange(len(groups))}
    if shelf.strings is not None:
        strings = np.empty(len(numbers), dtype=object)
        strings[:] = [shelf.strings[number] for number in numbers]
        coords["string"] = (unit, strings)
    return xarray.Dataset(columns, coords)


def _typical(numbers: Labels, groups: Sequence[_Group]) -> Labels:
    """The most typical rows of each cluster, of which some have fewer than others."""
    found = np.full((len(groups), TYPICAL), -1, dtype=np.int64)
    for place, group in enumerate(groups):
        some = numbers[group.rows[:TYPICAL]]
        found[place, : len(some)] = some
    return found


def _facts(shelf: Shelf, numbers: Labels, labels: Labels, groups: Sequence[_Group], least: int) -> dict[str, Any]:
    facts: dict[str, Any] = {f"{shelf.unit}s": len(numbers)}
    if len(numbers) < shelf.count:
        facts["drawn at random"] = f"{len(numbers):,} of {shelf.count:,}; the others are in no cluster here"
    if shelf.site is not None:
        facts |= {"site": shelf.site, "token": shelf.token}
    facts |= {"clusters": len(groups), "noise": int((labels < 0).sum()), "smallest": least}
    for number, group in enumerate(groups[:20]):
        said: dict[str, Any] = {"size": len(group.rows), "stability": group.stability}
        if shelf.strings is not None:
            said["typical"] = [shelf.strings[numbers[row]][:SHORT] for row in group.rows[:TYPICAL]]
        facts[f"cluster {number}"] = said
    return facts
