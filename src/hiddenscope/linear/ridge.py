"""Ridge regression for many problems over the same states at once, in closed form and in float64.

The products of the states are taken once: rows that are always learnt from together, folds say, are summed together,
and those of a problem are the sum over its folds. With fewer rows than channels it is the rows that are solved for.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.problems import TINY, Fitted, Learner, Problems, alike, product


def ridge() -> Learner:
    """Ridge regression: the squared error, halved."""
    return Learner(_fit, losses, head, 1, 1.0)


def losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error of each row."""
    return 0.5 * (scores[:, 0] - targets).square()


def head(scores: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss of each problem, and its slope by every score."""
    return (losses(scores, targets) * weights).sum(0), (scores - targets[:, None]) * weights[:, None]


def _fit(states: Tensor, problems: Problems) -> Fitted:
    """Coefficients for states that are standardised over all rows; each problem standardises them over its own."""
    wide, targets = states.double(), problems.targets.double()
    coef = torch.empty(states.shape[1], len(problems), dtype=torch.float64)
    intercept = torch.empty(len(problems), dtype=torch.float64)
    sets, which = problems.sets
    sums = _Sums.over(wide, targets, sets) if int(sets.sum(1).min()) >= wide.shape[1] else None
    for number, rows in enumerate(sets):
        own = (which == number).nonzero()[:, 0]
        goals = targets[own][:, rows].T
        level = goals.mean(0)
        if sums is not None:
            coef[:, own], center = sums.solve(number, own, level, problems.penalty[own])
        else:
            coef[:, own], center = _by_rows(wide[rows], goals - level, problems.penalty[own])
        intercept[own] = level - center @ coef[:, own]
    return Fitted(coef[:, None], intercept[None], torch.ones(len(problems), dtype=torch.bool))


class _Sums(NamedTuple):
    """States, their products with one another and with the targets, summed over rows that are learnt from together.

    `held` flags `[set, part]` say which of these parts each set of rows is made of.
    """

    held: Tensor
    counts: Tensor
    states: Tensor
    products: Tensor
    aims: Tensor
    whole: Tensor

    @classmethod
    def over(cls, states: Tensor, targets: Tensor, sets: Tensor) -> "_Sums":
        flags = alike(np.packbits(sets.numpy().T, axis=1))
        _, first, part_of, counts = np.unique(flags, return_index=True, return_inverse=True, return_counts=True)
        order = torch.from_numpy(np.argsort(part_of.reshape(-1), kind="stable"))
        rows = torch.split(states[order], counts.tolist())
        goals = torch.split(targets.T[order], counts.tolist())
        products = torch.stack([product(some) for some in rows])
        return cls(
            sets[:, torch.from_numpy(first)],
            torch.from_numpy(counts),
            torch.stack([torch.ones(1, len(some), dtype=some.dtype) @ some for some in rows])[:, 0],
            products,
            torch.stack([some.T @ goal for some, goal in zip(rows, goals, strict=True)]),
            products.sum(0),
        )

    def solve(self, number: int, own: Tensor, level: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients of some problems that learn from one set of rows, and the mean of its states.

        Coefficients of standardised states weigh what those of the states do times the deviation: so it is the penalty
        that is scaled here, by the variance, and not the states.
        """
        held = self.held[number]
        count = int(self.counts[held].sum())
        mean = self.states[held].sum(0) / count
        inner = self.whole.addr(mean, mean, alpha=-count)
        for part in (~held).nonzero()[:, 0]:
            inner -= self.products[part]
        variance = inner.diagonal() / count
        scale = torch.where(variance <= TINY, torch.ones_like(variance), variance)
        goal = self.aims[held].sum(0)[:, own] - count * torch.outer(mean, level)
        return _solved(inner, goal, penalty, scale), mean


def _by_rows(states: Tensor, goal: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """The same, solved for rows, which are fewer than channels."""
    mean, variance = states.mean(0), states.var(0, correction=0)
    deviation = torch.where(variance <= TINY, torch.ones_like(variance), variance).sqrt()
    scaled = (states - mean) / deviation
    solved = scaled.T @ _solved(product(scaled.T), goal, penalty, torch.ones(len(states), dtype=states.dtype))
    return solved / deviation[:, None], mean


def _solved(inner: Tensor, goal: Tensor, penalty: Tensor, scale: Tensor) -> Tensor:
    """`(inner + penalty * scale) x = goal`, column by column."""
    solved = torch.empty_like(goal)
    for one in set(penalty.tolist()):
        some = penalty == one
        shifted = inner.clone()
        shifted.diagonal().add_(one * scale)
        solved[:, some] = torch.cholesky_solve(goal[:, some], torch.linalg.cholesky(shifted))
    return solved
