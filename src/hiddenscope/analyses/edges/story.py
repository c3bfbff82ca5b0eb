"""The story of edges: the strongest ones as a graph, and how far estimates are off."""

from collections.abc import Iterator
from typing import Literal

from hiddenscope.causes.contrast import AnswerPair
from hiddenscope.causes.strongest import StrongEdge, graph, table
from hiddenscope.results import Report, Result, Section, frozen
from hiddenscope.results.report import Estimate
from hiddenscope.results.sentences import in_series, model_name, quoted_tokens
from hiddenscope.results.story import Aside

MOST_NAMED = 3
METHODS = {
    "integrated": "five gradients between the runs",
    "gradient": "the gradient of the changed run",
    "dropped": "gradients with one layer's dropped at a time, as absolute values",
}


@frozen
class EdgesReport(Report):
    """Which part reads what from which part.

    `clean` and `corrupt` are the mean logit differences of the runs. `error` is how far
    estimates are off, as a share of the exact effects, on `sampled` edges;
    `error_strongest` is that of the strongest ones. `restored`
    is how far all edges together are from the other run, in units of the rounding
    tolerance.
    """

    contrasts: int
    groups: int
    copies: int
    into: Literal["corrupt", "clean"]
    method: Literal["integrated", "gradient", "dropped", "exact"]
    answers: list[AnswerPair]
    clean: float
    corrupt: float
    writers: int
    readers: int
    edges: int
    strongest: list[StrongEdge]
    named: list[StrongEdge] | None = None
    error: Estimate | None
    error_strongest: float | None = None
    sampled: int
    restored: float
    notes: list[str]


def story(report: EdgesReport, result: Result) -> Iterator[Section]:
    """Yield the strongest edges, with what their effects mean and how sure they are."""
    title = f"The strongest edges in {model_name(result)}"
    tables = [table(report.strongest, "The strongest edges")]
    if report.named:
        tables.append(table(report.named, "The edges that were named"))
    verb = "restores" if report.into == "corrupt" else "removes"
    yield Section(
        "Which part reads what from which part?",
        tuple(_findings(report, verb)),
        (graph(title, report.strongest, result.data),),
        "An edge is what one part reads from what another part wrote. Its effect is the"
        f" share of the logit difference that it {verb} where the reader alone gets"
        " what the writer wrote in the other run, at all tokens, and everything else"
        " is as it was. Effects of edges do not add up: one may need another. Layers of"
        " which no edge is drawn are left out.",
        tables=tuple(tables),
    )


def _findings(report: EdgesReport, verb: str) -> Iterator[str]:
    named = []
    for edge in report.strongest[:MOST_NAMED]:
        named.append(f"{edge.writer} to {edge.reader} ({edge.best:.2f})")
    pairs = [quoted_tokens([pair.answer, pair.other]) for pair in report.answers]
    answer, other = pairs[0]
    if named:
        noun = "edge" if len(named) == 1 else "edges"
        verb_is = "is" if len(named) == 1 else "are"
        yield f"The strongest {noun} {verb_is} {in_series(named)}."
    else:
        yield "No edge has an effect."
    average = (
        "" if report.contrasts == 1 else f", on average over {report.contrasts:,} pairs"
    )
    others = " and others" if len(pairs) > 1 else ""
    yield (
        f"The logit of {answer} less that of {other}{others} is {report.clean:.2f}"
        f" after the clean prompt and {report.corrupt:.2f} after the corrupt"
        f" one{average}."
    )
    error = report.error
    if report.method == "exact":
        yield "All effects are exact: the rest of the model was run for each of them."
    elif error is None:
        yield (
            f"Effects are estimated by {METHODS[report.method]}, and no error is known:"
            " no edge was sampled."
        )
    else:
        strongest = ""
        if report.error_strongest is not None:
            strongest = f" On the strongest ones it is {report.error_strongest:.0%}."
        interval = "no interval is known for so few different edges"
        if error.low is not None and error.high is not None:
            interval = f"95% interval {max(error.low, 0):.0%} to {error.high:.0%}"
        yield (
            f"Effects are estimated by {METHODS[report.method]}. In {report.sampled}"
            f" random draws of edges the estimates are off by {error.value:.0%} of the"
            f" exact effects ({interval}).{strongest}"
        )
    yield (
        "The edges were ranked on these prompts; whether the order holds for others was"
        " not tested."
    )
    yield Aside(
        f"There are {report.edges:,} edges between {report.writers:,} parts that write"
        f" and {report.readers:,} that read. Changed all together they give the other"
        f" run, to {report.restored:.2f} of what rounding may do."
    )
    yield from map(Aside, report.notes)
