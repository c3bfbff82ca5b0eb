"""The story of attention: what every head reads, and which do what was tested."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.results import Listing, Report, Result, Section, frozen, table_of
from hiddenscope.results.drawing import labels
from hiddenscope.results.pictures import (
    FINE_STEPS,
    Grid,
    HeadScore,
    Measure,
    Patterns,
    steps_of,
)
from hiddenscope.results.sentences import (
    counted,
    in_series,
    model_name,
    plural,
)

if TYPE_CHECKING:
    import xarray

# A page holds at most so many weights, and a picture so many tokens.
MOST_WEIGHTS = 42_000_000
MOST_TOKENS = 512
# A sentence names so many heads of a relation.
MOST_NAMES = 3
RELATIONS = {
    "induction": "the token that followed the last occurrence of the current one",
    "previous": "the previous token",
    "first": "the first token",
    "same": "the current token itself",
}
SHORT = {
    "induction": "induction",
    "previous": "reads the previous token",
    "first": "reads the first token",
    "same": "reads the current token",
}
BEYOND = {
    "induction": "more than a text without repetition gives",
    "previous": "more than chance gives",
    "first": "as idle heads do, more than chance gives",
    "same": "more than chance gives",
}
LEVEL = 0.05
# A table lists so many heads of each relation.
MOST_LISTED = 10
# Weights that sum to less than this leave something out, beyond rounding in bfloat16.
WHOLE = 0.98
# The head that is large at first does the first of these that any head does.
FIRST_SHOWN = ("induction", "previous")
READING = (
    "Each small picture is the pattern of one attention head: tokens that read run"
    " down, tokens that are read run across, and a dark cell is a large weight. Layers"
    " run up and heads run across. Choose a head to see it large, and a token to see"
    " what it reads and which tokens read it. A weight says how much of a token is"
    " read, not how much that changes: a token may be read for having little to say."
    " The value-weighted pattern multiplies each weight by the norm of what the token"
    " writes through the head."
)


@frozen
class Head:
    """A head that gives a related token more weight than chance does.

    `p_half` is the p-value of its giving that token more than half of its weight.
    """

    site: str
    score: float
    null: float
    p: float
    p_half: float


@frozen
class AttentionReport(Report):
    """What the heads read."""

    layers: int
    heads: int
    tokens: int
    causal: bool
    kernel: str
    rows_sum_to: float
    error: float
    draws: int
    notes: list[str]
    previous_heads: list[Head] | None = None
    first_heads: list[Head] | None = None
    same_heads: list[Head] | None = None
    induction_heads: list[Head] | None = None

    def heads_of(self, relation: str) -> list[Head] | None:
        """Return the heads that a test head, the strongest first; None without it."""
        heads: list[Head] | None = getattr(self, f"{relation}_heads")
        return heads


def story(report: AttentionReport, result: Result) -> Iterator[Section]:
    """Yield the patterns with what was found, then the scores of all heads."""
    listings = tuple(_listings(report))
    queries, keys, note = _window(result.data)
    data = result.data.isel(query=queries, key=keys)
    weights = data["pattern"].values
    notes = [note] if note else []
    steps = steps_of(weights)
    if steps < FINE_STEPS:
        notes.append(
            f"On a page the square root of a weight is rounded to one of {steps} steps,"
            f" so a weight is off by at most {1 / steps:.3f}; a .nc file has the exact"
            " numbers."
        )
    heads = Patterns(
        f"What each head of {model_name(result)} reads",
        labels(data, "site"),
        tuple(data["head"].values.tolist()),
        labels(data, "query_string"),
        labels(data, "key_string"),
        weights,
        data["write_norm"].values,
        positions=_positions(data),
        scores=tuple(_scores(data)),
        note=" ".join(notes),
    )
    places = {}
    for row, column in np.argwhere(heads.exists).tolist():
        places[heads.name_of(row, column)] = row, column
    # The head that is large at first: the strongest of those that were found, or else
    # the first one there is.
    large = next(iter(places.values()), (0, 0))
    for relation in reversed(FIRST_SHOWN):
        for head in reversed(report.heads_of(relation) or []):
            large = places.get(head.site, large)
    object.__setattr__(heads, "large", large)
    yield Section(
        "What does each head read?",
        tuple(_findings(report, result)),
        (heads,),
        READING,
        tables=(*listings, *map(table_of, listings)),
    )
    # How far each head does what was tested, layer by head.
    measures = []
    tested = "score" in result.data
    for name in _relations(result.data):
        variable = result.data["score" if tested else name]
        where = "random tokens" if tested else "this text"
        if tested:
            variable = variable.sel(relation=name)
        if name == "induction":
            where = "repeated random tokens"
        measure = Measure(
            f"mean weight on {RELATIONS[name]}",
            variable.values,
            limits=(0, 1),
            title=(
                f"How much each head of {model_name(result)} reads {RELATIONS[name]},"
                f" in {where}"
            ),
        )
        measures.append(measure)
    if measures:
        grid = Grid(
            measures[0].title,
            labels(result.data, "site"),
            labels(result.data, "head"),
            tuple(measures),
            x_name="head",
        )
        yield Section(
            "Which heads do what",
            views=(grid,),
            reading="Every cell is one head: the mean weight that it puts on the token"
            " that the title names. Choose another measure above.",
            folded=True,
        )


def _window(data: "xarray.Dataset") -> tuple[slice, slice, str]:
    """Choose the queries and keys that a picture shows, and say what of the others.

    They are the first ones, or the last where only later queries were asked for.
    """
    total = data.sizes["key"]
    pictures = data.sizes["layer"] * data.sizes["head"]
    most = min(MOST_TOKENS, max(1, int((MOST_WEIGHTS / pictures) ** 0.5)))
    if max(data.sizes["query"], total) <= most:
        return slice(None), slice(None), ""
    if not _positions(data):
        note = f"At most {most:,} tokens of each text are shown."
        return slice(most), slice(most), note
    places = data["query_position"].values - data["key_position"].values[0]
    start, which = 0, "first"
    if places[0] >= most:
        start, which = max(0, int(places[-1]) + 1 - most), "last"
    inside = np.flatnonzero((places >= start) & (places < start + most))
    queries = slice(int(inside[0]), int(inside[-1]) + 1)
    note = f"The {which} {most:,} of {total:,} tokens."
    return queries, slice(start, start + most), note


def _positions(data: "xarray.Dataset") -> tuple[int, ...]:
    """Return the place of each query among the keys; nothing where the two are tokens
    of different texts.
    """
    if any(".cross" in site for site in labels(data, "site")):
        return ()
    keys = data["key_position"].values.tolist()
    positions = data["query_position"].values.tolist()
    if not set(positions) <= set(keys):
        return ()
    return tuple(np.searchsorted(keys, positions).tolist())


def _relations(data: "xarray.Dataset") -> list[str]:
    """Return the relations that were measured, tested or not."""
    tested = _tested(data)
    return [name for name in RELATIONS if name in tested or name in data]


def _tested(data: "xarray.Dataset") -> tuple[str, ...]:
    return labels(data, "relation") if "score" in data else ()


def _scores(data: "xarray.Dataset") -> Iterator[HeadScore]:
    for name in _relations(data):
        here = data[name].values if name in data else None
        tested = {}
        if name in _tested(data):
            for number in ("score", "null", "p"):
                tested[number] = data[number].sel(relation=name).values
        yield HeadScore(SHORT[name], here, **tested)


def _findings(report: AttentionReport, result: Result) -> Iterator[str]:
    """Yield the heads that the tests found, how they were tested, and notes."""
    tested = "score" in result.data
    if tested:
        for relation in RELATIONS:
            heads = report.heads_of(relation)
            if heads is not None:
                yield from _relation_findings(relation, heads, report.heads)
        yield (
            "The numbers in brackets are mean weights on random tokens, so they do not"
            " depend on the text. Every p is corrected for all heads and tests."
        )
    else:
        data = result.data
        yield (
            f"The patterns of {counted(data.sizes['layer'], 'layer')} over"
            f" {counted(data.sizes['key'], 'token')}; heads were not tested."
        )
    if report.rows_sum_to < WHOLE:
        yield (
            f"The weights of a token sum to as little as {report.rows_sum_to:.2f}: the"
            " rest goes to an attention sink that is no token."
        )
    yield from report.notes


def _relation_findings(
    relation: str, significant: list[Head], count: int
) -> Iterator[str]:
    """Say which heads do one thing in earnest, and how many do it beyond chance."""
    what = RELATIONS[relation]
    if not significant:
        yield f"No head is shown to read {what} {BEYOND[relation]}."
        return
    names = []
    for head in significant:
        if head.p_half < LEVEL:
            names.append(f"{head.site} ({head.score:.2f})")
    if names:
        verb = "gives" if len(names) == 1 else "give"
        yield (
            f"{len(names):,} of {count:,} attention {plural(count, 'head')} {verb}"
            f" {what} more than half of the weight (p at most {LEVEL}):"
            f" {_named(names[:MOST_NAMES], len(names))}."
        )
    else:
        yield f"No head is shown to give {what} more than half of its weight."
    nulls = [head.null for head in significant]
    low, high = f"{min(nulls):.2f}", f"{max(nulls):.2f}"
    by_chance = low if low == high else f"{low} to {high}"
    verb = "reads" if len(significant) == 1 else "read"
    yield (
        f"{len(significant):,} of {count:,} {verb} it, if little,"
        f" {BEYOND[relation]}, which is {by_chance} (p at most {LEVEL})."
    )


def _named(names: list[str], count: int) -> str:
    """Name the first of so many heads."""
    if count > len(names):
        return f"{', '.join(names)} and {count - len(names):,} others"
    return in_series(names)


def _listings(report: AttentionReport) -> Iterator[Listing]:
    rows = []
    notes = ["The score is a mean weight on random tokens."]
    for relation in RELATIONS:
        heads = report.heads_of(relation) or []
        for head in heads[:MOST_LISTED]:
            numbers = (head.score, head.null, head.p)
            rows.append((head.site, SHORT[relation], *numbers))
        more = len(heads) - MOST_LISTED
        if more > 0:
            notes.append(f"{SHORT[relation].capitalize()}: {more:,} more.")
    if rows:
        yield Listing(
            "Heads that the tests found",
            ("head", "what it does", "score", "by chance", "corrected p"),
            tuple(rows),
            bar="score",
            most=1.0,
            note=" ".join(notes),
        )
