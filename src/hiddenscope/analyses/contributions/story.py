"""The story of contributions: what each part adds to the logit of an answer."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.results import (
    Explanation,
    Listing,
    Report,
    Result,
    Section,
    frozen,
    table_of,
)
from hiddenscope.results.drawing import labels
from hiddenscope.results.pictures import Grid, Lines, Measure, Series
from hiddenscope.results.sentences import (
    model_name,
    quoted_token,
    quoted_tokens,
    shortened,
)
from hiddenscope.states.arrays import Floats

if TYPE_CHECKING:
    import xarray

# Lists are shown for so many tokens of an answer.
MOST_LISTED = 4
# An answer is cut here in titles and sentences, in characters.
LONGEST_ANSWER = 60
# Parts beside the heads, as the data and as a reader calls them.
SUMS = {
    "embedding": "embedding",
    "attn_head": "heads",
    "cross_head": "cross-attention heads",
    "attn_bias": "attention biases",
    "cross_bias": "cross-attention biases",
    "attn_whole": "attention that is not split into heads",
    "cross_whole": "cross-attention that is not split into heads",
    "mlp": "MLPs",
    "norm_bias": "final norm's bias",
    "head_bias": "unembedding's bias",
}
# What is known of the strongest neurons.
NEURONS = ("neuron", "neuron_layer", "neuron_index")
# Shown even where they add nothing.
ALWAYS = ("embedding", "attn_head", "mlp")
READING = (
    "Every coloured cell is what one attention head adds to the logit, and every bar is"
    " what the MLP of that layer adds: orange raises it, blue lowers it. Layers run up."
    " The model's logit is the sum of all parts, once the scale of the final norm is"
    " frozen at its value in this text. These are direct effects: what a part changes"
    " by way of later layers is counted there."
)
ALONG = (
    "Every coloured cell is what one attention head adds along the direction, and every"
    " bar is what the MLP of that layer adds: orange is along it, blue against it."
    " Layers run up. The sum of all parts is the product of the last token's state with"
    " the direction."
)


@frozen
class StrongPart:
    """One of the parts that add or take most, and its share of the logit."""

    site: str
    contribution: float
    share: float
    step: int


@frozen
class ContributionsReport(Report):
    """What writes an answer.

    `logit`, `total`, `error` and `probability` have one number for each token of the
    answer.
    """

    answer: str
    tokens: int
    steps: list[str]
    logit: list[float]
    total: list[float]
    error: list[float]
    allowed_error: list[float]
    probability: list[float]
    strongest: list[StrongPart]
    norm_subtracts_mean: bool
    softcap: float | None
    scale: float | None
    dtype: str
    notes: list[str]
    other: str | None = None
    # The layer at which the answer is a direction; empty for one of tokens.
    along: str = ""

    @property
    def unit(self) -> str:
        """Return the unit of what parts add."""
        return "" if self.along else "logits"

    def strongest_at(self, step: int) -> list[StrongPart]:
        """Return the strongest parts of one token of the answer."""
        return [part for part in self.strongest if part.step == step]

    @property
    def logit_name(self) -> str:
        """Name the logit, or the difference of two, that the parts add up to."""
        if self.along:
            return f"{self.along} along {self.answer}"
        names = [
            shortened(answer, LONGEST_ANSWER)
            for answer in (self.answer, self.other)
            if answer
        ]
        return f"the logit of {' over '.join(quoted_tokens(names))}"


def story(report: ContributionsReport, result: Result) -> Iterator[Section]:
    """Yield the grid with what it shows, then the sums by kind."""
    data = result.data
    kinds = _kinds(data)
    listings = tuple(_listings(report, data))
    steps = range(data.sizes["step"])
    columns = [f"head.{head}" for head in labels(data, "head")]
    # The columns behind the heads, which are drawn as bars.
    bars = {}
    if "attn_whole" in data or "cross_whole" in data:
        bars["whole"] = "attention"
    if _has_numbers(data, "attn_bias") or _has_numbers(data, "cross_bias"):
        bars["bias"] = "bias"
    bars["mlp"] = "MLP"
    title = f"What each part of {model_name(result)} adds to {report.logit_name}"
    measures = []
    for step in steps:
        of_step = _step_name(data, step)
        measure = Measure(
            f"contribution to {of_step}",
            _rows_of_step(data.isel(step=step), bars).astype(np.float32),
            report.unit,
            meaning="diverging",
            title=f"{title}{_step_ending(data, step)}",
        )
        measures.append(measure)
    names = []
    for layer in labels(data, "layer"):
        if "cross_head" in data:
            names += [f"layer.{layer} self", f"layer.{layer} cross"]
        else:
            names.append(f"layer.{layer}")
    grid = Grid(
        title,
        tuple(names),
        (*columns, *bars.values()),
        tuple(measures),
        note="Bars have the scale of the colours: the longest is as far as these go.",
        x_name="part",
        y_name="layer",
        # A grid has a coloured column: without heads that is the whole attention.
        bars=len(bars) if columns else len(bars) - 1,
    )
    yield Section(
        "Which parts write the answer?",
        tuple(_findings(report, result, kinds)),
        (grid,),
        ALONG if report.along else READING,
        tables=(*listings, *map(table_of, listings)),
    )
    kinds_of_parts = _shown_kinds(data)
    sums = np.array([_sum_by_step(data, name) for name in kinds_of_parts])
    series = [
        Series(_step_name(data, step), sums[:, step], style="bar") for step in steps
    ]
    lines = Lines(
        f"What all parts of a kind add to {report.logit_name}, in {model_name(result)}",
        tuple(SUMS[name] for name in kinds_of_parts),
        tuple(series),
        x_name="part",
        y_name="contribution",
        unit=report.unit,
    )
    yield Section(
        "Embedding, heads, MLPs and biases",
        (Explanation(kinds),),
        (lines,),
        "Each bar is the sum of all parts of one kind. The bars add up to"
        f" {'the product' if report.along else 'the logit'}.",
        folded=True,
    )


def _rows_of_step(data: "xarray.Dataset", bars: Mapping[str, str]) -> Floats:
    """Return the numbers of one answer token: a row for each layer, two where layers
    have cross-attention, with the bars behind the heads.
    """
    empty = np.full(data.sizes["layer"], np.nan)
    rows = []
    for branch in ("attn", "cross"):
        if f"{branch}_head" in data:
            columns = [data.get(f"{branch}_{bar}", empty) for bar in bars]
            rows.append([data[f"{branch}_head"], *columns])
    # The MLP comes after both, so its bar stands in the upper row.
    rows[-1][-1] = data["mlp"]
    both = np.stack([np.column_stack(row) for row in rows], axis=1)
    return both.reshape(-1, both.shape[-1])


def _has_numbers(data: "xarray.Dataset", name: str) -> bool:
    """Tell whether a part is there and is anything but zero."""
    return name in data and bool(np.nan_to_num(data[name].values).any())


def _shown_kinds(data: "xarray.Dataset") -> list[str]:
    return [name for name in SUMS if name in ALWAYS or _has_numbers(data, name)]


def _sum_by_step(data: "xarray.Dataset", name: str) -> Floats:
    return data[name].sum({*data[name].dims} - {"step"}).values


def _step_name(data: "xarray.Dataset", step: int) -> str:
    """Name one token of the answer, with its number where there are several."""
    strings = labels(data, "step_string")
    number = f" (token {step + 1} of the answer)" if len(strings) > 1 else ""
    return f"{quoted_token(shortened(strings[step], LONGEST_ANSWER))}{number}"


def _step_ending(data: "xarray.Dataset", step: int) -> str:
    if data.sizes["step"] == 1:
        return ""
    return f": {_step_name(data, step)}"


def _findings(report: ContributionsReport, result: Result, kinds: str) -> Iterator[str]:
    """Yield the strongest part, what each kind adds up to, whether the sum holds, and
    notes.
    """
    strongest = report.strongest_at(0)
    if strongest:
        amount = abs(strongest[0].contribution)
        verb = "adds most to"
        if strongest[0].contribution < 0:
            verb = "takes most from"
        logit = float(result.data["logit"].values[0])
        target = report.logit_name
        if result.data.sizes["step"] > 1:
            target = f"the first token of {target.removeprefix('the logit of ')}"
        yield (
            f"{strongest[0].site} {verb} {target}: {amount:.2f}, where the sum of all"
            f" parts is {_signed(logit).removeprefix('+')}."
        )
    yield kinds
    error = float(np.abs(result.data["error"].values).max())
    whole = report.logit_name if report.along else "the model's own logit"
    yield (
        f"The parts sum to {whole} with an error of at most {error:.1g}, which is"
        " checked on every call."
    )
    if report.softcap:
        yield (
            f"The model caps its logits softly at {report.softcap}: the parts add up to"
            " the logit before the cap."
        )
    yield (
        "These are direct effects in one text; other texts were not tested, and a part"
        " that adds much need not be needed."
    )
    yield from report.notes


def _kinds(data: "xarray.Dataset") -> str:
    """Say what the parts of each kind add up to."""
    sums = []
    for name in _shown_kinds(data):
        amount = float(_sum_by_step(data, name)[0])
        sums.append(f"{SUMS[name]} {_signed(amount)}")
    ending = ""
    if data.sizes["step"] > 1:
        ending = " for the first token of the answer"
    return f"By kind{ending}: {', '.join(sums)}."


def _signed(amount: float) -> str:
    return f"{amount:+z.2f}".replace("-", "−")


def _listings(report: ContributionsReport, data: "xarray.Dataset") -> Iterator[Listing]:
    for step in range(min(MOST_LISTED, data.sizes["step"])):
        ending = _step_ending(data, step)
        parts = [
            (part.site, part.contribution, 100 * part.share)
            for part in report.strongest_at(step)
        ]
        if parts:
            yield Listing(
                f"Strongest parts{ending}",
                ("part", "contribution", "percent of the sum"),
                tuple(parts),
            )
        if "neuron" not in data:
            continue
        columns = [data[name].values[step].tolist() for name in NEURONS]
        neurons = []
        for amount, layer, index in zip(*columns, strict=True):
            if np.isfinite(amount):
                neurons.append((f"layer.{layer}.mlp.neuron.{index}", amount))
        if neurons:
            yield Listing(
                f"Strongest neurons{ending}",
                ("neuron", "contribution"),
                tuple(neurons),
                note="They are parts of their MLP, which the grid shows as a whole.",
            )
