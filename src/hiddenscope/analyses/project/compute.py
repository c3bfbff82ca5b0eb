"""One picture for each layer, and its numbers, as labelled arrays and a report."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hiddenscope import progress
from hiddenscope.analyses.project.comparison import (
    Comparison,
    compare_datasets,
    compared_variables,
)
from hiddenscope.analyses.project.pictures import (
    SIGNIFICANCE,
    Method,
    Panel,
    Picture,
    Pictures,
    align,
    draw,
    panel_of,
)
from hiddenscope.analyses.project.points import (
    Points,
    datasets_of,
    permutation_count,
    points_of_models,
    points_of_states,
)
from hiddenscope.analyses.project.story import (
    BestSeparation,
    PictureTrust,
    PointClass,
    ProjectPart,
    ProjectReport,
    Separation,
    SeparationP,
    SeparationScores,
)
from hiddenscope.analyses.project.workers import UmapPool
from hiddenscope.errors import StatesError
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.permutations import Permuted, permuted
from hiddenscope.measures.separation import SCORES, Score, corrected, separation
from hiddenscope.model import Model, ModelLike
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Coordinates,
    Variables,
    extremes,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.results.report import known
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable, Source
from hiddenscope.vectors import EachToken, rows_of

if TYPE_CHECKING:
    import xarray

Scores: TypeAlias = Mapping[str, Score]

# All pairs of points are compared.
MAX_POINTS = 50_000
# With up to this many points, pictures of two other seeds are drawn for comparison;
# with more points, of one.
FEW = 200
# Classes that the facts list.
LISTED = 20
LONG_NAMES = {
    "silhouette": "silhouette of the classes in the full space",
    "neighbour": (
        "share of points whose nearest point of another text or group is of their class"
    ),
    "fisher": "variance between classes over that within",
    "within": "mean distance within classes over that of all pairs",
}
NULL = {
    "": "",
    "_p": ", p-value",
    "_chance": ", median under shuffled labels",
    "_high": ", reached by one in twenty shuffled labels",
}
CORRECTED = "apart_p"
OF_PICTURE = {
    "distinct": "number of different states",
    "trust": "trustworthiness of the picture",
    "spread": "difference of the pictures of other seeds, 0 to 1",
    "shown": "silhouette of the classes in the picture",
}


@dataclass(frozen=True, eq=False)
class Part:
    """One dataset in one model.

    Its points, the orders of its labels that its classes are tested with, and the
    distances between the points of each site with their scores.
    """

    points: Points
    order: Permuted | None
    cells: list[tuple[Distances, Scores]]

    @property
    def scored(self) -> dict[str, Scores]:
        """Return the scores of the sites where the classes were scored."""
        pairs = zip(self.points.sites, self.cells, strict=True)
        return {str(site): scores for site, (_, scores) in pairs if scores}

    @property
    def p_corrected(self) -> dict[str, float]:
        """Return the p-value of the clearer of two scores, corrected for all of both.

        Silhouettes see classes that are single clouds, and neighbours any others.
        """
        scored = self.scored
        if not scored:
            return {}
        scores = []
        for name in ("silhouette", "neighbour"):
            scores += [of_site[name] for of_site in scored.values()]
        p_values = np.reshape(corrected(scores), (2, -1)).min(0)
        return dict(zip(scored, p_values.tolist(), strict=True))


def draw_texts(
    source: ModelLike | Sequence[ModelLike] | Readable | Pair | EachToken,
    data: Any,
    method: Method | Pictures,
    pool: Pooling | None,
    sites: SitePatterns,
    seed: int,
    truncate: bool,
) -> Result:
    """Return the pictures of every layer, with their numbers, as a result."""
    opened, pooling = rows_of(source, pool, sites)
    how = method if isinstance(method, Pictures) else Pictures(method)
    models = _models(opened)
    datasets = datasets_of(data) if models else {}
    workers: UmapPool | nullcontext[None] = nullcontext()
    if how.method == "umap":
        # Known before any state is captured, so that processes start meanwhile.
        if models:
            texts = sum(len(dataset.texts) for dataset in datasets.values())
            count = texts * sum(len(model.anatomy.select(sites)) for model in models)
        else:
            states = opened.encoder if isinstance(opened, Pair) else opened
            count = int(states.tokens.count * len(states.sites))
        workers = UmapPool(count)
    with workers as umap:
        if models:
            points = [*points_of_models(models, datasets, sites, pooling, truncate)]
        else:
            points = [points_of_states(opened, data, sites, pooling)]
        how = how.for_points(min(map(len, points)))
        most = max(map(len, points))
        if most > MAX_POINTS:
            reason = f"there are {most:,}, and every pair of them is compared"
            raise StatesError(
                f"More than {MAX_POINTS:,} points", reason, "Give a sample of them."
            )
        parts = _scored_parts(points, seed)
        not_compared, comparisons = compare_datasets(points, seed)
        seeds = [seed]
        if how.method != "pca":
            seeds = list(range(seed, seed + (3 if most <= FEW else 2)))

        def result(how: Pictures, drawn_seeds: list[int]) -> Result:
            panels = _panels(parts, how, drawn_seeds, umap)
            report = ProjectReport(
                method=how.method,
                token="each" if pooling is None else pooling,
                seed=seed,
                neighbours=how.neighbours,
                seeds=seeds,
                parts=list(map(_part_report, parts, panels)),
                comparisons=[comparison.report for comparison in comparisons] or None,
                not_compared=not_compared,
            )
            data = _dataset(parts, panels, comparisons, how.method)
            return Result("project", data, report, _source(points))

        if how.preview is not None and how.method != "pca":
            how.preview(result(Pictures("pca", how.neighbours), [seed]))
        return result(how, seeds)


def _models(source: object) -> list[Model]:
    """Return the models of a source, none if it has states."""
    if isinstance(source, Readable | Pair):
        return []
    sources = source if isinstance(source, list | tuple) else [source]
    models = [model for model in sources if isinstance(model, Model)]
    if models and len(models) == len(sources):
        return models
    reason = f"{type(source).__name__} has no states"
    raise StatesError(
        "Cannot project this", reason, "Give a model, a list of models, or states."
    )


def _scored_parts(points: Sequence[Points], seed: int) -> list[Part]:
    """Measure the distances of each site of every part, and how classes separate."""
    total = sum(len(of_part.sites) for of_part in points)
    parts = []
    with progress.track("Scoring", total=total) as advance:
        for of_part in points:
            cells: list[tuple[Distances, Scores]] = []
            rows, classes = of_part.scored, of_part.classes
            groups, texts = of_part.names(rows)
            order = None
            # Labels are permuted the same way for every site.
            if classes is not None and len(classes.names) > 1:
                order = permuted(
                    classes.codes[rows],
                    permutation_count(len(rows)),
                    seed,
                    groups,
                    units=texts,
                    states=of_part.values[:, rows],
                )
                # Where nothing can be permuted, only the true classes are left.
                if order.smallest_p is None:
                    order = order._replace(labellings=order.labellings[:1])
            for values in of_part.values:
                distances = Distances(values)
                scores: Scores = {}
                if order is not None and not distances.all_equal:
                    scored = distances
                    if len(rows) < len(of_part):
                        scored = Distances(values[rows])
                    scores = separation(scored, order.labellings, groups)
                cells.append((distances, scores))
                advance(1)
            parts.append(Part(of_part, order, cells))
    return parts


def _panels(
    parts: Sequence[Part], how: Pictures, seeds: Sequence[int], umap: UmapPool | None
) -> list[list[Panel]]:
    """Draw a panel for every site, its picture aligned with the one before it."""
    drawable = []
    for part in parts:
        drawable += [points for points, _ in part.cells if not points.all_equal]
    with progress.track(
        f"Drawing by {how.method}", total=len(drawable) * len(seeds)
    ) as advance:
        pictures = iter(draw(drawable, how, seeds, umap, advance))
    panels: list[list[Panel]] = []
    first_pictures: dict[str, Picture] = {}
    for part in parts:
        panels.append([])
        classes, dataset = part.points.classes, part.points.dataset
        codes = None if classes is None else classes.codes
        # The first picture of a dataset is aligned with that of the model before.
        previous = first_pictures.get(dataset)
        for site, (points, scores) in zip(part.points.sites, part.cells, strict=True):
            if points.all_equal:
                panels[-1].append(Panel(points.distinct))
                continue
            picture, *others = next(pictures)
            if previous is not None and previous.shape != picture.shape:
                previous = None
            previous = align(picture, previous)
            first_pictures.setdefault(dataset, previous)
            drawn = [previous, *others]
            panels[-1].append(
                panel_of(str(site), points, drawn, codes, scores, how.neighbours)
            )
    return panels


def _dataset(
    parts: Sequence[Part],
    panels: Sequence[Sequence[Panel]],
    comparisons: Sequence[Comparison],
    method: Method,
) -> "xarray.Dataset":
    """Tabulate everything by model, dataset and site.

    The first two dimensions are there only if there are several.
    """
    points = [part.points for part in parts]
    # The points of a dataset are the same in every model.
    firsts: dict[str, Points] = {}
    for of_part in points:
        first = firsts.setdefault(of_part.dataset, of_part)
        if len(first) != len(of_part):
            raise StatesError(
                "Models do not share their tokens",
                f"{first.model} makes {len(first):,} tokens; {of_part.model} makes"
                f" {len(of_part):,} tokens",
                "Use one point for each text, not hs.each_token.",
            )
    models = list(dict.fromkeys(of_part.model for of_part in points))
    datasets = list(firsts)
    sites = sorted(set().union(*(of_part.sites for of_part in points)))
    rows = {site: row for row, site in enumerate(map(str, sites))}
    ends = np.cumsum(list(map(len, firsts.values())))
    pictures = np.full((2, len(models), len(sites), ends[-1]), np.nan, np.float32)
    long_names = {}
    for score, (side, meaning) in product(SCORES, NULL.items()):
        long_names[f"{score}{side}"] = f"{LONG_NAMES[score]}{meaning}"
    long_names[CORRECTED] = (
        "p-value of silhouette or neighbour, corrected for both at all sites"
    )
    long_names |= OF_PICTURE
    shape = (len(models), len(datasets), len(sites))
    numbers = {name: np.full(shape, np.nan) for name in long_names}
    for part, of_sites in zip(parts, panels, strict=True):
        of_part = part.points
        model, dataset = models.index(of_part.model), datasets.index(of_part.dataset)
        here = slice(ends[dataset] - len(of_part), ends[dataset])
        for site, p in part.p_corrected.items():
            numbers[CORRECTED][model, dataset, rows[site]] = p
        for site_of_part, panel in zip(of_part.sites, of_sites, strict=True):
            place = model, dataset, rows[str(site_of_part)]
            if panel.picture is not None:
                pictures[:, model, place[-1], here] = panel.picture.T
            for name in OF_PICTURE:
                numbers[name][place] = getattr(panel, name)
            for name, value in panel.scores.items():
                sides = (value.value, value.p, value.chance, value.high)
                for side, number in zip(NULL, sides, strict=True):
                    numbers[f"{name}{side}"][place] = number
    point = "text" if points[0].tokens is None else "token"
    variables: Variables = {}
    for axis, coordinates in zip("xy", pictures, strict=True):
        long_name = f"{axis} in the picture by {method}"
        variables[axis] = ("model", "site", point), coordinates, long_name
    for name, values in numbers.items():
        if np.isfinite(values).any():
            variables[name] = ("model", "dataset", "site"), values, long_names[name]
    variables |= compared_variables(comparisons, models, datasets, list(rows))
    texts: list[str] = []
    for of_part in firsts.values():
        texts += of_part.texts or ()
    coords = {
        "model": models,
        "dataset": datasets,
        "site": site_names(sites),
        **_point_coords(list(firsts.values()), point),
    }
    data = to_dataset(variables, coords, {"texts": texts, "method": method})
    single = [dim for dim in ("model", "dataset") if data.sizes[dim] == 1]
    return data.squeeze(single, drop=True)


def _point_coords(firsts: Sequence[Points], point: str) -> Coordinates:
    """Label the points of each dataset in turn."""
    labels = []
    dataset_of = []
    strings = []
    texts = []
    positions = []
    offset = 0
    for part in firsts:
        labels += part.classes.labels if part.classes else [""] * len(part)
        dataset_of += [part.dataset] * len(part)
        strings += part.strings
        if part.tokens is not None:
            # Texts of several datasets are numbered through.
            texts.append(part.tokens.text + offset)
            positions.append(part.tokens.positions)
            offset += part.tokens.count
    coords: Coordinates = {"label": (point, text_array(labels))}
    if len(firsts) > 1:
        coords["of"] = (point, text_array(dataset_of))
    if point == "token":
        coords["string"] = (point, text_array(strings))
        coords["text"] = (point, np.concatenate(texts))
        coords["position"] = (point, np.concatenate(positions))
    return coords


def _part_report(part: Part, panels: Sequence[Panel]) -> ProjectPart:
    """Report one dataset in one model."""
    points = part.points
    tested = {}
    if part.order is not None:
        tested = points.belonging.facts
        tested["serial_inflation"] = part.order.serial
        tested["smallest_p"] = part.order.smallest_p
    counts = points.classes.counts if points.classes else {}
    classes = [PointClass(label=label, points=counts[label]) for label in counts]
    single = [label for label, count in counts.items() if count == 1]
    pairs = zip(points.sites, panels, strict=True)
    trust = np.array([panel.trust for panel in panels])
    spread = np.array([panel.spread for panel in panels])
    picture = PictureTrust(
        trustworthiness=extremes(points.sites, trust, median=True),
        seed_difference=extremes(points.sites, spread, median=True),
        doubts=[panel.doubt for panel in panels if panel.doubt is not None] or None,
    )
    return ProjectPart(
        model=points.model,
        dataset=points.dataset,
        points=len(points),
        classes=classes[:LISTED] if points.classes else None,
        class_count=len(counts),
        alone_in_class=single[:LISTED] or None,
        labels_predicted=points.predicted,
        all_equal_at=[str(site) for site, panel in pairs if panel.picture is None]
        or None,
        pooled=points.pooled,
        separation=_separation(part),
        picture=None if picture == PictureTrust() else picture,
        **tested,
    )


def _separation(part: Part) -> Separation | None:
    scored, p = part.scored, part.p_corrected
    if not scored:
        return None
    sites = list(scored)
    best = max(scored, key=lambda site: scored[site]["silhouette"].value)
    return Separation(
        best=BestSeparation(
            **_scores_at(best, scored[best]), p_corrected=known(p[best])
        ),
        first=SeparationScores(**_scores_at(sites[0], scored[sites[0]])),
        last=SeparationScores(**_scores_at(sites[-1], scored[sites[-1]])),
        apart_at=[site for site in p if p[site] <= SIGNIFICANCE],
    )


def _scores_at(site: str, scores: Scores) -> dict[str, Any]:
    values = {name: score.value for name, score in scores.items()}
    p = SeparationP(**{name: known(score.p) for name, score in scores.items()})
    return {"site": site, **values, "p": p}


def _source(points: Sequence[Points]) -> dict[str, Any]:
    """Return the source of the states; of several models, each."""
    by_model = {}
    for part in points:
        source = part.source
        as_json = source.to_json() if isinstance(source, Source) else dict(source)
        by_model[part.model] = as_json
    if len(by_model) == 1:
        return next(iter(by_model.values()))
    return {"model": ", ".join(by_model), "models": by_model}
