"""How do labelled texts lie in every layer: are the classes apart, and does the picture
tell the truth?
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from hiddenscope import progress
from hiddenscope.analyses.project.findings import Beside, facts_of, table, tightness
from hiddenscope.analyses.project.pictures import (
    Method,
    Panel,
    Picture,
    Pictures,
    aligned,
    draw,
    panel,
)
from hiddenscope.analyses.project.points import (
    Points,
    datasets_of,
    label_predictions,
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
from hiddenscope.vectors import EachToken, rows_of
from hiddenscope.vectors.dataset import Dataset

Cell: TypeAlias = tuple[Distances, Mapping[str, Score]]

MOST = 50_000  # points: all pairs are compared
FEW = 200  # points up to which two other seeds are drawn for comparison, and not one
SHUFFLES = {500: 999, 5_000: 199}  # shuffles of the labels, up to so many points
FEWEST_SHUFFLES = 99


@checked
@renamed(token="pool")
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
    """Draw one picture for each layer, with numbers from the full space that say
    whether it tells the truth.

    With a model, or a list of models, `data` is a dataset: a shipped name, a path, a
    frame, `(texts, labels)`, or what `hs.read` gave; or a mapping of names to several
    datasets, to compare them. With states, it is the labels, one for each text or for
    each token, or what `hs.read` gave for the same texts. Texts are taken as
    independent unless the data have groups (`hs.read(..., group=)`). `pool` is what
    stands for a text: if not given, the last token in a decoder, and in an encoder the
    mean or what the model was trained for. With `hs.each_token(source)` every token is
    a point. `hs.Pictures` has more options.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> states = hs.load((tiny_model("gpt2"), None)).capture([[5, 6], [5, 7], [8, 6], [8, 7]])
    >>> result = hs.project(states, ["a", "a", "b", "b"], method="pca")
    >>> dict(result.data["x"].sizes), result.facts["parts"][0]["classes"]
    ({'site': 5, 'text': 4}, [{'label': 'a', 'points': 2}, {'label': 'b', 'points': 2}])
    """
    opened, pooling = rows_of(source, pool, sites)
    how = method if isinstance(method, Pictures) else Pictures(method)
    seed = integer(seed, "seed", 0)
    models = [opened] if isinstance(opened, Model) else _models(opened)
    datasets = datasets_of(data) if models else {}
    with (
        UmapPool(_expected(opened, models, datasets, sites))
        if how.method == "umap"
        else nullcontext()
    ) as workers:
        if models:
            parts = list(points_of_models(models, datasets, sites, pooling, truncate))
        else:
            parts = [points_of_states(opened, data, sites, pooling)]
        how = how.for_points(min(map(len, parts)))
        if (most := max(map(len, parts))) > MOST:
            reason = f"there are {most:,}, and every pair of them is compared"
            raise StatesError(
                f"More than {MOST:,} points", reason, "Give a sample of them."
            )
        orders = [_permuted_labels(part, seed) for part in parts]
        predicted: list[int | None] = [None] * len(parts)
        if models and pooling == "last":
            pairs = [
                (model, dataset) for model in models for dataset in datasets.values()
            ]
            predicted = [
                label_predictions(*pair, part)
                for pair, part in zip(pairs, parts, strict=True)
            ]
        beside = [
            Beside(
                count, None if order is None else order.smallest_p, order is not None
            )
            for count, order in zip(predicted, orders, strict=True)
        ]
        cells = _cells(parts, orders)
        seeds = _seeds(most, how.method, seed)
        options: Facts = {
            "token": "each" if pooling is None else pooling,
            "seed": seed,
            "neighbours": how.neighbours,
            "seeds": seeds,
        }
        if how.preview is not None and how.method != "pca":
            at_once = Pictures("pca", how.neighbours)
            how.preview(
                _result(
                    parts,
                    _panels(parts, cells, at_once, (seed,), None),
                    at_once,
                    beside,
                    options,
                )
            )
        return _result(
            parts, _panels(parts, cells, how, seeds, workers), how, beside, options
        )


def _models(source: Any) -> list[Model]:
    """Several models, if that is what was given."""
    if (
        isinstance(source, list | tuple)
        and source
        and all(isinstance(one, Model) for one in source)
    ):
        return list(source)
    if isinstance(source, Readable | Pair):
        return []
    reason = f"{type(source).__name__} has no states"
    raise StatesError(
        "Cannot project this", reason, "Give a model, a list of models, or states."
    )


def _expected(
    source: Any,
    models: Sequence[Model],
    datasets: Mapping[str, Dataset],
    sites: SitePatterns,
) -> int:
    """The number of points over all sites, before any state is captured."""
    if models:
        texts = sum(len(dataset.texts) for dataset in datasets.values())
        return texts * sum(len(model.anatomy.select(sites)) for model in models)
    part = source.encoder if isinstance(source, Pair) else source
    return int(part.tokens.count * len(part.sites))


def _seeds(most: int, method: Method, seed: int) -> tuple[int, ...]:
    if method == "pca":
        return (seed,)
    return tuple(range(seed, seed + (3 if most <= FEW else 2)))


def _cells(
    parts: Sequence[Points], orders: Sequence[Permuted | None]
) -> list[list[Cell]]:
    """For every site of every part, its distances and how far apart its classes are."""
    with progress.track(
        "Scoring", total=sum(len(part.sites) for part in parts)
    ) as advance:
        cells: list[list[Cell]] = []
        for part, order in zip(parts, orders, strict=True):
            cells.append([])
            rows = part.scored
            groups, _ = part.names(rows)
            for values in part.values:
                points = Distances(values)
                scores: Mapping[str, Score] = {}
                if order is not None and not points.all_equal:
                    counted = (
                        points if len(rows) == len(part) else Distances(values[rows])
                    )
                    scores = separation(counted, order.labellings, groups)
                cells[-1].append((points, scores))
                advance(1)
    return cells


def _permuted_labels(part: Points, seed: int) -> Permuted | None:
    """The classes of the points that count, as they are and permuted, the same for
    every site.

    None without two classes. Where nothing can be permuted there are the true ones
    alone.
    """
    if part.classes is None or len(part.classes.names) < 2:
        return None
    rows = part.scored
    count = next(
        (count for most, count in SHUFFLES.items() if len(rows) <= most),
        FEWEST_SHUFFLES,
    )
    groups, texts = part.names(rows)
    found = permuted(part.classes.codes[rows], count, seed, groups, units=texts)
    return (
        found._replace(labellings=found.labellings[:1])
        if found.smallest_p is None
        else found
    )


def _panels(
    parts: Sequence[Points],
    cells: Sequence[Sequence[Cell]],
    how: Pictures,
    seeds: Sequence[int],
    pool: UmapPool | None,
) -> list[list[Panel]]:
    """A panel for every cell, with its picture aligned with the one before it."""
    drawable = [points for row in cells for points, _ in row if not points.all_equal]
    with progress.track(
        f"Drawing by {how.method}", total=len(drawable) * len(seeds)
    ) as advance:
        drawn = iter(draw(drawable, how, seeds, pool, advance))
    panels: list[list[Panel]] = []
    first_of: dict[str, Picture] = {}
    for part, row in zip(parts, cells, strict=True):
        panels.append([])
        codes = None if part.classes is None else part.classes.codes
        before = first_of.get(part.dataset)
        for points, scores in row:
            if points.all_equal:
                panels[-1].append(Panel(points.distinct))
                continue
            shown, *others = next(drawn)
            before = aligned(
                shown,
                before if before is not None and before.shape == shown.shape else None,
            )
            first_of.setdefault(part.dataset, before)
            panels[-1].append(
                panel(points, [before, *others], codes, scores, how.neighbours)
            )
    return panels


def _result(
    parts: Sequence[Points],
    panels: Sequence[Sequence[Panel]],
    how: Pictures,
    beside: Sequence[Beside],
    options: Facts,
) -> Result:
    facts: Facts = {
        "method": how.method,
        **options,
        "parts": [
            facts_of(*triple) for triple in zip(parts, panels, beside, strict=True)
        ],
        **tightness(parts, panels),
    }
    return Result("project", table(parts, panels, how.method), facts, _source(parts))


def _source(parts: Sequence[Points]) -> dict[str, Any]:
    """The source of the states; of several models, each."""
    sources = {part.model: part.source for part in parts}
    by_model = {
        name: one.to_json() if isinstance(one, Source) else dict(one)
        for name, one in sources.items()
    }
    if len(by_model) == 1:
        return next(iter(by_model.values()))
    return {"model": ", ".join(by_model), "models": by_model}
