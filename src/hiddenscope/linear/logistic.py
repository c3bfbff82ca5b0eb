"""Logistic regression for many problems over the same states at once.

All problems share one matrix product per step. The curvature of the loss, which is
nearly the same for all of them, is undone by one Cholesky factor per penalty: L-BFGS
then takes about fifteen steps instead of hundreds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from hiddenscope.linear.problems import Fitted, Learner, Problems, gram, moments

Evaluate: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Return values `[column]` and gradients of `points`, the columns named by `which`."""
Precondition: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Multiply the gradients of some columns by an approximate inverse Hessian."""

# Past steps from which the curvature is estimated.
MEMORY = 8
MAX_STEPS = 500
MAX_HALVINGS = 20
# Armijo's rule: a step must reach this share of the decrease that its slope predicts.
DECREASE = 1e-4
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
    return Learner(fit, _losses, outputs, curvature)


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


def _fit(
    states: Tensor, problems: Problems, outputs: int, curvature: float, tolerance: float
) -> Fitted:
    """Fit states that are standardised over all rows.

    Each problem standardises them on its own training rows.
    """
    rows, width = states.shape
    if WIDE * rows <= width:
        return _fit_in_row_space(states, problems, outputs, curvature, tolerance)
    # A column for each problem: `[width, 1, problem]`.
    mean, deviation = (moment[:, None] for moment in moments(states, problems))

    def score(coef: Tensor, intercept: Tensor, which: Tensor) -> Tensor:
        # The coefficients for states that are not standardised again.
        plain = coef / deviation[..., which]
        level = intercept - (mean[..., which] * plain).sum(0)
        return (states @ plain.view(width, -1)).view(rows, outputs, -1) + level

    def back(slopes: Tensor, which: Tensor) -> Tensor:
        products = (slopes.view(rows, -1).T @ states).T.reshape(width, outputs, -1)
        return (products - mean[..., which] * slopes.sum(0)) / deviation[..., which]

    count = float(problems.counts.to(states).mean())
    precondition = undo_curvature(states, problems.penalty, count, curvature, outputs)
    start = torch.zeros(width + 1, outputs, len(problems), dtype=states.dtype)
    point, converged = _descend(problems, start, score, back, precondition, tolerance)
    coef = point[:-1] / deviation
    return Fitted(coef, point[-1] - (mean * coef).sum(0), converged)


def _descend(
    problems: Problems,
    start: Tensor,
    score: Callable[[Tensor, Tensor, Tensor], Tensor],
    back: Callable[[Tensor, Tensor], Tensor],
    precondition: Precondition,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Return where coefficients and intercepts end, and which problems converged.

    `start` is `[feature + 1, output, problem]`, the intercepts last. `score` returns
    the scores of coefficients and intercepts, `back` the gradient by the coefficients
    from that by the scores.
    """
    size, outputs, _ = start.shape
    counts = problems.counts.to(start)
    targets = problems.targets.T.contiguous()
    weights = (problems.train / counts[:, None]).T.contiguous()
    decay = problems.penalty.to(start) / counts

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        point = points.view(size, outputs, -1)
        coef = point[:-1]
        scores = score(coef, point[-1], which)
        value, slopes = _loss_and_gradient(scores, targets[:, which], weights[:, which])
        value = value + 0.5 * decay[which] * coef.square().sum((0, 1))
        gradient = back(slopes, which) + decay[which] * coef
        return value, torch.cat([gradient, slopes.sum(0)[None]]).view(-1, len(which))

    minimum = minimise(evaluate, start.flatten(0, 1), precondition, tolerance)
    return minimum.point.view_as(start), minimum.converged


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
        return lambda right: torch.cholesky_solve(right, factor)
    outer = products.clone()
    outer.diagonal().add_(decay / scale)
    factor = torch.linalg.cholesky(outer)
    # Woodbury's identity.

    def solve(right: Tensor) -> Tensor:
        inside = torch.cholesky_solve(states @ right, factor)
        return (right - states.T @ inside) / decay

    return solve


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
    features, channels = _row_space(wide, mean, deviation)
    # The inverse of each problem's approximate Hessian.
    trained = features * sets[:, :, None]
    hessians = curvature * (trained.mT @ trained) / sets.sum(1)[:, None, None]
    inner = hessians[set_of]
    inner.diagonal(dim1=1, dim2=2).add_((problems.penalty / problems.counts)[:, None])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))

    def score(coef: Tensor, intercept: Tensor, which: Tensor) -> Tensor:
        return _by_problem(features[set_of[which]], coef) + intercept

    def back(slopes: Tensor, which: Tensor) -> Tensor:
        return _by_problem(features[set_of[which]].mT, slopes)

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        step = _by_problem(inverse[which], gradient[:-1])
        return torch.cat([step, gradient[-1:] / curvature]).view_as(gradients)

    start = wide.new_zeros(features.shape[2] + 1, outputs, len(problems))
    point, converged = _descend(problems, start, score, back, undo, tolerance)
    coef = _by_problem(channels[set_of], point[:-1])
    intercept = point[-1] - (mean[:, None, set_of] * coef).sum(0)
    return Fitted(coef.to(states), intercept.to(states), converged)


def _by_problem(matrices: Tensor, columns: Tensor) -> Tensor:
    """Multiply the columns `[..., problem]` of each problem by its own matrix."""
    return (matrices @ columns.permute(2, 0, 1)).permute(1, 2, 0)


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
    if significant.any():
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


def differentiated(loss: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    """Return the evaluation of a loss `[column]`, whatever the gradient mode."""

    def summed(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        values = loss(points, which)
        return values.sum(), values

    differentiate = torch.func.grad(summed, has_aux=True)

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = differentiate(points, which)
        return values, gradients

    return evaluate


class Minimum(NamedTuple):
    """Where each column ended, and whether it converged."""

    point: Tensor
    converged: Tensor


def minimise(
    evaluate: Evaluate,
    start: Tensor,
    precondition: Precondition,
    tolerance: float = 1e-4,
    most_steps: int = MAX_STEPS,
) -> Minimum:
    """Minimise every column of `start`, until no gradient entry exceeds the tolerance.

    L-BFGS (Nocedal 1980), preconditioned. scipy's takes one problem at a time. Here all
    problems share each matrix product, and a problem that has converged is not
    evaluated again.

    >>> bowl = lambda points, which: ((points - 3).square().sum(0), 2 * (points - 3))
    >>> minimum = minimise(bowl, torch.zeros(2, 1), lambda gradients, which: gradients)
    >>> minimum.point.T.tolist()
    [[3.0, 3.0]]
    """
    which = torch.arange(start.shape[1], device=start.device)
    minimum = Minimum(start.clone(), torch.zeros_like(which, dtype=torch.bool))
    value, gradient = evaluate(start, which)
    stuck = torch.zeros_like(value, dtype=torch.bool)
    descent = _Descent(start.clone(), value, gradient, [], stuck)
    for step in range(most_steps + 1):
        converged = descent.gradient.abs().amax(0) <= tolerance
        done = converged | descent.stuck
        if step == most_steps:
            done = torch.ones_like(done)
        if done.any():
            minimum.point[:, which[done]] = descent.point[:, done]
            minimum.converged[which[done]] = converged[done]
            which, descent = which[~done], descent.columns(~done)
        if not len(which):
            break
        descent = _step(descent, which, evaluate, precondition)
    return minimum


@dataclass(frozen=True, eq=False)
class _Descent:
    """The columns after some steps.

    `past` holds the last steps, the changes of the gradient along them, and the inverse
    of the product of both (0 where it is not positive, so that the step is ignored).
    `stuck` marks columns in which no step decreases the value any more: they are as low
    as their precision can tell.
    """

    point: Tensor
    value: Tensor
    gradient: Tensor
    past: list[tuple[Tensor, Tensor, Tensor]]
    stuck: Tensor

    def columns(self, selected: Tensor) -> "_Descent":
        past = []
        for step, change, inverse in self.past:
            past.append((step[:, selected], change[:, selected], inverse[selected]))
        return _Descent(
            self.point[:, selected],
            self.value[selected],
            self.gradient[:, selected],
            past,
            self.stuck[selected],
        )


def _step(
    descent: _Descent, which: Tensor, evaluate: Evaluate, precondition: Precondition
) -> _Descent:
    """Take one step, shortened in each column until it decreases the value enough."""
    direction = _direction(descent, which, precondition)
    slope = (descent.gradient * direction).sum(0)
    length = torch.ones_like(slope)
    point = descent.point + direction
    value, gradient = evaluate(point, which)
    # Near the minimum the decrease is smaller than the rounding of the value itself.
    slack = 4 * torch.finfo(value.dtype).eps * descent.value.abs()
    for _ in range(MAX_HALVINGS):
        # Written so that a NaN counts as too high.
        too_high = ~(value <= descent.value + DECREASE * length * slope + slack)
        if not too_high.any():
            break
        again = too_high.nonzero()[:, 0]
        old, steep = length[again], slope[again]
        # The minimum of the parabola through both values with the slope at the start. A
        # NaN stays one, and the column ends as stuck.
        excess = value[again] - descent.value[again] - steep * old
        lowest = -steep * old**2 / (2 * excess)
        length[again] = lowest.clamp(0.1 * old, 0.5 * old)
        point[:, again] = descent.point[:, again] + length[again] * direction[:, again]
        value[again], gradient[:, again] = evaluate(point[:, again], which[again])
    stuck = ~(value <= descent.value + slack) | (slope >= 0)
    step = point - descent.point
    change = gradient - descent.gradient
    product = (step * change).sum(0)
    limits = torch.finfo(product.dtype)
    curved = product > limits.eps * (change * change).sum(0)
    inverse = 1 / product.clamp_min(limits.tiny)
    inverse = torch.where(curved, inverse, torch.zeros_like(product))
    return _Descent(
        torch.where(stuck, descent.point, point),
        torch.where(stuck, descent.value, value),
        torch.where(stuck, descent.gradient, gradient),
        [*descent.past, (step, change, inverse)][-MEMORY:],
        stuck,
    )


def _direction(descent: _Descent, which: Tensor, precondition: Precondition) -> Tensor:
    """Return the direction of descent by the two-loop recursion of L-BFGS."""
    direction = descent.gradient.clone()
    shares = []
    for step, change, inverse in reversed(descent.past):
        share = inverse * (step * direction).sum(0)
        direction -= share * change
        shares.append(share)
    direction = precondition(direction, which)
    if descent.past:
        _, change, inverse = descent.past[-1]
        scale = inverse * (change * precondition(change, which)).sum(0)
        direction = direction / torch.where(scale > 0, scale, torch.ones_like(scale))
    for (step, change, inverse), share in zip(
        descent.past, reversed(shares), strict=True
    ):
        direction += (share - inverse * (change * direction).sum(0)) * step
    return -direction
