"""Many linear fits of one set of states, and ridge regression.

Each problem has its own training rows, targets and penalty. The states are standardised
on the training rows of each problem, but never copied for that: the scale of a problem
is applied to its coefficients instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
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
        flags = np.packbits(self.train.numpy(), axis=1)
        _, first, which = np.unique(
            _as_scalars(flags), return_index=True, return_inverse=True
        )
        return self.train[torch.from_numpy(first)], torch.from_numpy(which.reshape(-1))


class Fitted(NamedTuple):
    """Coefficients `[width, output, problem]` and intercepts `[output, problem]`."""

    coef: Tensor
    intercept: Tensor
    converged: Tensor

    def scores(self, states: Tensor) -> Tensor:
        """Return `states @ coef + intercept`, `[row, output, problem]`."""
        width, outputs, problems = self.coef.shape
        products = states @ self.coef.reshape(width, -1).to(states)
        return products.view(len(states), outputs, problems) + self.intercept.to(states)


LossAndGradient: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Return losses `[problem]` and their gradient by each score.

It takes scores `[row, output, problem]`, and targets and weights `[row, problem]`.
"""


class Learner(NamedTuple):
    """A kind of regression.

    `fit` solves problems, `losses` returns the loss `[row, problem]` of scores, and
    `curvature` is a typical second derivative of that loss by a score.
    """

    fit: Callable[[Tensor, Problems], Fitted]
    losses: Callable[[Tensor, Tensor], Tensor]
    loss_and_gradient: LossAndGradient
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


def _as_scalars(flags: NDArray[np.uint8]) -> NDArray[np.void]:
    """View each row of bytes as one scalar, so that `np.unique` compares whole rows."""
    rows = np.ascontiguousarray(flags)
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)


def ridge() -> Learner:
    """Return ridge regression (half the squared error), in closed form and float64.

    Gram matrices are computed once: rows that are always trained on together, such as
    those of a fold, are summed together, and the matrix of a problem is a sum of such
    parts. With fewer rows than channels, the dual problem of the rows is solved.
    """
    return Learner(_fit_ridge, _squared_losses, _squared_loss_and_gradient, 1, 1.0)


def _squared_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error of each row."""
    return 0.5 * (scores[:, 0] - targets).square()


def _squared_loss_and_gradient(
    scores: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    loss = (_squared_losses(scores, targets) * weights).sum(0)
    return loss, (scores - targets[:, None]) * weights[:, None]


def _fit_ridge(states: Tensor, problems: Problems) -> Fitted:
    """Solve all problems, those with the same training rows together."""
    wide = states.double()
    targets = problems.targets.double()
    coef = torch.empty(states.shape[1], len(problems), dtype=torch.float64)
    intercept = torch.empty(len(problems), dtype=torch.float64)
    sets, which = problems.sets
    sums = None
    if int(sets.sum(1).min()) >= wide.shape[1]:
        sums = _PartSums.of(wide, targets, sets)
    for number, rows in enumerate(sets):
        members = (which == number).nonzero()[:, 0]
        goals = targets[members][:, rows].T
        level = goals.mean(0)
        penalty = problems.penalty[members]
        if sums is not None:
            solution, mean = sums.solve(number, members, level, penalty)
        else:
            solution, mean = _solve_dual(wide[rows], goals - level, penalty)
        coef[:, members] = solution
        intercept[members] = level - mean @ coef[:, members]
    converged = torch.ones(len(problems), dtype=torch.bool)
    return Fitted(coef[:, None], intercept[None], converged)


class _PartSums(NamedTuple):
    """Sums over parts, which are rows that belong to the same sets of training rows.

    `parts` `[set, part]` flags the parts of each set. Of every part there are the
    number of rows, the sum of their states, their Gram matrix, and their products with
    the targets. `gram` is the Gram matrix of all rows.
    """

    parts: Tensor
    counts: Tensor
    states: Tensor
    grams: Tensor
    products: Tensor
    gram: Tensor

    @classmethod
    def of(cls, states: Tensor, targets: Tensor, sets: Tensor) -> "_PartSums":
        membership = _as_scalars(np.packbits(sets.numpy().T, axis=1))
        _, first, part_of, counts = np.unique(
            membership, return_index=True, return_inverse=True, return_counts=True
        )
        order = torch.from_numpy(np.argsort(part_of.reshape(-1), kind="stable"))
        parts = torch.split(states[order], counts.tolist())
        goals = torch.split(targets.T[order], counts.tolist())
        sums = []
        products = []
        for rows, goal in zip(parts, goals, strict=True):
            sums.append(torch.ones(1, len(rows), dtype=rows.dtype) @ rows)
            products.append(rows.T @ goal)
        grams = torch.stack([gram(rows) for rows in parts])
        return cls(
            parts=sets[:, torch.from_numpy(first)],
            counts=torch.from_numpy(counts),
            states=torch.stack(sums)[:, 0],
            grams=grams,
            products=torch.stack(products),
            gram=grams.sum(0),
        )

    def solve(
        self, number: int, members: Tensor, level: Tensor, penalty: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the coefficients of problems with one set, and the mean of its states.

        `number` is the set, `members` are its problems, and `level` the mean of their
        targets.
        """
        inside = self.parts[number]
        count = int(self.counts[inside].sum())
        mean = self.states[inside].sum(0) / count
        centred_gram = self.gram.addr(mean, mean, alpha=-count)
        for part in (~inside).nonzero()[:, 0]:
            centred_gram -= self.grams[part]
        # The penalty is on the coefficients of standardised states. Their squared norm
        # is that of plain coefficients times the variance, so the penalty is scaled
        # here, and not the states.
        scale = without_constants(centred_gram.diagonal() / count)
        products = self.products[inside].sum(0)[:, members]
        centred_products = products - count * torch.outer(mean, level)
        return _solve(centred_gram, centred_products, penalty, scale), mean


def _solve_dual(
    states: Tensor, goals: Tensor, penalty: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same for fewer rows than channels, from the products between rows."""
    mean = states.mean(0)
    deviation = without_constants(states.var(0, correction=0)).sqrt()
    scaled = (states - mean) / deviation
    ones = torch.ones(len(states), dtype=states.dtype)
    weights = _solve(gram(scaled.T), goals, penalty, ones)
    return scaled.T @ weights / deviation[:, None], mean


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
