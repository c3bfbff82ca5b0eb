"""The facts of activation patching."""

from typing import Literal, NotRequired, TypedDict


class AnswerFacts(TypedDict):
    """The two answers of a contrast."""

    answer: str
    other: str


class RunsFacts(TypedDict):
    """A number of the clean and of the corrupted run."""

    clean: float
    corrupt: float


class CellFacts(TypedDict):
    """How many cells there are, and in how many both runs have the same state."""

    total: int
    equal: int


class LargestEffectFacts(TypedDict):
    """The cell with the largest effect; without a token, of all tokens at once."""

    value: float
    site: str
    token: NotRequired[str]
    other_token: NotRequired[str]


class ClearFacts(TypedDict):
    """A site whose effect is not 0, with an interval corrected for all sites."""

    site: str
    effect: float
    low: float
    high: float


# `from` is a keyword, so a class could not have it as a field.
CarrierFacts = TypedDict(
    "CarrierFacts",
    {
        "token": str,
        "other_token": str,
        "largest": float,
        "half_at": list[str],
        "from": str | None,
        "to": str | None,
    },
)
"""A token, and the sites at which it carries at least half of the answer."""


class LargestWindowFacts(TypedDict):
    """The window of layers with the largest effect, named by its lowest."""

    value: float
    site: str


class LayerWindowsFacts(TypedDict):
    """The effect of patching several layers in a row."""

    layers: int
    largest: LargestWindowFacts


class AgreementFacts(TypedDict):
    """How attribution agrees with the exact effect; None over too few cells."""

    cells: int
    correlation: float | None
    mean_absolute_error: float | None


class CostFacts(TypedDict):
    """What the sweep computed."""

    cells: int
    passes: int
    tokens: int


class CheckFacts(TypedDict):
    """One effect in the sweep and by a pass of its own."""

    sweep: float
    alone: float


class PatchFacts(TypedDict):
    """Which states carry the answer from one run to another."""

    contrasts: int
    into: Literal["corrupt", "clean"]
    answers: list[AnswerFacts]
    logit_difference: RunsFacts
    probability: RunsFacts
    window: int
    measure: Literal["effect", "attribution"]
    cells: CellFacts
    largest: LargestEffectFacts | None
    differing_token: CarrierFacts | None
    answer_token: CarrierFacts | None
    positions: NotRequired[list[int] | None]
    clear: NotRequired[list[ClearFacts] | None]
    agreement: NotRequired[AgreementFacts]
    layer_windows: NotRequired[LayerWindowsFacts | None]
    cost: NotRequired[CostFacts]
    check: NotRequired[CheckFacts | None]
    method: str
    copies: int
    groups: int
    notes: list[str]
