"""Activation patching: which states carry the answer from one run to another."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import grid_of, labels, long_name, tokens_with_gaps
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, Style, View
from hiddenscope.results.sentences import (
    as_prose,
    model_name,
    quote,
    quoted_token,
    quoted_tokens,
    ranges,
)

if TYPE_CHECKING:
    from hiddenscope.analyses.patch.facts import PatchFacts

# What a branch adds to the residual stream, not the stream itself.
BRANCHES = (".attn", ".cross", ".mlp")
CELLS = ("effect", "attribution", "probability", "kl", "effect_error")
MOST_ANSWERS = 3
MOST_NAMED = 6
ABLATIONS = {"zero": "Zeros", "mean": "The means over all prompts"}


def views(result: Result) -> Iterator[View]:
    """Yield the effect of every site and token, with the tokens of both prompts; then
    whole layers along the depth.
    """
    facts = cast("PatchFacts", result.facts)
    answers = " over ".join(_answers(facts))
    title = (
        f"How much of the preference for {answers} each {_noun(result)} {_verb(facts)}"
        f" in {model_name(result)}"
    )
    if "token" not in result.data.dims:
        yield _by_number(result, title)
        return
    grid = grid_of(result, [name for name in CELLS if name in result.data], title)
    if grid is not None:
        yield _with_both_prompts(result, grid)
    if "swap" in result.data:
        yield _layers(result)


def _noun(result: Result) -> str:
    """Name what was patched."""
    sites = labels(result.data, "site")
    for noun in ("head", "neuron"):
        if all(f".{noun}." in site for site in sites):
            return noun
    return "state"


def _by_number(result: Result, title: str) -> Grid:
    """Draw what was patched at all tokens at once: layer by head or neuron."""
    data = result.data
    rows, columns = [], []
    for name in labels(data, "site"):
        row, _, number = name.rpartition(".")
        if not number.isdecimal():
            rows.append(name)
            columns.append("tokens together")
            continue
        row, _, noun = row.rpartition(".")
        rows.append(row)
        columns.append(f"{noun}.{number}")
    row_names, column_names = list(dict.fromkeys(rows)), list(dict.fromkeys(columns))
    places = [row_names.index(row) for row in rows]
    across = [column_names.index(column) for column in columns]
    measures = []
    for name in (*CELLS, "low", "high"):
        if name not in data:
            continue
        values = np.full((len(row_names), len(column_names)), np.nan, np.float32)
        values[places, across] = data[name].to_numpy()
        variable = data[name]
        meaning = variable.attrs.get("meaning", "sequential")
        unit = variable.attrs.get("units", "")
        measures.append(Measure(long_name(variable), values, unit, meaning=meaning))
    return Grid(
        title,
        tuple(row_names),
        tuple(column_names),
        tuple(measures),
        x_name="part",
        y_name="layer",
    )


def _with_both_prompts(result: Result, grid: Grid) -> Grid:
    data = result.data.isel(token=slice(len(grid.tokens)))
    clean = tokens_with_gaps(data, "")
    corrupt = tokens_with_gaps(data, "other_")
    notes = [grid.note] if grid.note else []
    if None in clean or None in corrupt:
        notes.append("Hatched: a token that only one prompt has.")
    if result.facts["contrasts"] > 1:
        notes.append("The tokens are those of the first pair of prompts.")
    return replace(
        grid,
        tokens=clean,
        second=corrupt,
        token_rows=("clean", "corrupted"),
        note=" ".join(notes),
    )


def _layers(result: Result) -> Lines:
    """Draw the effect of all tokens of one site, and of several layers in a row."""
    data = result.data
    series = []
    styles: dict[str, Style] = {"swap": "line", "swap_window": "dash"}
    for name, style in styles.items():
        effect = data[name].to_numpy()
        # With few layers there is no window of several.
        if not np.isfinite(effect).any():
            continue
        low = high = None
        if f"{name}_error" in data:
            error = data[f"{name}_error"].to_numpy()
            low, high = effect - error, effect + error
        band = "" if low is None else "one standard error"
        series.append(Series(long_name(data[name]), effect, low, high, band, style))
    return Lines(
        f"The effect of patching whole layers, in {model_name(result)}",
        labels(data, "site"),
        tuple(series),
        y_name="effect",
        unit="share of the logit difference",
    )


def findings(result: Result) -> Iterator[str]:
    """Yield where the answer is carried, what both runs predict, how it was measured,
    and how sure that is.
    """
    facts = cast("PatchFacts", result.facts)
    yield from _carriers(result)
    yield _runs(result)
    yield _effect(facts)
    yield from _layer_windows(facts)
    agreement = facts.get("agreement")
    if agreement and agreement.get("correlation") is not None:
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
    """Yield the grid with what it shows, then whole layers."""
    facts, shown = cast("PatchFacts", result.facts), tuple(views(result))
    carriers = list(_carriers(result))
    sentences = [*carriers[:1], _runs(result), *carriers[1:], _certainty(facts)]
    yield Section(
        "Which states carry the answer?",
        as_prose(sentences),
        shown[:1],
        f"{_experiment(facts)} {_effect(facts)}",
    )
    if shown[1:]:
        yield Section(
            "Whole layers at once",
            " ".join(_layer_windows(facts)),
            shown[1:],
            _reading_of_layers(result, shown[1]),
            folded=True,
        )


def _reading_of_layers(result: Result, view: View) -> str:
    """Say what each line is in the picture of whole layers."""
    styles = set()
    if isinstance(view, Lines):
        styles = {series.style for series in view.series}
    sentences = []
    if "line" in styles:
        sentences.append("The solid line patches all tokens of one layer at once.")
    if "dash" in styles:
        sentences.append(
            "The dashed line patches several layers in a row, named by the lowest."
        )
    sites = labels(result.data, "site")
    if not all(site.endswith(BRANCHES) for site in sites):
        sentences.append(
            "The token at which the answer is read keeps its own state; patching it too"
            " would give the other run at every layer."
        )
    return " ".join([*sentences, "The effect is defined as above."])


def _verb(facts: "PatchFacts") -> str:
    return "restores" if facts["into"] == "corrupt" else "removes"


def _answers(facts: "PatchFacts") -> Iterator[str]:
    """Yield the answers of all contrasts, each once, then the others."""
    pairs = [
        quoted_tokens([pair["answer"], pair["other"]]) for pair in facts["answers"]
    ]
    for names in zip(*pairs, strict=True):
        distinct = list(dict.fromkeys(names))
        others = " and others" if len(distinct) > MOST_ANSWERS else ""
        yield " / ".join(distinct[:MOST_ANSWERS]) + others


def _runs(result: Result) -> str:
    facts = cast("PatchFacts", result.facts)
    answer, other = _answers(facts)
    clean = _above(facts["logit_difference"]["clean"])
    corrupt = _above(facts["logit_difference"]["corrupt"])
    texts = result.data.attrs.get("texts", [])
    other_texts = result.data.attrs.get("other_texts", [])
    if len(texts) == len(other_texts) == 1:
        return (
            f"After the clean prompt {quote(texts[0])} the logit of {answer} is"
            f" {clean} that of {other}; after the corrupted prompt"
            f" {quote(other_texts[0])} it is {corrupt}."
        )
    average = "The"
    if facts["contrasts"] > 1:
        average = f"On average over {facts['contrasts']} pairs of prompts, the"
    return (
        f"{average} logit of {answer} is {clean} that of {other} after the clean"
        f" prompt; after the corrupted prompt it is {corrupt}."
    )


def _above(difference: float) -> str:
    return f"{abs(difference):.2f} {'below' if difference < 0 else 'above'}"


def _experiment(facts: "PatchFacts") -> str:
    """Say what was done for every cell."""
    source, run = "corrupted", "clean"
    if facts["into"] == "corrupt":
        source, run = "clean", "corrupted"
    ablation = ABLATIONS.get(facts.get("method", ""))
    if "positions" in facts or ablation:
        tokens = "all tokens" if facts.get("positions") is None else "chosen tokens"
        if "positions" not in facts:
            tokens = "this token"
        values = ablation or f"The values of the {source} run"
        return (
            f"Every cell is one experiment. {values} replace those of the {run} run at"
            f" {tokens} of this site, and the model computes the rest."
        )
    if facts["window"] == 1:
        return (
            f"Every cell is one experiment. The hidden state of the {source} run at"
            f" this layer and token replaces the one of the {run} run, and the model"
            " computes the rest."
        )
    return (
        f"Every cell is one experiment. The hidden states of the {source} run at this"
        f" layer and {facts['window']} tokens replace the ones of the {run} run, and"
        " the model computes the rest."
    )


def _effect(facts: "PatchFacts") -> str:
    definition = (
        "The effect is the share of the logit difference between the two answers that"
    )
    if facts["into"] == "corrupt":
        return f"{definition} is restored: 0 is the corrupted run, 1 is the clean run."
    return f"{definition} is lost: 0 is the clean run, 1 is the corrupted run."


def _carriers(result: Result) -> Iterator[str]:
    """Yield where two tokens carry at least half of the answer; without one, the
    largest effect of all.
    """
    facts, sites = cast("PatchFacts", result.facts), labels(result.data, "site")
    if "token" not in result.data.dims:
        yield from _together(facts)
        return
    tokens = {
        "the token that differs": facts["differing_token"],
        "the token at which the answer is read": facts["answer_token"],
    }
    carried = False
    for name, carrier in tokens.items():
        if carrier and carrier["half_at"]:
            carried = True
            yield (
                f"Patching {quoted_token(carrier['token'])}, {name}, {_verb(facts)} at"
                " least half of the logit difference at"
                f" {ranges(carrier['half_at'], sites)} (largest effect"
                f" {carrier['largest']:.2f})."
            )
    if not carried and facts["largest"]:
        largest = facts["largest"]
        yield (
            f"No single state {_verb(facts)} half of the logit difference: the largest"
            f" effect is {largest['value']:.2f}, of"
            f" {quoted_token(largest.get('token', ''))} at {largest['site']}."
        )


def _together(facts: "PatchFacts") -> Iterator[str]:
    """Yield the sites with an effect, of those patched at all tokens at once."""
    total = facts["cells"]["total"]
    clear = facts.get("clear")
    largest = facts["largest"]
    if clear:
        strongest = []
        for site in clear[:MOST_NAMED]:
            interval = f"{site['low']:.2f} to {site['high']:.2f}"
            strongest.append(f"{site['site']} {site['effect']:.2f} ({interval})")
        listed = "; ".join(strongest)
        verb = "has" if len(clear) == 1 else "have"
        yield (
            f"{len(clear)} of {total} sites {verb} an effect that is not 0 at 95% for"
            f" all sites together: {listed}."
        )
    elif clear is not None:
        yield (
            f"No effect of the {total} sites can be told from 0 at 95% for all sites"
            " together."
        )
    elif largest:
        yield (
            f"The largest effect of the {total} sites is {largest['value']:.2f}, of"
            f" {largest['site']}."
        )


def _layer_windows(facts: "PatchFacts") -> Iterator[str]:
    windows = facts.get("layer_windows")
    if not windows:
        return
    largest = windows["largest"]
    spared = ", except the token at which the answer is read,"
    if largest["site"].endswith(BRANCHES):
        spared = ""
    yield (
        f"Patching all tokens of {windows['layers']} layers in a row{spared} has the"
        f" largest effect for the window that begins at {largest['site']}:"
        f" {largest['value']:.2f}."
    )


def _certainty(facts: "PatchFacts") -> str:
    """Say how far the numbers reach."""
    count = facts["contrasts"]
    if count == 1:
        return (
            "This is one pair of prompts; whether it holds for others was not tested."
        )
    groups = facts.get("groups", count)
    in_groups = "" if groups == count else f" in {groups} groups"
    if facts.get("clear") is not None:
        return (
            f"These are averages over {count} pairs of prompts{in_groups}, with"
            " intervals corrected for the number of sites."
        )
    return (
        f"These are averages over {count} pairs of prompts{in_groups}; differences"
        " between sites were not tested."
    )
