"""The texts nearest to queries: views, findings, sections and tables."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result, Table
from hiddenscope.views.drawing import as_prose, quoted
from hiddenscope.views.standing import standing
from hiddenscope.views.values import (
    Grid,
    Lines,
    Listing,
    Measure,
    Section,
    Series,
    View,
    Words,
)

QUERIES, RANKS, CURVES = 40, 20, 8
LISTED = 100  # of the nearest to one query
SEPARATE = 4  # up to so many queries get a picture each, in which a text has room
SHORT = 60


def views(result: Result) -> Iterator[View]:
    """The nearest of each query with their texts, and how nearness falls off along the
    ranks.
    """
    data = result.data.isel(query=slice(QUERIES), rank=slice(RANKS))
    queries = _different([_short(query) for query in data["query"].to_numpy()])
    attrs = data["score"].attrs
    measure = Measure(
        str(attrs["long_name"]), data["score"].to_numpy(), str(attrs.get("units", ""))
    )
    ranks = tuple(map(str, data["rank"].to_numpy().tolist()))
    at = (
        f", at {result.facts['site']} of {result.source['model']}"
        if "model" in result.source
        else ""
    )
    if len(queries) <= SEPARATE:
        yield from (
            _one_query(data.isel(query=n), name, at, measure, n)
            for n, name in enumerate(queries)
        )
    else:
        yield _all_queries(result, data, queries, at, measure)
    if len(ranks) > 1:
        curves = tuple(
            Series(*one) for one in zip(queries, measure.numbers[:CURVES], strict=False)
        )
        note = f"The first {CURVES} queries." if len(queries) > CURVES else ""
        yield Lines(
            "How nearness falls off",
            ranks,
            curves,
            "rank",
            measure.name,
            measure.unit,
            note=note,
        )


def _one_query(data: Any, name: str, at: str, measure: Measure, query: int) -> Grid:
    """One query: the texts one below another, the nearest on top."""
    score = measure.numbers[query][::-1]
    rows = [
        f"{text}  {rank}"
        for rank, text in zip(data["rank"].to_numpy(), _names(data), strict=True)
    ]
    words = Words.of([[[f"{value:.3g}"]] for value in score])
    limits = (
        min(0.0, float(score.min())),
        max(float(score.max()), float(measure.numbers.max())),
    )
    column = Measure(
        measure.name,
        score[:, None],
        measure.unit,
        limits=limits if limits[0] < limits[1] else None,
    )
    title = f"Nearest to “{name}”{at}"
    return Grid(
        title,
        tuple(rows[::-1]),
        (measure.name,),
        (column,),
        words=words,
        x_name="",
        y_name="text",
    )


def _all_queries(
    result: Result, data: Any, queries: tuple[str, ...], at: str, measure: Measure
) -> Grid:
    """Many queries: one row each, the nearest on the left."""
    ranks = tuple(map(str, data["rank"].to_numpy().tolist()))
    words = np.array(
        [[[text] for text in _names(data.isel(query=n))] for n in range(len(queries))],
        dtype=object,
    )
    sizes = result.data.sizes
    cut = sizes["query"] > len(queries) or sizes["rank"] > len(ranks)
    return Grid(
        f"Nearest to each query{at}",
        queries[::-1],
        ranks,
        (Measure(measure.name, measure.numbers[::-1], measure.unit),),
        words=Words.of(words[::-1]),
        x_name="rank",
        y_name="query",
        note=(
            f"{len(queries)} of {sizes['query']} queries, {len(ranks)} of"
            f" {sizes['rank']} ranks."
            if cut
            else ""
        ),
    )


def _names(data: Any) -> list[str]:
    """A name for each of the nearest to one query: a text, a token with its position,
    or a number.
    """
    if "position" in data:
        places = zip(
            data["string"].to_numpy(),
            data["text"].to_numpy(),
            data["position"].to_numpy(),
            strict=True,
        )
        return [
            f"{string!r} at {position} of text {text}"
            for string, text, position in places
        ]
    strings = (
        data["string"].to_numpy()
        if "string" in data
        else [f"text {n}" for n in data["number"].to_numpy()]
    )
    return [_short(string) for string in strings]


def _short(text: Any) -> str:
    plain = " ".join(str(text).split())
    return plain if len(plain) <= SHORT else plain[: SHORT - 1] + "…"


def _different(names: list[str]) -> tuple[str, ...]:
    """Names that are all different, since two queries may be the same."""
    return tuple(
        f"{name} ({n})" if names.count(name) > 1 else name
        for n, name in enumerate(names)
    )


def findings(result: Result) -> Iterator[str]:
    """The nearest to each of the first queries, and what was searched."""
    facts = result.facts
    how = "dot product" if facts["nearness"] == "dot" else facts["nearness"]
    for nearest in facts["nearest"]:
        name = (
            quoted(nearest["string"])
            if "string" in nearest
            else f"{facts['unit']} {nearest['number']}"
        )
        score = f"{_score(facts['nearness'])} {nearest['score']:.2f}"
        yield f"Nearest to {quoted(nearest['query'])} is {name}, with {score}."
    yield (
        f"All {facts['searched']:,} {facts['unit']}s were compared with every query by"
        f" {how}; none was left out."
    )
    if facts.get("token") not in (None, "each"):
        yield f"What was compared is {standing(facts['token'])} at {facts['site']}."


def _score(nearness: str) -> str:
    return {"dot": "dot product", "l2": "L2 distance"}.get(nearness, nearness)


def sections(result: Result) -> Iterator[Section]:
    """A list of the nearest to each query with their scores; then how nearness falls
    off.
    """
    facts = result.facts
    reading = (
        f"There is a list for every query: the rank of a {facts['unit']}, the"
        f" {_score(facts['nearness'])} of its vector and the query's, which is also the"
        " length of the bar, and the text itself."
    )
    # The lists are the picture here: the curve beneath them only shows how their scores
    # fall off.
    yield Section(
        "What is nearest",
        as_prose(findings(result)),
        (),
        reading,
        tables=tuple(_lists(result)),
    )
    lines = tuple(view for view in views(result) if isinstance(view, Lines))
    if lines:
        how = f"The line is the {_score(facts['nearness'])} of each rank."
        yield Section("How nearness falls off", "", lines, how, folded=True)


def _lists(result: Result) -> Iterator[Listing]:
    """The nearest to each query: rank, score, and the text in full."""
    data = result.data.isel(query=slice(QUERIES), rank=slice(LISTED))
    name, unit = _score(result.facts["nearness"]), str(result.facts["unit"])
    most = float(np.abs(data["score"].to_numpy()).max(initial=0.0))
    cut = [f"The first {data.sizes[dim]} of {size}." if size > data.sizes[dim] else "" for dim, size in
           (("query", result.data.sizes["query"]), ("rank", result.data.sizes["rank"]))]  # fmt: skip
    for number, query in enumerate(
        _different([_short(one) for one in data["query"].to_numpy()])
    ):
        here = data.isel(query=number)
        scores, ranks = (
            here["score"].to_numpy().tolist(),
            here["rank"].to_numpy().tolist(),
        )
        rows = tuple(zip(ranks, scores, _texts(here), strict=True))
        note = " ".join(
            filter(None, [cut[1], cut[0] if number == data.sizes["query"] - 1 else ""])
        )
        yield Listing(
            f"Nearest to “{query}”", ("rank", name, unit), rows, name, most, note
        )


def _texts(data: Any) -> list[str]:
    """The nearest to one query in full: a text, a token with its place, or a number."""
    if "position" in data or "string" not in data:
        return _names(data)
    return [str(string) for string in data["string"].to_numpy()]


def tables(result: Result) -> Iterator[Table]:
    """The nearest to each query, one table for each."""
    named = "string" if "string" in result.data else "number"
    unit, nearness = result.facts["unit"], result.facts["nearness"]
    for query in range(result.data.sizes["query"]):
        here = result.data.isel(query=query)
        columns = (
            here[name].to_numpy().tolist()
            for name in ("rank", "score", "number", named)
        )
        rows = [
            [str(rank), f"{score:.4f}", str(number), str(string)]
            for rank, score, number, string in zip(*columns, strict=True)
        ]
        yield Table(
            ["rank", nearness, "number", unit], rows, (3,), str(here["query"].item())
        )
