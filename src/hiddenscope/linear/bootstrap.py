"""Bootstrap labellings: labels drawn at random, to measure how a score varies.

Permutations (`measures.permutations`) keep the sample of labels and only change their
order. The bootstrap (Efron 1979) draws the sample itself again. Both leave the states
as they are.

bootstrap_classes  meaningless classes whose sizes are drawn as well
bootstrap_numbers  meaningless numbers, drawn from the sample with replacement
plant_signal       numbers that follow a prediction more and more closely
"""

import numpy as np
import torch
from torch import Tensor

from hiddenscope.states.arrays import Ints

# Correlations of planted numbers with the prediction that they follow. Their squares
# are the shares of signal in the variance: 0, 0.06, 0.2, 0.42, 0.72 and 0.96.
STRENGTHS = (0.0, 0.25, 0.45, 0.65, 0.85, 0.98)


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
