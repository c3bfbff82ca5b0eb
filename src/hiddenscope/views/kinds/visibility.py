"""Visibility: which states influence which."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import MAP, labels, of_type
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, Style, View
from hiddenscope.results.sentences import (
    UNTESTED,
    as_prose,
    counted,
    in_series,
    model_name,
    number,
    quote,
    quoted_token,
)

if TYPE_CHECKING:
    from hiddenscope.analyses.visibility.facts import (
        AlignedFacts,
        DistanceFacts,
        IntervalFacts,
        LawFacts,
        RandomFacts,
        VisibilityFacts,
        VisibilityStackFacts,
    )

# A title quotes a text of at most so many characters.
LONGEST_TITLE_TEXT = 66
SHARES = {
    "own_below": "of the influence of the site below",
    "own_first": "of the influence of the first site",
}
DECAYS = {
    "decay_below": "of the site below on a state",
    "decay_first": "of the first site on the last",
}
# With fewer groups of texts, intervals over texts were not calibrated.
FEWEST_GROUPS = 10
# Whose influence falls with what.
WHOSE = {
    "below": "of the site below",
    "first": "of the first site on the last",
    "depth": "of a lower site",
}
WITH_WHAT = {"below": "the distance", "first": "the distance", "depth": "the depth"}
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
}


def views(result: Result) -> Iterator[View]:
    """Yield the map of what influences a cell and what it influences; then shares along
    the layers, and distances.
    """
    facts = cast("VisibilityFacts", result.facts)
    if "aligned" in facts:
        yield from _aligned_views(result)
        return
    model, sites = model_name(result), labels(result.data, "source_site")
    if facts["measure"] == "logit":
        influenced = "prediction"
        yield _prediction_map(result)
    else:
        influenced = "state"
        yield _state_map(result)
    shares = tuple(_share_series(result))
    if shares:
        yield Lines(
            f"How much of the influence on a {influenced} comes from its own token, in"
            f" {model}",
            sites,
            shares,
            y_name="share of the same token",
        )
    distances = tuple(_distance_series(result))
    if distances:
        note = "Relative to the influence of the same token, which is 1."
        if any("first_token_share" in stack for stack in facts["stacks"]):
            note += " The influence of the first token is left out."
        yield Lines(
            f"How influence decays with the distance in tokens, in {model}",
            labels(result.data, "distance"),
            distances,
            "tokens back",
            "influence",
            scale="log",
            note=note,
        )
    if "reach" in result.data:
        reach = Series(
            "summed over source tokens, averaged over target tokens",
            result.data["reach"].to_numpy(),
        )
        yield Lines(
            f"The influence of every layer on the last, in {model}",
            sites,
            (reach,),
            y_name="influence",
            unit=str(result.data[facts["measure"]].attrs["units"]),
            scale="log",
        )


def _aligned_views(result: Result) -> Iterator[View]:
    """Yield lines by distance, by layer and by depth, with their intervals."""
    data, model = result.data, model_name(result)
    facts = cast("VisibilityFacts", result.facts)
    farthest = int(data["distance"].values[-1])
    # The token itself, at distance 0, has no place on a log axis.
    distances = range(1, farthest + 1)
    yield Lines(
        f"Influence by the distance in tokens, in {model}",
        tuple(map(str, distances)),
        tuple(_banded(result, DECAYS, distances)),
        "tokens back",
        "share of a token",
        scale="log",
        x_scale="log",
        note="The first token is left out.",
    )
    yield Lines(
        f"How much of the influence comes from the same token, in {model}",
        labels(data, "site"),
        tuple(_banded(result, {"own_below": SHARES["own_below"]})),
        y_name="share of the same token",
    )
    by_depth = {"own_by_depth": "of the influence of a lower site"}
    yield Lines(
        f"The share of the same token, by how many sites below, in {model}",
        labels(data, "depth"),
        tuple(_banded(result, by_depth)),
        "sites below",
        "share of the same token",
    )
    deepest = facts["aligned"]["deepest"]
    if deepest > 1:
        depths = range(deepest)
        yield Lines(
            f"Influence by the depth, in {model}",
            labels(data, "depth")[:deepest],
            tuple(_banded(result, {"decay_depth": "of a site"}, depths)),
            "sites below",
            "share of a site",
            scale="log",
            x_scale="log",
            note="Of states that have so many sites below them; summed over tokens.",
        )
    distance = {"mean_distance": "of other tokens of the site below"}
    yield Lines(
        f"How far away the influence of other tokens comes from, in {model}",
        labels(data, "site"),
        tuple(_banded(result, distance)),
        y_name="mean distance",
        unit="tokens",
        note=f"Of distances from 1 to {farthest}; where all count the same, the mean"
        f" is {(farthest + 1) / 2:g}.",
    )
    yield Lines(
        f"The share of every layer in the influence on the last, in {model}",
        labels(data, "source_site"),
        tuple(_banded(result, {"reach": "summed over source tokens"})),
        y_name="share",
        scale="log",
    )


def _banded(
    result: Result, names: Mapping[str, str], places: Sequence[int] | None = None
) -> Iterator[Series]:
    """Yield a line with its interval for each variable, and for random weights."""
    for name, words in names.items():
        for prefix, ending in (("", ""), ("random_", ", random weights")):
            if f"{prefix}{name}" not in result.data:
                continue
            sides = []
            for suffix in ("", "_low", "_high"):
                values = result.data[f"{prefix}{name}{suffix}"].to_numpy()
                sides.append(values if places is None else values[list(places)])
            value, low, high = sides
            style: Style = "dash" if prefix else "line"
            yield Series(
                f"{words}{ending}", value, low, high, band="95% interval", style=style
            )


def _share_series(result: Result) -> Iterator[Series]:
    shares = SHARES
    if "own" in result.data:
        shares = {"own": "of the influence on a prediction"}
    for share, words in shares.items():
        if share in result.data:
            values = result.data[share].to_numpy()
            if np.isfinite(values).any():
                yield Series(words, values)


def _distance_series(result: Result) -> Iterator[Series]:
    for decay, words in DECAYS.items():
        for stack in ("", "encoder", "decoder"):
            name = f"{decay}_{stack}" if stack else decay
            if name not in result.data:
                continue
            shown = f"{stack} {words}".strip()
            if result.facts["measure"] == "logit":
                shown = "of the first site on a prediction"
            yield Series(shown, result.data[name].to_numpy())


def _state_map(result: Result) -> Grid:
    """Draw the map of states; at rest the grid shows the influence on the last of them.

    What a state does to itself is left out: it is larger than all else, and says
    nothing about the model.
    """
    data = result.data
    variable = data[result.facts["measure"]]
    influence = variable.transpose(*MAP).to_numpy().copy()
    sites, tokens = influence.shape[:2]
    flat = influence.reshape(sites * tokens, sites * tokens)
    np.fill_diagonal(flat, np.nan)
    last_token = quote(str(data["string"].values[-1]))
    measure = Measure(
        f"influence on {labels(data, 'site')[-1]} at {last_token}",
        influence[-1, -1].copy(),
        str(variable.attrs["units"]),
        scale="log",
        influence=influence,
    )
    return Grid(
        _title(result),
        labels(data, "site"),
        tuple(map(str, data["string"].values)),
        (measure,),
        note="What a state does to itself is left out.",
    )


def _prediction_map(result: Result) -> Grid:
    """Draw the map of predictions, which stand in the top row."""
    data = result.data
    dims = ("token", "source_site", "source_token")
    on_predictions = data["logit"].transpose(*dims).to_numpy()
    predictions, sites, tokens = on_predictions.shape
    influence = np.full((sites, tokens, sites, tokens), np.nan, dtype=np.float32)
    # With targets, only the tokens of the decoder, which come last, have predictions.
    influence[-1, tokens - predictions :] = on_predictions
    target = str(data["target"].values[-1])
    predicted = f"log p of {target!r}" if target else "log p of the next token"
    measure = Measure(
        f"influence on the last {predicted}",
        on_predictions[-1],
        "nats per L2",
        scale="log",
        influence=influence,
    )
    return Grid(
        _title(result),
        labels(data, "source_site"),
        tuple(map(str, data["source_string"].values)),
        (measure,),
        note="The top row stands for the predictions.",
    )


def _title(result: Result) -> str:
    texts, count = result.data.attrs.get("texts", []), result.facts["texts"]
    of_text = "one text"
    if len(texts) == 1:
        if len(texts[0]) <= LONGEST_TITLE_TEXT:
            of_text = f"“{texts[0]}”"
    elif count > 1:
        of_text = f"{count} texts on average"
    return f"Which states of {model_name(result)} influence which: {of_text}"


def findings(result: Result) -> Iterator[str]:
    """Yield how much influence comes from a token's own states, and from how far back
    it comes.
    """
    facts = cast("VisibilityFacts", result.facts)
    if "aligned" in facts:
        yield from _aligned_findings(facts)
        return
    for stack in facts["stacks"]:
        if "most_seen" in stack:
            yield from _on_predictions(stack)
        else:
            yield from _on_states(stack)
    cross = facts.get("cross")
    if cross:
        yield (
            f"Of the influence of {cross['source_site']} and {cross['beside']} on"
            f" {cross['site']}, {cross['share']:.0%} comes from {cross['source_site']}."
        )
    if facts["cut"]:
        yield (
            "All texts were cut to the length of the shortest,"
            f" {counted(facts['tokens'], 'token')}."
        )
    if facts["probes"]:
        yield (
            f"The map is estimated with {facts['probes']} random vectors for each"
            " target; its error is half of a 95% interval."
        )
    if facts["stacks"]:
        yield UNTESTED


def sections(result: Result) -> Iterator[Section]:
    """Yield the map, then what sums it up."""
    shown, sentences = tuple(views(result)), list(findings(result))
    if "aligned" in result.facts:
        yield Section(
            "Influence by distance and depth",
            as_prose(sentences),
            shown,
            "Influence is averaged as a share: what a token has of the influence of all"
            " tokens of its site on a state. Bands are 95% intervals over texts. Where"
            " both axes are logarithmic, a power law is a straight line."
            f" {MEASURES[result.facts['measure']]}",
        )
        return
    yield Section(
        "Which states influence which?",
        as_prose([*sentences[:2], *sentences[2:][-1:]]),
        of_type(shown, Grid),
        "Point at a cell: states that influence it turn blue, and states that it"
        " influences turn orange. A state is computed from states of lower layers, at"
        " its own token and at the tokens that it attends to."
        f" {MEASURES[result.facts['measure']]}",
    )
    lines = of_type(shown, Lines)
    if lines:
        sums = [_summed_up(picture) for picture in lines]
        yield Section(
            "How influence falls with distance",
            " ".join(sentences[2:]),
            lines,
            f"The lines sum up the map: {in_series(sums)}.",
            folded=True,
        )


def _summed_up(lines: Lines) -> str:
    """Say what one picture of lines sums up."""
    if lines.x_name == "tokens back":
        return "how it falls with the distance between tokens"
    if lines.y_name == "influence":
        return "how large it is from each layer to the last"
    return "how much of the influence comes from the same token"


def _on_states(stack: "VisibilityStackFacts") -> Iterator[str]:
    in_stack = f" in the {stack['stack']}" if stack["stack"] else ""
    below = stack.get("own_below")
    if below:
        least, most = below["least"], below["most"]
        yield (
            f"On average {below['mean']:.0%} of the influence of the site below on a"
            f" state{in_stack} comes from the same token (from {least['share']:.0%} at"
            f" {least['site']} to {most['share']:.0%} at {most['site']})."
        )
    site, source_site = "the last", "the first site"
    first = stack.get("own_first")
    if first:
        site, source_site = first["site"], first["source_site"]
        yield (
            f"Of the influence of {source_site} on {site}, {first['share']:.0%} comes"
            " from the same token; the rest comes from other tokens."
        )
    share = stack.get("first_token_share")
    if share is not None:
        yield (
            f"Of the influence of other tokens of the site below{in_stack}, the first"
            f" token has {share:.0%}."
        )
    distance = stack.get("distance_below")
    if distance:
        yield _distance("the site below have on a state", distance)
    distance = stack.get("distance_first")
    if distance:
        yield _distance(f"{source_site} have on {site}", distance)
    reach = stack.get("reach")
    if reach:
        bottom, top = reach["first"], reach["below"]
        yield (
            f"Summed over all tokens, the influence of {bottom['source_site']} on"
            f" {reach['site']} is {number(bottom['influence'])}; that of"
            f" {top['source_site']} is {number(top['influence'])}."
        )


def _aligned_findings(facts: "VisibilityFacts") -> Iterator[str]:
    """Yield the two guesses, then the laws, then what was drawn."""
    averages = facts["aligned"]
    yield from _column_findings(averages)
    trend = averages["locality"]
    if trend["value"] is not None:
        rise = {
            "above": "Early layers see more locally than late ones",
            "below": "Late layers see more locally than early ones",
            "undecided": "No trend was found in how far layers see",
        }
        yield (
            f"{rise[trend['verdict']]}: from the first site to the last, the mean"
            " distance of the influence of other tokens changes by"
            f" {_with_interval(trend, '+.2f')} tokens."
        )
    for law in averages["laws"]:
        yield from _law_findings(law)
    for random in averages.get("random", []):
        yield from _random_findings(random)
    if "random" in averages:
        yield "The random weights were drawn once."
    yield (
        f"Averaged over {facts['texts']:,} texts in {averages['groups']:,} groups:"
        f" {averages['targets']:,} states were drawn, at most"
        f" {averages['targets_per_text']} of each text. Distances are counted up to"
        f" {averages['farthest']} tokens, and depths up to {averages['deepest']} sites."
        " Intervals are at 95%, over groups of texts."
    )
    if averages["batches"] < FEWEST_GROUPS:
        yield (
            "The intervals are rough: with as few groups of texts they were not"
            " calibrated."
        )


def _column_findings(averages: "AlignedFacts") -> Iterator[str]:
    """Answer whether a state sees mostly its own column: from near, on the whole, and
    from afar.
    """
    answers = {"above": "yes", "below": "no", "undecided": "undecided"}
    shares = {
        "of the influence of the site below": averages["own_below"],
        "of that of all lower sites on average": averages["own_column"],
        f"of that of {averages['source_site']} on {averages['site']}": averages[
            "own_first"
        ],
    }
    parts = []
    for whose, share in shares.items():
        if share["value"] is not None:
            parts.append(f"{_percent(share)} {whose}: {answers[share['verdict']]}")
    yield (
        "Does a state see mostly its own column? The same token has"
        f" {'; '.join(parts)}."
    )


def _law_findings(law: "LawFacts") -> Iterator[str]:
    """Yield how one decay falls, as far as a law could be fitted."""
    if law["exponent"]["value"] is None:
        return
    subject = f"The influence {WHOSE[law['source']]}"
    along = WITH_WHAT[law["source"]]
    exponent = _with_interval(law["exponent"], ".2f")
    if law["decays"] != "above":
        words = f"was not found to fall with {along}"
        if law["decays"] == "below":
            words = f"grows with {along}"
        yield f"{subject} {words}: the exponent of a power law is {exponent}."
        return
    better = {
        "power": "A power law fits better than an exponential",
        "exponential": "An exponential fits better than a power law",
        None: "These texts do not tell a power law from an exponential",
    }
    advantage = law["advantage"]
    winner = "power law"
    if law["better"] == "exponential":
        advantage = _negative(advantage)
        winner = "exponential"
    fit = ""
    if law["explained"] is not None:
        fit = f" and explains {law['explained']:.0%} of the variance of the logarithms"
    yield (
        f"{subject} falls with {along}. Fitted as a power law, its exponent is"
        f" {exponent}{fit}. {better[law['better']]}: the {winner} explains"
        f" {_with_interval(advantage, '.1%')} more of it."
    )


def _random_findings(random: "RandomFacts") -> Iterator[str]:
    """Say whether an influence falls with random weights too, and by how much less."""
    if random["exponent"]["value"] is None:
        return
    along = WITH_WHAT[random["source"]]
    with_random = {
        "above": "falls too",
        "below": f"grows with {along}",
        "undecided": f"was not found to fall with {along}",
    }
    beside = {
        "above": "The model's is larger by",
        "below": "The model's is smaller: the difference is",
        "undecided": "The model's was not found to be larger: the difference is",
    }
    yield (
        f"With random weights, the influence {WHOSE[random['source']]}"
        f" {with_random[random['decays']]}: the exponent is"
        f" {_with_interval(random['exponent'], '.2f')}. {beside[random['verdict']]}"
        f" {_with_interval(random['excess'], '.2f')}."
    )


def _negative(interval: "IntervalFacts") -> "IntervalFacts":
    """Turn by how much one number is larger into by how much the other is."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    return {
        "value": None if value is None else -value,
        "low": None if high is None else -high,
        "high": None if low is None else -low,
    }


def _percent(interval: "IntervalFacts") -> str:
    return _with_interval(interval, ".0%")


def _with_interval(interval: "IntervalFacts", form: str) -> str:
    """Write a number with the ends of its interval, where they are known."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    if value is None:
        return "unknown"
    if low is None or high is None:
        return f"{value:{form}}"
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def _on_predictions(stack: "VisibilityStackFacts") -> Iterator[str]:
    largest = stack["most_seen"]
    yield (
        f"{quoted_token(largest['source_token'])} at {largest['source_site']} has the"
        " largest influence on the last prediction."
    )
    shares = [f"{part['share']:.0%} at {part['source_site']}" for part in stack["own"]]
    if shares:
        yield (
            f"The token that predicts has {' and '.join(shares)} of the influence on"
            " its prediction."
        )
    distance = stack.get("distance_first")
    if distance:
        yield _distance("the first site have on a prediction", distance)


def _distance(source: str, distance: "DistanceFacts") -> str:
    return (
        f"Half of the influence that other tokens of {source} comes from at most"
        f" {counted(distance['half_within'], 'token')} away, and 90% from at most"
        f" {distance['nine_tenths_within']}; the farthest token that is counted is"
        f" {distance['farthest']} away."
    )
