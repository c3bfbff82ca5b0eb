"""Pictures of points in two dimensions, one a site, and whether they show what the full
space holds.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.project.workers import Job, UmapPool
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import StatesError
from hiddenscope.measures.distances import Distances, trustworthiness
from hiddenscope.measures.separation import Score

if TYPE_CHECKING:
    from hiddenscope.results import Result

Method: TypeAlias = Literal["umap", "pca", "pacmap", "tsne"]
Picture: TypeAlias = NDArray[np.float32]

METHODS = ("umap", "pca", "pacmap", "tsne")
FEWEST = {"umap": 4, "pca": 2, "pacmap": 8, "tsne": 4}
RADIUS = 10.0  # of UMAP's initial picture, as umap-learn scales its own
CHANCE = 0.05
APART = 0.25  # classes with a silhouette from here on look apart in a picture
# Points with a silhouette from here on look like groups; noise comes to 0.3 to 0.4.
GROUPED = 0.6
LOOSE = 0.1  # groups with a silhouette below this one do not exist in the full space
SAMPLE = 500  # points among which groups are looked for


@checked
@dataclass(frozen=True)
class Pictures:
    """How the pictures of `hs.project` are made.

    `method` is "umap", "pca", "tsne" or "pacmap"; `neighbours` is how many neighbours
    of a point count (UMAP, PaCMAP). UMAP takes a while the first time: `preview` is
    called with the result by PCA, which is there at once.

    >>> Pictures("tsne")
    Pictures(method='tsne', neighbours=15, preview=None)
    """

    method: Method = "umap"
    neighbours: int = 15
    preview: "Callable[[Result], None] | None" = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            problem = f"No method {str(self.method)[:40]!r}"
            raise StatesError(
                problem, "there are four methods", f"Use one of {', '.join(METHODS)}."
            )
        integer(self.neighbours, "neighbours", 2)  # a point is its own first
        if self.method == "pacmap":
            _installed_pacmap()

    def for_points(self, fewest: int) -> "Pictures":
        """The same with no more neighbours than there are other points."""
        if fewest < FEWEST[self.method]:
            reason = (
                f"there {'is 1 point' if fewest == 1 else f'are {fewest} points'}, and"
                f" it takes {FEWEST[self.method]}"
            )
            raise StatesError(
                f"No picture by {self.method}", reason, "Give more texts, or use pca."
            )
        return replace(self, neighbours=min(self.neighbours, fewest - 1))


def pca(points: Distances) -> Picture:
    """The first two principal components."""
    rows = points.rows
    tall = rows.shape[0] > rows.shape[1]
    values, vectors = torch.linalg.eigh(rows.T @ rows if tall else rows @ rows.T)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    components = rows @ vectors[:, :2] if tall else vectors[:, :2] * values[:2].sqrt()
    if components.shape[1] < 2:  # states of width 1, or one point
        missing = torch.zeros(
            len(components), 2 - components.shape[1], dtype=components.dtype
        )
        components = torch.cat([components, missing], 1)
    # Each component is defined up to its sign: the largest entry is made positive.
    signs = components.gather(0, components.abs().argmax(0, keepdim=True)).sign()
    return _floats(components * torch.where(signs == 0, 1, signs))


def draw(
    points: Sequence[Distances],
    how: Pictures,
    seeds: Sequence[int],
    pool: UmapPool | None,
    advance: Callable[[float], None],
) -> list[list[Picture]]:
    """The pictures of every set of points, one for each seed; all begin from PCA."""
    starts = [pca(some) for some in points]
    if how.method == "pca":
        return [[start] for start in starts]
    if how.method == "umap":
        assert pool is not None
        jobs = []
        for some, start in zip(points, starts, strict=True):
            neighbours, distances = some.nearest(how.neighbours)
            jobs += [
                Job(_scaled(start), neighbours.numpy(), _floats(distances), seed)
                for seed in seeds
            ]
        made = pool.compute(jobs, advance)
        return [made[k : k + len(seeds)] for k in range(0, len(made), len(seeds))]
    draw_one = {"tsne": _tsne, "pacmap": _pacmap}[how.method]
    drawn: list[list[Picture]] = []
    for some, start in zip(points, starts, strict=True):
        drawn.append([])
        for seed in seeds:
            drawn[-1].append(draw_one(some, start, how.neighbours, seed))
            advance(1)
    return drawn


def _scaled(start: Picture) -> Picture:
    widest = float(np.abs(start).max())
    return start / widest * np.float32(RADIUS) if widest > 0 else start


def _tsne(points: Distances, start: Picture, neighbours: int, seed: int) -> Picture:
    from sklearn.manifold import TSNE

    perplexity = max(1.0, min(30.0, (len(points) - 1) / 3))
    deviation = float(start.std(0)[0]) or 1.0
    options: dict[str, Any] = {
        "perplexity": perplexity,
        "random_state": seed,
        "n_jobs": 1,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        picture = TSNE(init=start / deviation * 1e-4, **options).fit_transform(
            _floats(points.rows)
        )
    return np.asarray(picture, dtype=np.float32)


def _pacmap(points: Distances, start: Picture, neighbours: int, seed: int) -> Picture:
    pacmap = _installed_pacmap()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reducer = pacmap.PaCMAP(n_neighbors=neighbours, random_state=seed)
        picture = reducer.fit_transform(_floats(points.rows), init=start.copy())
    return np.asarray(picture, dtype=np.float32)


def _installed_pacmap() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pacmap
    except ImportError as error:
        reason = f"the package is not installed ({error})"
        raise StatesError(
            "No picture by pacmap", reason, "Run: pip install 'hiddenscope[pacmap]'."
        ) from error
    return pacmap


def aligned(picture: Picture, other: Picture | None) -> Picture:
    """The picture, centred, then rotated and mirrored to lie as close to the other as
    it can; nothing is stretched.
    """
    centred = picture.astype(np.float64) - picture.mean(0, dtype=np.float64)
    if other is None:
        return np.asarray(centred, dtype=np.float32)
    # Orthogonal Procrustes.
    left, _, right = np.linalg.svd(centred.T @ (other - other.mean(0)))
    return np.asarray(centred @ (left @ right), dtype=np.float32)


def disparity(picture: Picture, other: Picture) -> float:
    """How far two pictures differ beyond shift, rotation, mirror image and scale: 0 not
    at all, 1 wholly.
    """
    sides = [
        side.astype(np.float64) - side.mean(0, dtype=np.float64)
        for side in (picture, other)
    ]
    scale = np.linalg.norm(sides[0]) * np.linalg.norm(sides[1])
    if scale == 0:
        return float("nan")
    shared = np.linalg.svd(sides[0].T @ sides[1], compute_uv=False).sum() / scale
    return float(np.sqrt(max(0.0, 1.0 - min(1.0, shared) ** 2)))


@dataclass(frozen=True)
class Doubt:
    """What a picture shows and the full space does not hold: its silhouette in the
    picture, and in the full space.

    `groups` is the number of groups that can be seen, or None where the doubt is about
    the classes, with their `p`.
    """

    shown: float
    full_space: float
    p: float | None = None
    groups: int | None = None


@dataclass(frozen=True, eq=False)
class Panel:
    """One site of one set of points: its picture (None if all states are equal) and the
    numbers beside it.
    """

    distinct: int
    picture: Picture | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    trust: float = np.nan
    spread: float = np.nan
    shown: float = np.nan
    doubt: Doubt | None = None


def panel(
    points: Distances,
    drawn: Sequence[Picture],
    codes: Tensor | None,
    scores: Mapping[str, Score],
    neighbours: int,
) -> Panel:
    """The first picture, compared with the full space and with the pictures of other
    seeds.
    """
    first, *others = drawn
    near = min(neighbours, (len(points) - 1) // 2)
    trust = (
        trustworthiness(points, torch.from_numpy(first), near)
        if near > 0 and len(points) > 3
        else np.nan
    )
    spread = (
        float(np.mean([disparity(first, other) for other in others]))
        if others
        else np.nan
    )
    shown = (
        _silhouette(first, codes.numpy())
        if scores and codes is not None and len(np.unique(first, axis=0)) > 1
        else np.nan
    )
    return Panel(
        points.distinct,
        first,
        scores,
        trust,
        spread,
        shown,
        _doubt(points, first, shown, scores),
    )


def _silhouette(rows: NDArray[Any], codes: NDArray[Any]) -> float:
    """The mean silhouette; 0 where every point is alone in its class, which
    scikit-learn refuses.
    """
    from sklearn.metrics import silhouette_score

    return (
        float(silhouette_score(rows, codes))
        if 1 < len(np.unique(codes)) < len(codes)
        else 0.0
    )


def _doubt(
    points: Distances, picture: Picture, shown: float, scores: Mapping[str, Score]
) -> Doubt | None:
    if scores and shown >= APART and scores["silhouette"].p > CHANCE:
        return Doubt(shown, scores["silhouette"].value, p=scores["silhouette"].p)
    groups = _visible_groups(picture)
    if groups is None:
        return None
    rows, codes, seen = groups
    full_space = _silhouette(points.rows.numpy()[rows], codes)
    return (
        Doubt(seen, full_space, groups=int(codes.max()) + 1)
        if full_space < LOOSE
        else None
    )


def _visible_groups(
    picture: Picture,
) -> tuple[NDArray[np.int64], NDArray[np.int64], float] | None:
    """The groups that stand out in a picture: a sample of its points, the group of
    each, and their silhouette.
    """
    from sklearn.cluster import KMeans

    rows: NDArray[np.int64] = np.arange(len(picture))
    if len(rows) > SAMPLE:
        rows = np.sort(
            np.random.default_rng(0).choice(len(picture), SAMPLE, replace=False)
        )
    sample = picture[rows]
    best: tuple[NDArray[np.int64], float] | None = None
    for count in range(2, min(7, len(np.unique(sample, axis=0)), len(rows) // 3 + 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codes = (
                KMeans(count, n_init=1, random_state=0)
                .fit_predict(sample)
                .astype(np.int64)
            )
        if len(np.unique(codes)) == count and (
            seen := _silhouette(sample, codes)
        ) >= max(GROUPED, best[1] if best else 0):
            best = codes, seen
    return None if best is None else (rows, *best)


def _floats(values: Tensor) -> Picture:
    return np.asarray(values.float().numpy(), dtype=np.float32)
