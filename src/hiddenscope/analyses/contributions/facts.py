"""The facts of contributions."""

from typing import NotRequired, TypedDict


class StrongPartFacts(TypedDict):
    """One of the parts that add or take most, and its share of the logit."""

    site: str
    contribution: float
    share: float
    step: int


class ContributionsFacts(TypedDict):
    """What writes an answer.

    `logit`, `total`, `error` and `probability` have one number for each token of the
    answer.
    """

    answer: str
    other: NotRequired[str]
    tokens: int
    steps: list[str]
    logit: list[float]
    total: list[float]
    error: list[float]
    allowed_error: list[float]
    probability: list[float]
    strongest: list[StrongPartFacts]
    norm_subtracts_mean: bool
    softcap: float | None
    scale: float | None
    dtype: str
    notes: list[str]
