"""The story of clusters, with the texts most typical of each."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Listing, Report, Result, Section, Table, frozen
from hiddenscope.results.pictures import Lines, Panels, Series
from hiddenscope.results.report import Pooled
from hiddenscope.results.sentences import (
    counted,
    neighbours,
    quote,
    ruled,
    shortened,
    standing,
)

# With all other clusters as one, there are as many as colours.
NAMED = 7
# More points than that cover one another.
MOST_POINTS = 5_000
LONGEST_NAME = 40
MOST_LISTINGS = 24
OTHERS = "other clusters"
NOISE = "no cluster"
UNTESTED = (
    "HDBSCAN finds clusters in noise too: whether these are more than that was not"
    " tested."
)


@frozen
class ClusterRecord:
    """One cluster, with its most typical texts."""

    cluster: int
    size: int
    stability: float
    typical: list[str] | None = None


@frozen
class ClusterReport(Report):
    """Which clusters there are, and how many rows belong to none.

    `told_apart` is the share of rows whose nearest is nearer than chance explains.
    """

    unit: str
    rows: int
    clustered: int
    site: str | None = None
    token: str | int | None = None
    smallest: int
    cluster_count: int
    noise: int
    clusters: list[ClusterRecord]
    told_apart: float | None = None
    pooled: Pooled | None = None


def story(report: ClusterReport, result: Result) -> Iterator[Section]:
    """Yield the clusters, and the texts that are most typical of each."""
    unit, names = report.unit, _names(report, result)
    step = -(-result.data.sizes[unit] // MOST_POINTS)
    data = result.data.isel({unit: slice(None, None, step)})
    clusters = data["cluster_of"].to_numpy()
    # Points of one cluster stand together, in the order of the clusters, and those of
    # none at the end: the legend has the classes in the order of the points.
    order = np.argsort(np.where(clusters < 0, len(names), clusters), kind="stable")
    class_names = [*names[:NAMED], *[OTHERS] * len(names[NAMED:]), NOISE]
    strings = data["string"] if "string" in data.coords else data[unit].astype(str)
    texts = strings.to_numpy().tolist()
    model = result.source.get("model")
    apart = (
        "Two of the principal directions: points that are together here may be apart in"
        " others."
    )
    if step > 1:
        apart += f" One of {step} {unit}s is drawn."
    panels = Panels(
        f"Clusters of {unit}s in {model}" if model else f"Clusters of {unit}s",
        (str(report.site or "the vectors"),),
        data["place"].to_numpy()[None, order],
        # The last name is that of the noise, whose cluster is -1.
        labels=tuple(class_names[cluster] for cluster in clusters[order].tolist()),
        texts=tuple(texts[row] for row in order),
        captions=(
            f"{_counted(report.cluster_count)}, {report.noise:,} of"
            f" {report.clustered:,} {unit}s in none",
        ),
        grey=NOISE,
        note=apart,
    )
    views: list[Panels | Lines] = [panels]
    reading = [
        f"Every point is a {unit}, coloured by its cluster, and grey if it is in none."
    ]
    if len(names) > 1:
        note = ""
        if len(names) > NAMED:
            note = f"The first {NAMED} of {len(names)} clusters."
        stability = result.data["stability"].to_numpy()[:NAMED]
        lines = Lines(
            "How stable each cluster is",
            tuple(names[:NAMED]),
            (Series("stability", stability, style="bar"),),
            "cluster",
            f"share that comes back without a fifth of the {report.unit}s",
            note=note,
        )
        views.append(lines)
        reading.append(
            "The bars are the share of each cluster that comes back when a fifth of all"
            " is left out."
        )
    listings = tuple(_listings(report))
    if listings:
        reading.append(
            f"Each list has the {unit}s most typical of a cluster, the most typical"
            " first."
        )
    yield Section(
        "What belongs together",
        tuple(_findings(report)),
        tuple(views),
        " ".join(reading),
        tables=(*listings, *_tables(report)),
    )


def _counted(count: int) -> str:
    return counted(count, "cluster") if count else "no cluster"


def _names(report: ClusterReport, result: Result) -> list[str]:
    """Name each cluster by its number and its most typical text."""
    data = result.data
    typical = data["typical"].to_numpy()
    if "string" not in data.coords:
        return [f"cluster {cluster}" for cluster in range(len(typical))]
    numbers = data[report.unit].to_numpy().tolist()
    strings = dict(zip(numbers, data["string"].to_numpy(), strict=True))
    names = []
    for cluster, rows in enumerate(typical.tolist()):
        text = shortened(str(strings[rows[0]]), LONGEST_NAME)
        names.append(f"{cluster}: {text}" if text else f"cluster {cluster}")
    return names


def _findings(report: ClusterReport) -> Iterator[str]:
    """Yield how many belong to clusters, and the size, a typical text and the stability
    of each cluster.
    """
    unit = report.unit
    outside = ""
    if 0 < report.noise < report.clustered:
        belong = "belongs" if report.noise == 1 else "belong"
        outside = f"; {report.noise:,} {belong} to none"
    yield (
        f"{counted(report.clustered, unit)} make"
        f" {_counted(report.cluster_count)}{outside}."
    )
    if report.clustered < report.rows:
        yield (
            f"A random sample of {report.clustered:,} of {report.rows:,} {unit}s"
            " was clustered."
        )
    token = report.token
    if token is not None and token != "each":
        yield f"What was clustered is {standing(token)} at {report.site}."
    yield from ruled(report.pooled)
    yield from neighbours(report.told_apart, unit)
    for cluster in report.clusters[:NAMED]:
        typical = ""
        if cluster.typical:
            typical = f", such as {quote(cluster.typical[0])}"
        yield (
            f"Cluster {cluster.cluster} has {cluster.size:,} {unit}s{typical};"
            f" {cluster.stability:.0%} of it comes back when a fifth is left out."
        )
    if report.cluster_count:
        yield UNTESTED


def _listings(report: ClusterReport) -> Iterator[Listing]:
    """Yield the most typical texts of each cluster."""
    unit = report.unit
    for cluster in report.clusters[:MOST_LISTINGS]:
        texts = cluster.typical
        if texts:
            yield Listing(
                f"Cluster {cluster.cluster}: {cluster.size:,} {unit}s,"
                f" {cluster.stability:.0%} stable",
                (unit,),
                tuple((str(text).strip() or repr(text),) for text in texts),
            )


def _tables(report: ClusterReport) -> Iterator[Table]:
    """Yield every cluster with its size and stability, and beneath one another its most
    typical texts.
    """
    rows = []
    for cluster in report.clusters:
        size, stability = f"{cluster.size:,}", f"{cluster.stability:.2f}"
        first, *others = cluster.typical or [""]
        rows.append([str(cluster.cluster), size, stability, str(first)])
        rows += [["", "", "", str(text)] for text in others]
    if rows:
        yield Table(["cluster", "size", "stability", "typical"], rows, (3,))
