"""Table: the parts and their panels as one Dataset."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.project.judge import Panel
from hiddenscope.analyses.project.maps import Method
from hiddenscope.analyses.project.parts import Part, strings
from hiddenscope.errors import StatesError

if TYPE_CHECKING:
    import xarray

SCORES = {
    "silhouette": "silhouette of the classes in the full space",
    "neighbour": "share of points whose nearest other is of their class",
    "fisher": "variance between classes over that within",
    "within": "mean distance within classes over that of all pairs",
}
SIDES = {
    "": "",
    "_p": ", share of shuffled labels that reach it",
    "_chance": ", median of shuffled labels",
    "_high": ", reached by one in twenty shuffled labels",
}
PICTURE = {
    "distinct": "how many states differ",
    "trust": "share of the picture's neighbours that are neighbours indeed (trustworthiness)",
    "spread": "how far pictures of other seeds differ, 0 to 1",
    "shown": "silhouette of the classes in the picture",
}


def table(parts: Sequence[Part], panels: Sequence[Sequence[Panel]], method: Method) -> "xarray.Dataset":
    """Everything by model, dataset and site; the first two only where there are several."""
    import xarray

    models, datasets = (list(dict.fromkeys(getattr(part, name) for part in parts)) for name in ("model", "dataset"))
    sites = sorted({site for part in parts for site in part.sites})
    counts = [_count(parts, dataset) for dataset in datasets]
    starts = np.cumsum([0, *counts])
    places = np.full((2, len(models), len(sites), sum(counts)), np.nan, dtype=np.float32)
    names = [f"{score}{side}" for score in SCORES for side in SIDES] + [*PICTURE]
    numbers = {name: np.full((len(models), len(datasets), len(sites)), np.nan) for name in names}
    for part, own in zip(parts, panels, strict=True):
        model, dataset = models.index(part.model), datasets.index(part.dataset)
        for site, panel in zip(part.sites, own, strict=True):
            cell = model, dataset, sites.index(site)
            if panel.picture is not None:
                places[:, cell[0], cell[2], starts[dataset] : starts[dataset + 1]] = panel.picture.T
            for name, value in _numbers(panel).items():
                numbers[name][cell] = value
    point = "text" if parts[0].tokens is None else "token"
    said = method if method != "umap" else "UMAP"
    columns: dict[str, Any] = {
        axis: (("model", "site", point), places[k], {"long_name": f"{axis} in the picture by {said}"})
        for k, axis in enumerate("xy")
    }
    for name, values in numbers.items():
        if np.isfinite(values).any():
            columns[name] = (("model", "dataset", "site"), values, {"long_name": _long(name)})
    coords = {"model": models, "dataset": datasets, "site": [str(site) for site in sites], **_coords(parts, point)}
    data = xarray.Dataset(columns, coords, {"texts": _texts(parts), "method": method})
    single = [dim for dim in ("model", "dataset") if data.sizes[dim] == 1]
    return data.squeeze(single, drop=True)


def _count(parts: Sequence[Part], dataset: str) -> int:
    counts = {part.model: part.values.shape[1] for part in parts if part.dataset == dataset}
    if len(set(counts.values())) > 1:
        reason = "; ".join(f"{model} makes {count:,} tokens" for model, count in counts.items())
        raise StatesError("Points of several models", reason, "Take one token a text, not each.")
    return next(iter(counts.values()))


def _numbers(panel: Panel) -> dict[str, float]:
    found = {name: float(getattr(panel, name)) for name in PICTURE}
    for name, score in panel.scores.items():
        sides = (score.value, score.p, score.chance, score.high)
        found |= {f"{name}{side}": value for side, value in zip(SIDES, sides, strict=True)}
    return found


def _long(name: str) -> str:
    if name in PICTURE:
        return PICTURE[name]
    score, _, side = name.partition("_")
    return SCORES[score] + SIDES[f"_{side}" if side else ""]


def _firsts(parts: Sequence[Part]) -> list[Part]:
    """One part of each dataset: its rows are the same in every model."""
    return list({part.dataset: part for part in reversed(parts)}.values())[::-1]


def _coords(parts: Sequence[Part], point: str) -> dict[str, Any]:
    firsts = _firsts(parts)
    labels = [
        label for part in firsts for label in (part.classes.labels if part.classes else [""] * part.values.shape[1])
    ]
    names = [part.dataset for part in firsts for _ in range(part.values.shape[1])]
    coords: dict[str, Any] = {"label": (point, _objects(labels))}
    if len(firsts) > 1:
        coords["of"] = (point, _objects(names))
    if point == "token":
        tokens = [part.tokens for part in firsts if part.tokens is not None]
        offsets = np.cumsum([0, *(some.count for some in tokens)])
        coords["string"] = (point, _objects([string for part in firsts for string in strings(part)]))
        coords["text"] = (
            point,
            np.concatenate([some.text + offset for some, offset in zip(tokens, offsets, strict=False)]),
        )
        coords["position"] = (point, np.concatenate([some.positions for some in tokens]))
    return coords


def _texts(parts: Sequence[Part]) -> list[str]:
    return [text for part in _firsts(parts) for text in part.texts or ()]


def _objects(values: Sequence[str]) -> Any:
    return np.array([*values, None], dtype=object)[:-1]
