"""The story of a search: the texts nearest to queries."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from hiddenscope.results import Listing, Report, Result, Section, Table, frozen
from hiddenscope.results.drawing import labels, long_name
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, Words
from hiddenscope.results.report import Pooled
from hiddenscope.results.sentences import (
    distinct,
    quote,
    ruled,
    shortened,
    standing,
)

if TYPE_CHECKING:
    import xarray

# Of a picture; a longer result is drawn as far as this.
QUERIES, RANKS, CURVES = 40, 20, 8
# A list has so many of the nearest to one query.
LISTED = 100
# Up to so many queries get a picture each, in which a text has room.
SEPARATE = 4
LONGEST_NAME = 60
SCORES = {"dot": "dot product", "l2": "L2 distance"}


@frozen
class NearestRow:
    """The nearest to one query, and whether chance explains that it is as near."""

    query: str
    number: int
    score: float
    string: str | None = None
    by_chance: bool = False


@frozen
class SearchReport(Report):
    """What was searched, and the nearest to the first queries.

    `typical` is the mean cosine of two rows at random. `embedded` is how texts became
    vectors where the rows are those of an array, which does not say how it was made.
    """

    searched: int
    unit: str
    nearness: Literal["cosine", "dot", "l2"]
    site: str | None = None
    token: str | int | None = None
    nearest: list[NearestRow]
    typical: float | None = None
    pooled: Pooled | None = None
    embedded: str | None = None

    @property
    def score(self) -> str:
        """Return the name of the score."""
        return SCORES.get(self.nearness, self.nearness)


def story(report: SearchReport, result: Result) -> Iterator[Section]:
    """Yield a list of the nearest to each query with their scores; then how nearness
    falls off along the ranks.
    """
    data = result.data.isel(query=slice(QUERIES), rank=slice(RANKS))
    queries, ranks = _queries(data), labels(data, "rank")
    score = data["score"]
    if len(queries) <= SEPARATE:
        grids = [
            _grid_of_query(result, data.isel(query=place), query, score)
            for place, query in enumerate(queries)
        ]
    else:
        # Many queries have one row each, with the nearest on the left.
        total = result.data.sizes
        names = [_names(data.isel(query=place)) for place in range(len(queries))]
        words = np.array(names[::-1], dtype=object)[:, :, None]
        scores = score.to_numpy()[::-1]
        note = ""
        if total["query"] > len(queries) or total["rank"] > len(ranks):
            note = (
                f"{len(queries)} of {total['query']} queries, {len(ranks)} of"
                f" {total['rank']} ranks."
            )
        grid = Grid(
            f"Nearest to each query{_at(result)}",
            queries[::-1],
            ranks,
            (Measure(long_name(score), scores, _unit(score)),),
            words=Words.of(words),
            x_name="rank",
            y_name="query",
            note=note,
        )
        grids = [grid]
    # The lists are the picture here: the curve beneath them only shows how their scores
    # fall off.
    yield Section(
        "What is nearest",
        tuple(_findings(report)),
        reading=f"There is a list for every query: the rank of a {report.unit}, the"
        f" {report.score} of its vector and the query's, which is also the length of"
        " the bar, and the text itself.",
        tables=(*_listings(report, result), *_tables(report, result)),
        figures=tuple(grids),
    )
    if len(ranks) > 1:
        curves = zip(queries[:CURVES], score.to_numpy(), strict=False)
        lines = Lines(
            "How nearness falls off",
            ranks,
            tuple(Series(query, curve) for query, curve in curves),
            "rank",
            long_name(score),
            _unit(score),
            note=f"The first {CURVES} queries." if len(queries) > CURVES else "",
        )
        reading = f"The line is the {report.score} of each rank."
        yield Section(
            "How nearness falls off", views=(lines,), reading=reading, folded=True
        )


def _grid_of_query(
    result: Result, data: "xarray.Dataset", query: str, scores: "xarray.DataArray"
) -> Grid:
    """Draw the nearest to one query one below another, the nearest on top."""
    score = data["score"].to_numpy()[::-1].astype(np.float32)
    names = zip(_names(data), labels(data, "rank"), strict=True)
    rows = [f"{name}  {rank}" for name, rank in names]
    # All queries share the upper end of the colours, so that they can be compared.
    low = min(0.0, float(score.min()))
    high = float(scores.to_numpy().astype(np.float32).max())
    limits = (low, high) if low < high else None
    name = long_name(data["score"])
    column = Measure(name, score[:, None], _unit(data["score"]), limits=limits)
    return Grid(
        f"Nearest to “{query}”{_at(result)}",
        tuple(rows[::-1]),
        (name,),
        (column,),
        words=Words.of([[[f"{value:.3g}"]] for value in score]),
        x_name="",
        y_name="text",
    )


def _at(result: Result) -> str:
    if "model" not in result.source:
        return ""
    return f", at {result.facts['site']} of {result.source['model']}"


def _unit(score: "xarray.DataArray") -> str:
    return str(score.attrs.get("units", ""))


def _queries(data: "xarray.Dataset") -> tuple[str, ...]:
    return distinct([_short(query) for query in data["query"].to_numpy()])


def _names(data: "xarray.Dataset") -> list[str]:
    """Name each of the nearest to one query: a text, a token with its position, or a
    number.
    """
    if "position" in data:
        strings = data["string"].to_numpy()
        positions, texts = data["position"].to_numpy(), data["text"].to_numpy()
        return [
            f"{string!r} at {position} of text {text}"
            for string, position, text in zip(strings, positions, texts, strict=True)
        ]
    if "string" not in data:
        return [f"text {number}" for number in data["number"].to_numpy()]
    return [_short(string) for string in data["string"].to_numpy()]


def _short(text: object) -> str:
    return shortened(" ".join(str(text).split()), LONGEST_NAME)


def _findings(report: SearchReport) -> Iterator[str]:
    """Yield the nearest to each of the first queries, and what was searched."""
    unit, nearness = report.unit, report.nearness
    for nearest in report.nearest:
        name = f"{unit} {nearest.number}"
        if nearest.string is not None:
            name = quote(nearest.string)
        chance = ", which chance alone explains" if nearest.by_chance else ""
        yield (
            f"Nearest to {quote(nearest.query)} is {name}, with"
            f" {report.score} {nearest.score:.2f}{chance}."
        )
    if report.typical is not None:
        yield f"Two {unit}s at random have {report.score} {report.typical:.2f}."
    how = "dot product" if nearness == "dot" else nearness
    every = f"All {report.searched:,} {unit}s were"
    if report.searched == 1:
        every = f"The only {unit} was"
    yield f"{every} compared with every query by {how}; none was left out."
    if report.token is not None and report.token != "each":
        yield f"What was compared is {standing(report.token)} at {report.site}."
    if report.embedded is not None:
        yield (
            "How the rows of the array were made is not recorded. The texts of the"
            f" queries are {report.embedded}: make both alike."
        )
    yield from ruled(report.pooled)


def _listings(report: SearchReport, result: Result) -> Iterator[Listing]:
    """Yield the nearest to each query: rank, score, and the text in full."""
    total = result.data.sizes
    data = result.data.isel(query=slice(QUERIES), rank=slice(LISTED))
    largest = float(np.abs(data["score"].to_numpy()).max(initial=0.0))
    queries, count = _queries(data), data.sizes["rank"]
    for place, query in enumerate(queries):
        here = data.isel(query=place)
        names = _names(here)
        # A text stands here in full.
        if "string" in here and "position" not in here:
            names = list(map(str, here["string"].to_numpy()))
        ranks, scores = here["rank"].to_numpy(), here["score"].to_numpy()
        rows = zip(ranks.tolist(), scores.tolist(), names, strict=True)
        notes = []
        if total["rank"] > count:
            notes.append(f"The first {count} of {total['rank']}.")
        if total["query"] > len(queries) and place == len(queries) - 1:
            notes.append(f"The first {len(queries)} of {total['query']}.")
        yield Listing(
            f"Nearest to “{query}”",
            ("rank", report.score, report.unit),
            tuple(rows),
            bar=report.score,
            most=largest,
            note=" ".join(notes),
        )


def _tables(report: SearchReport, result: Result) -> Iterator[Table]:
    """Yield the nearest to each query, one table for each."""
    names = "string" if "string" in result.data else "number"
    columns = ["rank", report.nearness, "number", report.unit]
    for place, query in enumerate(labels(result.data, "query")):
        here = result.data.isel(query=place)
        scores = [f"{score:.4f}" for score in here["score"].to_numpy()]
        cells = (
            labels(here, "rank"),
            scores,
            labels(here, "number"),
            labels(here, names),
        )
        rows = list(map(list, zip(*cells, strict=True)))
        yield Table(columns, rows, (3,), query)
