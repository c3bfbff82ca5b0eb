"""Pictures of points in two dimensions, and whether they tell the truth."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.project.story import Doubt
from hiddenscope.analyses.project.workers import Job, UmapPool
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import StatesError
from hiddenscope.measures.distances import Distances, trustworthiness
from hiddenscope.measures.principal import principal_coordinates
from hiddenscope.measures.separation import Score
from hiddenscope.states.arrays import Floats32, Ints

if TYPE_CHECKING:
    from hiddenscope.results import Result

Method: TypeAlias = Literal["umap", "pca", "pacmap", "tsne"]
Picture: TypeAlias = Floats32

FEWEST = {"umap": 4, "pca": 2, "pacmap": 8, "tsne": 4}
# Of UMAP's initial picture, as umap-learn scales its own.
RADIUS = 10.0
SIGNIFICANCE = 0.05
# Classes with a silhouette from here on look apart in a picture.
APART = 0.25
# Points with a silhouette from here on look like groups; noise comes to 0.3 to 0.4.
GROUPED = 0.6
# Groups with a silhouette below this do not exist in the full space.
LOOSE = 0.1
# Points among which groups are looked for, and the most groups.
SAMPLE = 500
MAX_GROUPS = 6


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
        if self.method not in FEWEST:
            raise StatesError(
                f"No method {str(self.method)[:40]!r}",
                "there are four methods",
                f"Use one of {', '.join(FEWEST)}.",
            )
        # At least two, because a point is its own first neighbour.
        integer(self.neighbours, "neighbours", 2)
        if self.method == "pacmap":
            _installed_pacmap()

    def for_points(self, fewest: int) -> "Pictures":
        """Return the same with no more neighbours than there are other points."""
        needed = FEWEST[self.method]
        if fewest < needed:
            points = "is 1 point" if fewest == 1 else f"are {fewest} points"
            reason = f"there {points}, and it takes {needed}"
            raise StatesError(
                f"No picture by {self.method}", reason, "Give more texts, or use pca."
            )
        return replace(self, neighbours=min(self.neighbours, fewest - 1))


def pca(points: Distances) -> Picture:
    """Return the first two principal components."""
    picture = np.zeros((len(points), 2), dtype=np.float32)
    # States of width 1, or one point, have one component.
    components = principal_coordinates(points.rows.numpy(), 2)
    picture[:, : components.shape[1]] = components
    return picture


def draw(
    points: Sequence[Distances],
    how: Pictures,
    seeds: Sequence[int],
    pool: UmapPool | None,
    advance: Callable[[float], None],
) -> list[list[Picture]]:
    """Draw every set of points, once for each seed; all pictures start from PCA."""
    starts = list(map(pca, points))
    if how.method == "pca":
        return [[start] for start in starts]
    if how.method == "umap":
        assert pool is not None
        jobs = []
        for site, start in zip(points, starts, strict=True):
            indices, distances = site.nearest(how.neighbours)
            widest = float(np.abs(start).max())
            if widest > 0:
                start = start / widest * np.float32(RADIUS)
            for seed in seeds:
                jobs.append(Job(start, indices.numpy(), _floats(distances), seed))
        pictures = pool.compute(jobs, advance)
        count = len(seeds)
        return [pictures[k : k + count] for k in range(0, len(pictures), count)]
    draw_site = _tsne if how.method == "tsne" else _pacmap
    drawn: list[list[Picture]] = []
    for site, start in zip(points, starts, strict=True):
        drawn.append([])
        for seed in seeds:
            drawn[-1].append(draw_site(site, start, how.neighbours, seed))
            advance(1)
    return drawn


def _tsne(points: Distances, start: Picture, neighbours: int, seed: int) -> Picture:
    from sklearn.manifold import TSNE

    perplexity = max(1.0, min(30.0, (len(points) - 1) / 3))
    # Scaled like scikit-learn's own initial picture by PCA.
    deviation = float(start.std(0)[0]) or 1.0
    reducer = TSNE(
        init=start / deviation * 1e-4,
        perplexity=perplexity,
        random_state=seed,
        n_jobs=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        picture = reducer.fit_transform(_floats(points.rows))
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


def align(picture: Picture, other: Picture | None) -> Picture:
    """Centre a picture, then rotate and mirror it to lie as close to another as it can.

    Nothing is stretched (orthogonal Procrustes, Schönemann 1966).
    """
    wide = picture.astype(np.float64)
    centred = wide - wide.mean(0)
    if other is not None:
        left, _, right = np.linalg.svd(centred.T @ (other - other.mean(0)))
        centred = centred @ (left @ right)
    return np.asarray(centred, dtype=np.float32)


def disparity(picture: Picture, other: Picture) -> float:
    """Measure how far two pictures differ beyond shift, rotation, mirroring and scale.

    It is 0 if they do not differ at all, and at most 1.
    """
    from scipy.spatial import procrustes

    if not (np.ptp(picture, 0).any() and np.ptp(other, 0).any()):
        return float("nan")
    *_, squared = procrustes(picture, other)
    return float(np.sqrt(squared))


@dataclass(frozen=True, eq=False)
class Panel:
    """One site: its picture (None if all states are equal), and numbers about it."""

    distinct: int
    picture: Picture | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    trust: float = np.nan
    spread: float = np.nan
    shown: float = np.nan
    doubt: Doubt | None = None


def panel_of(
    site: str,
    points: Distances,
    drawn: Sequence[Picture],
    codes: Tensor | None,
    scores: Mapping[str, Score],
    neighbours: int,
) -> Panel:
    """Compare the first picture with the full space, and with those of other seeds."""
    picture, *others = drawn
    trust = spread = shown = np.nan
    near = min(neighbours, (len(points) - 1) // 2)
    if near > 0 and len(points) > 3:
        trust = trustworthiness(points, torch.from_numpy(picture), near)
    if others:
        spread = float(np.mean([disparity(picture, other) for other in others]))
    if scores and codes is not None and len(np.unique(picture, axis=0)) > 1:
        shown = _silhouette(picture, codes.numpy())
    # What the picture shows although the full space does not hold it.
    classes = scores.get("silhouette")
    if classes is not None and shown >= APART and classes.p > SIGNIFICANCE:
        full_space, p = classes.value, classes.p
        doubt: Doubt | None = Doubt(
            site=site, shown=shown, full_space=full_space, p=p, groups=None
        )
    else:
        doubt = _doubtful_groups(site, points, picture)
    return Panel(points.distinct, picture, scores, trust, spread, shown, doubt)


def _silhouette(rows: NDArray[np.floating[Any]], codes: Ints) -> float:
    """Return the mean silhouette; 0 if every point is alone, or all are in one class.

    scikit-learn refuses both.
    """
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(codes)) < len(codes):
        return 0.0
    return float(silhouette_score(rows, codes))


def _doubtful_groups(site: str, points: Distances, picture: Picture) -> Doubt | None:
    """Return the groups that stand out in a picture but not in the full space."""
    from sklearn.cluster import KMeans

    rows = np.arange(len(picture))
    if len(rows) > SAMPLE:
        drawn = np.random.default_rng(0).choice(len(picture), SAMPLE, replace=False)
        rows = np.sort(drawn)
    sample = picture[rows]
    distinct = len(np.unique(sample, axis=0))
    best = None
    shown = GROUPED
    for count in range(2, min(MAX_GROUPS + 1, distinct, len(rows) // 3 + 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clusters = KMeans(count, n_init=1, random_state=0).fit_predict(sample)
        codes = clusters.astype(np.int64)
        if len(np.unique(codes)) < count:
            continue
        silhouette = _silhouette(sample, codes)
        if silhouette >= shown:
            best, shown = codes, silhouette
    if best is None:
        return None
    full_space = _silhouette(points.rows.numpy()[rows], best)
    if full_space >= LOOSE:
        return None
    groups = int(best.max()) + 1
    return Doubt(site=site, shown=shown, full_space=full_space, p=None, groups=groups)


def _floats(values: Tensor) -> Picture:
    return np.asarray(values.float().numpy(), dtype=np.float32)
