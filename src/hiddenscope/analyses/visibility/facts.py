"""The facts of visibility."""

from typing import Literal, NotRequired, TypeAlias, TypedDict


class ShareFacts(TypedDict):
    """A share at a site."""

    site: str
    share: float


class SourceShareFacts(TypedDict):
    """A share of a source site."""

    source_site: str
    share: float


class OwnBelowFacts(TypedDict):
    """How much of the influence of the site below comes from the same token."""

    mean: float
    least: ShareFacts
    most: ShareFacts


class OwnFirstFacts(ShareFacts):
    """How much of the influence of the first site comes from the same token."""

    source_site: str


class DistanceFacts(TypedDict):
    """How influence decays with the distance in tokens."""

    half_within: int
    nine_tenths_within: int
    farthest: int
    at_one: float
    at_farthest: float


class InfluenceFacts(TypedDict):
    """The influence of a source site."""

    source_site: str
    influence: float


class ReachFacts(TypedDict):
    """How far down the influence on the last site reaches."""

    site: str
    first: InfluenceFacts
    below: InfluenceFacts
    ratio: float | None


class MostSeenFacts(TypedDict):
    """The state with the largest influence on the last prediction."""

    source_site: str
    source_token: str


class VisibilityStackFacts(TypedDict):
    """The influence within one stack; on predictions there is `most_seen`."""

    stack: str | None
    own_below: NotRequired[OwnBelowFacts]
    own_first: NotRequired[OwnFirstFacts]
    first_token_share: NotRequired[float]
    distance_below: NotRequired[DistanceFacts]
    distance_first: NotRequired[DistanceFacts]
    reach: NotRequired[ReachFacts]
    targets: NotRequired[list[str]]
    own: NotRequired[list[SourceShareFacts]]
    most_seen: NotRequired[MostSeenFacts]


class CrossFacts(ShareFacts):
    """The share of the encoder in the influence on the decoder."""

    source_site: str
    beside: str


BoundarySide: TypeAlias = Literal["above", "below", "undecided"]
"""On which side of a boundary a whole 95% interval is."""


class IntervalFacts(TypedDict):
    """A number with the ends of its 95% interval over texts; null where unknown."""

    value: float | None
    low: float | None
    high: float | None


class GuessFacts(IntervalFacts):
    """A number that answers a guess, and the boundary that decides."""

    boundary: float
    verdict: BoundarySide


DecayName: TypeAlias = Literal["below", "first", "depth"]
"""What falls: shares by distance of the site below, shares by distance of the first
site, or shares by depth."""
DECAYS: tuple[DecayName, ...] = ("below", "first", "depth")


class LawFacts(TypedDict):
    """How shares fall with the distance or the depth."""

    source: DecayName
    exponent: IntervalFacts
    rate: IntervalFacts
    advantage: IntervalFacts
    explained: float | None
    better: Literal["power", "exponential"] | None
    decays: BoundarySide


class RandomFacts(TypedDict):
    """The exponent with random weights, and how much larger that of the model is."""

    source: DecayName
    exponent: IntervalFacts
    decays: BoundarySide
    excess: IntervalFacts
    verdict: BoundarySide


class AveragesFacts(TypedDict):
    """What averages over texts show."""

    laws: list[LawFacts]
    own_column: GuessFacts
    own_below: GuessFacts
    own_first: GuessFacts
    opening: IntervalFacts
    locality: GuessFacts
    random: NotRequired[list[RandomFacts]]


class AlignedFacts(AveragesFacts):
    """Averages over texts, aligned by distance and depth, and what was drawn."""

    groups: int
    batches: float
    targets: int
    targets_per_text: int
    farthest: int
    deepest: int
    source_site: str
    site: str


class VisibilityFacts(TypedDict):
    """Which states influence which."""

    measure: Literal["l1", "frobenius", "relative", "logit"]
    probes: int | None
    texts: int
    tokens: int
    sites: str
    cut: bool
    stacks: list[VisibilityStackFacts]
    cross: NotRequired[CrossFacts]
    aligned: NotRequired[AlignedFacts]
