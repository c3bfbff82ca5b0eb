"""Logistic regression for many problems over the same states at once.

All problems share one matrix product a step, and the curvature of the states, which is nearly the same for all of
them, is undone by one Cholesky factor a penalty: some fifteen steps do what takes hundreds otherwise.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus

from hiddenscope.linear.few import fit_few
from hiddenscope.linear.minimise import minimise
from hiddenscope.linear.problems import Fitted, Learner, Problems, moments, product


def logistic(classes: int, tolerance: float = 1e-4) -> Learner:
    """Logistic regression into this many classes: one score for two of them, else one a class.

    The tolerance is of the largest number of the gradient of the mean loss, as scikit-learn's `tol` is.
    """
    outputs = 1 if classes == 2 else classes
    typical = (classes - 1) / classes**2
    fit = partial(_fit, outputs=outputs, typical=typical, tolerance=tolerance)
    return Learner(fit, losses, head, outputs, typical)


def losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Minus the log of the probability of each row's class."""
    if scores.shape[1] == 1:
        score = scores[:, 0]
        return softplus(score) - targets * score
    return -log_softmax(scores, 1).gather(1, targets[:, None])[:, 0]


def head(scores: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss of each problem, and its slope by every score."""
    if scores.shape[1] == 1:
        slopes = (scores.sigmoid() - targets[:, None]) * weights[:, None]
    else:
        slopes = scores.softmax(1)
        slopes.scatter_add_(1, targets[:, None], torch.full_like(slopes[:, :1], -1))
        slopes *= weights[:, None]
    return (losses(scores, targets) * weights).sum(0), slopes


FEW = 2  # times as many channels as rows, from where on rows are what is solved for


class _Columns(NamedTuple):
    """What belongs to some of the problems: mean and deviation `[width, 1, problem]`, targets and weights by row."""

    mean: Tensor
    deviation: Tensor
    targets: Tensor
    weights: Tensor
    decay: Tensor

    def of(self, which: Tensor) -> "_Columns":
        return self if len(which) == len(self.decay) else _Columns(*(part[..., which] for part in self))


def _fit(states: Tensor, problems: Problems, outputs: int, typical: float, tolerance: float) -> Fitted:
    """Coefficients for states that are standardised over all rows; each problem standardises them over its own."""
    rows, width = states.shape
    if FEW * rows <= width:
        return fit_few(states, problems, head, (outputs, typical), tolerance)
    counts = problems.counts.to(states)
    mean, deviation = (part[:, None] for part in moments(states, problems))
    weights = (problems.train / counts[:, None]).T.contiguous()
    every = _Columns(mean, deviation, problems.targets.T.contiguous(), weights, problems.penalty.to(states) / counts)

    def evaluate(places: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        own, place = every.of(which), places.view(width + 1, outputs, -1)
        coef = place[:-1]
        plain = coef / own.deviation
        intercept = place[-1] - (own.mean * plain).sum(0)
        scores = (states @ plain.view(width, -1)).view(rows, outputs, -1) + intercept
        value, slopes = head(scores, own.targets, own.weights)
        sums = slopes.sum(0)
        back = (slopes.view(rows, -1).T @ states).T.reshape(coef.shape)
        gradient = (back - own.mean * sums) / own.deviation + own.decay * coef
        value = value + 0.5 * own.decay * coef.square().sum((0, 1))
        return value, torch.cat([gradient, sums[None]]).view(-1, len(which))

    start = torch.zeros((width + 1) * outputs, len(problems), dtype=states.dtype)
    undo = curvature(states, problems.penalty, float(counts.mean()), typical, outputs)
    found = minimise(evaluate, start, undo, tolerance)
    place = found.place.view(width + 1, outputs, -1)
    coef = place[:-1] / deviation
    return Fitted(coef, place[-1] - (mean * coef).sum(0), found.converged)


def curvature(
    states: Tensor, penalty: Tensor, count: float, typical: float, outputs: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """What undoes the curvature of all problems, roughly: their rows are taken for all, and their weights for equal."""
    rows, width = states.shape
    products = product(states if rows >= width else states.T)
    solvers = {one: _solver(states, typical / rows, one / count, products) for one in set(penalty.tolist())}

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        done = gradient / typical
        chosen = penalty[which]
        for one, solve in solvers.items():
            some = chosen == one
            if bool(some.all()):
                part = gradient[:width]
                done[:width] = solve(part.reshape(width, -1)).view_as(part)
            elif bool(some.any()):
                part = gradient[:width, :, some]
                done[:width, :, some] = solve(part.reshape(width, -1)).view_as(part)
        return done.view_as(gradients)

    return undo


def _solver(states: Tensor, scale: float, decay: float, products: Tensor) -> Callable[[Tensor], Tensor]:
    """Solves `(scale * states.T @ states + decay) x = y`, on the smaller side of the states."""
    if len(states) >= states.shape[1]:
        inner = scale * products
        inner.diagonal().add_(decay)
        factor = torch.linalg.cholesky(inner)
        return lambda given: _solved(factor, given)
    outer = products.clone()
    outer.diagonal().add_(decay / scale)
    factor = torch.linalg.cholesky(outer)
    return lambda given: (given - states.T @ _solved(factor, states @ given)) / decay


def _solved(factor: Tensor, given: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, given, upper=False)
    whole: Tensor = torch.linalg.solve_triangular(factor.T, half, upper=True)
    return whole
