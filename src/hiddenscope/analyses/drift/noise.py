"""Hold a difference against rounding: the one comparison that decides, for a site, a
module or a saved run.

A `Gap` is how far two computations of the same rows are apart. `Noise` is how far
rounding alone puts them apart, measured on the reference wherever it can be. A gap is
drift if it is more than `MARGIN` times the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.modules import trials

# Two correct programs are each about as far from the exact result as the other, and the
# farthest of a few tokens varies by a small factor: the factor that trials allow
# between two runs of the same texts.
MARGIN = trials.NOISE_FACTOR
# A row or a channel that is next to nothing is measured by the others: rounding there
# is that of the terms of a sum.
SMALLEST = 1e-3


class Gap(NamedTuple):
    """How far two computations of rows are apart.

    `rows` has the L2 norm of each row's difference over the norm of the row. `channel`
    is the largest difference in any channel over that channel's largest value, which
    shows what happens beside a channel of massive activations.
    """

    rows: Tensor
    channel: float

    @property
    def worst(self) -> float:
        """The largest relative difference of a row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


INFINITE = Gap(torch.full((1,), torch.inf, dtype=torch.float64), torch.inf)


def gap(reference: Tensor, other: Tensor) -> Gap:
    """Measure how far rows [row, width] are from the reference's; a NaN is infinitely
    far.

    >>> gap(torch.ones(2, 4), torch.tensor([[1.0] * 4, [2.0] * 4])).rows
    tensor([0., 1.], dtype=torch.float64)
    """
    return gap_of_blocks([(reference, other)])


def gap_of_blocks(pairs: Iterable[tuple[Tensor, Tensor]]) -> Gap:
    """Measure the gap of rows that come in blocks, the same as that of all rows
    together.
    """
    differences = [torch.empty(0, dtype=torch.float64)]
    sizes = [torch.empty(0, dtype=torch.float64)]
    largest_difference = largest_value = torch.zeros((), dtype=torch.float64)
    for reference, other in pairs:
        expected = reference.detach().cpu().double()
        difference = other.detach().cpu().double() - expected
        differences.append(difference.norm(dim=-1))
        sizes.append(expected.norm(dim=-1))
        if expected.numel():
            largest_difference = largest_difference.maximum(difference.abs().amax(0))
            largest_value = largest_value.maximum(expected.abs().amax(0))
    norms = torch.cat(sizes)
    typical = float(norms.square().mean().sqrt()) if len(norms) else 0.0
    rows = _share(torch.cat(differences), norms.clamp_min(SMALLEST * typical))
    channels = _share(
        largest_difference,
        largest_value.clamp_min(SMALLEST * float(largest_value.max())),
    )
    return Gap(rows, float(channels.max()))


def _share(difference: Tensor, size: Tensor) -> Tensor:
    """Divide, so that no difference is none whatever the size, and a NaN is an infinite
    one.
    """
    divided = difference / size.clamp_min(torch.finfo(torch.float64).tiny)
    share = torch.where(difference == 0, 0.0, divided)
    return share.nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True)
class Noise:
    """What rounding does to rows, one number for all or one for each, and to the worst
    channel.
    """

    rows: Tensor
    channel: float

    @classmethod
    def measured(cls, gaps: Iterable[Gap], dtype: torch.dtype) -> Noise:
        """Take the worst of several measurements; at least one unit in the last place
        of the dtype.
        """
        listed = list(gaps)
        unit = torch.finfo(dtype).eps
        row = max([unit, *(gap.worst for gap in listed)])
        channel = max([unit, *(gap.channel for gap in listed)])
        return cls(torch.tensor(row, dtype=torch.float64), channel)

    @classmethod
    def assumed(cls, dtype: torch.dtype, depth: int = 0) -> Noise:
        """Take the rounding tolerance of every trial, where the noise cannot be
        measured.
        """
        allowed = trials.tolerance(dtype, depth) / MARGIN
        return cls(torch.tensor(allowed, dtype=torch.float64), allowed)

    @classmethod
    def of_passes(cls, gaps: Sequence[Gap], dtype: torch.dtype) -> Noise:
        """Take the worst of whole passes, token by token: noise grows very differently
        from token to token.
        """
        rows = torch.stack([gap.rows for gap in gaps]).amax(0)
        unit = torch.finfo(dtype).eps
        # No channel is judged: in whole passes one token's noise may be another's
        # fault.
        return cls(rows.clamp_min(max(unit, float(rows.median()) / 2)), torch.inf)

    def joined(self, gaps: Iterable[Gap]) -> Noise:
        """Take the worse of this noise and of further measurements, row by row."""
        rows, channel = self.rows, self.channel
        for measured in gaps:
            rows = rows.maximum(measured.rows)
            channel = max(channel, measured.channel)
        return Noise(rows, channel)

    @property
    def envelope(self) -> float:
        """The largest relative difference of a row that rounding can explain."""
        return MARGIN * float(self.rows.max())

    def times_over(self, error: Gap) -> float:
        """Divide an error by the envelope, at the row or the channel where that gives
        most: over 1 is drift.
        """
        rows = error.rows / (MARGIN * self.rows)
        worst_row = float(rows.max()) if len(rows) else 0.0
        return max(worst_row, error.channel / (MARGIN * self.channel))


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Choose the dtype with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
