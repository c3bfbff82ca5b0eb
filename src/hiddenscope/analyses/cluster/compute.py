"""Clusters of vectors by HDBSCAN, and how stable they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.cluster.story import ClusterRecord, ClusterReport
from hiddenscope.errors import NotFinite, StatesError, TextError
from hiddenscope.measures.neighbours import told_apart
from hiddenscope.measures.principal import principal_coordinates
from hiddenscope.model import ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Coordinates,
    Variables,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.states.arrays import AnyArray, Ints
from hiddenscope.texts import copy_key, number_groups
from hiddenscope.vectors import EachToken
from hiddenscope.vectors.collection import Collection, collection_of

if TYPE_CHECKING:
    import xarray

# The cost of HDBSCAN grows with the square of the rows.
MAX_ROWS = 10_000
# One principal direction for so many rows: in more directions, all distances are alike.
MAX_DIRECTIONS = 15
ROWS_EACH = 10
# How often clustering is repeated, and on which share of the rows.
ROUNDS = 8
RESAMPLED = 0.8
# Texts of a cluster, their characters, and clusters that the facts list.
TYPICAL = 3
SHORT = 100
LISTED = 20
# If less than this share of the largest norm is left without the mean, it is rounding,
# and has no direction.
ROUNDING = 1e-6
SEED = 0


def find_clusters(
    source: ModelLike | Readable | Pair | EachToken | AnyArray | Tensor,
    texts: Texts | Inputs | Any,
    site: str | Site | None,
    pool: Pooling | None,
    smallest: int,
    truncate: bool,
) -> Result:
    """Return the clusters, their most typical rows, and their stability."""
    source = as_source(source)
    collection = collection_of(source, texts, site, pool, truncate)
    rows = np.arange(collection.count)
    if len(rows) > MAX_ROWS:
        generator = np.random.default_rng(SEED)
        rows = np.sort(generator.choice(len(rows), MAX_ROWS, replace=False))
    if len(rows) < 2 * smallest:
        reason = (
            f"there are {len(rows)} {collection.unit}s, and two clusters of {smallest}"
            f" need {2 * smallest}"
        )
        remedy = "Give more, or a smaller number as smallest=."
        raise TextError(f"Too few {collection.unit}s to cluster", reason, remedy)
    values = collection.pick(rows).double()
    wrong = (~values.isfinite().all(1)).nonzero()
    if len(wrong):
        raise NotFinite(
            "Cannot cluster",
            f"row {int(wrong[0])} has a NaN or an infinity",
            "Leave it out.",
        )
    directions = _directions(values)
    if not directions.any():
        reason = f"the vectors of all {len(values):,} {collection.unit}s are the same"
        raise StatesError(
            "Cannot cluster", reason, "Give others, or choose another site or pool."
        )
    places = _places(directions)
    labels, strengths = _run_hdbscan(places, smallest)
    units = row_units(collection, rows, getattr(texts, "groups", None))
    stabilities = _stability(values, labels, smallest, units)
    typical = np.full((len(stabilities), TYPICAL), -1, dtype=np.int64)
    listed = []
    points = directions.numpy()
    for label, stability in enumerate(stabilities):
        members = np.flatnonzero(labels == label)
        # A row is typical if its summed cosine with the others is large. Rounded, so
        # that rows that differ by rounding alone stay in their order.
        cosines = points[members] @ points[members].sum(0)
        order = np.lexsort((members, -cosines.round(12)))
        first = rows[members[order[:TYPICAL]]]
        typical[label, : len(first)] = first
        strings = None
        if collection.strings is not None:
            strings = [collection.strings[row][:SHORT] for row in first]
        listed.append(
            ClusterRecord(
                cluster=label, size=len(members), stability=stability, typical=strings
            )
        )
    report = ClusterReport(
        unit=collection.unit,
        rows=collection.count,
        clustered=len(rows),
        **collection.place,
        smallest=smallest,
        cluster_count=len(listed),
        noise=int((labels < 0).sum()),
        clusters=listed[:LISTED],
        told_apart=told_apart(directions),
        pooled=collection.pooled(values, rows),
    )
    outcome = labels, strengths, stabilities, typical
    data = _labelled(collection, rows, places, outcome)
    return Result("cluster", data, report, collection.source)


def _labelled(
    collection: Collection,
    rows: Ints,
    places: AnyArray,
    outcome: tuple[Ints, AnyArray, list[float], Ints],
) -> "xarray.Dataset":
    """Return the cluster of every row, and what is known of every cluster."""
    labels, strengths, stabilities, typical = outcome
    sizes = np.bincount(labels[labels >= 0], minlength=len(stabilities))
    unit = collection.unit
    missing = max(0, 2 - places.shape[1])
    plane = np.pad(places, ((0, 0), (0, missing)))[:, :2]
    variables: Variables = {
        "cluster_of": (unit, labels, "cluster, -1 for none"),
        "strength": (
            unit,
            strengths.astype(np.float32),
            "how firmly it belongs to its cluster",
        ),
        "place": (
            (unit, "axis"),
            plane.astype(np.float32),
            "coordinates along two principal directions",
        ),
        "size": ("cluster", sizes, "size"),
        "stability": (
            "cluster",
            np.array(stabilities, dtype=np.float32),
            "how much of it comes back without a fifth of the rows",
        ),
        "typical": (
            ("cluster", "rank"),
            typical,
            f"the {unit}s most like the others of the cluster, -1 where it has no more",
        ),
    }
    coords: Coordinates = {
        unit: rows,
        "axis": ["first", "second"],
        "cluster": np.arange(len(stabilities)),
    }
    if collection.strings is not None:
        row_strings = [collection.strings[row] for row in rows]
        coords["string"] = unit, text_array(row_strings)
    return to_dataset(variables, coords)


def _directions(values: Tensor) -> Tensor:
    """Return the direction of each row from the mean, with norm 1.

    It is zero for a row that is the mean itself.
    """
    centred = values - values.mean(0)
    norms = centred.norm(dim=1, keepdim=True)
    rounding = ROUNDING * float(values.norm(dim=1).max())
    threshold = max(rounding, torch.finfo(values.dtype).tiny)
    return torch.where(norms > threshold, centred / norms.clamp_min(threshold), 0)


def _places(directions: Tensor) -> AnyArray:
    """Return the coordinates of each row along the principal directions."""
    count = min(MAX_DIRECTIONS, max(2, len(directions) // ROWS_EACH))
    centred = directions - directions.mean(0)
    return principal_coordinates(centred.numpy(), count)


def _run_hdbscan(places: AnyArray, smallest: int) -> tuple[Ints, AnyArray]:
    """Return the cluster of each row, and how firmly the row belongs to it.

    Clusters are numbered by size, the largest first; -1 is none.
    """
    from sklearn.cluster import HDBSCAN

    if len(places) < 2 * smallest:
        return np.full(len(places), -1), np.zeros(len(places))
    fitted = HDBSCAN(min_cluster_size=smallest, copy=True).fit(places)
    labels = fitted.labels_.astype(np.int64)
    sizes = np.bincount(labels[labels >= 0], minlength=labels.max() + 1)
    # Clusters of one size are ordered by their first row.
    first_rows = np.zeros(len(sizes), dtype=np.int64)
    for label in range(len(sizes)):
        first_rows[label] = np.argmax(labels == label)
    order = np.lexsort((first_rows, -sizes))
    # The last entry is that of the label -1.
    renamed = np.full(len(order) + 1, -1)
    renamed[order] = np.arange(len(order))
    return renamed[labels], fitted.probabilities_


def row_units(collection: Collection, rows: Ints, groups: Sequence[Any] | None) -> Ints:
    """Number what is left out together: tokens of a text, its copies, and its group."""
    if collection.tokens is not None:
        return number_groups(collection.tokens.text[rows].tolist())
    keys = rows.tolist()
    if collection.strings is not None:
        keys = [copy_key(collection.strings[row]) for row in rows]
    if groups is None:
        return number_groups(keys)
    return number_groups(keys, [groups[row] for row in rows])


def _stability(values: Tensor, labels: Ints, smallest: int, units: Ints) -> list[float]:
    """Return how much of each cluster comes back from a part of the rows.

    It is the best Jaccard index with a new cluster, averaged over rounds (Hennig 2007).
    Every round starts again from the vectors. Axes that were fitted with the rows that
    are left out would bring them back: clusters of noise would then seem twice as
    stable as they are.
    """
    cluster_count = int(labels.max()) + 1
    if not cluster_count:
        return []
    generator = np.random.default_rng(SEED)
    unit_count = int(units.max()) + 1
    drawn_count = max(1, round(RESAMPLED * unit_count))
    overlaps = np.zeros((ROUNDS, cluster_count))
    with progress.track("Clustering again", total=ROUNDS) as advance:
        for number in range(ROUNDS):
            drawn = generator.choice(unit_count, drawn_count, replace=False)
            rows = np.flatnonzero(np.isin(units, drawn))
            directions = _directions(values[torch.from_numpy(rows)])
            # A cluster has fewer rows here, so that fewer must suffice.
            again, _ = _run_hdbscan(
                _places(directions), max(2, round(RESAMPLED * smallest))
            )
            for label in range(cluster_count):
                members = labels[rows] == label
                # The largest Jaccard index with any of the new clusters.
                for new_label in np.unique(again[members & (again >= 0)]):
                    other = again == new_label
                    jaccard = (members & other).sum() / (members | other).sum()
                    overlaps[number, label] = max(overlaps[number, label], jaccard)
            advance(1)
    means: list[float] = overlaps.mean(0).tolist()
    return means
