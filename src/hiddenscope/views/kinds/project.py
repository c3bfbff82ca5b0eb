"""Points in two dimensions, layer by layer, shown and told."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import labels
from hiddenscope.views.values import Lines, Panels, Section, Series, View

if TYPE_CHECKING:
    import xarray

METHODS = {"umap": "UMAP", "pca": "PCA", "pacmap": "PaCMAP", "tsne": "t-SNE"}
ALONG = {
    "silhouette": ("How far the classes are apart", "silhouette"),
    "neighbour": ("How often the nearest point is of the same class", "share of points"),
    "within": ("How tight the classes are", "distance within classes over that of all pairs"),
}
BY_CHANCE = 0.05


def views(result: Result) -> Iterator[View]:
    """One panel a site, a row for every model and dataset; then the separation along the sites."""
    data = result.data
    rows = [(model, dataset) for model in _names(data, "model") for dataset in _names(data, "dataset")]
    method = METHODS.get(str(data.attrs.get("method")), "projection")
    panels = [_panel(data, row, site) for row in rows for site in range(data.sizes["site"])]
    there = [panel for panel in panels if panel is not None]
    yield Panels(
        f"{_title(result)}: {method} of every layer",
        tuple(panel["site"] for panel in there),
        np.stack([panel["points"] for panel in there]),
        labels=_classes(data),
        texts=_texts(data),
        captions=tuple(panel["caption"] for panel in there),
        messages=tuple(panel["message"] for panel in there),
        rows=tuple(panel["row"] for panel in there) if len(rows) > 1 else (),
        note=_note(result, method),
    )
    for measure, (title, said) in ALONG.items():
        if measure in data:
            yield _along(data, rows, measure, f"{title}, along the layers of {_models(result)}", said)


def _names(data: "xarray.Dataset", dim: str) -> list[str | None]:
    return list(labels(data, dim)) if dim in data.dims else [None]


def _row(data: "xarray.Dataset", row: tuple[str | None, str | None]) -> "xarray.Dataset":
    model, dataset = row
    chosen = {dim: name for dim, name in (("model", model), ("dataset", dataset)) if name is not None}
    return data.sel(chosen)


def _said(row: tuple[str | None, str | None]) -> str:
    return ", ".join(name for name in row if name)


def _panel(data: "xarray.Dataset", row: tuple[str | None, str | None], site: int) -> dict[str, Any] | None:
    """One panel; None for a site that this model has not."""
    here = _row(data, row).isel(site=site)
    points = np.stack([here["x"].to_numpy(), here["y"].to_numpy()], axis=-1)
    if row[1] is not None:
        points = np.where((data["of"].to_numpy() == row[1])[:, None], points, np.nan)
    if np.isnan(here["distinct"].item()):
        return None
    empty = not np.isfinite(points).any()
    return {
        "site": str(here["site"].item()),
        "points": points,
        "caption": "" if empty else _caption(here),
        "message": "All states are equal here" if empty else "",
        "row": _said(row),
    }


def _caption(here: "xarray.Dataset") -> str:
    said = []
    for name, short in (("silhouette", "silhouette"), ("neighbour", "neighbour")):
        if name in here and np.isfinite(value := float(here[name])):
            p = float(here[f"{name}_p"])
            said.append(f"{short} {value:.2f}, p {p:.3f}" if p < 0.1 else f"{short} {value:.2f}, by chance")
    if "trust" in here and np.isfinite(trust := float(here["trust"])):
        said.append(f"trust {trust:.2f}")
    return "; ".join(said)


def _classes(data: "xarray.Dataset") -> tuple[str, ...]:
    said = data["label"].to_numpy().tolist()
    return tuple(said) if any(said) else ()


def _texts(data: "xarray.Dataset") -> tuple[str, ...]:
    texts = data.attrs.get("texts", [])
    if "token" in data.dims:
        strings, of = data["string"].to_numpy().tolist(), data["text"].to_numpy().tolist()
        return tuple(f"{s} — {texts[k]}" if k < len(texts) else s for s, k in zip(strings, of, strict=True))
    return tuple(texts) if len(texts) == data.sizes["text"] else ()


def _models(result: Result) -> str:
    return str(result.source.get("model", "the model"))


def _title(result: Result) -> str:
    return f"{result.facts['points']} in {_models(result)}".replace("the last", "The last", 1)


def _parts(result: Result) -> dict[str, dict[str, Any]]:
    """The facts of each part, by its name; of one alone, those of the result."""
    if "picture" in result.facts or "separation" in result.facts or "classes" in result.facts:
        return {"": dict(result.facts)}
    return {k: v for k, v in result.facts.items() if isinstance(v, dict) and "points" in v}


def _note(result: Result, method: str) -> str:
    said = [
        "Scores are of the full space, p from shuffled labels; trust is how many neighbours in the picture are real."
    ]
    for name, part in _parts(result).items():
        doubts = part.get("picture", {}).get("shown but not there", {})
        for site, doubt in list(doubts.items())[:3]:
            said.append(f"{f'{name}, ' if name else ''}{site}: {doubt}.")
        if len(doubts) > 3:
            said.append(f"So it is at {len(doubts) - 3} more.")
    return " ".join(said)


def _along(
    data: "xarray.Dataset", rows: list[tuple[str | None, str | None]], measure: str, title: str, said: str
) -> Lines:
    """A measure along the sites, with the band in which nine of ten shuffled labels fall below it."""
    series = []
    for row in rows:
        here = _row(data, row)
        series.append(Series(_said(row) or "classes", here[measure].to_numpy()))
        name = f"{_said(row)}, shuffled labels" if _said(row) else "shuffled labels"
        series.append(Series(f"{name}, one in twenty", here[f"{measure}_high"].to_numpy(), style="dash"))
    return Lines(title, labels(data, "site"), tuple(series), y_name=said)


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown = tuple(views(result))
    method = METHODS.get(str(result.data.attrs.get("method")), "projection")
    opening = (
        f"One panel a layer, by {method}: every point is {_one(result)}, coloured by its class, and the panels are "
        "turned so that points do not jump from one to the next. Pictures in two dimensions can lie, so under each "
        "stands what holds in the full space, beside what shuffled labels would give."
    )
    told = " ".join(sentence for name, part in _parts(result).items() for sentence in _sentences(name, part))
    yield Section("Where the classes part", f"{opening}\n\n{told}", shown[:1])
    if shown[1:]:
        tight = " ".join(_tightness(result.facts.get("tightness", {})))
        how = "The same along the layers. A dashed line is what one in twenty shuffled labels reaches."
        yield Section("The separation along the layers", f"{how} {tight}".strip(), shown[1:])


def _one(result: Result) -> str:
    return str(result.facts["points"]).replace("each text", "one text").replace("every token", "one token")


def _sentences(name: str, part: dict[str, Any]) -> Iterator[str]:
    of = f" of {name}" if name else ""
    if (choice := part.get("label is the model's first choice")) and not choice.startswith("0 "):
        yield f"For {choice}{of} the label is the very word that the model would go on with."
    if equal := part.get("all states are equal at"):
        yield f"At `{equal}` all states{of} are equal."
    separation = part.get("separation")
    if isinstance(separation, dict):
        best = separation["best"]
        yield (
            f"The classes{of} are apart at {separation['apart at']}, most at `{best['site']}` (silhouette "
            f"{best['silhouette']:.2f}, nearest neighbour right for {best['neighbour']:.0%})."
        )
    if doubts := part.get("picture", {}).get("shown but not there"):
        yield f"Do not trust what the pictures{of} show at {', '.join(f'`{site}`' for site in list(doubts)[:5])}."


def _tightness(facts: dict[str, Any]) -> Iterator[str]:
    for model, said in facts.items():
        tighter = [
            f"tighter {key.removeprefix('tighter ')} at {value}" for key, value in said.items() if "tighter in" in key
        ]
        yield f"In `{model}` the classes are {' and '.join(tighter)}."
