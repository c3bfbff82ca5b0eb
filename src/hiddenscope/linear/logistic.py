"""Logistic regression for many problems over the same states at once, and a probe of a
weighted sum of sites.

All problems share one matrix product a step. The curvature of the loss, which is nearly
the same for all of them, is undone by one Cholesky factor a penalty: L-BFGS then takes
about fifteen steps in place of hundreds.
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
Precondition: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# From this many times as many channels as rows on, problems are solved in the space of
# the rows.
WIDE = 2
RANK = 1e-12  # a singular value that is this share of the largest is rounding
# Penalty on the inputs of the mix's softmax: of the mean loss, times half their squared
# norm.
SLIGHT = 1e-3
MEMORY, MOST_STEPS, MOST_HALVINGS = 8, 500, 20
# Armijo's rule: the share of the decrease that the gradient predicts which a step must
# reach.
DECREASE = 1e-4


def logistic(classes: int, tolerance: float = 1e-4) -> Learner:
    """Logistic regression into this many classes: one score for two classes, otherwise
    one a class.

    The tolerance is the largest allowed entry of the gradient of the mean loss, as
    scikit-learn's `tol`.
    """
    outputs = 1 if classes == 2 else classes
    curvature = (classes - 1) / classes**2
    fit = partial(_fit, outputs=outputs, curvature=curvature, tolerance=tolerance)
    return Learner(fit, _losses, _loss_and_gradient, outputs, curvature)


def _losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Minus the log probability of each row's class."""
    if scores.shape[1] == 1:
        score = scores[:, 0]
        return softplus(score) - targets * score
    return -log_softmax(scores, 1).gather(1, targets[:, None])[:, 0]


def _loss_and_gradient(
    scores: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted loss of each problem, and its gradient by every score."""
    if scores.shape[1] == 1:
        gradient = (scores.sigmoid() - targets[:, None]) * weights[:, None]
    else:
        gradient = scores.softmax(1)
        gradient.scatter_add_(1, targets[:, None], torch.full_like(gradient[:, :1], -1))
        gradient *= weights[:, None]
    return (_losses(scores, targets) * weights).sum(0), gradient


class _Columns(NamedTuple):
    """What belongs to some problems: mean and deviation `[width, 1, problem]`, targets
    and weights by row.
    """

    mean: Tensor
    deviation: Tensor
    targets: Tensor
    weights: Tensor
    decay: Tensor

    def of(self, which: Tensor) -> "_Columns":
        return (
            self
            if len(which) == len(self.decay)
            else _Columns(*(field[..., which] for field in self))
        )


def _fit(
    states: Tensor, problems: Problems, outputs: int, curvature: float, tolerance: float
) -> Fitted:
    """Coefficients for states that are standardised over all rows; each problem
    standardises them over its own.
    """
    rows, width = states.shape
    if WIDE * rows <= width:
        return _fit_in_row_space(states, problems, outputs, curvature, tolerance)
    counts = problems.counts.to(states)
    mean, deviation = (moment[:, None] for moment in moments(states, problems))
    weights = (problems.train / counts[:, None]).T.contiguous()
    columns = _Columns(
        mean,
        deviation,
        problems.targets.T.contiguous(),
        weights,
        problems.penalty.to(states) / counts,
    )

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        here, point = columns.of(which), points.view(width + 1, outputs, -1)
        coef = point[:-1]
        plain = coef / here.deviation
        intercept = point[-1] - (here.mean * plain).sum(0)
        scores = (states @ plain.view(width, -1)).view(rows, outputs, -1) + intercept
        value, slopes = _loss_and_gradient(scores, here.targets, here.weights)
        sums = slopes.sum(0)
        back = (slopes.view(rows, -1).T @ states).T.reshape(coef.shape)
        gradient = (back - here.mean * sums) / here.deviation + here.decay * coef
        value = value + 0.5 * here.decay * coef.square().sum((0, 1))
        return value, torch.cat([gradient, sums[None]]).view(-1, len(which))

    start = torch.zeros((width + 1) * outputs, len(problems), dtype=states.dtype)
    precondition = _undo_curvature(
        states, problems.penalty, float(counts.mean()), curvature, outputs
    )
    minimum = minimise(evaluate, start, precondition, tolerance)
    point = minimum.point.view(width + 1, outputs, -1)
    coef = point[:-1] / deviation
    return Fitted(coef, point[-1] - (mean * coef).sum(0), minimum.converged)


def _undo_curvature(
    states: Tensor, penalty: Tensor, count: float, curvature: float, outputs: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The inverse of an approximate Hessian: as if every problem trained on all rows,
    with equal weights.
    """
    rows, width = states.shape
    products = gram(states if rows >= width else states.T)
    solvers = {
        value: _hessian_solver(states, curvature / rows, value / count, products)
        for value in set(penalty.tolist())
    }

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        step = gradient / curvature
        chosen = penalty[which]
        for value, solve in solvers.items():
            columns = chosen == value
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
    """Solve `(scale * states.T @ states + decay) x = y`, on the smaller side of the
    states.
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
    whole: Tensor = torch.linalg.solve_triangular(factor.T, half, upper=True)
    return whole


def _fit_in_row_space(
    states: Tensor, problems: Problems, outputs: int, curvature: float, tolerance: float
) -> Fitted:
    """The same fits for states with far fewer rows than channels, in float64.

    The coefficients with the least penalty lie in the span of the training rows, which
    has as many dimensions as there are rows; it is another space for each set of
    training rows, since each has its own scale. In that space the problem is the same,
    exactly, and small.
    """
    sets, which_set = problems.sets
    wide = states.double()
    mean, deviation = moments(wide, Problems(sets, sets, torch.ones(len(sets))))
    features, back = _row_space(wide, mean, deviation)
    size, counts = features.shape[2], problems.counts.double()
    weights = (problems.train / counts[:, None]).T.contiguous()
    targets, decay = problems.targets.T.contiguous(), problems.penalty.double() / counts

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        point = points.view(size + 1, outputs, -1)
        coef, here = point[:-1].permute(2, 0, 1), features[which_set[which]]
        scores = (here @ coef).permute(1, 2, 0) + point[-1]
        value, slopes = _loss_and_gradient(scores, targets[:, which], weights[:, which])
        gradient = (here.mT @ slopes.permute(2, 0, 1)).permute(1, 2, 0) + decay[
            which
        ] * point[:-1]
        value = value + 0.5 * decay[which] * point[:-1].square().sum((0, 1))
        return value, torch.cat([gradient, slopes.sum(0)[None]]).view(-1, len(which))

    precondition = _undo_curvature_by_problem(
        features, problems, which_set, curvature, outputs
    )
    start = torch.zeros((size + 1) * outputs, len(problems), dtype=torch.float64)
    minimum = minimise(evaluate, start, precondition, tolerance)
    point = minimum.point.view(size + 1, outputs, -1)
    coef = (back[which_set] @ point[:-1].permute(2, 0, 1)).permute(1, 2, 0)
    centre = (mean[:, None, which_set] * coef).sum(0)
    return Fitted(coef.to(states), (point[-1] - centre).to(states), minimum.converged)


def _row_space(
    states: Tensor, mean: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each set, the coordinates of all rows `[set, row, size]`, and the map from
    coefficients in them back.
    """
    _, strength, right = torch.linalg.svd(states, full_matrices=False)
    kept = strength > strength.max() * RANK
    basis = right[kept] if bool(kept.any()) else right[:1]
    rows = states @ basis.T
    features, back = [], []
    for centre, scale in zip(mean.T, deviation.T, strict=True):
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
    which_set: Tensor,
    curvature: float,
    outputs: int,
) -> Callable[[Tensor, Tensor], Tensor]:
    sets, _ = problems.sets
    trained = features * sets[:, :, None]
    inner = (curvature * (trained.mT @ trained) / sets.sum(1)[:, None, None])[which_set]
    inner.diagonal(dim1=1, dim2=2).add_((problems.penalty / problems.counts)[:, None])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        step = (inverse[which] @ gradient[:-1].permute(2, 0, 1)).permute(1, 2, 0)
        return torch.cat([step, gradient[-1:] / curvature]).view_as(gradients)

    return undo


class Mixed(NamedTuple):
    """The weights of the sites `[site, problem]`, and the scores of each problem,
    `[row, output, problem]`.
    """

    weights: Tensor
    scores: Tensor
    converged: Tensor


def mix(
    states: Tensor, problems: Problems, learner: Learner, tolerance: float = 1e-4
) -> Mixed:
    """Fit problems to a mix of standardised sites `[site, row, width]`: a weighted sum
    whose weights are learnt too.

    The weights are a softmax, so they add up to 1. Every site is standardised on the
    training rows of a problem. The inputs of the softmax have a slight penalty of their
    own, so that weights stay equal where the rows favour no site. The joint loss has
    more than one minimum: this is the one that descent from equal weights leads to.
    """
    sites, rows, width = states.shape
    counts = problems.counts.to(states)
    mean, deviation = (
        torch.stack(moment)
        for moment in zip(*(moments(site, problems) for site in states), strict=True)
    )
    targets, row_weights = (
        problems.targets.T.contiguous(),
        (problems.train / counts[:, None]).T.contiguous(),
    )
    decay = problems.penalty.to(states) / counts
    inner = (width + 1) * learner.outputs

    def score(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coef = points[:inner].view(width + 1, learner.outputs, -1)
        weights = points[inner:].softmax(0)
        scores = coef[-1].expand(rows, -1, -1).clone()
        for site, weight, centre, scale in zip(
            states, weights, mean, deviation, strict=True
        ):
            plain = weight * coef[:-1] / scale[:, None, which]
            scores += (site @ plain.view(width, -1)).view_as(scores) - (
                centre[:, None, which] * plain
            ).sum(0)
        return coef, weights, scores

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        coef, weights, scores = score(points, which)
        value, slopes = learner.loss_and_gradient(
            scores, targets[:, which], row_weights[:, which]
        )
        sums = slopes.sum(0)
        gradient = decay[which] * coef[:-1]
        by_weight = []
        for site, weight, centre, scale in zip(
            states, weights, mean, deviation, strict=True
        ):
            back = (slopes.view(rows, -1).T @ site).T.reshape(coef[:-1].shape)
            back = (back - centre[:, None, which] * sums) / scale[:, None, which]
            by_weight.append((back * coef[:-1]).sum((0, 1)))
            gradient += weight * back
        slope = torch.stack(by_weight)
        # Through the softmax.
        by_input = (
            weights * (slope - (weights * slope).sum(0)) + SLIGHT * points[inner:]
        )
        value = value + 0.5 * decay[which] * coef[:-1].square().sum((0, 1))
        value = value + 0.5 * SLIGHT * points[inner:].square().sum(0)
        return value, torch.cat(
            [gradient.reshape(inner - learner.outputs, -1), sums, by_input]
        )

    undo = _undo_curvature(
        states.mean(0),
        problems.penalty,
        float(counts.mean()),
        learner.curvature,
        learner.outputs,
    )

    def precondition(gradients: Tensor, which: Tensor) -> Tensor:
        return torch.cat(
            [undo(gradients[:inner], which), gradients[inner:] / (1 / sites + SLIGHT)]
        )

    start = torch.zeros(inner + sites, len(problems), dtype=states.dtype)
    minimum = minimise(evaluate, start, precondition, tolerance)
    _, weights, scores = score(minimum.point, torch.arange(len(problems)))
    return Mixed(weights, scores, minimum.converged)


class Minimum(NamedTuple):
    """Where each problem ended, whether its gradient is within the tolerance, and the
    number of steps.
    """

    point: Tensor
    converged: Tensor
    steps: Tensor


def minimise(
    evaluate: Evaluate,
    start: Tensor,
    precondition: Precondition,
    tolerance: float = 1e-4,
) -> Minimum:
    """Minimise every column of `start` by preconditioned L-BFGS, until its largest
    gradient entry is within tolerance.

    `evaluate(points, which)` gives the values `[column]` and gradients of the columns
    that `which` names, and `precondition(gradients, which)` multiplies by an
    approximate inverse Hessian. scipy's L-BFGS takes one problem at a time: here all
    problems share each matrix product, and a column that has converged is not evaluated
    again.

    >>> bowl = lambda points, which: ((points - 3).square().sum(0), 2 * (points - 3))
    >>> minimise(bowl, torch.zeros(2, 1), lambda gradients, which: gradients).point.T.tolist()
    [[3.0, 3.0]]
    """
    which = torch.arange(start.shape[1], device=start.device)
    minimum = Minimum(
        start.clone(),
        torch.zeros_like(which, dtype=torch.bool),
        torch.full_like(which, MOST_STEPS),
    )
    descent = _Descent(start.clone(), *evaluate(start, which), [])
    for step in range(MOST_STEPS + 1):
        converged = descent.gradient.abs().amax(0) <= tolerance
        done = converged | descent.stuck
        if step == MOST_STEPS or bool(done.all()):
            done = torch.ones_like(done)
        if bool(done.any()):
            minimum.point[:, which[done]] = descent.point[:, done]
            minimum.converged[which[done]] = converged[done]
            minimum.steps[which[done]] = step
            which, descent = which[~done], descent.of(~done)
        if not len(which):
            break
        descent = _step(descent, which, evaluate, precondition)
    return minimum


@dataclass(frozen=True, eq=False)
class _Descent:
    """The columns at one step: point, value, gradient; past steps, with their gradient
    changes and 1 / the product.
    """

    point: Tensor
    value: Tensor
    gradient: Tensor
    past: list[tuple[Tensor, Tensor, Tensor]]
    failed: Tensor | None = None

    @property
    def stuck(self) -> Tensor:
        """The columns in which no step goes down any more: they are as low as this
        precision can tell.
        """
        return (
            torch.zeros_like(self.value, dtype=torch.bool)
            if self.failed is None
            else self.failed
        )

    def of(self, kept: Tensor) -> "_Descent":
        past = [
            (step[:, kept], change[:, kept], inverse[kept])
            for step, change, inverse in self.past
        ]
        return _Descent(
            self.point[:, kept], self.value[kept], self.gradient[:, kept], past
        )


def _step(
    descent: _Descent, which: Tensor, evaluate: Evaluate, precondition: Precondition
) -> _Descent:
    """One step down, halved in each column until it decreases the value enough."""
    direction = _direction(descent, which, precondition)
    slope = (descent.gradient * direction).sum(0)
    length = torch.ones_like(slope)
    point = descent.point + direction
    value, gradient = evaluate(point, which)
    # Rounding of the value.
    slack = 4 * torch.finfo(value.dtype).eps * descent.value.abs()
    for _ in range(MOST_HALVINGS):
        too_high = ~(value <= descent.value + DECREASE * length * slope + slack)
        if not bool(too_high.any()):
            break
        again = too_high.nonzero()[:, 0]
        long, steep = length[again], slope[again]
        # Of the parabola.
        lowest = (
            -steep
            * long**2
            / (2 * (value[again] - descent.value[again] - steep * long))
        )
        length[again] = torch.where(lowest.isfinite(), lowest, 0 * lowest).clamp(
            0.1 * long, 0.5 * long
        )
        point[:, again] = descent.point[:, again] + length[again] * direction[:, again]
        value[again], gradient[:, again] = evaluate(point[:, again], which[again])
    failed = ~(value <= descent.value + slack) | (slope >= 0)
    step, change = point - descent.point, gradient - descent.gradient
    product = (step * change).sum(0)
    curved = product > torch.finfo(product.dtype).eps * (change * change).sum(0)
    inverse = torch.where(
        curved,
        1 / product.clamp_min(torch.finfo(product.dtype).tiny),
        torch.zeros_like(product),
    )
    kept = (
        torch.where(failed, descent.point, point),
        torch.where(failed, descent.value, value),
    )
    gradient = torch.where(failed, descent.gradient, gradient)
    return _Descent(
        *kept, gradient, [*descent.past, (step, change, inverse)][-MEMORY:], failed
    )


def _direction(descent: _Descent, which: Tensor, precondition: Precondition) -> Tensor:
    """The two-loop recursion of L-BFGS."""
    direction = descent.gradient.clone()
    shares = []
    for step, change, inverse in reversed(descent.past):
        shares.append(inverse * (step * direction).sum(0))
        direction -= shares[-1] * change
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
