"""Permutations: the whole cross-validation under many labellings of the same states, to
see what chance brings about.

Hundreds of logistic regressions a site would cost far more than the probe. So a
labelling is fitted by the first step of Newton's method, from coefficients 0 and the
curvature that the learner names: a ridge regression, of which one Cholesky factor
serves all labellings. Labels that mean nothing are best predicted with a large penalty,
and then the first step is nearly the last. Ridge regressions themselves are fitted
exactly. The penalty is chosen anew for every labelling, on inner folds. The states are
standardised once, over all rows: labels have no part in that.

`measures.permutations` permutes labels; `redrawn` draws the sizes of the classes too.
Numbers that follow what a probe predicts, more and more, are made by `planted` from
`resampled` ones.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.linear.crossvalidation import MIDDLE, PENALTIES
from hiddenscope.linear.problems import Learner, gram

Ints: TypeAlias = NDArray[np.int64]
Measure: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""From scores, the intercepts in them `[row, output, labelling]`, and targets `[row,
labelling]`: one or more numbers for each labelling."""

RANK = 1e-12  # a squared singular value that is this share of the largest is rounding
AT_ONCE = 1 << 23  # scores that are held together
RARE = 1e-6  # the least share of a class that its intercept supposes
# Correlations of planted numbers with what a probe predicts.
STRENGTHS = (
    0.0,
    0.25,
    0.45,
    0.65,
    0.85,
    0.98,
)


def redrawn(
    classes: Ints, count: int, seed: int, groups: Ints, folds: Ints
) -> Tensor | None:
    """Labels that mean nothing, so many times, `[count, row]`, in which the sizes of
    the classes are drawn as well.

    Rows of a group have one label, and every class is spread evenly over the folds, as
    `assign_folds` does it. Where rows of a group have several labels, as tokens of a
    text do, there is none.

    >>> by_fold = redrawn(np.arange(100) % 2, 9, 0, np.arange(100), np.arange(100) // 20).view(9, 5, 20).sum(2)
    >>> len(by_fold.sum(1).unique()) > 1, bool((by_fold.amax(1) - by_fold.amin(1) <= 1).all())
    (True, True)
    """
    generator, (_, first) = (
        np.random.default_rng(seed),
        np.unique(groups, return_index=True),
    )
    own, fold_of = classes[first], folds[first]
    if (own[groups] != classes).any():
        return None
    sizes = np.bincount(fold_of)
    before = np.cumsum(sizes) - sizes
    drawn = np.empty((count, len(own)), dtype=np.int64)
    for labels in drawn:
        # Fold by fold, in each at random.
        order = np.lexsort((generator.random(len(own)), fold_of))
        rank = np.arange(len(own)) - before[fold_of[order]]
        place = (rank + generator.random(len(sizes))[fold_of[order]]) / sizes[
            fold_of[order]
        ]
        counts = generator.multinomial(len(own), np.bincount(own) / len(own))
        # One fold after the other.
        labels[order[np.argsort(place)]] = np.repeat(np.arange(len(counts)), counts)
    return torch.from_numpy(drawn[:, groups])


def resampled(numbers: Tensor, count: int, seed: int, groups: Ints) -> Tensor:
    """Numbers that mean nothing, so many times, `[count, row]`: those of groups that
    are drawn with replacement.

    Where all rows of each group have one number, a group gets that of another.
    Otherwise the numbers of the drawn groups are laid over the rows one group after the
    other. Numbers that come out all equal are drawn again: they have no variance to
    explain.

    >>> resampled(torch.tensor([1.0, 1.0, 2.0, 2.0]), 50, 0, np.array([0, 0, 1, 1])).unique(dim=0).tolist()
    [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 1.0, 1.0]]
    """
    generator, order = np.random.default_rng(seed), np.argsort(groups, kind="stable")
    own = numbers.numpy()[order]
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    uniform = bool((np.repeat(own[starts], sizes) == own).all())
    drawn = np.empty((count, len(own)))
    for labels in drawn:
        labels[:] = 0
        while not np.ptp(labels):
            chosen = generator.integers(len(sizes), size=len(sizes))
            if uniform:
                labels[:] = own[starts][chosen][groups]
            else:
                rows = np.concatenate(
                    [np.arange(starts[k], starts[k] + sizes[k]) for k in chosen]
                )
                labels[order] = np.resize(own[rows], len(own))
    return torch.from_numpy(drawn)


def planted(noise: Tensor, predicted: Tensor) -> Tensor:
    """Numbers `[..., labelling, row]` that go with `predicted` `[..., row]` as
    `STRENGTHS` says, equally many each.

    >>> planted(torch.ones(6, 2), torch.tensor([3.0, 5.0]))[:2].tolist()
    [[1.0, 1.0], [0.7182458639144897, 1.2182458639144897]]
    """
    centred = predicted - predicted.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    signal = centred / torch.where(deviation > 0, deviation, 1.0)
    strength = (
        torch.tensor(STRENGTHS)
        .to(noise)
        .repeat_interleave(noise.shape[-2] // len(STRENGTHS))[:, None]
    )
    return strength * signal.unsqueeze(-2) + (1 - strength.square()).sqrt() * noise


def under_labellings(
    states: Tensor, labellings: Tensor, folds: Ints, learner: Learner, measure: Measure
) -> tuple[Tensor, ...]:
    """What `measure` says of the held-out scores of standardised states `[row, width]`,
    for labellings `[set, row]`.
    """
    by_fold = [
        torch.from_numpy(np.flatnonzero(folds == fold))
        for fold in range(int(folds.max()) + 1)
    ]
    features = _features(states)
    parts = [features[rows] for rows in by_fold]
    grams = torch.stack([gram(part) for part in parts])
    measured = []
    for some in torch.split(
        labellings, max(1, AT_ONCE // (labellings.shape[1] * learner.outputs))
    ):
        problem = _Labelled.over(
            parts, grams, [some[:, rows].T for rows in by_fold], learner
        )
        scores = torch.empty(
            len(states), learner.outputs, len(some), dtype=torch.float64
        )
        intercepts = torch.empty_like(scores)
        for fold, (rows, held_out) in enumerate(
            zip(by_fold, _held_out(problem), strict=True)
        ):
            scores[rows], intercepts[rows] = held_out, problem.intercept((fold,))
        measured.append(measure(scores, intercepts, some.T))
    return tuple(torch.cat(numbers) for numbers in zip(*measured, strict=True))


def _features(states: Tensor) -> Tensor:
    """The states in no more dimensions than there are rows, with the same products
    between rows.
    """
    rows, width = states.shape
    wide = states.double()
    if width <= rows:
        return wide
    strength, left = torch.linalg.eigh(gram(wide.T))
    kept = strength > strength[-1] * RANK
    kept[-1] = True
    features: Tensor = left[:, kept] * strength[kept].clamp_min(0).sqrt()
    return features


class _Labelled(NamedTuple):
    """For each fold: its rows, their Gram matrix, their targets `[row, labelling]`, and
    sums over them.

    The goal of an output is the target, or 1 for the own class; `levels` are sums of
    goals `[output, labelling]`, and `products` those of rows times goals.
    """

    parts: Sequence[Tensor]
    grams: Tensor
    targets: Sequence[Tensor]
    levels: Tensor
    products: Tensor
    learner: Learner

    @classmethod
    def over(
        cls,
        parts: Sequence[Tensor],
        grams: Tensor,
        targets: Sequence[Tensor],
        learner: Learner,
    ) -> "_Labelled":
        if learner.outputs == 1:
            goals = [some[:, None].double() for some in targets]
        else:
            goals = [
                (some[:, None] == torch.arange(learner.outputs)[:, None]).double()
                for some in targets
            ]
        products = torch.stack(
            [part.T @ goal.flatten(1) for part, goal in zip(parts, goals, strict=True)]
        )
        return cls(
            parts,
            grams,
            targets,
            torch.stack([goal.sum(0) for goal in goals]),
            products,
            learner,
        )

    def scores(self, left_out: Sequence[int]) -> Iterator[list[Tensor]]:
        """Under each penalty, the scores of the rows of the folds that are left out,
        predicted from the others.
        """
        inside, count = self._inside(left_out)
        mean = torch.stack([self.parts[fold].sum(0) for fold in inside]).sum(0) / count
        level = self.levels[inside].sum(0) / count
        inner = self.learner.curvature * self.grams[inside].sum(0).addr(
            mean, mean, alpha=-count
        )
        goal = self.products[inside].sum(0) - count * torch.outer(mean, level.flatten())
        start, away = (
            self.intercept(left_out),
            [self.parts[fold] - mean for fold in left_out],
        )
        for penalty in PENALTIES:
            shifted = inner.clone()
            shifted.diagonal().add_(penalty)
            coef = torch.cholesky_solve(goal, torch.linalg.cholesky(shifted))
            yield [(rows @ coef).view(-1, *level.shape) + start for rows in away]

    def intercept(self, left_out: Sequence[int]) -> Tensor:
        """The scores that fit the mean of the targets, or the shares of the classes,
        where states say nothing.
        """
        inside, count = self._inside(left_out)
        level = self.levels[inside].sum(0) / count
        if self.targets[0].is_floating_point():
            return level
        shares = level.clamp(RARE, 1 - RARE)
        return shares.logit() if self.learner.outputs == 1 else shares.log()

    def _inside(self, left_out: Sequence[int]) -> tuple[list[int], int]:
        """The folds that are trained on, and the number of their rows."""
        inside = [fold for fold in range(len(self.parts)) if fold not in left_out]
        return inside, sum(len(self.parts[fold]) for fold in inside)


def _held_out(problem: _Labelled) -> Iterator[Tensor]:
    """Of each fold, the scores of its rows under every labelling, each with the penalty
    that inner folds choose.
    """
    folds = len(problem.parts)
    losses = torch.zeros(
        folds, len(PENALTIES), problem.targets[0].shape[1], dtype=torch.float64
    )
    for pair in combinations(range(folds), 2) if folds > 2 else ():
        for number, both in enumerate(problem.scores(pair)):
            for tested, left_out, scores in zip(pair, pair[::-1], both, strict=True):
                losses[left_out, number] += problem.learner.losses(
                    scores, problem.targets[tested]
                ).sum(0)
    # Of two with equal loss, the larger.
    chosen = len(PENALTIES) - 1 - losses.flip(1).argmin(1)
    if folds == 2:
        chosen = torch.full_like(chosen, PENALTIES.index(MIDDLE))
    for fold in range(folds):
        scores = torch.stack([alone for (alone,) in problem.scores((fold,))])
        yield scores.gather(0, chosen[fold].expand(1, *scores.shape[1:]))[0]
