"""The story of a graft: answers that stay right, or losses, with layers of a donor."""

from collections.abc import Iterator
from typing import Literal

from hiddenscope.results import Report, Result, Section, frozen
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.report import Estimate
from hiddenscope.results.sentences import (
    UNTESTED,
    counted,
    estimated,
    in_series,
    model_name,
    ranges,
)

TITLE = "What do layers of a donor change?"
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
class ChangedWindow:
    """A window, and how far its layers of the donor change the loss."""

    loss_change: Estimate
    from_: str
    to: str


@frozen
class ChangedThird(ChangedWindow):
    """The windows in one third of the depth, on average."""

    agreement: Estimate


@frozen
class LossReport:
    """What layers of a donor change in the loss of texts.

    `raised` and `lowered` are the windows with significantly more or less loss than the
    model alone, by their first sites.
    """

    texts: int
    tokens: int
    windows: int
    model: Estimate
    donor: Estimate
    donor_agreement: Estimate
    largest: ChangedWindow
    raised: list[str]
    lowered: list[str]
    early: ChangedThird | None = None
    middle: ChangedThird | None = None
    late: ChangedThird | None = None
    late_less_middle: Estimate | None = None
    early_less_middle: Estimate | None = None


@frozen
class GraftReport(Report):
    """How many answers stay right with layers of a donor; or of texts, the losses."""

    donor: str
    prompts: int = 0
    copies: int
    groups: int
    grafted: Literal["blocks", "states"]
    layers: int
    model_alone: Share | None = None
    donor_alone: Share | None = None
    lowest: Lowest | None = None
    middle: Third | None = None
    late: Third | None = None
    middle_less_late: Difference | None = None
    losses: LossReport | None = None
    notes: list[str]


def story(report: GraftReport, result: Result) -> Iterator[Section]:
    """Yield one section with everything."""
    data, count = result.data, result.data.sizes["site"]
    losses = report.losses
    # What is drawn: a variable, its title and unit, and the models alone.
    pictures: list[tuple[str, str, str, dict[str, float]]]
    if losses is None:
        assert report.model_alone is not None, "prompts have answers"
        assert report.donor_alone is not None
        both = {
            "the model alone": report.model_alone.accuracy,
            "the donor alone": report.donor_alone.accuracy,
        }
        pictures = [("accuracy", "Right answers", "share", both)]
        findings = _findings(report, model_name(result))
        reading = (
            ", and the line is the share of prompts that are then answered right. The"
            " dashed lines are the two models alone."
        )
    else:
        change = {"the donor alone": losses.donor.value - losses.model.value}
        agreement = {"the donor alone": losses.donor_agreement.value}
        pictures = [
            ("loss_change", "Change of the loss", "nats per token", change),
            ("agreement", "Unchanged predictions", "share", agreement),
        ]
        findings = _loss_findings(report, losses, result)
        reading = (
            ". The first line is how far the loss is then above that of the model"
            " alone, the mean over the tokens of a text and then over texts; the second"
            " is the share of tokens whose most likely next token stays the same. The"
            " bands hold the true means of all windows together, with 95%. The dashed"
            " lines are the donor alone."
        )
    views = []
    for variable, title, unit, alone in pictures:
        mixed = Series(
            "with layers of the donor",
            data[variable].values,
            data[f"{variable}_low"].values,
            data[f"{variable}_high"].values,
            band="95% interval",
        )
        levels = [level(name, height, count) for name, height in alone.items()]
        lines = Lines(
            f"{title} of {model_name(result)} with {_grafted(report)} of"
            f" {report.donor}",
            labels(data, "site"),
            (mixed, *levels),
            y_name=str(data[variable].attrs.get("long_name", title)),
            unit=unit,
            note=f"Each point is named by its first layer; {_prompts(report)}.",
        )
        views.append(lines)
    single = report.layers == 1 and report.grafted == "blocks"
    replaces = "replaces that" if single else "replace those"
    grafted = f"{_grafted(report)} of the donor {replaces} of the model"
    reading = f"At every point, {grafted}{reading}"
    yield Section(TITLE, tuple(findings), tuple(views), reading)


def _findings(report: GraftReport, name: str) -> Iterator[str]:
    """Yield both models alone, the window that loses most, and the middle of the depth
    against its end.
    """
    model, donor, lowest = report.model_alone, report.donor_alone, report.lowest
    assert model is not None, "prompts have answers"
    assert donor is not None
    assert lowest is not None
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


def _loss_findings(
    report: GraftReport, losses: LossReport, result: Result
) -> Iterator[str]:
    """Yield both losses, where the loss changes, and the thirds of the depth."""
    yield (
        f"Alone, {model_name(result)} has a loss of {estimated(losses.model, '.3f')}"
        f" nats per token over {_prompts(report)}"
        f" ({counted(losses.tokens, 'predicted token')}); {report.donor} has"
        f" {estimated(losses.donor, '.3f')}, and makes the same prediction for"
        f" {estimated(losses.donor_agreement, '.0%')} of the tokens."
    )
    largest = losses.largest
    yield (
        f"With {_grafted(report)} of the donor, the loss changes most for"
        f" {_range(largest)}: by {estimated(largest.loss_change, '+.3f')}, corrected"
        " for all windows."
    )
    sites = labels(result.data, "site")
    if largest.loss_change.low is not None:
        parts = []
        for names, word in ((losses.raised, "higher"), (losses.lowered, "lower")):
            where = f" (from {ranges(names, sites)})" if names else ""
            parts.append(f"significantly {word} for {len(names)}{where}")
        yield (
            f"Of {counted(losses.windows, 'window')}, the loss is {in_series(parts)}"
            " (95% intervals, corrected for all windows)."
        )
    else:
        yield (
            f"The losses have no intervals: they need eight groups of texts. {UNTESTED}"
        )
    thirds = {"first": losses.early, "middle": losses.middle, "last": losses.late}
    parts = []
    for word, third in thirds.items():
        if third is not None:
            parts.append(
                f"in the {word} third ({_range(third)}) by"
                f" {estimated(third.loss_change, '+.3f')}, with"
                f" {estimated(third.agreement, '.0%')} of the predictions unchanged"
            )
    if losses.late_less_middle is None:
        yield from report.notes
        return
    yield f"On average, windows change the loss {'; '.join(parts)}."
    for word, difference in (
        ("last", losses.late_less_middle),
        ("first", losses.early_less_middle),
    ):
        if difference is None:
            continue
        size = estimated(difference, "+.3f")
        more = "more" if difference.side > 0 else "less"
        if difference.side:
            yield (
                f"The {word} third raises the loss {more} than the middle third:"
                f" {size}."
            )
        else:
            yield (
                f"The {word} third and the middle third were not shown to differ in"
                f" what they do to the loss ({word} less middle: {size})."
            )
    yield from report.notes


def _prompts(report: GraftReport) -> str:
    """Count the prompts or texts, and their groups where some belong together."""
    count, word = report.prompts, "prompt"
    if report.losses is not None:
        count, word = report.losses.texts, "text"
    prompts = counted(count, word)
    if report.groups == count:
        return prompts
    return f"{prompts} in {counted(report.groups, 'group')}"


def _interval(share: Share) -> str:
    return f"95% interval {share.low:.0%} to {share.high:.0%}"


def _grafted(report: GraftReport) -> str:
    if report.grafted == "blocks":
        return counted(report.layers, "block")
    return f"the states of {counted(report.layers, 'layer')}"


def _range(window: Lowest | Third | ChangedWindow) -> str:
    if window.from_ == window.to:
        return window.from_
    return f"{window.from_} to {window.to}"
