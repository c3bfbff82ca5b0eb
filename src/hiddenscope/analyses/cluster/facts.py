"""The facts of a clustering."""

from typing import NotRequired, TypedDict


class ClusterRecord(TypedDict):
    """One cluster, with its most typical texts."""

    cluster: int
    size: int
    stability: float
    typical: NotRequired[list[str]]


class ClusterFacts(TypedDict):
    """Which clusters there are, and how many rows belong to none."""

    unit: str
    rows: int
    clustered: int
    site: NotRequired[str]
    token: NotRequired[str | int]
    smallest: int
    cluster_count: int
    noise: int
    clusters: list[ClusterRecord]
