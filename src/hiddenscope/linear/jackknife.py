"""Jackknife: by how much log(1 - R²) of a cross-validation varies when texts are left
out, one after the other.

A text, a group of rows, is left out of the rows that are tested and of the training
rows of every fold. All ridge regressions without it follow from the one with it in
closed form, so that nothing is fitted again. The penalty and the standardisation of
each fold stay as they are.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.linear.problems import CONSTANT, gram

Ints: TypeAlias = NDArray[np.int64]

# Of the trace of a matrix of products between rows: so little is added that its factor
# exists.
JITTER = 1e-11
LEAST = 1e-9  # of the largest sum of squares without a group: less is rounding
TINY = torch.finfo(torch.float64).tiny


class _Fit(NamedTuple):
    """The ridge regression of one fold: `features` `[row, feature]` with a last one of
    1, the Cholesky factor of `XᵀX + penalty`, and the residuals of all rows, trained on
    or not."""

    features: Tensor
    factor: Tensor
    residuals: Tensor


def jackknife_deviation(
    states: Tensor, targets: Tensor, folds: Ints, groups: Ints, penalty: Tensor
) -> float:
    """The standard deviation of log(1 - R²) of held-out predictions, by the jackknife
    over groups of rows.

    `states` `[row, width]`, `targets` `[row]`, and the `penalty` of each fold. All rows
    of a group are in one fold.

    >>> generator, rows = torch.Generator().manual_seed(0), np.arange(20)
    >>> states, targets = torch.randn(20, 3, generator=generator), torch.randn(20, generator=generator)
    >>> round(jackknife_deviation(states, targets, rows % 5, rows, torch.ones(5)), 2)
    0.48
    """
    wide, goals, group_of = (
        states.double(),
        targets.double(),
        torch.from_numpy(groups).to(states.device),
    )
    number = int(groups.max()) + 1
    errors = torch.zeros(number, dtype=torch.float64, device=wide.device)
    for fold in range(int(folds.max()) + 1):
        train, test = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        fit = _fit(wide, goals, train, float(penalty[fold]))
        tested, left = fit.features[test], fit.residuals[test]
        errors += left.square().sum() - _by_group(left.square(), group_of[test], number)
        inside, changes = _changes(fit, train, groups)
        added = 2 * changes @ (tested.T @ left) + (
            (changes @ gram(tested)) * changes
        ).sum(1)
        errors.index_add_(0, inside, added)
    return _deviation(errors, _spread_without(goals, group_of, number))


def _deviation(errors: Tensor, spread: Tensor) -> float:
    """From the sums of squared errors and of squared targets without each group.

    Where all targets but those of one group are equal there is no R² without it, and it
    is passed over.
    """
    errors = errors.clamp_min(max(TINY, LEAST * float(errors.max())))
    logarithm = (errors / spread)[spread > LEAST * spread.max()].log()
    away = logarithm - logarithm.mean()
    return float(((len(away) - 1) * away.square().mean()).sqrt())


def _by_group(values: Tensor, group_of: Tensor, number: int) -> Tensor:
    """The sum of the values of the rows of each group."""
    return torch.zeros(number, dtype=torch.float64, device=values.device).index_add_(
        0, group_of, values
    )


def _spread_without(targets: Tensor, group_of: Tensor, number: int) -> Tensor:
    """The sum of squares about their mean of all targets but those of each group."""
    centred = targets - targets.mean()
    counts, sums, squares = (
        part.sum() - _by_group(part, group_of, number)
        for part in (torch.ones_like(centred), centred, centred.square())
    )
    return squares - sums.square() / counts.clamp_min(1)


def _fit(states: Tensor, targets: Tensor, train: Ints, penalty: float) -> _Fit:
    """As `problems.ridge` fits it, standardised on the training rows."""
    mean, variance = states[train].mean(0), states[train].var(0, correction=0)
    features = _in_row_space(
        (states - mean) / torch.where(variance <= CONSTANT, 1.0, variance).sqrt()
    )
    features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    inner = gram(features[train])
    inner.diagonal()[:-1].add_(penalty)  # the intercept is free
    factor = torch.linalg.cholesky(inner)
    coef = torch.cholesky_solve(features[train].T @ targets[train, None], factor)
    return _Fit(features, factor, targets - (features @ coef)[:, 0])


def _in_row_space(states: Tensor) -> Tensor:
    """The states in no more dimensions than there are rows, with the same products
    between rows.
    """
    rows, width = states.shape
    if width <= rows:
        return states
    products = gram(states.T)
    products.diagonal().add_(JITTER * products.trace() + TINY**0.5)
    factor: Tensor = torch.linalg.cholesky(products)
    return factor


def _changes(fit: _Fit, train: Ints, groups: Ints) -> tuple[Tensor, Tensor]:
    """The groups that are trained on, and for each how much its rows add to the
    coefficients.

    For one row with features z, residual e and leverage h that is `z e / (1 - h)`,
    solved.
    """
    features, residuals, own = fit.features[train], fit.residuals[train], groups[train]
    solved = torch.cholesky_solve(features.T, fit.factor).T
    inside, sizes = np.unique(own, return_counts=True)
    if int(sizes.max()) == 1:
        leverage = (features * solved).sum(1)
        return (
            torch.from_numpy(own).to(solved.device),
            solved * (residuals / (1 - leverage))[:, None],
        )
    order = np.argsort(own, kind="stable")
    changes = [
        _change(features[rows], solved[rows], residuals[rows])
        for rows in np.split(order, np.cumsum(sizes)[:-1])
    ]
    return torch.from_numpy(inside).to(solved.device), torch.stack(changes)


def _change(features: Tensor, solved: Tensor, residuals: Tensor) -> Tensor:
    """How much the rows of a group add to the coefficients."""
    kept = (
        torch.eye(len(features), dtype=features.dtype, device=features.device)
        - features @ solved.T
    )
    change: Tensor = solved.T @ torch.linalg.solve(kept, residuals)
    return change
