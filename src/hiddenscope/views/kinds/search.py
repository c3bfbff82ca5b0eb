"""The texts nearest to queries, shown and told."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import quoted
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View, Words

QUERIES, RANKS, CURVES = 40, 20, 8
APART = 4  # queries that get a picture each, in which a text has room
SHORT = 60


def views(result: Result) -> Iterator[View]:
    """The nearest of each query with their texts, and how nearness falls off along the ranks."""
    data = result.data.isel(query=slice(QUERIES), rank=slice(RANKS))
    queries = _apart([_short(query) for query in data["query"].to_numpy()])
    look = data["score"].attrs
    measure = Measure(str(look["long_name"]), data["score"].to_numpy(), str(look.get("units", "")))
    ranks = tuple(map(str, data["rank"].to_numpy().tolist()))
    at = f", at {result.facts['site']} of {result.source['model']}" if "model" in result.source else ""
    if len(queries) <= APART:
        yield from (_one(data.isel(query=n), name, at, measure, n) for n, name in enumerate(queries))
    else:
        yield _all(result, data, queries, at, measure)
    if len(ranks) > 1:
        curves = tuple(Series(*one) for one in zip(queries, measure.numbers[:CURVES], strict=False))
        many = f"The first {CURVES} queries." if len(queries) > CURVES else ""
        yield Lines("How nearness falls off", ranks, curves, "rank", measure.name, measure.unit, note=many)


def _one(data: Any, name: str, at: str, measure: Measure, query: int) -> Grid:
    """One query: the texts one below another, the nearest on top."""
    score = measure.numbers[query][::-1]
    rows = [f"{text}  {rank}" for rank, text in zip(data["rank"].to_numpy(), _found(data), strict=True)]
    words = Words.of([[[f"{value:.3g}"]] for value in score])
    limits = (min(0.0, float(score.min())), max(float(score.max()), float(measure.numbers.max())))
    column = Measure(measure.name, score[:, None], measure.unit, limits=limits if limits[0] < limits[1] else None)
    return Grid(f"Nearest to “{name}”{at}", tuple(rows[::-1]), (measure.name,), (column,), words=words)


def _all(result: Result, data: Any, queries: tuple[str, ...], at: str, measure: Measure) -> Grid:
    """Many queries: one row each, the nearest on the left."""
    ranks = tuple(map(str, data["rank"].to_numpy().tolist()))
    words = np.array([[[text] for text in _found(data.isel(query=n))] for n in range(len(queries))], dtype=object)
    sizes = result.data.sizes
    cut = sizes["query"] > len(queries) or sizes["rank"] > len(ranks)
    return Grid(
        f"Nearest to each query{at}",
        queries[::-1],
        ranks,
        (Measure(measure.name, measure.numbers[::-1], measure.unit),),
        words=Words.of(words[::-1]),
        note=f"{len(queries)} of {sizes['query']} queries, {len(ranks)} of {sizes['rank']} ranks." if cut else "",
    )


def _found(data: Any) -> list[str]:
    """What the nearest of one query are called: a text, a token with its place, or a number."""
    if "position" in data:
        places = zip(data["string"].to_numpy(), data["text"].to_numpy(), data["position"].to_numpy(), strict=True)
        return [f"{string!r} at {position} of text {text}" for string, text, position in places]
    names = data["string"].to_numpy() if "string" in data else [f"text {n}" for n in data["number"].to_numpy()]
    return [_short(name) for name in names]


def _short(text: Any) -> str:
    plain = " ".join(str(text).split())
    return plain if len(plain) <= SHORT else plain[: SHORT - 1] + "…"


def _apart(names: list[str]) -> tuple[str, ...]:
    """Names that are all different: two queries may be the same."""
    return tuple(f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names))


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    nearness = result.facts["nearness"]
    lines = [
        f"Nearest to {quoted(query)} is {quoted(found['text'])}, at {nearness} {found[nearness]:.2f}."
        for query, found in result.facts["nearest"].items()
        if "text" in found
    ]
    how = f"All {result.facts['searched']} were held against every query, none left out."
    yield Section("What is nearest", " ".join([how, *lines]), tuple(views(result)))
