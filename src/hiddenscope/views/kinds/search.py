"""The texts nearest to queries, shown and told."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View, Words

QUERIES, RANKS, CURVES = 40, 20, 8
BESIDE = 4  # queries whose texts are read one below another, in columns
SHORT = 60
SPACE = "\N{NO-BREAK SPACE}"  # a plain one is drawn as a mark, as it should be in a token


def pictures(result: Result) -> Iterator[View]:
    """The nearest of each query with their texts, and how nearness falls off along the ranks."""
    data = result.data.isel(query=slice(QUERIES), rank=slice(RANKS))
    queries = _apart([_short(str(query)) for query in data["query"].to_numpy()])
    ranks = tuple(map(str, data["rank"].to_numpy().tolist()))
    look = data["score"].attrs
    said, unit = str(look["long_name"]), str(look.get("units", ""))
    yield _grid(result, data, queries, Measure(said, data["score"].to_numpy(), unit))
    if len(ranks) > 1:
        curves = tuple(Series(*one) for one in zip(queries, data["score"].to_numpy()[:CURVES], strict=False))
        many = f"The first {CURVES} queries." if len(queries) > CURVES else ""
        yield Lines("How nearness falls off", ranks, curves, "rank", said, unit, note=many)


def _grid(result: Result, data: Any, queries: tuple[str, ...], measure: Measure) -> Grid:
    """A column a query while they are few, so that a text has room; a row a query where they are many."""
    each = "position" in data
    found = data["string"].to_numpy() if "string" in data else data["number"].to_numpy().astype(str)
    texts = [[[str(text) if each else _short(str(text))] for text in row] for row in found]
    words, values = np.array(texts, dtype=object), measure.numbers
    ranks = tuple(map(str, data["rank"].to_numpy().tolist()))
    rows, columns = queries, ranks
    if len(queries) <= BESIDE:
        rows, columns, words, values = ranks, queries, words.swapaxes(0, 1), values.T
    at = f", at {result.facts['site']} of {result.source['model']}" if "model" in result.source else ""
    sizes = result.data.sizes
    cut = sizes["query"] > len(queries) or sizes["rank"] > len(ranks)
    return Grid(
        f"The {'tokens' if each else 'texts'} nearest to each query{at}",
        rows[::-1],
        columns,
        (Measure(measure.name, values[::-1], measure.unit),),
        words=Words.of(words[::-1]),
        note=f"{len(queries)} of {sizes['query']} queries, {len(ranks)} of {sizes['rank']} ranks." if cut else "",
    )


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return (plain if len(plain) <= SHORT else plain[: SHORT - 1] + "…").replace(" ", SPACE)


def _apart(names: list[str]) -> tuple[str, ...]:
    """Names that are all different: two queries may be the same."""
    return tuple(f"{name}{SPACE}({n})" if names.count(name) > 1 else name for n, name in enumerate(names))


def tell(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    nearness = result.facts["nearness"]
    lines = [
        f"Nearest to “{query}” is “{found['text']}”, at {nearness} {found[nearness]:.2f}."
        for query, found in result.facts["nearest"].items()
        if "text" in found
    ]
    how = f"All {result.facts['searched']} were held against every query, none left out."
    yield Section("What is nearest", " ".join([how, *lines]), tuple(pictures(result)))
