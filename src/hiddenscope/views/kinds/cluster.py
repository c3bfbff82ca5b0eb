"""Clusters of texts: views, findings, sections and tables."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Result, Table
from hiddenscope.views.drawing import as_prose, quoted
from hiddenscope.views.standing import standing
from hiddenscope.views.values import Lines, Listing, Panels, Section, Series, View

# With the other clusters, as many as there are colours.
NAMED, SHORT, MOST = (
    7,
    40,
    5_000,
)
LISTED = 24
OTHERS = "other clusters"
UNTESTED = (
    "HDBSCAN finds clusters in noise too: whether these are more than that was not"
    " tested."
)
NOISE = "no cluster"


def views(result: Result) -> Iterator[View]:
    """Every text along two principal directions, coloured by its cluster; then the
    stability of each cluster.
    """
    data, facts = result.data, result.facts
    unit = facts["unit"]
    step = -(-data.sizes[unit] // MOST)  # more points than that cover one another
    shown = data.isel({unit: slice(None, None, step)})
    names = _names(result)
    cluster_of = shown["cluster_of"].to_numpy()
    labels = [
        NOISE if label < 0 else names[label] if label < NAMED else OTHERS
        for label in cluster_of.tolist()
    ]
    order = np.argsort(np.where(cluster_of < 0, len(names), cluster_of), kind="stable")
    strings = shown["string"] if "string" in shown.coords else shown[unit].astype(str)
    texts = strings.to_numpy().tolist()
    model = result.source.get("model")
    caption = (
        f"{_counted(facts['cluster_count'])}, {facts['noise']:,} of"
        f" {facts['clustered']:,} {unit}s in none"
    )
    thinned = f" One of {step} {unit}s is drawn." if step > 1 else ""
    yield Panels(
        f"Clusters of {unit}s" + (f" in {model}" if model else ""),
        (str(facts.get("site", "the vectors")),),
        shown["place"].to_numpy()[None, order],
        labels=tuple(labels[row] for row in order),
        texts=tuple(texts[row] for row in order),
        captions=(caption,),
        grey=NOISE,
        note=(
            "Two of the principal directions: points that are together here may be"
            f" apart in others.{thinned}"
        ),
    )
    if len(names) > 1:
        first = (
            f"The first {NAMED} of {len(names)} clusters." if len(names) > NAMED else ""
        )
        yield Lines(
            "How stable each cluster is",
            tuple(names[:NAMED]),
            (Series("stability", data["stability"].to_numpy()[:NAMED], style="bar"),),
            "cluster",
            f"share that comes back without a fifth of the {unit}s",
            note=first,
        )


def _counted(count: int) -> str:
    if count == 0:
        return "no cluster"
    return "1 cluster" if count == 1 else f"{count:,} clusters"


def _names(result: Result) -> list[str]:
    """Each cluster by its number and its most typical text."""
    strings = (
        result.data["string"].to_numpy() if "string" in result.data.coords else None
    )
    place = {
        number: row
        for row, number in enumerate(
            result.data[result.facts["unit"]].to_numpy().tolist()
        )
    }
    names = []
    for cluster, typical in enumerate(result.data["typical"].to_numpy().tolist()):
        text = "" if strings is None else str(strings[place[typical[0]]])
        short = text if len(text) <= SHORT else text[: SHORT - 1] + "…"
        names.append(f"{cluster}: {short}" if short else f"cluster {cluster}")
    return names


def findings(result: Result) -> Iterator[str]:
    """How many belong to clusters, and the size, a typical text and the stability of
    each cluster.
    """
    facts = result.facts
    unit, count = facts["unit"], facts["cluster_count"]
    yield (
        f"{facts['clustered']:,} {unit}s make {_counted(count)}; {facts['noise']:,}"
        " belong to none."
    )
    if facts["clustered"] < facts["rows"]:
        yield (
            f"A random sample of {facts['clustered']:,} of {facts['rows']:,} {unit}s"
            " was clustered."
        )
    if facts.get("token") not in (None, "each"):
        yield f"What was clustered is {standing(facts['token'])} at {facts['site']}."
    for cluster in facts["clusters"][:NAMED]:
        typical = (
            f", such as {quoted(cluster['typical'][0])}"
            if cluster.get("typical")
            else ""
        )
        yield (
            f"Cluster {cluster['cluster']} has {cluster['size']:,} {unit}s{typical};"
            f" {cluster['stability']:.0%} of it comes back when a fifth is left out."
        )
    if count:
        yield UNTESTED


def sections(result: Result) -> Iterator[Section]:
    """The texts that are most typical of each cluster, and the views."""
    unit = result.facts["unit"]
    shown, lists = tuple(views(result)), tuple(_lists(result))
    stable = (
        "The bars are the share of each cluster that comes back when a fifth of all is"
        " left out. "
    )
    typical = (
        f"Each list has the {unit}s most typical of a cluster, the most typical first."
    )
    parts = [
        (
            f"Every point is a {unit}, coloured by its cluster, and grey if it is in"
            " none. "
        ),
        stable if shown[1:] else "",
        typical if lists else "",
    ]
    yield Section(
        "What belongs together",
        as_prose(findings(result)),
        shown,
        "".join(parts).strip(),
        tables=lists,
    )


def _lists(result: Result) -> Iterator[Listing]:
    """The most typical texts of each cluster."""
    unit = result.facts["unit"]
    for cluster in result.facts["clusters"][:LISTED]:
        if texts := cluster.get("typical"):
            share = f"{cluster['stability']:.0%} stable"
            title = (
                f"Cluster {cluster['cluster']}: {cluster['size']:,} {unit}s, {share}"
            )
            yield Listing(
                title,
                (unit,),
                tuple((str(text).strip() or repr(text),) for text in texts),
            )


def tables(result: Result) -> Iterator[Table]:
    """Every cluster with its size and stability, and beneath one another its most
    typical texts.
    """
    rows = []
    for cluster in result.facts["clusters"]:
        numbers = [
            str(cluster["cluster"]),
            f"{cluster['size']:,}",
            f"{cluster['stability']:.2f}",
        ]
        first, *others = cluster.get("typical") or [""]
        rows.append([*numbers, str(first)])
        rows += [["", "", "", str(text)] for text in others]
    if rows:
        yield Table(["cluster", "size", "stability", "typical"], rows, (3,))
