"""The facts of a search."""

from typing import Literal, NotRequired, TypedDict


class NearestFacts(TypedDict):
    """The nearest to one query."""

    query: str
    number: int
    score: float
    string: NotRequired[str]


class SearchFacts(TypedDict):
    """What was searched, and the nearest to the first queries."""

    searched: int
    unit: str
    nearness: Literal["cosine", "dot", "l2"]
    site: NotRequired[str]
    token: NotRequired[str | int]
    nearest: list[NearestFacts]
