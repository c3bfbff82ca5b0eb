"""Logistic regression for many problems over the same states at once.

All problems share one matrix product per step. The curvature of the loss, which is
nearly the same for all of them, is undone by one Cholesky factor per penalty: L-BFGS
then takes about fifteen steps instead of hundreds.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from hiddenscope.linear.lbfgs import Precondition, minimise
from hiddenscope.linear.problems import Fitted, Learner, Problems, gram, moments

# States with at least this many times as many channels as rows are fitted in the space
# of their rows.
WIDE = 2
# A singular value below this share of the largest is rounding.
RANK = 1e-12


def logistic(classes: int, tolerance: float = 1e-4) -> Learner:
    """Return logistic regression with one score for two classes, else one per class.

    The tolerance is the largest allowed entry of the gradient of the mean loss, like
    scikit-learn's `tol`.
    """
    outputs = classes
    if classes == 2:
        outputs = 1
    # The second derivative of the loss where all classes are equally likely.
    curvature = (classes - 1) / classes**2
    fit = partial(_fit, outputs=outputs, curvature=curvature, tolerance=tolerance)
    return Learner(fit, _losses, _loss_and_gradient, outputs, curvature)


def predicted_classes(scores: Tensor) -> Tensor:
    """Return the class with the largest score, from `[row, output, ...]`.

    A single score is that of class 1, against 0 for class 0.

    >>> predicted_classes(torch.tensor([[-1.0], [2.0]])).tolist()
    [0, 1]
    """
    if scores.shape[1] > 1:
        return scores.argmax(1)
    return (scores[:, 0] > 0).long()


def _losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Return minus the log probability of each row's class."""
    if scores.shape[1] == 1:
        score = scores[:, 0]
        return softplus(score) - targets * score
    return -log_softmax(scores, 1).gather(1, targets[:, None])[:, 0]


def _loss_and_gradient(
    scores: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of each problem, and its gradient by every score."""
    if scores.shape[1] == 1:
        gradient = (scores.sigmoid() - targets[:, None]) * weights[:, None]
    else:
        gradient = scores.softmax(1)
        gradient.scatter_add_(1, targets[:, None], torch.full_like(gradient[:, :1], -1))
        gradient *= weights[:, None]
    return (_losses(scores, targets) * weights).sum(0), gradient


class _Columns(NamedTuple):
    """The data of some problems, one column each.

    `mean` and `deviation` are `[width, 1, problem]`, `targets` and `weights`
    `[row, problem]`, and `decay` is the penalty divided by the number of rows.
    """

    mean: Tensor
    deviation: Tensor
    targets: Tensor
    weights: Tensor
    decay: Tensor

    def select(self, which: Tensor) -> "_Columns":
        # Most steps evaluate all problems: do not copy them.
        if len(which) == len(self.decay):
            return self
        return _Columns(*(field[..., which] for field in self))


def _fit(
    states: Tensor, problems: Problems, outputs: int, curvature: float, tolerance: float
) -> Fitted:
    """Fit states that are standardised over all rows.

    Each problem standardises them on its own training rows.
    """
    rows, width = states.shape
    if WIDE * rows <= width:
        return _fit_in_row_space(states, problems, outputs, curvature, tolerance)
    counts = problems.counts.to(states)
    mean, deviation = (moment[:, None] for moment in moments(states, problems))
    columns = _Columns(
        mean,
        deviation,
        problems.targets.T.contiguous(),
        (problems.train / counts[:, None]).T.contiguous(),
        problems.penalty.to(states) / counts,
    )

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        here = columns.select(which)
        point = points.view(width + 1, outputs, -1)
        coef = point[:-1]
        # The coefficients for states that are not standardised again.
        plain = coef / here.deviation
        intercept = point[-1] - (here.mean * plain).sum(0)
        scores = (states @ plain.view(width, -1)).view(rows, outputs, -1) + intercept
        value, slopes = _loss_and_gradient(scores, here.targets, here.weights)
        value = value + 0.5 * here.decay * coef.square().sum((0, 1))
        sums = slopes.sum(0)
        back = (slopes.view(rows, -1).T @ states).T.reshape(coef.shape)
        gradient = (back - here.mean * sums) / here.deviation + here.decay * coef
        return value, torch.cat([gradient, sums[None]]).view(-1, len(which))

    start = torch.zeros((width + 1) * outputs, len(problems), dtype=states.dtype)
    precondition = undo_curvature(
        states, problems.penalty, float(counts.mean()), curvature, outputs
    )
    minimum = minimise(evaluate, start, precondition, tolerance)
    point = minimum.point.view(width + 1, outputs, -1)
    coef = point[:-1] / deviation
    return Fitted(coef, point[-1] - (mean * coef).sum(0), minimum.converged)


def undo_curvature(
    states: Tensor, penalty: Tensor, count: float, curvature: float, outputs: int
) -> Precondition:
    """Return the inverse of an approximate Hessian, one for all problems of a penalty.

    It is exact if every problem trains on all rows with equal weights.
    """
    rows, width = states.shape
    products = gram(states) if rows >= width else gram(states.T)
    solvers = {}
    for value in set(penalty.tolist()):
        solvers[value] = _hessian_solver(
            states, curvature / rows, value / count, products
        )

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        step = gradient / curvature
        penalties = penalty[which]
        for value, solve in solvers.items():
            columns = penalties == value
            if bool(columns.all()):
                part = gradient[:width]
                step[:width] = solve(part.reshape(width, -1)).view_as(part)
            elif bool(columns.any()):
                part = gradient[:width, :, columns]
                step[:width, :, columns] = solve(part.reshape(width, -1)).view_as(part)
        return step.view_as(gradients)

    return undo


def _hessian_solver(
    states: Tensor, scale: float, decay: float, products: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return a solver of `(scale * states.T @ states + decay) x = y`.

    `products` is the Gram matrix of the channels, or of the rows if these are fewer.
    """
    if len(states) >= states.shape[1]:
        inner = scale * products
        inner.diagonal().add_(decay)
        factor = torch.linalg.cholesky(inner)
        return lambda right: _solve(factor, right)
    outer = products.clone()
    outer.diagonal().add_(decay / scale)
    factor = torch.linalg.cholesky(outer)
    # Woodbury's identity.
    return lambda right: (right - states.T @ _solve(factor, states @ right)) / decay


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(factor.T, half, upper=True)
    return solution


def _fit_in_row_space(
    states: Tensor, problems: Problems, outputs: int, curvature: float, tolerance: float
) -> Fitted:
    """Fit states with far fewer rows than channels, in float64.

    The penalised coefficients lie in the span of the training rows (representer
    theorem), which has at most as many dimensions as there are rows. It is another
    space for each set of training rows, since each has its own scale. In that space the
    problem is the same, exactly, and small.
    """
    sets, set_of = problems.sets
    wide = states.double()
    mean, deviation = moments(wide, Problems(sets, sets, torch.ones(len(sets))))
    features, back = _row_space(wide, mean, deviation)
    size = features.shape[2]
    counts = problems.counts.double()
    weights = (problems.train / counts[:, None]).T.contiguous()
    targets = problems.targets.T.contiguous()
    decay = problems.penalty.double() / counts

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        point = points.view(size + 1, outputs, -1)
        coef = point[:-1]
        here = features[set_of[which]]
        scores = (here @ coef.permute(2, 0, 1)).permute(1, 2, 0) + point[-1]
        value, slopes = _loss_and_gradient(scores, targets[:, which], weights[:, which])
        value = value + 0.5 * decay[which] * coef.square().sum((0, 1))
        gradient = (here.mT @ slopes.permute(2, 0, 1)).permute(1, 2, 0)
        gradient = gradient + decay[which] * coef
        return value, torch.cat([gradient, slopes.sum(0)[None]]).view(-1, len(which))

    precondition = _undo_curvature_by_problem(
        features, problems, set_of, curvature, outputs
    )
    start = torch.zeros((size + 1) * outputs, len(problems), dtype=torch.float64)
    minimum = minimise(evaluate, start, precondition, tolerance)
    point = minimum.point.view(size + 1, outputs, -1)
    coef = (back[set_of] @ point[:-1].permute(2, 0, 1)).permute(1, 2, 0)
    intercept = point[-1] - (mean[:, None, set_of] * coef).sum(0)
    return Fitted(coef.to(states), intercept.to(states), minimum.converged)


def _row_space(
    states: Tensor, mean: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """Return, for each set, coordinates of all rows, and the map back to the channels.

    The coordinates are `[set, row, size]`. The map takes coefficients of coordinates to
    those of channels.
    """
    _, strength, right = torch.linalg.svd(states, full_matrices=False)
    significant = strength > strength.max() * RANK
    # At least one direction, even where all states are equal.
    basis = right[:1]
    if bool(significant.any()):
        basis = right[significant]
    rows = states @ basis.T
    features = []
    back = []
    for centre, scale in zip(mean.T, deviation.T, strict=True):
        # The Cholesky factor makes the scaled basis orthonormal, so that the norm of
        # coefficients, and with it the penalty, is the same in both spaces.
        scaled = basis / scale
        factor = torch.linalg.cholesky(scaled @ scaled.T)
        features.append((rows - centre @ basis.T) @ factor)
        back.append(
            torch.linalg.solve_triangular(factor, scaled / scale, upper=False).T
        )
    return torch.stack(features), torch.stack(back)


def _undo_curvature_by_problem(
    features: Tensor,
    problems: Problems,
    set_of: Tensor,
    curvature: float,
    outputs: int,
) -> Precondition:
    """Return the inverse of each problem's approximate Hessian in its row space."""
    sets, _ = problems.sets
    trained = features * sets[:, :, None]
    hessians = curvature * (trained.mT @ trained) / sets.sum(1)[:, None, None]
    inner = hessians[set_of]
    inner.diagonal(dim1=1, dim2=2).add_((problems.penalty / problems.counts)[:, None])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        step = (inverse[which] @ gradient[:-1].permute(2, 0, 1)).permute(1, 2, 0)
        return torch.cat([step, gradient[-1:] / curvature]).view_as(gradients)

    return undo
