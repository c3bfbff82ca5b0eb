"""Jackknife standard deviation of a cross-validated R².

The jackknife (Tukey 1958) repeats an estimate without each sampled unit in turn. Here a
unit is a group of rows, and it is left out of both the test rows and the training rows
of every fold. Nothing is refitted: a ridge regression without some of its rows follows
from the fit with them in closed form, as in PRESS (Allen 1974). The penalty and the
standardisation of each fold stay fixed.
"""

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.crossvalidation import row_features
from hiddenscope.linear.problems import gram, without_constants
from hiddenscope.states.arrays import Ints

# Sums of squares below this share of the largest are rounding.
ROUNDING = 1e-9
TINY = torch.finfo(torch.float64).tiny


def jackknife_deviation(
    states: Tensor, targets: Tensor, folds: Ints, groups: Ints, penalty: Tensor
) -> float:
    """Return the jackknife standard deviation of log(1 - R²) over groups of rows.

    `states` are `[row, width]`, `targets` `[row]`, and `penalty` has one entry per
    fold. All rows of a group must be in one fold.

    >>> generator, rows = torch.Generator().manual_seed(0), np.arange(20)
    >>> states = torch.randn(20, 3, generator=generator)
    >>> targets = torch.randn(20, generator=generator)
    >>> round(jackknife_deviation(states, targets, rows % 5, rows, torch.ones(5)), 2)
    0.48
    """
    states, targets = states.double(), targets.double()
    group_of = torch.from_numpy(groups).to(states.device)
    group_count = int(groups.max()) + 1
    # The sum of squared test errors of the whole cross-validation without each group.
    errors = states.new_zeros(group_count)
    for fold in range(int(folds.max()) + 1):
        train = np.flatnonzero(folds != fold)
        test = np.flatnonzero(folds == fold)
        # Like `problems.ridge`, standardised on the training rows.
        mean = states[train].mean(0)
        variance = states[train].var(0, correction=0)
        scaled = row_features((states - mean) / without_constants(variance).sqrt())
        # The last column is that of the intercept, which has no penalty.
        features = torch.cat([scaled, torch.ones_like(scaled[:, :1])], 1)
        inner = gram(features[train])
        inner.diagonal()[:-1].add_(float(penalty[fold]))
        factor = torch.linalg.cholesky(inner)
        coef = torch.cholesky_solve(features[train].T @ targets[train, None], factor)
        residuals = targets - (features @ coef)[:, 0]
        squared = residuals[test].square()
        # A group of test rows takes its errors with it.
        errors += _without_each(squared, group_of[test], group_count)
        # Without a group of training rows that adds c to the coefficients, the
        # residuals r of the test rows X become r + X c: the sum of their squares grows
        # by 2 cᵀXᵀr + cᵀXᵀX c.
        trained_groups, changes = _coefficient_changes(
            features[train], residuals[train], factor, groups[train]
        )
        tested = features[test]
        linear = 2 * changes @ (tested.T @ residuals[test])
        quadratic = ((changes @ gram(tested)) * changes).sum(1)
        errors.index_add_(0, trained_groups, linear + quadratic)
    # The squared deviations of all targets but those of each group. Centred first: the
    # difference of the two sums below would cancel otherwise.
    centred = targets - targets.mean()
    powers = (torch.ones_like(centred), centred, centred.square())
    counts, sums, squares = (
        _without_each(power, group_of, group_count) for power in powers
    )
    spread = squares - sums.square() / counts.clamp_min(1)
    # Rounding may leave a sum of squares that should be zero below zero.
    errors = errors.clamp_min(max(TINY, ROUNDING * float(errors.max())))
    # Where all targets but those of one group are equal, there is no R² without that
    # group, and it is skipped.
    logarithm = (errors / spread)[spread > ROUNDING * spread.max()].log()
    away = logarithm - logarithm.mean()
    # (n - 1) / n times the sum of squared deviations (Tukey 1958).
    return float(((len(away) - 1) * away.square().mean()).sqrt())


def _without_each(values: Tensor, group_of: Tensor, group_count: int) -> Tensor:
    """Add up the values of all rows but those of each group."""
    sums = values.new_zeros(group_count).index_add_(0, group_of, values)
    return values.sum() - sums


def _coefficient_changes(
    features: Tensor, residuals: Tensor, factor: Tensor, group_of: Ints
) -> tuple[Tensor, Tensor]:
    """Return the groups trained on, and what each one's rows add to the coefficients.

    With A = XᵀX + penalty, features Z of the group and its residuals e, that is
    A⁻¹Zᵀ (I - Z A⁻¹Zᵀ)⁻¹ e (Sherman, Morrison and Woodbury 1950). For a single row
    z with leverage h = zᵀA⁻¹z it is A⁻¹z e / (1 - h). The leverage is below 1 if the
    penalty is positive and another group is trained on. `factor` is the Cholesky factor
    of A.
    """
    # The rows of X A⁻¹.
    solved = torch.cholesky_solve(features.T, factor).T
    trained_groups, sizes = np.unique(group_of, return_counts=True)
    if int(sizes.max()) == 1:
        leverage = (features * solved).sum(1)
        changes = solved * (residuals / (1 - leverage))[:, None]
        return torch.from_numpy(group_of).to(solved.device), changes
    by_group = []
    order = np.argsort(group_of, kind="stable")
    for rows in np.split(order, np.cumsum(sizes)[:-1]):
        remaining = -features[rows] @ solved[rows].T
        remaining.diagonal().add_(1)
        weights = torch.linalg.solve(remaining, residuals[rows])
        by_group.append(solved[rows].T @ weights)
    return torch.from_numpy(trained_groups).to(solved.device), torch.stack(by_group)
