"""The story of circuits: how faithful they are by size, and which edges they hold."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from hiddenscope.causes.contrast import AnswerPair
from hiddenscope.causes.strongest import StrongEdge, graph, table
from hiddenscope.results import Listing, Report, Result, Section, frozen
from hiddenscope.results.pictures import Lines, Series, Style
from hiddenscope.results.report import Estimate
from hiddenscope.results.sentences import counted, estimated, model_name, quoted_tokens
from hiddenscope.results.story import Aside, table_of

FAITHFUL = 0.8
ABLATED = {
    "resample": "what was written in the corrupt run",
    "mean": "what is written on average in the prompts that chose the edges",
    "zero": "nothing",
}


@frozen
class Other:
    """How faithful another circuit is, by the way it was made."""

    way: str
    value: float


@frozen
class Size(Estimate):
    """How faithful the circuit of one size is, and others of that size.

    `share` is that of all edges. `where_chosen` is the faithfulness on the prompts that
    chose the edges.
    """

    share: float
    edges: int
    where_chosen: float
    others: list[Other]


@frozen
class Area:
    """The areas of one way to choose circuits of all sizes.

    `cpr` is the area below the faithfulness, `cmd` that between it and 1, along shares
    of the edges; those of `log_` are along their logarithm. All are means over the
    axis.
    """

    way: str
    cpr: float
    cmd: float
    log_cpr: float
    log_cmd: float


@frozen
class CircuitReport(Report):
    """How few edges carry an answer.

    `clean` and `ablated` are the mean logit differences with all edges kept and with
    none, on the prompts that test. With `held_out` these chose no edges. `restored` is
    how far all edges together are from the other run, in units of the rounding
    tolerance.
    """

    contrasts: int
    groups: int
    copies: int
    chosen_on: int
    tested_on: int
    held_out: bool
    ablation: Literal["resample", "mean", "zero"]
    method: Literal["integrated", "gradient", "dropped", "exact"]
    answers: list[AnswerPair]
    clean: float
    ablated: float
    edges: int
    sizes: list[Size]
    areas: list[Area]
    strongest: list[StrongEdge]
    restored: float
    notes: list[str]


def story(report: CircuitReport, result: Result) -> Iterator[Section]:
    """Yield the faithfulness by size beside other circuits, then the edges."""
    data = result.data
    percent = tuple(f"{100 * share:g}" for share in data["share"].values)
    series = []
    for way in map(str, data["way"].values):
        own = data.sel(way=way)
        low = high = None
        if way == "circuit" and np.isfinite(own["low"]).any():
            low, high = own["low"].values, own["high"].values
        band = "" if low is None else "95% interval"
        style: Style = "line" if way == "circuit" else "dash"
        series.append(Series(way, own["faithfulness"].values, low, high, band, style))
    if report.held_out:
        chosen = data["where_chosen"].values
        series.append(Series("circuit, where chosen", chosen, style="dash"))
    lines = Lines(
        f"How much of the answer circuits keep, in {model_name(result)}",
        percent,
        tuple(series),
        x_name="% of the edges",
        y_name="faithfulness",
        x_scale="log",
    )
    rows, areas = [], []
    for size in report.sizes:
        others = [other.value for other in size.others]
        if report.held_out:
            others = [size.where_chosen, *others]
        values = [f"{value:z.2f}" for value in others]
        kept = estimated(size, "z.2f")
        rows.append((f"{size.share:.1%}", f"{size.edges:,}", kept, *values))
    chosen_on = ["where chosen"] if report.held_out else []
    ways = map(str, data["way"].values[1:])
    columns = "share", "edges", "faithfulness", *chosen_on, *ways
    sizes = Listing("Circuits by size", columns, tuple(rows))
    for area in report.areas:
        numbers = (area.cpr, area.cmd, area.log_cpr, area.log_cmd)
        areas.append((area.way, *(f"{number:.2f}" for number in numbers)))
    columns = "way", "CPR", "CMD", "CPR, log axis", "CMD, log axis"
    under = Listing("Areas", columns, tuple(areas))
    yield Section(
        "How few edges carry the answer?",
        tuple(_findings(report)),
        (lines,),
        "Edges are kept in the order of their effects; through all others goes"
        f" {ABLATED[report.ablation]}. Faithfulness is the share of the logit"
        " difference that is left: 1 is the model, 0 the run with no edge kept. CPR is"
        " the area below the curve and CMD that between it and 1. On the linear axis"
        " 90% of both lies above 10% of the edges, which says little of small circuits:"
        " the last two columns take a logarithmic axis.",
        tables=(sizes, table_of(sizes), under, table_of(under)),
    )
    title = f"The strongest edges in {model_name(result)}"
    yield Section(
        "The strongest edges",
        (),
        (graph(title, report.strongest, result.data),),
        "The effect of an edge is the share of the logit difference that is lost where"
        " it alone carries what was written in the corrupt run.",
        tables=(table(report.strongest, "The strongest edges"),),
    )


def _findings(report: CircuitReport) -> Iterator[str]:
    enough = [size for size in report.sizes if size.value >= FAITHFUL]
    size = min(enough, key=lambda size: size.edges)
    where = "on prompts that did not choose them" if report.held_out else "here"
    if size.edges == report.edges:
        yield (
            f"Of the circuits of up to {report.sizes[-2].share:.0%} of the edges, none"
            f" keeps {FAITHFUL} of the logit difference {where}."
        )
    else:
        share = size.edges / report.edges
        yield (
            f"The strongest {share:.1%} of the edges ({size.edges:,} of"
            f" {report.edges:,}) keep {estimated(size, '.2f')} of the logit difference"
            f" {where}."
        )
        others = [f"{other.way} {other.value:z.2f}" for other in size.others]
        yield f"Others of that size keep: {', '.join(others)}."
    pair = report.answers[0]
    answer, other = quoted_tokens([pair.answer, pair.other])
    average = "The"
    if report.contrasts > 1:
        average = f"On average over {counted(report.tested_on, 'pair')} of prompts, the"
        answer, other = "the answer", "the other"
    yield (
        f"{average} logit of {answer} is {_above(report.clean)} that of {other} with"
        f" all edges, and {_above(report.ablated)} it with none."
    )
    if report.held_out:
        yield (
            f"{counted(report.chosen_on, 'pair')} of prompts chose the edges, and"
            f" {counted(report.tested_on, 'other')} tested them."
        )
        if size.low is None and size.edges < report.edges:
            yield "There is no interval: it needs eight groups of prompts that test."
    else:
        yield (
            "The prompts that chose the edges are those that they were tested on;"
            " whether it holds for others was not tested."
        )
    yield Aside(
        "All edges changed together give the corrupt run, to"
        f" {report.restored:.2f} of what rounding may do."
    )
    yield from map(Aside, report.notes)


def _above(difference: float) -> str:
    return f"{abs(difference):.2f} {'below' if difference < 0 else 'above'}"
