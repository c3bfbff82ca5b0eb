"""The story of a projection: how texts lie in every layer, and what to trust."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from hiddenscope.results import Aside, Explanation, Report, Result, Section, frozen
from hiddenscope.results.drawing import labels
from hiddenscope.results.pictures import Lines, Panels, Series, shown_first
from hiddenscope.results.report import Extremes, Grouped, Pooled
from hiddenscope.results.sentences import (
    counted,
    independence,
    model_name,
    plural,
    quote,
    ruled,
    shortened,
    site_list,
    standing,
)
from hiddenscope.sites import Site

if TYPE_CHECKING:
    import xarray

# An example is cut here, in characters.
EXAMPLE = 80
MOST_EXAMPLES = 3
MOST_DOUBTS = 3
# This many classes are named beside the picture, and no more.
MOST_CLASSES = 4
# A title names this many datasets.
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

Row: TypeAlias = tuple[str, str]
"""A model and a dataset; empty where there is only one."""


@frozen
class PointClass:
    """How many points have a label."""

    label: str
    points: int


@frozen
class SeparationP:
    """The p-value of each score; None where labels cannot be permuted."""

    silhouette: float | None
    neighbour: float | None
    fisher: float | None
    within: float | None


@frozen
class SeparationScores:
    """How far apart the classes are at a site."""

    site: str
    silhouette: float
    neighbour: float
    fisher: float
    within: float
    p: SeparationP


@frozen
class BestSeparation(SeparationScores):
    """The site with the largest silhouette."""

    p_corrected: float | None


@frozen
class Separation:
    """Where the classes are apart."""

    best: BestSeparation
    first: SeparationScores
    last: SeparationScores
    apart_at: list[str]


@frozen
class Doubt:
    """What a picture shows and the full space does not hold.

    `shown` and `full_space` are silhouettes in the picture and in the full space.
    `groups` is the number of visible groups, or None where the doubt is about the
    classes, with their `p`.
    """

    site: str
    shown: float
    full_space: float
    p: float | None
    groups: int | None

    def __str__(self) -> str:
        if self.groups is None:
            return (
                f"the classes look apart (silhouette {self.shown:.2f}), but not in the"
                f" full space ({self.full_space:.2f}, p {self.p:.2g})"
            )
        return (
            f"the picture shows {self.groups} groups (silhouette {self.shown:.2f}) that"
            f" are hardly apart in the full space ({self.full_space:.2f})"
        )


@frozen
class PictureTrust:
    """How far the pictures can be trusted."""

    trustworthiness: Extremes | None = None
    seed_difference: Extremes | None = None
    doubts: list[Doubt] | None = None


@frozen
class PlottedPart:
    """One dataset in one model, and its classes."""

    model: str
    dataset: str
    points: int
    classes: list[PointClass] | None = None
    class_count: int = 0
    alone_in_class: list[str] | None = None
    labels_predicted: int | None = None


@frozen
class ProjectPart(Grouped, PlottedPart):
    """One dataset in one model, and whether its classes are apart."""

    # None where labels cannot be permuted, 0 where there are not two classes to test.
    smallest_p: float | None = 0.0
    all_equal_at: list[str] | None = None
    pooled: Pooled | None = None
    separation: Separation | None = None
    picture: PictureTrust | None = None

    @property
    def doubts(self) -> list[Doubt]:
        """Return what the pictures show and the full space does not hold."""
        return (self.picture and self.picture.doubts) or []


@frozen
class DatasetDifference:
    """A number of the classes in two datasets, at the site that shows it best.

    `difference` is a ratio for the dispersion, the first less the second for
    neighbours. `smaller_at` and `larger_at` are the sites at which the number of the
    first dataset is so.
    """

    site: str
    first: float
    second: float
    difference: float
    interval: list[float] | None
    p: float | None
    sites: int
    smaller_at: list[str]
    larger_at: list[str]


@frozen
class DatasetComparison:
    """Two datasets in the same classes, compared in one model.

    `pairs` are the groups with texts in both. A number is None where it could be
    measured at no site.
    """

    model: str
    first: str
    second: str
    pairs: int
    groups: int
    smallest_p: float | None
    dispersion: DatasetDifference | None
    neighbour: DatasetDifference | None


@frozen
class ProjectReport(Report):
    """Where the classes of texts are apart, and which pictures not to trust."""

    method: Literal["umap", "pca", "pacmap", "tsne"]
    token: str | int
    seed: int
    neighbours: int
    seeds: list[int]
    parts: list[ProjectPart]
    comparisons: list[DatasetComparison] | None = None
    not_compared: str | None = None

    @property
    def named_parts(self) -> Iterator[tuple[str, ProjectPart]]:
        """Yield each part with the name that tells it from the others."""
        several_models = len({part.model for part in self.parts}) > 1
        several_datasets = len({part.dataset for part in self.parts}) > 1
        for part in self.parts:
            names = []
            if several_models:
                names.append(part.model)
            if several_datasets:
                names.append(part.dataset)
            yield ", ".join(names), part


def story(report: ProjectReport, result: Result) -> Iterator[Section]:
    """Yield the panels with where classes are apart, then the scores along the layers
    with all other findings.
    """
    data, sites = result.data, labels(result.data, "site")
    rows = list(product(_names(data, "model"), _names(data, "dataset")))
    along = []
    for measure, (title, y_name) in ALONG.items():
        if measure in data:
            title = f"{title}, along the layers of {model_name(result)}"
            series = tuple(_along(data, rows, measure))
            along.append(Lines(title, sites, series, y_name=y_name))
    verdicts = set()
    for name, part in report.named_parts:
        if part.separation:
            verdicts.add(_verdict(_of(name), part.separation))
    first: list[str] = []
    later = []
    for sentence in _findings(report, result):
        if along and verdicts and sentence not in verdicts:
            first.append(Aside(sentence))
            later.append(Explanation(sentence))
        else:
            first.append(sentence)
    title = "How do the texts lie in every layer?"
    if verdicts:
        title = "At which layers are the classes apart?"
    panels = _panels(report, result, rows)
    point = standing(report.token)
    point = point.replace("each text", "one text").replace("every token", "one token")
    colours = ""
    scores = (
        "beneath each panel stands how far its neighbours are those of the full space"
    )
    classes = _classes(result.data)
    if classes:
        class_names = [quote(name) for name in dict.fromkeys(classes) if name]
        are_few = 0 < len(class_names) <= MOST_CLASSES
        in_brackets = f" ({', '.join(class_names)})" if are_few else ""
        colours = f", coloured by its class{in_brackets}"
        scores = (
            "the scores beneath each panel are those of the full space, with p-values"
            " from shuffled labels"
        )
    yield Section(
        title,
        tuple(first),
        (panels,),
        f"Every panel is one layer, drawn by {METHODS[report.method]}. Every point is"
        f" the hidden state of {point}{colours}. {_examples(result.data)}A picture in"
        f" two dimensions can show groups that are not there, so {scores}.",
    )
    if report.comparisons:
        yield _comparison(report.comparisons, result)
    if along:
        yield Section(
            "The scores along the layers",
            tuple(later),
            tuple(along),
            "The lines are the same scores along the layers. At any one layer, one in"
            " twenty shuffled labels reaches the dashed line.",
            folded=True,
        )


def _comparison(comparisons: Sequence[DatasetComparison], result: Result) -> Section:
    """Return which of two datasets has the tighter classes, and in which neighbours
    agree more often.
    """
    data, sites = result.data, labels(result.data, "site")
    first, second = quote(comparisons[0].first), quote(comparisons[0].second)
    views = []
    if "dispersion_ratio" in data:
        series = []
        for model in _names(data, "model"):
            here = data.sel(model=model) if model else data
            low = high = None
            if "dispersion_ratio_low" in here:
                low = here["dispersion_ratio_low"].to_numpy()
                high = here["dispersion_ratio_high"].to_numpy()
            y = here["dispersion_ratio"].to_numpy()
            series.append(Series(model or "ratio", y, low, high, band="95%, all sites"))
        equal = np.full(len(sites), 1.0)
        series.append(Series("no difference", equal, style="dash"))
        title = (
            f"The dispersion of {first}, divided by that of {second}, along the layers"
            f" of {model_name(result)}"
        )
        views.append(Lines(title, sites, tuple(series), y_name="ratio"))
    sentences: list[str] = []
    for comparison in comparisons:
        sentences += _compared(comparison)
    reading = (
        "Dispersion is the distance to the mean of the class (root mean square) over"
        " the distance between the means of two classes, in the full space. A band that"
        " leaves out the dashed line is a difference; the bands of all sites hold"
        " together with 95%."
    )
    return Section(
        "Do the two datasets differ?", tuple(sentences), tuple(views), reading
    )


def _compared(comparison: DatasetComparison) -> Iterator[str]:
    """Yield where two datasets differ in one model, and how that was tested."""
    first, second = quote(comparison.first), quote(comparison.second)
    tight, near = comparison.dispersion, comparison.neighbour
    corrected = "(p at most 0.05, corrected for all sites)"
    if tight is not None:
        verdict = f"no site is shown to have tighter classes in {first} or in {second}"
        places = [
            f"{words} at {site_list(sites)}"
            for words, sites in (
                (f"tighter in {first}", tight.smaller_at),
                (f"tighter in {second}", tight.larger_at),
            )
            if sites
        ]
        if places:
            verdict = f"the classes are {' and '.join(places)} {corrected}"
        yield (
            f"In {comparison.model}, {verdict}. At {tight.site} the dispersion is"
            f" {tight.first:.2f} in {first} and {tight.second:.2f} in {second}: a ratio"
            f" of {tight.difference:.2f}{_ends(tight)}."
        )
    if near is not None:
        verdict = "no site is shown to differ in how often the nearest neighbour agrees"
        places = [
            f"more often in {name} at {site_list(sites)}"
            for name, sites in ((first, near.larger_at), (second, near.smaller_at))
            if sites
        ]
        if places:
            verdict = (
                f"the nearest neighbour is of the same class {' and '.join(places)}"
                f" {corrected}"
            )
        yield (
            f"In {comparison.model}, {verdict}. At {near.site} it does for"
            f" {near.first:.0%} of {first} and {near.second:.0%} of {second}: a"
            f" difference of {near.difference:+.0%}."
        )
    yield _permutation(comparison)


def _ends(difference: DatasetDifference) -> str:
    if difference.interval is None:
        return ", without an interval"
    low, high = difference.interval
    return f" ({low:.2f} to {high:.2f}, at all sites together)"


def _permutation(comparison: DatasetComparison) -> str:
    """Say how the texts of two datasets were permuted."""
    pairs, others = comparison.pairs, comparison.groups - comparison.pairs
    ways = []
    if pairs:
        ways.append(f"the two sides of {counted(pairs, 'pair')} were swapped")
    if others:
        ways.append(
            f"{counted(others, 'group')} of texts without a pair changed places with"
            " others of the same class"
        )
    sentence = f"For the test, {' and '.join(ways)}"
    if comparison.smallest_p is None:
        return f"{sentence}, but that changes nothing, so there is no p-value."
    if comparison.smallest_p > LEVEL:
        return (
            f"{sentence}. That is possible in few ways: no p-value can be below"
            f" {comparison.smallest_p:.2g}, so nothing can be shown."
        )
    return f"{sentence}."


def _panels(report: ProjectReport, result: Result, rows: Sequence[Row]) -> Panels:
    """Return one panel for each site of each dataset in each model."""
    data = result.data
    panels: list[tuple[Any, ...]] = []
    # The findings name the best site of each row, and the first with classes apart.
    best, first_apart = [], []
    for row, part in zip(rows, report.parts, strict=True):
        of_row = _row(data, row)
        # A model may have other sites than the next.
        of_row = of_row.isel(site=np.isfinite(of_row["distinct"].to_numpy()))
        layers = [Site.parse(site).layer for site in labels(of_row, "site")]
        source = result.source.get("models", {}).get(row[0], result.source)
        # Where the source does not say how deep the model is, its deepest site counts.
        depth = source.get("depth")
        known_depth = depth if isinstance(depth, int) else 0
        deepest = max(1, known_depth, *filter(None, layers))
        apart_at = part.separation.apart_at if part.separation else []
        for place, layer in enumerate(layers):
            here = of_row.isel(site=place)
            site = str(here["site"].item())
            xy = np.stack([here["x"].to_numpy(), here["y"].to_numpy()], axis=-1)
            if row[1]:
                xy[data["of"].to_numpy() != row[1]] = np.nan
            caption, message = _caption(here), ""
            if not np.isfinite(xy).any():
                caption, message = "", "All states are equal here"
            if part.separation and site == part.separation.best.site:
                best.append(len(panels))
            if site in apart_at[:1]:
                first_apart.append(len(panels))
            mark = APART if site in apart_at else ""
            share = 1.0 if layer is None else layer / deepest
            name = ", ".join(filter(None, row))
            panels.append((site, name, xy, caption, message, mark, share))
    sites, names, points, captions, messages, marks, depths = zip(*panels, strict=True)
    dims = [dim for dim in ("model", "dataset") if dim in data.dims]
    dataset_names = list(
        dict.fromkeys(part.dataset for part in report.parts if part.dataset)
    )
    texts = " and ".join(dataset_names) or "Texts"
    if len(dataset_names) > MOST_DATASETS:
        texts = f"{len(dataset_names)} datasets"
    return Panels(
        f"{texts} in {model_name(result)}: {METHODS[report.method]} of"
        f" {standing(report.token)}, layer by layer",
        sites,
        np.stack(points).astype(np.float32),
        labels=_classes(data),
        texts=_texts(data),
        captions=captions,
        messages=messages,
        rows=names if len(rows) > 1 else (),
        rows_name=", ".join(dims) or "row",
        note=_note(report, result),
        marks=marks,
        depths=depths,
        first=shown_first(depths, names, best + first_apart),
    )


def _names(data: "xarray.Dataset", dim: str) -> Sequence[str]:
    return labels(data, dim) if dim in data.dims else ("",)


def _row(data: "xarray.Dataset", row: Row) -> "xarray.Dataset":
    named = zip(("model", "dataset"), row, strict=True)
    return data.sel({dim: name for dim, name in named if dim in data.dims})


def _caption(here: "xarray.Dataset") -> str:
    def number(name: str) -> float:
        return float(here[name]) if name in here else np.nan

    scores = []
    for name in ("silhouette", "neighbour"):
        value, p = number(name), number(f"{name}_p")
        if np.isfinite(value):
            p_value = f" (p {p:.2g})" if np.isfinite(p) else ""
            scores.append(f"{name} {value:.2f}{p_value}")
    trust = number("trust")
    if np.isfinite(trust):
        scores.append(f"trust {trust:.2f}")
    return "\n".join(scores)


def _classes(data: "xarray.Dataset") -> tuple[str, ...]:
    names = data["label"].to_numpy().tolist()
    return tuple(names) if any(names) else ()


def _texts(data: "xarray.Dataset") -> tuple[str, ...]:
    """Return the text of each point, or its token with the text around it."""
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


def _note(report: ProjectReport, result: Result) -> str:
    sentences = ["Trust is the trustworthiness of the picture."]
    if _classes(result.data):
        sentences = [
            "Scores are those of the full space, and p-values are for one site alone."
            " Neighbour is the share of points whose nearest point of another text or"
            " group is of their class; trust is the trustworthiness of the picture."
        ]
    separations = [part.separation for part in report.parts if part.separation]
    if any(separation.apart_at for separation in separations):
        sentences.append(
            f"Panels marked “{APART}” have classes apart (p at most 0.05 by silhouettes"
            " or neighbours, corrected for both at all sites)."
        )
    if "model" in result.data.dims:
        sentences.append(
            "A percentage is the depth of a site in its model; panels of one column are"
            " about as deep."
        )
    for name, part in report.named_parts:
        where = f"{name}, " if name else ""
        for doubt in part.doubts[:MOST_DOUBTS]:
            sentences.append(f"{where}{doubt.site}: {doubt}.")
        more = len(part.doubts) - MOST_DOUBTS
        if more > 0:
            sentences.append(f"The same holds at {more} more {plural(more, 'site')}.")
    return " ".join(sentences)


def _along(
    data: "xarray.Dataset", rows: Sequence[Row], measure: str
) -> Iterator[Series]:
    """Yield a measure along the sites, and what one in twenty shuffles reaches."""
    for row in rows:
        here, name = _row(data, row), ", ".join(filter(None, row))
        yield Series(name or "classes", here[measure].to_numpy())
        if f"{measure}_high" in here:
            shuffled = f"{name}, shuffled labels" if name else "shuffled labels"
            high = here[f"{measure}_high"].to_numpy()
            yield Series(f"{shuffled}, one in twenty", high, style="dash")


def _of(name: str) -> str:
    return f" of {quote(name)}" if name else ""


def _findings(report: ProjectReport, result: Result) -> Iterator[str]:
    """Yield where the classes are apart, and which pictures not to trust."""
    for name, part in report.named_parts:
        of = _of(name)
        if part.class_count == 1:
            yield f"The points{of} are all of one class."
        if part.labels_predicted:
            yield (
                f"For {part.labels_predicted} of {part.points} texts{of} the model"
                " predicts the label as the next token."
            )
        if part.all_equal_at:
            yield f"All states{of} are equal at {site_list(part.all_equal_at)}."
        yield from ruled(part.pooled, of)
        if part.separation:
            yield _verdict(of, part.separation)
            yield independence(part, of)
            if part.copies:
                yield (
                    f"{part.copies:,} {plural(part.copies, 'text')}{of} came again with"
                    " the same label; each counts once."
                )
            smallest = part.smallest_p
            if smallest is not None and smallest > NOTED:
                cannot = ", so nothing can be shown" if smallest > LEVEL else ""
                yield (
                    f"The labels{of} can be permuted in few ways: the smallest p-value"
                    f" that is possible is {smallest:.2g}{cannot}."
                )
        if part.doubts:
            sites = site_list([doubt.site for doubt in part.doubts])
            yield f"Do not trust the pictures{of} at {sites}: {part.doubts[0]}."
    if report.not_compared:
        yield f"The two datasets were not compared: {report.not_compared}."
    if not _classes(result.data):
        points = sum(part.points for part in report.parts)
        yield (
            f"The picture shows {points:,} points without labels, so nothing is said"
            " about classes."
        )


def _verdict(of: str, separation: Separation) -> str:
    """Say where classes are apart, and how far where they are farthest."""
    best, apart_at = separation.best, separation.apart_at
    size = (
        f"at {best.site}: {best.silhouette:.2f}; there the nearest neighbour of"
        f" {best.neighbour:.0%} of the points has the same class"
    )
    if best.p_corrected is None:
        return (
            f"The silhouette of the classes{of} is largest {size}. There is no p-value:"
            " the labels can be permuted in no other way that keeps the sizes of the"
            " classes and the order of the texts."
        )
    verdict = f"No site is shown to set the classes{of} apart"
    if apart_at:
        verdict = (
            f"The classes{of} are apart at {site_list(apart_at)} (p at most 0.05 by"
            " silhouettes or neighbours, corrected for both at all sites)"
        )
    p = f"p = {best.p_corrected:.2g}, corrected"
    return f"{verdict}. The silhouette is largest {size} ({p})."


def _examples(data: "xarray.Dataset") -> str:
    """Quote a text of each dataset, so that a reader knows what the points are."""
    texts = data.attrs.get("texts", [])
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
