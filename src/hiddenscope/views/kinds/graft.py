"""How many answers stay right with layers of a donor."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Facts, Result
from hiddenscope.views.drawing import as_prose, labels
from hiddenscope.views.values import Lines, Section, Series, View

LEVEL = 0.05  # a difference whose p is at most this is called one


def views(result: Result) -> Iterator[View]:
    """Right answers along the windows, between both models alone."""
    data, facts = result.data, result.facts
    low, high = (data[f"accuracy_{end}"].to_numpy() for end in ("low", "high"))
    series = [
        Series(
            "with layers of the donor",
            data["accuracy"].to_numpy(),
            low,
            high,
            band="95% interval",
        )
    ]
    for name in ("model", "donor"):
        level = np.full(data.sizes["site"], facts[f"{name}_alone"]["accuracy"])
        series.append(Series(f"the {name} alone", level, style="dash"))
    title = (
        f"Right answers of {_model(result)} with {_grafted(facts)} of {facts['donor']}"
    )
    note = f"Each point is named by its first layer; {_prompts(facts)}."
    yield Lines(
        title,
        labels(data, "site"),
        tuple(series),
        y_name="right answers",
        unit="share",
        note=note,
    )


def findings(result: Result) -> Iterator[str]:
    """Both models alone, the window that loses most, and the middle of the depth
    against its end.
    """
    facts = result.facts
    mine, theirs = facts["model_alone"], facts["donor_alone"]
    yield (
        f"Alone, {_model(result)} answers {mine['accuracy']:.0%} of {_prompts(facts)}"
        f" right ({_interval(mine)}); {facts['donor']} answers {theirs['accuracy']:.0%}"
        f" right ({_interval(theirs)})."
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
    """One section with everything."""
    facts = result.facts
    single = facts["layers"] == 1 and facts["grafted"] == "blocks"
    replaces = "replaces that" if single else "replace those"
    reading = (
        f"At every point, {_grafted(facts)} of the donor {replaces} of the model, and"
        " the line is the share of prompts that are then answered right. The dashed"
        " lines are the two models alone."
    )
    yield Section(
        "What do layers of a donor change?",
        as_prose(findings(result)),
        tuple(views(result)),
        reading,
    )


def _comparison(facts: Facts) -> str:
    middle, late, difference = facts["middle"], facts["late"], facts["middle_less_late"]
    numbers = (
        f"With windows in the middle third of the depth ({_range(middle)})"
        f" {middle['accuracy']:.0%} of the answers stay right, with windows in the last"
        f" third ({_range(late)}) {late['accuracy']:.0%}"
    )
    test = f"sign-flip test over {_units(facts)}: p = {difference['p']:.2g}"
    if difference["p"] > LEVEL:
        return f"{numbers}; the difference is not significant ({test})."
    return (
        f"{numbers}: they differ by {100 * difference['value']:+.3g} percentage points"
        f" ({test})."
    )


def _prompts(facts: Facts) -> str:
    """How many prompts there are, and in how many groups where some belong together."""
    prompts, groups = facts["prompts"], facts.get("groups", facts["prompts"])
    counted = f"{prompts} prompt{'s' * (prompts != 1)}"
    return (
        counted
        if groups == prompts
        else f"{counted} in {groups} group{'s' * (groups != 1)}"
    )


def _units(facts: Facts) -> str:
    """What the test permutes."""
    prompts, groups = facts["prompts"], facts.get("groups", facts["prompts"])
    return (
        _prompts(facts)
        if groups == prompts
        else f"{groups} group{'s' * (groups != 1)} of prompts"
    )


def _interval(share: Facts) -> str:
    return f"95% interval {share['low']:.0%} to {share['high']:.0%}"


def _model(result: Result) -> str:
    return str(result.source.get("model", "the model"))


def _grafted(facts: Facts) -> str:
    many, unit = facts["layers"], "block" if facts["grafted"] == "blocks" else "layer"
    states = "" if facts["grafted"] == "blocks" else "the states of "
    return f"{states}{many} {unit}{'' if many == 1 else 's'}"


def _range(ends: Facts) -> str:
    return (
        ends["from"]
        if ends["from"] == ends["to"]
        else f"{ends['from']} to {ends['to']}"
    )
