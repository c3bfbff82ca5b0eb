"""Intervals: how uncertain a cross-validated score is, and whether chance explains it.

The predictions of cross-validation are not independent: two rows of different folds
each helped to predict the other, so they tend to be right together. By how much that
adds to the variance depends on the states, and is measured: the labels are permuted,
the whole cross-validation is done again (`permutations`), and the variance of the score
over permutations is divided by the one that independent rows would have. For an
accuracy that factor is mostly near 1.6. It is measured with the intercept left out:
with it, a probe of uninformative states predicts the larger class nearly always, so
that its score hardly varies, while the score of a probe of informative states does.

Permutations keep the sizes of the classes. If the labels were sampled, these sizes are
random too. Every fold has the same share of each class, so a probe that leans to the
class that happens to be larger is right more often here than on fresh rows. So labels
are also drawn anew, sizes included, and the error of the score that this brings is
measured.

The variance of an R² depends on how much can be read. So targets are made that hold a
rising share of signal, and the interval holds every true value that a test with its own
variance would not reject, as Wilson's does for a share. The states are the same in all
of these, so the variance is at least that of the jackknife (`jackknife`).

Permutations also tell what the largest score of all sites comes to by chance (the
max-statistic of Westfall and Young): the p-values and the interval of the best site are
corrected by it. `make calibrate` measures all of this.
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
# Standard deviations to either end of an interval.
ENDS = NormalDist().inv_cdf((1 + LEVEL) / 2)
FEWEST = 20  # groups: with fewer, intervals were not calibrated
# Values of log(1 - R²) among which those that an interval holds are looked for.
TRIED = 4_000
TINY = torch.finfo(torch.float64).tiny


class Estimate(NamedTuple):
    """Accuracies, one for each labelling, and their variance if rows were independent.

    The variance has two parts. `within` is that among rows of one class. `between`
    comes from how many rows of each class were drawn, where classes are predicted
    unequally well; permutations leave these numbers as they are.
    """

    score: Tensor
    within: Tensor
    between: Tensor


class Redrawn(NamedTuple):
    """As `Estimate`, where classes have drawn sizes; `fresh` is the score on fresh rows
    of the true shares.
    """

    score: Tensor
    fresh: Tensor
    within: Tensor
    between: Tensor


class Explained(NamedTuple):
    """R², one for each labelling.

    `logarithm` is log(1 - R²), less skewed than R²; it allows for the mean of the
    targets being that of the sample, so that their variance is found too small.
    `influence` `[labelling, row]` is what each row adds to it.
    """

    score: Tensor
    logarithm: Tensor
    influence: Tensor


class Interval(NamedTuple):
    """A score, the ends of its 95% interval, and the lower end that holds for the best
    of several scores too.

    A score is called above chance if its p-value is small and `above` is above chance.
    For an accuracy `above` is `low`. For an R² it is `joint_low` by the deviation of
    planted numbers alone: with that, few sites are called above chance that are not
    (`make calibrate`), and with that of the jackknife hardly any that are.
    """

    score: float
    low: float
    high: float
    joint_low: float
    above: float


class Chance(NamedTuple):
    """What permuted labels tell: for each site a p-value, corrected for several sites.

    `joint` is how many standard deviations the largest of all scores stays below in
    97.5% of permutations.
    """

    p: list[float]
    joint: float


class Factors(NamedTuple):
    """By how much cross-validation adds to the variance within classes, and drawn class
    sizes to that between them.
    """

    within: float
    between: float


class Spread(NamedTuple):
    """For each strength of planted numbers: mean and deviation of log(1 - R²), and
    `within`, its variance if rows were independent."""

    logarithm: Floats
    deviation: Floats
    within: Floats


def accuracy(scores: Tensor, targets: Tensor, groups: Ints) -> Estimate:
    """The share of rows whose largest score is that of their class; from `[row, output,
    set]` and `[row, set]`.

    >>> scores, targets = torch.tensor([1.0, 1, -1, -1]).view(4, 1, 1), torch.tensor([[1], [0], [0], [0]])
    >>> float(accuracy(scores, targets, np.arange(4)).score)
    0.75
    """
    right, recalls = _recalls(scores, targets, int(targets.max()) + 1)
    share, by_class = right.mean(0), recalls.gather(0, targets)
    within, between = (
        _variance(right - by_class, groups, len(recalls)),
        _variance(by_class - share, groups, 1),
    )
    return Estimate(share, within, between)


def redrawn_accuracy(
    scores: Tensor, targets: Tensor, groups: Ints, shares: Tensor
) -> Redrawn:
    """The accuracy where classes have drawn sizes, and that on fresh rows, of which
    classes have these shares.

    >>> scores, targets = torch.ones(4, 1, 1), torch.tensor([[1], [1], [1], [0]])
    >>> [float(part) for part in redrawn_accuracy(scores, targets, np.arange(4), torch.tensor([0.5, 0.5]))[:2]]
    [0.75, 0.5]
    """
    _, recalls = _recalls(scores, targets, len(shares))
    score, *variances = accuracy(scores, targets, groups)
    return Redrawn(score, shares.to(recalls) @ recalls, *variances)


def _recalls(scores: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Which rows are right `[row, set]`, and the share of them by class `[class, set]`;
    0 where a class has no row.
    """
    chosen = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
    right = (chosen == targets).double()
    members = [targets == one for one in range(classes)]
    return right, torch.stack(
        [(right * own).sum(0) / own.sum(0).clamp_min(1) for own in members]
    )


def r2(scores: Tensor, targets: Tensor, groups: Ints) -> Explained:
    """1 - the squared errors of all rows / those of their mean, as scikit-learn's
    `r2_score`.
    """
    away = (targets - targets.mean(0)).double()
    errors, spread = (scores[:, 0] - targets).double().square(), away.square()
    error, variance = errors.mean(0).clamp_min(TINY), spread.mean(0)
    # The mean of the sample is nearer to its targets than the true one.
    fresh = variance + _variance(away, groups, 1)
    influence = errors / error - spread / variance
    return Explained(1 - errors.mean(0) / variance, (error / fresh).log(), influence.T)


def _variance(residuals: Tensor, groups: Ints, fitted: int) -> Tensor:
    """The variance of the mean of residuals `[row, set]` when groups of rows are drawn.

    `fitted` is how many means were subtracted from them. A mean follows its large
    groups, so what it takes from the variance depends on the effective number of
    groups.
    """
    number, effective = int(groups.max()) + 1, effective_number(groups)
    sums = torch.zeros(
        number, residuals.shape[1], dtype=torch.float64, device=residuals.device
    )
    sums.index_add_(0, torch.from_numpy(groups).to(sums.device), residuals)
    return (
        sums.square().sum(0)
        / len(residuals) ** 2
        * (effective / max(1.0, effective - fitted))
    )


def effective_number(groups: Ints) -> float:
    """How many groups of equal size would make the mean of their rows vary as much
    (Kish).

    >>> effective_number(np.array([0, 1, 2])), effective_number(np.array([0, 0, 0, 1]))
    (3.0, 1.6)
    """
    sizes = np.bincount(groups)
    return float(sizes.sum() ** 2 / np.square(sizes).sum())


def variance_factor(folds: int) -> float:
    """The factor by which Nadeau and Bengio (2003) correct the variance of a score
    cross-validated in so many folds.

    >>> variance_factor(5)
    2.25
    """
    return 1 + folds / (folds - 1)


def chance(scores: Tensor) -> Chance:
    """What the scores `[site, labelling]` under labellings, the true one first, tell
    about those of the true one.

    A p-value is the share of labellings under which the largest score of all sites,
    each standardised over labellings, is as large. So for labels that mean nothing the
    chance that any site gets 0.05 or less is at most 0.05, however many sites there are
    and however they depend on one another.

    >>> chance(torch.tensor([[0.9, 0.4, 0.5, 0.6], [0.5, 0.6, 0.4, 0.5]])).p
    [0.25, 0.75]
    """
    scores = scores.double()
    deviation = scores.std(1, keepdim=True, correction=0)
    away = (scores - scores.mean(1, keepdim=True)) / deviation.clamp_min(1e-9)
    largest = away.amax(0)
    p = [float((largest >= true - 1e-9).double().mean()) for true in away[:, 0]]
    return Chance(p, max(ENDS, float(torch.quantile(largest, (1 + LEVEL) / 2))))


def factors(
    scores: Tensor, within: Tensor, redrawn: Redrawn | None = None, least: float = 1.0
) -> Factors:
    """From scores of permuted labels without intercepts, and their variance within
    classes if rows were independent.

    That within classes is at least `least`. That between them is at least 1; it is 1
    without labellings of drawn sizes.

    >>> round(factors(torch.tensor([0.4, 0.5, 0.6]), torch.full((3,), 0.005)).within, 3)
    2.0
    """
    expected = float(within.double().mean())
    factor = (
        max(least, float(scores.double().var()) / expected) if expected > 0 else least
    )
    return Factors(factor, 1.0 if redrawn is None else _size_factor(redrawn, factor))


def _size_factor(redrawn: Redrawn, factor: float) -> float:
    """By how much drawn class sizes add to the squared error of a score more than
    `between` says, at least 1.

    It is the error about what fresh rows give, so it holds the bias of folds that keep
    the shares of the classes.
    """
    error = float((redrawn.score - redrawn.fresh.mean()).square().mean())
    between = float(redrawn.between.mean())
    return (
        max(1.0, (error - factor * float(redrawn.within.mean())) / between)
        if between > 0
        else 1.0
    )


def accuracy_interval(
    measured: Estimate, rows: int, groups: Ints, factors: Factors, chance: Chance
) -> Interval:
    """Wilson's interval, which is honest at 0 and 1 too, of as many independent rows as
    would have that variance.

    Rows of one group that are right and wrong together count for fewer, but for no
    fewer than the effective number of groups, before the factors are applied.
    """
    share, within, between = (float(part) for part in measured)
    variance, number = within + between, effective_number(groups)
    widened = factors.within * within + factors.between * between
    count = (
        min(float(rows), max(number, share * (1 - share) / variance))
        if variance > 0
        else number
    )
    count /= widened / variance if variance > 0 else factors.within
    low, high = wilson(share, count)
    # Both ends hold for the best of all sites, so the larger one does. Bonferroni's is
    # the larger where scores of permuted labels are skewed, as those of a probe that
    # leans to a class are.
    joint = max(
        _wilson(share, count, chance.joint)[0], wilson(share, count, len(chance.p))[0]
    )
    return Interval(share, low, high, joint, low)


def spread(
    planted: Explained, strengths: int, groups: Ints, least: float = 1.0
) -> Spread:
    """How log(1 - R²) varies over planted numbers, equally many labellings of each
    strength.

    The states are the same in all labellings, so the part of a row's influence that
    comes from its state does not vary here. On fresh states it would: its variance is
    added.
    """
    logarithm = planted.logarithm.double().view(strengths, -1)
    influence = planted.influence.double().view(strengths, logarithm.shape[1], -1)
    within = _variance(planted.influence.T, groups, 1).view(strengths, -1).mean(1)
    of_mean = _variance(influence.mean(1).T, groups, 1)
    by_state = (of_mean - (within - of_mean) / (logarithm.shape[1] - 1)).clamp_min(0)
    variance = torch.maximum(logarithm.var(1) + by_state, least * within)
    return Spread(
        *(part.cpu().numpy() for part in (logarithm.mean(1), variance.sqrt(), within))
    )


def r2_interval(
    measured: Explained,
    groups: Ints,
    spread: Spread,
    chance: Chance,
    least: float = 0.0,
) -> Interval:
    """All true values that a test with their own deviation would not reject; log(1 -
    R²) is taken as normal.

    Where rows vary in their influence more than those of planted numbers do, the
    deviation is so much larger. It is at least `least`, that of the jackknife: planted
    numbers keep the states, and so vary too little.
    """
    score, found = float(measured.score), float(measured.logarithm)
    descending = np.minimum.accumulate(spread.logarithm)
    expected = float(np.interp(-found, -descending, spread.within))
    own = float(_variance(measured.influence.T, groups, 1))
    larger = max(1.0, own / expected) ** 0.5 if expected > 0 else 1.0
    deviation = max(least, larger * float(spread.deviation.max()))
    reach = max(chance.joint, ENDS) * deviation + 1e-9
    tried = np.linspace(found - reach, found + reach, TRIED)
    deviations = larger * np.interp(-tried, -descending, spread.deviation)

    def ends(width: float, least: float) -> tuple[float, float]:
        # A step more: never none.
        reached = width * np.maximum(least, deviations) + 2 * reach / TRIED
        likely = tried[np.abs(found - tried) <= reached]
        return min(score, float(1 - np.exp(likely.max()))), max(
            score, float(1 - np.exp(likely.min()))
        )

    return Interval(
        score,
        *ends(ENDS, least),
        ends(chance.joint, least)[0],
        ends(chance.joint, 0.0)[0],
    )


def wilson(share: float, count: float, shares: int = 1) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` rows, jointly for so many shares
    (Bonferroni).

    >>> [round(end, 3) for end in wilson(0.8, 10)]
    [0.49, 0.943]
    """
    return _wilson(share, count, NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / shares))


def _wilson(share: float, count: float, width: float) -> tuple[float, float]:
    """The ends this many standard deviations away."""
    square = width**2 / count
    middle = (share + square / 2) / (1 + square)
    half = (
        width
        / (1 + square)
        * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    )
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
