"""Activation patching: which states carry the answer from one run to another."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.results import Facts, Result
from hiddenscope.views.drawing import as_prose, grid_of, labels, quoted, ranges
from hiddenscope.views.values import Lines, Section, Series, Style, View

if TYPE_CHECKING:
    import xarray

BRANCHES = (".attn", ".cross", ".mlp")
CELLS = ("effect", "attribution", "probability", "kl", "effect_error")


def views(result: Result) -> Iterator[View]:
    """The effect of every site and token, with the tokens of both prompts; then whole
    layers along the depth.
    """
    grid = grid_of(
        result, [name for name in CELLS if name in result.data], _title(result)
    )
    if grid is not None:
        data = result.data.isel(token=slice(len(grid.tokens)))
        clean, corrupt = (_tokens(data, prefix) for prefix in ("", "other_"))
        gaps = (
            "Hatched: a token that only one prompt has."
            if None in (*clean, *corrupt)
            else ""
        )
        several = (
            "The tokens are those of the first pair of prompts."
            if result.facts["contrasts"] > 1
            else ""
        )
        note = " ".join(filter(None, [grid.note, gaps, several]))
        yield replace(
            grid,
            tokens=clean,
            second=corrupt,
            token_rows=("clean", "corrupted"),
            note=note,
        )
    if "swap" in result.data:
        yield _layers(result)


def findings(result: Result) -> Iterator[str]:
    """Where the answer is carried, what both runs predict, how it was measured, and how
    sure that is.
    """
    facts = result.facts
    yield from _carriers(result)
    yield _runs(result)
    yield _effect(facts)
    yield from _layer_windows(facts)
    if (facts.get("agreement") or {}).get("correlation") is not None:
        agreement = facts["agreement"]
        yield (
            f"Over {agreement['cells']} cells, attribution correlates with the exact"
            f" effect at r = {agreement['correlation']:.2f}; its mean absolute error is"
            f" {agreement['mean_absolute_error']:.2f}."
        )
    yield _certainty(facts)
    cells = facts["cells"]
    yield (
        f"{cells['equal']} of {cells['total']} cells have an effect of exactly 0,"
        " because both runs have the same state there."
    )
    yield from facts["notes"]


def sections(result: Result) -> Iterator[Section]:
    """The grid with what it shows, then whole layers."""
    shown, facts = tuple(views(result)), result.facts
    carriers = list(_carriers(result))
    told = [*carriers[:1], _runs(result), *carriers[1:], _certainty(facts)]
    yield Section(
        "Which states carry the answer?",
        as_prose(told),
        shown[:1],
        f"{_experiment(facts)} {_effect(facts)}",
    )
    if shown[1:]:
        spared = (
            "The token at which the answer is read keeps its own state; "
            if _streams(result)
            else ""
        )
        why = (
            "patching it too would give the other run at every layer. "
            if spared
            else ""
        )
        reading = f"{_curves(shown[1])}{spared}{why}The effect is defined as above."
        yield Section(
            "Whole layers at once",
            " ".join(_layer_windows(facts)),
            shown[1:],
            reading,
            folded=True,
        )


def _curves(view: View) -> str:
    """Say what each line is that the picture of whole layers has."""
    styles = (
        {series.style for series in view.series} if isinstance(view, Lines) else set()
    )
    one = (
        "The solid line patches all tokens of one layer at once. "
        if "line" in styles
        else ""
    )
    several = (
        "The dashed line patches several layers in a row, named by the lowest. "
        if "dash" in styles
        else ""
    )
    return one + several


def _title(result: Result) -> str:
    facts, model = result.facts, result.source.get("model", "the model")
    answers = f"{_answer(facts, 'answer')} over {_answer(facts, 'other')}"
    verb = "restores" if facts["into"] == "corrupt" else "removes"
    return f"How much of the preference for {answers} each state {verb} in {model}"


def _answer(facts: Facts, name: str) -> str:
    """The answers of all contrasts, each once, without the space that its token begins
    with.
    """
    strings = dict.fromkeys(
        pair[name].strip() or pair[name] for pair in facts["answers"]
    )
    return " / ".join(map(quoted, list(strings)[:3])) + (
        " and others" if len(strings) > 3 else ""
    )


def _tokens(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    """The tokens of one prompt, None where it has a gap."""
    columns = (
        data[f"{prefix}{name}"].to_numpy().tolist() for name in ("string", "position")
    )
    return tuple(
        None if position < 0 else string
        for string, position in zip(*columns, strict=True)
    )


def _runs(result: Result) -> str:
    facts = result.facts
    texts = [result.data.attrs.get(name, []) for name in ("texts", "other_texts")]
    clean, corrupt = (
        facts["logit_difference"]["clean"],
        facts["logit_difference"]["corrupt"],
    )
    answer, other = (_answer(facts, name) for name in ("answer", "other"))
    if [len(side) for side in texts] == [1, 1]:
        return (
            f"After the clean prompt {quoted(texts[0][0])} the logit of {answer} is"
            f" {_above(clean)} that of {other}; after the corrupted prompt"
            f" {quoted(texts[1][0])} it is {_above(corrupt)}."
        )
    average = (
        f"On average over {facts['contrasts']} pairs of prompts, the"
        if facts["contrasts"] > 1
        else "The"
    )
    logit = (
        f"{average} logit of {answer} is {_above(clean)} that of {other} after the"
        " clean prompt"
    )
    return f"{logit}; after the corrupted prompt it is {_above(corrupt)}."


def _above(difference: float) -> str:
    return f"{abs(difference):.2f} {'below' if difference < 0 else 'above'}"


def _experiment(facts: Facts) -> str:
    """What was done for every cell."""
    source, run = (
        ("clean", "corrupted") if facts["into"] == "corrupt" else ("corrupted", "clean")
    )
    tokens = "token" if facts["window"] == 1 else f"{facts['window']} tokens"
    states, replace_, ones = (
        ("state", "replaces", "one")
        if facts["window"] == 1
        else ("states", "replace", "ones")
    )
    return (
        f"Every cell is one experiment. The hidden {states} of the {source} run at this"
        f" layer and {tokens} {replace_} the {ones} of the {run} run, and the model"
        " computes the rest."
    )


def _effect(facts: Facts) -> str:
    change, nothing = (
        ("restored", "the corrupted")
        if facts["into"] == "corrupt"
        else ("lost", "the clean")
    )
    everything = "the clean" if facts["into"] == "corrupt" else "the corrupted"
    return (
        "The effect is the share of the logit difference between the two answers that"
        f" is {change}: 0 is {nothing} run, 1 is {everything} run."
    )


def _carriers(result: Result) -> Iterator[str]:
    """Where two tokens carry at least half of the answer; without one, the largest
    effect of all.
    """
    facts, sites = result.facts, labels(result.data, "site")
    verb = "restores" if facts["into"] == "corrupt" else "removes"
    names = {
        "differing_token": "the token that differs",
        "answer_token": "the token at which the answer is read",
    }
    carriers = {
        key: carrier for key in names if (carrier := facts[key]) and carrier["half_at"]
    }
    for key, carrier in carriers.items():
        token = quoted(carrier["token"].strip() or carrier["token"])
        yield (
            f"Patching {token}, {names[key]}, {verb} at least half of the logit"
            f" difference at {ranges(carrier['half_at'], sites)} (largest effect"
            f" {carrier['largest']:.2f})."
        )
    if not carriers and (largest := facts["largest"]):
        token = quoted(largest["token"].strip() or largest["token"])
        yield (
            f"No single state {verb} half of the logit difference: the largest effect"
            f" is {largest['value']:.2f}, of {token} at {largest['site']}."
        )


def _layer_windows(facts: Facts) -> Iterator[str]:
    windows = facts.get("layer_windows")
    if not windows:
        return
    largest = windows["largest"]
    spared = (
        ""
        if largest["site"].endswith(BRANCHES)
        else ", except the token at which the answer is read,"
    )
    yield (
        f"Patching all tokens of {windows['layers']} layers in a row{spared} has the"
        f" largest effect for the window that begins at {largest['site']}:"
        f" {largest['value']:.2f}."
    )


def _certainty(facts: Facts) -> str:
    """How far the numbers reach."""
    count = facts["contrasts"]
    if count == 1:
        return (
            "This is one pair of prompts; whether it holds for others was not tested."
        )
    groups = facts.get("groups", count)
    pairs = (
        f"{count} pairs of prompts"
        if groups == count
        else f"{count} pairs of prompts in {groups} groups"
    )
    return (
        f"These are averages over {pairs}; differences between sites were not tested."
    )


def _streams(result: Result) -> bool:
    """Whether whole states of the residual stream are exchanged, and not only what
    branches add.
    """
    return not all(site.endswith(BRANCHES) for site in labels(result.data, "site"))


def _layers(result: Result) -> Lines:
    """All tokens from the other run, at one site and at several layers in a row."""
    data = result.data
    series = []
    styles: dict[str, Style] = {"swap": "line", "swap_window": "dash"}
    for name, style in styles.items():
        y, error, long_name = (
            data[name].to_numpy(),
            data.get(f"{name}_error"),
            str(data[name].attrs["long_name"]),
        )
        if error is None:
            series.append(Series(long_name, y, style=style))
        else:
            low, high = y - error.to_numpy(), y + error.to_numpy()
            series.append(
                Series(long_name, y, low, high, band="one standard error", style=style)
            )
    series = [one for one in series if np.isfinite(one.y).any()]
    title = (
        "The effect of patching whole layers, in"
        f" {result.source.get('model', 'the model')}"
    )
    return Lines(
        title,
        labels(data, "site"),
        tuple(series),
        y_name="effect",
        unit="share of the logit difference",
    )
