"""The story of a variable: where a subspace holds it, and what the controls say."""

from collections.abc import Iterator

from hiddenscope.results import Listing, Report, Result, Section, frozen
from hiddenscope.results.drawing import labels
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.report import Estimate
from hiddenscope.results.sentences import counted, estimated, in_series, model_name
from hiddenscope.results.story import table_of

MOST_NAMED = 6
# What is exchanged, as pictures name it.
NAMES = {
    "learned": "the subspace",
    "low": "lower end",
    "high": "upper end",
    "whole": "the whole state",
    "random": "a random subspace",
    "mismatched": "sources at random",
    "read": "only what is read",
    "unchanged": "nothing",
    "shuffled": "learned from sources at random",
    "reinitialised": "learned in random weights",
    "unread": "share that is not read",
}
# Why a subspace is no finding, besides what it is not shown to do more than.
FAILED = {
    "whole": "it does more than the whole state",
    "read": "what is read of it is not shown to do more than a random subspace, as in a"
    " dormant pathway",
}
DRAWN = ("whole", "random", "mismatched", "read")


@frozen
class Held(Estimate):
    """The accuracy at a site and token, and the controls that it does not survive.

    `unread` is the share of the subspace that the answers do not read.
    """

    site: str
    token: str
    unread: float
    failed: list[str]


@frozen
class VariableReport(Report):
    """Where a subspace holds a variable; `right` is the share of bases whose answer the
    model gives.
    """

    pairs: int
    groups: int
    subspace: str
    rank: int
    right: float
    cells: list[Held]
    notes: list[str]


def story(report: VariableReport, result: Result) -> Iterator[Section]:
    """Yield where the subspace holds the variable, beside the controls."""
    data = result.data
    sites = labels(data, "site")
    views = []
    for token in labels(data, "token"):
        column = data.sel(token=token)
        if column["learned"].isnull().all():
            continue
        low, high = column["low"].values, column["high"].values
        value = column["learned"].values
        series = [Series(NAMES["learned"], value, low, high, "95% interval")]
        for name in DRAWN:
            series.append(Series(NAMES[name], column[name].values, style="dash"))
        title = f"The accuracy of an exchange at {token} in {model_name(result)}"
        unit = "share of the pairs"
        views.append(Lines(title, sites, tuple(series), y_name="accuracy", unit=unit))
    rows = []
    for cell in report.cells:
        verdict = ", ".join(NAMES[name] for name in cell.failed) or "none"
        rows.append((cell.site, cell.token, estimated(cell, ".0%"), verdict))
    columns = "site", "token", "accuracy", "not survived"
    listing = Listing("Every site and token", columns, tuple(rows))
    yield Section(
        "Where is the variable?",
        tuple(_findings(report)),
        tuple(views),
        "The part of the base's state that lies in the subspace becomes that of the"
        " source. The accuracy is the share of pairs whose counterfactual is then above"
        " all other answers; each was tested with a subspace that was found on other"
        " groups. Dashed lines exchange the whole state, a random subspace moved as"
        " far, the subspace with sources at random, and the subspace moved by"
        " what the answers read alone.",
        tables=(listing, table_of(listing)),
    )


def _findings(report: VariableReport) -> Iterator[str]:
    """Yield where the variable is held, or why no finding is left."""
    found = [cell for cell in report.cells if not cell.failed]
    for cell in found[:MOST_NAMED]:
        yield (
            f"A subspace of rank {report.rank} holds the variable in {cell.site} at"
            f" {cell.token}: accuracy {estimated(cell, '.0%')}. It survives all"
            " controls (sign flips of groups, p at most 0.05 for all of them together);"
            f" {cell.unread:.0%} of it is not read."
        )
    if not found:
        yield "No subspace survives the controls."
    for cell in report.cells[:MOST_NAMED]:
        if not cell.failed:
            continue
        reasons = [FAILED[name] for name in cell.failed if name in FAILED]
        others = [NAMES[name] for name in cell.failed if name not in FAILED]
        if others:
            series = in_series(others, "or")
            reasons.append(f"it is not shown to do more than {series}")
        yield (
            f"{cell.site} at {cell.token} has an accuracy of {estimated(cell, '.0%')}"
            f" and is no finding: {'; '.join(reasons)}."
        )
    yield (
        f"There are {counted(report.pairs, 'pair')} in"
        f" {counted(report.groups, 'group')}, and the model gives {report.right:.0%} of"
        " the answers of the bases."
    )
    yield from report.notes
