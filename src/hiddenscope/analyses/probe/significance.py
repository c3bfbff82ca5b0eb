"""Significance: the scores of a probe under permuted labels, and the interval of its
score.
"""

from functools import partial
from typing import NamedTuple

import torch

from hiddenscope.analyses.probe.design import Design, ProbeTarget
from hiddenscope.linear.intervals import (
    Chance,
    Estimate,
    Explained,
    Factors,
    Interval,
    Redrawn,
    Spread,
    accuracy,
    accuracy_interval,
    factors,
    r2,
    r2_interval,
    redrawn_accuracy,
    spread,
    variance_factor,
)
from hiddenscope.linear.jackknife import jackknife_deviation
from hiddenscope.linear.permutations import STRENGTHS, planted, under_labellings


class NullDistribution(NamedTuple):
    """The scores of the true and of permuted targets, and how much the score varies.

    An accuracy is less the share of the largest class under its labelling. Where groups
    of several sizes exchange labels, that share varies, and a probe that reads nothing
    follows it.
    """

    scores: torch.Tensor
    varies: Factors | Spread


def measured_of(
    scores: torch.Tensor, targets: torch.Tensor, target: ProbeTarget, design: Design
) -> Estimate | Explained:
    """The accuracy or R² of scores `[row, output, set]`."""
    return (r2 if target.classes is None else accuracy)(scores, targets, design.groups)


def by_chance(
    states: torch.Tensor, predicted: torch.Tensor, target: ProbeTarget, design: Design
) -> NullDistribution:
    """What labels that mean nothing lead to, and numbers that follow the prediction of
    the probe of all rows.
    """
    measure = partial(of_labellings, target, design)
    labellings = labellings_of(predicted, target, design)
    return by_chance_of(
        under_labellings(states, labellings, design.folds, target.learner, measure),
        target,
        design,
    )


def labellings_of(
    predicted: torch.Tensor, target: ProbeTarget, design: Design
) -> torch.Tensor:
    """The true targets, permuted ones, and redrawn or planted ones."""
    if target.classes is not None:
        return torch.cat([design.permuted, design.redrawn])
    return torch.cat([design.permuted, planted(design.redrawn, predicted.double())])


def of_labellings(
    target: ProbeTarget,
    design: Design,
    scores: torch.Tensor,
    intercepts: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The parts of `Explained`; or of `Redrawn`, the accuracy without intercepts, and
    its variance within classes.
    """
    if target.classes is None:
        return r2(scores, targets, design.groups)
    even = accuracy(scores - intercepts, targets, design.groups)
    shares = torch.bincount(target.values) / len(target.values)
    return (
        *redrawn_accuracy(scores, targets, design.groups, shares),
        even.score,
        even.within,
    )


def by_chance_of(
    found: tuple[torch.Tensor, ...], target: ProbeTarget, design: Design
) -> NullDistribution:
    """From what `of_labellings` gave."""
    least = 1.0 if design.calibrated else variance_factor(design.fold_count)
    count = len(design.permuted)
    if target.classes is None:
        worlds = Explained(*(part[count:] for part in found))
        return NullDistribution(
            found[0][:count], spread(worlds, len(STRENGTHS), design.groups, least)
        )
    *parts, even, within = found
    of_sizes = (
        Redrawn(*(part[count:] for part in parts)) if len(design.redrawn) else None
    )
    scores = found[0][:count] - _largest_share(design.permuted)
    return NullDistribution(
        scores, factors(even[1:count], within[1:count], of_sizes, least)
    )


def _largest_share(labellings: torch.Tensor) -> torch.Tensor:
    """The share of the largest class under each labelling."""
    counts = [(labellings == code).sum(1) for code in range(int(labellings.max()) + 1)]
    return torch.stack(counts).amax(0).double() / labellings.shape[1]


def jackknife_of(
    states: torch.Tensor, penalty: torch.Tensor, target: ProbeTarget, design: Design
) -> float:
    """The standard deviation of log(1 - R²) when texts are left out, with the penalty
    of each fold; 0 for classes.
    """
    if target.classes is not None:
        return 0.0
    return jackknife_deviation(
        states, target.values.to(states.device), design.folds, design.groups, penalty
    )


def interval_of(
    measured: Estimate | Explained,
    varies: Factors | Spread,
    found: Chance,
    design: Design,
    jackknife: float = 0.0,
) -> Interval:
    """The interval of one score; that of an R² is no narrower than the deviation of the
    jackknife makes it.
    """
    if isinstance(measured, Explained):
        assert isinstance(varies, Spread)
        return r2_interval(measured, design.groups, varies, found, jackknife)
    assert isinstance(varies, Factors)
    return accuracy_interval(measured, len(design.folds), design.groups, varies, found)
