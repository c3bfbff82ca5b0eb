"""The story of a profile: how large states are, how they spread, how layers compare."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from hiddenscope.results import Aside, Explanation, Report, Result, Section, frozen
from hiddenscope.results.drawing import (
    by_stack,
    grid_of,
    labels,
    long_name,
    pair_grid,
)
from hiddenscope.results.pictures import Grid, Lines, Series
from hiddenscope.results.report import Extremes
from hiddenscope.results.sentences import (
    UNTESTED,
    counted,
    in_series,
    model_name,
    number,
    of_model,
    plural,
    quote,
    quoted_token,
)

MEASURES = ("norm", "kurtosis", "mean", "deviation")
WHOSE_NORM = {
    "first_token_norm": "the first token",
    "other_tokens_norm": "the other tokens",
    "vector_norm": "the vectors",
}
# What each line of norms shows, by the end of its name.
NORM_LINES = {
    "first token": (
        "the norm of the first token (the median, where there are several texts)"
    ),
    "other tokens, median": (
        "the median norm of all other tokens, with a band that holds the middle half of"
        " them"
    ),
    "vectors, median": (
        "the median norm of the vectors, with a band that holds the middle half of them"
    ),
}
NeuronAspect: TypeAlias = Literal["intensity", "selectivity"]
NeuronVerdict: TypeAlias = Literal["more", "less", "undecided"]


class NeuronMeasure(NamedTuple):
    """A measure of the neurons of a layer.

    `factor` says that two layers are compared by their ratio, not by their difference,
    and `rises` that more of it means more intensity or selectivity.
    """

    words: str
    aspect: NeuronAspect
    factor: bool
    rises: bool = True


# In the order in which they are computed.
NEURON_MEASURES = {
    "neuron_activation": NeuronMeasure("mean absolute activation", "intensity", True),
    "neuron_peak": NeuronMeasure(
        "99th percentile of the absolute activation", "intensity", True
    ),
    "neuron_write": NeuronMeasure(
        "norm of what the MLP adds over that of the stream", "intensity", True
    ),
    "neuron_kurtosis": NeuronMeasure("kurtosis over tokens", "selectivity", True),
    "neuron_sparseness": NeuronMeasure("Treves-Rolls sparseness", "selectivity", False),
    "neuron_active": NeuronMeasure(
        "share of tokens on which a neuron is active", "selectivity", False, False
    ),
    "neuron_entropy": NeuronMeasure(
        "entropy over token types", "selectivity", False, False
    ),
}
APART = "`final` is normed and the layers are not, so the two are not compared."


@frozen
class Norms:
    """Median norms, of first and other tokens; of vectors where states are pooled."""

    first_token_norm: float | None = None
    other_tokens_norm: float | None = None
    vector_norm: float | None = None


@frozen
class SiteNorms(Norms):
    """Median norms at a site."""

    site: str


@frozen
class Place:
    """The site of a state, with its token, or its text if pooled."""

    site: str
    token: str | None = None
    text: int | None = None


@frozen
class LargestNorm(Place):
    """The state with the largest norm."""

    norm: float


@frozen
class NotFinite(Place):
    """How many states are not finite, and the first of them."""

    states: int


@frozen
class Spread:
    """A number over the middle layers."""

    all_tokens: float | None = None
    other_tokens: float | None = None
    all_vectors: float | None = None


@frozen
class LargestValue(Place):
    """The largest value over the median of its layer."""

    times_median: float
    channel: int
    position: int | None = None


@frozen
class MassiveChannel:
    """How many massive activations a channel has."""

    channel: int
    values: int


@frozen
class MassiveToken:
    """How many massive activations a token has."""

    token: str
    values: int


@frozen
class MassiveActivations:
    """The massive activations of a stack."""

    threshold: float
    values: int
    channels: list[MassiveChannel]
    sites: str
    at_first_tokens: int | None = None
    tokens: list[MassiveToken] | None = None


@frozen
class LeastAlike:
    """The two layers with the lowest CKA."""

    site: str
    source_site: str
    cka: float


@frozen
class LayerSimilarity:
    """The CKA of all pairs of layers."""

    sampled_tokens: int | None = None
    sampled_vectors: int | None = None
    median: float | None = None
    median_other_tokens: float | None = None
    median_by_chance: float | None = None
    least_alike: LeastAlike | None = None


@frozen
class NeuronGap:
    """How far the last layer is from another by a measure: a ratio or a difference.

    `p` is corrected over the measures, and `verdict` says whether there is more
    intensity or selectivity.
    """

    measure: str
    aspect: NeuronAspect
    value: float
    low: float
    high: float
    p: float
    verdict: NeuronVerdict

    @property
    def told(self) -> str:
        """Return the measure with its gap, interval and p."""
        measure = NEURON_MEASURES[self.measure]
        value, ends = f"{self.value:+.3f}", f"{self.low:+.3f} to {self.high:+.3f}"
        if measure.factor:
            value = f"{self.value:.3g} times"
            ends = f"{self.low:.3g} to {self.high:.3g}"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.2g}"
        return f"{measure.words} ({value}, {ends}, {p})"


@frozen
class NeuronProfile:
    """The neurons of several layers, and how the last of these compares.

    `trend` is what was fitted to the layers before the last.
    """

    sites: str
    last: str
    previous: str | None
    tokens: int
    texts: int
    groups: int
    types: int
    trend: Literal["line", "parabola"] | None
    against_previous: list[NeuronGap]
    against_trend: list[NeuronGap]


@frozen
class ProfileStack(Norms):
    """The profile of one stack; norms and spread are those of its middle layers."""

    stack: str | None
    few_tokens: bool
    middle_layers: str | None = None
    norm_ratio: float | None = None
    before_final: SiteNorms | None = None
    at_final: SiteNorms | None = None
    largest_norm: LargestNorm | None = None
    not_finite: NotFinite | None = None
    anisotropy: Spread | None = None
    effective_rank: Spread | None = None
    intrinsic_dimension: Extremes | None = None
    added: Extremes | None = None
    largest_value: LargestValue | None = None
    massive_activations: MassiveActivations | None = None
    cka: LayerSimilarity | None = None
    neurons: NeuronProfile | None = None

    @property
    def of(self) -> str:
        """Return " of" and the name of the stack, where there are two."""
        return f" of the {self.stack}" if self.stack else ""


@frozen
class ProfileReport(Report):
    """How large states are and how they spread; vectors where states are pooled."""

    texts: int
    pooled: str | None
    tokens: int | None = None
    tokens_kept: int | None = None
    vectors: int | None = None
    vectors_kept: int | None = None
    computed_in: str
    final_norm: Literal["apart", "everywhere", "mixed"]
    stacks: list[ProfileStack]

    @property
    def rows(self) -> str:
        """Return what the states are of."""
        return "tokens" if self.pooled is None else "vectors"


def story(report: ProfileReport, result: Result) -> Iterator[Section]:
    """Yield the norms, then what blocks add, how states spread and how alike layers
    are. What says little over few tokens is left out.
    """
    norms: list[str] = []
    lessons: list[str] = []
    spread: list[str] = []
    similar: list[str] = []
    closing: list[str] = []
    for stack in report.stacks:
        norms += _norms(stack)
        lessons += map(Explanation, _lessons(stack))
        spread += _spread(stack)
        similar += _cka(stack)
        closing += _limits(stack, report.rows)
    count = report.tokens or report.vectors or 0
    shown = report.tokens_kept or report.vectors_kept or 0
    if shown < count:
        closing.append(
            f"The grid holds the first {shown:,} of {count:,} {report.rows}; all other"
            f" numbers are of all {report.rows}."
        )
    sections = [
        Section(
            "How large is every state?",
            (*norms, UNTESTED),
            (_state_grid(result),),
            f"Every cell is {_cell(report, result)} run across, layers run up. The"
            " colour is at first the L2 norm of the vector, on a log scale.",
        )
    ]
    lines = tuple(_norm_lines(report, result))
    sections.append(
        Section(
            "The same along the layers",
            tuple(lessons),
            lines,
            _reading_of_norms(lines),
            folded=True,
        )
    )
    pictures = dict(_along_layers(report, result))
    if pictures:
        reading = f"the pictures show {in_series(list(pictures))}."
        # Raw layers and a normed `final`.
        if len(set(result.data["form"].to_numpy().tolist())) > 1:
            reading = f"{reading} {APART}"
        sections.append(
            Section(
                "What blocks add, and how states spread",
                tuple(spread),
                tuple(pictures.values()),
                f"From the first to the last, {reading}",
                folded=True,
            )
        )
    sections += _neuron_section(report, result)
    few_tokens = all(stack.few_tokens for stack in report.stacks)
    if "cka" in result.data and result.data.sizes["site"] > 1 and not few_tokens:
        sections.append(
            Section(
                "How similar the layers are",
                tuple(similar),
                (_cka_grid(result),),
                "A cell compares the states of two layers over all"
                f" {report.rows} by linear CKA.",
                folded=True,
            )
        )
    else:
        closing = [*similar, *closing]
    *others, last = sections
    yield from others
    asides = map(Aside, [*closing, UNTESTED])
    yield replace(last, sentences=(*last.sentences, *asides))


def _state_grid(result: Result) -> Grid:
    names = [name for name in MEASURES if name in result.data]
    grid = grid_of(result, names)
    assert grid is not None, "every profile has norms"
    measures = []
    for name, measure in zip(names, grid.measures, strict=True):
        title = f"The {long_name(result.data[name])} of every state{of_model(result)}"
        measures.append(replace(measure, title=title))
    return replace(grid, title=measures[0].title, measures=tuple(measures))


def _cell(report: ProfileReport, result: Result) -> str:
    if report.pooled is not None:
        return (
            "the vector of a text, or of one window of it (pooling:"
            f" {report.pooled}): texts"
        )
    texts = result.data.attrs.get("texts", [])
    text = quote(texts[0]) if len(texts) == 1 else counted(report.texts, "text")
    return f"one hidden state of {text}: tokens"


def _norm_lines(report: ProfileReport, result: Result) -> Iterator[Lines]:
    name = "other tokens" if report.pooled is None else "vectors"
    series = []
    for prefix, here in by_stack(labels(result.data, "site")):
        norms = {}
        for end in ("first", "median", "low", "high"):
            if f"norm_{end}" in result.data:
                values = result.data[f"norm_{end}"].to_numpy()
                norms[end] = np.where(here, values, np.nan)
        if "first" in norms:
            series.append(Series(f"{prefix}first token", norms["first"]))
        band = norms["low"], norms["high"], "middle half"
        series.append(Series(f"{prefix}{name}, median", norms["median"], *band))
    title = "The norm along the layers"
    yield from _drawn(result, series, title, "norm", unit="L2", scale="log")


def _along_layers(report: ProfileReport, result: Result) -> Iterator[tuple[str, Lines]]:
    """Yield what each picture of all states shows, and the picture.

    Pooled states have no first tokens.
    """
    others = "other tokens" if report.pooled is None else "vectors"
    dimension = {"intrinsic_dimension": "intrinsic dimension"}
    if report.pooled is None:
        words = "intrinsic dimension, without first tokens"
        dimension = {"intrinsic_dimension_others": words}
    # What is shown, the title, the unit, and the variables with their names.
    pictures = [
        (
            "the norm of what each block adds over the norm of its input",
            "What each block adds, along the layers",
            "norm of the change over the norm before",
            {"added_first": "first token", "added_median": f"{others}, median"},
        ),
        (
            "the kurtosis of the states",
            "The kurtosis along the layers",
            "kurtosis over the width",
            {"kurtosis_first": "first token", "kurtosis_median": f"{others}, median"},
        ),
        (
            "their anisotropy",
            "The anisotropy along the layers",
            "mean cosine",
            {
                "anisotropy": f"all {report.rows}",
                "anisotropy_others": "without first tokens",
            },
        ),
        (
            "how many dimensions they fill",
            "How many dimensions states fill, along the layers",
            "dimensions",
            {
                "effective_rank": "effective rank",
                "effective_rank_others": "effective rank, without first tokens",
                **dimension,
            },
        ),
    ]
    if all(stack.few_tokens for stack in report.stacks):
        pictures.pop()
    for meaning, title, y_name, names in pictures:
        variables = [name for name in names if name in result.data]
        series = []
        for name in variables:
            for prefix, here in by_stack(labels(result.data, "site")):
                values = np.where(here, result.data[name].to_numpy(), np.nan)
                series.append(Series(f"{prefix}{names[name]}", values))
        note = ""
        if "kurtosis_median" in names:
            sentences = [" ".join(_massive(stack)) for stack in report.stacks]
            note = " ".join(filter(None, sentences))
        scale = "linear"
        if variables:
            scale = result.data[variables[0]].attrs.get("scale", "linear")
        for lines in _drawn(result, series, title, y_name, scale=scale, note=note):
            yield meaning, lines


def _neuron_section(report: ProfileReport, result: Result) -> Iterator[Section]:
    """Yield how neurons act, layer by layer, where any were measured."""
    sentences: list[str] = []
    for stack in report.stacks:
        if stack.neurons is not None:
            sentences += _neurons(stack.neurons, stack.of)
    if not sentences:
        return
    views: list[Lines] = []
    for name, measure in NEURON_MEASURES.items():
        series = []
        values, low, high = (
            result.data[f"{name}{end}"].to_numpy() for end in ("", "_low", "_high")
        )
        for prefix, here in by_stack(labels(result.data, "site")):
            ends = np.where(here, low, np.nan), np.where(here, high, np.nan)
            line = np.where(here, values, np.nan)
            series.append(Series(f"{prefix}neurons", line, *ends, "95% interval"))
        scale = "log" if measure.factor else "linear"
        title = f"{measure.words[0].upper()}{measure.words[1:]} of neurons"
        views += _drawn(result, series, title, measure.words, scale=scale)
    reading = (
        "Every picture is one measure by layer, with 95% intervals over texts and"
        " without first tokens. The first three are measures of intensity, the others"
        " of selectivity: medians over the neurons, which are more selective the higher"
        " kurtosis and sparseness are, and the lower the share of active tokens and the"
        " entropy (what was found to differ is said above, with an interval)."
    )
    yield Section("How neurons act", tuple(sentences), tuple(views), reading)


def _neurons(neurons: NeuronProfile, of_stack: str) -> Iterator[str]:
    """Yield how the last layer compares with the one before, and with the trend."""
    units = counted(neurons.texts, "text")
    if neurons.groups < neurons.texts:
        units = f"{units} in {counted(neurons.groups, 'group')}"
    yield (
        f"Neurons{of_stack} were measured on {counted(neurons.tokens, 'token')} of"
        f" {units}, without first tokens ({neurons.sites})."
    )
    if neurons.previous is None:
        return
    if not neurons.against_previous:
        yield "One group of texts gives no interval, so no layers were compared."
        return
    yield from _gaps(neurons.last, f"`{neurons.previous}`", neurons.against_previous)
    if neurons.trend is None:
        yield "There are too few layers for a trend to compare the last with."
        return
    name = f"the trend of the layers below (a {neurons.trend} in depth)"
    yield from _gaps(neurons.last, name, neurons.against_trend)
    yield Explanation(
        "An interval against the trend holds how much the layers below scatter around"
        " it, and what other texts would change; p is corrected over the measures."
    )


def _gaps(last: str, other: str, gaps: list[NeuronGap]) -> Iterator[str]:
    """Yield a sentence for intensity and one for selectivity."""
    for aspect in ("intensity", "selectivity"):
        parts = []
        for verdict in ("more", "less", "undecided"):
            listed = [
                gap.told
                for gap in gaps
                if gap.aspect == aspect and gap.verdict == verdict
            ]
            if listed:
                parts.append(f"{verdict} by {in_series(listed)}")
        if parts:
            yield f"The {aspect} of `{last}` against {other}: {'; '.join(parts)}."


def _drawn(
    result: Result, series: list[Series], title: str, y_name: str, **details: Any
) -> Iterator[Lines]:
    finite = [line for line in series if np.isfinite(line.y).any()]
    if finite:
        title = f"{title}{of_model(result)}"
        sites = labels(result.data, "site")
        yield Lines(title, sites, tuple(finite), y_name=y_name, **details)


def _cka_grid(result: Result) -> Grid:
    """Draw every pair of the layers that were compared."""
    variables = ("cka_others", "cka", "cka_chance")
    names = [name for name in variables if name in result.data]
    # Sites that were not compared are NaN.
    compared = np.isfinite(result.data[names[0]].to_numpy()).any(1)
    rows = np.flatnonzero(compared)
    return pair_grid(
        result.data.isel(site=rows, source_site=rows),
        names,
        f"How similar every pair of layers of {model_name(result)} is",
        "Rows and columns are layers.",
    )


def _reading_of_norms(lines: tuple[Lines, ...]) -> str:
    """Say what each line of norms is, of those that are drawn."""
    names = [series.name for series in chain(*(picture.series for picture in lines))]
    drawn = [
        words
        for ending, words in NORM_LINES.items()
        if any(name.endswith(ending) for name in names)
    ]
    subject = "The lines are" if len(names) > 1 else "The line is"
    return f"{subject} {in_series(drawn)}."


def _whose(row: Place) -> str:
    """Name a row by its token, or by its text where states are pooled."""
    if row.token is not None:
        return quoted_token(row.token)
    return f"that of text {row.text:,}"


def _norms(stack: ProfileStack) -> Iterator[str]:
    """Yield how large states are, what the final norm does, and the largest of all."""
    first, others, ratio = (
        stack.first_token_norm,
        stack.other_tokens_norm,
        stack.norm_ratio,
    )
    if first is not None and others is not None and ratio is not None:
        yield (
            f"In the middle layers{stack.of} ({stack.middle_layers}) the median norm of"
            f" the first token is {number(first)}, and that of the other tokens"
            f" {number(others)}: the first is {ratio:,.1f} times as large."
        )
    changes = []
    for name, whose in WHOSE_NORM.items():
        before, after = (
            getattr(site, name, None) for site in (stack.before_final, stack.at_final)
        )
        if before is not None and after is not None:
            changes.append(f"{whose} from {number(before)} to {number(after)}")
    if changes:
        yield (
            f"The final norm{stack.of} changes the norm of"
            f" {' and that of '.join(changes)}."
        )
    largest = stack.largest_norm
    if largest:
        yield (
            f"The state with the largest norm{stack.of}, {number(largest.norm)}, is"
            f" {_whose(largest)} at {largest.site}."
        )


def _lessons(stack: ProfileStack) -> Iterator[str]:
    """Yield what follows from the norms."""
    if stack.norm_ratio and stack.norm_ratio >= 10:
        yield (
            "A first token of this size hides all others: it dominates a mean over"
            " tokens, and a distance between two texts."
        )
    before, after = stack.before_final, stack.at_final
    if not before or not after:
        return
    # Known at both sites or at none.
    first, others = after.first_token_norm, after.other_tokens_norm
    first_before, others_before = before.first_token_norm, before.other_tokens_norm
    if not first or not others or not first_before or not others_before:
        return
    if first_before > 2 * others_before and 1 / 2 < first / others < 2:
        yield (
            "At `final`, after the final norm, the first token and the others have"
            " about the same norm."
        )


def _spread(stack: ProfileStack) -> Iterator[str]:
    """Yield what blocks add, massive activations, and how first tokens hide others."""
    if stack.added:
        low, high = stack.added.lowest, stack.added.highest
        yield (
            f"The block that makes `{high.site}` changes states most: the change has"
            f" {high.value:.2f} times the norm of its input (the median). The block"
            f" that makes `{low.site}` changes them least ({low.value:.2f} times)."
        )
    yield from _massive(stack)
    ranks = stack.effective_rank
    # Pooled states have one rank only: there is no first token to leave out.
    if stack.few_tokens or not ranks or not ranks.all_tokens or not ranks.other_tokens:
        return
    if ranks.all_tokens < ranks.other_tokens / 2:
        yield (
            f"The first tokens hide how states spread: the middle layers{stack.of} have"
            f" an effective rank of {ranks.all_tokens:.1f} with them, and of"
            f" {ranks.other_tokens:.0f} without."
        )


def _massive(stack: ProfileStack) -> Iterator[str]:
    """Yield the massive activations, where there are any."""
    massive, largest = stack.massive_activations, stack.largest_value
    if massive is None or largest is None:
        return
    channels = [str(record.channel) for record in massive.channels]
    numbers = ", ".join(channels)
    if sum(record.values for record in massive.channels) != massive.values:
        numbers += " and others"
    at_first = ""
    of_first = massive.at_first_tokens
    if of_first is not None:
        count = "all" if of_first == massive.values else f"{of_first:,}"
        at_first = f", {count} of them at a first token"
    position = ""
    if largest.position is not None:
        position = f", position {largest.position}"
    yield (
        f"Massive activations{stack.of}: {counted(massive.values, 'value')} in"
        f" {plural(len(channels), 'channel')} {numbers} at {massive.sites}{at_first};"
        f" the largest is {largest.times_median:,.0f} times the median"
        f" ({_whose(largest)}{position}, {largest.site})."
    )


def _cka(stack: ProfileStack) -> Iterator[str]:
    cka = stack.cka
    if not cka:
        return
    rows = "tokens" if cka.sampled_vectors is None else "vectors"
    count = cka.sampled_tokens or cka.sampled_vectors or 0
    medians = []
    if cka.median is not None:
        medians.append(f"{cka.median:.2f} over all {rows}")
    if cka.median_other_tokens is not None:
        medians.append(f"{cka.median_other_tokens:.2f} without first tokens")
    if cka.median_by_chance is not None:
        medians.append(f"{cka.median_by_chance:.2f} with {rows} paired at random")
    if medians:
        yield (
            f"The median linear CKA of all pairs of layers{stack.of} ({count:,}"
            f" {rows}) is {', '.join(medians)}."
        )
    pair = cka.least_alike
    if pair:
        yield (
            f"`{pair.site}` and `{pair.source_site}` are least alike ({pair.cka:.2f})."
        )


def _limits(stack: ProfileStack, rows: str) -> Iterator[str]:
    broken = stack.not_finite
    if broken:
        yield (
            f"{counted(broken.states, 'state')}{stack.of} had to be left out as not"
            f" finite; the first is {_whose(broken)} at {broken.site}."
        )
    if stack.few_tokens:
        yield (
            f"With so few {rows}, spread, dimension and CKA say little: give more text."
        )
