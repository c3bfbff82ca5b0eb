"""Projections: labelled texts in two dimensions, layer by layer."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import labels
from hiddenscope.results.pictures import Lines, Panels, Series, View, shown_first
from hiddenscope.results.report import Grouped, read_report
from hiddenscope.results.sentences import (
    as_prose,
    independence,
    model_name,
    plural,
    quote,
    shortened,
    site_list,
    standing,
)
from hiddenscope.sites import Site

if TYPE_CHECKING:
    import xarray

    from hiddenscope.analyses.project.facts import (
        DoubtFacts,
        ProjectFacts,
        ProjectPartFacts,
        SeparationFacts,
        TightnessFacts,
    )

# An example is cut here, in characters.
EXAMPLE = 80
MOST_EXAMPLES = 3
MOST_DOUBTS = 3
# So many classes are named beside the picture, and no more.
MOST_CLASSES = 4
# A title names so many datasets.
MOST_DATASETS = 3
APART = "apart"
# The largest p-value that shows something.
LEVEL = 0.05
# A finding says so if no p-value can be smaller than this.
NOTED = 0.01
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

Row: TypeAlias = tuple[str | None, str | None]
"""A model and a dataset; None where there is only one."""


class Panel(NamedTuple):
    """One scatter, with what belongs to it."""

    site: str
    row: Row
    points: NDArray[np.float64]
    caption: str
    message: str


def views(result: Result) -> Iterator[View]:
    """Yield one panel for each site, a row for each model and dataset; then the
    separation along the sites.
    """
    data = result.data
    rows = list(product(_names(data, "model"), _names(data, "dataset")))
    yield _panels(result, rows)
    for measure, (title, y_name) in ALONG.items():
        if measure in data:
            title = f"{title}, along the layers of {model_name(result)}"
            series = _along(data, rows, measure)
            yield Lines(title, labels(data, "site"), tuple(series), y_name=y_name)


def _panels(result: Result, rows: Sequence[Row]) -> Panels:
    data, facts = result.data, cast("ProjectFacts", result.facts)
    panels = []
    separations: list[SeparationFacts | None] = []
    for row, part in zip(rows, facts["parts"], strict=True):
        for place in range(data.sizes["site"]):
            panel = _panel(data, row, place)
            if panel is not None:
                panels.append(panel)
                separations.append(part.get("separation"))
    sites = [panel.site for panel in panels]
    names = [_row_name(panel.row) for panel in panels]
    depths = [_depth(result, panel, panels) for panel in panels]
    marks = []
    for site, separation in zip(sites, separations, strict=True):
        is_apart = separation is not None and site in separation["apart_at"]
        marks.append(APART if is_apart else "")
    dims = [dim for dim in ("model", "dataset") if dim in data.dims]
    return Panels(
        _title(result),
        tuple(sites),
        np.stack([panel.points for panel in panels]).astype(np.float32),
        labels=_classes(data),
        texts=_texts(data),
        captions=tuple(panel.caption for panel in panels),
        messages=tuple(panel.message for panel in panels),
        rows=tuple(names) if len(rows) > 1 else (),
        rows_name=", ".join(dims) or "row",
        note=_note(result),
        marks=tuple(marks),
        depths=tuple(depths),
        first=shown_first(depths, names, _in_findings(sites, separations)),
    )


def _panel(data: "xarray.Dataset", row: Row, place: int) -> Panel | None:
    """Return one panel; None for a site that this model does not have."""
    here = _row(data, row).isel(site=place)
    if np.isnan(here["distinct"].item()):
        return None
    points = np.stack([here["x"].to_numpy(), here["y"].to_numpy()], axis=-1)
    dataset = row[1]
    if dataset is not None:
        is_of_dataset = data["of"].to_numpy() == dataset
        points = np.where(is_of_dataset[:, None], points, np.nan)
    name = str(here["site"].item())
    if not np.isfinite(points).any():
        return Panel(name, row, points, "", "All states are equal here")
    return Panel(name, row, points, _caption(here), "")


def _depth(result: Result, panel: Panel, panels: Sequence[Panel]) -> float:
    """Return how deep a site lies in its model, from 0 to 1."""
    layer = Site.parse(panel.site).layer
    if layer is None:
        return 1.0
    source = result.source.get("models", {}).get(panel.row[0], result.source)
    depth = source.get("depth")
    last = depth if isinstance(depth, int) else 0
    # Where the source does not say how deep the model is, its deepest site counts.
    for other in panels:
        if other.row == panel.row:
            last = max(last, Site.parse(other.site).layer or 0)
    return layer / max(1, last)


def _in_findings(
    sites: Sequence[str], separations: Sequence["SeparationFacts | None"]
) -> list[int]:
    """Return the panels that the findings name: the best site of each row, and the
    first at which the classes are apart.
    """
    best, first_apart = [], []
    for panel, separation in enumerate(separations):
        if separation is None:
            continue
        if sites[panel] == separation["best"]["site"]:
            best.append(panel)
        if sites[panel] in separation["apart_at"][:1]:
            first_apart.append(panel)
    return best + first_apart


def _names(data: "xarray.Dataset", dim: str) -> Sequence[str | None]:
    return labels(data, dim) if dim in data.dims else (None,)


def _row(data: "xarray.Dataset", row: Row) -> "xarray.Dataset":
    named = zip(("model", "dataset"), row, strict=True)
    return data.sel({dim: name for dim, name in named if name is not None})


def _row_name(row: Row) -> str:
    return ", ".join(name for name in row if name)


def _caption(here: "xarray.Dataset") -> str:
    scores = []
    for name in ("silhouette", "neighbour"):
        value, p = _number(here, name), _number(here, f"{name}_p")
        if np.isfinite(value):
            p_value = f" (p {p:.2g})" if np.isfinite(p) else ""
            scores.append(f"{name} {value:.2f}{p_value}")
    trust = _number(here, "trust")
    if np.isfinite(trust):
        scores.append(f"trust {trust:.2f}")
    return "\n".join(scores)


def _number(here: "xarray.Dataset", name: str) -> float:
    return float(here[name]) if name in here else float("nan")


def _classes(data: "xarray.Dataset") -> tuple[str, ...]:
    names = data["label"].to_numpy().tolist()
    return tuple(names) if any(names) else ()


def _texts(data: "xarray.Dataset") -> tuple[str, ...]:
    texts = data.attrs.get("texts", [])
    if "token" not in data.dims:
        return tuple(texts) if len(texts) == data.sizes["text"] else ()
    strings = data["string"].to_numpy().tolist()
    numbers = data["text"].to_numpy().tolist()
    points = []
    for string, number in zip(strings, numbers, strict=True):
        in_text = f" — {texts[number]}" if number < len(texts) else ""
        points.append(f"{string}{in_text}")
    return tuple(points)


def _method(result: Result) -> str:
    return METHODS.get(str(result.data.attrs.get("method")), "projection")


def _title(result: Result) -> str:
    """Name the texts, the models and the method."""
    facts = cast("ProjectFacts", result.facts)
    datasets = [str(part["dataset"]) for part in facts["parts"] if part["dataset"]]
    names = list(dict.fromkeys(datasets))
    if not names:
        texts = "Texts"
    elif len(names) <= MOST_DATASETS:
        texts = " and ".join(names)
    else:
        texts = f"{len(names)} datasets"
    return (
        f"{texts} in {model_name(result)}: {_method(result)} of"
        f" {standing(facts['token'])}, layer by layer"
    )


def _named_parts(result: Result) -> Iterator[tuple[str, "ProjectPartFacts"]]:
    """Yield each dataset in each model, with the name that tells it from the others."""
    parts = cast("ProjectFacts", result.facts)["parts"]
    several_models = len({part["model"] for part in parts}) > 1
    several_datasets = len({part["dataset"] for part in parts}) > 1
    for part in parts:
        names = []
        if several_models:
            names.append(part["model"])
        if several_datasets:
            names.append(part["dataset"])
        yield ", ".join(names), part


def _of(name: str) -> str:
    return f" of {quote(name)}" if name else ""


def _note(result: Result) -> str:
    parts = cast("ProjectFacts", result.facts)["parts"]
    sentences = ["Trust is the trustworthiness of the picture."]
    if _classes(result.data):
        sentences = [
            "Scores are those of the full space, and p-values are for one site alone."
            " Neighbour is the share of points whose nearest point of another text or"
            " group is of their class; trust is the trustworthiness of the picture."
        ]
    if any(_apart_at(part) for part in parts):
        sentences.append(
            f"Panels marked “{APART}” have classes apart by the silhouette (p at most"
            " 0.05, corrected for all sites)."
        )
    if len(parts) > 1 and "model" in result.data.dims:
        sentences.append(
            "A percentage is the depth of a site in its model; panels of one column are"
            " about as deep."
        )
    for name, part in _named_parts(result):
        where = f"{name}, " if name else ""
        doubts = part.get("picture", {}).get("doubts", [])
        for doubt in doubts[:MOST_DOUBTS]:
            sentences.append(f"{where}{doubt['site']}: {_doubt(doubt)}.")
        more = len(doubts) - MOST_DOUBTS
        if more > 0:
            sentences.append(f"The same holds at {more} more sites.")
    return " ".join(sentences)


def _apart_at(part: "ProjectPartFacts") -> list[str]:
    return part["separation"]["apart_at"] if "separation" in part else []


def _doubt(doubt: "DoubtFacts") -> str:
    """Say what a picture shows and the full space does not hold."""
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
    data: "xarray.Dataset", rows: Sequence[Row], measure: str
) -> Iterator[Series]:
    """Yield a measure along the sites, and what one in twenty shuffles reaches."""
    for row in rows:
        here, name = _row(data, row), _row_name(row)
        yield Series(name or "classes", here[measure].to_numpy())
        if f"{measure}_high" in here:
            shuffled = f"{name}, shuffled labels" if name else "shuffled labels"
            high = here[f"{measure}_high"].to_numpy()
            yield Series(f"{shuffled}, one in twenty", high, style="dash")


def findings(result: Result) -> Iterator[str]:
    """Yield where the classes are apart, and which pictures not to trust."""
    facts = cast("ProjectFacts", result.facts)
    for name, part in _named_parts(result):
        yield from _findings_of(_of(name), part)
    for comparison in facts.get("tightness", []):
        yield _tightness(comparison)
    if not _classes(result.data):
        points = sum(part["points"] for part in facts["parts"])
        yield (
            f"The picture shows {points:,} points without labels, so nothing is said"
            " about classes."
        )


def _findings_of(of: str, part: "ProjectPartFacts") -> Iterator[str]:
    if part.get("class_count") == 1:
        yield f"The points{of} are all of one class."
    predicted = part.get("labels_predicted")
    if predicted:
        yield (
            f"For {predicted} of {part['points']} texts{of} the model predicts the"
            " label as the next token."
        )
    equal = part.get("all_equal_at")
    if equal:
        yield f"All states{of} are equal at {site_list(equal)}."
    separation = part.get("separation")
    if separation:
        yield _separation(of, separation)
        yield from _limits(of, part)
    doubts = part.get("picture", {}).get("doubts")
    if doubts:
        sites = site_list([doubt["site"] for doubt in doubts])
        yield f"Do not trust the pictures{of} at {sites}: {_doubt(doubts[0])}."


def _separation(of: str, separation: "SeparationFacts") -> str:
    """Say where classes are apart by the silhouette, and whether neighbours agree."""
    best, apart_at = separation["best"], separation["apart_at"]
    if best["p_corrected"] is None:
        return (
            f"The largest silhouette of the classes{of} is {best['silhouette']:.2f}, at"
            f" {best['site']}. There is no p-value: the labels can be permuted in no"
            " other way that keeps the sizes of the classes and the order of the texts."
        )
    verdict = f"No site is shown to set the classes{of} apart"
    if apart_at:
        verdict = (
            f"The classes{of} are apart at {site_list(apart_at)} by the silhouette (p"
            " at most 0.05, corrected for all sites)"
        )
    p = best["p"]["neighbour"]
    if p is None:
        p = float("nan")
    differs = ""
    if apart_at and p > LEVEL:
        differs = ", so nearest neighbours alone do not show it"
    return (
        f"{verdict}. The largest silhouette is {best['silhouette']:.2f}, at"
        f" {best['site']}; there the nearest neighbour of {best['neighbour']:.0%} of"
        f" the points has the same class (p = {p:.2g} at that site){differs}."
    )


def _limits(of: str, part: "ProjectPartFacts") -> Iterator[str]:
    """Yield what the test takes for granted, and how small its p-values can be."""
    yield independence(read_report(Grouped, part), of)
    copies = part.get("copies")
    if copies:
        yield (
            f"{copies:,} {plural(copies, 'text')}{of} came again with the same label;"
            " each counts once."
        )
    smallest = part.get("smallest_p")
    if smallest is not None and smallest > NOTED:
        cannot = ", so nothing can be shown" if smallest > LEVEL else ""
        yield (
            f"The labels{of} can be permuted in few ways: the smallest p-value that is"
            f" possible is {smallest:.2g}{cannot}."
        )


def _tightness(comparison: "TightnessFacts") -> str:
    medians, counts = [], []
    for side in comparison["datasets"]:
        name = quote(side["dataset"])
        medians.append(f"{side['median_within']:.2f} for {name}")
        counts.append(f"for {name} at {len(side['tighter_at'])} sites")
    return (
        f"In {comparison['model']}, the mean distance within classes, divided by that"
        f" of all pairs, is {' and '.join(medians)} (median over"
        f" {len(comparison['sites'])} sites). It is smaller {' and '.join(counts)}. The"
        " difference was not tested."
    )


def sections(result: Result) -> Iterator[Section]:
    """Yield the panels with the findings, and the separation along the layers."""
    panels, *along = views(result)
    verdicts = []
    for name, part in _named_parts(result):
        if part.get("separation"):
            verdicts.append(_separation(_of(name), part["separation"]))
    sentences = list(findings(result))
    first = verdicts if along and verdicts else sentences
    title = "How do the texts lie in every layer?"
    if verdicts:
        title = "At which layers are the classes apart?"
    yield Section(title, as_prose(first), (panels,), _reading(result))
    if along:
        yield Section(
            "The scores along the layers",
            " ".join(sentence for sentence in sentences if sentence not in first),
            tuple(along),
            "The lines are the same scores along the layers. At any one layer, one in"
            " twenty shuffled labels reaches the dashed line.",
            folded=True,
        )


def _reading(result: Result) -> str:
    point = standing(result.facts["token"])
    point = point.replace("each text", "one text").replace("every token", "one token")
    colours = ""
    scores = (
        "beneath each panel stands how far its neighbours are those of the full space"
    )
    if _classes(result.data):
        colours = f", coloured by its class{_class_names(result)}"
        scores = (
            "the scores beneath each panel are those of the full space, with p-values"
            " from shuffled labels"
        )
    return (
        f"Every panel is one layer, drawn by {_method(result)}. Every point is the"
        f" hidden state of {point}{colours}. {_examples(result)}A picture in two"
        f" dimensions can show groups that are not there, so {scores}."
    )


def _class_names(result: Result) -> str:
    """Return the classes in brackets, where they are few."""
    classes = dict.fromkeys(_classes(result.data))
    names = [quote(name) for name in classes if name]
    return f" ({', '.join(names)})" if 0 < len(names) <= MOST_CLASSES else ""


def _examples(result: Result) -> str:
    """Quote a text of each dataset, so that a reader knows what the points are."""
    texts: list[Any] = result.data.attrs.get("texts", [])
    data = result.data
    if "text" not in data.dims or len(texts) != data.sizes["text"]:
        return ""
    datasets = [""] * len(texts)
    if "of" in data:
        datasets = data["of"].to_numpy().tolist()
    first_texts: dict[str, str] = {}
    for dataset, text in zip(datasets, texts, strict=True):
        first_texts.setdefault(dataset, text)
    if len(first_texts) > MOST_EXAMPLES:
        return ""
    examples = []
    for dataset, text in sorted(first_texts.items()):
        name = f"{quote(dataset)}, " if dataset else ""
        examples.append(f"{name}{quote(shortened(text, EXAMPLE))}")
    return f"A text, for example: {'; '.join(examples)}. "
