"""Labelled texts in two dimensions, layer by layer: views, findings and sections."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, summarise
from hiddenscope.views.depths import shown_first
from hiddenscope.views.drawing import as_prose, labels, quoted
from hiddenscope.views.independence import independence
from hiddenscope.views.standing import standing
from hiddenscope.views.values import Lines, Panels, Section, Series, View

if TYPE_CHECKING:
    import xarray

EXAMPLE = 80  # characters of a text that is shown as an example
APART = "apart"
LEVEL = 0.05  # the largest p-value that shows something
NOTED = 0.01  # a smallest possible p-value above this is told
METHODS = {"umap": "UMAP", "pca": "PCA", "pacmap": "PaCMAP", "tsne": "t-SNE"}
ALONG = {
    "silhouette": ("How far apart the classes are", "silhouette"),
    "neighbour": (
        "How often the nearest point is of the same class",
        "share of points",
    ),
    "within": (
        "How tight the classes are",
        "distance within classes over that of all pairs",
    ),
}


def views(result: Result) -> Iterator[View]:
    """One panel for each site, a row for each model and dataset; then the separation
    along the sites.
    """
    data = result.data
    rows = [
        (model, dataset)
        for model in _names(data, "model")
        for dataset in _names(data, "dataset")
    ]
    method = METHODS.get(str(data.attrs.get("method")), "projection")
    panels = [
        _panel(data, row, site) for row in rows for site in range(data.sizes["site"])
    ]
    shown = [panel for panel in panels if panel is not None]
    sites, names = ([panel[key] for panel in shown] for key in ("site", "row"))
    parts = dict(zip(map(_row_name, rows), result.facts["parts"], strict=True))
    found = [parts[row].get("separation") or {} for row in names]
    depths = [_depth(result, panel, shown) for panel in shown]
    yield Panels(
        _title(result, method),
        tuple(sites),
        np.stack([panel["points"] for panel in shown]),
        labels=_classes(data),
        texts=_texts(data),
        captions=tuple(panel["caption"] for panel in shown),
        messages=tuple(panel["message"] for panel in shown),
        rows=tuple(names) if len(rows) > 1 else (),
        rows_name=", ".join(dim for dim in ("model", "dataset") if dim in data.dims)
        or "row",
        note=_note(result),
        marks=tuple(
            APART if site in one.get("apart_at", ()) else ""
            for site, one in zip(sites, found, strict=True)
        ),
        depths=tuple(depths),
        first=shown_first(depths, names, _told(sites, found)),
    )
    for measure, (title, y_name) in ALONG.items():
        if measure in data:
            yield _along(
                data,
                rows,
                measure,
                f"{title}, along the layers of {_models(result)}",
                y_name,
            )


def _depth(
    result: Result, panel: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]
) -> float:
    """How deep a site lies in its model, from 0 to 1."""
    layers = [
        Site.parse(other["site"]).layer
        for other in shown
        if other["row"] == panel["row"]
    ]
    model = result.source.get("models", {}).get(panel["model"], result.source)
    depth = model.get("depth")
    last = max(
        [
            depth if isinstance(depth, int) else 0,
            *(layer for layer in layers if layer is not None),
        ]
    )
    layer = Site.parse(panel["site"]).layer
    return 1.0 if layer is None else layer / max(1, last)


def _told(sites: Sequence[str], found: Sequence[Facts]) -> list[int]:
    """The panels that the findings name: the best site of each row, and the first at
    which the classes are apart.
    """
    best = [
        panel
        for panel, site in enumerate(sites)
        if found[panel] and site == found[panel]["best"]["site"]
    ]
    return best + [
        panel
        for panel, site in enumerate(sites)
        if site in found[panel].get("apart_at", ())[:1]
    ]


def _names(data: "xarray.Dataset", dim: str) -> list[str | None]:
    return list(labels(data, dim)) if dim in data.dims else [None]


def _row(
    data: "xarray.Dataset", row: tuple[str | None, str | None]
) -> "xarray.Dataset":
    model, dataset = row
    chosen = {
        dim: name
        for dim, name in (("model", model), ("dataset", dataset))
        if name is not None
    }
    return data.sel(chosen)


def _row_name(row: tuple[str | None, str | None]) -> str:
    return ", ".join(name for name in row if name)


def _panel(
    data: "xarray.Dataset", row: tuple[str | None, str | None], site: int
) -> dict[str, Any] | None:
    """One panel; None for a site that this model does not have."""
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
        "row": _row_name(row),
        "model": row[0],
    }


def _caption(here: "xarray.Dataset") -> str:
    scores = []
    for name in ("silhouette", "neighbour"):
        if name in here and np.isfinite(value := float(here[name])):
            p = float(here[f"{name}_p"]) if f"{name}_p" in here else np.nan
            scores.append(
                f"{name} {value:.2f} (p {p:.2g})"
                if np.isfinite(p)
                else f"{name} {value:.2f}"
            )
    if "trust" in here and np.isfinite(trust := float(here["trust"])):
        scores.append(f"trust {trust:.2f}")
    return "\n".join(scores)


def _classes(data: "xarray.Dataset") -> tuple[str, ...]:
    names = data["label"].to_numpy().tolist()
    return tuple(names) if any(names) else ()


def _texts(data: "xarray.Dataset") -> tuple[str, ...]:
    texts = data.attrs.get("texts", [])
    if "token" in data.dims:
        strings, of = (
            data["string"].to_numpy().tolist(),
            data["text"].to_numpy().tolist(),
        )
        return tuple(
            f"{s} — {texts[k]}" if k < len(texts) else s
            for s, k in zip(strings, of, strict=True)
        )
    return tuple(texts) if len(texts) == data.sizes["text"] else ()


def _models(result: Result) -> str:
    return str(result.source.get("model", "the model"))


def _title(result: Result, method: str) -> str:
    """Which texts, in which models, and by which method."""
    names = list(
        dict.fromkeys(
            str(part["dataset"]) for part in result.facts["parts"] if part["dataset"]
        )
    )
    shown = (
        " and ".join(names)
        if 0 < len(names) <= 3
        else f"{len(names)} datasets"
        if names
        else "Texts"
    )
    return (
        f"{shown} in {_models(result)}: {method} of {_points(result)}, layer by layer"
    )


def _points(result: Result) -> str:
    """What a point is, in words."""
    return standing(result.facts["token"])


def _named(result: Result) -> Iterator[tuple[str, Facts]]:
    """The facts of each dataset in each model, with the name that tells it from the
    others.
    """
    parts = result.facts["parts"]
    several = [
        key for key in ("model", "dataset") if len({part[key] for part in parts}) > 1
    ]
    for part in parts:
        yield ", ".join(part[key] for key in several), part


def _sites(names: Sequence[str]) -> str:
    return summarise(map(Site.parse, names))


def _note(result: Result) -> str:
    sentences = ["Trust is the trustworthiness of the picture."]
    if _classes(result.data):
        sentences = [
            "Scores are those of the full space, and p-values are for one site alone."
            " Neighbour is the share of points whose nearest point of another text or"
            " group is of their class; trust is the trustworthiness of the picture."
        ]
    if any(
        part.get("separation", {}).get("apart_at") for part in result.facts["parts"]
    ):
        sentences.append(
            f"Panels marked “{APART}” have classes apart by the silhouette (p at most"
            " 0.05, corrected for all sites)."
        )
    if len(result.facts["parts"]) > 1 and "model" in result.data.dims:
        sentences.append(
            "A percentage is the depth of a site in its model; panels of one column are"
            " about as deep."
        )
    for name, part in _named(result):
        doubts = part.get("picture", {}).get("doubts", [])
        sentences += [
            f"{f'{name}, ' if name else ''}{doubt['site']}: {_doubt(doubt)}."
            for doubt in doubts[:3]
        ]
        if len(doubts) > 3:
            sentences.append(f"The same holds at {len(doubts) - 3} more sites.")
    return " ".join(sentences)


def _doubt(doubt: Facts) -> str:
    """What a picture shows and the full space does not hold."""
    if doubt["groups"] is None:
        return (
            f"the classes look apart (silhouette {doubt['shown']:.2f}), but not in the"
            f" full space ({doubt['full_space']:.2f}, p {doubt['p']:.2g})"
        )
    return (
        f"the picture shows {doubt['groups']} groups (silhouette {doubt['shown']:.2f})"
        f" that are hardly apart in the full space ({doubt['full_space']:.2f})"
    )


def _along(
    data: "xarray.Dataset",
    rows: list[tuple[str | None, str | None]],
    measure: str,
    title: str,
    y_name: str,
) -> Lines:
    """A measure along the sites, and what one in twenty shuffled labels reaches."""
    series = []
    for row in rows:
        here = _row(data, row)
        series.append(Series(_row_name(row) or "classes", here[measure].to_numpy()))
        if f"{measure}_high" not in here:
            continue
        name = (
            f"{_row_name(row)}, shuffled labels"
            if _row_name(row)
            else "shuffled labels"
        )
        series.append(
            Series(
                f"{name}, one in twenty",
                here[f"{measure}_high"].to_numpy(),
                style="dash",
            )
        )
    return Lines(title, labels(data, "site"), tuple(series), y_name=y_name)


def findings(result: Result) -> Iterator[str]:
    """Where the classes are apart, and which pictures not to trust."""
    for name, part in _named(result):
        yield from _findings_of(f" of {quoted(name)}" if name else "", part)
    for comparison in result.facts.get("tightness", []):
        yield _tightness(comparison)
    if not _classes(result.data):
        points = sum(part["points"] for part in result.facts["parts"])
        yield (
            f"The picture shows {points:,} points without labels, so nothing is said"
            " about classes."
        )


def _findings_of(of: str, part: Facts) -> Iterator[str]:
    if part.get("class_count") == 1:
        yield f"The points{of} are all of one class."
    if predicted := part.get("labels_predicted"):
        yield (
            f"For {predicted} of {part['points']} texts{of} the model predicts the"
            " label as the next token."
        )
    if equal := part.get("all_equal_at"):
        yield f"All states{of} are equal at {_sites(equal)}."
    if separation := part.get("separation"):
        yield _separation(of, separation)
        yield from _limits(of, part)
    if doubts := part.get("picture", {}).get("doubts"):
        yield (
            f"Do not trust the pictures{of} at"
            f" {_sites([doubt['site'] for doubt in doubts])}: {_doubt(doubts[0])}."
        )


def _separation(of: str, separation: Facts) -> str:
    """Where classes are apart by the silhouette, and whether nearest points say so too."""
    best = separation["best"]
    if separation["apart_at"]:
        where = _sites(separation["apart_at"])
        apart = (
            f"The classes{of} are apart at {where} by the silhouette (p at most 0.05,"
            " corrected for all sites)"
        )
    else:
        apart = f"No site is shown to set the classes{of} apart"
    neighbour, p = best["neighbour"], best["p"]["neighbour"]
    if best["p_corrected"] is None:
        return (
            f"The largest silhouette of the classes{of} is {best['silhouette']:.2f}, at"
            f" {best['site']}. There is no p-value: the labels can be permuted in no"
            " other way."
        )
    if p is None:
        p = float("nan")
    differs = (
        ", so nearest neighbours alone do not show it"
        if separation["apart_at"] and p > 0.05
        else ""
    )
    return (
        f"{apart}. The largest silhouette is {best['silhouette']:.2f}, at"
        f" {best['site']}; there the nearest neighbour of {neighbour:.0%} of the points"
        f" has the same class (p = {p:.2g} at that site){differs}."
    )


def _limits(of: str, part: Facts) -> Iterator[str]:
    """What the test takes for granted, and how small its p-values can be."""
    yield independence(part, of)
    if copies := part.get("copies"):
        yield (
            f"{copies:,} {'text' if copies == 1 else 'texts'}{of} came again with the"
            " same label; each counts once."
        )
    smallest = part.get("smallest_p")
    if smallest is not None and smallest > NOTED:
        cannot = ", so nothing can be shown" if smallest > LEVEL else ""
        yield (
            f"The labels{of} can be permuted in few ways: the smallest p-value that is"
            f" possible is {smallest:.2g}{cannot}."
        )


def _tightness(comparison: Facts) -> str:
    sides = [
        f"{side['median_within']:.2f} for {quoted(side['dataset'])}"
        for side in comparison["datasets"]
    ]
    counts = [
        f"for {quoted(side['dataset'])} at {len(side['tighter_at'])} sites"
        for side in comparison["datasets"]
    ]
    return (
        f"In {comparison['model']}, the mean distance within classes, divided by that"
        f" of all pairs, is {' and '.join(sides)} (median over"
        f" {len(comparison['sites'])} sites). It is smaller {' and '.join(counts)}. The"
        " difference was not tested."
    )


def sections(result: Result) -> Iterator[Section]:
    """The panels with the findings, and the separation along the layers."""
    panels, *along = views(result)
    method = METHODS.get(str(result.data.attrs.get("method")), "projection")
    point = (
        _points(result)
        .replace("each text", "one text")
        .replace("every token", "one token")
    )
    apart = [
        sentence
        for name, part in _named(result)
        for sentence in _verdicts(f" of {quoted(name)}" if name else "", part)
    ]
    coloured = f", coloured by its class{_class_names(result)}"
    scores = (
        "the scores beneath each panel are those of the full space, with p-values from"
        " shuffled labels"
    )
    if not _classes(result.data):
        coloured = ""
        scores = (
            "beneath each panel stands how far its neighbours are those of the full"
            " space"
        )
    reading = (
        f"Every panel is one layer, drawn by {method}. Every point is the hidden state"
        f" of {point}{coloured}. {_examples(result)}A picture in two dimensions can"
        f" show groups that are not there, so {scores}."
    )
    told = list(findings(result))
    first = apart if along and apart else told
    title = (
        "At which layers are the classes apart?"
        if apart
        else "How do the texts lie in every layer?"
    )
    yield Section(title, as_prose(first), (panels,), reading)
    if along:
        rest = " ".join(sentence for sentence in told if sentence not in first)
        how = (
            "The lines are the same scores along the layers. At any one layer, one in"
            " twenty shuffled labels reaches the dashed line."
        )
        yield Section(
            "The scores along the layers", rest, tuple(along), how, folded=True
        )


def _verdicts(of: str, part: Facts) -> Iterator[str]:
    """Where the classes are apart, and nothing else."""
    if separation := part.get("separation"):
        yield _separation(of, separation)


def _class_names(result: Result) -> str:
    """The classes in brackets, where they are few."""
    names = list(dict.fromkeys(name for name in _classes(result.data) if name))
    return (
        f" ({', '.join(quoted(name) for name in names)})" if 0 < len(names) <= 4 else ""
    )


def _examples(result: Result) -> str:
    """A text of each dataset, so that a reader knows what the points are."""
    texts, data = result.data.attrs.get("texts", []), result.data
    if "text" not in data.dims or len(texts) != data.sizes["text"]:
        return ""
    names = data["of"].to_numpy().tolist() if "of" in data else [""] * len(texts)
    first = dict(reversed(list(zip(names, texts, strict=True))))
    shown = [
        f"{f'{quoted(name)}, ' if name else ''}{quoted(_short(text))}"
        for name, text in sorted(first.items())
    ]
    return f"A text, for example: {'; '.join(shown)}. " if len(shown) <= 3 else ""


def _short(text: str) -> str:
    return text if len(text) <= EXAMPLE else f"{text[: EXAMPLE - 1]}…"
