"""What a comparison found: whether, where and why a candidate drifts."""

from typing import Literal

from hiddenscope.results import Report, frozen
from hiddenscope.results.report import ABSENT, Absent


@frozen
class SiteError:
    """The error at a site."""

    site: str
    error: float


@frozen
class SiteBeyond:
    """How many times over the noise envelope a site is."""

    site: str
    beyond: float


@frozen
class DriftingSite:
    """A site that differs by more than noise."""

    site: str
    beyond: float
    error: float


@frozen
class Systematic:
    """A difference that is the same at every token."""

    part: str
    pattern: str
    size: float
    beyond: float


@frozen
class SmallestFault:
    """How small a systematic difference would have shown."""

    typical: float
    largest: float
    part: str


@frozen
class WeightChange:
    """A weight that differs, and by how much of its norm."""

    name: str
    relative: float


@frozen
class WorstToken:
    """The token at which a site is farthest off."""

    text: int
    position: int
    token: str


@frozen
class Passes:
    """How many passes were run."""

    reference: float
    candidate: float


@frozen
class Noise:
    """What the noise envelope is made of."""

    made_of: list[str]
    margin: float


@frozen
class SelfCheck:
    """Whether observing the candidate changed its output; None where unknown."""

    observing_changed_nothing: bool | None


@frozen
class SitePair:
    """The names of a site and of its places on both sides."""

    site: str
    reference: str
    candidate: str


@frozen
class Pairing:
    """By what tensors were paired, and the pairs."""

    by: str
    pairs: list[SitePair]


@frozen
class Hint:
    """What a fault looks like: the name of a fault, and the evidence in a sentence."""

    fault: str
    evidence: str


@frozen
class Restored:
    """The share of the output's change that the reference's states at sites remove."""

    sites: list[str]
    share: float


@frozen
class Consequences:
    """What the drift does to the output."""

    kl_mean: float
    kl_max: float
    top1_changed: int
    of: int
    restored: list[Restored]


@frozen
class MovedLayer:
    """How far a layer moved: by its own weights, and with what it inherited.

    Both are medians over the tokens; `largest` is the largest local error of a token.
    """

    site: str
    local: float
    total: float
    largest: float


@frozen
class MovedToken:
    """How far the state of a token moved at the last site, and its output."""

    text: int
    position: int
    token: str
    error: float
    kl: float | None


@frozen
class Baseline:
    """The baseline that was written or applied."""

    file: str
    written: bool
    sites: int


@frozen
class DriftReport(Report):
    """Whether and where a candidate differs from its reference.

    The fields that may be absent are not in the results of older versions.
    """

    drifted: bool
    explained_by: (
        Literal["quantisation", "adapter", "weights", "dtype"] | Absent | None
    ) = ABSENT
    unexplained: DriftingSite | Absent | None = ABSENT
    first_site: str | None
    module: str | None
    beyond: float
    own_code: bool
    error: float
    envelope: float
    as_given: SiteError | None
    systematic: Systematic | None
    smallest_fault: SmallestFault | None
    changed_weights: list[WeightChange]
    first_token: WorstToken | None
    largest: SiteBeyond
    drifting_sites: list[DriftingSite]
    moved_layers: list[MovedLayer] | None = None
    moved_tokens: list[MovedToken] | None = None
    reference: str
    candidate: str
    compared: Literal["parts", "passes"]
    texts: int
    tokens: int
    sites: int
    passes: Passes
    noise: Noise
    self_check: SelfCheck
    pairing: Pairing
    hints: list[Hint]
    consequences: Consequences | None
    notes: list[str]
    baseline: Baseline | None = None
