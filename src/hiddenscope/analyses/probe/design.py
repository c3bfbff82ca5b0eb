"""Design: what is predicted, in which folds, and the other targets that the same probes
are trained on.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.probe.labels import Ints, Rows, control
from hiddenscope.errors import StatesError
from hiddenscope.linear import Learner, assign_folds, logistic, ridge
from hiddenscope.linear.intervals import FEWEST, effective_number
from hiddenscope.linear.permutations import STRENGTHS, redrawn, resampled
from hiddenscope.linear.probe import Task
from hiddenscope.measures.permutations import permuted

FOLDS = 5
# One control is uncertain where rows are few, so several are drawn.
MOST_CONTROLS, ROWS_OF_CONTROLS = (
    10,
    1_000,
)
# Of the labels; fewer where there are many rows.
PERMUTATIONS, PERMUTATIONS_OF_MANY, MANY = (
    199,
    99,
    1_000,
)
REDRAWN = 99  # labellings with drawn class sizes
PLANTED, PLANTED_OF_MANY = 50, 25  # labellings of each strength of planted numbers


@dataclass(frozen=True, eq=False)
class ProbeTarget:
    """What is predicted: class indices or standardised values, how it is learnt, and
    what it stands for.
    """

    values: torch.Tensor
    learner: Learner
    classes: NDArray[Any] | None
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True, eq=False)
class Design:
    """The fold and the group of each row, and sets of targets `[set, row]`, the true
    ones first.

    `targets` goes on with control targets, `permuted` with the true ones permuted.
    `redrawn` has classes of drawn sizes, or numbers of drawn groups, and no true ones;
    none where rows of a group are of several classes. `smallest_p` is the smallest
    p-value that the permutations can give; None where nothing can be permuted.
    """

    folds: Ints
    groups: Ints
    targets: torch.Tensor
    permuted: torch.Tensor
    redrawn: torch.Tensor
    smallest_p: float | None

    @property
    def fold_count(self) -> int:
        """The number of folds."""
        return int(self.folds.max()) + 1

    @property
    def calibrated(self) -> bool:
        """Whether intervals were calibrated for so few groups, and permutations tell
        how scores vary.
        """
        return effective_number(self.groups) >= FEWEST and self.smallest_p is not None


def target_of(rows: Rows, task: Task) -> ProbeTarget:
    """What the labels are, as classes or numbers."""
    return _classes(rows) if task == "classify" else _numbers(rows)


def _classes(rows: Rows) -> ProbeTarget:
    integers = all(isinstance(label, int | np.integer) for label in rows.labels)
    labels = rows.labels if integers else [str(label) for label in rows.labels]
    classes, codes = np.unique(
        np.array(labels, dtype=None if integers else object), return_inverse=True
    )
    problem = f"Cannot probe {len(labels):,} rows of {rows.name}"
    if len(classes) < 2:
        reason = f"they are all of one class, {str(labels[0])[:40]!r}"
        raise StatesError(problem, reason, "Give labels of at least two.")
    texts: dict[int, set[str]] = {code: set() for code in range(len(classes))}
    for code, group in zip(codes.tolist(), rows.groups, strict=True):
        texts[code].add(group)
    alone = [code for code, some in texts.items() if len(some) < 2]
    if alone:
        if len(classes) > len(labels) / 2:
            reason = (
                f"there are {len(classes):,} classes, and {len(alone):,} of them have"
                f" only one {rows.unit}"
            )
            raise StatesError(
                problem, reason, 'Give fewer classes; for numbers use task="regress".'
            )
        name = str(classes[alone[0]])[:40]
        reason = (
            f"the class {name!r} has only one {rows.unit}, which cannot serve for"
            " training and test"
        )
        raise StatesError(problem, reason, "Give it more, or leave it out.")
    return ProbeTarget(
        torch.from_numpy(codes.reshape(-1)), logistic(len(classes)), classes
    )


def _numbers(rows: Rows) -> ProbeTarget:
    problem = f"Cannot regress {len(rows.labels):,} rows of {rows.name}"
    values = []
    for row, label in enumerate(rows.labels):
        try:
            value = float(label)
        except (TypeError, ValueError):
            value = np.nan
        if not np.isfinite(value):
            reason = f"label {row} is {str(label)[:40]!r}, which is not a finite number"
            raise StatesError(problem, reason, 'Give numbers, or use task="classify".')
        values.append(value)
    numbers = np.array(values)
    if np.ptp(numbers) == 0:
        raise StatesError(
            problem, f"all labels are {numbers[0]:g}", "Give numbers that differ."
        )
    mean, deviation = float(numbers.mean()), float(numbers.std())
    return ProbeTarget(
        torch.from_numpy((numbers - mean) / deviation), ridge(), None, mean, deviation
    )


def design_of(rows: Rows, target: ProbeTarget, seed: int) -> Design:
    """Folds, and all the sets of targets that probes are trained on."""
    names, groups = np.unique(np.array(rows.groups, dtype=object), return_inverse=True)
    codes = (
        target.values.numpy()
        if target.classes is not None
        else np.zeros(len(groups), dtype=np.int64)
    )
    texts = [len(np.unique(groups[codes == code])) for code in np.unique(codes)]
    if len(names) < 2:
        problem = f"Cannot probe {len(rows.labels):,} rows of {rows.name}"
        reason = (
            f"they are all of one {rows.unit}, which cannot serve for training and test"
        )
        raise StatesError(problem, reason, "Give several.")
    folds = assign_folds(codes, rows.groups, min(FOLDS, *texts, len(names)), seed)
    controls = max(1, min(MOST_CONTROLS, ROWS_OF_CONTROLS // len(groups)))
    drawn_controls = [
        control(target.values, rows, folds, seed + 1 + k) for k in range(controls)
    ]
    sets = [drawn for drawn in drawn_controls if drawn is not None]
    # Classes are spread evenly over folds, and so they are when labels are permuted
    # within them.
    strata = folds if target.classes is not None else None
    count = PERMUTATIONS if len(groups) <= MANY else PERMUTATIONS_OF_MANY
    groups = groups.reshape(-1)
    orders = permuted(target.values, count, seed, rows.groups, strata, rows.texts)
    if target.classes is None:
        drawn: torch.Tensor | None = resampled(
            target.values,
            len(STRENGTHS) * (PLANTED if len(groups) <= MANY else PLANTED_OF_MANY),
            seed,
            groups,
        )
    else:
        drawn = redrawn(codes, REDRAWN, seed, groups, folds)
    if drawn is None:
        drawn = orders.labellings[:0]
    return Design(
        folds,
        groups,
        torch.stack([target.values, *sets]),
        orders.labellings,
        drawn,
        orders.smallest_p,
    )
