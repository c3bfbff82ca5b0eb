"""The facts of a comparison."""

from typing import Literal, NotRequired, TypedDict


class FirstDifferenceFacts(TypedDict):
    """The first token that differs, as each side has it; None is a gap."""

    token: list[str | None]
    text: int
    position: list[int]
    site: str | None


class LargestDifferenceFacts(TypedDict):
    """The largest relative difference, and the token of both sides that has it."""

    relative: float
    site: str
    token: list[str | None]


class MedianFacts(TypedDict):
    """The median difference at a site."""

    site: str
    median: float


# `from` is a keyword, so a class could not have it as a field.
JumpFacts = TypedDict("JumpFacts", {"from": MedianFacts, "to": MedianFacts})


class EndFacts(TypedDict):
    """The median difference around the final norm."""

    before_last: MedianFacts
    last: MedianFacts
    final: MedianFacts
    share_of_drop_by_final_norm: NotRequired[float]


class CompareStackFacts(TypedDict):
    """Where the two sides of one stack differ."""

    stack: str | None
    first_difference: FirstDifferenceFacts | None
    tokens_compared: int
    tokens_equal: int
    sites_of_one_side: NotRequired[str]
    largest_relative: NotRequired[LargestDifferenceFacts]
    largest_jump: NotRequired[JumpFacts]
    end: NotRequired[EndFacts]


class AlikeFacts(TypedDict):
    """The CKA of two sites."""

    site: str
    source_site: str
    cka: float


class CkaFacts(TypedDict):
    """The CKA of every pair of sites; only counts where it is not defined."""

    tokens: int
    sampled_tokens: int
    median: NotRequired[float]
    median_by_chance: NotRequired[float]
    most_alike: NotRequired[AlikeFacts]
    few_tokens: NotRequired[bool]


class RoundingFacts(TypedDict):
    """How far rounding alone moves the first text."""

    relative: float
    between: Literal["two_copies", "two_runs"]


class CompareFacts(TypedDict):
    """Where two texts or two models differ."""

    texts: int
    tokens_compared: int
    gaps: int
    run: str
    computed_in: str
    rounding_floor: NotRequired[RoundingFacts]
    stacks: list[CompareStackFacts]
    cka: NotRequired[CkaFacts]
    notes: list[str]
