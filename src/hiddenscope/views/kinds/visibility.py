"""What every state can see, shown and told."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import MAP, labels
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

MEASURES = ("l1", "frobenius", "relative", "logit")
SHARES = {"own_below": "of the site below", "own_first": "of the first site"}
DECAYS = {"decay_below": "one site below", "decay_first": "from the first site to the last"}


def views(result: Result) -> Iterator[View]:
    """The map, which shows both what a cell sees and what sees it; then shares along the layers, and distances."""
    name = next(name for name in MEASURES if name in result.data)
    yield _predictions(result) if name == "logit" else _states(result, name)
    model = result.source.get("model", "the model")
    own = {said: result.data[share].to_numpy() for share, said in SHARES.items() if share in result.data}
    if "own" in result.data:
        own = {"of what a prediction sees": result.data["own"].to_numpy()}
    sites = labels(result.data, "source_site")
    shares = tuple(Series(said, y) for said, y in own.items() if np.isfinite(y).any())
    if shares:
        title = f"How much of what is seen lies on the token itself, in {model}"
        yield Lines(title, sites, shares, y_name="share on the token itself")
    distances = tuple(_distances(result))
    if distances:
        title = f"How influence decays with the distance in tokens, in {model}"
        places = labels(result.data, "distance")
        note = "For 1 on the token itself. " + _without_first(result)
        yield Lines(title, places, distances, "tokens back", "influence", scale="log", note=note.strip())
    if "reach" in result.data:
        title = f"What the last site sees of each, in {model}"
        unit = str(result.data[name].attrs["units"])
        reach = Series("over all tokens, on average", result.data["reach"].to_numpy())
        yield Lines(title, sites, (reach,), y_name="influence", unit=unit, scale="log")


def _distances(result: Result) -> Iterator[Series]:
    for decay, said in DECAYS.items():
        for stack in ("", "encoder", "decoder"):
            name = f"{decay}_{stack}" if stack else decay
            if name in result.data:
                yield Series(f"{stack} {said}".strip(), result.data[name].to_numpy())


def _without_first(result: Result) -> str:
    told = any("of other tokens, the first" in facts for facts in _stacks(result).values())
    return "The first token is left out: it is seen wherever it stands." if told else ""


def _states(result: Result, name: str) -> Grid:
    """The map of states; at rest the grid shows what the last of them sees, and no cell is shown to see itself."""
    data = result.data
    influence = data[name].transpose(*MAP).to_numpy().copy()
    sites, tokens = influence.shape[:2]
    flat = influence.reshape(sites * tokens, sites * tokens)
    flat[np.arange(len(flat)), np.arange(len(flat))] = np.nan
    last = influence[-1, -1].copy()
    where = f"{labels(data, 'site')[-1]} at {data['string'].values[-1]!r}"
    measure = Measure(
        f"what {where} sees of it", last, str(data[name].attrs["units"]), scale="log", influence=influence
    )
    note = f"At rest: what {where} sees. {_said(result, name)}"
    return _grid(result, "string", labels(data, "site"), measure, note)


def _predictions(result: Result) -> Grid:
    """The map of predictions, which stand in the top row."""
    data = result.data
    seen = data["logit"].transpose("token", "source_site", "source_token").to_numpy()
    predicted, sites, tokens = seen.shape
    influence = np.full((sites, tokens, sites, tokens), np.nan, dtype=np.float32)
    influence[-1, tokens - predicted :] = seen
    asked = str(data["asked"].values[-1])
    what = f"log p of {asked!r}" if asked else "log p of the next token"
    measure = Measure(f"influence on the last {what}", seen[-1], "nats per L2", scale="log", influence=influence)
    note = "The top row stands for the predictions: point there to see what each of them sees."
    return _grid(result, "source_string", labels(data, "source_site"), measure, note)


def _grid(result: Result, strings: str, sites: tuple[str, ...], measure: Measure, note: str) -> Grid:
    texts = result.data.attrs.get("texts", [])
    model = result.source.get("model", "the model")
    what = f"“{texts[0]}”" if len(texts) == 1 and len(texts[0]) <= 66 else f"{result.facts['texts']} texts on average"
    what = what if len(texts) == 1 or result.facts["texts"] > 1 else "one text"
    tokens = tuple(map(str, result.data[strings].values))
    return Grid(f"What the states of {model} see: {what}", sites, tokens, (measure,), note=note)


def _said(result: Result, name: str) -> str:
    return f"The {result.data[name].attrs['long_name']}."


def _stacks(result: Result) -> dict[str, Mapping[str, Any]]:
    """The findings by stack; one stack has no name."""
    named = {stack: result.facts[stack] for stack in ("encoder", "decoder") if stack in result.facts}
    return named or {"": result.facts}


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown = tuple(views(result))
    yield Section(
        "What a state can see",
        "Every state is made from those below it, at its own token and at those it can attend to. Point at a cell: "
        "what it sees is painted in one colour, what sees it in the other.",
        tuple(view for view in shown if isinstance(view, Grid)),
    )
    sentences = [sentence for stack, facts in _stacks(result).items() for sentence in _sentences(stack, facts)]
    lines = tuple(view for view in shown if isinstance(view, Lines))
    if lines:
        yield Section("How far back it reaches", " ".join(sentences), lines)


def _sentences(stack: str, facts: Mapping[str, Any]) -> Iterator[str]:
    whose = f" in the {stack}" if stack else ""
    if own := facts.get("on the token itself, of the site below"):
        least, most = own["least"], own["most"]
        yield (
            f"Of what a state{whose} sees one site below, {own['mean']:.0%} lies on its own token on average: from "
            f"{least['share']:.0%} at {least['site']} to {most['share']:.0%} at {most['site']}."
        )
    for name, share in facts.items():
        if name.startswith("on the token itself") and " seen from " in name:
            source, _, target = name.removeprefix("on the token itself, of ").partition(" seen from ")
            yield f"Of what {target} sees of {source} it is {share:.0%}."
    if (first := facts.get("of other tokens, the first")) is not None:
        yield f"Of what is seen of other tokens one site below, {first:.0%} is the first token{whose}."
    for name, far in facts.items():
        if name.startswith("tokens back") and isinstance(far, Mapping):
            what = name.removeprefix("tokens back, of ")
            yield (
                f"Of {what}, half of what is seen of other tokens is within {far['half of the others within']} "
                f"and nine tenths within {far['nine tenths within']} of {far['farthest']}."
            )
