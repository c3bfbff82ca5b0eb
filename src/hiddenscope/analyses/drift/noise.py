"""Compare a difference with rounding noise: the test behind every verdict of drift.

A `Gap` is how far two computations of the same rows are apart. `Noise` is how far
rounding alone puts them apart, measured on the reference wherever possible. A gap is
drift if it exceeds `MARGIN` times the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.modules import trials

# Two correct programs are each about equally far from the exact result, and the worst
# of a few tokens varies by a small factor. Trials allow the same factor between two
# runs of the same texts. Correct pairs came to at most 1.3 times the measured noise
# (docs/log.md), so that the factor leaves room.
MARGIN = trials.NOISE_FACTOR
# Rows and channels below this share of the typical size are measured by that size: a
# sum that cancels to nearly zero still has the rounding errors of its terms.
SMALLEST = 1e-3


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
        # Heads and masks exclude tokens by minus infinity. Where both sides do so they
        # agree, but their difference would be a NaN.
        if bool(expected.isinf().any()):
            excluded = expected.isinf() & (expected == actual)
            expected = expected.masked_fill(excluded, 0.0)
            actual = actual.masked_fill(excluded, 0.0)
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
        rows, channel = self.rows, self.channel
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


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
