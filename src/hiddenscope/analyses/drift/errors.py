"""Errors of a comparison, by site and token, and a verdict for each site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.drift.live_model import BRANCHES, LOGITS, LiveModel
from hiddenscope.analyses.drift.noise import Gap, Noise, coarsest
from hiddenscope.analyses.drift.systematic import Finding, SystematicTest
from hiddenscope.errors import NotFinite
from hiddenscope.passes import Inputs, TextEncoder
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats

Where = Callable[[str, int], str]
"""Describes the token of a row at a site."""

CELLS: Mapping[str, Mapping[str, str]] = {
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
# Beside these, the logits have `kl`, the divergence of the outputs at each token.
MISMATCH_ULP = 8


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

    `tokens` counts the tokens of each stack. `verdicts` has an entry for each site and
    for the logits. `noise_sources` name the measurements behind the noise. `findings`
    are systematic differences by part.
    """

    tokens: dict[str | None, int]
    cells: dict[str, dict[str, Floats]] = field(default_factory=dict)
    verdicts: dict[str, SiteVerdict] = field(default_factory=dict)
    noise_sources: list[str] = field(default_factory=list)
    observing_changed_nothing: bool | None = None
    passes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    systematic: dict[str, SystematicTest] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    kl: list[Floats] = field(default_factory=list)
    top1_changed: list[NDArray[np.bool_]] = field(default_factory=list)

    @classmethod
    def for_texts(cls, inputs: Inputs, reference: LiveModel) -> Errors:
        """Return the errors of some texts before any is measured."""
        stacks: list[str | None] = [stack.name for stack in reference.anatomy.stacks]
        if len(stacks) == 1:
            stacks = [None]
        return cls({stack: sum(inputs.of(stack).lengths) for stack in stacks})

    def put(
        self, name: str, measure: str, places: Sequence[int], values: Tensor
    ) -> None:
        """Store the values of one batch at the rows of its tokens."""
        count = self.tokens[stack_of(name, self.tokens)]
        measures = self.cells.setdefault(name, {})
        column = measures.setdefault(measure, np.full(count, np.nan))
        column[list(places)] = values.double().numpy()

    def put_cells(
        self, name: str, places: Sequence[int], reference: Tensor, candidate: Tensor
    ) -> None:
        """Measure two sets of rows token by token; for logits also the predictions."""
        for measure, values in measure_cells(reference, candidate).items():
            self.put(name, measure, places, values)
        if name == LOGITS:
            kl, changed = divergence(reference, candidate)
            self.put(name, "kl", places, kl)
            self.kl.append(kl.numpy())
            self.top1_changed.append(changed.numpy())

    def judge(self, name: str, error: Gap, noise: Noise, batch: Inputs) -> None:
        """Compare an error at a site with the noise; the worst batch counts."""
        verdict = self.verdicts.setdefault(name, SiteVerdict())
        beyond = noise.times_over(error)
        if beyond >= verdict.beyond:
            verdict.beyond, verdict.batch = beyond, batch
        verdict.error = max(verdict.error, error.worst)
        verdict.envelope = max(verdict.envelope, noise.envelope)

    def add_systematic(
        self, name: str, reference: Tensor, candidate: Tensor, exact: Tensor
    ) -> None:
        """Add rows of a part to its test for a difference shared by all tokens."""
        if name not in self.systematic:
            self.systematic[name] = SystematicTest(reference.shape[-1])
        self.systematic[name].add(reference, candidate, exact)

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
        self.findings = {name: test.result() for name, test in self.systematic.items()}
        for name in self.systematic_parts:
            verdict = self.verdicts[main_site(name)]
            if verdict.beyond <= 1:
                verdict.batch = texts

    @property
    def systematic_parts(self) -> list[str]:
        """Return the parts that differ systematically by more than sound programs."""
        return [name for name, finding in self.findings.items() if finding.beyond > 1]

    def beyond_with_systematic(self) -> dict[str, float]:
        """Return how far each site is over the noise, at a token or systematically."""
        worst = {name: verdict.beyond for name, verdict in self.verdicts.items()}
        for name in self.systematic_parts:
            layer = main_site(name)
            worst[layer] = max(worst[layer], self.findings[name].beyond)
        return worst

    def sort(self, sites: Sequence[Site]) -> None:
        """Put the sites into the order of the pass, the logits last."""
        order = [*map(str, sites), LOGITS]
        names = [name for name in order if name in self.verdicts]
        self.verdicts = {name: self.verdicts[name] for name in names}

    def drop(self, name: str) -> None:
        """Remove a site where the compared tensors are not the same state."""
        self.verdicts.pop(name, None)
        self.cells.pop(name, None)
        self.findings.pop(name, None)

    @property
    def drifting(self) -> list[str]:
        """Return the sites beyond the noise, in the order of the pass."""
        worst = self.beyond_with_systematic()
        return [name for name, beyond in worst.items() if beyond > 1]


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


def places_of(
    inputs: Inputs, texts: Sequence[int], stacks: Mapping[str | None, int]
) -> dict[str | None, list[int]]:
    """Return the rows of some texts' tokens among all rows, for each stack."""
    places: dict[str | None, list[int]] = {}
    for stack in stacks:
        starts = np.cumsum([0, *inputs.of(stack).lengths])
        places[stack] = []
        for text in texts:
            places[stack] += range(starts[text], starts[text + 1])
    return places


def measure_cells(reference: Tensor, candidate: Tensor) -> dict[str, Tensor]:
    """Compare two sets of rows by every measure of whole passes, in float64."""
    unit = torch.finfo(coarsest([reference.dtype, candidate.dtype])).eps
    expected, actual = reference.double(), candidate.double()
    difference = (actual - expected).abs()
    l2 = (actual - expected).norm(dim=-1)
    # An element near zero is measured by the typical size of its row.
    size = expected.abs().maximum(expected.square().mean(-1, keepdim=True).sqrt())
    ulp = torch.where(difference == 0, 0.0, difference / (unit * size))
    norms = expected.norm(dim=-1)
    cosine = (expected * actual).sum(-1) / (norms * actual.norm(dim=-1))
    return {
        "relative": torch.where(l2 == 0, 0.0, l2 / norms),
        "max_abs": difference.amax(-1),
        "cosine": cosine.clamp(-1, 1),
        "ulp": ulp.amax(-1),
        "mismatched": (ulp > MISMATCH_ULP).double().mean(-1),
    }


def divergence(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence in nats of each row, and whether its top token differs.

    The rows are logits.
    """
    p = reference.double().log_softmax(-1)
    q = candidate.double().log_softmax(-1)
    # A token without probability on either side gives 0 times a NaN.
    terms = (p.exp() * (p - q)).nan_to_num(nan=0.0)
    return terms.sum(-1).clamp_min(0), reference.argmax(-1) != candidate.argmax(-1)


def token_finder(
    inputs: Inputs,
    texts: Sequence[int],
    encoder: TextEncoder,
    stacks: Mapping[str | None, object],
) -> Where:
    """Return a function that names the token of a row, for messages about a NaN."""

    def where(name: str, row: int) -> str:
        stack_inputs = inputs.of(stack_of(name, stacks))
        for text in texts:
            length = stack_inputs.lengths[text]
            if row < length:
                token = encoder.string(stack_inputs.ids[text][row])
                return f"{token!r} (text {text}, position {row})"
            row -= length
        return f"row {row}"

    return where


def refuse_not_finite(who: str, name: str, rows: Tensor, where: Where) -> None:
    """Raise if rows hold a NaN or an infinity, naming the side, site and token."""
    broken = ~rows.isfinite().all(-1)
    if not bool(broken.any()):
        return
    # A head may exclude tokens by a logit of minus infinity.
    if name == LOGITS and bool((rows == -torch.inf).any()):
        return
    row = int(broken.nonzero()[0])
    what = "a NaN" if bool(rows[row].isnan().any()) else "an infinity"
    reason = f"the {who} has {what} at {name}, token {where(name, row)}"
    remedy = (
        "Repair that first: look at the weights of the block that computes it, or use a"
        " wider dtype."
    )
    raise NotFinite("Cannot compare the two runs", reason, remedy)
