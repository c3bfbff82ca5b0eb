"""L-BFGS for many problems at once (Nocedal 1980), preconditioned.

scipy's L-BFGS takes one problem at a time. Here all problems share each matrix product,
and a problem that has converged is not evaluated again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

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


class Minimum(NamedTuple):
    """Where each column ended, whether it converged, and after how many steps."""

    point: Tensor
    converged: Tensor
    steps: Tensor


def minimise(
    evaluate: Evaluate,
    start: Tensor,
    precondition: Precondition,
    tolerance: float = 1e-4,
) -> Minimum:
    """Minimise every column of `start`, until no gradient entry exceeds the tolerance.

    >>> bowl = lambda points, which: ((points - 3).square().sum(0), 2 * (points - 3))
    >>> minimum = minimise(bowl, torch.zeros(2, 1), lambda gradients, which: gradients)
    >>> minimum.point.T.tolist()
    [[3.0, 3.0]]
    """
    which = torch.arange(start.shape[1], device=start.device)
    minimum = Minimum(
        start.clone(),
        torch.zeros_like(which, dtype=torch.bool),
        torch.full_like(which, MAX_STEPS),
    )
    value, gradient = evaluate(start, which)
    stuck = torch.zeros_like(value, dtype=torch.bool)
    descent = _Descent(start.clone(), value, gradient, [], stuck)
    for step in range(MAX_STEPS + 1):
        converged = descent.gradient.abs().amax(0) <= tolerance
        done = converged | descent.stuck
        if step == MAX_STEPS:
            done = torch.ones_like(done)
        if bool(done.any()):
            minimum.point[:, which[done]] = descent.point[:, done]
            minimum.converged[which[done]] = converged[done]
            minimum.steps[which[done]] = step
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
        if not bool(too_high.any()):
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
