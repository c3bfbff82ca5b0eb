"""Measures of changed logits: how much of the answer comes back."""

from math import isfinite
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hiddenscope.causes.encoding import EncodedContrast
from hiddenscope.errors import TextError

Into: TypeAlias = Literal["corrupt", "clean"]

MEASURES = ("effect", "probability", "kl")


class LogitMeasures:
    """Measures of patched logits, in the order of MEASURES.

    They are the share of the logit difference that comes back, the answer's
    probability, and the KL divergence from the clean run. `tolerance` is what rounding
    may change in logits, as a share of their norm.
    """

    def __init__(
        self,
        contrast: EncodedContrast,
        clean: Tensor,
        corrupt: Tensor,
        into: Into,
        tolerance: float,
    ) -> None:
        self.answer = contrast.answer
        self.other = contrast.other
        self.clean = torch.log_softmax(clean.double(), -1)
        self.corrupt = torch.log_softmax(corrupt.double(), -1)
        base, source = (corrupt, clean) if into == "corrupt" else (clean, corrupt)
        self.start = float(self.difference(base.double()))
        self.span = float(self.difference(source.double())) - self.start
        rounding = max(
            self.rounding(clean, tolerance), self.rounding(corrupt, tolerance)
        )
        if not isfinite(self.span):
            raise TextError(
                "The effect is a share of the difference between two runs",
                "the logit of an answer is infinite: that word can never follow",
                "Give other answers.",
            )
        if abs(self.span) <= rounding:
            reason = (
                f"both runs prefer the answer by {self.start:.6g} in logits, with a"
                f" difference of {abs(self.span):.2g} between them, and rounding alone"
                f" may make {rounding:.2g}"
            )
            raise TextError(
                "The effect is a share of the difference between two runs",
                reason,
                "Give prompts that tell the answers apart, or use float32.",
            )

    def difference(self, logits: Tensor) -> Tensor:
        """Return the answer's logit less the other answer's."""
        return logits[..., self.answer] - logits[..., self.other]

    def __call__(self, logits: Tensor) -> Tensor:
        """Measure logits [variant, vocabulary] as [variant, measure], in float64."""
        wide = logits.double()
        total = wide.logsumexp(-1)
        effect = (self.difference(wide) - self.start) / self.span
        probability = (wide[..., self.answer] - total).exp()
        # Sum p log p - sum p log q; what is left out is of words without probability.
        clean = self.clean.exp()
        reached = wide.masked_fill(clean == 0, 0) @ clean
        kl = -torch.special.entr(clean).sum() - (reached - total)
        return torch.stack([effect, probability, kl.clamp_min(0)], -1)

    @property
    def runs(self) -> dict[str, list[float]]:
        """Return numbers of the clean and of the corrupt run, by name."""
        runs = torch.stack([self.clean, self.corrupt])
        return {
            "logit_difference": self.difference(runs).tolist(),
            "probability": runs[:, self.answer].exp().tolist(),
        }

    def rounding(self, logits: Tensor, tolerance: float) -> float:
        """Return what rounding may change in the difference of two logits.

        The tolerance is a share of the norm of all logits; for one logit it is that
        share of their spread, because what all of them have in common cancels in a
        difference. It is at least the last place of the two logits.
        """
        wide = logits.double()
        largest = float(wide[[self.answer, self.other]].abs().max())
        spread = float(wide[wide.isfinite()].std(correction=0))
        last_place = torch.finfo(logits.dtype).eps * largest
        return max(tolerance * spread * 2**0.5, 2 * last_place)
