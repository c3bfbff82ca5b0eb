"""Intervals: how uncertain a cross-validated score is, and whether chance explains it.

The predictions of cross-validation are not independent: two rows of different folds each helped to predict the other,
so they tend to be right together. By how much that adds to the variance depends on the states, and is measured: the
labels are permuted, the whole cross-validation is done again (`permutations`), and the variance of the score over
permutations is divided by the one that independent rows would have. That factor, between 1 and 2, widens the interval.

Permutations keep the sizes of the classes, but where labels are a sample, these sizes are too. Every fold has the same
share of each class, so a probe that leans to the class that happens to be larger is right more often here than on fresh
rows. So labels are also drawn anew, sizes included, and the error of the score that this brings is measured.

The same permutations tell what the largest score of all sites comes to by chance (the max-statistic of Westfall and
Young): the p-values and the interval of the best site are corrected by it. `make calibrate` measures all of this.
"""

from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

LEVEL = 0.95
ENDS = NormalDist().inv_cdf((1 + LEVEL) / 2)  # standard deviations to either end of an interval
FEWEST = 20  # groups: with fewer, intervals were not calibrated


class Estimate(NamedTuple):
    """Scores, one for each labelling, and their variance if rows were independent.

    The variance has two parts. `within` is that among rows of one class. `between` comes from how many rows of each
    class were drawn, where classes are predicted unequally well; permutations leave these numbers as they are. The
    variances of R² are those of log(1 - R²), whose distribution is less skewed.
    """

    score: Tensor
    within: Tensor
    between: Tensor


class Redrawn(NamedTuple):
    """As `Estimate`, where classes have drawn sizes; `fresh` is the score on fresh rows of the true shares."""

    score: Tensor
    fresh: Tensor
    within: Tensor
    between: Tensor


class Interval(NamedTuple):
    """A score, the ends of its 95% interval, and the lower end that holds for several scores jointly.

    `above` is the lower end of a one-sided interval, jointly: what is above chance must be above it by more than that.
    """

    score: float
    low: float
    high: float
    joint_low: float
    above: float


class Chance(NamedTuple):
    """What permuted labels tell: for each site a factor of the variance and a p-value, corrected for several sites.

    `factors` are of the variance within classes, `size_factors` of that between them. `variances` are those of the
    scores (of log(1 - R²)) over permutations. `joint` is how many standard deviations the largest of all scores stays
    below in 97.5% of permutations, and `joint_one_sided` in 95%.
    """

    factors: list[float]
    size_factors: list[float]
    variances: list[float]
    p: list[float]
    joint: float
    joint_one_sided: float


def accuracy(scores: Tensor, targets: Tensor, groups: Ints) -> Estimate:
    """The share of rows whose largest score is that of their class; from `[row, output, set]` and `[row, set]`.

    >>> scores, targets = torch.tensor([1.0, 1, -1, -1]).view(4, 1, 1), torch.tensor([[1], [0], [0], [0]])
    >>> float(accuracy(scores, targets, np.arange(4)).score)
    0.75
    """
    right, recalls = _recalls(scores, targets, int(targets.max()) + 1)
    share, by_class = right.mean(0), recalls.gather(0, targets)
    within, between = _variance(right - by_class, groups, len(recalls)), _variance(by_class - share, groups, 1)
    return Estimate(share, within, between)


def redrawn_accuracy(scores: Tensor, targets: Tensor, groups: Ints, shares: Tensor) -> Redrawn:
    """The accuracy where classes have drawn sizes, and that on fresh rows, of which classes have these shares.

    >>> scores, targets = torch.ones(4, 1, 1), torch.tensor([[1], [1], [1], [0]])
    >>> [float(part) for part in redrawn_accuracy(scores, targets, np.arange(4), torch.tensor([0.5, 0.5]))[:2]]
    [0.75, 0.5]
    """
    _, recalls = _recalls(scores, targets, len(shares))
    score, *variances = accuracy(scores, targets, groups)
    return Redrawn(score, shares.double() @ recalls, *variances)


def _recalls(scores: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Which rows are right `[row, set]`, and the share of them by class `[class, set]`; 0 where a class has no row."""
    chosen = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
    right = (chosen == targets).double()
    members = [targets == one for one in range(classes)]
    return right, torch.stack([(right * own).sum(0) / own.sum(0).clamp_min(1) for own in members])


def r2(scores: Tensor, targets: Tensor, groups: Ints) -> Estimate:
    """1 - the squared errors of all rows / those of their mean, as scikit-learn's `r2_score`."""
    error = (scores[:, 0] - targets).double().square()
    spread = (targets - targets.mean(0)).double().square()
    ratio = error.sum(0) / spread.sum(0)
    shares = error / error.sum(0).clamp_min(torch.finfo(torch.float64).tiny) - spread / spread.sum(0)
    within = _variance(len(shares) * shares, groups, 1)
    return Estimate(1 - ratio, within, torch.zeros_like(within))


def _variance(residuals: Tensor, groups: Ints, fitted: int) -> Tensor:
    """The variance of the mean of residuals `[row, set]` when groups of rows are drawn; `fitted` means were removed."""
    number = int(groups.max()) + 1
    sums = torch.zeros(number, residuals.shape[1], dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(groups), residuals)
    return sums.square().sum(0) / len(residuals) ** 2 * (number / max(1, number - fitted))


def variance_factor(folds: int) -> float:
    """By how much cross-validation in so many folds adds to the variance of a score at most (Nadeau and Bengio, 2003).

    >>> variance_factor(5)
    2.25
    """
    return 1 + folds / (folds - 1)


def chance(
    scores: Tensor,
    within: Tensor,
    *,
    redrawn: Redrawn | None = None,
    least: float = 1.0,
    logarithmic: bool = False,
) -> Chance:
    """What the scores `[site, labelling]` under labellings, the true one first, tell about those of the true one.

    A p-value is the share of labellings under which the largest score of all sites, each standardised over labellings,
    is as large. So for labels that mean nothing the chance that any site gets 0.05 or less is 0.05, however many sites
    there are and however they depend on one another. For R² (`logarithmic`) variances are those of log(1 - R²). No
    factor is below `least`. Factors of the variance between classes are 1 without labellings of drawn class sizes.

    >>> chance(torch.tensor([[0.9, 0.4, 0.5, 0.6], [0.5, 0.6, 0.4, 0.5]]), torch.full((2, 4), 0.01)).p
    [0.25, 0.75]
    """
    scores, within = scores.double(), within.double()
    shuffled = (1 - scores[:, 1:]).log() if logarithmic else scores[:, 1:]
    expected = within[:, 1:].mean(1)
    variances = shuffled.var(1)
    ratio = variances / expected.clamp_min(torch.finfo(torch.float64).tiny)
    factors = torch.where(expected > 0, ratio, least).clamp_min(least)
    deviation = scores.std(1, keepdim=True, correction=0)
    away = (scores - scores.mean(1, keepdim=True)) / deviation.clamp_min(1e-9)
    largest = away.amax(0)
    p = [float((largest >= true - 1e-9).double().mean()) for true in away[:, 0]]
    ends = torch.quantile(largest, torch.tensor([(1 + LEVEL) / 2, LEVEL], dtype=torch.float64))
    joint, one_sided = (
        max(float(end), NormalDist().inv_cdf(level)) for end, level in zip(ends, ((1 + LEVEL) / 2, LEVEL), strict=True)
    )
    size_factors = torch.ones_like(factors) if redrawn is None else _size_factors(redrawn, factors)
    return Chance(factors.tolist(), size_factors.tolist(), variances.tolist(), p, joint, one_sided)


def _size_factors(redrawn: Redrawn, factors: Tensor) -> Tensor:
    """By how much drawn class sizes add to the squared error of a score more than `between` says, at least 1.

    It is the error about what fresh rows give, so it holds the bias of folds that keep the shares of the classes.
    """
    error = (redrawn.score - redrawn.fresh.mean(1, keepdim=True)).square().mean(1)
    between = redrawn.between.mean(1)
    ratio = (error - factors * redrawn.within.mean(1)) / between.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(between > 0, ratio, 1.0).clamp_min(1.0)


def accuracy_interval(measured: Estimate, rows: int, groups: Ints, site: int, chance: Chance) -> Interval:
    """Wilson's interval, which is honest at 0 and 1 too, of as many independent rows as would have that variance.

    Rows of one group that are right and wrong together count for fewer, but never for fewer than there are groups.
    """
    share, within, between = (float(part) for part in measured)
    variance, factor, number = within + between, chance.factors[site], int(groups.max()) + 1
    widened = factor * within + chance.size_factors[site] * between
    count = min(float(rows), max(float(number), share * (1 - share) / variance)) if variance > 0 else float(number)
    count /= widened / variance if variance > 0 else factor
    ends = wilson(share, count)
    joint, above = (_wilson(share, count, width)[0] for width in (chance.joint, chance.joint_one_sided))
    return Interval(share, *ends, joint, above)


def r2_interval(measured: Estimate, site: int, chance: Chance) -> Interval:
    """The interval of a normal distribution of log(1 - R²).

    Few large errors decide about its variance, which so is often found too small: it is at least that of chance.
    """
    score = float(measured.score)
    deviation = max(chance.factors[site] * float(measured.within), chance.variances[site]) ** 0.5
    widths = np.array([ENDS, -ENDS, chance.joint, chance.joint_one_sided])
    return Interval(score, *(1 - (1 - score) * np.exp(widths * deviation)).tolist())


def wilson(share: float, count: float, shares: int = 1) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` rows, jointly for so many shares (Bonferroni).

    >>> [round(end, 3) for end in wilson(0.8, 10)]
    [0.49, 0.943]
    """
    return _wilson(share, count, NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / shares))


def _wilson(share: float, count: float, width: float) -> tuple[float, float]:
    """The ends this many standard deviations away."""
    square = width**2 / count
    middle = (share + square / 2) / (1 + square)
    half = width / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
