"""The facts of a lens."""

from typing import Literal, NotRequired, TypedDict


class LastTokenFacts(TypedDict):
    """What the model predicts after the last token of a single text."""

    token: str
    answer: str
    answer_id: int
    probability: float
    settled_from: str | None


class LensAccuracyFacts(TypedDict):
    """How often the last site predicts the true next token."""

    tokens: int
    site: str
    value: float
    half_from: str | None


class TargetFacts(TypedDict):
    """Where the target comes up.

    After the last token of a single text there are its rank and probability; over
    several texts there is its median rank.
    """

    token: str
    id: int | None
    site: str
    tokens: NotRequired[int]
    median_rank: NotRequired[float]
    rank: NotRequired[int]
    probability: NotRequired[float]
    first_best_at: NotRequired[str | None]
    first_in_top_k_at: NotRequired[str | None]
    k: NotRequired[int]
    most_probable_at: NotRequired[str | None]
    highest_probability: NotRequired[float]


class UnembeddingFacts(TypedDict):
    """How the logits were computed."""

    vocabulary: int
    method: str
    transform: str
    constant: float | None


class LensFacts(TypedDict):
    """What each layer would predict."""

    lens: Literal["logit", "tuned", "jacobian"]
    texts: int
    tokens: int
    causal: NotRequired[bool]
    parts: NotRequired[bool]
    settled_known_from: str | None
    half_settled_from: str | None
    last_token: NotRequired[LastTokenFacts]
    accuracy: NotRequired[LensAccuracyFacts]
    target: NotRequired[TargetFacts]
    unembedding: UnembeddingFacts
    notes: list[str]
