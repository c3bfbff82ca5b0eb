"""The facts of steering."""

from typing import Literal, NotRequired, TypedDict


class DirectionFacts(TypedDict):
    """Where a direction comes from."""

    origin: Literal["texts", "probe", "vector"]
    toward: NotRequired[int]
    away: NotRequired[int]
    pool: NotRequired[str]
    fitted_at: NotRequired[list[str]]
    used_elsewhere: NotRequired[list[str]]
    spare_first: bool


class SizeFacts(TypedDict):
    """How long the vectors are that are added."""

    smallest: float
    largest: float


class QualityFacts(TypedDict):
    """The texts whose perplexity shows what steering costs."""

    texts: int
    tokens: int
    masked_every: int | None
    perplexity: float
    within: float


class SettingFacts(TypedDict):
    """What one site and strength do to an answer and to the perplexity.

    `interval` is the 95% interval of the median change of the log-odds over prompts.
    """

    answer: str
    site: str
    strength: float
    probability_before: float
    probability: float
    ratio: float
    log_odds_change: float
    interval: list[float] | None
    perplexity: float
    perplexity_change: float


class SteeredAnswerFacts(TypedDict):
    """How low and how high an answer can be brought without much harm."""

    answer: str
    probability: float
    lowest: SettingFacts | None
    highest: SettingFacts | None


class WrittenTextFacts(TypedDict):
    """What is written after a prompt."""

    prompt: str
    before: str
    after: str


class WrittenFacts(TypedDict):
    """What is written at one setting."""

    site: str
    strength: float
    texts: list[WrittenTextFacts]


class SteerFacts(TypedDict):
    """What a model answers and writes while it is steered."""

    direction: DirectionFacts
    how: Literal["add", "ablate"]
    upwards: bool
    sites: list[str]
    size: SizeFacts
    settings: int
    prompts: int
    quality: QualityFacts
    best: SettingFacts | None
    strongest: NotRequired[SettingFacts | None]
    answers: list[SteeredAnswerFacts]
    written: WrittenFacts | None
    not_written: NotRequired[str | None]
    notes: list[str]
