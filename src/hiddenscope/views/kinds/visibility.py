"""Visibility: which states influence which."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import MAP, labels, of_type
from hiddenscope.views.sentences import (
    UNTESTED,
    as_prose,
    in_series,
    model_name,
    quote,
    quoted_token,
)
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

if TYPE_CHECKING:
    from hiddenscope.analyses.visibility.facts import (
        DistanceFacts,
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
            f" {facts['tokens']} tokens."
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
            f" {reach['site']} is {bottom['influence']:.3g}; that of"
            f" {top['source_site']} is {top['influence']:.3g}."
        )


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
        f" {distance['half_within']} tokens away, and 90% from at most"
        f" {distance['nine_tenths_within']}; the farthest token that is counted is"
        f" {distance['farthest']} away."
    )
