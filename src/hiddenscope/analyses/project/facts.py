"""The facts of a projection."""

from typing import NotRequired, TypedDict

from hiddenscope.results.facts import ExtremesFacts, GroupFacts


class PointClassFacts(TypedDict):
    """How many points have a label."""

    label: str
    points: int


class SeparationPFacts(TypedDict):
    """The p-value of each score; None where labels cannot be permuted."""

    silhouette: float | None
    neighbour: float | None
    fisher: float | None
    within: float | None


class SeparationScoresFacts(TypedDict):
    """How far apart the classes are at a site."""

    site: str
    silhouette: float
    neighbour: float
    fisher: float
    within: float
    p: SeparationPFacts


class BestSeparationFacts(SeparationScoresFacts):
    """The site with the largest silhouette."""

    p_corrected: float | None


class SeparationFacts(TypedDict):
    """Where the classes are apart."""

    best: BestSeparationFacts
    first: SeparationScoresFacts
    last: SeparationScoresFacts
    apart_at: list[str]


class DoubtFacts(TypedDict):
    """What a picture shows and the full space does not."""

    site: str
    shown: float
    full_space: float
    p: float | None
    groups: int | None


class PictureFacts(TypedDict, total=False):
    """How far the pictures can be trusted."""

    trustworthiness: ExtremesFacts
    seed_difference: ExtremesFacts
    doubts: list[DoubtFacts]


class ProjectPartFacts(GroupFacts):
    """One dataset in one model."""

    model: str
    dataset: str
    points: int
    classes: NotRequired[list[PointClassFacts]]
    class_count: NotRequired[int]
    alone_in_class: NotRequired[list[str]]
    labels_predicted: NotRequired[int]
    smallest_p: NotRequired[float | None]
    all_equal_at: NotRequired[list[str]]
    separation: NotRequired[SeparationFacts]
    picture: NotRequired[PictureFacts]


class TighterFacts(TypedDict):
    """How tight the classes of a dataset are, and where they are the tighter ones."""

    dataset: str
    tighter_at: list[str]
    median_within: float


class TightnessFacts(TypedDict):
    """How tight the classes of two datasets are in one model."""

    model: str
    sites: list[str]
    datasets: list[TighterFacts]


class ProjectFacts(TypedDict):
    """Where the classes of texts are apart, and which pictures not to trust."""

    method: str
    token: str | int
    seed: int
    neighbours: int
    seeds: list[int]
    parts: list[ProjectPartFacts]
    tightness: NotRequired[list[TightnessFacts]]
