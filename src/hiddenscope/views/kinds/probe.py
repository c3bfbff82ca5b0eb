"""What a linear probe reads off every layer, shown and told."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import labels, quoted
from hiddenscope.views.values import Lines, Section, Series, View


def views(result: Result) -> Iterator[View]:
    """The score along the layers, between its control and the mix of all; then the weights of that mix."""
    data, score = result.data, _score(result)
    sites = labels(data, "site")
    said = "accuracy" if score == "accuracy" else "R²"
    low, high = (data[f"{score}_{end}"].to_numpy() for end in ("low", "high"))
    series = [
        Series("probe", data[score].to_numpy(), low, high, band="95% interval"),
        Series("control labels", data["control"].to_numpy()),
    ]
    if "majority" in data:
        series.append(Series("largest class", np.full(len(sites), float(data["majority"])), style="dash"))
    if f"mix_{score}" in data:
        series.append(Series("mix of all sites", np.full(len(sites), float(data[f"mix_{score}"])), style="dash"))
    title = f"What a linear probe reads off {result.source.get('model', 'the states')}: {result.facts['data']}"
    yield Lines(title, sites, tuple(series), y_name=said)
    if "mix_weight" in data:
        low, high = (data[f"mix_weight_{end}"].to_numpy() for end in ("low", "high"))
        weight = Series("weight", data["mix_weight"].to_numpy(), low, high, band="least and most of the folds")
        yield Lines("How much each site has in the mix of all", sites, (weight,), y_name="weight in the mix")


def sections(result: Result) -> Iterator[Section]:
    """Where the label can be read, how sure that is, and what the mix adds."""
    shown = tuple(views(result))
    yield Section("What can be read off each layer", f"{_how(result)}\n\n{_found(result)}", shown[:1])
    if len(shown) > 1:
        yield Section("All layers together", _mix(result), shown[1:])


def _score(result: Result) -> str:
    return "accuracy" if "accuracy" in result.data else "r2"


def _number(result: Result, value: float) -> str:
    return f"{100 * value:.0f}%" if _score(result) == "accuracy" else f"{value:.2f}"


def _how(result: Result) -> str:
    facts = result.facts
    name = (
        "the share of labels that it gets right" if _score(result) == "accuracy" else "R², 0 for the mean and 1 at best"
    )
    what = quoted(str(facts["data"]))
    return (
        f"A linear probe was trained on the states of every layer to tell {what}, and tested on texts that it "
        f"had not seen ({facts['rows']:,} rows of {facts['texts']:,} texts, in {facts['folds']} folds). The line is "
        f"{name}, the band its 95% interval. A probe with as many weights could learn by heart: so one is trained on "
        f"control labels too ({facts['control labels']}), and what counts is how much better it does on the true ones."
    )


def _found(result: Result) -> str:
    best, chance = result.facts["best"], result.facts["chance"]
    low, high = (_number(result, end) for end in best["95% interval"])
    value = _number(result, best[_score(result)])
    told = f"Best is `{best['site']}` with {value} ({low} to {high}), against {_number(result, best['control'])} on "
    told += "control labels. "
    beaten = "the largest class" if "majority" in result.data else "the mean"
    if chance["sites above it"] == "none":
        told += f"No site is surely better than guessing {beaten}."
    else:
        told += f"Surely better than guessing {beaten}: {chance['sites above it']}."
    equal = result.facts.get("all states are equal")
    return f"{told} All states are equal {equal}." if equal else told


def _mix(result: Result) -> str:
    mix: dict[str, Any] = result.facts["mix"]
    low, high = (_number(result, end) for end in mix["95% interval"])
    return (
        "One more probe reads a weighted sum of all layers, and learns the weights with itself. It comes to "
        f"{_number(result, mix[_score(result)])} ({low} to {high}) on the same folds. The line is its weights, which "
        f"add up to 1; the largest, {mix['largest weight']:.2f}, is that of `{mix['at']}`."
    )
