"""The facts of attention."""

from typing import Literal, NotRequired, TypedDict


class FoundHeadFacts(TypedDict):
    """A head that gives a related token more weight than chance does.

    `p_half` is the p-value of its giving that token more than half of its weight.
    """

    site: str
    score: float
    null: float
    p: float
    p_half: float


class AttentionFacts(TypedDict):
    """What the heads read."""

    layers: int
    heads: int
    tokens: int
    causal: bool
    kernel: Literal["sdpa", "eager", "sdpa and eager"]
    rows_sum_to: float
    error: float
    draws: int
    previous_heads: NotRequired[list[FoundHeadFacts]]
    first_heads: NotRequired[list[FoundHeadFacts]]
    same_heads: NotRequired[list[FoundHeadFacts]]
    induction_heads: NotRequired[list[FoundHeadFacts]]
    notes: list[str]
