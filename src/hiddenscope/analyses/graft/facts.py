"""The facts of a graft."""

from typing import Literal, NotRequired, TypedDict


class AccuracyFacts(TypedDict):
    """A share of right answers, with its 95% interval."""

    accuracy: float
    low: float
    high: float


# `from` is a keyword, so a class could not have it as a field.
WindowFacts = TypedDict("WindowFacts", {"from": str, "to": str})


class LowestWindowFacts(AccuracyFacts, WindowFacts):
    """The window with the fewest right answers."""


class ThirdFacts(WindowFacts):
    """The windows in one third of the depth."""

    accuracy: float


class ThirdsDifferenceFacts(TypedDict):
    """The difference of two thirds, and its p-value by a sign-flip test."""

    value: float
    p: float


class GraftFacts(TypedDict):
    """How many answers stay right with layers of a donor."""

    donor: str
    prompts: int
    copies: int
    groups: int
    grafted: Literal["blocks", "states"]
    layers: int
    model_alone: AccuracyFacts
    donor_alone: AccuracyFacts
    lowest: LowestWindowFacts
    middle: NotRequired[ThirdFacts]
    late: NotRequired[ThirdFacts]
    middle_less_late: NotRequired[ThirdsDifferenceFacts]
    notes: list[str]
