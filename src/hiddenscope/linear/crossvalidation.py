"""Cross-validation: every row is predicted by a fit that never saw it, with a penalty
that was chosen without it.
"""

import hashlib
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.linear.problems import Fitted, Learner, Problems

Ints: TypeAlias = NDArray[np.int64]

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
MIDDLE = 100.0  # the penalty where there are too few folds to choose one


def assign_folds(
    classes: Ints, groups: Sequence[str], folds: int, seed: int = 0
) -> Ints:
    """The fold of every row: groups stay whole, and every class is spread as evenly as
    they allow.

    A group is named by its content, and its turn depends on the name and the seed
    alone: so a row goes to the same fold wherever it stands, which scikit-learn's
    `StratifiedGroupKFold` does not promise.

    >>> assign_folds(np.array([0, 0, 1, 1]), ["a", "b", "c", "d"], 2).reshape(2, 2).sum(1).tolist()
    [1, 1]
    """
    names, group_of = np.unique(np.array(groups, dtype=object), return_inverse=True)
    counts = np.zeros((len(names), int(classes.max()) + 1))
    np.add.at(counts, (group_of, classes), 1)
    shares = counts / np.maximum(counts.sum(0), 1)
    order = sorted(
        range(len(names)),
        key=lambda group: (-counts[group].sum(), hashed(str(names[group]), seed)),
    )
    filled, sizes = np.zeros((folds, counts.shape[1])), np.zeros(folds)
    fold_of = np.zeros(len(names), dtype=np.int64)
    for group in order:
        # The growth of the sum of squared class shares: least in the fold that lacks
        # the classes of this group most.
        growth = np.round(filled @ shares[group], 12)
        fold = int(np.lexsort((sizes, growth))[0])
        filled[fold] += shares[group]
        sizes[fold] += counts[group].sum()
        fold_of[group] = fold
    return fold_of[group_of]


def hashed(name: str, seed: int) -> int:
    """A number below 2**64 that depends on the name and the seed alone."""
    digest = hashlib.blake2b(
        f"{seed}:".encode() + name.encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big")


class CrossValidated(NamedTuple):
    """The fits of one site.

    `scores` `[target set, row, output]` come from the fit that did not see the row.
    `penalty` has one a fold, and `inner_loss` `[penalty, fold]` is the mean loss of a
    row on inner folds. `whole` is fitted to all rows.
    """

    scores: Tensor
    penalty: Tensor
    inner_loss: Tensor
    whole: Fitted
    whole_penalty: float


def cross_validate(
    states: Tensor,
    targets: Tensor,
    folds: Ints,
    learner: Learner,
    penalties: Sequence[float] = PENALTIES,
) -> CrossValidated:
    """Predict every row of standardised states `[row, width]` from the other folds.

    `targets` `[target set, row]` has the true targets first. For each fold, the penalty
    is the one with the least loss of the true targets on the other folds, each
    predicted from the rest; other target sets use the same penalties.
    """
    count = int(folds.max()) + 1
    inner_loss = inner_losses(states, targets[0], folds, learner, penalties)
    chosen, whole_penalty = _best(
        inner_loss, torch.tensor(penalties, dtype=torch.float64)
    )
    train = torch.from_numpy(folds[None] != np.arange(count)[:, None])
    sets = len(targets)
    all_rows = torch.ones(1, len(folds), dtype=torch.bool)
    fitted = learner.fit(
        states,
        Problems(
            torch.cat([train.repeat(sets, 1), all_rows]),
            torch.cat([targets.repeat_interleave(count, 0), targets[:1]]),
            torch.cat(
                [
                    chosen.repeat(sets),
                    torch.tensor([whole_penalty], dtype=torch.float64),
                ]
            ),
        ),
    )
    by_fold = fitted.scores(states)[:, :, :-1].view(
        len(folds), learner.outputs, sets, count
    )
    scores = by_fold[torch.arange(len(folds)), :, :, torch.from_numpy(folds)]
    whole = Fitted(fitted.coef[..., -1:], fitted.intercept[..., -1:], fitted.converged)
    return CrossValidated(
        scores.permute(2, 0, 1), chosen, inner_loss, whole, whole_penalty
    )


def inner_losses(
    states: Tensor,
    targets: Tensor,
    folds: Ints,
    learner: Learner,
    penalties: Sequence[float] = PENALTIES,
) -> Tensor:
    """The mean loss of a row of the other folds under each penalty, `[penalty, fold]`,
    when that fold is left out.

    A fit without folds a and b serves twice: it predicts b where a is left out, and a
    where b is. So nested cross-validation takes half the fits. With two folds there is
    nothing to train on, and all is NaN.
    """
    count = int(folds.max()) + 1
    pairs = list(combinations(range(count), 2)) if count > 2 else []
    if not pairs or len(penalties) == 1:
        return torch.full((len(penalties), count), float("nan"), dtype=torch.float64)
    train = torch.from_numpy(np.array([~np.isin(folds, pair) for pair in pairs]))
    grid = torch.tensor(penalties, dtype=torch.float64)
    problems = Problems(
        train.repeat(len(grid), 1),
        targets.expand(len(pairs) * len(grid), -1),
        grid.repeat_interleave(len(pairs)),
    )
    scores = learner.fit(states, problems).scores(states)
    losses = (
        learner.losses(scores, problems.targets.T)
        .double()
        .T.view(len(grid), len(pairs), -1)
    )
    totals, sizes = (
        torch.zeros(len(grid), count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.float64),
    )
    for number, pair in enumerate(pairs):
        for tested, left_out in (pair, pair[::-1]):
            rows = torch.from_numpy(folds == tested)
            totals[:, left_out] += losses[:, number, rows].sum(1)
            sizes[left_out] += int(rows.sum())
    return totals / sizes


def _best(inner_loss: Tensor, penalties: Tensor) -> tuple[Tensor, float]:
    """The penalty for each fold, and for all rows; of two with equal loss, the larger."""
    if bool(inner_loss.isnan().any()):
        only = float(penalties[0]) if len(penalties) == 1 else MIDDLE
        return torch.full((inner_loss.shape[1],), only, dtype=torch.float64), only
    last = len(penalties) - 1
    best = last - inner_loss.flip(0).argmin(0)
    return penalties[best], float(
        penalties[last - int(inner_loss.mean(1).flip(0).argmin())]
    )
