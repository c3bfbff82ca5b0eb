"""The story of visibility: which states influence which, and from how far."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal, TypeAlias

import numpy as np

from hiddenscope.results import Aside, Report, Result, Section, frozen
from hiddenscope.results.drawing import labels
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, Style
from hiddenscope.results.report import FEWEST_GROUPS
from hiddenscope.results.sentences import (
    UNTESTED,
    counted,
    in_series,
    model_name,
    number,
    quote,
    quoted_token,
)

MeasureName: TypeAlias = Literal[
    "l1", "frobenius", "relative", "logit", "mean", "resample"
]
INTERVENTIONS: tuple[MeasureName, ...] = ("mean", "resample")
"""Measures that replace a state."""
BoundarySide: TypeAlias = Literal["above", "below", "undecided"]
"""On which side of a boundary a whole 95% interval is."""
DecayName: TypeAlias = Literal["below", "first", "depth"]
"""What falls: shares by distance of the site below, shares by distance of the first
site, or shares by depth."""

DECAYS: tuple[DecayName, ...] = ("below", "first", "depth")
# A title quotes a text of at most this many characters.
LONGEST_TITLE_TEXT = 66
SHARES = {
    "own": "of the influence on a prediction",
    "own_below": "of the influence of the site below",
    "own_first": "of the influence of the first site",
}
BY_DISTANCE = {
    "decay_below": "of the site below on a state",
    "decay_first": "of the first site on the last",
}
# With fewer groups of texts, intervals over texts were not calibrated.
CALIBRATED = 10
ROUGH = "The intervals are rough: with as few groups of texts they were not calibrated."
NO_INTERVALS = f"There are no intervals: they need eight groups of texts. {UNTESTED}"
# Whose influence falls with what.
FALLING = {
    "below": ("of the site below", "the distance"),
    "first": ("of the first site on the last", "the distance"),
    "depth": ("of a lower site", "the depth"),
}
FALLS = {"below": "grows with", "undecided": "was not found to fall with"}
# The law that is better, the one whose advantage is told, and its sign.
BETTER = {
    "power": ("A power law fits better than an exponential", "power law", 1),
    "exponential": ("An exponential fits better than a power law", "exponential", -1),
    None: ("These texts do not tell a power law from an exponential", "power law", 1),
}
MEASURES = {
    "l1": (
        "Influence is read off the Jacobian: it is the L1 norm of the gradient of"
        " |h|₁/|h|₂ with respect to the source, where h is the influenced state. The"
        " ratio does not depend on how long h is."
    ),
    "frobenius": (
        "Influence is the Frobenius norm of the Jacobian of one state with respect to"
        " the other."
    ),
    "relative": (
        "Influence is the Frobenius norm of the Jacobian in relative terms: the"
        " relative change of a state for a relative change of the other."
    ),
    "logit": (
        "Influence is the L2 norm of the gradient of a token's log-probability with"
        " respect to a state."
    ),
    "mean": (
        "A state is replaced by the mean state of its site over all texts, and the loss"
        " of the true next token is compared with that before."
    ),
    "resample": (
        "A state is replaced by the state of another text at the same site and"
        " position, and the loss of the true next token is compared with that before."
    ),
}
# What goes out from a state, and the size of it where it has a sign.
EFFECTS = {
    "logit": ("the influence on predictions", ""),
    "mean": ("the rise of the loss", "the size of the change of the loss"),
    "resample": ("the rise of the loss", "the size of the change of the loss"),
}
# About how many sites are shown by distance.
SHOWN_SITES = 5


@frozen
class Share:
    """A share at a site."""

    site: str
    share: float


@frozen
class SourceShare:
    """A share of a source site."""

    source_site: str
    share: float


@frozen
class OwnBelow:
    """How much of the influence of the site below comes from the same token."""

    mean: float
    least: Share
    most: Share


@frozen
class OwnFirst:
    """How much of the influence of the first site comes from the same token."""

    site: str
    source_site: str
    share: float


@frozen
class Distances:
    """How influence decays with the distance in tokens."""

    half_within: int
    nine_tenths_within: int
    farthest: int
    at_one: float
    at_farthest: float


@frozen
class SourceInfluence:
    """The influence of a source site."""

    source_site: str
    influence: float


@frozen
class Reach:
    """How far down the influence on the last site reaches."""

    site: str
    first: SourceInfluence
    below: SourceInfluence
    ratio: float | None


@frozen
class OnStates:
    """The influence of the states of one stack on each other."""

    stack: str | None
    own_below: OwnBelow | None = None
    own_first: OwnFirst | None = None
    first_token_share: float | None = None
    distance_below: Distances | None = None
    distance_first: Distances | None = None
    reach: Reach | None = None


@frozen
class MostSeen:
    """The state with the largest influence on the last prediction."""

    source_site: str
    source_token: str


@frozen
class OnPredictions:
    """The influence of the states of the last stack on its predictions."""

    stack: str | None
    targets: list[str]
    own: list[SourceShare]
    most_seen: MostSeen
    distance_first: Distances | None = None


@frozen
class Cross:
    """The share of the encoder in the influence on the decoder."""

    site: str
    source_site: str
    beside: str
    share: float


@frozen
class Interval:
    """A number with the ends of its 95% interval over texts; None where unknown."""

    value: float | None
    low: float | None
    high: float | None


@frozen
class Guess(Interval):
    """A number that answers a guess, and the boundary that decides."""

    boundary: float
    verdict: BoundarySide


@frozen
class LawFit:
    """How shares fall with the distance or the depth."""

    source: DecayName
    exponent: Interval
    rate: Interval
    advantage: Interval
    explained: float | None
    better: Literal["power", "exponential"] | None
    decays: BoundarySide


@frozen
class RandomFit:
    """The exponent with random weights, and how much larger that of the model is."""

    source: DecayName
    exponent: Interval
    decays: BoundarySide
    excess: Interval
    verdict: BoundarySide


@frozen
class Averages:
    """Averages over texts, aligned by distance and depth, and what was drawn."""

    groups: int
    batches: float
    targets: int
    targets_per_text: int
    farthest: int
    deepest: int
    source_site: str
    site: str
    laws: list[LawFit]
    own_column: Guess
    own_below: Guess
    own_first: Guess
    opening: Interval
    locality: Guess
    random: list[RandomFit] | None = None


@frozen
class RandomFuture:
    """The same shares with random weights, and how much larger those of the model are.

    `excess` is of the mean share, `excess_fall` of the first sites' over the last's.
    """

    first: Interval
    last: Interval
    fall: Guess
    excess: Guess
    excess_fall: Guess


@frozen
class Future:
    """The share of what states do that falls on later predictions, along the sites.

    From `own_from` on it is below one half, and up to `later_until` above. `first` and
    `last` are means over thirds of the sites, and `fall` is their difference.
    `together` is the mean rank correlation of a state's effects on its own prediction
    and on later ones. The whole effect is not clearly above 0 at `unclear`.
    """

    own_from: str | None
    later_until: str | None
    first_sites: str
    last_sites: str
    first: Interval
    last: Interval
    fall: Guess
    together: Guess
    unclear: str | None = None
    random: RandomFuture | None = None


@frozen
class Outgoing:
    """What states do to predictions, averaged over texts, and what was drawn.

    `size` is that of the size of a change, where a change has a sign.
    """

    groups: int
    batches: float
    states: int
    states_per_text: int
    farthest: int
    change: Future | None
    size: Future | None = None


@frozen
class VisibilityReport(Report):
    """Which states influence which."""

    measure: MeasureName
    probes: int | None
    texts: int
    tokens: int
    sites: str
    cut: bool = False
    stacks: list[OnPredictions | OnStates] = field(default_factory=list)
    cross: Cross | None = None
    aligned: Averages | None = None
    outgoing: Outgoing | None = None


def story(report: VisibilityReport, result: Result) -> Iterator[Section]:
    """Yield the map, then what sums it up; of many texts, the averages."""
    if report.aligned:
        yield Section(
            "Influence by distance and depth",
            tuple(_average_findings(report.aligned, report.texts)),
            tuple(_average_views(result, report.aligned.deepest)),
            "Influence is averaged as a share: what a token has of the influence of all"
            " tokens of its site on a state. Bands are 95% intervals over texts. Where"
            " both axes are logarithmic, a power law is a straight line."
            f" {MEASURES[report.measure]}",
        )
        return
    if report.outgoing:
        yield Section(
            "What a state does to its own prediction, and to later ones",
            tuple(_outgoing_findings(report, report.outgoing)),
            tuple(_outgoing_views(report, result)),
            "A state at a token is used for the prediction of the next token, and at"
            " later tokens that attend to it. A share is the sum over later predictions"
            " divided by the sum over all. Bands are 95% intervals over texts."
            f" {MEASURES[report.measure]}",
        )
        return
    sentences = tuple(_findings(report))
    later = sentences[2:]
    yield Section(
        "Which states influence which?",
        (*sentences[:2], *map(Aside, later[:-1]), *later[-1:]),
        (_map(report, result),),
        "Point at a cell: states that influence it turn blue, and states that it"
        " influences turn orange. A state is computed from states of lower layers, at"
        " its own token and at the tokens that it attends to."
        f" {MEASURES[report.measure]}",
    )
    lines = dict(_lines(report, result))
    if lines:
        yield Section(
            "How influence falls with distance",
            later,
            tuple(lines.values()),
            f"The lines sum up the map: {in_series(list(lines))}.",
            folded=True,
        )


def _map(report: VisibilityReport, result: Result) -> Grid:
    """Draw what influences a cell and what it influences.

    At rest the grid shows the influence on the last state or prediction.
    """
    data, sites = result.data, labels(result.data, "source_site")
    variable = data[report.measure]
    if report.measure == "logit":
        on_predictions = variable.values
        predictions, rows, columns = on_predictions.shape
        influence = np.full((rows, columns, rows, columns), np.nan, dtype=np.float32)
        # With targets, only the tokens of the decoder, which come last, have
        # predictions.
        influence[-1, columns - predictions :] = on_predictions
        strings = labels(data, "source_string")
        target = str(data["target"].values[-1])
        token = repr(target) if target else "the next token"
        on = f"the last log p of {token}"
        note = "The top row stands for the predictions."
    else:
        influence = variable.values.copy()
        rows, columns = influence.shape[:2]
        # What a state does to itself is larger than all else, and says nothing about
        # the model.
        flat = influence.reshape(rows * columns, rows * columns)
        np.fill_diagonal(flat, np.nan)
        strings = labels(data, "string")
        on = f"{sites[-1]} at {quote(strings[-1])}"
        note = "What a state does to itself is left out."
    texts = data.attrs.get("texts", [])
    of_text = "one text"
    if len(texts) == 1:
        if len(texts[0]) <= LONGEST_TITLE_TEXT:
            of_text = f"“{texts[0]}”"
    elif report.texts > 1:
        of_text = f"{report.texts} texts on average"
    measure = Measure(
        f"influence on {on}",
        influence[-1, -1].copy(),
        str(variable.attrs["units"]),
        scale="log",
        influence=influence,
    )
    return Grid(
        f"Which states of {model_name(result)} influence which: {of_text}",
        sites,
        strings,
        (measure,),
        note=note,
    )


def _lines(report: VisibilityReport, result: Result) -> Iterator[tuple[str, Lines]]:
    """Yield what sums up the map: shares along the layers, distances, and reach."""
    data, model = result.data, model_name(result)
    sites = labels(data, "source_site")
    on_predictions = report.measure == "logit"
    shares = []
    for name, words in SHARES.items():
        if name in data and np.isfinite(data[name].values).any():
            shares.append(Series(words, data[name].values))
    if shares:
        influenced = "prediction" if on_predictions else "state"
        yield (
            "how much of the influence comes from the same token",
            Lines(
                f"How much of the influence on a {influenced} comes from its own token,"
                f" in {model}",
                sites,
                tuple(shares),
                y_name="share of the same token",
            ),
        )
    distances = []
    for decay, words in BY_DISTANCE.items():
        for stack in ("", "encoder", "decoder"):
            name = f"{decay}_{stack}".rstrip("_")
            shown = f"{stack} {words}".strip()
            if on_predictions:
                shown = "of the first site on a prediction"
            if name in data:
                distances.append(Series(shown, data[name].values))
    if distances:
        note = "Relative to the influence of the same token, which is 1."
        stacks = [stack for stack in report.stacks if isinstance(stack, OnStates)]
        if any(stack.first_token_share is not None for stack in stacks):
            note += " The influence of the first token is left out."
        yield (
            "how it falls with the distance between tokens",
            Lines(
                f"How influence decays with the distance in tokens, in {model}",
                labels(data, "distance"),
                tuple(distances),
                "tokens back",
                "influence",
                scale="log",
                note=note,
            ),
        )
    if "reach" in data:
        words = "summed over source tokens, averaged over target tokens"
        yield (
            "how large it is from each layer to the last",
            Lines(
                f"The influence of every layer on the last, in {model}",
                sites,
                (Series(words, data["reach"].values),),
                y_name="influence",
                unit=str(data[report.measure].attrs["units"]),
                scale="log",
            ),
        )


def _findings(report: VisibilityReport) -> Iterator[str]:
    """Yield how much influence comes from a token's own states, and from how far back
    it comes.
    """
    for stack in report.stacks:
        if isinstance(stack, OnPredictions):
            largest = stack.most_seen
            yield (
                f"{quoted_token(largest.source_token)} at {largest.source_site} has the"
                " largest influence on the last prediction."
            )
            shares = [f"{part.share:.0%} at {part.source_site}" for part in stack.own]
            if shares:
                yield (
                    f"The token that predicts has {' and '.join(shares)} of the"
                    " influence on its prediction."
                )
            yield from _distance(
                "the first site have on a prediction", stack.distance_first
            )
        else:
            in_stack = f" in the {stack.stack}" if stack.stack else ""
            below = stack.own_below
            if below:
                span = ""
                if below.least.site != below.most.site:
                    span = (
                        f" (from {below.least.share:.0%} at {below.least.site} to"
                        f" {below.most.share:.0%} at {below.most.site})"
                    )
                yield (
                    f"On average {below.mean:.0%} of the influence of the site below on"
                    f" a state{in_stack} comes from the same token{span}."
                )
            site, source_site = "the last", "the first site"
            first = stack.own_first
            if first:
                site, source_site = first.site, first.source_site
                yield (
                    f"Of the influence of {source_site} on {site}, {first.share:.0%}"
                    " comes from the same token; the rest comes from other tokens."
                )
            if stack.first_token_share is not None:
                yield (
                    f"Of the influence of other tokens of the site below{in_stack}, the"
                    f" first token has {stack.first_token_share:.0%}."
                )
            yield from _distance("the site below have on a state", stack.distance_below)
            yield from _distance(f"{source_site} have on {site}", stack.distance_first)
            reach = stack.reach
            if reach:
                bottom, top = reach.first, reach.below
                yield (
                    f"Summed over all tokens, the influence of {bottom.source_site} on"
                    f" {reach.site} is {number(bottom.influence)}; that of"
                    f" {top.source_site} is {number(top.influence)}."
                )
    cross = report.cross
    if cross:
        yield (
            f"Of the influence of {cross.source_site} and {cross.beside} on"
            f" {cross.site}, {cross.share:.0%} comes from {cross.source_site}."
        )
    if report.cut:
        yield (
            "All texts were cut to the length of the shortest,"
            f" {counted(report.tokens, 'token')}."
        )
    if report.probes:
        yield (
            f"The map is estimated with {report.probes} random vectors for each"
            " target; its error is half of a 95% interval."
        )
    if report.stacks:
        yield UNTESTED


def _distance(source: str, distance: Distances | None) -> Iterator[str]:
    if distance:
        yield (
            f"Half of the influence that other tokens of {source} comes from at most"
            f" {counted(distance.half_within, 'token')} away, and 90% from at most"
            f" {distance.nine_tenths_within}; the farthest token that is counted is"
            f" {distance.farthest} away."
        )


def _average_views(result: Result, deepest: int) -> Iterator[Lines]:
    """Yield lines by distance, by layer and by depth, with their intervals."""
    data, model = result.data, model_name(result)
    farthest = int(data["distance"].values[-1])
    yield Lines(
        f"Influence by the distance in tokens, in {model}",
        # The token itself, at distance 0, has no place on a log axis.
        labels(data, "distance")[1:],
        _banded(result, BY_DISTANCE, start=1),
        "tokens back",
        "share of a token",
        scale="log",
        x_scale="log",
        note="The first token is left out.",
    )
    yield Lines(
        f"How much of the influence comes from the same token, in {model}",
        labels(data, "site"),
        _banded(result, {"own_below": SHARES["own_below"]}),
        y_name="share of the same token",
    )
    yield Lines(
        f"The share of the same token, by how many sites below, in {model}",
        labels(data, "depth"),
        _banded(result, {"own_by_depth": "of the influence of a lower site"}),
        "sites below",
        "share of the same token",
    )
    if deepest > 1:
        yield Lines(
            f"Influence by the depth, in {model}",
            labels(data, "depth")[:deepest],
            _banded(result, {"decay_depth": "of a site"}, stop=deepest),
            "sites below",
            "share of a site",
            scale="log",
            x_scale="log",
            note="Of states that have this many sites below them; summed over tokens.",
        )
    yield Lines(
        f"How far away the influence of other tokens comes from, in {model}",
        labels(data, "site"),
        _banded(result, {"mean_distance": "of other tokens of the site below"}),
        y_name="mean distance",
        unit="tokens",
        note=f"Of distances from 1 to {farthest}; where all count the same, the mean"
        f" is {(farthest + 1) / 2:g}.",
    )
    yield Lines(
        f"The share of every layer in the influence on the last, in {model}",
        labels(data, "source_site"),
        _banded(result, {"reach": "summed over source tokens"}),
        y_name="share",
        scale="log",
    )


def _banded(
    result: Result, names: Mapping[str, str], start: int = 0, stop: int | None = None
) -> tuple[Series, ...]:
    """Return a line with its interval for each variable, and for random weights."""
    styles: dict[str, Style] = {"": "line", "random_": "dash"}
    series = []
    for name, words in names.items():
        for prefix, style in styles.items():
            if f"{prefix}{name}" not in result.data:
                continue
            value, low, high = (
                result.data[f"{prefix}{name}{suffix}"].values[start:stop]
                for suffix in ("", "_low", "_high")
            )
            whose = f"{words}, random weights" if prefix else words
            series.append(Series(whose, value, low, high, "95% interval", style))
    return tuple(series)


def _average_findings(averages: Averages, texts: int) -> Iterator[str]:
    """Yield the two guesses, then the laws, then what was drawn."""
    # Whether a state sees mostly its own column: from near, on the whole, from afar.
    shares = {
        "of the influence of the site below": averages.own_below,
        "of that of all lower sites on average": averages.own_column,
        f"of that of {averages.source_site} on {averages.site}": averages.own_first,
    }
    answers = {"above": "yes", "below": "no", "undecided": "undecided"}
    parts = []
    for whose, share in shares.items():
        if share.value is not None:
            words = _with_interval(share, ".0%")
            parts.append(f"{words} {whose}: {answers[share.verdict]}")
    yield (
        "Does a state see mostly its own column? The same token has"
        f" {'; '.join(parts)}."
    )
    trend = averages.locality
    if trend.value is not None:
        rise = {
            "above": "Early layers see more locally than late ones",
            "below": "Late layers see more locally than early ones",
            "undecided": "No trend was found in how far layers see",
        }
        yield (
            f"{rise[trend.verdict]}: from the first site to the last, the mean"
            " distance of the influence of other tokens changes by"
            f" {_with_interval(trend, '+.2f')} tokens."
        )
    for law in averages.laws:
        if law.exponent.value is None:
            continue
        of_whom, along = FALLING[law.source]
        exponent = _with_interval(law.exponent, ".2f")
        if law.decays != "above":
            yield (
                f"The influence {of_whom} {FALLS[law.decays]} {along}: the exponent of"
                f" a power law is {exponent}."
            )
            continue
        better, winner, sign = BETTER[law.better]
        fit = ""
        if law.explained is not None:
            fit = f" and explains {law.explained:.0%} of the variance of the logarithms"
        yield (
            f"The influence {of_whom} falls with {along}. Fitted as a power law, its"
            f" exponent is {exponent}{fit}. {better}: the {winner} explains"
            f" {_with_interval(law.advantage, '.1%', sign)} more of it."
        )
    for random in averages.random or []:
        if random.exponent.value is not None:
            of_whom, along = FALLING[random.source]
            falls = "falls too"
            if random.decays != "above":
                falls = f"{FALLS[random.decays]} {along}"
            beside = {
                "above": "The model's is larger by",
                "below": "The model's is smaller: the difference is",
                "undecided": (
                    "The model's was not found to be larger: the difference is"
                ),
            }
            yield (
                f"With random weights, the influence {of_whom} {falls}: the exponent is"
                f" {_with_interval(random.exponent, '.2f')}. {beside[random.verdict]}"
                f" {_with_interval(random.excess, '.2f')}."
            )
    if averages.random is not None:
        yield "The random weights were drawn once."
    yield (
        f"Averaged over {texts:,} texts in {averages.groups:,} groups:"
        f" {averages.targets:,} states were drawn, at most"
        f" {averages.targets_per_text} of each text. Distances are counted up to"
        f" {averages.farthest} tokens, and depths up to"
        f" {counted(averages.deepest, 'site')}."
        " Intervals are at 95%, over groups of texts."
    )
    yield from _few(averages)


def _few(averages: Averages | Outgoing) -> Iterator[str]:
    """Say what few groups do to the intervals."""
    if averages.groups < FEWEST_GROUPS:
        yield NO_INTERVALS
    elif averages.batches < CALIBRATED:
        yield ROUGH


def _outgoing_views(report: VisibilityReport, result: Result) -> Iterator[Lines]:
    """Yield shares by layer and by distance, and how the two effects go together."""
    data, model = result.data, model_name(result)
    sites = labels(data, "source_site")
    change, size = EFFECTS[report.measure]
    names = {"future": f"of {change}"}
    together = {"together": change}
    if size:
        names["size_future"] = f"of {size}"
        together["size_together"] = size
    yield Lines(
        f"How much of what a state does falls on later predictions, in {model}",
        sites,
        _banded(result, names),
        y_name="share of later predictions",
        note="The last layer reaches no later prediction.",
    )
    summed = data["outgoing"].values.cumsum(1)
    reaching = np.flatnonzero(np.isfinite(data["future"].values * data["together"]))
    some = reaching[:: max(1, len(reaching) // SHOWN_SITES)]
    if len(some):
        within = [Series(sites[row], summed[row] / summed[row, -1]) for row in some]
        yield Lines(
            f"How far ahead a state is used, in {model}",
            labels(data, "distance"),
            tuple(within),
            "tokens later, at most",
            f"share of {change}",
        )
    yield Lines(
        "Do states that do more to their own prediction do more to later ones? In"
        f" {model}",
        sites,
        _banded(result, together),
        y_name="rank correlation",
    )


def _outgoing_findings(report: VisibilityReport, outgoing: Outgoing) -> Iterator[str]:
    """Yield what falls on later predictions, layer by layer, then what was drawn."""
    for future, effect in zip(
        (outgoing.change, outgoing.size), EFFECTS[report.measure], strict=True
    ):
        if future:
            if future.later_until:
                yield (
                    f"Up to {future.later_until}, more than half of {effect} falls on"
                    " later predictions."
                )
            if future.own_from:
                yield (
                    f"From {future.own_from} on, a state is mostly about its own next"
                    f" token: less than half of {effect} falls on later predictions."
                )
            else:
                yield (
                    "From no site on was a state found to be mostly about its own next"
                    f" token, by {effect}."
                )
            if future.unclear:
                yield (
                    f"At {future.unclear}, {effect} is not clearly above 0 in sum,"
                    " beyond rounding, so that it has no shares."
                )
            if future.first.value is not None:
                compared = {
                    "above": "The first sites do more for later tokens than the last",
                    "below": "The last sites do more for later tokens than the first",
                    "undecided": "The first and the last sites were not told apart",
                }
                yield (
                    f"{compared[future.fall.verdict]}: later predictions have"
                    f" {_with_interval(future.first, '.0%')} of {effect} at"
                    f" {future.first_sites}, and {_with_interval(future.last, '.0%')}"
                    f" at {future.last_sites}, a difference of"
                    f" {_with_interval(future.fall, '+.2f')}."
                )
            together = future.together
            if together.value is not None:
                goes = {
                    "above": "do more to later ones too",
                    "below": "do less to later ones",
                    "undecided": "were not found to do more or less to later ones",
                }
                yield (
                    "States of one site that do more to their own prediction"
                    f" {goes[together.verdict]}: by {effect}, the rank correlation is"
                    f" {_with_interval(together, '.2f')} on average over sites."
                )
            if future.random:
                yield _random_future(future.random, effect)
    if any(future and future.random for future in (outgoing.change, outgoing.size)):
        yield "The random weights were drawn once."
    yield (
        f"Averaged over {report.texts:,} texts in {outgoing.groups:,} groups:"
        f" {outgoing.states:,} tokens were drawn, at most {outgoing.states_per_text} of"
        " each text, each with its states at all sites and the predictions of up to"
        f" {counted(outgoing.farthest, 'token')} later. The first token is none of"
        " them: many models rest their attention on it. Sites that reach no later"
        " prediction, such as the last layer, are not counted. Intervals are at 95%,"
        " over groups of texts."
    )
    yield from _few(outgoing)


def _random_future(random: RandomFuture, effect: str) -> str:
    """Say what a copy with random weights gives, and how the model differs from it."""
    if random.first.value is None:
        return (
            f"With random weights, {effect} is not clearly above 0, so that it has no"
            " shares to compare with."
        )
    beside = {
        "above": "The model's difference is larger",
        "below": "The model's difference is smaller",
        "undecided": "The model's difference was not told apart from that",
    }
    words = (
        f"With random weights, later predictions have"
        f" {_with_interval(random.first, '.0%')} of {effect} at the first sites and"
        f" {_with_interval(random.last, '.0%')} at the last, a difference of"
        f" {_with_interval(random.fall, '+.2f')}."
    )
    if random.excess_fall.value is None:
        return words
    return (
        f"{words} {beside[random.excess_fall.verdict]}: less that with random weights,"
        f" it is {_with_interval(random.excess_fall, '+.2f')}, and the mean share over"
        f" all sites is {_with_interval(random.excess, '+.2f')}."
    )


def _with_interval(interval: Interval, form: str, sign: int = 1) -> str:
    """Write a number with the ends of its interval, where they are known.

    With a sign of -1, by how much one is larger becomes by how much the other is.
    """
    if interval.value is None:
        return "unknown"
    # What rounds to 0 has no sign.
    form = form.replace(".", "z.")
    middle = f"{sign * interval.value:{form}}"
    if interval.low is None or interval.high is None:
        return middle
    low, high = sorted((sign * interval.low, sign * interval.high))
    return f"{middle} ({low:{form}} to {high:{form}})"
