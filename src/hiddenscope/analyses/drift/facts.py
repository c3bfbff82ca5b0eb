"""The facts of a drift comparison."""

from typing import Literal, NotRequired, TypedDict


class ErrorFacts(TypedDict):
    """The error at a site."""

    site: str
    error: float


class BeyondFacts(TypedDict):
    """How many times over the noise envelope a site is."""

    site: str
    beyond: float


class DriftingSiteFacts(ErrorFacts, BeyondFacts):
    """A site that differs by more than noise."""


class SystematicFacts(TypedDict):
    """A difference that is the same at every token."""

    part: str
    pattern: Literal["scale", "bias", "gain", "linear"]
    size: float
    beyond: float


class SmallestFaultFacts(TypedDict):
    """How small a systematic difference would have shown."""

    typical: float
    largest: float
    part: str


class ChangedWeightFacts(TypedDict):
    """A weight that differs, and by how much of its norm."""

    name: str
    relative: float


class WorstTokenFacts(TypedDict):
    """The token at which a site is farthest off."""

    text: int
    position: int
    token: str


class PassFacts(TypedDict):
    """How many passes were run."""

    reference: float
    candidate: float


class NoiseFacts(TypedDict):
    """What the noise envelope is made of."""

    made_of: list[str]
    margin: float


class SelfCheckFacts(TypedDict):
    """Whether observing the candidate changed its output; None where unknown."""

    observing_changed_nothing: bool | None


class PairFacts(TypedDict):
    """The names of a site and of its places on both sides."""

    site: str
    reference: str
    candidate: str


class PairingFacts(TypedDict):
    """By what tensors were paired, and the pairs."""

    by: str
    pairs: list[PairFacts]


class Hint(TypedDict):
    """What a fault looks like: the name of a fault, and the evidence in a sentence."""

    fault: str
    evidence: str


class Restored(TypedDict):
    """The share of the output's change that the reference's states at sites remove."""

    sites: list[str]
    share: float


class ConsequenceFacts(TypedDict):
    """What the drift does to the output."""

    kl_mean: float
    kl_max: float
    top1_changed: int
    of: int
    restored: list[Restored]


class MovedLayerFacts(TypedDict):
    """How far a layer moved: by its own weights, and with what it inherited.

    Both are medians over the tokens; `largest` is the largest local error of a token.
    """

    site: str
    local: float
    total: float
    largest: float


class MovedTokenFacts(TypedDict):
    """How far the state of a token moved at the last site, and its output."""

    text: int
    position: int
    token: str
    error: float
    kl: float | None


class BaselineFacts(TypedDict):
    """The baseline that was written or applied."""

    file: str
    sites: int
    written: bool


class DriftFacts(TypedDict):
    """Whether and where a candidate differs from its reference."""

    drifted: bool
    explained_by: Literal["quantisation", "adapter", "weights", "dtype"] | None
    unexplained: DriftingSiteFacts | None
    first_site: str | None
    module: str | None
    beyond: float
    own_code: bool
    error: float
    envelope: float
    as_given: ErrorFacts | None
    systematic: SystematicFacts | None
    smallest_fault: SmallestFaultFacts | None
    changed_weights: list[ChangedWeightFacts]
    first_token: WorstTokenFacts | None
    largest: BeyondFacts
    drifting_sites: list[DriftingSiteFacts]
    moved_layers: list[MovedLayerFacts]
    moved_tokens: list[MovedTokenFacts]
    reference: str
    candidate: str
    compared: Literal["parts", "passes"]
    texts: int
    tokens: int
    sites: int
    passes: PassFacts
    noise: NoiseFacts
    self_check: SelfCheckFacts
    pairing: PairingFacts
    hints: list[Hint]
    consequences: ConsequenceFacts | None
    baseline: NotRequired[BaselineFacts]
    notes: list[str]
