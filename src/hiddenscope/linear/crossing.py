"""Crossing: every row is predicted by a fit that never saw it, with a penalty chosen without it."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.linear.problems import Fitted, Learner, Problems

Ints = NDArray[np.int64]

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
MIDDLE = 100.0  # where folds are too few to choose


class Crossed(NamedTuple):
    """What the fits of one site came to.

    `scores` `[set of targets, row, output]` are those of the fit that did not see the row. `penalty` has one a fold,
    and `lost` is what each penalty lost a row on inner folds, `[penalty, fold]`. `whole` is fitted to all rows.
    """

    scores: Tensor
    penalty: Tensor
    lost: Tensor
    whole: Fitted
    whole_penalty: float


def crossed(
    states: Tensor, targets: Tensor, folds: Ints, learner: Learner, penalties: Sequence[float] = PENALTIES
) -> Crossed:
    """Predict every row of standardised states `[row, width]` from the other folds.

    `targets` `[set, row]` has the true ones first. For each fold the penalty is that which serves the true targets best
    on the other folds, each predicted from the rest; other sets of targets are fitted with the same penalties.
    """
    count = int(folds.max()) + 1
    lost = inner_losses(states, targets[0], folds, learner, penalties)
    grid = torch.tensor(penalties, dtype=torch.float64)
    chosen, last = _best(lost, grid)
    held = np.arange(count)
    train = torch.from_numpy(folds[None] != held[:, None])
    sets = len(targets)
    everything = torch.ones(1, len(folds), dtype=torch.bool)
    fitted = learner.fit(
        states,
        Problems(
            torch.cat([train.repeat(sets, 1), everything]),
            torch.cat([targets.repeat_interleave(count, 0), targets[:1]]),
            torch.cat([chosen.repeat(sets), torch.tensor([last], dtype=torch.float64)]),
        ),
    )
    made = fitted.scores(states)[:, :, :-1].view(len(folds), learner.outputs, sets, count)
    own = made[torch.arange(len(folds)), :, :, torch.from_numpy(folds)]
    whole = Fitted(fitted.coef[..., -1:], fitted.intercept[..., -1:], fitted.converged)
    return Crossed(own.permute(2, 0, 1), chosen, lost, whole, last)


def inner_losses(
    states: Tensor, targets: Tensor, folds: Ints, learner: Learner, penalties: Sequence[float] = PENALTIES
) -> Tensor:
    """What a row of the other folds loses under each penalty, `[penalty, fold]`, when that fold is left out.

    A fit without folds a and b serves both: it predicts b where a is left out, and a where b is. So all of nested
    cross-validation takes half the fits. With two folds there is nothing to learn from, and all is NaN.
    """
    count = int(folds.max()) + 1
    pairs = list(combinations(range(count), 2)) if count > 2 else []
    lost = torch.full((len(penalties), count), float("nan"), dtype=torch.float64)
    if not pairs or len(penalties) == 1:
        return lost
    train = torch.from_numpy(np.array([~np.isin(folds, pair) for pair in pairs]))
    grid = torch.tensor(penalties, dtype=torch.float64)
    problems = Problems(
        train.repeat(len(grid), 1),
        targets.expand(len(pairs) * len(grid), -1),
        grid.repeat_interleave(len(pairs)),
    )
    fitted = learner.fit(states, problems)
    losses = learner.losses(fitted.scores(states), problems.targets.T).double().T.view(len(grid), len(pairs), -1)
    totals, sizes = torch.zeros(len(grid), count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for number, pair in enumerate(pairs):
        for tested, left_out in (pair, pair[::-1]):
            rows = torch.from_numpy(folds == tested)
            totals[:, left_out] += losses[:, number, rows].sum(1)
            sizes[left_out] += int(rows.sum())
    return totals / sizes


def _best(lost: Tensor, penalties: Tensor) -> tuple[Tensor, float]:
    """The penalty for each fold, and for all rows; of two that serve as well, the larger."""
    if bool(lost.isnan().any()):
        one = float(penalties[0]) if len(penalties) == 1 else MIDDLE
        return torch.full((lost.shape[1],), one, dtype=torch.float64), one
    best = len(penalties) - 1 - lost.flip(0).argmin(0)
    return penalties[best], float(penalties[len(penalties) - 1 - int(lost.mean(1).flip(0).argmin())])
