"""What `hs.project` should say: PCA by an SVD, and the scores of classes in loops.

Left out: what labels in random orders give (`*_p`, `*_chance`, `*_high`, `apart_p`),
and pictures by UMAP, t-SNE and PaCMAP with what is measured of them.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import cdist
from sklearn.metrics import silhouette_score

import hiddenscope as hs
from tests.oracles import naive

SCORES = ("silhouette", "neighbour", "fisher", "within")
NEIGHBOURS = 15
# Distances that differ by less, relative to the largest norm, are equal.
TIE = 1e-6


def project(
    source: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected pictures by PCA, and the scores of the classes."""
    models = list(source) if isinstance(source, list | tuple) else [source]
    for model in models:
        naive.need_model(model)
    if asked.get("truncate"):
        raise naive.Uncovered("texts that are cut")
    data = asked["data"]
    datasets = data if isinstance(data, Mapping) else {"": data}
    sites = naive.sites_of(result)
    pool = asked.get("pool")
    if pool is None:
        defaults = {naive.default_pool(model, sites) for model in models}
        pool = defaults.pop() if len(defaults) == 1 else "mean"
    method = getattr(asked.get("method", "umap"), "method", asked.get("method", "umap"))
    count = getattr(asked.get("method"), "neighbours", NEIGHBOURS)
    parts = {}
    for m, model in enumerate(models):
        for d, dataset in enumerate(datasets.values()):
            parts[m, d] = _Part(model, dataset, sites, pool, len(models) == 1)
    # Too many neighbours for the smallest of the datasets are too many for all.
    fewest = min(len(part.labels) for part in parts.values())
    count = min(count, fewest - 1)
    expected: dict[str, Any] = {}
    columns = np.cumsum([0, *(len(parts[0, d].labels) for d in range(len(datasets)))])
    pictures = np.full((2, len(models), len(sites), columns[-1]), np.nan)
    shape = len(models), len(datasets), len(sites)
    names = [*SCORES, "distinct", "trust", "shown"]
    numbers = {name: np.full(shape, np.nan) for name in names}
    first_of: dict[int, np.ndarray] = {}
    for (m, d), part in parts.items():
        previous = first_of.get(d)
        for s, site in enumerate(sites):
            if site not in part.values:
                continue
            points = part.values[site]
            numbers["distinct"][m, d, s] = len(distinct(points))
            if numbers["distinct"][m, d, s] == 1:
                continue
            scored = part.scores(site)
            for name, value in scored.items():
                numbers[name][m, d, s] = value
            picture = pca(points)
            if previous is not None and previous.shape == picture.shape:
                picture = picture @ orthogonal_procrustes(picture, previous)[0]
            previous = picture
            first_of.setdefault(d, picture)
            pictures[:, m, s, columns[d] : columns[d + 1]] = picture.T
            near = min(count, (len(points) - 1) // 2)
            if near > 0 and len(points) > 3:
                numbers["trust"][m, d, s] = trustworthiness(points, picture, near)
            if scored:
                numbers["shown"][m, d, s] = silhouette(picture, part.codes)
    if method == "pca":
        expected["x"], expected["y"] = (
            squeezed(each[:, None], 1, len(models)) for each in pictures
        )
    else:
        del numbers["trust"], numbers["shown"]
    for name, values in numbers.items():
        if np.isfinite(values).any():
            expected[name] = squeezed(values, len(datasets), len(models))
    for number, part in enumerate(parts.values()):
        expected |= part.facts(f"facts.parts.{number}", sites)
    expected["facts.neighbours"] = count
    return {name: np.asarray(value) for name, value in expected.items()}


def squeezed(values: np.ndarray, datasets: int, models: int) -> np.ndarray:
    """Leave out the model or the dataset where there is one."""
    if datasets == 1:
        values = values[:, 0]
    return values[0] if models == 1 else values


def labelled(data: Any) -> tuple[list[Any], list[Any], Any]:
    """Return texts, labels and groups of a dataset."""
    if isinstance(data, str) or hasattr(data, "columns"):
        data = hs.read(data)
    if hasattr(data, "labels"):
        return list(data.texts), list(data.labels or ()), data.groups
    texts, labels = data
    return naive.listed(texts), list(labels), None


class _Part:
    """One dataset in one model: points of every site, with classes and groups."""

    def __init__(
        self, model: Any, data: Any, sites: list[str], pool: Any, is_only: bool
    ) -> None:
        texts, labels, groups = labelled(data)
        self.texts, self.labels = texts, labels or [""] * len(texts)
        names = list(dict.fromkeys(map(class_name, self.labels)))
        self.codes = np.array([names.index(class_name(label)) for label in self.labels])
        self.group_of = naive.groups_of(texts, groups)
        keys = []
        for text, label in zip(texts, self.labels, strict=True):
            keys.append((naive.copy_key(text), str(label)))
        # Of copies with the same label, the first in the alphabet counts.
        self.counts = []
        for number, key in enumerate(keys):
            same = [k for k, other in enumerate(keys) if other == key]
            self.counts.append(number == min(same, key=lambda k: (str(texts[k]), k)))
        self.rows = np.flatnonzero(self.counts)
        self.values = {}
        for site in sites:
            try:
                self.values[site] = naive.vectors(model, texts, site, pool)
            except naive.Uncovered:
                # Of several models, not each has every site.
                if is_only:
                    raise

    def scores(self, site: str) -> dict[str, float]:
        """Score the classes of the points that count."""
        codes = self.codes[self.rows]
        if len(set(self.codes)) < 2:
            return {}
        points, groups = self.values[site][self.rows], self.group_of[self.rows]
        return scores_of(points, codes, groups)

    def facts(self, where: str, sites: list[str]) -> dict[str, Any]:
        """Return the facts that are numbers."""
        facts: dict[str, Any] = {"points": len(self.labels)}
        if len(set(self.codes)) < 2:
            return {f"{where}.{key}": value for key, value in facts.items()}
        facts["class_count"] = len(set(self.codes))
        for code in range(min(20, facts["class_count"])):
            facts[f"classes.{code}.points"] = (self.codes == code).sum()
        facts["texts"], facts["groups"] = sum(self.counts), len(set(self.group_of))
        scored = {}
        for site in sites:
            if site in self.values and len(distinct(self.values[site])) > 1:
                scored[site] = self.scores(site)
        if scored:
            best = max(scored, key=lambda site: scored[site]["silhouette"])
            places = {"best": best, "first": next(iter(scored)), "last": [*scored][-1]}
            for place, site in places.items():
                for name, value in scored[site].items():
                    facts[f"separation.{place}.{name}"] = value
        return {f"{where}.{key}": value for key, value in facts.items()}


def class_name(label: Any) -> str:
    """Return the name of a class: 1.0 and 1 are the same."""
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return str(label)


def distinct(points: np.ndarray) -> list[int]:
    """Return the first of each set of equal points."""
    scale = TIE * max(np.linalg.norm(points, axis=1).max(), 1e-30)
    firsts: list[int] = []
    for number, point in enumerate(points):
        if all(np.linalg.norm(point - points[first]) > scale for first in firsts):
            firsts.append(number)
    return firsts


def scores_of(
    points: np.ndarray, codes: np.ndarray, groups: np.ndarray
) -> dict[str, float]:
    """Return the four scores of classes of points."""
    distances = cdist(points, points)
    scale = TIE * np.linalg.norm(points - points.mean(0), axis=1).max()
    distances[distances < scale] = 0.0
    count, classes = len(points), len(set(codes))
    hits = []
    for i in range(count):
        others = [j for j in range(count) if groups[j] != groups[i]]
        if len(set(groups)) == 1:
            others = [j for j in range(count) if j != i]
        nearest = min(distances[i, j] for j in others)
        # Where several are equally near, the share among these.
        near = [j for j in others if distances[i, j] <= nearest + scale]
        hits.append(np.mean([codes[j] == codes[i] for j in near]))
    whole = points.mean(0)
    between = rest = 0.0
    for code in set(codes):
        inside = points[codes == code]
        between += len(inside) * float(((inside.mean(0) - whole) ** 2).sum())
        rest += float(((inside - inside.mean(0)) ** 2).sum())
    pairs = list(combinations(range(count), 2))
    within = [distances[i, j] for i, j in pairs if codes[i] == codes[j]]
    every = [distances[i, j] for i, j in pairs]
    return {
        "silhouette": silhouette(distances, codes, metric="precomputed"),
        "neighbour": float(np.mean(hits)),
        "fisher": between / (classes - 1) / (rest / (count - classes)),
        "within": float(np.mean(within) / np.mean(every)) if within else float("nan"),
    }


def silhouette(
    points: np.ndarray, codes: np.ndarray, metric: str = "euclidean"
) -> float:
    """Return the mean silhouette; 0 if all points are alone, or of one class."""
    if not 1 < len(set(codes)) < len(codes):
        return 0.0
    return float(silhouette_score(points, codes, metric=metric))


def pca(points: np.ndarray) -> np.ndarray:
    """Return the first two principal components; the largest coordinate is positive."""
    centred = points - points.mean(0)
    left, strength, _ = np.linalg.svd(centred, full_matrices=False)
    picture = np.zeros((len(points), 2))
    for k in range(min(2, len(strength))):
        column = left[:, k] * strength[k]
        picture[:, k] = column * np.sign(column[np.abs(column).argmax()])
    return picture


def trustworthiness(points: np.ndarray, picture: np.ndarray, near: int) -> float:
    """Return whether neighbours in a picture are near in the full space.

    As Venna and Kaski (2001); points at the same distance share the better rank.
    """
    full, shown = cdist(points, points), cdist(picture, picture)
    scale = TIE * np.linalg.norm(points - points.mean(0), axis=1).max()
    full[full < scale] = 0.0
    count, penalty = len(points), 0.0
    for i in range(count):
        others = [j for j in range(count) if j != i]
        for j in sorted(others, key=lambda k: shown[i, k])[:near]:
            rank = 1 + sum(full[i, k] < full[i, j] - scale for k in others)
            penalty += max(0, rank - near)
    worst = count * near * (2 * count - 3 * near - 1) / 2
    return 1 - penalty / worst
