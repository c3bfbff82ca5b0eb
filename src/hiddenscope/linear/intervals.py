"""Confidence intervals and permutation tests for cross-validated scores.

Cross-validated predictions are not independent: two rows of different folds each helped
to train the probe that predicts the other, so they tend to be right together. No
unbiased estimate of the resulting variance exists (Bengio and Grandvalet 2004). Here it
is measured on the states at hand: labels are permuted or redrawn, the whole
cross-validation is repeated, and the variance of the score over these repetitions is
compared with the variance that independent rows would have.

Accuracy
    Wilson's score interval (Wilson 1927), with the number of rows replaced by the
    number of independent rows that would have the same variance. Two measured factors
    inflate the variance. `VarianceFactors.within` is the ratio above. It is typically
    near 1.6: for nearly linear fits of noise, dependence adds 2/π times the variance of
    independent rows, so 1 + 2/π = 1.64 in all.
    `VarianceFactors.between` accounts for class sizes that were sampled.
R²
    The interval holds every true value that a test at that value would not reject
    (test inversion, Neyman 1937), on the scale log(1 - R²). The variance of R² depends
    on its true value, so it is measured on targets with a rising share of planted
    signal (`crossvalidation.plant_signal`). It is at least the jackknife variance
    (`jackknife`), because planted targets keep the states fixed.
Several sites
    P-values, and the lower bound of the best site, are corrected by the maximum of all
    scores under permuted labels (max statistic, Westfall and Young 1993).

How often these intervals hold the truth is measured by `make calibrate`; the results
are in docs/calibration.md, and what was tried and failed is in docs/log.md.

Words: a row is the state of one text or token, and a site is where states are read, for
instance a layer. `groups` numbers the group of each row: texts that belong together,
such as paraphrases, are not independent. A labelling gives every row a label, and most
arrays hold many labellings at once.
"""

from math import pi
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.logistic import predicted_classes
from hiddenscope.measures.grouped import effective_count
from hiddenscope.measures.separation import max_statistic
from hiddenscope.states.arrays import Floats, Ints

LEVEL = 0.95
# Standard deviations from a normal estimate to either end of its 95% interval: 1.96.
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
ONE_SIDED = NormalDist().inv_cdf(LEVEL)
# What cross-validation does to the variance of an accuracy on noise (see above).
DEPENDENCE = 1 + 2 / pi
# With fewer groups of rows, intervals were not calibrated.
MIN_GROUPS = 20
# Candidate values of log(1 - R²) that an R² interval tests. They are evenly spaced, so
# a bound is off by at most 1/2000 of the longest distance that it can be away.
GRID_POINTS = 4_000
TINY = torch.finfo(torch.float64).tiny


class AccuracyEstimate(NamedTuple):
    """Accuracies, one per labelling, and their variance if rows were independent.

    By the law of total variance, the variance has two parts. `within` is the variance
    among rows of one class. `between` comes from the number of rows drawn of each
    class, where some classes are predicted better than others. Permutations keep these
    numbers fixed, so they can only tell about `within`.
    """

    score: Tensor
    within: Tensor
    between: Tensor


class BootstrapSample(NamedTuple):
    """An `AccuracyEstimate` of labellings whose class sizes were drawn.

    `fresh` is the accuracy expected on fresh rows with the true class shares.
    """

    score: Tensor
    fresh: Tensor
    within: Tensor
    between: Tensor


class ExplainedVariance(NamedTuple):
    """R², one per labelling, and the quantities its interval is built from.

    `logarithm` is log(1 - R²), which is less skewed than R² and corrected for the
    sample mean (see `r2`). `influence` `[labelling, row]` is the contribution of each
    row to `logarithm`: its influence function (Hampel 1974).
    """

    score: Tensor
    logarithm: Tensor
    influence: Tensor


class Interval(NamedTuple):
    """A score with its 95% interval.

    `joint_low` is a lower bound that also holds for the best of several sites.
    `decision_low` is the bound that decides, together with the p-value, whether a score
    is called above chance. For an accuracy it is `low`, or a one-sided bound with the
    variance of permuted labels if that is larger: the p-value is corrected for the
    number of sites already. With 50 texts `joint_low` would find 11% of planted sites,
    and with 20 minimal pairs `low` alone would find a third as many weak ones as both
    do. For an R² it is `joint_low` computed without the
    jackknife. With 50 texts it finds 23% of planted sites; with the jackknife it would
    find 1%. How often a site is wrongly called above chance is in docs/calibration.md.
    """

    score: float
    low: float
    high: float
    joint_low: float
    decision_low: float


class PermutationTest(NamedTuple):
    """P-values of all sites, corrected for their number.

    `joint_z` is the number of standard deviations that the largest of all scores stays
    below in 97.5% of labellings, and at least 1.96, which is right for one site. The
    true labelling counts as one of them. Where it scores far above chance at all sites,
    it makes the standard deviations so large that `joint_z` falls towards 1.96.
    """

    p_values: list[float]
    joint_z: float


class VarianceFactors(NamedTuple):
    """Factors by which the parts of an `AccuracyEstimate`'s variance are too small.

    `within` makes up for the dependence that cross-validation creates between rows,
    `between` for the error that sampled class sizes bring. `null_deviation` is the
    standard deviation of the score itself under permuted labels.
    """

    within: float
    between: float
    null_deviation: float = 0.0


class PlantedSpread(NamedTuple):
    """How log(1 - R²) varies at each strength of planted signal.

    `logarithm` is its mean, `deviation` its standard deviation, and `within` the
    variance that it would have if rows were independent.
    """

    logarithm: Floats
    deviation: Floats
    within: Floats


def accuracy(scores: Tensor, targets: Tensor, groups: Ints) -> AccuracyEstimate:
    """Return the share of rows whose class is predicted right.

    `scores` are `[row, output, labelling]`, and `targets` classes `[row, labelling]`.

    >>> scores = torch.tensor([1.0, 1, -1, -1]).view(4, 1, 1)
    >>> targets = torch.tensor([[1], [0], [0], [0]])
    >>> float(accuracy(scores, targets, np.arange(4)).score)
    0.75
    """
    correct, recalls = _recalls(scores, targets, int(targets.max()) + 1)
    score = correct.mean(0)
    recall_of_row = recalls.gather(0, targets)
    residuals = correct - recall_of_row
    within = _variance_of_mean(residuals, groups, len(recalls))
    # Of a minimal pair, a probe that reads what both share is right once: such rows
    # vary less than independent ones, but only as long as nothing is read.
    within = torch.maximum(within, residuals.square().sum(0) / len(residuals) ** 2)
    between = _variance_of_mean(recall_of_row - score, groups, 1)
    return AccuracyEstimate(score, within, between)


def bootstrap_accuracy(
    scores: Tensor, targets: Tensor, groups: Ints, shares: Tensor
) -> BootstrapSample:
    """Return the accuracy under drawn labels, and on fresh rows with these shares.

    >>> scores, targets = torch.ones(4, 1, 1), torch.tensor([[1], [1], [1], [0]])
    >>> shares = torch.tensor([0.5, 0.5])
    >>> sample = bootstrap_accuracy(scores, targets, np.arange(4), shares)
    >>> float(sample.score), float(sample.fresh)
    (0.75, 0.5)
    """
    _, recalls = _recalls(scores, targets, len(shares))
    estimate = accuracy(scores, targets, groups)
    fresh = shares.to(recalls) @ recalls
    return BootstrapSample(estimate.score, fresh, estimate.within, estimate.between)


def _recalls(scores: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return which rows are right `[row, labelling]`, and the recall of each class.

    The recall `[class, labelling]` of a class without rows is 0.
    """
    correct = (predicted_classes(scores) == targets).double()
    recalls = []
    for number in range(classes):
        members = targets == number
        recalls.append((correct * members).sum(0) / members.sum(0).clamp_min(1))
    return correct, torch.stack(recalls)


def r2(scores: Tensor, targets: Tensor, groups: Ints) -> ExplainedVariance:
    """Return 1 - squared errors / squared deviations, as `sklearn.metrics.r2_score`.

    `scores` are `[row, 1, labelling]`, and `targets` numbers `[row, labelling]`.
    """
    centred = (targets - targets.mean(0)).double()
    squared_errors = (scores[:, 0] - targets).double().square()
    squared_deviations = centred.square()
    error = squared_errors.mean(0).clamp_min(TINY)
    variance = squared_deviations.mean(0)
    # Targets lie closer to their sample mean than to the true one, so `variance` is too
    # small by the variance of that mean. Uncorrected, log(1 - R²) is biased by
    # log(1 + 1/n): a third of its standard deviation on noise with 200 texts.
    fresh_variance = variance + _variance_of_mean(centred, groups, 1)
    logarithm = (error / fresh_variance).log()
    # The derivative of log(error) - log(variance) by the weight of each row.
    influence = squared_errors / error - squared_deviations / variance
    score = 1 - squared_errors.mean(0) / variance
    return ExplainedVariance(score, logarithm, influence.T)


def _variance_of_mean(residuals: Tensor, groups: Ints, fitted_means: int) -> Tensor:
    """Return the variance of the mean of residuals `[row, labelling]` over groups.

    Groups are what was sampled, so residuals are summed by group before they are
    squared (the cluster-robust variance of Liang and Zeger 1986). `fitted_means` is the
    number of means that were subtracted from the residuals.
    """
    group_count = int(groups.max()) + 1
    shape = (group_count, residuals.shape[1])
    sums = residuals.new_zeros(shape, dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(groups).to(sums.device), residuals)
    variance = sums.square().sum(0) / len(residuals) ** 2
    # Bessel's correction, n / (n - fitted means). A mean follows the large groups most,
    # so n is Kish's effective number of groups and not their count.
    effective = effective_count(groups)
    return variance * (effective / max(1.0, effective - fitted_means))


def nadeau_bengio_factor(folds: int) -> float:
    """Return the variance correction of Nadeau and Bengio (2003) for k folds.

    They correct 1/k to 1/k + test size / training size, a factor of 1 + k / (k - 1). On
    noise that is too large: 2.25 for five folds, where about 1.6 is needed. So it is
    used only for R² where groups are too few to measure a factor, or cannot be
    permuted. The factor of an accuracy is then at least 1 + 2/π.

    >>> nadeau_bengio_factor(5)
    2.25
    """
    return 1 + folds / (folds - 1)


def permutation_test(scores: Tensor) -> PermutationTest:
    """Compare the true labels' scores with those of permuted labels.

    `scores` `[site, labelling]` has the true labelling first. The p-value of a site is
    the share of labellings under which the largest standardised score of all sites is
    as large (max statistic, Westfall and Young 1993). So with meaningless labels, the
    probability that any site gets p <= 0.05 is at most 0.05, however many sites there
    are and however they depend on each other.

    >>> scores = torch.tensor([[0.9, 0.4, 0.5, 0.6], [0.5, 0.6, 0.4, 0.5]])
    >>> permutation_test(scores).p_values
    [0.25, 0.75]
    """
    p_values, largest = max_statistic(scores)
    # Over all labellings, the true one included, as the p-values are.
    quantile = float(torch.quantile(largest, (1 + LEVEL) / 2))
    return PermutationTest(p_values, max(Z, quantile))


def variance_factors(
    scores: Tensor,
    within: Tensor,
    bootstrap: BootstrapSample | None = None,
    lower_bound: float = 1.0,
) -> VarianceFactors:
    """Measure how much the variance of an accuracy exceeds that of independent rows.

    `scores` are accuracies under permuted labels, and `within` their variance if rows
    were independent. Both are of predictions without the intercept: with it, a probe
    that reads nothing predicts the largest class nearly always, so its score hardly
    varies, and the factor would be too small for a probe that does read something (1.2
    where 1.4 to 1.8 is needed). `lower_bound` applies to the factor within classes.
    Without a bootstrap, the factor between classes is 1.

    >>> scores, within = torch.tensor([0.4, 0.5, 0.6]), torch.full((3,), 0.005)
    >>> round(variance_factors(scores, within).within, 3)
    2.0
    """
    expected = float(within.double().mean())
    # Nothing is known of permuted labels where there are none.
    deviation = float(scores.double().std()) if len(scores) > 1 else 0.0
    factor = lower_bound
    if expected > 0:
        factor = max(lower_bound, deviation**2 / expected)
    between = 0.0 if bootstrap is None else float(bootstrap.between.mean())
    if bootstrap is None or between <= 0:
        return VarianceFactors(factor, 1.0, deviation)
    # By how much drawn class sizes add more error than `between` says. Folds are
    # stratified, so a probe that leans to the class that happens to be larger in the
    # sample is right more often in cross-validation than on fresh rows. The error is
    # therefore taken about the accuracy on fresh rows, which includes that bias.
    error = float((bootstrap.score - bootstrap.fresh.mean()).square().mean())
    explained = factor * float(bootstrap.within.mean())
    return VarianceFactors(factor, max(1.0, (error - explained) / between), deviation)


def accuracy_interval(
    estimate: AccuracyEstimate,
    groups: Ints,
    factors: VarianceFactors,
    test: PermutationTest,
) -> Interval:
    """Return Wilson's interval for the equivalent number of independent rows.

    It holds for a score without an error too, and its ends rise with the score.
    """
    score, within, between = (float(part) for part in estimate)
    rows = len(groups)
    group_size = rows / effective_count(groups)

    def bounds(z: float) -> tuple[float, float]:
        # Rows of a group that are right and wrong together count for fewer: by the
        # design effect (Kish 1965), the variance over that of independent rows. A few
        # errors say little of it, so z²/2 more groups are supposed that are wrong
        # altogether, as Wilson's interval supposes z²/2 more rows. Without an error
        # every group then counts as one row, and with fewer errors no bound falls.
        supposed = z**2 / 2 * group_size
        own_variance = within + supposed * group_size / rows**2
        variance = own_variance + between
        inflated = factors.within * own_variance + factors.between * between
        design_effect = rows**2 * variance / (rows * score * (1 - score) + supposed)
        count = rows / min(group_size, max(1.0, design_effect))
        return _wilson(score, count * variance / inflated, z)

    low, high = bounds(Z)
    # Each of the two critical values is meant for the best of all sites, and neither is
    # picked by where the signal is: Bonferroni's follows from the number of sites, and
    # `joint_z` from all labellings. But strong signal at all sites lowers `joint_z`
    # (`PermutationTest`). Bonferroni's is smaller where scores of permuted labels are
    # skewed, as those of a probe that leans to one class are. R² has no classes, so it
    # uses `joint_z` alone.
    joint_low, _ = bounds(min(test.joint_z, _bonferroni(len(test.p_values))))
    decision_low = max(low, score - ONE_SIDED * factors.null_deviation)
    return Interval(score, low, high, joint_low, decision_low)


def planted_spread(
    planted: ExplainedVariance,
    strength_count: int,
    groups: Ints,
    lower_bound: float = 1.0,
) -> PlantedSpread:
    """Measure how log(1 - R²) varies over targets with planted signal.

    `planted` has equally many labellings of each strength, at least two, the weakest
    strength first. The variance is at least `lower_bound` times that of independent
    rows.
    """
    logarithm = planted.logarithm.double().view(strength_count, -1)
    draws = logarithm.shape[1]
    influence = planted.influence.double().view(strength_count, draws, -1)
    within = _variance_of_mean(planted.influence.T, groups, 1)
    within = within.view(strength_count, -1).mean(1)
    # All labellings share the same states, so the part of a row's influence that comes
    # from its state does not vary between them. On fresh states it would, so its
    # variance is added. It is estimated as the variance component between rows in a
    # one-way analysis of variance: the mean over m draws has the variance
    # state + noise / m, and `within - of_mean` is noise (m - 1) / m.
    of_mean = _variance_of_mean(influence.mean(1).T, groups, 1)
    by_state = (of_mean - (within - of_mean) / (draws - 1)).clamp_min(0)
    variance = torch.maximum(logarithm.var(1) + by_state, lower_bound * within)
    return PlantedSpread(
        logarithm.mean(1).cpu().numpy(),
        variance.sqrt().cpu().numpy(),
        within.cpu().numpy(),
    )


def r2_interval(
    estimate: ExplainedVariance,
    groups: Ints,
    spread: PlantedSpread,
    test: PermutationTest,
    jackknife: float = 0.0,
) -> Interval:
    """Return all true values of R² that a test would not reject (Neyman 1937).

    Each candidate is tested with its own standard deviation, as Wilson's interval does
    for a share; log(1 - R²) is taken as normal. One deviation for all candidates fails
    where R² came out low by bad luck: it would be the small deviation of noise, and the
    truth is far outside.

    `jackknife` is a lower bound of the deviation. Planted targets keep the states, so
    their spread is too small where a few texts have states far from all others.
    """
    score = float(estimate.score)
    logarithm = float(estimate.logarithm)
    # The mean of log(1 - R²) falls as the planted signal gets stronger. The running
    # minimum removes exceptions by chance, and the sign is flipped because `np.interp`
    # needs ascending points.
    falling = np.minimum.accumulate(spread.logarithm)
    # Where rows differ more in their influence than rows of planted targets do, the
    # measured deviations are scaled up accordingly.
    observed = float(_variance_of_mean(estimate.influence.T, groups, 1))
    expected = float(np.interp(-logarithm, -falling, spread.within))
    wider = 1.0
    if expected > 0:
        wider = max(1.0, observed / expected) ** 0.5
    # The grid reaches as far as any bound below can, and must not shrink to a point
    # where all deviations are 0.
    largest_deviation = max(jackknife, wider * float(spread.deviation.max()))
    reach = max(test.joint_z, Z) * largest_deviation + 1e-9
    candidates = np.linspace(logarithm - reach, logarithm + reach, GRID_POINTS)
    deviations = wider * np.interp(-candidates, -falling, spread.deviation)

    def bounds(z: float, lower_bound: float) -> tuple[float, float]:
        # One step of the grid is added, so that at least one candidate is accepted.
        threshold = z * np.maximum(lower_bound, deviations) + 2 * reach / GRID_POINTS
        accepted = candidates[np.abs(logarithm - candidates) <= threshold]
        low = min(score, float(1 - np.exp(accepted.max())))
        high = max(score, float(1 - np.exp(accepted.min())))
        return low, high

    low, high = bounds(Z, jackknife)
    joint_low, _ = bounds(test.joint_z, jackknife)
    decision_low, _ = bounds(test.joint_z, 0.0)
    return Interval(score, low, high, joint_low, decision_low)


def wilson(share: float, count: float, comparisons: int = 1) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of `count` rows.

    It stays within 0 and 1 and keeps its level near both ends, where the usual normal
    interval does not. With several `comparisons`, all their intervals hold together
    with 95% probability (Bonferroni).

    >>> [round(end, 3) for end in wilson(0.8, 10)]
    [0.49, 0.943]
    """
    return _wilson(share, count, _bonferroni(comparisons))


def _bonferroni(comparisons: int) -> float:
    """Return the standard deviations to either end of that many 95% intervals."""
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / comparisons)


def _wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Return the shares p with |share - p| <= z sqrt(p (1 - p) / count)."""
    # The two solutions of that quadratic equation in p.
    square = z**2 / count
    middle = (share + square / 2) / (1 + square)
    root = (share * (1 - share) / count + square / (4 * count)) ** 0.5
    half = z / (1 + square) * root
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
