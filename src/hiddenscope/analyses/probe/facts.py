"""The facts of a probe."""

from typing import Literal, NotRequired, TypedDict

from hiddenscope.results import GroupFacts


class ClassFacts(TypedDict):
    """How many rows have a label."""

    label: str
    rows: int


class ScoreFacts(TypedDict, total=False):
    """A score under its name, with its interval where it is known."""

    accuracy: float
    r2: float
    interval: list[float]


class BestSiteFacts(ScoreFacts):
    """The best site; None where a number is not defined."""

    site: str
    p: float | None
    control: float | None
    selectivity: float | None


class WeightFacts(TypedDict):
    """The largest weight in the mix, and in how many folds that site has it too."""

    site: str
    weight: float
    folds: int


class MixFacts(ScoreFacts):
    """The probe of a mix of all sites."""

    largest_weight: WeightFacts


class ControlFacts(TypedDict):
    """The labels that a probe can only memorise."""

    kind: Literal["shuffled", "by_token_id"]
    draws: int


class ProbeFacts(GroupFacts):
    """What a linear probe reads from every site."""

    data: str
    token: str | int
    rows: int
    folds: int
    score: Literal["accuracy", "r2"]
    left_out: NotRequired[int]
    classes: NotRequired[list[ClassFacts]]
    class_count: NotRequired[int]
    best: BestSiteFacts
    chance: float
    above_chance_at: list[str]
    permutations: int
    smallest_p: float | None
    mix: NotRequired[MixFacts]
    control: ControlFacts
    calibrated: NotRequired[bool]
    interval_holds: NotRequired[float]
    all_equal_at: NotRequired[list[str]]
    fixed_penalty: NotRequired[float]
    not_converged_at: NotRequired[list[str]]
