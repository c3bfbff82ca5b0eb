"""Judge: what a picture shows beside what the full space holds."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.project.maps import Picture, disparity
from hiddenscope.analyses.project.parts import Classes
from hiddenscope.measures.distances import Distances, trustworthiness
from hiddenscope.measures.separation import Score, separation, shuffled, silhouette

SHUFFLES = {500: 999, 5_000: 199}  # how often labels are shuffled, up to so many points
FEWEST_SHUFFLES = 99
BY_CHANCE = 0.05
PARTED = 0.25  # a silhouette from which classes look apart in a picture
GROUPED = 0.6  # a silhouette from which points look like groups in a picture; noise comes to 0.3 to 0.4
LOOSE = 0.1  # a silhouette below which these groups are none in the full space
LOOKED_AT = 500  # points in which groups are looked for


@dataclass(frozen=True, eq=False)
class Panel:
    """One site of one part: its picture (None if all states are equal) and the numbers beside it."""

    distinct: int
    picture: Picture | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    trust: float = np.nan
    spread: float = np.nan
    shown: float = np.nan
    doubt: str = ""


def labellings(classes: Classes | None, seed: int) -> torch.Tensor | None:
    """The classes as they are and shuffled, for every site of a part; None where there are not two classes."""
    if classes is None or len(classes.names) < 2:
        return None
    points = len(classes.codes)
    count = next((count for most, count in SHUFFLES.items() if points <= most), FEWEST_SHUFFLES)
    return shuffled(classes.codes, count, seed)


def separations(points: Distances, labels: torch.Tensor | None) -> Mapping[str, Score]:
    """How far the classes are apart in the full space; nothing where that cannot be said."""
    return {} if labels is None or points.alike else separation(points, labels)


def judged(
    points: Distances,
    pictures: Sequence[Picture],
    classes: Classes | None,
    scores: Mapping[str, Score],
    neighbours: int,
) -> Panel:
    """The first picture, held against the full space and against those of other seeds."""
    first, *others = pictures
    seen = Distances(torch.from_numpy(first))
    near = min(neighbours, (len(points) - 1) // 2)
    trust = trustworthiness(points, torch.from_numpy(first), near) if near > 0 and len(points) > 3 else np.nan
    spread = float(np.mean([disparity(first, other) for other in others])) if others else np.nan
    shown = silhouette(seen, classes.codes) if scores and classes is not None and not seen.alike else np.nan
    return Panel(points.distinct, first, scores, trust, spread, shown, _doubt(points, first, shown, scores))


def _doubt(points: Distances, picture: Picture, shown: float, scores: Mapping[str, Score]) -> str:
    """What the picture shows and the full space has not, if there is such a thing."""
    if scores and shown >= PARTED and scores["silhouette"].p > BY_CHANCE:
        own = scores["silhouette"]
        return f"classes look apart ({shown:.2f}) and in the full space are not ({own.value:.2f}, p {own.p:.2g})"
    groups = _groups(picture)
    if groups is None:
        return ""
    rows, codes, seen = groups
    own_groups = silhouette(Distances(points.rows[rows]), codes)
    if own_groups >= LOOSE:
        return ""
    many = int(codes.max()) + 1
    return f"{many} groups can be seen ({seen:.2f}), which are none in the full space ({own_groups:.2f})"


def _groups(picture: Picture) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The groups that stand out in a picture: of which points, the group of each, and their silhouette."""
    from sklearn.cluster import KMeans

    rows: NDArray[np.int64] = np.arange(len(picture))
    if len(rows) > LOOKED_AT:
        rows = np.sort(np.random.default_rng(0).choice(len(picture), LOOKED_AT, replace=False))
    distinct = len(np.unique(picture[rows], axis=0))
    seen, best = Distances(torch.from_numpy(picture[rows])), None
    for count in range(2, min(7, distinct, len(rows) // 3 + 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codes = torch.from_numpy(KMeans(count, n_init=1, random_state=0).fit_predict(picture[rows])).long()
        if len(set(codes.tolist())) == count and (found := silhouette(seen, codes)) >= max(
            GROUPED, best[1] if best else 0
        ):
            best = codes, found
    return None if best is None else (torch.from_numpy(rows), *best)
