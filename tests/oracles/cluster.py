"""What `hs.cluster` should say: scikit-learn's PCA and HDBSCAN, and loops.

Which rows are left out in each round is drawn as the seed says.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.cluster import HDBSCAN

import hiddenscope as hs
from tests.oracles import naive
from tests.oracles.search import rows_of, told_apart

MOST_DIRECTIONS, ROWS_EACH, ROUNDS, RESAMPLED, TYPICAL = 15, 10, 8, 0.8, 3


def cluster(
    source: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected clusters, with their stability and typical rows."""
    rows, tokens = rows_of(source, asked, result)
    smallest = asked.get("smallest", 5)
    points = directions(rows)
    places = coordinates(points)
    labels, strength = hdbscan(places, smallest)
    count = labels.max() + 1
    units = np.arange(len(rows))
    if tokens is not None:
        units = tokens.text
    elif asked.get("texts") is not None:
        texts = naive.strings(asked["texts"])
        units = _by_first(naive.groups_of(texts, getattr(texts, "groups", None)))
    typical = np.full((count, TYPICAL), -1)
    for label in range(count):
        members = np.flatnonzero(labels == label)
        alike = {}
        for row in members:
            cosines = [float(points[row] @ points[other]) for other in members]
            alike[row] = round(sum(cosines), 12)
        first = sorted(members, key=lambda row: (-alike[row], row))[:TYPICAL]
        typical[label, : len(first)] = first
    stability = stabilities(rows, labels, smallest, units)
    plane = np.zeros((len(rows), 2))
    plane[:, : places.shape[1]] = places[:, :2]
    expected = {
        "cluster_of": labels,
        "strength": strength,
        "place": plane,
        "size": np.array([(labels == label).sum() for label in range(count)]),
        "stability": stability,
        "typical": typical,
        "facts.rows": len(rows),
        "facts.clustered": len(rows),
        "facts.smallest": smallest,
        "facts.cluster_count": count,
        "facts.noise": (labels < 0).sum(),
    }
    if len(rows) >= 10:
        expected["facts.told_apart"] = told_apart(points)
    for label in range(min(20, count)):
        expected[f"facts.clusters.{label}.size"] = expected["size"][label]
        expected[f"facts.clusters.{label}.stability"] = stability[label]
    return {name: np.asarray(value) for name, value in expected.items()}


def _by_first(groups: np.ndarray) -> np.ndarray:
    """Number groups in the order of their first row."""
    order = list(dict.fromkeys(groups.tolist()))
    return np.array([order.index(group) for group in groups])


def directions(rows: np.ndarray) -> np.ndarray:
    """Return where each row lies from the mean, with norm 1; 0 for the mean itself."""
    mean = rows.mean(0)
    rounding = 1e-6 * max(np.linalg.norm(row) for row in rows)
    units = []
    for row in rows:
        length = np.linalg.norm(row - mean)
        units.append(
            (row - mean) / length if length > rounding else np.zeros_like(mean)
        )
    return np.array(units)


def coordinates(points: np.ndarray) -> np.ndarray:
    """Return coordinates along the first principal components."""
    count = min(MOST_DIRECTIONS, max(2, len(points) // ROWS_EACH), *points.shape)
    left, strength, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    columns = []
    for k in range(count):
        column = left[:, k] * strength[k]
        columns.append(column * np.sign(column[np.abs(column).argmax()]))
    return np.stack(columns, 1)


def hdbscan(places: np.ndarray, smallest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cluster of each row, the largest first, and how firmly it belongs."""
    if len(places) < 2 * smallest:
        return np.full(len(places), -1), np.zeros(len(places))
    fitted = HDBSCAN(min_cluster_size=smallest, copy=True).fit(places)
    found = [label for label in set(fitted.labels_.tolist()) if label >= 0]
    first = {label: int(np.argmax(fitted.labels_ == label)) for label in found}
    found.sort(key=lambda label: (-(fitted.labels_ == label).sum(), first[label]))
    labels = [found.index(label) if label >= 0 else -1 for label in fitted.labels_]
    return np.array(labels), fitted.probabilities_


def stabilities(
    rows: np.ndarray, labels: np.ndarray, smallest: int, units: np.ndarray
) -> list[float]:
    """Return how much of each cluster comes back without a fifth of the rows."""
    generator = np.random.default_rng(0)
    count = len(set(units.tolist()))
    means = np.zeros((ROUNDS, labels.max() + 1))
    for number in range(ROUNDS):
        drawn = generator.choice(count, max(1, round(RESAMPLED * count)), replace=False)
        left = [row for row in range(len(rows)) if units[row] in drawn]
        places = coordinates(directions(rows[left]))
        again, _ = hdbscan(places, max(2, round(RESAMPLED * smallest)))
        for label in range(labels.max() + 1):
            mine = {k for k, row in enumerate(left) if labels[row] == label}
            for other in set(again.tolist()) - {-1}:
                theirs = set(np.flatnonzero(again == other).tolist())
                jaccard = len(mine & theirs) / len(mine | theirs)
                means[number, label] = max(means[number, label], jaccard)
    return means.mean(0).tolist()
