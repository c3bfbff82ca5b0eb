"""Problems: linear fits of one set of states, each with its own training rows, targets
and penalty; ridge regression.

The states are standardised on the training rows of each problem without a copy of them
for each: a problem's scale is applied to its coefficients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EQUAL = (
    # A deviation that is this share of the mean is the rounding of equal numbers.
    1e-14
)
# States have variance 1; a channel with less than this on some rows counts as constant
# there.
CONSTANT = 1e-12


@dataclass(frozen=True, eq=False)
class Problems:
    """`train` flags and `targets` (class indices, or values) `[problem, row]`, and a
    `penalty` `[problem]`.

    A problem minimises the sum of its rows' losses plus half the penalty times the
    squared norm of its coefficients, which are those of states standardised on its
    training rows; the intercept is free. So the penalty is scikit-learn's `alpha` of a
    ridge regression, and 1 / `C` of a logistic one.
    """

    train: Tensor
    targets: Tensor
    penalty: Tensor

    def __len__(self) -> int:
        return len(self.penalty)

    @property
    def counts(self) -> Tensor:
        """The number of training rows of each problem."""
        return self.train.sum(1)

    @property
    def sets(self) -> tuple[Tensor, Tensor]:
        """The different sets of training rows `[set, row]`, and the index of each
        problem's set.
        """
        flags = np.packbits(self.train.numpy(), axis=1)
        _, first, which = np.unique(
            _as_values(flags), return_index=True, return_inverse=True
        )
        return self.train[torch.from_numpy(first)], torch.from_numpy(which.reshape(-1))


class Fitted(NamedTuple):
    """Fitted coefficients `[width, output, problem]` and intercepts `[output,
    problem]`.
    """

    coef: Tensor
    intercept: Tensor
    converged: Tensor

    def scores(self, states: Tensor) -> Tensor:
        """`states @ coef + intercept`, `[row, output, problem]`."""
        width, outputs, problems = self.coef.shape
        products = states @ self.coef.reshape(width, -1).to(states)
        return products.view(len(states), outputs, problems) + self.intercept.to(states)


LossAndGradient: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From scores `[row, output, problem]`, targets and weights `[row, problem]`: losses
`[problem]`, gradient by score.
"""


class Learner(NamedTuple):
    """A kind of regression: how problems are fitted, and the loss of each row (`[row,
    problem]`) given its scores.

    `curvature` is a typical second derivative of the loss by a score.
    """

    fit: Callable[[Tensor, Problems], Fitted]
    losses: Callable[[Tensor, Tensor], Tensor]
    loss_and_gradient: LossAndGradient
    outputs: int
    curvature: float


def standardised(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States `[row, width]` with mean 0 and deviation 1 in every channel, as float32
    (float64 stays); mean, deviation.

    A channel that is the same in all rows becomes 0.

    >>> standardised(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))[0].tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """
    host = states.detach().cpu()
    rows = host.to(host.dtype if host.dtype == torch.float64 else torch.float32).numpy()
    rough = rows.mean(0, dtype=np.float64).astype(rows.dtype)
    # Centred twice: the rough mean is rounded, which matters where deviations are
    # small.
    centred = rows - rough
    rest = centred.mean(0, dtype=np.float64)
    centred -= rest.astype(rows.dtype)
    deviation = np.sqrt(np.square(centred).mean(0, dtype=np.float64))
    mean = rough.astype(np.float64) + rest
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
    """Mean and deviation `[width, problem]` of standardised states over the training
    rows of each problem.

    They are computed in float64: where an outlier is held out, it leaves its channel
    almost no variance.
    """
    sets, which = problems.sets
    wide = states.to(torch.float64, copy=True)
    weights = (sets / sets.sum(1, keepdim=True)).double()
    mean = (weights @ wide).T
    variance = (weights @ wide.square_()).T - mean.square()
    deviation = torch.where(
        variance <= CONSTANT,
        torch.ones_like(variance),
        variance.clamp_min(CONSTANT).sqrt(),
    )
    return mean.to(states)[:, which], deviation.to(states)[:, which]


def gram(states: Tensor) -> Tensor:
    """`states.T @ states`, by torch, though numpy computes only half of a symmetric
    product.

    Each library has its own threads, which spin for a while after a product and hold up
    the other library's: with both, everything around a product takes twice as long.
    """
    return states.T @ states


def _as_values(flags: NDArray[np.uint8]) -> NDArray[np.void]:
    """Rows of bytes as one value each, so that `np.unique` compares whole rows."""
    rows = np.ascontiguousarray(flags)
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)


def ridge() -> Learner:
    """Ridge regression (half the squared error), solved in closed form and in float64.

    Gram matrices are computed once: rows that are always trained on together, such as
    those of a fold, are summed together, and the matrix of a problem is the sum over
    its parts. With fewer rows than channels, the dual problem of the rows is solved.
    """
    return Learner(_fit_ridge, _squared_losses, _squared_loss_and_gradient, 1, 1.0)


def _squared_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error of each row."""
    return 0.5 * (scores[:, 0] - targets).square()


def _squared_loss_and_gradient(
    scores: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    return (_squared_losses(scores, targets) * weights).sum(0), (
        scores - targets[:, None]
    ) * weights[:, None]


def _fit_ridge(states: Tensor, problems: Problems) -> Fitted:
    """Coefficients for states that are standardised over all rows; each problem
    standardises them over its own.
    """
    wide, targets = states.double(), problems.targets.double()
    coef = torch.empty(states.shape[1], len(problems), dtype=torch.float64)
    intercept = torch.empty(len(problems), dtype=torch.float64)
    sets, which = problems.sets
    sums = (
        _Sums.over(wide, targets, sets)
        if int(sets.sum(1).min()) >= wide.shape[1]
        else None
    )
    for number, rows in enumerate(sets):
        here = (which == number).nonzero()[:, 0]
        goals = targets[here][:, rows].T
        level = goals.mean(0)
        if sums is not None:
            coef[:, here], mean = sums.solve(
                number, here, level, problems.penalty[here]
            )
        else:
            coef[:, here], mean = _solve_dual(
                wide[rows], goals - level, problems.penalty[here]
            )
        intercept[here] = level - mean @ coef[:, here]
    return Fitted(
        coef[:, None], intercept[None], torch.ones(len(problems), dtype=torch.bool)
    )


class _Sums(NamedTuple):
    """Sums over parts: rows that belong to the same sets of training rows.

    `parts` flags `[set, part]` say which parts each set is made of; the other fields
    have one entry a part (the number of rows, the sum of states, their Gram matrix,
    their products with the targets); `gram` is of all rows.
    """

    parts: Tensor
    counts: Tensor
    states: Tensor
    grams: Tensor
    products: Tensor
    gram: Tensor

    @classmethod
    def over(cls, states: Tensor, targets: Tensor, sets: Tensor) -> "_Sums":
        flags = _as_values(np.packbits(sets.numpy().T, axis=1))
        _, first, part_of, counts = np.unique(
            flags, return_index=True, return_inverse=True, return_counts=True
        )
        order = torch.from_numpy(np.argsort(part_of.reshape(-1), kind="stable"))
        rows = torch.split(states[order], counts.tolist())
        goals = torch.split(targets.T[order], counts.tolist())
        grams = torch.stack([gram(part) for part in rows])
        return cls(
            sets[:, torch.from_numpy(first)],
            torch.from_numpy(counts),
            torch.stack(
                [torch.ones(1, len(part), dtype=part.dtype) @ part for part in rows]
            )[:, 0],
            grams,
            torch.stack(
                [part.T @ goal for part, goal in zip(rows, goals, strict=True)]
            ),
            grams.sum(0),
        )

    def solve(
        self, number: int, here: Tensor, level: Tensor, penalty: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The coefficients of the problems `here`, which share a set of training rows,
        and the mean of its states.

        The squared norm of the coefficients of standardised states is that of plain
        coefficients times the variance: so the penalty is scaled here, and not the
        states.
        """
        inside = self.parts[number]
        count = int(self.counts[inside].sum())
        mean = self.states[inside].sum(0) / count
        inner = self.gram.addr(mean, mean, alpha=-count)
        for part in (~inside).nonzero()[:, 0]:
            inner -= self.grams[part]
        variance = inner.diagonal() / count
        scale = torch.where(variance <= CONSTANT, torch.ones_like(variance), variance)
        goal = self.products[inside].sum(0)[:, here] - count * torch.outer(mean, level)
        return _solve(inner, goal, penalty, scale), mean


def _solve_dual(states: Tensor, goal: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the products of rows, of which there are fewer than channels."""
    mean, variance = states.mean(0), states.var(0, correction=0)
    deviation = torch.where(
        variance <= CONSTANT, torch.ones_like(variance), variance
    ).sqrt()
    scaled = (states - mean) / deviation
    solved = scaled.T @ _solve(
        gram(scaled.T), goal, penalty, torch.ones(len(states), dtype=states.dtype)
    )
    return solved / deviation[:, None], mean


def _solve(inner: Tensor, goal: Tensor, penalty: Tensor, scale: Tensor) -> Tensor:
    """Solve `(inner + penalty * diag(scale)) x = goal`, column by column."""
    solved = torch.empty_like(goal)
    for value in set(penalty.tolist()):
        columns = penalty == value
        shifted = inner.clone()
        shifted.diagonal().add_(value * scale)
        solved[:, columns] = torch.cholesky_solve(
            goal[:, columns], torch.linalg.cholesky(shifted)
        )
    return solved
