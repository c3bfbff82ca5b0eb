"""The story of activation patching: which states carry the answer to another run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from hiddenscope.causes.contrast import AnswerPair
from hiddenscope.results import Aside, Explanation, Report, Result, Section, frozen
from hiddenscope.results.drawing import grid_of, labels, long_name, tokens_with_gaps
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, Style
from hiddenscope.results.report import ABSENT, Absent, SiteValue
from hiddenscope.results.sentences import (
    counted,
    model_name,
    quote,
    quoted_token,
    quoted_tokens,
    ranges,
)

# What a branch adds to the residual stream, not the stream itself.
BRANCHES = (".attn", ".cross", ".mlp")
CELLS = ("effect", "attribution", "probability", "kl", "effect_error")
# Effects of whole layers, the line of each, and what it is.
LAYERS: tuple[tuple[str, Style, str], ...] = (
    ("swap", "line", "The solid line patches all tokens of one layer at once."),
    (
        "swap_window",
        "dash",
        "The dashed line patches several layers in a row, named by the lowest.",
    ),
)
MOST_ANSWERS = 3
MOST_NAMED = 6
ABLATIONS = {"zero": "Zeros", "mean": "The means over all prompts"}


@frozen
class Runs:
    """A number of the clean and of the corrupted run."""

    clean: float
    corrupt: float


@frozen
class CellCount:
    """How many cells there are, and in how many both runs have the same state."""

    total: int
    equal: int


@frozen
class LargestEffect(SiteValue):
    """The cell with the largest effect; without a token, of all tokens at once."""

    token: str | None = None
    other_token: str | None = None


@frozen
class Clear:
    """A site whose effect is not 0, with an interval corrected for all sites."""

    site: str
    effect: float
    low: float
    high: float


@frozen
class Carrier:
    """A token, and the sites at which it carries at least half of the answer."""

    token: str
    other_token: str
    largest: float
    half_at: list[str]
    from_: str | None
    to: str | None


@frozen
class LayerWindows:
    """The largest effect of patching several layers in a row, named by the lowest."""

    layers: int
    largest: SiteValue


@frozen
class Agreement:
    """How attribution agrees with the exact effect; None over too few cells."""

    cells: int
    correlation: float | None
    mean_absolute_error: float | None


@frozen
class Cost:
    """What the sweep computed."""

    cells: int
    passes: int
    tokens: int


@frozen
class Check:
    """One effect in the sweep and by a pass of its own."""

    sweep: float
    alone: float


@frozen
class PatchReport(Report):
    """Which states carry the answer from one run to another."""

    contrasts: int
    into: Literal["corrupt", "clean"]
    answers: list[AnswerPair]
    logit_difference: Runs
    probability: Runs
    window: int
    measure: Literal["effect", "attribution"]
    cells: CellCount
    largest: LargestEffect | None
    differing_token: Carrier | None
    answer_token: Carrier | None
    positions: list[int] | Absent | None = ABSENT
    clear: list[Clear] | Absent | None = ABSENT
    agreement: Agreement | None = None
    layer_windows: LayerWindows | Absent | None = ABSENT
    cost: Cost | None = None
    check: Check | Absent | None = ABSENT
    # Results that were saved before there were ablations name no method.
    method: str | None = None
    copies: int
    groups: int
    notes: list[str]


def story(report: PatchReport, result: Result) -> Iterator[Section]:
    """Yield the effect of every site and token with what it shows, then whole
    layers.
    """
    windows = []
    if isinstance(report.layer_windows, LayerWindows):
        largest = report.layer_windows.largest
        layers = counted(report.layer_windows.layers, "layer")
        if report.layer_windows.layers > 1:
            layers += " in a row"
        spared = ", except the token at which the answer is read,"
        if largest.site.endswith(BRANCHES):
            spared = ""
        windows.append(
            f"Patching all tokens of {layers}{spared} has the largest effect for the"
            f" window that begins at {largest.site}: {largest.value:.2f}."
        )
    yield Section(
        "Which states carry the answer?",
        tuple(_findings(report, result, windows)),
        tuple(_effects(report, result)),
        f"{_experiment(report)} {_effect(report)}",
    )
    if "swap" in result.data and "token" in result.data.dims:
        data = result.data
        series = []
        sentences = []
        for name, style, sentence in LAYERS:
            effect = data[name].values
            # With few layers there is no window of several.
            if not np.isfinite(effect).any():
                continue
            low = high = None
            if f"{name}_error" in data:
                error = data[f"{name}_error"].values
                low, high = effect - error, effect + error
            band = "" if low is None else "one standard error"
            series.append(Series(long_name(data[name]), effect, low, high, band, style))
            sentences.append(sentence)
        lines = Lines(
            f"The effect of patching whole layers, in {model_name(result)}",
            labels(data, "site"),
            tuple(series),
            y_name="effect",
            unit="share of the logit difference",
        )
        if not all(site.endswith(BRANCHES) for site in labels(data, "site")):
            sentences.append(
                "The token at which the answer is read keeps its own state; patching it"
                " too would give the other run at every layer."
            )
        yield Section(
            "Whole layers at once",
            tuple(map(Explanation, windows)),
            (lines,),
            " ".join([*sentences, "The effect is defined as above."]),
            folded=True,
        )


def _effects(report: PatchReport, result: Result) -> Iterator[Grid]:
    """Yield the effect of every site and token, with the tokens of both prompts."""
    answers = " over ".join(_answers(report))
    title = (
        f"How much of the preference for {answers} each {_noun(result)} {_verb(report)}"
        f" in {model_name(result)}"
    )
    if "token" not in result.data.dims:
        # What was patched at all tokens at once: layer by head or neuron.
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
        row_names = list(dict.fromkeys(rows))
        column_names = list(dict.fromkeys(columns))
        places = [row_names.index(row) for row in rows]
        across = [column_names.index(column) for column in columns]
        measures = []
        for name in (*CELLS, "low", "high"):
            if name not in data:
                continue
            values = np.full((len(row_names), len(column_names)), np.nan, np.float32)
            values[places, across] = data[name].values
            variable = data[name]
            meaning = variable.attrs.get("meaning", "sequential")
            unit = variable.attrs.get("units", "")
            measures.append(Measure(long_name(variable), values, unit, meaning=meaning))
        yield Grid(
            title,
            tuple(row_names),
            tuple(column_names),
            tuple(measures),
            x_name="part",
            y_name="layer",
        )
        return
    grid = grid_of(result, [name for name in CELLS if name in result.data], title)
    if grid is not None:
        data = result.data.isel(token=slice(len(grid.tokens)))
        clean = tokens_with_gaps(data, "")
        corrupt = tokens_with_gaps(data, "other_")
        notes = [grid.note] if grid.note else []
        if None in clean or None in corrupt:
            notes.append("Hatched: a token that only one prompt has.")
        if report.contrasts > 1:
            notes.append("The tokens are those of the first pair of prompts.")
        yield replace(
            grid,
            tokens=clean,
            second=corrupt,
            token_rows=("clean", "corrupted"),
            note=" ".join(notes),
        )


def _noun(result: Result) -> str:
    """Name what was patched."""
    sites = labels(result.data, "site")
    for noun in ("head", "neuron"):
        if all(f".{noun}." in site for site in sites):
            return noun
    return "state"


def _findings(report: PatchReport, result: Result, windows: list[str]) -> Iterator[str]:
    """Yield where the answer is carried, what both runs predict, how it was measured,
    and how sure that is.
    """
    yield from _carriers(report, result)
    answer, other = _answers(report)
    clean = _above(report.logit_difference.clean)
    corrupt = _above(report.logit_difference.corrupt)
    texts = result.data.attrs.get("texts", [])
    other_texts = result.data.attrs.get("other_texts", [])
    average, count = "The", report.contrasts
    if count > 1:
        average = f"On average over {count} pairs of prompts, the"
    if len(texts) == len(other_texts) == 1:
        yield (
            f"After the clean prompt {quote(texts[0])} the logit of {answer} is"
            f" {clean} that of {other}; after the corrupted prompt"
            f" {quote(other_texts[0])} it is {corrupt}."
        )
    else:
        yield (
            f"{average} logit of {answer} is {clean} that of {other} after the clean"
            f" prompt; after the corrupted prompt it is {corrupt}."
        )
    yield Aside(_effect(report))
    yield from map(Aside, windows)
    agreement = report.agreement
    if agreement and agreement.correlation is not None:
        yield Aside(
            f"Over {agreement.cells} cells, attribution correlates with the exact"
            f" effect at r = {agreement.correlation:.2f}; its mean absolute error is"
            f" {agreement.mean_absolute_error:.2f}."
        )
    groups = "" if report.groups == count else f" in {counted(report.groups, 'group')}"
    if count == 1:
        yield "This is one pair of prompts; whether it holds for others was not tested."
    elif report.clear not in (None, ABSENT):
        yield (
            f"These are averages over {count} pairs of prompts{groups}, with intervals"
            " corrected for the number of sites."
        )
    else:
        yield (
            f"These are averages over {count} pairs of prompts{groups}; differences"
            " between sites were not tested."
        )
    cells = report.cells
    if cells.equal:
        yield Aside(
            f"{cells.equal} of {cells.total} cells have an effect of exactly 0,"
            " because both runs have the same state there."
        )
    yield from map(Aside, report.notes)


def _verb(report: PatchReport) -> str:
    return "restores" if report.into == "corrupt" else "removes"


def _answers(report: PatchReport) -> Iterator[str]:
    """Yield the answers of all contrasts, each once, then the others."""
    pairs = [quoted_tokens([pair.answer, pair.other]) for pair in report.answers]
    for names in zip(*pairs, strict=True):
        distinct = list(dict.fromkeys(names))
        others = " and others" if len(distinct) > MOST_ANSWERS else ""
        yield " / ".join(distinct[:MOST_ANSWERS]) + others


def _above(difference: float) -> str:
    return f"{abs(difference):.2f} {'below' if difference < 0 else 'above'}"


def _experiment(report: PatchReport) -> str:
    """Say what was done for every cell."""
    source, run = "corrupted", "clean"
    if report.into == "corrupt":
        source, run = "clean", "corrupted"
    ablation = ABLATIONS.get(report.method or "")
    if report.positions is not ABSENT or ablation:
        tokens = "all tokens" if report.positions is None else "chosen tokens"
        if report.positions is ABSENT:
            tokens = "this token"
        values = ablation or f"The values of the {source} run"
        change = f"{values} replace those of the {run} run at {tokens} of this site"
    elif report.window == 1:
        change = (
            f"The hidden state of the {source} run at this layer and token replaces the"
            f" one of the {run} run"
        )
    else:
        change = (
            f"The hidden states of the {source} run at this layer and {report.window}"
            f" tokens replace the ones of the {run} run"
        )
    return f"Every cell is one experiment. {change}, and the model computes the rest."


def _effect(report: PatchReport) -> str:
    share = "lost: 0 is the clean run, 1 is the corrupted run"
    if report.into == "corrupt":
        share = "restored: 0 is the corrupted run, 1 is the clean run"
    return (
        "The effect is the share of the logit difference between the two answers that"
        f" is {share}."
    )


def _carriers(report: PatchReport, result: Result) -> Iterator[str]:
    """Yield where two tokens carry at least half of the answer; without one, the
    largest effect of all.
    """
    sites = labels(result.data, "site")
    if "token" not in result.data.dims:
        # The sites with an effect, of those patched at all tokens at once.
        total = report.cells.total
        clear = None if report.clear is ABSENT else report.clear
        largest = report.largest
        if clear:
            strongest = []
            for site in clear[:MOST_NAMED]:
                interval = f"{site.low:.2f} to {site.high:.2f}"
                strongest.append(f"{site.site} {site.effect:.2f} ({interval})")
            listed = "; ".join(strongest)
            verb = "has" if len(clear) == 1 else "have"
            yield (
                f"{len(clear)} of {total} sites {verb} an effect that is not 0 at 95%"
                f" for all sites together: {listed}."
            )
        elif clear is not None:
            yield (
                f"No effect of the {total} sites can be told from 0 at 95% for all"
                " sites together."
            )
        elif largest:
            yield (
                f"The largest effect of the {total} sites is {largest.value:.2f}, of"
                f" {largest.site}."
            )
        return
    tokens = {
        "the token that differs": report.differing_token,
        "the token at which the answer is read": report.answer_token,
    }
    carried = False
    for name, carrier in tokens.items():
        if carrier and carrier.half_at:
            carried = True
            yield (
                f"Patching {quoted_token(carrier.token)}, {name}, {_verb(report)} at"
                " least half of the logit difference at"
                f" {ranges(carrier.half_at, sites)} (largest effect"
                f" {carrier.largest:.2f})."
            )
    if not carried and report.largest:
        largest = report.largest
        yield (
            f"No single state {_verb(report)} half of the logit difference: the largest"
            f" effect is {largest.value:.2f}, of"
            f" {quoted_token(largest.token or '')} at {largest.site}."
        )
