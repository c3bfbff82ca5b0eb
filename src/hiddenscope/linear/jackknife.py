"""Jackknife standard deviation of a cross-validated R².

The jackknife (Tukey 1958) repeats an estimate without each sampled unit in turn. Here a
unit is a group of rows, and it is left out of both the test rows and the training rows
of every fold. Nothing is refitted: a ridge regression without some of its rows follows
from the fit with them in closed form, as in PRESS (Allen 1974). The penalty and the
standardisation of each fold stay fixed.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.problems import gram, without_constants
from hiddenscope.states.arrays import Ints

# Added to the diagonal of a Gram matrix of rows, as a share of its trace. Where rows
# are dependent, the matrix is singular and would have no Cholesky factor.
JITTER = 1e-11
# Sums of squares below this share of the largest are rounding.
ROUNDING = 1e-9
TINY = torch.finfo(torch.float64).tiny


class _Fit(NamedTuple):
    """The ridge regression of one fold.

    `features` `[row, feature]` end with a column of ones for the intercept. `factor` is
    the Cholesky factor of `XᵀX + penalty` over the training rows, and `residuals` are
    those of all rows, including the test rows.
    """

    features: Tensor
    factor: Tensor
    residuals: Tensor


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
    errors = torch.zeros(group_count, dtype=torch.float64, device=states.device)
    for fold in range(int(folds.max()) + 1):
        train = np.flatnonzero(folds != fold)
        test = np.flatnonzero(folds == fold)
        fit = _fit(states, targets, train, float(penalty[fold]))
        residuals = fit.residuals[test]
        squared = residuals.square()
        # A group of test rows takes its errors with it.
        errors += squared.sum() - _sum_by_group(squared, group_of[test], group_count)
        # Without a group of training rows that adds c to the coefficients, the
        # residuals r of the test rows X become r + X c: the sum of their squares grows
        # by 2 cᵀXᵀr + cᵀXᵀX c.
        trained_groups, changes = _coefficient_changes(fit, train, groups)
        tested = fit.features[test]
        linear = 2 * changes @ (tested.T @ residuals)
        quadratic = ((changes @ gram(tested)) * changes).sum(1)
        errors.index_add_(0, trained_groups, linear + quadratic)
    spread = _squared_deviations_without(targets, group_of, group_count)
    # Rounding may leave a sum of squares that should be zero below zero.
    errors = errors.clamp_min(max(TINY, ROUNDING * float(errors.max())))
    # Where all targets but those of one group are equal, there is no R² without that
    # group, and it is skipped.
    logarithm = (errors / spread)[spread > ROUNDING * spread.max()].log()
    away = logarithm - logarithm.mean()
    # (n - 1) / n times the sum of squared deviations (Tukey 1958).
    return float(((len(away) - 1) * away.square().mean()).sqrt())


def _sum_by_group(values: Tensor, group_of: Tensor, group_count: int) -> Tensor:
    """Add up the values of the rows of each group."""
    sums = torch.zeros(group_count, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, group_of, values)


def _squared_deviations_without(
    targets: Tensor, group_of: Tensor, group_count: int
) -> Tensor:
    """Return the squared deviations of all targets but those of each group, summed."""
    # Centred first: the difference of the two sums below would cancel otherwise.
    centred = targets - targets.mean()

    def without(values: Tensor) -> Tensor:
        return values.sum() - _sum_by_group(values, group_of, group_count)

    counts = without(torch.ones_like(centred))
    sums = without(centred)
    squares = without(centred.square())
    return squares - sums.square() / counts.clamp_min(1)


def _fit(states: Tensor, targets: Tensor, train: Ints, penalty: float) -> _Fit:
    """Fit one fold like `problems.ridge`, standardised on its training rows."""
    mean = states[train].mean(0)
    variance = states[train].var(0, correction=0)
    deviation = without_constants(variance).sqrt()
    features = _in_row_space((states - mean) / deviation)
    features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    inner = gram(features[train])
    # The intercept, which is last, has no penalty.
    inner.diagonal()[:-1].add_(penalty)
    factor = torch.linalg.cholesky(inner)
    coef = torch.cholesky_solve(features[train].T @ targets[train, None], factor)
    return _Fit(features, factor, targets - (features @ coef)[:, 0])


def _in_row_space(states: Tensor) -> Tensor:
    """Return features with the same products between rows, at most one per row.

    A ridge regression depends on the states through these products alone, and wide
    states would make its matrices needlessly large. Any square root of the matrix of
    products will do: here its Cholesky factor.
    """
    rows, width = states.shape
    if width <= rows:
        return states
    products = gram(states.T)
    # The trace is 0 where all states are equal, and the diagonal must be positive even
    # there. TINY**0.5 is the smallest number whose square is a normal number.
    products.diagonal().add_(JITTER * products.trace() + TINY**0.5)
    factor: Tensor = torch.linalg.cholesky(products)
    return factor


def _coefficient_changes(fit: _Fit, train: Ints, groups: Ints) -> tuple[Tensor, Tensor]:
    """Return the groups trained on, and what each one's rows add to the coefficients.

    With A = XᵀX + penalty, features Z of the group and its residuals e, that is
    A⁻¹Zᵀ (I - Z A⁻¹Zᵀ)⁻¹ e (Sherman, Morrison and Woodbury 1950). For a single row
    z with leverage h = zᵀA⁻¹z it is A⁻¹z e / (1 - h). The leverage is below 1 if the
    penalty is positive and another group is trained on.
    """
    features = fit.features[train]
    residuals = fit.residuals[train]
    group_of = groups[train]
    # The rows of X A⁻¹.
    solved = torch.cholesky_solve(features.T, fit.factor).T
    trained_groups, sizes = np.unique(group_of, return_counts=True)
    if int(sizes.max()) == 1:
        leverage = (features * solved).sum(1)
        changes = solved * (residuals / (1 - leverage))[:, None]
        return torch.from_numpy(group_of).to(solved.device), changes
    by_group = []
    order = np.argsort(group_of, kind="stable")
    for rows in np.split(order, np.cumsum(sizes)[:-1]):
        identity = torch.eye(len(rows), dtype=features.dtype, device=features.device)
        remaining = identity - features[rows] @ solved[rows].T
        weights = torch.linalg.solve(remaining, residuals[rows])
        by_group.append(solved[rows].T @ weights)
    return torch.from_numpy(trained_groups).to(solved.device), torch.stack(by_group)
