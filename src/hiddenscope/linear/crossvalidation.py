"""Nested cross-validation (Stone 1974), of the true labels and of many others.

Every row is predicted by a fit that was not trained on it, with a penalty that was
selected without it.

Other labellings of the same states show what scores chance produces: labels are
permuted (`measures.permutations`), which keeps the sample of labels and changes their
order, or the sample itself is drawn again (the bootstrap, Efron 1979). The whole
cross-validation is repeated for each, with a penalty of its own. Hundreds of logistic
regressions per site would cost far more than the probe itself. So each labelling is
fitted by the first step of Newton's method from zero, with the curvature that the
learner names. That step is a ridge regression, and one Cholesky factor serves all
labellings. Meaningless labels are best predicted with a large penalty, and then the
first step is nearly the last. Ridge regressions themselves are fitted exactly. The
states are standardised once, over all rows: labels play no part in that.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.linear.problems import Fitted, Learner, Problems, gram
from hiddenscope.states.arrays import Ints

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
# The penalty where there are too few folds to select one.
DEFAULT_PENALTY = 100.0
# Correlations of planted numbers with the prediction that they follow. Their squares
# are the shares of signal in the variance: 0, 0.06, 0.2, 0.42, 0.72 and 0.96.
STRENGTHS = (0.0, 0.25, 0.45, 0.65, 0.85, 0.98)
# An eigenvalue below this share of the largest is rounding.
RANK = 1e-12
# Scores that are held in memory together: 64 MiB of float64.
AT_ONCE = 1 << 23
# A class that is absent from the training rows would have an infinite intercept, so its
# share is taken as this.
SMALLEST_SHARE = 1e-6

ScoreMeasure: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Reduce scores to one or more tensors whose first dimension is the labelling.

It takes scores and the intercepts in them `[row, output, labelling]`, and targets
`[row, labelling]`.
"""


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
    filled = np.zeros((folds, counts.shape[1]))
    sizes = np.zeros(folds)
    fold_of = np.zeros(len(names), dtype=np.int64)
    hashes = [stable_hash(str(name), seed) for name in names]
    for group in np.lexsort((np.array(hashes, np.uint64), -counts.sum(1))):
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
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    penalty, whole_penalty = grid.new_full((count,), DEFAULT_PENALTY), DEFAULT_PENALTY
    if not inner_loss.isnan().any():
        penalty = grid[_least(inner_loss)]
        whole_penalty = float(grid[_least(inner_loss.mean(1))])
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
    whole = fitted._replace(
        coef=fitted.coef[..., -1:], intercept=fitted.intercept[..., -1:]
    )
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


def _least(losses: Tensor) -> Tensor:
    """Return the index of the penalty with the least loss, from `[penalty, ...]`."""
    # `argmin` takes the first of equal losses: the flip makes that the larger penalty,
    # and so the simpler fit.
    return len(PENALTIES) - 1 - losses.flip(0).argmin(0)


def cross_validate_labellings(
    states: Tensor,
    labellings: Tensor,
    folds: Ints,
    learner: Learner,
    measure: ScoreMeasure,
) -> tuple[Tensor, ...]:
    """Measure the held-out scores of standardised states `[row, width]`.

    `labellings` are `[labelling, row]`. They are scored in batches of limited size, and
    `measure` reduces each batch before the next one is scored.
    """
    fold_rows = []
    for fold in range(int(folds.max()) + 1):
        fold_rows.append(torch.from_numpy(np.flatnonzero(folds == fold)))
    features = row_features(states)
    parts = [features[rows] for rows in fold_rows]
    grams = torch.stack([gram(part) for part in parts])
    batch_size = max(1, AT_ONCE // (labellings.shape[1] * learner.outputs))
    measured = []
    for batch in torch.split(labellings, batch_size):
        targets = [batch[:, rows].T for rows in fold_rows]
        sums = _FoldSums.of(parts, grams, targets, learner)
        scores = torch.empty(
            len(states), learner.outputs, len(batch), dtype=torch.float64
        )
        intercepts = torch.empty_like(scores)
        penalties = _select_each_penalty(sums)
        for fold, rows in enumerate(fold_rows):
            # Scores of one fold under each penalty; every labelling takes its own.
            by_penalty = torch.stack([held_out for (held_out,) in sums.scores((fold,))])
            selected = penalties[fold].expand(1, *by_penalty.shape[1:])
            scores[rows] = by_penalty.gather(0, selected)[0]
            intercepts[rows] = sums.intercept((fold,))
        measured.append(measure(scores, intercepts, batch.T))
    return tuple(torch.cat(batches) for batches in zip(*measured, strict=True))


def row_features(states: Tensor) -> Tensor:
    """Return features with the same products between rows, at most one per row.

    A ridge regression depends on the states through these products alone, and wide
    states would make its matrices needlessly large. Any square root of the matrix of
    products will do: here that by eigenvectors, without those that are rounding.
    """
    rows, width = states.shape
    wide = states.double()
    if width <= rows:
        return wide
    eigenvalues, vectors = torch.linalg.eigh(gram(wide.T))
    significant = eigenvalues > eigenvalues[-1] * RANK
    # At least one, even where all states are equal.
    significant[-1] = True
    deviations = eigenvalues[significant].clamp_min(0).sqrt()
    features: Tensor = vectors[:, significant] * deviations
    return features


class _FoldSums(NamedTuple):
    """Sums over the rows of each fold, from which any set of folds can be fitted.

    `parts` are the features of each fold, `grams` their Gram matrices, and `targets`
    `[row, labelling]` their labels. The goal of an output is the target itself, or for
    several outputs 1 where the row is of that class and 0 elsewhere. `goal_sums`
    `[fold, output, labelling]` are sums of goals, and `products` of features times
    goals.
    """

    parts: Sequence[Tensor]
    grams: Tensor
    targets: Sequence[Tensor]
    goal_sums: Tensor
    products: Tensor
    learner: Learner

    @classmethod
    def of(
        cls,
        parts: Sequence[Tensor],
        grams: Tensor,
        targets: Sequence[Tensor],
        learner: Learner,
    ) -> "_FoldSums":
        goal_sums = []
        products = []
        for part, labels in zip(parts, targets, strict=True):
            goals = labels[:, None]
            if learner.outputs > 1:
                goals = goals == torch.arange(learner.outputs)[:, None]
            goals = goals.double()
            goal_sums.append(goals.sum(0))
            products.append(part.T @ goals.flatten(1))
        return cls(
            parts,
            grams,
            targets,
            torch.stack(goal_sums),
            torch.stack(products),
            learner,
        )

    def scores(self, left_out: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield, for each penalty, the scores of every fold that is left out."""
        folds, count = self._training_folds(left_out)
        sums = torch.stack([self.parts[fold].sum(0) for fold in folds])
        mean = sums.sum(0) / count
        level = self.goal_sums[folds].sum(0) / count
        # Gram matrix and products of the centred training rows: the free intercept of
        # a ridge regression amounts to centring.
        centred_gram = self.grams[folds].sum(0).addr(mean, mean, alpha=-count)
        hessian = self.learner.curvature * centred_gram
        right = self.products[folds].sum(0)
        right = right - count * torch.outer(mean, level.flatten())
        intercept = self.intercept(left_out)
        centred = [self.parts[fold] - mean for fold in left_out]
        for penalty in PENALTIES:
            penalised = hessian.clone()
            penalised.diagonal().add_(penalty)
            coef = torch.cholesky_solve(right, torch.linalg.cholesky(penalised))
            yield [(rows @ coef).view(-1, *level.shape) + intercept for rows in centred]

    def intercept(self, left_out: Sequence[int]) -> Tensor:
        """Return the scores that fit the training targets if states say nothing."""
        folds, count = self._training_folds(left_out)
        level = self.goal_sums[folds].sum(0) / count
        if self.targets[0].is_floating_point():
            return level
        shares = level.clamp(SMALLEST_SHARE, 1 - SMALLEST_SHARE)
        if self.learner.outputs == 1:
            return shares.logit()
        return shares.log()

    def _training_folds(self, left_out: Sequence[int]) -> tuple[list[int], int]:
        """Return the folds that are trained on, and the number of their rows."""
        folds = [fold for fold in range(len(self.parts)) if fold not in left_out]
        return folds, sum(len(self.parts[fold]) for fold in folds)


def _select_each_penalty(sums: _FoldSums) -> Tensor:
    """Return the index `[fold, labelling]` of the penalty with the least inner loss."""
    folds = len(sums.parts)
    labellings = sums.targets[0].shape[1]
    if folds == 2:
        # With one fold left out and one tested, nothing remains to train on.
        return torch.full((folds, labellings), PENALTIES.index(DEFAULT_PENALTY))
    losses = torch.zeros(len(PENALTIES), folds, labellings, dtype=torch.float64)
    # A fit without folds a and b predicts b where a is left out, and a where b is.
    for pair in combinations(range(folds), 2):
        for number, both in enumerate(sums.scores(pair)):
            for tested, left_out, scores in zip(pair, pair[::-1], both, strict=True):
                row_losses = sums.learner.losses(scores, sums.targets[tested])
                losses[number, left_out] += row_losses.sum(0)
    return _least(losses)


def bootstrap_classes(
    classes: Ints, count: int, seed: int, groups: Ints, folds: Ints
) -> Tensor | None:
    """Draw classes `[count, row]` with the shares of the sample (parametric bootstrap).

    Rows of a group get one class, and every class is spread evenly over the folds, as
    `assign_folds` does it. Return None where the rows of a group have several classes,
    as tokens of a text do.

    >>> rows = np.arange(100)
    >>> drawn = bootstrap_classes(rows % 2, 9, 0, rows, rows // 20)
    >>> by_fold = drawn.view(9, 5, 20).sum(2)
    >>> len(by_fold.sum(1).unique()) > 1, int((by_fold.amax(1) - by_fold.amin(1)).max())
    (True, 1)
    """
    generator = np.random.default_rng(seed)
    _, first_row = np.unique(groups, return_index=True)
    class_of_group = classes[first_row]
    if (class_of_group[groups] != classes).any():
        return None
    fold_of_group = folds[first_row]
    group_count = len(class_of_group)
    shares = np.bincount(class_of_group) / group_count
    fold_sizes = np.bincount(fold_of_group)
    fold_starts = np.cumsum(fold_sizes) - fold_sizes
    labellings = np.empty((count, group_count), dtype=np.int64)
    for labels in labellings:
        # Shuffle the groups of each fold, then line up all groups by their relative
        # rank in their fold: any run of this line takes evenly from every fold. The
        # random offset decides which folds get the groups that do not divide evenly.
        order = np.lexsort((generator.random(group_count), fold_of_group))
        fold = fold_of_group[order]
        rank = np.arange(group_count) - fold_starts[fold]
        offset = generator.random(len(fold_sizes))[fold]
        line = order[np.argsort((rank + offset) / fold_sizes[fold])]
        class_sizes = generator.multinomial(group_count, shares)
        labels[line] = np.repeat(np.arange(len(class_sizes)), class_sizes)
    return torch.from_numpy(labellings[:, groups])


def bootstrap_numbers(numbers: Tensor, count: int, seed: int, groups: Ints) -> Tensor:
    """Draw the numbers of whole groups with replacement, `[count, row]`.

    Where all rows of a group have one number, each group gets the number of a drawn
    group. Otherwise the numbers of the drawn groups are laid over the rows, one group
    after another. The numbers must not all be equal: drawing them would never end.

    >>> numbers, groups = torch.tensor([1.0, 1, 2, 2]), np.array([0, 0, 1, 1])
    >>> bootstrap_numbers(numbers, 50, 0, groups).unique(dim=0).tolist()
    [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 1.0, 1.0]]
    """
    generator = np.random.default_rng(seed)
    order = np.argsort(groups, kind="stable")
    ordered = numbers.numpy()[order]
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    number_of_group = ordered[starts]
    uniform = bool((np.repeat(number_of_group, sizes) == ordered).all())
    labellings = np.empty((count, len(ordered)))
    for labels in labellings:
        labels[:] = 0
        # Numbers that come out all equal have no variance to explain, so that R² does
        # not exist. They are drawn again.
        while not np.ptp(labels):
            drawn = generator.integers(len(sizes), size=len(sizes))
            if uniform:
                labels[:] = number_of_group[drawn][groups]
            else:
                parts = [ordered[starts[k] : starts[k] + sizes[k]] for k in drawn]
                # Drawn groups may have fewer rows in all: `np.resize` repeats them.
                labels[order] = np.resize(np.concatenate(parts), len(ordered))
    return torch.from_numpy(labellings)


def plant_signal(noise: Tensor, predicted: Tensor) -> Tensor:
    """Mix noise `[..., labelling, row]` with a prediction `[..., row]`.

    The labellings are split evenly over `STRENGTHS`, in that order, so their number
    must be a multiple of six. Noise of variance 1 keeps its variance.

    >>> planted = plant_signal(torch.ones(6, 2), torch.tensor([3.0, 5.0]))
    >>> planted[:2].tolist()
    [[1.0, 1.0], [0.7182458639144897, 1.2182458639144897]]
    """
    centred = predicted - predicted.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    signal = centred / torch.where(deviation > 0, deviation, 1.0)
    labellings_each = noise.shape[-2] // len(STRENGTHS)
    strength = torch.tensor(STRENGTHS).to(noise)
    strength = strength.repeat_interleave(labellings_each)[:, None]
    return strength * signal.unsqueeze(-2) + (1 - strength.square()).sqrt() * noise
