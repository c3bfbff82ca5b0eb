"""The facts of a series."""

from typing import Literal, NotRequired, TypedDict


class MemberFacts(TypedDict):
    """One member: which model it is, and what was seen of it."""

    name: str
    model: str
    revision: str | None
    at: float | None
    weights: str
    dtype: str
    layers: int
    width: int
    tokens: int
    compared_with: str | None
    same_result_as: str | None


class SameWeightsFacts(TypedDict):
    """Members that have the same weights."""

    members: list[str]
    weights: str
    computed_once: bool


class MemberValueFacts(TypedDict):
    """A number of one member, with its interval where the analysis has one.

    The number is None where the member has none.
    """

    member: str
    site: str
    value: float | None
    interval: NotRequired[list[float]]


class HeadlineFacts(TypedDict):
    """One measure at one place of every member."""

    measure: str
    name: str
    place: Literal["middle", "last", "best", "largest"]
    values: list[MemberValueFacts]


class OptionFacts(TypedDict):
    """An option of the analysis that was given."""

    option: str
    value: str | int | float | bool | list[str] | None


class SeriesFacts(TypedDict):
    """How an analysis comes out for every member of a series."""

    analysis: str
    against: str | None
    options: list[OptionFacts]
    members: list[MemberFacts]
    same_weights: list[SameWeightsFacts]
    same_depth: bool
    same_tokens: bool
    measures: list[str]
    headlines: list[HeadlineFacts]
    notes: list[str]
