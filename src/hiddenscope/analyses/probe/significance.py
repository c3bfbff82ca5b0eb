"""Scores of a probe under permuted labels, its interval, and the centre of gravity."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hiddenscope.analyses.probe.design import Design, ProbeTarget
from hiddenscope.analyses.probe.story import Centre
from hiddenscope.linear.centre import centre_of_gravity
from hiddenscope.linear.crossvalidation import (
    STRENGTHS,
    cross_validate_labellings,
    plant_signal,
)
from hiddenscope.linear.intervals import (
    DEPENDENCE,
    AccuracyEstimate,
    BootstrapSample,
    ExplainedVariance,
    Interval,
    PermutationTest,
    PlantedSpread,
    VarianceFactors,
    accuracy,
    accuracy_interval,
    bootstrap_accuracy,
    nadeau_bengio_factor,
    planted_spread,
    r2,
    r2_interval,
    variance_factors,
)
from hiddenscope.linear.jackknife import jackknife_deviation
from hiddenscope.linear.logistic import predicted_classes
from hiddenscope.sites import Site

# Two layers have no curve that could have a centre.
MIN_LAYERS = 3


class NullDistribution(NamedTuple):
    """Scores of the true and of permuted targets, and how much the score varies.

    The share of the largest class is subtracted from an accuracy. Where groups of
    several sizes exchange labels, that share differs between labellings, and a probe
    that reads nothing follows it.
    """

    scores: torch.Tensor
    variability: VarianceFactors | PlantedSpread


def estimate_score(
    scores: torch.Tensor, targets: torch.Tensor, target: ProbeTarget, design: Design
) -> AccuracyEstimate | ExplainedVariance:
    """Return the accuracy or R² of scores `[row, output, set]`."""
    if target.classes is None:
        return r2(scores, targets, design.groups)
    return accuracy(scores, targets, design.groups)


def null_distribution(
    states: torch.Tensor, predicted: torch.Tensor, target: ProbeTarget, design: Design
) -> NullDistribution:
    """Cross-validate permuted and bootstrap labels of the same states.

    For a regression, the bootstrap numbers follow `predicted`, the prediction of the
    probe of all rows, more and more closely.
    """
    bootstrap = design.bootstrap
    if target.classes is None:
        bootstrap = plant_signal(bootstrap, predicted.double())
    measured = cross_validate_labellings(
        states,
        torch.cat([design.permuted, bootstrap]),
        design.folds,
        target.learner,
        partial(measure_labellings, target, design),
    )
    return summarise_labellings(measured, target, design)


def measure_labellings(
    target: ProbeTarget,
    design: Design,
    scores: torch.Tensor,
    intercepts: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the fields of `ExplainedVariance`, or for classes of `BootstrapSample`.

    The latter are followed by the accuracy without intercepts and its variance within
    classes, from which `variance_factors` are measured.
    """
    if target.classes is None:
        return r2(scores, targets, design.groups)
    centred = accuracy(scores - intercepts, targets, design.groups)
    shares = torch.bincount(target.values) / len(target.values)
    sample = bootstrap_accuracy(scores, targets, design.groups, shares)
    return (*sample, centred.score, centred.within)


def summarise_labellings(
    measured: tuple[torch.Tensor, ...], target: ProbeTarget, design: Design
) -> NullDistribution:
    """Build the null distribution from what `measure_labellings` returned."""
    lower_bound = 1.0
    if not design.calibrated:
        lower_bound = nadeau_bengio_factor(design.fold_count)
        if target.classes is not None:
            lower_bound = DEPENDENCE
    count = len(design.permuted)
    scores = measured[0][:count]
    if target.classes is None:
        planted = ExplainedVariance(*(part[count:] for part in measured))
        spread = planted_spread(planted, len(STRENGTHS), design.groups, lower_bound)
        return NullDistribution(scores, spread)
    *sample, centred, within = measured
    bootstrap = None
    if len(design.bootstrap):
        bootstrap = BootstrapSample(*(part[count:] for part in sample))
    # The first labelling is the true one, whose score chance does not explain.
    factors = variance_factors(
        centred[1:count], within[1:count], bootstrap, lower_bound
    )
    return NullDistribution(above_largest(scores, design.permuted), factors)


def above_largest(scores: torch.Tensor, labellings: torch.Tensor) -> torch.Tensor:
    """Return accuracies less the share of the largest class in each labelling."""
    counts = [(labellings == code).sum(1) for code in range(int(labellings.max()) + 1)]
    return scores - torch.stack(counts).amax(0).double() / labellings.shape[1]


def jackknife_of(
    states: torch.Tensor, penalty: torch.Tensor, target: ProbeTarget, design: Design
) -> float:
    """Return the jackknife deviation of log(1 - R²); 0 for classes, which need none."""
    if target.classes is not None:
        return 0.0
    return jackknife_deviation(
        states, target.values.to(states.device), design.folds, design.groups, penalty
    )


def score_interval(
    estimate: AccuracyEstimate | ExplainedVariance,
    variability: VarianceFactors | PlantedSpread,
    test: PermutationTest,
    design: Design,
    jackknife: float = 0.0,
) -> Interval:
    """Return the interval of an accuracy or R².

    It has no ends where labels and states drift along the order of the texts: rows that
    follow one another are not independent, and of two random walks it excluded 0.
    """
    if design.serial is not None:
        return Interval(float(estimate.score), *[float("nan")] * 4)
    if isinstance(estimate, ExplainedVariance):
        assert isinstance(variability, PlantedSpread)
        return r2_interval(estimate, design.groups, variability, test, jackknife)
    assert isinstance(variability, VarianceFactors)
    return accuracy_interval(estimate, design.groups, variability, test)


def centre_of(
    sites: Sequence[Site],
    held_out: Sequence[torch.Tensor],
    factors: Sequence[VarianceFactors | PlantedSpread],
    target: ProbeTarget,
    design: Design,
) -> Centre | None:
    """Return the centre of gravity over layers, from scores `[row, output]` by site.

    Sites within a block and `final` are no depth of their own. There is none of fewer
    than three layers, of numbers, and where intervals were not calibrated.
    """
    layers, correct, within = [], [], []
    for site, scores, factor in zip(sites, held_out, factors, strict=True):
        if site.layer is None or site.part or isinstance(factor, PlantedSpread):
            continue
        layers.append(site.layer)
        correct.append((predicted_classes(scores) == target.values).double().numpy())
        within.append(factor.within)
    if len(layers) < MIN_LAYERS or not design.calibrated:
        return None
    gravity = centre_of_gravity(
        np.stack(correct),
        target.chance,
        layers,
        design.groups,
        float(np.mean(within)),
    )
    if gravity is None:
        return None
    first, last = layers[0], layers[-1]
    depth, *ends = [(layer - first) / (last - first) for layer in gravity[:3]]
    return Centre(
        layer=gravity.layer,
        interval=[gravity.low, gravity.high],
        depth=depth,
        depth_interval=ends,
        spread=gravity.spread,
        middle=float(np.mean(layers)),
        gained=gravity.gained,
    )
