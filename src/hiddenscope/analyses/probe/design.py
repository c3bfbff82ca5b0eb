"""Design: the folds of a probe, and the other targets that it is trained on."""

from dataclasses import dataclass

import numpy as np
import torch

from hiddenscope.analyses.probe.labels import Rows, control
from hiddenscope.errors import StatesError
from hiddenscope.linear import Learner, assign_folds, logistic, ridge
from hiddenscope.linear.crossvalidation import (
    STRENGTHS,
    bootstrap_classes,
    bootstrap_numbers,
)
from hiddenscope.linear.intervals import MIN_GROUPS
from hiddenscope.linear.probe import Task
from hiddenscope.measures.grouped import effective_count
from hiddenscope.measures.permutations import permuted
from hiddenscope.states.arrays import Ints, Labels

FOLDS = 5
# The score on one set of control labels is uncertain where rows are few, so several are
# drawn: so many that they have this many rows in all, and at most ten.
MAX_CONTROLS = 10
CONTROL_ROWS = 1_000
# With more rows than this, fewer labellings are drawn: they take longer than the probe.
MANY_ROWS = 1_000
PERMUTATIONS = 199
PERMUTATIONS_OF_MANY = 99
# Labellings with drawn class sizes.
BOOTSTRAP = 99
# Labellings of each strength of planted signal.
PLANTED = 50
PLANTED_OF_MANY = 25


@dataclass(frozen=True, eq=False)
class ProbeTarget:
    """What is predicted: class indices or standardised values, and how it is learnt.

    `mean` and `deviation` turn standardised values back into the given ones.
    """

    values: torch.Tensor
    learner: Learner
    classes: Labels | None
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def counts(self) -> list[int]:
        """Return the number of rows of each class."""
        counts: list[int] = torch.bincount(self.values).tolist()
        return counts

    @property
    def chance(self) -> float:
        """Return the score without states: the share of the largest class, or R² 0."""
        if self.classes is None:
            return 0.0
        return max(self.counts) / sum(self.counts)


@dataclass(frozen=True, eq=False)
class Design:
    """The fold and the group of each row, and sets of targets `[set, row]`.

    `targets` has the true targets first, then control targets. `permuted` has the true
    targets first, then permutations of them. `bootstrap` has drawn targets only
    (`linear.bootstrap`), and none where rows of a group are of several classes.
    `smallest_p` is the smallest p-value that the permutations can give; None where
    nothing can be permuted, which `serial` explains where the order of texts is why.
    """

    folds: Ints
    groups: Ints
    targets: torch.Tensor
    permuted: torch.Tensor
    bootstrap: torch.Tensor
    smallest_p: float | None
    serial: float | None

    @property
    def fold_count(self) -> int:
        """Return the number of folds."""
        return int(self.folds.max()) + 1

    @property
    def calibrated(self) -> bool:
        """Return whether intervals were calibrated for a design like this.

        They need enough groups, and permutations to measure how scores vary.
        """
        enough = effective_count(self.groups) >= MIN_GROUPS
        return enough and self.smallest_p is not None


def target_of(rows: Rows, task: Task) -> ProbeTarget:
    """Read the labels as classes or as numbers."""
    if task == "regress":
        return _numbers(rows)
    labels = np.array([str(label) for label in rows.labels], dtype=object)
    if all(isinstance(label, int | np.integer) for label in rows.labels):
        labels = np.array(rows.labels)
    classes, codes = np.unique(labels, return_inverse=True)
    problem = f"Cannot probe {len(labels):,} rows of {rows.name}"
    if len(classes) < 2:
        reason = f"they are all of one class, {str(labels[0])[:40]!r}"
        raise StatesError(problem, reason, "Give labels of at least two.")
    groups: list[set[str]] = [set() for _ in classes]
    for code, group in zip(codes.tolist(), rows.groups, strict=True):
        groups[code].add(group)
    single = [code for code, names in enumerate(groups) if len(names) < 2]
    if single and len(classes) > len(labels) / 2:
        reason = (
            f"there are {len(classes):,} classes, and {len(single):,} of them have"
            f" only one {rows.unit}"
        )
        raise StatesError(
            problem, reason, 'Give fewer classes; for numbers use task="regress".'
        )
    if single:
        reason = (
            f"the class {str(classes[single[0]])[:40]!r} has only one {rows.unit},"
            " which cannot serve for training and test"
        )
        raise StatesError(problem, reason, "Give it more, or leave it out.")
    values = torch.from_numpy(codes.reshape(-1))
    return ProbeTarget(values, logistic(len(classes)), classes)


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
    mean = float(numbers.mean())
    deviation = float(numbers.std())
    standard = torch.from_numpy((numbers - mean) / deviation)
    return ProbeTarget(standard, ridge(), None, mean, deviation)


def design_of(rows: Rows, target: ProbeTarget, seed: int) -> Design:
    """Assign folds, and draw all sets of targets that probes are trained on."""
    names, groups = np.unique(np.array(rows.groups, dtype=object), return_inverse=True)
    groups = groups.reshape(-1)
    if len(names) < 2:
        problem = f"Cannot probe {len(rows.labels):,} rows of {rows.name}"
        reason = (
            f"they are all of one {rows.unit}, which cannot serve for training and test"
        )
        raise StatesError(problem, reason, "Give several.")
    # Numbers are taken as one class: there is nothing to stratify.
    codes = np.zeros(len(groups), dtype=np.int64)
    if target.classes is not None:
        codes = target.values.numpy()
    class_groups = [len(np.unique(groups[codes == code])) for code in np.unique(codes)]
    fold_count = min(FOLDS, *class_groups, len(names))
    folds = assign_folds(codes, rows.groups, fold_count, seed)
    for code in np.unique(codes):
        if target.classes is not None and len(np.unique(folds[codes == code])) < 2:
            # Nothing would be learnt of it.
            name = str(target.classes[code])[:40]
            raise StatesError(
                f"Cannot probe {len(rows.labels):,} rows of {rows.name}",
                f"all texts of the class {name!r} fall into one fold, as whole groups",
                "Give it more groups, leave it out, or choose another seed.",
            )
    many = len(groups) > MANY_ROWS
    # Classes are spread evenly over folds, and stay so if labels are permuted within
    # folds.
    strata = None if target.classes is None else folds
    permutations = permuted(
        target.values,
        PERMUTATIONS_OF_MANY if many else PERMUTATIONS,
        seed,
        rows.groups,
        strata,
        rows.text_names,
        rows.values,
    )
    if target.classes is None:
        each = PLANTED_OF_MANY if many else PLANTED
        count = len(STRENGTHS) * each
        bootstrap = bootstrap_numbers(target.values, count, seed, groups)
    else:
        drawn = bootstrap_classes(codes, BOOTSTRAP, seed, groups, folds)
        bootstrap = permutations.labellings[:0] if drawn is None else drawn
    # None is drawn where only the true targets can come of it.
    controls: list[torch.Tensor] = []
    if permutations.smallest_p is not None or rows.tokens is not None:
        count = max(1, min(MAX_CONTROLS, CONTROL_ROWS // len(folds)))
        for number in range(count):
            drawn = control(target.values, rows, folds, seed + 1 + number)
            if drawn is not None:
                controls.append(drawn)
    return Design(
        folds,
        groups,
        torch.stack([target.values, *controls]),
        permutations.labellings,
        bootstrap,
        *permutations[1:],
    )
