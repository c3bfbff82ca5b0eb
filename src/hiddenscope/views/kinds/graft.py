"""Grafts: how many answers stay right with layers of a donor."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import Lines, Series, View
from hiddenscope.results.sentences import as_prose, counted, model_name

if TYPE_CHECKING:
    from hiddenscope.analyses.graft.facts import AccuracyFacts, GraftFacts, WindowFacts

# The largest p-value that shows a difference.
LEVEL = 0.05


def views(result: Result) -> Iterator[View]:
    """Yield the right answers along the windows, beside those of both models alone."""
    data, facts = result.data, cast("GraftFacts", result.facts)
    count = data.sizes["site"]
    grafted = Series(
        "with layers of the donor",
        data["accuracy"].to_numpy(),
        data["accuracy_low"].to_numpy(),
        data["accuracy_high"].to_numpy(),
        band="95% interval",
    )
    model = level("the model alone", facts["model_alone"]["accuracy"], count)
    donor = level("the donor alone", facts["donor_alone"]["accuracy"], count)
    yield Lines(
        f"Right answers of {model_name(result)} with {_grafted(facts)} of"
        f" {facts['donor']}",
        labels(data, "site"),
        (grafted, model, donor),
        y_name="right answers",
        unit="share",
        note=f"Each point is named by its first layer; {_prompts(facts)}.",
    )


def findings(result: Result) -> Iterator[str]:
    """Yield both models alone, the window that loses most, and the middle of the depth
    against its end.
    """
    facts = cast("GraftFacts", result.facts)
    model, donor = facts["model_alone"], facts["donor_alone"]
    yield (
        f"Alone, {model_name(result)} answers {model['accuracy']:.0%} of"
        f" {_prompts(facts)} right ({_interval(model)}); {facts['donor']} answers"
        f" {donor['accuracy']:.0%} right ({_interval(donor)})."
    )
    lowest = facts["lowest"]
    yield (
        f"With {_grafted(facts)} of the donor, the fewest answers are right for"
        f" {_range(lowest)}: {lowest['accuracy']:.0%} ({_interval(lowest)}, corrected"
        " for all windows)."
    )
    if "middle_less_late" in facts:
        yield _comparison(facts)
    yield from facts["notes"]


def sections(result: Result) -> Iterator[Section]:
    """Yield one section with everything."""
    facts = cast("GraftFacts", result.facts)
    single = facts["layers"] == 1 and facts["grafted"] == "blocks"
    replaces = "replaces that" if single else "replace those"
    yield Section(
        "What do layers of a donor change?",
        as_prose(findings(result)),
        tuple(views(result)),
        f"At every point, {_grafted(facts)} of the donor {replaces} of the model, and"
        " the line is the share of prompts that are then answered right. The dashed"
        " lines are the two models alone.",
    )


def _comparison(facts: "GraftFacts") -> str:
    middle, late = facts["middle"], facts["late"]
    difference = facts["middle_less_late"]
    units = _prompts(facts)
    groups = facts.get("groups", facts["prompts"])
    if groups != facts["prompts"]:
        units = f"{counted(groups, 'group')} of prompts"
    numbers = (
        f"With windows in the middle third of the depth ({_range(middle)})"
        f" {middle['accuracy']:.0%} of the answers stay right, with windows in the last"
        f" third ({_range(late)}) {late['accuracy']:.0%}"
    )
    test = f"sign-flip test over {units}: p = {difference['p']:.2g}"
    if difference["p"] > LEVEL:
        return f"{numbers}; the difference is not significant ({test})."
    return (
        f"{numbers}: they differ by {100 * difference['value']:+.3g} percentage points"
        f" ({test})."
    )


def _prompts(facts: "GraftFacts") -> str:
    """Count the prompts, and their groups where some belong together."""
    prompts = facts["prompts"]
    groups = facts.get("groups", prompts)
    of_prompts = counted(prompts, "prompt")
    if groups == prompts:
        return of_prompts
    return f"{of_prompts} in {counted(groups, 'group')}"


def _interval(share: "AccuracyFacts") -> str:
    return f"95% interval {share['low']:.0%} to {share['high']:.0%}"


def _grafted(facts: "GraftFacts") -> str:
    count = facts["layers"]
    if facts["grafted"] == "blocks":
        return counted(count, "block")
    return f"the states of {counted(count, 'layer')}"


def _range(window: "WindowFacts") -> str:
    if window["from"] == window["to"]:
        return window["from"]
    return f"{window['from']} to {window['to']}"
