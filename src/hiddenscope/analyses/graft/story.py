"""The story of a graft: answers that stay right, or losses, with layers of a donor."""

from collections.abc import Iterator
from typing import Literal

from hiddenscope.results import Report, Result, Section, frozen
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.sentences import (
    UNTESTED,
    counted,
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
class Estimate:
    """A mean over texts with its 95% interval; None where there is none."""

    value: float
    low: float | None
    high: float | None

    @property
    def side(self) -> int:
        """Return the side of zero on which the whole interval is; 0 if it holds it."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


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
    if report.losses is not None:
        yield _loss_section(report, report.losses, result)
        return
    assert report.model_alone is not None, "prompts have answers"
    assert report.donor_alone is not None
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
    yield Section(
        TITLE,
        tuple(_findings(report, model_name(result))),
        (lines,),
        f"At every point, {_replacing(report)}, and the line is the share of prompts"
        " that are then answered right. The dashed lines are the two models alone.",
    )


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


def _loss_section(report: GraftReport, losses: LossReport, result: Result) -> Section:
    """Return what layers of the donor do to the loss of texts, and to predictions."""
    data, count = result.data, result.data.sizes["site"]
    name, grafted = model_name(result), _grafted(report)
    note = f"Each point is named by its first layer; {_prompts(report)}."
    donor_change = losses.donor.value - losses.model.value
    views = []
    for variable, title, alone, unit in (
        ("loss_change", "Change of the loss", donor_change, "nats per token"),
        ("agreement", "Unchanged predictions", losses.donor_agreement.value, "share"),
    ):
        mixed = Series(
            "with layers of the donor",
            data[variable].values,
            data[f"{variable}_low"].values,
            data[f"{variable}_high"].values,
            band="95% interval",
        )
        donor = level("the donor alone", alone, count)
        views.append(
            Lines(
                f"{title} of {name} with {grafted} of {report.donor}",
                labels(data, "site"),
                (mixed, donor),
                y_name=str(data[variable].attrs.get("long_name", title)),
                unit=unit,
                note=note,
            )
        )
    return Section(
        TITLE,
        tuple(_loss_findings(report, losses, result)),
        tuple(views),
        f"At every point, {_replacing(report)}. The first line is how far the loss is"
        " then above that of the model alone, the mean over the tokens of a text and"
        " then over texts; the second is the share of tokens whose most likely next"
        " token stays the same. The bands hold the true means of all windows together,"
        " with 95%. The dashed lines are the donor alone.",
    )


def _loss_findings(
    report: GraftReport, losses: LossReport, result: Result
) -> Iterator[str]:
    """Yield both losses, where the loss changes, and the thirds of the depth."""
    yield (
        f"Alone, {model_name(result)} has a loss of {_number(losses.model, '.3f')} nats"
        f" per token over {_prompts(report)}"
        f" ({counted(losses.tokens, 'predicted token')}); {report.donor} has"
        f" {_number(losses.donor, '.3f')}, and makes the same prediction for"
        f" {_number(losses.donor_agreement, '.0%')} of the tokens."
    )
    largest = losses.largest
    yield (
        f"With {_grafted(report)} of the donor, the loss changes most for"
        f" {_range(largest)}: by {_number(largest.loss_change, '+.3f')}, corrected for"
        " all windows."
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
        yield f"There are no intervals: they need five groups of texts. {UNTESTED}"
    thirds = {"first": losses.early, "middle": losses.middle, "last": losses.late}
    parts = []
    for word, third in thirds.items():
        if third is not None:
            parts.append(
                f"in the {word} third ({_range(third)}) by"
                f" {_number(third.loss_change, '+.3f')}, with"
                f" {_number(third.agreement, '.0%')} of the predictions unchanged"
            )
    if losses.late_less_middle is None:
        yield from report.notes
        return
    yield f"On average, windows change the loss {'; '.join(parts)}."
    for word, difference in (
        ("last", losses.late_less_middle),
        ("first", losses.early_less_middle),
    ):
        if difference is not None:
            yield _verdict(word, difference)
    yield from report.notes


def _verdict(word: str, difference: Estimate) -> str:
    """Say whether one third of the depth changes the loss more than the middle."""
    size = _number(difference, "+.3f")
    if not difference.side:
        return (
            f"The {word} third and the middle third were not shown to differ in what"
            f" they do to the loss ({word} less middle: {size})."
        )
    more = "more" if difference.side > 0 else "less"
    return f"The {word} third raises the loss {more} than the middle third: {size}."


def _number(estimate: Estimate, form: str) -> str:
    """Write a mean with its interval; a share ends at 0 and 1."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{form}}"
    low, high = estimate.low, estimate.high
    if form.endswith("%"):
        low, high = max(0.0, low), min(1.0, high)
    return f"{estimate.value:{form}} (95% interval {low:{form}} to {high:{form}})"


def _prompts(report: GraftReport) -> str:
    """Count the prompts or texts, and their groups where some belong together."""
    count, word = report.prompts, "prompt"
    if report.losses is not None:
        count, word = report.losses.texts, "text"
    prompts = counted(count, word)
    if report.groups == count:
        return prompts
    return f"{prompts} in {counted(report.groups, 'group')}"


def _replacing(report: GraftReport) -> str:
    """Say what takes the place of what."""
    single = report.layers == 1 and report.grafted == "blocks"
    replaces = "replaces that" if single else "replace those"
    return f"{_grafted(report)} of the donor {replaces} of the model"


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
