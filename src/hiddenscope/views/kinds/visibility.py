"""Which states influence which, as views and sentences."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import MAP, UNTESTED, as_prose, in_series, labels, quoted
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

SHARES = {
    "own_below": "of the influence of the site below",
    "own_first": "of the influence of the first site",
}
DECAYS = {
    "decay_below": "of the site below on a state",
    "decay_first": "of the first site on the last",
}
PREDICTED = "of the first site on a prediction"
SIDES = (
    "Point at a cell: states that influence it turn blue, and states that it influences"
    " turn orange."
)
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
ITSELF = "What a state does to itself is left out."
FIRST_LEFT_OUT = "The influence of the first token is left out."


def views(result: Result) -> Iterator[View]:
    """The map of what influences a cell and what it influences; then shares along the
    layers, and distances.
    """
    measure = result.facts["measure"]
    yield _prediction_map(result) if measure == "logit" else _state_map(result, measure)
    model = result.source.get("model", "the model")
    own = {
        words: result.data[share].to_numpy()
        for share, words in SHARES.items()
        if share in result.data
    }
    if "own" in result.data:
        own = {"of the influence on a prediction": result.data["own"].to_numpy()}
    sites = labels(result.data, "source_site")
    shares = tuple(Series(words, y) for words, y in own.items() if np.isfinite(y).any())
    influenced = "prediction" if measure == "logit" else "state"
    if shares:
        title = (
            f"How much of the influence on a {influenced} comes from its own token, in"
            f" {model}"
        )
        yield Lines(title, sites, shares, y_name="share of the same token")
    distances = tuple(_distance_series(result))
    if distances:
        title = f"How influence decays with the distance in tokens, in {model}"
        left_out = any("first_token_share" in facts for facts in result.facts["stacks"])
        note = (
            "Relative to the influence of the same token, which is 1."
            f" {FIRST_LEFT_OUT if left_out else ''}".strip()
        )
        places = labels(result.data, "distance")
        yield Lines(
            title, places, distances, "tokens back", "influence", scale="log", note=note
        )
    if "reach" in result.data:
        title = f"The influence of every layer on the last, in {model}"
        unit = str(result.data[measure].attrs["units"])
        reach = Series(
            "summed over source tokens, averaged over target tokens",
            result.data["reach"].to_numpy(),
        )
        yield Lines(title, sites, (reach,), y_name="influence", unit=unit, scale="log")


def _distance_series(result: Result) -> Iterator[Series]:
    for decay, words in DECAYS.items():
        for stack in ("", "encoder", "decoder"):
            name = f"{decay}_{stack}" if stack else decay
            if name in result.data:
                shown = (
                    PREDICTED
                    if result.facts["measure"] == "logit"
                    else f"{stack} {words}".strip()
                )
                yield Series(shown, result.data[name].to_numpy())


def _state_map(result: Result, name: str) -> Grid:
    """The map of states; at rest the grid shows the influence on the last of them.

    What a state does to itself is left out: it is larger than all else, and says
    nothing about the model.
    """
    data = result.data
    influence = data[name].transpose(*MAP).to_numpy().copy()
    sites, tokens = influence.shape[:2]
    flat = influence.reshape(sites * tokens, sites * tokens)
    flat[np.arange(len(flat)), np.arange(len(flat))] = np.nan
    last = influence[-1, -1].copy()
    where = f"{labels(data, 'site')[-1]} at {quoted(str(data['string'].values[-1]))}"
    units = str(data[name].attrs["units"])
    measure = Measure(
        f"influence on {where}", last, units, scale="log", influence=influence
    )
    return _grid(result, "string", labels(data, "site"), measure, ITSELF)


def _prediction_map(result: Result) -> Grid:
    """The map of predictions, which stand in the top row."""
    data = result.data
    seen = data["logit"].transpose("token", "source_site", "source_token").to_numpy()
    predicted, sites, tokens = seen.shape
    influence = np.full((sites, tokens, sites, tokens), np.nan, dtype=np.float32)
    influence[-1, tokens - predicted :] = seen
    target = str(data["target"].values[-1])
    words = f"log p of {target!r}" if target else "log p of the next token"
    measure = Measure(
        f"influence on the last {words}",
        seen[-1],
        "nats per L2",
        scale="log",
        influence=influence,
    )
    note = "The top row stands for the predictions."
    return _grid(result, "source_string", labels(data, "source_site"), measure, note)


def _grid(
    result: Result, strings: str, sites: tuple[str, ...], measure: Measure, note: str
) -> Grid:
    texts, count = result.data.attrs.get("texts", []), result.facts["texts"]
    if len(texts) == 1:
        of_text = f"“{texts[0]}”" if len(texts[0]) <= 66 else "one text"
    else:
        of_text = f"{count} texts on average" if count > 1 else "one text"
    title = (
        f"Which states of {result.source.get('model', 'the model')} influence which:"
        f" {of_text}"
    )
    return Grid(
        title,
        sites,
        tuple(map(str, result.data[strings].values)),
        (measure,),
        note=note,
    )


def findings(result: Result) -> Iterator[str]:
    """How much influence comes from a token's own states, and from how far back it
    comes.
    """
    for facts in result.facts["stacks"]:
        yield from _predictions(facts) if "most_seen" in facts else _of_stack(facts)
    if cross := result.facts.get("cross"):
        yield (
            f"Of the influence of {cross['source_site']} and {cross['beside']} on"
            f" {cross['site']}, {cross['share']:.0%} comes from {cross['source_site']}."
        )
    if result.facts["cut"]:
        yield (
            "All texts were cut to the length of the shortest,"
            f" {result.facts['tokens']} tokens."
        )
    if result.facts["probes"]:
        probes = result.facts["probes"]
        yield (
            f"The map is estimated with {probes} random vectors for each target; its"
            " error is half of a 95% interval."
        )
    if result.facts["stacks"]:
        yield UNTESTED


def _of_stack(facts: Mapping[str, Any]) -> Iterator[str]:
    in_stack = f" in the {facts['stack']}" if facts["stack"] else ""
    if own := facts.get("own_below"):
        least, most = own["least"], own["most"]
        yield (
            f"On average {own['mean']:.0%} of the influence of the site below on a"
            f" state{in_stack} comes from the same token (from {least['share']:.0%} at"
            f" {least['site']} to {most['share']:.0%} at {most['site']})."
        )
    if first := facts.get("own_first"):
        yield (
            f"Of the influence of {first['source_site']} on {first['site']},"
            f" {first['share']:.0%} comes from the same token; the rest comes from"
            " other tokens."
        )
    if (share := facts.get("first_token_share")) is not None:
        yield (
            f"Of the influence of other tokens of the site below{in_stack}, the first"
            f" token has {share:.0%}."
        )
    ends = facts.get("own_first", {})
    across = (
        f"{ends.get('source_site', 'the first site')} have on"
        f" {ends.get('site', 'the last')}"
    )
    for key, source in (
        ("distance_below", "the site below have on a state"),
        ("distance_first", across),
    ):
        if distances := facts.get(key):
            yield _distance(source, distances)
    if reach := facts.get("reach"):
        first, below = reach["first"], reach["below"]
        yield (
            f"Summed over all tokens, the influence of {first['source_site']} on"
            f" {reach['site']} is {first['influence']:.3g}; that of"
            f" {below['source_site']} is {below['influence']:.3g}."
        )


def _distance(source: str, distances: Mapping[str, Any]) -> str:
    return (
        f"Half of the influence that other tokens of {source} comes from at most"
        f" {distances['half_within']} tokens away, and 90% from at most"
        f" {distances['nine_tenths_within']}; the farthest token that is counted is"
        f" {distances['farthest']} away."
    )


def _predictions(facts: Mapping[str, Any]) -> Iterator[str]:
    seen = facts["most_seen"]
    token = quoted(seen["source_token"].strip() or seen["source_token"])
    yield (
        f"{token} at {seen['source_site']} has the largest influence on the last"
        " prediction."
    )
    shares = [f"{one['share']:.0%} at {one['source_site']}" for one in facts["own"]]
    if shares:
        yield (
            f"The token that predicts has {' and '.join(shares)} of the influence on"
            " its prediction."
        )
    if distances := facts.get("distance_first"):
        yield _distance("the first site have on a prediction", distances)


def sections(result: Result) -> Iterator[Section]:
    """The map as parts of a page."""
    shown = tuple(views(result))
    told = list(findings(result))
    reading = (
        f"{SIDES} A state is computed from states of lower layers, at its own token and"
        f" at the tokens that it attends to. {MEASURES[result.facts['measure']]}"
    )
    maps = tuple(view for view in shown if isinstance(view, Grid))
    yield Section(
        "Which states influence which?",
        as_prose([*told[:2], *told[2:][-1:]]),
        maps,
        reading,
    )
    lines = tuple(view for view in shown if isinstance(view, Lines))
    if lines:
        reading = (
            "The lines sum up the map:"
            f" {in_series([_summed_up(view) for view in lines])}."
        )
        yield Section(
            "How influence falls with distance",
            " ".join(told[2:]),
            lines,
            reading,
            folded=True,
        )


def _summed_up(lines: Lines) -> str:
    """Say what one picture of lines sums up."""
    if lines.x_name == "tokens back":
        return "how it falls with the distance between tokens"
    if lines.y_name == "influence":
        return "how large it is from each layer to the last"
    return "how much of the influence comes from the same token"
