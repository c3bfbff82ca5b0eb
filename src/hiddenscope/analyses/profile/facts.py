"""The facts of a profile."""

from typing import NotRequired, TypedDict

from hiddenscope.results.facts import ExtremesFacts


class RowFacts(TypedDict):
    """A row by its token, or by its text where states are pooled."""

    token: NotRequired[str]
    text: NotRequired[int]


class NormFacts(TypedDict, total=False):
    """Median norms of first and other tokens, or of vectors where states are pooled."""

    first_token_norm: float
    other_tokens_norm: float
    vector_norm: float


class SiteNormFacts(NormFacts):
    """The norms at one site."""

    site: str


class LargestNormFacts(RowFacts):
    """The state with the largest norm."""

    norm: float
    site: str


class NotFiniteFacts(RowFacts):
    """How many states are not finite, and the first of them."""

    states: int
    site: str


class SpreadFacts(TypedDict, total=False):
    """A number over the middle layers."""

    all_tokens: float
    other_tokens: float
    all_vectors: float


class LargestValueFacts(RowFacts):
    """The largest value over the median of its layer."""

    times_median: float
    site: str
    channel: int
    position: NotRequired[int]


class ChannelFacts(TypedDict):
    """How many massive activations a channel has."""

    channel: int
    values: int


class MassiveTokenFacts(TypedDict):
    """How many massive activations a token has."""

    token: str
    values: int


class MassiveFacts(TypedDict):
    """The massive activations of a stack."""

    threshold: float
    values: int
    channels: list[ChannelFacts]
    sites: str
    at_first_tokens: NotRequired[int]
    tokens: NotRequired[list[MassiveTokenFacts]]


class LeastAlikeFacts(TypedDict):
    """The two layers with the lowest CKA."""

    site: str
    source_site: str
    cka: float


class ProfileCkaFacts(TypedDict, total=False):
    """The CKA of all pairs of layers."""

    sampled_tokens: int
    sampled_vectors: int
    median: float
    median_other_tokens: float
    median_by_chance: float
    least_alike: LeastAlikeFacts


class ProfileStackFacts(NormFacts):
    """The profile of one stack."""

    stack: str | None
    few_tokens: bool
    middle_layers: NotRequired[str]
    norm_ratio: NotRequired[float]
    before_final: NotRequired[SiteNormFacts]
    at_final: NotRequired[SiteNormFacts]
    largest_norm: NotRequired[LargestNormFacts]
    not_finite: NotRequired[NotFiniteFacts]
    anisotropy: NotRequired[SpreadFacts]
    effective_rank: NotRequired[SpreadFacts]
    intrinsic_dimension: NotRequired[ExtremesFacts]
    added: NotRequired[ExtremesFacts]
    largest_value: NotRequired[LargestValueFacts]
    massive_activations: NotRequired[MassiveFacts]
    cka: NotRequired[ProfileCkaFacts]


class ProfileFacts(TypedDict):
    """How large states are and how they spread; vectors where states are pooled."""

    texts: int
    pooled: str | None
    tokens: NotRequired[int]
    tokens_kept: NotRequired[int]
    vectors: NotRequired[int]
    vectors_kept: NotRequired[int]
    computed_in: str
    final_norm: str
    stacks: list[ProfileStackFacts]
