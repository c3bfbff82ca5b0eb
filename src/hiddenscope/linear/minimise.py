"""Many smooth problems minimised side by side: L-BFGS with a preconditioner, a column of numbers a problem."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Evaluate: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Precondition: TypeAlias = Callable[[Tensor, Tensor], Tensor]

MEMORY = 8
MOST_STEPS = 500
MOST_HALVINGS = 20
DECREASE = 1e-4  # of what the slope promises, the share that a step must keep


class Minimum(NamedTuple):
    """Where each problem came to rest, whether its gradient is as small as was asked for, and after how many steps."""

    place: Tensor
    converged: Tensor
    steps: Tensor


def minimise(evaluate: Evaluate, start: Tensor, precondition: Precondition, tolerance: float = 1e-4) -> Minimum:
    """Minimise every column of `start` by itself, until the largest number of its gradient is within the tolerance.

    `evaluate(places, which)` gives the values `[column]` and gradients of the columns that `which` names, and
    `precondition(gradients, which)` roughly undoes their curvature. A column that is done is not evaluated again.

    >>> bowl = lambda places, which: ((places - 3).square().sum(0), 2 * (places - 3))
    >>> minimise(bowl, torch.zeros(2, 1), lambda gradients, which: gradients).place.T.tolist()
    [[3.0, 3.0]]
    """
    columns = start.shape[1]
    found = Minimum(
        start.clone(), torch.zeros(columns, dtype=torch.bool), torch.full((columns,), MOST_STEPS, dtype=torch.int64)
    )
    which = torch.arange(columns)
    walk = _Walk(start.clone(), *evaluate(start, which), [])
    for step in range(MOST_STEPS + 1):
        near = walk.gradient.abs().amax(0) <= tolerance
        rest = near | walk.stuck
        if step == MOST_STEPS or bool(rest.all()):
            rest = torch.ones_like(rest)
        if bool(rest.any()):
            found.place[:, which[rest]] = walk.place[:, rest]
            found.converged[which[rest]] = near[rest]
            found.steps[which[rest]] = step
            which, walk = which[~rest], walk.of(~rest)
        if not len(which):
            break
        walk = _step(walk, which, evaluate, precondition)
    return found


@dataclass(frozen=True, eq=False)
class _Walk:
    """Where the columns are, what is there, the last steps (step, change of gradient, one over their product)."""

    place: Tensor
    value: Tensor
    gradient: Tensor
    past: list[tuple[Tensor, Tensor, Tensor]]
    fails: Tensor | None = None

    @property
    def stuck(self) -> Tensor:
        """The columns in which no step goes down any more: they are as low as this precision can tell."""
        return torch.zeros_like(self.value, dtype=torch.bool) if self.fails is None else self.fails

    def of(self, kept: Tensor) -> "_Walk":
        past = [(step[:, kept], change[:, kept], over[kept]) for step, change, over in self.past]
        return _Walk(self.place[:, kept], self.value[kept], self.gradient[:, kept], past)


def _step(walk: _Walk, which: Tensor, evaluate: Evaluate, precondition: Precondition) -> _Walk:
    direction = _direction(walk, which, precondition)
    slope = (walk.gradient * direction).sum(0)
    length = torch.ones_like(slope)
    place = walk.place + direction
    value, gradient = evaluate(place, which)
    slack = 4 * torch.finfo(value.dtype).eps * walk.value.abs()  # of what rounding alone makes of a value
    for _ in range(MOST_HALVINGS):
        high = ~(value <= walk.value + DECREASE * length * slope + slack)
        if not bool(high.any()):
            break
        again = high.nonzero()[:, 0]
        long, steep = length[again], slope[again]
        best = -steep * long**2 / (2 * (value[again] - walk.value[again] - steep * long))  # of the parabola through it
        length[again] = torch.where(best.isfinite(), best, 0 * best).clamp(0.1 * long, 0.5 * long)
        place[:, again] = walk.place[:, again] + length[again] * direction[:, again]
        value[again], gradient[:, again] = evaluate(place[:, again], which[again])
    fails = ~(value <= walk.value + slack) | (slope >= 0)
    step, change = place - walk.place, gradient - walk.gradient
    product = (step * change).sum(0)
    bent = product > torch.finfo(product.dtype).eps * (change * change).sum(0)
    over = torch.where(bent, 1 / product.clamp_min(torch.finfo(product.dtype).tiny), torch.zeros_like(product))
    kept = torch.where(fails, walk.place, place), torch.where(fails, walk.value, value)
    gradient = torch.where(fails, walk.gradient, gradient)
    return _Walk(*kept, gradient, [*walk.past, (step, change, over)][-MEMORY:], fails)


def _direction(walk: _Walk, which: Tensor, precondition: Precondition) -> Tensor:
    """The two loops of L-BFGS, downhill."""
    toward = walk.gradient.clone()
    shares = []
    for step, change, over in reversed(walk.past):
        shares.append(over * (step * toward).sum(0))
        toward -= shares[-1] * change
    toward = precondition(toward, which)
    if walk.past:
        _, change, over = walk.past[-1]
        bend = over * (change * precondition(change, which)).sum(0)
        toward = toward / torch.where(bend > 0, bend, torch.ones_like(bend))
    for (step, change, over), share in zip(walk.past, reversed(shares), strict=True):
        toward += (share - over * (change * toward).sum(0)) * step
    return -toward
