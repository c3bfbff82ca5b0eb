"""Findings: the points and their panels as one Dataset, and the facts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.project.pictures import SIGNIFICANCE, Method, Panel
from hiddenscope.analyses.project.points import Points
from hiddenscope.errors import StatesError
from hiddenscope.measures.permutations import Permuted
from hiddenscope.measures.separation import SCORES, Score, corrected
from hiddenscope.results import Facts
from hiddenscope.results.dataset import (
    Coordinates,
    Variables,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.results.report import Grouped, plain_fields
from hiddenscope.sites import Site

if TYPE_CHECKING:
    import xarray

# Classes that the facts list.
LISTED = 20
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


def project_dataset(
    parts: Sequence[Points], panels: Sequence[Sequence[Panel]], method: Method
) -> "xarray.Dataset":
    """Tabulate everything by model, dataset and site.

    The first two dimensions are there only if there are several.
    """
    models = list(dict.fromkeys(part.model for part in parts))
    datasets = list(dict.fromkeys(part.dataset for part in parts))
    sites = sorted(set().union(*(part.sites for part in parts)))
    counts = [_count(parts, dataset) for dataset in datasets]
    ends = np.cumsum(counts)
    pictures = np.full(
        (2, len(models), len(sites), sum(counts)), np.nan, dtype=np.float32
    )
    numbers = {}
    for name in [*_score_names(), CORRECTED, *OF_PICTURE]:
        numbers[name] = np.full((len(models), len(datasets), len(sites)), np.nan)
    for part, row in zip(parts, panels, strict=True):
        model, dataset = models.index(part.model), datasets.index(part.dataset)
        points = slice(ends[dataset] - counts[dataset], ends[dataset])
        for site, p in _corrected(part, row):
            numbers[CORRECTED][model, dataset, sites.index(site)] = p
        for name_of_site, panel in zip(part.sites, row, strict=True):
            place = sites.index(name_of_site)
            if panel.picture is not None:
                pictures[:, model, place, points] = panel.picture.T
            for name, value in _numbers(panel).items():
                numbers[name][model, dataset, place] = value
    point = "text" if parts[0].tokens is None else "token"
    variables: Variables = {}
    for axis, coordinates in zip("xy", pictures, strict=True):
        long_name = f"{axis} in the picture by {method}"
        dims = ("model", "site", point)
        variables[axis] = (dims, coordinates, {"long_name": long_name})
    for name, values in numbers.items():
        if np.isfinite(values).any():
            dims = ("model", "dataset", "site")
            variables[name] = (dims, values, {"long_name": _long_name(name)})
    firsts = _firsts(parts)
    texts: list[str] = []
    for part in firsts:
        texts += part.texts or ()
    coords: Coordinates = {
        "model": models,
        "dataset": datasets,
        "site": site_names(sites),
        **_point_coords(firsts, point),
    }
    data = to_dataset(variables, coords, {"texts": texts, "method": method})
    single = [dim for dim in ("model", "dataset") if data.sizes[dim] == 1]
    return data.squeeze(single, drop=True)


def _score_names() -> Iterator[str]:
    for score in SCORES:
        for side in NULL:
            yield f"{score}{side}"


def _count(parts: Sequence[Points], dataset: str) -> int:
    """Return the number of points of a dataset, which must be that of every model."""
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
        for side, value in zip(NULL, sides, strict=True):
            numbers[f"{name}{side}"] = value
    return numbers


def _scored(
    part: Points, panels: Sequence[Panel]
) -> list[tuple[Site, Mapping[str, Score]]]:
    """Return the sites where the classes were scored, with their scores."""
    pairs = zip(part.sites, panels, strict=True)
    return [(site, panel.scores) for site, panel in pairs if panel.scores]


def _corrected(part: Points, panels: Sequence[Panel]) -> list[tuple[Site, float]]:
    """Return the p-values of silhouettes, corrected for the number of sites."""
    scored = _scored(part, panels)
    if not scored:
        return []
    p_values = corrected([scores["silhouette"] for _, scores in scored])
    return [(site, p) for (site, _), p in zip(scored, p_values, strict=True)]


def _long_name(name: str) -> str:
    if name == CORRECTED:
        return "p-value of the silhouette, corrected for the number of sites"
    score, underscore, side = name.partition("_")
    return LONG_NAMES[score] + NULL[underscore + side]


def _firsts(parts: Sequence[Points]) -> list[Points]:
    """Return one part of each dataset: its points are the same in every model."""
    firsts: dict[str, Points] = {}
    for part in parts:
        firsts.setdefault(part.dataset, part)
    return list(firsts.values())


def _point_coords(firsts: Sequence[Points], point: str) -> Coordinates:
    labels: list[str] = []
    dataset_of: list[str] = []
    strings: list[str] = []
    for part in firsts:
        labels += part.classes.labels if part.classes else [""] * len(part)
        dataset_of += [part.dataset] * len(part)
        strings += part.strings
    coords: Coordinates = {"label": (point, text_array(labels))}
    if len(firsts) > 1:
        coords["of"] = (point, text_array(dataset_of))
    if point == "token":
        texts = []
        positions = []
        offset = 0
        for part in firsts:
            if part.tokens is not None:
                # Texts of several datasets are numbered through.
                texts.append(part.tokens.text + offset)
                positions.append(part.tokens.positions)
                offset += part.tokens.count
        coords["string"] = (point, text_array(strings))
        coords["text"] = (point, np.concatenate(texts))
        coords["position"] = (point, np.concatenate(positions))
    return coords


class Beside(NamedTuple):
    """What is known of one dataset in one model beside its panels.

    The number of texts whose label the model predicts, and the permuted labels that the
    classes were tested with, if they were.
    """

    predicted: int | None
    order: Permuted | None


def project_facts(part: Points, panels: Sequence[Panel], beside: Beside) -> Facts:
    """Return the facts of one dataset in one model."""
    facts: dict[str, Any] = {
        "model": part.model,
        "dataset": part.dataset,
        "points": len(part),
    }
    if part.classes is not None:
        counts = part.classes.counts
        listed = [{"label": label, "points": count} for label, count in counts.items()]
        facts["classes"] = listed[:LISTED]
        facts["class_count"] = len(counts)
        single = [label for label, count in counts.items() if count == 1]
        if single:
            facts["alone_in_class"] = single[:LISTED]
    if beside.predicted is not None:
        facts["labels_predicted"] = beside.predicted
    if beside.order is not None:
        facts |= plain_fields(Grouped(**part.belonging.facts))
        facts["smallest_p"] = beside.order.smallest_p
        if beside.order.serial is not None:
            facts["serial_inflation"] = beside.order.serial
    pairs = zip(part.sites, panels, strict=True)
    equal = [site for site, panel in pairs if panel.picture is None]
    if equal:
        facts["all_equal_at"] = equal
    return {**facts, **_separation(part, panels), **_picture(part, panels)}


def _separation(part: Points, panels: Sequence[Panel]) -> Facts:
    scored = _scored(part, panels)
    if not scored:
        return {}
    best, scores = max(scored, key=lambda pair: pair[1]["silhouette"].value)
    p = dict(_corrected(part, panels))
    return {
        "separation": {
            "best": {**_scores_at(best, scores), "p_corrected": _known(p[best])},
            "first": _scores_at(*scored[0]),
            "last": _scores_at(*scored[-1]),
            "apart_at": [site for site in p if p[site] <= SIGNIFICANCE],
        }
    }


def _scores_at(site: Site, scores: Mapping[str, Score]) -> Facts:
    facts: dict[str, Any] = {"site": site}
    for name, score in scores.items():
        facts[name] = score.value
    facts["p"] = {name: _known(score.p) for name, score in scores.items()}
    return facts


def _known(number: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return number if number == number else None


def _picture(part: Points, panels: Sequence[Panel]) -> Facts:
    facts: dict[str, Any] = {}
    for name, key in (("trust", "trustworthiness"), ("spread", "seed_difference")):
        values = np.array([getattr(panel, name) for panel in panels])
        if np.isfinite(values).any():
            facts[key] = _range(part.sites, values)
    doubts = []
    for site, panel in zip(part.sites, panels, strict=True):
        if panel.doubt is not None:
            doubts.append({"site": site, **asdict(panel.doubt)})
    if doubts:
        facts["doubts"] = doubts
    return {"picture": facts} if facts else {}


def _range(sites: Sequence[Site], values: NDArray[np.float64]) -> Facts:
    """Return the lowest and the highest value with their sites, and the median."""
    lowest, highest = int(np.nanargmin(values)), int(np.nanargmax(values))
    return {
        "lowest": {"site": sites[lowest], "value": float(values[lowest])},
        "highest": {"site": sites[highest], "value": float(values[highest])},
        "median": float(np.nanmedian(values)),
    }


def tightness(parts: Sequence[Points], panels: Sequence[Sequence[Panel]]) -> Facts:
    """Return at which sites the classes of each of two datasets are tighter.

    The difference is not tested.
    """
    facts = []
    for model in dict.fromkeys(part.model for part in parts):
        pairs = zip(parts, panels, strict=True)
        of_model = [pair for pair in pairs if pair[0].model == model]
        if len(of_model) == 2 and (compared := _compare(model, of_model)):
            facts.append(compared)
    return {"tightness": facts} if facts else {}


def _compare(
    model: str, of_model: Sequence[tuple[Points, Sequence[Panel]]]
) -> Facts | None:
    """Compare two datasets at the sites where the classes of either are tight."""
    first, second = (dict(_scored(part, row)) for part, row in of_model)
    shared = []
    for site in first:
        if site in second:
            p_values = first[site]["within"].p, second[site]["within"].p
            if any(p <= SIGNIFICANCE for p in p_values):
                shared.append(site)
    if not shared:
        return None
    within = np.array(
        [
            [scores[site]["within"].value for site in shared]
            for scores in (first, second)
        ]
    )
    tighter = np.argmin(within, axis=0)
    datasets = []
    for number, (part, _) in enumerate(of_model):
        pairs = zip(shared, tighter, strict=True)
        datasets.append(
            {
                "dataset": part.dataset,
                "tighter_at": [site for site, side in pairs if side == number],
                "median_within": float(np.median(within[number])),
            }
        )
    return {"model": model, "sites": shared, "datasets": datasets}
