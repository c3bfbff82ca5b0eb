"""The sizes of states, shown and told."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import grid_of, labels, title_of
from hiddenscope.views.values import Grid, Lines, Section, Series, View


def pictures(result: Result) -> Iterator[View]:
    """The grid of norms, then their course along the layers."""
    grid = grid_of(result, ["norm"], title_of(result, ["norm"]).replace("Norm", "The norm of every state", 1))
    if grid is not None:
        yield grid
    columns = {str(name): v.to_numpy() for name, v in result.data.items() if v.dims == ("site",)}
    series = []
    stacks = [site.rpartition("layer.")[0] or site.rpartition("final")[0] for site in labels(result.data, "site")]
    for stack in dict.fromkeys(stacks):
        here = np.array([one == stack for one in stacks])
        first, median, low, high = (
            np.where(here, columns[f"norm_{name}"], np.nan) for name in ("first", "median", "low", "high")
        )
        prefix = stack.replace(".", " ")
        series += [
            Series(f"{prefix}first token", first),
            Series(f"{prefix}other tokens, median", median, low, high, "middle half"),
        ]
    shown = [one for one in series if np.isfinite(one.y).any()]
    if shown:
        title = title_of(result, ["norm"]).replace("Norm", "The norm along the layers", 1)
        yield Lines(title, labels(result.data, "site"), tuple(shown), y_name="norm", unit="L2", scale="log")


def tell(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown = tuple(pictures(result))
    texts = result.data.attrs.get("texts", [])
    text = f"“{texts[0]}”" if len(texts) == 1 else f"{result.facts['texts']} texts"
    yield Section(
        "The size of every state",
        f"These are all the states of {text}: tokens run across, layers run up, and the colour is the norm of the "
        "vector, on a log scale. Point at a cell, or use the arrow keys, to read it out.\n\n" + _norms_seen(result),
        tuple(view for view in shown if isinstance(view, Grid)),
    )
    yield Section(
        "The same along the layers",
        "One line for the first token, one for the others, with a band around the middle half of them. "
        + " ".join(sentence for name in _stacks(result) for sentence in _lessons(result.facts[name])),
        tuple(view for view in shown if isinstance(view, Lines)),
    )


def _lessons(facts: dict[str, Any]) -> Iterator[str]:
    """What follows from the norms, where it does."""
    if facts.get("times as large", 0) >= 10:
        yield (
            "A first token that is so much larger hides the rest: whoever averages states over tokens, or compares "
            "texts by the distance of their states, sees hardly anything else."
        )
    ends = list(_drops(facts).values())
    if len(ends) == 2 and ends[0][0] > 2 * ends[1][0] and ends[1][1] / 2 < ends[0][1] < 2 * ends[1][1]:
        yield "At `final` all are of one size again: the norm sees to that."


def _stacks(result: Result) -> list[str]:
    return [name for name in ("norm", "encoder", "decoder") if name in result.facts]


def _norms_seen(result: Result) -> str:
    """What a profile's norms show, in plain sentences."""
    return " ".join(sentence for stack in _stacks(result) for sentence in _sentences(stack, result.facts[stack]))


def _sentences(stack: str, facts: dict[str, Any]) -> Iterator[str]:
    whose = "" if stack == "norm" else f" of the {stack}"
    if "times as large" in facts:
        first, others, times = (facts[name] for name in ("first token", "other tokens", "times as large"))
        yield (
            f"Over the middle{whose} ({facts['middle layers']}) the first token has a median norm of about "
            f"{first:,.0f} and the others of about {others:,.0f}: {times:,.1f} times as much."
        )
    if drops := _drops(facts):
        told = " and ".join(f"the {who} from {before:,.0f} to {after:,.0f}" for who, (before, after) in drops.items())
        yield f"The final norm{whose} then takes {told}."


def _drops(facts: dict[str, Any]) -> dict[str, list[float]]:
    """For first and other tokens, the norm before and after the final norm."""
    return {key.partition(" from ")[0]: ends for key, ends in facts.items() if " from " in key}
