"""The errors of a comparison: by site and token, and for each site how far it is over
the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.drift.noise import Gap, Noise, coarsest
from hiddenscope.analyses.drift.observe import LOGITS, Observed
from hiddenscope.analyses.drift.systematic import Finding, SystematicTest
from hiddenscope.errors import NotFinite
from hiddenscope.passes import Inputs, TextEncoder
from hiddenscope.sites import Site

Array: TypeAlias = NDArray[np.float64]

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
MISMATCH = 8  # units in the last place


@dataclass
class Errors:
    """Every number of a comparison: cells by site and measure, and for each site its
    verdict.

    `beyond` has one entry for each site and for the logits: over 1 is drift.
    `noise_sources` say how the noise was measured, and `batch` holds the texts on which
    a site is farthest off.
    """

    tokens: dict[str | None, int]
    cells: dict[str, dict[str, Array]] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    envelope: dict[str, float] = field(default_factory=dict)
    noise_sources: list[str] = field(default_factory=list)
    batch: dict[str, Inputs] = field(default_factory=dict)
    observing_changed_nothing: bool | None = None
    passes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    systematic: dict[str, SystematicTest] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    kl: list[Array] = field(default_factory=list)
    top1_changed: list[NDArray[np.bool_]] = field(default_factory=list)

    def put(
        self, name: str, measure: str, places: Sequence[int], values: Tensor
    ) -> None:
        """Put the values of one batch to the rows of its tokens."""
        count = self.tokens[stack_of(name, self.tokens)]
        measures = self.cells.setdefault(name, {})
        column = measures.setdefault(measure, np.full(count, np.nan))
        column[list(places)] = values.double().numpy()

    def put_cells(
        self, name: str, places: Sequence[int], reference: Tensor, candidate: Tensor
    ) -> None:
        """Measure two sets of rows token by token; of logits, also what changes in the
        output.
        """
        for measure, values in measure_cells(reference, candidate).items():
            self.put(name, measure, places, values)
        if name == LOGITS:
            kl, changed = divergence(reference, candidate)
            self.kl.append(kl.numpy())
            self.top1_changed.append(changed.numpy())

    def judge(self, name: str, error: Gap, noise: Noise, batch: Inputs) -> None:
        """Hold an error at a site against the noise; the worst of all batches and
        branches counts.
        """
        beyond = noise.times_over(error)
        if beyond >= self.beyond.get(name, -1.0):
            self.beyond[name], self.batch[name] = beyond, batch
        self.error[name] = max(self.error.get(name, 0.0), error.worst)
        self.envelope[name] = max(self.envelope.get(name, 0.0), noise.envelope)

    def add_systematic(
        self, name: str, reference: Tensor, candidate: Tensor, exact: Tensor
    ) -> None:
        """Add rows of a part to its test for a difference that is the same at every
        token.
        """
        if name not in self.systematic:
            self.systematic[name] = SystematicTest(reference.shape[-1])
        self.systematic[name].add(reference, candidate, exact)

    def accept(self, name: str, allowed: float) -> None:
        """Accept the error of a site up to a level, and what its parts differ by
        systematically then.
        """
        if name not in self.beyond or self.error[name] > allowed:
            return
        accepted = self.error[name] / allowed if allowed else 0.0
        self.beyond[name] = min(self.beyond[name], accepted)
        self.envelope[name] = max(self.envelope[name], allowed)
        for part in [part for part in self.findings if main_site(part) == name]:
            del self.findings[part]

    def finish(self, sites: Sequence[Site], texts: Inputs) -> None:
        """Bring the sites into the order of the pass, and conclude the tests for a
        systematic difference.

        `texts` are those on which a fault is looked for that shows at no token alone.
        """
        self.findings = {name: test.result() for name, test in self.systematic.items()}
        for name in self.drifting_parts:
            layer = main_site(name)
            if self.beyond[layer] <= 1:
                self.batch[layer] = texts
        self.sort(sites)

    @property
    def drifting_parts(self) -> list[str]:
        """The parts that differ systematically, by more than sound programs do."""
        return [name for name, finding in self.findings.items() if finding.beyond > 1]

    def beyond_with_systematic(self) -> dict[str, float]:
        """Tell how far each site is over the noise, at a token or systematically."""
        worst = dict(self.beyond)
        for name in self.drifting_parts:
            layer = main_site(name)
            worst[layer] = max(worst[layer], self.findings[name].beyond)
        return worst

    def sort(self, sites: Sequence[Site]) -> None:
        """Bring the sites into the order of the pass, the logits last."""
        order = [str(site) for site in sites if not site.part]
        names = [name for name in [*order, LOGITS] if name in self.beyond]
        self.beyond = {name: self.beyond[name] for name in names}

    def drop(self, name: str) -> None:
        """Forget a site: what was compared there is not the same state."""
        for table in (
            self.beyond,
            self.error,
            self.envelope,
            self.batch,
            self.cells,
            self.findings,
        ):
            table.pop(name, None)

    @property
    def drifting(self) -> list[str]:
        """The sites whose error is beyond the noise, at a token or systematically, in
        the order of the pass.
        """
        systematic = set(map(main_site, self.drifting_parts))
        return [
            name
            for name, beyond in self.beyond.items()
            if beyond > 1 or name in systematic
        ]


def stack_of(name: str, stacks: Mapping[str | None, Any]) -> str | None:
    """Name the stack that a site, or the logits, belong to."""
    if len(stacks) == 1:
        return next(iter(stacks))
    return "decoder" if name == LOGITS else name.partition(".")[0]


def main_site(name: str) -> str:
    """Name the layer that a branch of a block counts for; other sites count for
    themselves.
    """
    for branch in ("attn", "cross", "mlp"):
        name = name.removesuffix(f".{branch}")
    return name


def places_of(
    inputs: Inputs, texts: Sequence[int], stacks: Mapping[str | None, int]
) -> dict[str | None, list[int]]:
    """Find the rows of some texts' tokens among all, stack by stack."""
    places: dict[str | None, list[int]] = {}
    for stack in stacks:
        lengths = inputs.of(stack).lengths
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows: list[int] = []
        for text in texts:
            rows += range(starts[text], starts[text + 1])
        places[stack] = rows
    return places


def measure_cells(reference: Tensor, candidate: Tensor) -> dict[str, Tensor]:
    """Compare two sets of rows by every measure of whole passes, in float64."""
    unit = torch.finfo(coarsest([reference.dtype, candidate.dtype])).eps
    expected, seen = reference.double(), candidate.double()
    difference = (seen - expected).abs()
    l2 = (seen - expected).norm(dim=-1)
    # An element next to zero is measured by the typical size of its row.
    size = expected.abs().maximum(expected.square().mean(-1, keepdim=True).sqrt())
    ulp = torch.where(difference == 0, 0.0, difference / (unit * size))
    norms = expected.norm(dim=-1)
    cosine = (expected * seen).sum(-1) / (norms * seen.norm(dim=-1))
    return {
        "relative": torch.where(l2 == 0, 0.0, l2 / norms),
        "max_abs": difference.amax(-1),
        "cosine": cosine.clamp(-1, 1),
        "ulp": ulp.amax(-1),
        "mismatched": (ulp > MISMATCH).double().mean(-1),
    }


def divergence(reference: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of logits the KL divergence in nats, and whether the most
    likely token differs.
    """
    p = reference.double().log_softmax(-1)
    q = candidate.double().log_softmax(-1)
    # A token that has no probability on either side gives 0 times a NaN.
    terms = (p.exp() * (p - q)).nan_to_num(nan=0.0)
    return terms.sum(-1).clamp_min(0), reference.argmax(-1) != candidate.argmax(-1)


Where = Callable[[str, int], str]
"""Says in words which token a row of a site is."""


def token_finder(
    inputs: Inputs,
    texts: Sequence[int],
    encoder: TextEncoder,
    stacks: Mapping[str | None, Any],
) -> Where:
    """Make a function that names the token of a row, for the message about a NaN."""

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
    """Refuse rows with a NaN or an infinity, naming the side, the site and the token."""
    broken = ~rows.isfinite().all(-1)
    if not bool(broken.any()):
        return
    # A head may rule tokens out by a logit of minus infinity.
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


def refuse_broken_states(who: str, observed: Observed, where: Where) -> None:
    """Refuse a pass whose states are not all finite."""
    for name, state in observed.states.items():
        refuse_not_finite(who, name, state.rows, where)
