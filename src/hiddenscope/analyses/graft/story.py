"""The story of a graft: how many answers stay right with layers of a donor."""

from collections.abc import Iterator
from typing import Literal

from hiddenscope.results import Report, Result, Section, frozen
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.sentences import counted, model_name

# The largest p-value that shows a difference.
LEVEL = 0.05


@frozen
class Share:
    """A share of right answers, with its 95% interval."""

    accuracy: float
    low: float
    high: float


@frozen
class Lowest(Share):
    """The window with the fewest right answers."""

    from_: str
    to: str


@frozen
class Third:
    """The windows in one third of the depth."""

    accuracy: float
    from_: str
    to: str


@frozen
class Difference:
    """The difference of two thirds, and its p-value by a sign-flip test."""

    value: float
    p: float


@frozen
class GraftReport(Report):
    """How many answers stay right with layers of a donor."""

    donor: str
    prompts: int
    copies: int
    groups: int
    grafted: Literal["blocks", "states"]
    layers: int
    model_alone: Share
    donor_alone: Share
    lowest: Lowest
    middle: Third | None = None
    late: Third | None = None
    middle_less_late: Difference | None = None
    notes: list[str]


def story(report: GraftReport, result: Result) -> Iterator[Section]:
    """Yield one section with everything."""
    data, count = result.data, result.data.sizes["site"]
    grafted = Series(
        "with layers of the donor",
        data["accuracy"].values,
        data["accuracy_low"].values,
        data["accuracy_high"].values,
        band="95% interval",
    )
    model = level("the model alone", report.model_alone.accuracy, count)
    donor = level("the donor alone", report.donor_alone.accuracy, count)
    lines = Lines(
        f"Right answers of {model_name(result)} with {_grafted(report)} of"
        f" {report.donor}",
        labels(data, "site"),
        (grafted, model, donor),
        y_name="right answers",
        unit="share",
        note=f"Each point is named by its first layer; {_prompts(report)}.",
    )
    single = report.layers == 1 and report.grafted == "blocks"
    replaces = "replaces that" if single else "replace those"
    yield Section(
        "What do layers of a donor change?",
        tuple(_findings(report, model_name(result))),
        (lines,),
        f"At every point, {_grafted(report)} of the donor {replaces} of the model, and"
        " the line is the share of prompts that are then answered right. The dashed"
        " lines are the two models alone.",
    )


def _findings(report: GraftReport, name: str) -> Iterator[str]:
    """Yield both models alone, the window that loses most, and the middle of the depth
    against its end.
    """
    model, donor, lowest = report.model_alone, report.donor_alone, report.lowest
    yield (
        f"Alone, {name} answers {model.accuracy:.0%} of {_prompts(report)} right"
        f" ({_interval(model)}); {report.donor} answers {donor.accuracy:.0%} right"
        f" ({_interval(donor)})."
    )
    yield (
        f"With {_grafted(report)} of the donor, the fewest answers are right for"
        f" {_range(lowest)}: {lowest.accuracy:.0%} ({_interval(lowest)}, corrected for"
        " all windows)."
    )
    if report.middle_less_late:
        middle, late, difference = report.middle, report.late, report.middle_less_late
        assert middle is not None, "the difference is that of the two"
        assert late is not None
        units = _prompts(report)
        if report.groups != report.prompts:
            units = f"{counted(report.groups, 'group')} of prompts"
        result = f": they differ by {100 * difference.value:+.3g} percentage points"
        if difference.p > LEVEL:
            result = "; the difference is not significant"
        yield (
            f"With windows in the middle third of the depth ({_range(middle)})"
            f" {middle.accuracy:.0%} of the answers stay right, with windows in the"
            f" last third ({_range(late)}) {late.accuracy:.0%}{result} (sign-flip test"
            f" over {units}: p = {difference.p:.2g})."
        )
    yield from report.notes


def _prompts(report: GraftReport) -> str:
    """Count the prompts, and their groups where some belong together."""
    prompts = counted(report.prompts, "prompt")
    if report.groups == report.prompts:
        return prompts
    return f"{prompts} in {counted(report.groups, 'group')}"


def _interval(share: Share) -> str:
    return f"95% interval {share.low:.0%} to {share.high:.0%}"


def _grafted(report: GraftReport) -> str:
    if report.grafted == "blocks":
        return counted(report.layers, "block")
    return f"the states of {counted(report.layers, 'layer')}"


def _range(window: Lowest | Third) -> str:
    if window.from_ == window.to:
        return window.from_
    return f"{window.from_} to {window.to}"
