"""How do points lie, layer by layer: are the classes apart, and does the picture tell the truth?

parts     the points of a dataset in a model, with their classes
maps      pictures in two dimensions, aligned from site to site
crew      who computes UMAP: this process and, where it pays, others
judge     the picture held against the full space
choice    for how many texts the label is the model's own next word
table     everything as one Dataset
findings  what it shows
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from hiddenscope import progress
from hiddenscope.analyses.project.choice import first_choices
from hiddenscope.analyses.project.crew import Crew
from hiddenscope.analyses.project.findings import compared, facts_of
from hiddenscope.analyses.project.judge import Panel, judged, labellings, separations
from hiddenscope.analyses.project.maps import (
    FEWEST,
    METHODS,
    Method,
    Picture,
    Plan,
    aligned,
    installed_pacmap,
    pca,
    pictures,
)
from hiddenscope.analyses.project.parts import Part, datasets, of_models, of_states
from hiddenscope.analyses.project.table import table
from hiddenscope.errors import StatesError
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.separation import Score
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.states import Pair, Readable, Source
from hiddenscope.texts import Labelled
from hiddenscope.vectors import Token

Cell: TypeAlias = tuple[Distances, Mapping[str, Score]]

MOST = 50_000  # points of a panel
FEW = 200  # points up to which pictures of two other seeds are made, and not of one
POINTS = {"last": "the last token of each text", "each": "every token", "mean": "the mean over the tokens of each text"}


def project(
    source: Model | Sequence[Model] | Readable | Pair,
    data: Any = None,
    *,
    method: Method = "umap",
    token: Token = "last",
    sites: Any = "layer.*,final",
    seed: int = 0,
    neighbours: int = 15,
    text: str | None = None,
    label: str | None = None,
    truncate: bool = False,
    first: Callable[[Result], None] | None = None,
) -> Result:
    """One picture a layer, with numbers from the full space that say whether it tells the truth.

    With a model, or several, `data` is a dataset: a shipped name, a path, a frame, (texts, labels), whose columns are
    `text` and `label`; or a mapping of names to several of them, to be compared. With states it is the labels, one a
    text or one a token. `token` is what stands for a text, as in `hs.embed`. UMAP takes a while the first time: `first`
    is called with the result by PCA, which comes at once.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> states = hs.load((tiny_model("gpt2"), None)).capture([[5, 6], [5, 7], [8, 6], [8, 7]])
    >>> result = hs.project(states, ["a", "a", "b", "b"], method="pca")
    >>> dict(result.data["x"].sizes), result.facts["classes"]
    ({'site': 5, 'text': 4}, {'a': 2, 'b': 2})
    """
    _known(method, neighbours, seed)
    models = [source] if isinstance(source, Model) else _models(source)
    given = datasets(data, text, label) if models else {}
    with Crew(_expected(source, models, given, sites)) if method == "umap" else nullcontext() as crew:
        if models:
            parts = list(of_models(models, given, sites, token, truncate))
        else:
            parts = [of_states(source, data, sites, token)]  # type: ignore[arg-type]
        plan = Plan(method, _neighbours(parts, method, neighbours), _seeds(parts, method, seed))
        facts: dict[str, Any] = {"points": POINTS.get(str(token), f"token: {token}"), "seed": seed}
        asked = [(model, one.labels) for model in models for one in given.values()] if token == "last" else []
        choices = [first_choices(model, part, labels) for part, (model, labels) in zip(parts, asked, strict=False)]
        choices = choices or [None] * len(parts)
        cells = _cells(parts, seed)
        at_once = Plan("pca", plan.neighbours, (seed,))
        if first is not None and method != "pca":
            first(_result(parts, _panels(parts, cells, at_once, None), at_once, choices, facts))
        return _result(parts, _panels(parts, cells, plan, crew), plan, choices, facts)


def _expected(source: Any, models: list[Model], given: Mapping[str, Labelled], sites: Any) -> int:
    """How many points there will be over all sites, before any state is captured."""
    if models:
        return sum(len(one.texts) for one in given.values()) * sum(len(m.anatomy.select(sites)) for m in models)
    part = source.encoder if isinstance(source, Pair) else source
    return int(part.tokens.count * len(part.sites))


def _models(source: Any) -> list[Model]:
    """Several models, if that is what was given."""
    if isinstance(source, list | tuple) and source and all(isinstance(one, Model) for one in source):
        return list(source)
    if isinstance(source, Readable | Pair):
        return []
    reason = f"{type(source).__name__} is none of what points can be taken from"
    raise StatesError("Points", reason, "Give a model, a list of models, or states.")


def _known(method: str, neighbours: int, seed: int) -> None:
    if method not in METHODS:
        raise StatesError(f"No method {str(method)[:40]!r}", "there are four", f"Ask for {', '.join(METHODS)}.")
    if method == "pacmap":
        installed_pacmap()
    if neighbours < 2:
        raise StatesError(f"{neighbours} neighbours", "a point is its own first", "Ask for 2 or more.")
    if not 0 <= seed < 2**31:
        raise StatesError(f"The seed {seed}", "it is no whole number from 0 on", "Give 0, 1, 2 or so.")


def _neighbours(parts: Sequence[Part], method: Method, neighbours: int) -> int:
    """As many as were asked for, and where there are fewer points, all of these."""
    fewest, most = (pick(part.values.shape[1] for part in parts) for pick in (min, max))
    if most > MOST:
        reason = f"there are {most:,}, and every pair of them is looked at"
        raise StatesError(f"More than {MOST:,} points", reason, "Give a sample of them.")
    if fewest < FEWEST[method]:
        reason = f"there {'is one' if fewest == 1 else f'are {fewest}'}, and it takes {FEWEST[method]}"
        raise StatesError(f"Points for a picture by {method}", reason, "Give more texts, or ask for pca.")
    return min(neighbours, fewest - 1)


def _seeds(parts: Sequence[Part], method: Method, seed: int) -> tuple[int, ...]:
    if method == "pca":
        return (seed,)
    most = max(part.values.shape[1] for part in parts)
    return tuple(range(seed, seed + (3 if most <= FEW else 2)))


def _cells(parts: Sequence[Part], seed: int) -> list[list[Cell]]:
    """Every site of every part: its points and how far apart its classes are."""
    with progress.track("Scoring", total=sum(len(part.sites) for part in parts)) as advance:
        cells: list[list[Cell]] = []
        for part in parts:
            cells.append([])
            labels = labellings(part.classes, seed)
            for values in part.values:
                points = Distances(values)
                cells[-1].append((points, separations(points, labels)))
                advance(1)
    return cells


def _panels(parts: Sequence[Part], cells: Sequence[Sequence[Cell]], plan: Plan, crew: Crew | None) -> list[list[Panel]]:
    """A panel for every cell, with its picture turned towards the one before it."""
    every = [points for own in cells for points, _ in own if not points.alike]
    with progress.track(f"Mapping by {plan.method}", total=len(every) * len(plan.seeds)) as advance:
        made = iter(pictures(every, [pca(points)[0] for points in every], plan, crew, advance))
    panels: list[list[Panel]] = []
    beginnings: dict[str, Picture] = {}
    for part, own in zip(parts, cells, strict=True):
        panels.append([])
        before = beginnings.get(part.dataset)
        for points, scores in own:
            if points.alike:
                panels[-1].append(Panel(points.distinct))
                continue
            shown, *others = next(made)
            before = aligned(shown, before if before is not None and before.shape == shown.shape else None)
            beginnings.setdefault(part.dataset, before)
            panels[-1].append(judged(points, [before, *others], part.classes, scores, plan.neighbours))
    return panels


def _result(
    parts: Sequence[Part],
    panels: Sequence[Sequence[Panel]],
    plan: Plan,
    choices: Sequence[int | None],
    facts: Mapping[str, Any],
) -> Result:
    told: dict[str, Any] = {"method": plan.method, **facts}
    if plan.method != "pca":
        told |= {"neighbours": plan.neighbours, "seeds": list(plan.seeds)}
    for part, own, choice in zip(parts, panels, choices, strict=True):
        found = facts_of(part, own, choice)
        told |= found if len(parts) == 1 else {_name(parts, part): found}
    told |= compared(parts, panels)
    return Result("project", table(parts, panels, plan.method), told, _source(parts))


def _name(parts: Sequence[Part], part: Part) -> str:
    """The name by which a part is told from the others."""
    names = [part.model] if len({one.model for one in parts}) > 1 else []
    return ", ".join([*names, part.dataset] if len({one.dataset for one in parts}) > 1 else names)


def _source(parts: Sequence[Part]) -> dict[str, Any]:
    """Where the states come from; of several models, each."""
    sources = {part.model: part.source for part in parts}
    told = {name: one.to_json() if isinstance(one, Source) else dict(one) for name, one in sources.items()}
    if len(told) == 1:
        return next(iter(told.values()))
    return {"model": ", ".join(told), "models": told}
