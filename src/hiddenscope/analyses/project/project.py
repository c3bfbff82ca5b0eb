"""How do labelled texts lie in every layer, and does the picture tell the truth?"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from hiddenscope import progress
from hiddenscope.analyses.project.findings import (
    Beside,
    project_dataset,
    project_facts,
    tightness,
)
from hiddenscope.analyses.project.pictures import (
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
    count_label_predictions,
    datasets_of,
    points_of_models,
    points_of_states,
)
from hiddenscope.analyses.project.workers import UmapPool
from hiddenscope.arguments import checked, integer, renamed
from hiddenscope.errors import StatesError
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.permutations import Permuted, permuted
from hiddenscope.measures.separation import Score, separation
from hiddenscope.model import Model, ModelLike
from hiddenscope.results import Facts, Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable, Source
from hiddenscope.states.pooling import EACH_TOKEN_REMEDY
from hiddenscope.vectors import EachToken, rows_of
from hiddenscope.vectors.dataset import Dataset

Cell: TypeAlias = tuple[Distances, Mapping[str, Score]]

# All pairs of points are compared.
MAX_POINTS = 50_000
# With up to this many points, pictures of two other seeds are drawn for comparison;
# with more points, of one.
FEW = 200
# Permutations of the labels, up to so many points.
PERMUTATIONS = {500: 999, 5_000: 199}
MIN_PERMUTATIONS = 99


@checked
@renamed({"each": EACH_TOKEN_REMEDY}, token="pool")
def project(
    source: ModelLike | Sequence[ModelLike] | Readable | Pair | EachToken,
    data: Any = None,
    *,
    method: Method | Pictures = "umap",
    pool: Pooling | None = None,
    sites: SitePatterns = "layer.*,final",
    seed: int = 0,
    truncate: bool = False,
) -> Result:
    """Draw one picture for each layer, and measure whether it tells the truth.

    With a model, or a list of models, `data` is a dataset: a shipped name, a path, a
    frame, `(texts, labels)`, or what `hs.read` gave; or a mapping of names to several
    datasets, to compare them. With states, it is a list of labels, one for each text or
    for each token, or a dataset of the same texts. Texts are taken as
    independent unless the data have groups (`hs.read(..., group=)`). `pool` is what
    stands for a text: if not given, the last token in a decoder, and in an encoder the
    mean or what the model was trained for. With `hs.each_token(source)` every token is
    a point. `hs.Pictures` has more options.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[5, 6], [5, 7], [8, 6], [8, 7]]
    >>> states = hs.load((tiny_model("gpt2"), None)).capture(texts)
    >>> result = hs.project(states, ["a", "a", "b", "b"], method="pca")
    >>> dict(result.data["x"].sizes), result.facts["parts"][0]["classes"]
    ({'site': 5, 'text': 4}, [{'label': 'a', 'points': 2}, {'label': 'b', 'points': 2}])
    """
    opened, pooling = rows_of(source, pool, sites)
    how = method if isinstance(method, Pictures) else Pictures(method)
    seed = integer(seed, "seed", 0)
    models = _models(opened)
    datasets = datasets_of(data) if models else {}
    workers: UmapPool | nullcontext[None] = nullcontext()
    if how.method == "umap":
        workers = UmapPool(_expected_points(opened, models, datasets, sites))
    with workers as umap:
        if models:
            parts = list(points_of_models(models, datasets, sites, pooling, truncate))
        else:
            parts = [points_of_states(opened, data, sites, pooling)]
        how = how.for_points(min(map(len, parts)))
        most = max(map(len, parts))
        if most > MAX_POINTS:
            reason = f"there are {most:,}, and every pair of them is compared"
            raise StatesError(
                f"More than {MAX_POINTS:,} points", reason, "Give a sample of them."
            )
        orders = [_permuted_labels(part, seed) for part in parts]
        predicted: list[int | None] = [None] * len(parts)
        if models and pooling == "last":
            predicted = _label_predictions(models, datasets, parts)
        beside = []
        for count, order in zip(predicted, orders, strict=True):
            beside.append(Beside(count, order))
        cells = _cells(parts, orders)
        seeds = _seeds(most, how.method, seed)
        options: Facts = {
            "token": "each" if pooling is None else pooling,
            "seed": seed,
            "neighbours": how.neighbours,
            "seeds": seeds,
        }
        if how.preview is not None and how.method != "pca":
            pca = Pictures("pca", how.neighbours)
            panels = _panels(parts, cells, pca, (seed,), None)
            how.preview(_result(parts, panels, pca, beside, options))
        panels = _panels(parts, cells, how, seeds, umap)
        return _result(parts, panels, how, beside, options)


def _models(source: object) -> list[Model]:
    """Return the models of a source, none if it has states."""
    if isinstance(source, Model):
        return [source]
    if isinstance(source, list | tuple) and source:
        models = [model for model in source if isinstance(model, Model)]
        if len(models) == len(source):
            return models
    if isinstance(source, Readable | Pair):
        return []
    reason = f"{type(source).__name__} has no states"
    raise StatesError(
        "Cannot project this", reason, "Give a model, a list of models, or states."
    )


def _expected_points(
    source: Any,
    models: Sequence[Model],
    datasets: Mapping[str, Dataset],
    sites: SitePatterns,
) -> int:
    """Return the number of points over all sites, before any state is captured."""
    if models:
        texts = sum(len(dataset.texts) for dataset in datasets.values())
        return texts * sum(len(model.anatomy.select(sites)) for model in models)
    part = source.encoder if isinstance(source, Pair) else source
    return int(part.tokens.count * len(part.sites))


def _label_predictions(
    models: Sequence[Model], datasets: Mapping[str, Dataset], parts: Sequence[Points]
) -> list[int | None]:
    """Count, for every dataset in every model, the labels that the model predicts."""
    counts = []
    remaining = iter(parts)
    for model in models:
        for dataset in datasets.values():
            counts.append(count_label_predictions(model, dataset, next(remaining)))
    return counts


def _seeds(most: int, method: Method, seed: int) -> tuple[int, ...]:
    if method == "pca":
        return (seed,)
    count = 3 if most <= FEW else 2
    return tuple(range(seed, seed + count))


def _cells(
    parts: Sequence[Points], orders: Sequence[Permuted | None]
) -> list[list[Cell]]:
    """Return the distances of each site of every part, and how classes separate."""
    total = sum(len(part.sites) for part in parts)
    cells: list[list[Cell]] = []
    with progress.track("Scoring", total=total) as advance:
        for part, order in zip(parts, orders, strict=True):
            cells.append([])
            rows = part.scored
            groups, _ = part.names(rows)
            for values in part.values:
                points = Distances(values)
                scores: Mapping[str, Score] = {}
                if order is not None and not points.all_equal:
                    counted = points
                    if len(rows) < len(part):
                        counted = Distances(values[rows])
                    scores = separation(counted, order.labellings, groups)
                cells[-1].append((points, scores))
                advance(1)
    return cells


def _permuted_labels(part: Points, seed: int) -> Permuted | None:
    """Permute the classes of the points that count, the same way for every site.

    Return None without two classes. Where nothing can be permuted, only the true
    classes are returned.
    """
    if part.classes is None or len(part.classes.names) < 2:
        return None
    rows = part.scored
    count = MIN_PERMUTATIONS
    for most, permutations in PERMUTATIONS.items():
        if len(rows) <= most:
            count = permutations
            break
    groups, texts = part.names(rows)
    orders = permuted(
        part.classes.codes[rows],
        count,
        seed,
        groups,
        units=texts,
        states=part.values[:, rows],
    )
    if orders.smallest_p is None:
        return orders._replace(labellings=orders.labellings[:1])
    return orders


def _panels(
    parts: Sequence[Points],
    cells: Sequence[Sequence[Cell]],
    how: Pictures,
    seeds: Sequence[int],
    pool: UmapPool | None,
) -> list[list[Panel]]:
    """Draw a panel for every cell, its picture aligned with the one before it."""
    drawable = []
    for row in cells:
        drawable += [points for points, _ in row if not points.all_equal]
    with progress.track(
        f"Drawing by {how.method}", total=len(drawable) * len(seeds)
    ) as advance:
        pictures = iter(draw(drawable, how, seeds, pool, advance))
    panels: list[list[Panel]] = []
    first_pictures: dict[str, Picture] = {}
    for part, row in zip(parts, cells, strict=True):
        panels.append([])
        codes = None if part.classes is None else part.classes.codes
        # The first picture of a dataset is aligned with that of the model before.
        previous = first_pictures.get(part.dataset)
        for points, scores in row:
            if points.all_equal:
                panels[-1].append(Panel(points.distinct))
                continue
            picture, *others = next(pictures)
            if previous is not None and previous.shape != picture.shape:
                previous = None
            previous = align(picture, previous)
            first_pictures.setdefault(part.dataset, previous)
            drawn = [previous, *others]
            panels[-1].append(panel_of(points, drawn, codes, scores, how.neighbours))
    return panels


def _result(
    parts: Sequence[Points],
    panels: Sequence[Sequence[Panel]],
    how: Pictures,
    beside: Sequence[Beside],
    options: Facts,
) -> Result:
    part_facts = []
    for part, row, of_part in zip(parts, panels, beside, strict=True):
        part_facts.append(project_facts(part, row, of_part))
    facts: Facts = {
        "method": how.method,
        **options,
        "parts": part_facts,
        **tightness(parts, panels),
    }
    return Result(
        "project", project_dataset(parts, panels, how.method), facts, _source(parts)
    )


def _source(parts: Sequence[Points]) -> dict[str, Any]:
    """Return the source of the states; of several models, each."""
    by_model: dict[str, dict[str, Any]] = {}
    for part in parts:
        source = part.source
        as_json = source.to_json() if isinstance(source, Source) else dict(source)
        by_model[part.model] = as_json
    if len(by_model) == 1:
        return next(iter(by_model.values()))
    return {"model": ", ".join(by_model), "models": by_model}
