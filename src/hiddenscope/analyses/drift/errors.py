"""Errors by site and token, and the test behind every verdict of drift.

A `Gap` is how far two computations of the same rows are apart. `Noise` is how far
rounding alone puts them apart, measured on the reference wherever possible. A gap is
drift if it exceeds `MARGIN` times the noise. `Errors` holds all numbers of a
comparison, and a verdict for each site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.drift.live_model import BRANCHES, LOGITS
from hiddenscope.analyses.drift.systematic import Finding, SystematicTest, coarsest
from hiddenscope.errors import NotFinite
from hiddenscope.modules import trials
from hiddenscope.passes import Inputs
from hiddenscope.results.dataset import Attributes
from hiddenscope.states import Tokens
from hiddenscope.states.arrays import Floats

# Two correct programs are each about equally far from the exact result, and the worst
# of a few tokens varies by a small factor. Trials allow the same factor between two
# runs of the same texts. Correct pairs came to at most 1.3 times the measured noise
# (docs/log.md), so that the factor leaves room.
MARGIN = trials.NOISE_FACTOR
# Rows and channels below this share of the typical size are measured by that size: a
# sum that cancels to nearly zero still has the rounding errors of its terms.
SMALLEST = 1e-3
CELLS: Mapping[str, Attributes] = {
    "relative": {
        "long_name": "relative error",
        "units": "L2 over the reference's norm",
        "scale": "log",
    },
    "max_abs": {"long_name": "largest absolute error", "scale": "log"},
    "cosine": {"long_name": "cosine of the two states"},
    "ulp": {
        "long_name": "largest error in units in the last place",
        "units": "ULP of the coarser dtype",
        "scale": "log",
    },
    "mismatched": {"long_name": "share of elements that differ by more than 8 ULP"},
    "local": {
        "long_name": "local error, on the reference's own input",
        "units": "L2 over the norm",
        "scale": "log",
    },
    "inherited": {
        "long_name": "inherited error",
        "units": "L2 over the norm",
        "scale": "log",
    },
}
SIDES = ("reference", "candidate")
# Beside these, the logits have `kl`, the divergence of the outputs at each token.
MISMATCH_ULP = 8


class Gap(NamedTuple):
    """How far two computations of rows are apart.

    `rows` holds the L2 norm of each row's difference, relative to the row. `channel` is
    the largest difference in any channel relative to that channel's largest value. It
    shows errors that a channel of massive activations would hide in the row norms.
    """

    rows: Tensor
    channel: float

    @property
    def worst(self) -> float:
        """Return the largest relative difference of a row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


INFINITE = Gap(torch.full((1,), inf, dtype=torch.float64), inf)


def gap(reference: Tensor, other: Tensor) -> Gap:
    """Measure how far rows [row, width] are from the reference's.

    A NaN counts as an infinite difference.

    >>> gap(torch.ones(2, 4), torch.tensor([[1.0] * 4, [2.0] * 4])).rows
    tensor([0., 1.], dtype=torch.float64)
    """
    return gap_of_blocks([(reference, other)])


def gap_of_blocks(pairs: Iterable[tuple[Tensor, Tensor]]) -> Gap:
    """Measure the gap of rows that arrive in blocks, as if they were one tensor.

    Each pair holds the reference's rows [row, width] and the other run's.
    """
    differences = [torch.empty(0, dtype=torch.float64)]
    sizes = [torch.empty(0, dtype=torch.float64)]
    largest_difference = largest_value = torch.zeros((), dtype=torch.float64)
    for reference, other in pairs:
        expected = reference.detach().cpu().double()
        actual = other.detach().cpu().double()
        expected, actual = trials.without_excluded(expected, actual)
        difference = actual - expected
        differences.append(difference.norm(dim=-1))
        sizes.append(expected.norm(dim=-1))
        if expected.numel():
            largest_difference = largest_difference.maximum(difference.abs().amax(0))
            largest_value = largest_value.maximum(expected.abs().amax(0))
    norms = torch.cat(sizes)
    typical = float(norms.square().mean().sqrt()) if len(norms) else 0.0
    rows = _ratio(torch.cat(differences), norms.clamp_min(SMALLEST * typical))
    channel_sizes = largest_value.clamp_min(SMALLEST * float(largest_value.max()))
    channels = _ratio(largest_difference, channel_sizes)
    return Gap(rows, float(channels.max()))


def _ratio(difference: Tensor, size: Tensor) -> Tensor:
    """Divide. A zero difference stays zero at any size, and a NaN becomes infinite."""
    divided = difference / size.clamp_min(torch.finfo(torch.float64).tiny)
    ratio = torch.where(difference == 0, 0.0, divided)
    return ratio.nan_to_num(nan=inf, posinf=inf)


@dataclass(frozen=True)
class Noise:
    """Rounding noise of rows (one number for all, or one per row) and of channels."""

    rows: Tensor
    channel: float

    @classmethod
    def measured(cls, gaps: Iterable[Gap], dtype: torch.dtype) -> Noise:
        """Take the worst of several measurements, and at least one unit of rounding."""
        row = channel = torch.finfo(dtype).eps
        for measured in gaps:
            row = max(row, measured.worst)
            channel = max(channel, measured.channel)
        return cls(torch.tensor(row, dtype=torch.float64), channel)

    @classmethod
    def assumed(cls, dtype: torch.dtype, depth: int = 0) -> Noise:
        """Return the noise whose envelope is the tolerance that trials use.

        It stands for noise that cannot be measured.
        """
        allowed = trials.tolerance(dtype, depth) / MARGIN
        return cls(torch.tensor(allowed, dtype=torch.float64), allowed)

    @classmethod
    def of_passes(cls, gaps: Sequence[Gap], dtype: torch.dtype) -> Noise:
        """Take the worst of several whole passes, token by token.

        Over a whole pass noise grows very differently from token to token.
        """
        rows = torch.stack([measured.rows for measured in gaps]).amax(0)
        # Where the passes happen to agree at a token, its noise is not zero: it is at
        # least half of the typical token's.
        lower_bound = max(torch.finfo(dtype).eps, float(rows.median()) / 2)
        # Channels are not judged: their largest value may be at a token of large noise.
        return cls(rows.clamp_min(lower_bound), inf)

    def joined(self, gaps: Iterable[Gap]) -> Noise:
        """Return the worse of this noise and further measurements, row by row."""
        rows = self.rows
        channel = self.channel
        for measured in gaps:
            rows = rows.maximum(measured.rows)
            channel = max(channel, measured.channel)
        return Noise(rows, channel)

    @property
    def envelope(self) -> float:
        """Return the largest relative difference of any row that rounding explains.

        It is the maximum over rows, for people to read. A verdict compares each row
        with the noise of that row.
        """
        return MARGIN * float(self.rows.max())

    def times_over(self, error: Gap) -> float:
        """Return how many times an error exceeds its noise envelope; over 1 is drift.

        Each row is compared with the noise of that row. The row or channel where the
        ratio is largest decides.
        """
        rows = error.rows / (MARGIN * self.rows)
        # An infinite error in infinite noise gives a NaN, which is not larger than 1.
        rows = rows.nan_to_num(nan=inf, posinf=inf)
        worst_row = float(rows.max()) if len(rows) else 0.0
        # Infinite noise of channels means that they are not judged.
        if self.channel == inf:
            return worst_row
        return max(worst_row, error.channel / (MARGIN * self.channel))


Places = Mapping[str | None, Sequence[int]]
"""The numbers of some rows among all of their stack, for each stack."""


def places_of(
    inputs: Inputs, texts: Sequence[int], stacks: Iterable[str | None]
) -> Places:
    """Return the places of the tokens of some texts among those of all inputs."""
    places: dict[str | None, list[int]] = {}
    for stack in stacks:
        starts = np.cumsum([0, *inputs.of(stack).lengths])
        places[stack] = []
        for text in texts:
            places[stack] += range(starts[text], starts[text + 1])
    return places


@dataclass
class SiteVerdict:
    """How far a site is off.

    `beyond` is how many times it exceeds the noise envelope: over 1 is drift. `error`
    and `envelope` are relative differences. `batch` holds the texts of the worst error.
    """

    beyond: float = -1.0
    error: float = 0.0
    envelope: float = 0.0
    batch: Inputs = field(default_factory=lambda: Inputs(()))


@dataclass
class Errors:
    """All numbers of a comparison: cells by site and measure, and a verdict per site.

    `tokens` are the tokens of each stack. `verdicts` has an entry for each site and
    for the logits. `noise_sources` name the measurements behind the noise. `findings`
    are systematic differences by part. `roles` are what an error calls the two runs.
    """

    tokens: Mapping[str | None, Tokens]
    cells: dict[str, dict[str, Floats]] = field(default_factory=dict)
    verdicts: dict[str, SiteVerdict] = field(default_factory=dict)
    noise_sources: list[str] = field(default_factory=list)
    observing_changed_nothing: bool | None = None
    passes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    notes: list[str] = field(default_factory=list)
    systematic: dict[str, SystematicTest] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    kl: list[Floats] = field(default_factory=list)
    top1_changed: list[NDArray[np.bool_]] = field(default_factory=list)
    roles: tuple[str, str] = SIDES

    def put(self, name: str, measure: str, places: Places, values: Tensor) -> None:
        """Store the values of some rows."""
        stack = stack_of(name, self.tokens)
        measures = self.cells.setdefault(name, {})
        column = measures.setdefault(measure, np.full(len(self.tokens[stack]), np.nan))
        column[places[stack]] = values.double().numpy()

    def compare(
        self, name: str, places: Places, reference: Tensor, candidate: Tensor
    ) -> None:
        """Measure two sets of rows token by token, in float64.

        For logits the predictions are compared as well. A NaN or an infinity is an
        error that names side, site and token.
        """
        for who, values in zip(self.roles, (reference, candidate), strict=True):
            broken = ~values.isfinite().all(-1)
            # A head may exclude tokens by a logit of minus infinity.
            excludes = name == LOGITS and bool((values == -inf).any())
            if excludes or not broken.any():
                continue
            row = int(broken.nonzero()[0])
            what = "a NaN" if values[row].isnan().any() else "an infinity"
            stack = stack_of(name, self.tokens)
            place = places[stack][row]
            tokens = self.tokens[stack]
            raise NotFinite(
                "Cannot compare the two runs",
                f"the {who} has {what} at {name}, token {tokens.strings[place]!r} (text"
                f" {tokens.text[place]}, position {tokens.positions[place]})",
                "Repair that first: look at the weights of the block that computes it,"
                " or use a wider dtype.",
            )
        unit = torch.finfo(coarsest([reference.dtype, candidate.dtype])).eps
        expected, actual = trials.without_excluded(
            reference.double(), candidate.double()
        )
        difference = (actual - expected).abs()
        l2 = (actual - expected).norm(dim=-1)
        # An element near zero is measured by the typical size of its row.
        size = expected.abs().maximum(expected.square().mean(-1, keepdim=True).sqrt())
        ulp = torch.where(difference == 0, 0.0, difference / (unit * size))
        norms = expected.norm(dim=-1)
        cosine = (expected * actual).sum(-1) / (norms * actual.norm(dim=-1))
        measures = {
            "relative": torch.where(l2 == 0, 0.0, l2 / norms),
            "max_abs": difference.amax(-1),
            "cosine": cosine.clamp(-1, 1),
            "ulp": ulp.amax(-1),
            "mismatched": (ulp > MISMATCH_ULP).double().mean(-1),
        }
        if name == LOGITS:
            measures["kl"], changed = divergence(reference, candidate)
            self.kl.append(measures["kl"].numpy())
            self.top1_changed.append(changed.numpy())
        for measure, values in measures.items():
            self.put(name, measure, places, values)

    def judge(self, name: str, error: Gap, noise: Noise, batch: Inputs) -> None:
        """Compare an error at a site with the noise; the worst batch counts."""
        verdict = self.verdicts.setdefault(name, SiteVerdict())
        beyond = noise.times_over(error)
        if beyond >= verdict.beyond:
            verdict.beyond = beyond
            verdict.batch = batch
        verdict.error = max(verdict.error, error.worst)
        verdict.envelope = max(verdict.envelope, noise.envelope)

    def accept(self, name: str, allowed: float) -> None:
        """Accept the error of a site up to a level, with its systematic differences."""
        verdict = self.verdicts.get(name)
        if verdict is None or verdict.error > allowed:
            return
        accepted = verdict.error / allowed if allowed else 0.0
        verdict.beyond = min(verdict.beyond, accepted)
        verdict.envelope = max(verdict.envelope, allowed)
        for part in list(self.findings):
            if main_site(part) == name:
                del self.findings[part]

    def conclude_systematic(self, texts: Inputs) -> None:
        """Conclude the tests for systematic differences.

        A fault that shows at no single token is searched for on `texts`.
        """
        for name, test in self.systematic.items():
            self.findings[name] = test.result()
            verdict = self.verdicts[main_site(name)]
            if self.findings[name].beyond > 1 and verdict.beyond <= 1:
                verdict.batch = texts

    @property
    def beyond(self) -> dict[str, float]:
        """Return how far each site is over the noise, at a token or systematically."""
        worst = {name: verdict.beyond for name, verdict in self.verdicts.items()}
        for name, finding in self.findings.items():
            if finding.beyond > 1:
                layer = main_site(name)
                worst[layer] = max(worst[layer], finding.beyond)
        return worst

    @property
    def drifting(self) -> list[str]:
        """Return the sites beyond the noise, in the order of the pass."""
        return [name for name, beyond in self.beyond.items() if beyond > 1]

    def sort(self, names: Iterable[str]) -> None:
        """Put the sites into the order of the pass, the logits last."""
        verdicts = dict(self.verdicts)
        self.verdicts = {}
        for name in (*names, LOGITS):
            if name in verdicts:
                self.verdicts[name] = verdicts[name]

    def drop(self, name: str) -> None:
        """Remove a site where the compared tensors are not the same state."""
        for table in (self.verdicts, self.cells, self.findings):
            table.pop(name, None)


def stack_of(name: str, stacks: Mapping[str | None, object]) -> str | None:
    """Return the stack that a site, or the logits, belong to."""
    if len(stacks) == 1:
        return next(iter(stacks))
    return "decoder" if name == LOGITS else name.partition(".")[0]


def main_site(name: str) -> str:
    """Return the layer that a branch of a block counts for, or the site itself."""
    for branch in BRANCHES:
        name = name.removesuffix(f".{branch}")
    return name


def divergence(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence in nats of each row, and whether its top token differs.

    The rows are logits.
    """
    p = reference.double().log_softmax(-1)
    q = candidate.double().log_softmax(-1)
    # A token without probability on either side gives 0 times a NaN.
    terms = (p.exp() * (p - q)).nan_to_num(nan=0.0)
    return terms.sum(-1).clamp_min(0), reference.argmax(-1) != candidate.argmax(-1)
