"""Nested cross-validation under many labellings of the same states.

It shows what scores chance produces: labellings are permuted or drawn (`bootstrap`),
and the whole cross-validation is repeated for each, with a penalty of its own.

Hundreds of logistic regressions per site would cost far more than the probe itself. So
each labelling is fitted by the first step of Newton's method from zero, with the
curvature that the learner names. That step is a ridge regression, and one Cholesky
factor serves all labellings. Meaningless labels are best predicted with a large
penalty, and then the first step is nearly the last. Ridge regressions themselves are
fitted exactly. The states are standardised once, over all rows: labels play no part in
that.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.crossvalidation import DEFAULT_PENALTY, PENALTIES
from hiddenscope.linear.problems import Learner, gram
from hiddenscope.states.arrays import Ints

ScoreMeasure: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Reduce scores to one or more tensors whose first dimension is the labelling.

It takes scores and the intercepts in them `[row, output, labelling]`, and targets
`[row, labelling]`.
"""

# An eigenvalue below this share of the largest is rounding.
RANK = 1e-12
# Scores that are held in memory together: 64 MiB of float64.
AT_ONCE = 1 << 23
# A class that is absent from the training rows would have an infinite intercept, so its
# share is taken as this.
SMALLEST_SHARE = 1e-6


def cross_validate_labellings(
    states: Tensor,
    labellings: Tensor,
    folds: Ints,
    learner: Learner,
    measure: ScoreMeasure,
) -> tuple[Tensor, ...]:
    """Measure the held-out scores of standardised states `[row, width]`.

    `labellings` are `[labelling, row]`. They are scored in batches of limited size, and
    `measure` reduces each batch before the next one is scored.
    """
    fold_rows = []
    for fold in range(int(folds.max()) + 1):
        fold_rows.append(torch.from_numpy(np.flatnonzero(folds == fold)))
    features = _features(states)
    parts = [features[rows] for rows in fold_rows]
    grams = torch.stack([gram(part) for part in parts])
    batch_size = max(1, AT_ONCE // (labellings.shape[1] * learner.outputs))
    measured = []
    for batch in torch.split(labellings, batch_size):
        targets = [batch[:, rows].T for rows in fold_rows]
        sums = _FoldSums.of(parts, grams, targets, learner)
        scores = torch.empty(
            len(states), learner.outputs, len(batch), dtype=torch.float64
        )
        intercepts = torch.empty_like(scores)
        penalties = _select_penalties(sums)
        for fold, rows in enumerate(fold_rows):
            # Scores of one fold under each penalty; every labelling takes its own.
            by_penalty = torch.stack([held_out for (held_out,) in sums.scores((fold,))])
            selected = penalties[fold].expand(1, *by_penalty.shape[1:])
            scores[rows] = by_penalty.gather(0, selected)[0]
            intercepts[rows] = sums.intercept((fold,))
        measured.append(measure(scores, intercepts, batch.T))
    return tuple(torch.cat(batches) for batches in zip(*measured, strict=True))


def _features(states: Tensor) -> Tensor:
    """Return features with the same products between rows, at most one per row.

    A ridge regression depends on the states through these products alone, and wide
    states would make its matrices needlessly large. Any square root of the matrix of
    products will do: here that by eigenvectors, without those that are rounding.
    """
    rows, width = states.shape
    wide = states.double()
    if width <= rows:
        return wide
    eigenvalues, vectors = torch.linalg.eigh(gram(wide.T))
    significant = eigenvalues > eigenvalues[-1] * RANK
    # At least one, even where all states are equal.
    significant[-1] = True
    deviations = eigenvalues[significant].clamp_min(0).sqrt()
    features: Tensor = vectors[:, significant] * deviations
    return features


class _FoldSums(NamedTuple):
    """Sums over the rows of each fold, from which any set of folds can be fitted.

    `parts` are the features of each fold, `grams` their Gram matrices, and `targets`
    `[row, labelling]` their labels. The goal of an output is the target itself, or for
    several outputs 1 where the row is of that class and 0 elsewhere. `goal_sums`
    `[fold, output, labelling]` are sums of goals, and `products` of features times
    goals.
    """

    parts: Sequence[Tensor]
    grams: Tensor
    targets: Sequence[Tensor]
    goal_sums: Tensor
    products: Tensor
    learner: Learner

    @classmethod
    def of(
        cls,
        parts: Sequence[Tensor],
        grams: Tensor,
        targets: Sequence[Tensor],
        learner: Learner,
    ) -> "_FoldSums":
        goal_sums = []
        products = []
        for part, labels in zip(parts, targets, strict=True):
            goals = labels[:, None]
            if learner.outputs > 1:
                goals = goals == torch.arange(learner.outputs)[:, None]
            goals = goals.double()
            goal_sums.append(goals.sum(0))
            products.append(part.T @ goals.flatten(1))
        return cls(
            parts,
            grams,
            targets,
            torch.stack(goal_sums),
            torch.stack(products),
            learner,
        )

    def scores(self, left_out: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield, for each penalty, the scores of every fold that is left out."""
        folds, count = self._training_folds(left_out)
        sums = torch.stack([self.parts[fold].sum(0) for fold in folds])
        mean = sums.sum(0) / count
        level = self.goal_sums[folds].sum(0) / count
        # Gram matrix and products of the centred training rows: the free intercept of
        # a ridge regression amounts to centring.
        centred_gram = self.grams[folds].sum(0).addr(mean, mean, alpha=-count)
        hessian = self.learner.curvature * centred_gram
        right = self.products[folds].sum(0)
        right = right - count * torch.outer(mean, level.flatten())
        intercept = self.intercept(left_out)
        centred = [self.parts[fold] - mean for fold in left_out]
        for penalty in PENALTIES:
            penalised = hessian.clone()
            penalised.diagonal().add_(penalty)
            coef = torch.cholesky_solve(right, torch.linalg.cholesky(penalised))
            yield [(rows @ coef).view(-1, *level.shape) + intercept for rows in centred]

    def intercept(self, left_out: Sequence[int]) -> Tensor:
        """Return the scores that fit the training targets if states say nothing."""
        folds, count = self._training_folds(left_out)
        level = self.goal_sums[folds].sum(0) / count
        if self.targets[0].is_floating_point():
            return level
        shares = level.clamp(SMALLEST_SHARE, 1 - SMALLEST_SHARE)
        if self.learner.outputs == 1:
            return shares.logit()
        return shares.log()

    def _training_folds(self, left_out: Sequence[int]) -> tuple[list[int], int]:
        """Return the folds that are trained on, and the number of their rows."""
        folds = [fold for fold in range(len(self.parts)) if fold not in left_out]
        return folds, sum(len(self.parts[fold]) for fold in folds)


def _select_penalties(sums: _FoldSums) -> Tensor:
    """Return the index `[fold, labelling]` of the penalty with the least inner loss."""
    folds = len(sums.parts)
    labellings = sums.targets[0].shape[1]
    if folds == 2:
        # With one fold left out and one tested, nothing remains to train on.
        return torch.full((folds, labellings), PENALTIES.index(DEFAULT_PENALTY))
    losses = torch.zeros(folds, len(PENALTIES), labellings, dtype=torch.float64)
    # A fit without folds a and b predicts b where a is left out, and a where b is.
    for pair in combinations(range(folds), 2):
        for number, both in enumerate(sums.scores(pair)):
            for tested, left_out, scores in zip(pair, pair[::-1], both, strict=True):
                row_losses = sums.learner.losses(scores, sums.targets[tested])
                losses[left_out, number] += row_losses.sum(0)
    # `argmin` takes the first of equal losses: the flip makes that the larger penalty.
    return len(PENALTIES) - 1 - losses.flip(1).argmin(1)
