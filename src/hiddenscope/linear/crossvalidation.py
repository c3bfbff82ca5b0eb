"""Nested cross-validation (Stone 1974).

Every row is predicted by a fit that was not trained on it, with a penalty that was
selected without it.
"""

import hashlib
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.problems import Fitted, Learner, Problems
from hiddenscope.states.arrays import Ints

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
# The penalty where there are too few folds to select one.
DEFAULT_PENALTY = 100.0


def assign_folds(
    classes: Ints, groups: Sequence[str], folds: int, seed: int = 0
) -> Ints:
    """Return the fold of every row, keeping groups whole and classes evenly spread.

    The largest group is placed first, and groups of one size in an order that depends
    on their names and the seed alone. So a row goes to the same fold wherever it stands
    in the data, which scikit-learn's `StratifiedGroupKFold` does not promise.

    >>> folds = assign_folds(np.array([0, 0, 1, 1]), ["a", "b", "c", "d"], 2)
    >>> folds.reshape(2, 2).sum(1).tolist()
    [1, 1]
    """
    names, group_of = np.unique(np.array(groups, dtype=object), return_inverse=True)
    counts = np.zeros((len(names), int(classes.max()) + 1))
    np.add.at(counts, (group_of, classes), 1)
    # The share of each class that a group holds.
    shares = counts / np.maximum(counts.sum(0), 1)

    def priority(group: int) -> tuple[float, int]:
        return -counts[group].sum(), stable_hash(str(names[group]), seed)

    filled = np.zeros((folds, counts.shape[1]))
    sizes = np.zeros(folds)
    fold_of = np.zeros(len(names), dtype=np.int64)
    for group in sorted(range(len(names)), key=priority):
        # How fast the sum of squared class shares of a fold grows with this group. It
        # is smallest in the fold that lacks the group's classes most. Rounded, so that
        # folds that differ by rounding alone are compared by size.
        growth = np.round(filled @ shares[group], 12)
        fold = int(np.lexsort((sizes, growth))[0])
        filled[fold] += shares[group]
        sizes[fold] += counts[group].sum()
        fold_of[group] = fold
    return fold_of[group_of]


def stable_hash(name: str, seed: int) -> int:
    """Return a number below 2**64 that depends on the name and the seed alone."""
    # Texts may hold lone surrogates, which plain UTF-8 refuses to encode.
    content = f"{seed}:".encode() + name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


class CrossValidated(NamedTuple):
    """The fits of one site.

    `scores` `[target set, row, output]` come from the fit that was not trained on the
    row. `penalty` has one entry per fold, and `inner_loss` `[penalty, fold]` is the
    mean loss of a row on inner folds. `whole` is fitted to all rows.
    """

    scores: Tensor
    penalty: Tensor
    inner_loss: Tensor
    whole: Fitted
    whole_penalty: float


def cross_validate(
    states: Tensor, targets: Tensor, folds: Ints, learner: Learner
) -> CrossValidated:
    """Predict every row of standardised states `[row, width]` from the other folds.

    `targets` `[target set, row]` has the true targets first. The penalty of a fold is
    selected for the true targets, by cross-validation within the other folds; the other
    target sets use the same penalties.
    """
    count = int(folds.max()) + 1
    inner_loss = inner_losses(states, targets[0], folds, learner)
    penalty, whole_penalty = _select_penalties(inner_loss)
    sets = len(targets)
    train = training_rows(folds)
    # One fit per target set and fold, and a last one of the true targets on all rows.
    problems = Problems(
        torch.cat([train[:-1].repeat(sets, 1), train[-1:]]),
        torch.cat([targets.repeat_interleave(count, 0), targets[:1]]),
        torch.cat([penalty.repeat(sets), penalty.new_tensor([whole_penalty])]),
    )
    fitted = learner.fit(states, problems)
    by_fold = fitted.scores(states)[:, :, :-1]
    by_fold = by_fold.view(len(folds), learner.outputs, sets, count)
    held_out = by_fold[torch.arange(len(folds)), :, :, torch.from_numpy(folds)]
    whole = Fitted(fitted.coef[..., -1:], fitted.intercept[..., -1:], fitted.converged)
    return CrossValidated(
        held_out.permute(2, 0, 1), penalty, inner_loss, whole, whole_penalty
    )


def training_rows(folds: Ints) -> Tensor:
    """Return the training rows `[fold + 1, row]` of each fold's fit, then all rows.

    >>> training_rows(np.array([0, 1])).int().tolist()
    [[0, 1], [1, 0], [1, 1]]
    """
    count = int(folds.max()) + 1
    return torch.from_numpy(folds[None] != np.arange(count + 1)[:, None])


def inner_losses(
    states: Tensor, targets: Tensor, folds: Ints, learner: Learner
) -> Tensor:
    """Return the mean loss `[penalty, fold]` of inner cross-validation.

    Each fold is left out, and every other fold is predicted from the rest. With two
    folds nothing remains to train on, and all losses are NaN.
    """
    count = int(folds.max()) + 1
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    if count < 3:
        return grid.new_full((len(grid), count), float("nan"))
    # A fit without folds a and b serves twice: it predicts b where a is left out, and a
    # where b is. So nested cross-validation takes half the fits.
    pairs = list(combinations(range(count), 2))
    train = torch.from_numpy(np.array([~np.isin(folds, pair) for pair in pairs]))
    problems = Problems(
        train.repeat(len(grid), 1),
        targets.expand(len(pairs) * len(grid), -1),
        grid.repeat_interleave(len(pairs)),
    )
    scores = learner.fit(states, problems).scores(states)
    losses = learner.losses(scores, problems.targets.T).double()
    losses = losses.T.view(len(grid), len(pairs), -1)
    totals = torch.zeros(len(grid), count, dtype=torch.float64)
    sizes = torch.zeros(count, dtype=torch.float64)
    for number, pair in enumerate(pairs):
        for tested, left_out in (pair, pair[::-1]):
            rows = torch.from_numpy(folds == tested)
            totals[:, left_out] += losses[:, number, rows].sum(1)
            sizes[left_out] += int(rows.sum())
    return totals / sizes


def _select_penalties(inner_loss: Tensor) -> tuple[Tensor, float]:
    """Return the penalty with the least inner loss for each fold, and for all rows."""
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    if bool(inner_loss.isnan().any()):
        folds = inner_loss.shape[1]
        return grid.new_full((folds,), DEFAULT_PENALTY), DEFAULT_PENALTY
    # `argmin` takes the first of equal losses: the flip makes that the larger penalty,
    # and so the simpler fit.
    descending = inner_loss.flip(0)
    grid = grid.flip(0)
    of_all_rows = float(grid[descending.mean(1).argmin()])
    return grid[descending.argmin(0)], of_all_rows
