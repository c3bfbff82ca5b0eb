"""Maps: pictures of points in two dimensions, one a site, turned so that points do not jump from one to the next."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.project.crew import Crew
from hiddenscope.errors import StatesError
from hiddenscope.measures.distances import Distances

Method: TypeAlias = Literal["umap", "pca", "pacmap", "tsne"]
Picture: TypeAlias = NDArray[np.float32]
METHODS = ("umap", "pca", "pacmap", "tsne")
FEWEST = {"umap": 4, "pca": 2, "pacmap": 8, "tsne": 4}
WIDE = 10.0  # how far apart the outermost points begin, as UMAP's own


@dataclass(frozen=True)
class Plan:
    """How pictures are made: the method, how many neighbours count, and the seeds, of which the first is shown."""

    method: Method
    neighbours: int
    seeds: tuple[int, ...]


def pca(points: Distances) -> tuple[Picture, float]:
    """The first two principal components, and which share of the variance they hold."""
    rows = points.rows
    tall = rows.shape[0] > rows.shape[1]
    values, vectors = torch.linalg.eigh(rows.T @ rows if tall else rows @ rows.T)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    places = rows @ vectors[:, :2] if tall else vectors[:, :2] * values[:2].sqrt()
    if places.shape[1] < 2:  # states one wide, or one point
        places = torch.cat([places, torch.zeros(len(places), 2 - places.shape[1], dtype=places.dtype)], 1)
    signs = places.gather(0, places.abs().argmax(0, keepdim=True)).sign()  # a fixed choice of each mirror image
    share = float(values[:2].sum() / values.sum()) if float(values.sum()) > 0 else float("nan")
    return _floats(places * torch.where(signs == 0, 1, signs)), share


def pictures(
    points: Sequence[Distances],
    starts: Sequence[Picture],
    plan: Plan,
    crew: Crew | None,
    advance: Callable[[float], None],
) -> list[list[Picture]]:
    """The pictures of every set of points, one a seed."""
    if plan.method == "pca":
        return [[start] for start in starts]
    if plan.method == "umap":
        assert crew is not None
        near = [some.nearest(plan.neighbours) for some in points]
        known = [(places.numpy(), _floats(distances)) for places, distances in near]
        begun = [_scaled(start) for start in starts]
        jobs = [(start, some, seed) for start, some in zip(begun, known, strict=True) for seed in plan.seeds]
        made = crew.pictures(jobs, advance)
        return [made[k : k + len(plan.seeds)] for k in range(0, len(made), len(plan.seeds))]
    draw = {"tsne": _tsne, "pacmap": _pacmap}[plan.method]
    found: list[list[Picture]] = []
    for some, start in zip(points, starts, strict=True):
        found.append([])
        for seed in plan.seeds:
            found[-1].append(draw(some, start, plan.neighbours, seed))
            advance(1)
    return found


def _scaled(start: Picture) -> Picture:
    widest = float(np.abs(start).max())
    return start / widest * np.float32(WIDE) if widest > 0 else start


def _tsne(points: Distances, start: Picture, neighbours: int, seed: int) -> Picture:
    from sklearn.manifold import TSNE

    perplexity = max(1.0, min(30.0, (len(points) - 1) / 3))
    spread = float(start.std(0)[0]) or 1.0
    options: dict[str, Any] = {"perplexity": perplexity, "random_state": seed, "n_jobs": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = TSNE(init=start / spread * 1e-4, **options).fit_transform(_floats(points.rows))
    return np.asarray(made, dtype=np.float32)


def _pacmap(points: Distances, start: Picture, neighbours: int, seed: int) -> Picture:
    pacmap = installed_pacmap()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pacmap.PaCMAP(n_neighbors=neighbours, random_state=seed)
        made = model.fit_transform(_floats(points.rows), init=start.copy())
    return np.asarray(made, dtype=np.float32)


def installed_pacmap() -> Any:
    """The library, if it is there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pacmap
    except ImportError as error:
        reason = f"the package is not installed ({error})"
        raise StatesError("A map by pacmap", reason, "Run: pip install 'hiddenscope[pacmap]'.") from error
    return pacmap


def aligned(picture: Picture, other: Picture | None) -> Picture:
    """The picture, centred, turned and mirrored to lie as near to the other as it can; nothing is stretched."""
    centred = picture.astype(np.float64) - picture.mean(0, dtype=np.float64)
    if other is None:
        return np.asarray(centred, dtype=np.float32)
    left, _, right = np.linalg.svd(centred.T @ (other - other.mean(0)))
    return np.asarray(centred @ (left @ right), dtype=np.float32)


def disparity(picture: Picture, other: Picture) -> float:
    """How far two pictures differ beyond shift, turn, mirror image and scale: 0 not at all, 1 wholly."""
    sides = [one.astype(np.float64) - one.mean(0, dtype=np.float64) for one in (picture, other)]
    scale = np.linalg.norm(sides[0]) * np.linalg.norm(sides[1])
    if scale == 0:
        return float("nan")
    shared = np.linalg.svd(sides[0].T @ sides[1], compute_uv=False).sum() / scale
    return float(np.sqrt(max(0.0, 1.0 - min(1.0, shared) ** 2)))


def _floats(values: Tensor) -> Picture:
    return np.asarray(values.float().numpy(), dtype=np.float32)
