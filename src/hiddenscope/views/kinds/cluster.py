"""Clusters of texts, shown and told."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import quoted
from hiddenscope.views.values import Lines, Panels, Section, Series, View

NAMED, SHORT, MOST = 8, 40, 5_000
OTHERS = "other clusters"
NOISE = "no cluster"


def views(result: Result) -> Iterator[View]:
    """Every text at its place along the two widest directions, coloured by its cluster; size against stability."""
    data = result.data
    unit = "token" if "token" in data.sizes else "text"
    step = -(-data.sizes[unit] // MOST)  # a picture of more points is a blot
    some = data.isel({unit: slice(None, None, step)})
    names = _names(result)
    own = some["cluster_of"].to_numpy()
    labels = [NOISE if label < 0 else names[label] if label < NAMED else OTHERS for label in own.tolist()]
    order = np.argsort(np.where(own < 0, len(names), own), kind="stable")
    texts = (
        some["string"].to_numpy().tolist() if "string" in some.coords else some[unit].to_numpy().astype(str).tolist()
    )
    site = str(result.facts.get("site", "the vectors"))
    model = result.source.get("model")
    facts = result.facts
    caption = f"{facts['clusters']} clusters, {facts['noise']} of {facts[f'{unit}s']} in none"
    yield Panels(
        f"Clusters of {unit}s" + (f" in {model}" if model else ""),
        (site,),
        some["place"].to_numpy()[None, order],
        labels=tuple(labels[row] for row in order),
        texts=tuple(texts[row] for row in order),
        captions=(caption,),
        note="Two of the directions in which the clusters were found: what lies together here may be apart in others.",
    )
    if len(names) > 1:
        yield Lines(
            "How firm each cluster is",
            tuple(names[:NAMED]),
            (Series("stability", data["stability"].to_numpy()[:NAMED], style="bar"),),
            "cluster",
            "share that comes back without a fifth of the texts",
        )


def _names(result: Result) -> list[str]:
    """Each cluster by its number and its most typical text."""
    strings = result.data["string"].to_numpy() if "string" in result.data.coords else None
    unit = "token" if "token" in result.data.sizes else "text"
    place = {number: row for row, number in enumerate(result.data[unit].to_numpy().tolist())}
    names = []
    for cluster, typical in enumerate(result.data["typical"].to_numpy().tolist()):
        text = "" if strings is None else str(strings[place[typical[0]]])
        short = text if len(text) <= SHORT else text[: SHORT - 1] + "…"
        names.append(f"{cluster}: {short}" if short else f"cluster {cluster}")
    return names


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    facts = result.facts
    unit = "token" if "token" in result.data.sizes else "text"
    many = f"Of {facts[f'{unit}s']:,} {unit}s, {facts['noise']:,} belong to no cluster; the others make"
    said = [f"{many} {facts['clusters']}."]
    for number in range(min(facts["clusters"], NAMED)):
        own = facts[f"cluster {number}"]
        typical = f", such as {quoted(own['typical'][0])}" if "typical" in own else ""
        said.append(f"Cluster {number} has {own['size']}{typical}; {own['stability']:.0%} of it comes back each time.")
    yield Section("What belongs together", " ".join(said), tuple(views(result)))
