"""Findings: the points and their panels as one Dataset, and the facts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.project.pictures import CHANCE, Method, Panel
from hiddenscope.analyses.project.points import Points
from hiddenscope.errors import StatesError
from hiddenscope.measures.separation import SCORES, corrected
from hiddenscope.results import Facts
from hiddenscope.sites import Site

if TYPE_CHECKING:
    import xarray

LISTED = 20  # classes that the facts list
LONG_NAMES = {
    "silhouette": "silhouette of the classes in the full space",
    "neighbour": (
        "share of points whose nearest point of another text or group is of their class"
    ),
    "fisher": "variance between classes over that within",
    "within": "mean distance within classes over that of all pairs",
    "distinct": "number of different states",
    "trust": "trustworthiness of the picture",
    "spread": "difference of the pictures of other seeds, 0 to 1",
    "shown": "silhouette of the classes in the picture",
}
NULL = {
    "": "",
    "_p": ", p-value",
    "_chance": ", median under shuffled labels",
    "_high": ", reached by one in twenty shuffled labels",
}
CORRECTED = "silhouette_p_corrected"
OF_PICTURE = ("distinct", "trust", "spread", "shown")


def table(
    parts: Sequence[Points], panels: Sequence[Sequence[Panel]], method: Method
) -> "xarray.Dataset":
    """Everything by model, dataset and site; the first two dimensions only where there
    are several.
    """
    import xarray

    models, datasets = (
        list(dict.fromkeys(getattr(part, name) for part in parts))
        for name in ("model", "dataset")
    )
    sites = sorted({site for part in parts for site in part.sites})
    counts = [_count(parts, dataset) for dataset in datasets]
    starts = np.cumsum([0, *counts])
    pictures = np.full(
        (2, len(models), len(sites), sum(counts)), np.nan, dtype=np.float32
    )
    names = [f"{score}{side}" for score in SCORES for side in NULL] + [
        CORRECTED,
        *OF_PICTURE,
    ]
    numbers = {
        name: np.full((len(models), len(datasets), len(sites)), np.nan)
        for name in names
    }
    for part, row in zip(parts, panels, strict=True):
        model, dataset = models.index(part.model), datasets.index(part.dataset)
        for site, p in _corrected(part, row):
            numbers[CORRECTED][model, dataset, sites.index(site)] = p
        for site, panel in zip(part.sites, row, strict=True):
            cell = model, dataset, sites.index(site)
            if panel.picture is not None:
                pictures[:, cell[0], cell[2], starts[dataset] : starts[dataset + 1]] = (
                    panel.picture.T
                )
            for name, value in _numbers(panel).items():
                numbers[name][cell] = value
    point = "text" if parts[0].tokens is None else "token"
    columns: dict[str, Any] = {
        axis: (
            ("model", "site", point),
            pictures[k],
            {"long_name": f"{axis} in the picture by {method}"},
        )
        for k, axis in enumerate("xy")
    }
    for name, values in numbers.items():
        if np.isfinite(values).any():
            columns[name] = (
                ("model", "dataset", "site"),
                values,
                {"long_name": _long_name(name)},
            )
    coords = {
        "model": models,
        "dataset": datasets,
        "site": [str(site) for site in sites],
        **_coords(parts, point),
    }
    texts = [text for part in _firsts(parts) for text in part.texts or ()]
    data = xarray.Dataset(columns, coords, {"texts": texts, "method": method})
    return data.squeeze(
        [dim for dim in ("model", "dataset") if data.sizes[dim] == 1], drop=True
    )


def _count(parts: Sequence[Points], dataset: str) -> int:
    counts = {part.model: len(part) for part in parts if part.dataset == dataset}
    if len(set(counts.values())) > 1:
        reason = "; ".join(
            f"{model} makes {count:,} tokens" for model, count in counts.items()
        )
        raise StatesError(
            "Models do not share their tokens",
            reason,
            "Use one point for each text, not hs.each_token.",
        )
    return next(iter(counts.values()))


def _numbers(panel: Panel) -> dict[str, float]:
    numbers = {name: float(getattr(panel, name)) for name in OF_PICTURE}
    for name, score in panel.scores.items():
        sides = (score.value, score.p, score.chance, score.high)
        numbers |= {
            f"{name}{side}": value for side, value in zip(NULL, sides, strict=True)
        }
    return numbers


def _corrected(part: Points, panels: Sequence[Panel]) -> list[tuple[Site, float]]:
    """The p-value of the silhouette at each site where there is one, corrected for the
    number of sites.
    """
    scored = [
        (site, panel.scores["silhouette"])
        for site, panel in zip(part.sites, panels, strict=True)
        if panel.scores
    ]
    p = corrected([score for _, score in scored]) if scored else []
    return [(site, value) for (site, _), value in zip(scored, p, strict=True)]


def _long_name(name: str) -> str:
    if name == CORRECTED:
        return "p-value of the silhouette, corrected for the number of sites"
    score, _, side = name.partition("_")
    return LONG_NAMES[score] + NULL[f"_{side}" if side else ""]


def _firsts(parts: Sequence[Points]) -> list[Points]:
    """One part of each dataset: its points are the same in every model."""
    return list({part.dataset: part for part in reversed(parts)}.values())[::-1]


def _coords(parts: Sequence[Points], point: str) -> dict[str, Any]:
    firsts = _firsts(parts)
    labels = [
        label
        for part in firsts
        for label in (part.classes.labels if part.classes else [""] * len(part))
    ]
    coords: dict[str, Any] = {"label": (point, _objects(labels))}
    if len(firsts) > 1:
        coords["of"] = (
            point,
            _objects([part.dataset for part in firsts for _ in range(len(part))]),
        )
    if point == "token":
        tokens = [part.tokens for part in firsts if part.tokens is not None]
        offsets = np.cumsum([0, *(some.count for some in tokens)])
        texts = [
            some.text + offset for some, offset in zip(tokens, offsets, strict=False)
        ]
        coords["string"] = (
            point,
            _objects([string for part in firsts for string in part.strings]),
        )
        coords["text"] = (point, np.concatenate(texts))
        coords["position"] = (
            point,
            np.concatenate([some.positions for some in tokens]),
        )
    return coords


def _objects(values: Sequence[str]) -> NDArray[np.object_]:
    return np.array([*values, None], dtype=object)[:-1]


class Beside(NamedTuple):
    """What is known of one dataset in one model beside its panels.

    The number of texts whose label the model predicts, the smallest p-value that
    permuted labels can give (None where nothing can be permuted), and whether the
    classes were tested at all.
    """

    predicted: int | None
    smallest_p: float | None
    tested: bool


def facts_of(part: Points, panels: Sequence[Panel], beside: Beside) -> Facts:
    """The facts of one dataset in one model."""
    facts: dict[str, Any] = {
        "model": part.model,
        "dataset": part.dataset,
        "points": len(part),
    }
    if part.classes is not None:
        counts = part.classes.counts
        listed = list(counts.items())[:LISTED]
        facts["classes"] = [
            {"label": label, "points": count} for label, count in listed
        ]
        facts["class_count"] = len(counts)
        if alone := [label for label, count in counts.items() if count == 1]:
            facts["alone_in_class"] = alone[:LISTED]
    if beside.predicted is not None:
        facts["labels_predicted"] = beside.predicted
    if beside.tested:
        facts |= {**part.belonging.facts, "smallest_p": beside.smallest_p}
    if equal := [
        site
        for site, panel in zip(part.sites, panels, strict=True)
        if panel.picture is None
    ]:
        facts["all_equal_at"] = equal
    return {**facts, **_separation(part, panels), **_picture(part, panels)}


def _separation(part: Points, panels: Sequence[Panel]) -> Facts:
    scored = [
        (site, panel)
        for site, panel in zip(part.sites, panels, strict=True)
        if panel.scores
    ]
    if not scored:
        return {}
    best = max(scored, key=lambda pair: pair[1].scores["silhouette"].value)
    p = dict(_corrected(part, panels))
    return {
        "separation": {
            "best": {**_scores_at(*best), "p_corrected": _known(p[best[0]])},
            "first": _scores_at(*scored[0]),
            "last": _scores_at(*scored[-1]),
            "apart_at": [site for site in p if p[site] <= CHANCE],
        }
    }


def _scores_at(site: Site, panel: Panel) -> Facts:
    values = {name: score.value for name, score in panel.scores.items()}
    return {
        "site": site,
        **values,
        "p": {name: _known(score.p) for name, score in panel.scores.items()},
    }


def _known(number: float) -> float | None:
    """None in place of NaN, which JSON does not have."""
    return number if number == number else None


def _picture(part: Points, panels: Sequence[Panel]) -> Facts:
    facts: dict[str, Any] = {}
    for name, key in (("trust", "trustworthiness"), ("spread", "seed_difference")):
        values = np.array([getattr(panel, name) for panel in panels])
        if np.isfinite(values).any():
            lowest, highest = int(np.nanargmin(values)), int(np.nanargmax(values))
            facts[key] = {
                "lowest": {"site": part.sites[lowest], "value": float(values[lowest])},
                "highest": {
                    "site": part.sites[highest],
                    "value": float(values[highest]),
                },
                "median": float(np.nanmedian(values)),
            }
    doubts = [
        (site, panel.doubt)
        for site, panel in zip(part.sites, panels, strict=True)
        if panel.doubt is not None
    ]
    if doubts:
        facts["doubts"] = [
            {
                "site": site,
                "shown": doubt.shown,
                "full_space": doubt.full_space,
                "p": doubt.p,
                "groups": doubt.groups,
            }
            for site, doubt in doubts
        ]
    return {"picture": facts} if facts else {}


def tightness(parts: Sequence[Points], panels: Sequence[Sequence[Panel]]) -> Facts:
    """Of two datasets in one model: at which sites the classes of each are tighter. The
    difference is not tested.
    """
    facts = list(_tightness(parts, panels))
    return {"tightness": facts} if facts else {}


def _tightness(
    parts: Sequence[Points], panels: Sequence[Sequence[Panel]]
) -> Iterator[Facts]:
    for model in dict.fromkeys(part.model for part in parts):
        pair = [
            (part, row)
            for part, row in zip(parts, panels, strict=True)
            if part.model == model
        ]
        sides = [
            {
                site: panel.scores
                for site, panel in zip(part.sites, row, strict=True)
                if panel.scores
            }
            for part, row in pair
        ]
        shared = [site for site in sides[0] if site in sides[-1]]
        shared = [
            site
            for site in shared
            if any(side[site]["within"].p <= CHANCE for side in sides)
        ]
        if len(pair) != 2 or not shared:
            continue
        within = np.array(
            [[side[site]["within"].value for site in shared] for side in sides]
        )
        tighter = np.argmin(within, axis=0)
        yield {
            "model": model,
            "sites": shared,
            "datasets": [
                {
                    "dataset": part.dataset,
                    "tighter_at": [
                        site
                        for site, side in zip(shared, tighter, strict=True)
                        if side == number
                    ],
                    "median_within": float(np.median(within[number])),
                }
                for number, (part, _) in enumerate(pair)
            ],
        }
