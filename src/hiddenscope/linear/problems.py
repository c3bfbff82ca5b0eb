"""Many linear fits of one set of states, and ridge regression.

Each problem has its own training rows, targets and penalty. The states are standardised
on the training rows of each problem, but never copied for that: the scale of a problem
is applied to its coefficients instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# A standard deviation below this share of the mean is the rounding of equal numbers.
EQUAL = 1e-14
# States have variance 1 over all rows. A channel with less than this on some rows
# counts as constant there: what is left is a model's rounding, and scaled by it a row
# that is held out would be thousands of deviations away.
CONSTANT = 1e-6


@dataclass(frozen=True, eq=False)
class Problems:
    """Fits of the same states, each with its own rows, targets and penalty.

    `train` flags and `targets` (class indices or values) are `[problem, row]`,
    `penalty` is `[problem]`. A problem minimises the summed losses of its rows plus
    half the penalty times the squared norm of its coefficients, which are those of
    states standardised on its training rows; the intercept is free. So the penalty is
    scikit-learn's `alpha` of a ridge regression, and 1 / `C` of a logistic one.
    """

    train: Tensor
    targets: Tensor
    penalty: Tensor

    def __len__(self) -> int:
        return len(self.penalty)

    @property
    def counts(self) -> Tensor:
        """Return the number of training rows of each problem."""
        return self.train.sum(1)

    @property
    def sets(self) -> tuple[Tensor, Tensor]:
        """Return the distinct sets of training rows, and the set of each problem."""
        sets, which = torch.unique(self.train, dim=0, return_inverse=True)
        return sets, which


class Fitted(NamedTuple):
    """Coefficients `[width, output, problem]` and intercepts `[output, problem]`.

    Where scores of tokens are pooled, `pooled` are those of all texts, and the `query`
    `[width, problem]` of attention has rows if it was learnt.
    """

    coef: Tensor
    intercept: Tensor
    converged: Tensor
    query: Tensor | None = None
    pooled: Tensor | None = None

    def scores(self, states: Tensor) -> Tensor:
        """Return `states @ coef + intercept`, `[row, output, problem]`."""
        if self.pooled is not None:
            return self.pooled
        width, outputs, problems = self.coef.shape
        products = states @ self.coef.reshape(width, -1).to(states)
        return products.view(len(states), outputs, problems) + self.intercept.to(states)


class Learner(NamedTuple):
    """A kind of regression.

    `fit` solves problems, `losses` returns the loss `[row, problem]` of scores, and
    `curvature` is a typical second derivative of that loss by a score.
    """

    fit: Callable[[Tensor, Problems], Fitted]
    losses: Callable[[Tensor, Tensor], Tensor]
    outputs: int
    curvature: float


def standardised(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return states with mean 0 and deviation 1 in every channel; mean and deviation.

    The states `[row, width]` come back in float32, or in float64 if they were. A
    channel that is the same in all rows becomes 0.

    >>> standardised(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))[0].tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """
    host = states.detach().cpu()
    if host.dtype != torch.float64:
        host = host.to(torch.float32)
    rows = host.numpy()
    rounded_mean = rows.mean(0, dtype=np.float64).astype(rows.dtype)
    # Centred twice: the first mean is rounded to the dtype of the rows, which matters
    # where deviations are small beside it.
    centred = rows - rounded_mean
    remainder = centred.mean(0, dtype=np.float64)
    centred -= remainder.astype(rows.dtype)
    deviation = np.sqrt(np.square(centred).mean(0, dtype=np.float64))
    mean = rounded_mean.astype(np.float64) + remainder
    constant = deviation <= EQUAL * np.abs(mean)
    centred[:, constant] = 0
    deviation[constant] = 1
    centred /= deviation.astype(rows.dtype)
    return (
        torch.from_numpy(centred),
        torch.from_numpy(mean),
        torch.from_numpy(deviation),
    )


def moments(states: Tensor, problems: Problems) -> tuple[Tensor, Tensor]:
    """Return mean and deviation `[width, problem]` over the training rows of each."""
    sets, which = problems.sets
    # In float64: an outlier that is held out leaves its channel almost no variance.
    wide = states.to(torch.float64, copy=True)
    weights = (sets / sets.sum(1, keepdim=True)).double()
    mean = (weights @ wide).T
    variance = (weights @ wide.square_()).T - mean.square()
    deviation = without_constants(variance).sqrt()
    return mean.to(states)[:, which], deviation.to(states)[:, which]


def without_constants(variance: Tensor) -> Tensor:
    """Replace the variance of constant channels by 1, which leaves them as they are."""
    return torch.where(variance <= CONSTANT, torch.ones_like(variance), variance)


def gram(states: Tensor) -> Tensor:
    """Return `states.T @ states`."""
    # By torch, though numpy computes only half of a symmetric product. Each library has
    # its own threads, which spin for a while after a product and hold up the threads of
    # the other: with both, everything around a product takes twice as long.
    return states.T @ states


def ridge() -> Learner:
    """Return ridge regression (half the squared error), in closed form and float64.

    Gram matrices are computed once: rows that are always trained on together, such as
    those of a fold, are summed together, and the matrix of a problem is a sum of such
    parts. With fewer rows than channels, the dual problem of the rows is solved.
    """

    def losses(scores: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (scores[:, 0] - targets).square()

    return Learner(_fit_ridge, losses, 1, 1.0)


def _fit_ridge(states: Tensor, problems: Problems) -> Fitted:
    """Solve all problems, those with the same training rows together."""
    wide = states.double()
    targets = problems.targets.double()
    coef = torch.empty(states.shape[1], len(problems), dtype=torch.float64)
    intercept = torch.empty(len(problems), dtype=torch.float64)
    sets, which = problems.sets
    is_tall = int(sets.sum(1).min()) >= wide.shape[1]
    grams = _grams(wide, sets)
    for number, rows in enumerate(sets):
        members = (which == number).nonzero()[:, 0]
        penalty = problems.penalty[members]
        # Rows that are not trained on count for nothing, and are not copied.
        count = int(rows.sum())
        mean = rows.double() @ wide / count
        level = targets[members] @ rows.double() / count
        goals = (targets[members] - level[:, None]) * rows
        if is_tall:
            products = next(grams).addr_(mean, mean, alpha=-count)
            # The penalty is on the coefficients of standardised states. Their squared
            # norm is that of plain coefficients times the variance, so the penalty is
            # scaled here, and not the states.
            scale = without_constants(products.diagonal() / count)
            solution = _solve(products, (goals @ wide).T, penalty, scale)
        else:
            # The dual problem, from the products between rows.
            trained = wide[rows]
            deviation = without_constants(trained.var(0, correction=0)).sqrt()
            scaled = (trained - mean) / deviation
            ones = torch.ones(count, dtype=torch.float64)
            row_weights = _solve(gram(scaled.T), goals[:, rows].T, penalty, ones)
            solution = scaled.T @ row_weights / deviation[:, None]
        coef[:, members] = solution
        intercept[members] = level - mean @ solution
    converged = torch.ones(len(problems), dtype=torch.bool)
    return Fitted(coef[:, None], intercept[None], converged)


def _grams(states: Tensor, sets: Tensor) -> Iterator[Tensor]:
    """Yield the Gram matrix of each set of training rows.

    It is that of all rows without those of the parts that are left out, where a part
    is the rows that belong to the same sets.
    """
    members, part_of = torch.unique(sets, dim=1, return_inverse=True)
    parts = [gram(states[part_of == part]) for part in range(members.shape[1])]
    whole = torch.stack(parts).sum(0)
    for inside in members:
        products = whole.clone()
        for part in (~inside).nonzero()[:, 0]:
            products -= parts[part]
        yield products


def _solve(inner: Tensor, right: Tensor, penalty: Tensor, scale: Tensor) -> Tensor:
    """Solve `(inner + penalty * diag(scale)) x = right`, column by column."""
    solution = torch.empty_like(right)
    for value in set(penalty.tolist()):
        columns = penalty == value
        penalised = inner.clone()
        penalised.diagonal().add_(value * scale)
        factor = torch.linalg.cholesky(penalised)
        solution[:, columns] = torch.cholesky_solve(right[:, columns], factor)
    return solution
