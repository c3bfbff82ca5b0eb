"""What can a linear probe read from the states of each layer?

labels    what is predicted: given or ready-made labels, and control labels
findings  the scores as a Dataset, and the facts
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.analyses.probe.findings import Column, Mix, Scored, facts_of, table
from hiddenscope.analyses.probe.labels import Ints, Rows, control, labelled_rows
from hiddenscope.errors import StatesError
from hiddenscope.linear import (
    CrossValidated,
    Learner,
    Problems,
    assign_folds,
    cross_validate,
    logistic,
    mix,
    ridge,
    standardised,
)
from hiddenscope.linear.crossvalidation import MIDDLE, PENALTIES
from hiddenscope.linear.intervals import Interval, accuracy_interval, r2_interval
from hiddenscope.linear.probe import TASKS, Task, unscaled
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Readable
from hiddenscope.vectors import Token

FOLDS = 5
MOST_CONTROLS, ROWS_OF_CONTROLS = 10, 1_000  # one control is uncertain where rows are few, so several are drawn


def probe(
    source: Model | Readable | Pair,
    data: Any,
    *,
    task: Task = "classify",
    token: Token = "last",
    sites: SitePatterns = "layer.*,final",
    seed: int = 0,
    truncate: bool = False,
) -> Result:
    """A linear probe of every layer: how well a label is read from its states, beside a control and chance.

    With a model, `data` is a dataset: a shipped name, a path, a frame, a Hugging Face dataset, `(texts, labels)`, or
    what `hs.read` gave; with states, it is the labels. With `token="each"` there is a label for each token; "position",
    "word-start" and "previous-token" are ready. Probes are tested on folds that they did not see, standardised and
    regularised without them; `hs.Probe.of(result, site)` is the one that is fitted to all rows.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[k, k + 1, 5 + k % 2] for k in range(10, 30)]
    >>> result = hs.probe(hs.load((tiny_model("gpt2"), None)), (texts, [k % 2 for k in range(20)]))
    >>> result.facts["best"]["accuracy"], hs.Probe.of(result, "layer.0").coef_.shape
    (1.0, (1, 64))
    """
    if task not in TASKS:
        raise StatesError(f"No task {str(task)[:40]!r}", "there are two", 'Use "classify" or "regress".')
    rows = labelled_rows(source, data, task, sites, token, truncate)
    target = _classes(rows) if task == "classify" else _numbers(rows)
    scored = _scored(rows, target, _design(rows, target, seed))
    return Result("probe", table(scored), facts_of(scored, token), rows.vectors.source)


@dataclass(frozen=True, eq=False)
class _Target:
    """What is predicted: class indices or standardised values, how it is learnt, and what it stands for."""

    values: torch.Tensor
    learner: Learner
    classes: NDArray[Any] | None
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True, eq=False)
class _Design:
    """The fold and the text of each row, and all sets of targets `[set, row]`, the true ones first."""

    folds: Ints
    groups: Ints
    targets: torch.Tensor
    seed: int

    @property
    def fold_count(self) -> int:
        return int(self.folds.max()) + 1


def _classes(rows: Rows) -> _Target:
    integers = all(isinstance(label, int | np.integer) for label in rows.labels)
    labels = rows.labels if integers else [str(label) for label in rows.labels]
    classes, codes = np.unique(np.array(labels, dtype=None if integers else object), return_inverse=True)
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
            reason = f"there are {len(classes):,} classes, and {len(alone):,} of them have only one text"
            raise StatesError(problem, reason, 'Give fewer classes; for numbers use task="regress".')
        reason = f"the class {str(classes[alone[0]])[:40]!r} has only one text, and cannot be both learnt and tested"
        raise StatesError(problem, reason, "Give it more texts, or leave it out.")
    return _Target(torch.from_numpy(codes.reshape(-1)), logistic(len(classes)), classes)


def _numbers(rows: Rows) -> _Target:
    problem = f"Cannot regress {len(rows.labels):,} rows of {rows.name}"
    values = []
    for row, label in enumerate(rows.labels):
        try:
            value = float(label)
        except (TypeError, ValueError):
            value = np.nan
        if not np.isfinite(value):
            reason = f"label {row} is {str(label)[:40]!r}, which is no finite number"
            raise StatesError(problem, reason, 'Give numbers, or use task="classify".')
        values.append(value)
    numbers = np.array(values)
    if np.ptp(numbers) == 0:
        raise StatesError(problem, f"all labels are {numbers[0]:g}", "Give numbers that differ.")
    mean, deviation = float(numbers.mean()), float(numbers.std())
    return _Target(torch.from_numpy((numbers - mean) / deviation), ridge(), None, mean, deviation)


def _design(rows: Rows, target: _Target, seed: int) -> _Design:
    names, groups = np.unique(np.array(rows.groups, dtype=object), return_inverse=True)
    codes = target.values.numpy() if target.classes is not None else np.zeros(len(groups), dtype=np.int64)
    texts = [len(np.unique(groups[codes == code])) for code in np.unique(codes)]
    if len(names) < 2:
        problem = f"Cannot probe {len(rows.labels):,} rows of {rows.name}"
        reason = "they are all of one text, which cannot be both trained and tested on"
        raise StatesError(problem, reason, "Give several texts.")
    folds = assign_folds(codes, rows.groups, min(FOLDS, *texts, len(names)), seed)
    controls = max(1, min(MOST_CONTROLS, ROWS_OF_CONTROLS // len(groups)))
    sets = [control(target.values, rows.groups, folds, rows.token_ids, seed + 1 + k) for k in range(controls)]
    return _Design(folds, groups.reshape(-1), torch.stack([target.values, *sets]), seed)


def _scored(rows: Rows, target: _Target, design: _Design) -> Scored:
    """Cross-validate every site, then their mix."""
    values, sites = rows.vectors.values, rows.vectors.sites
    fits: list[CrossValidated] = []
    columns: list[Column] = []
    scaled = torch.empty(values.shape, dtype=values.dtype)
    with progress.track("Probing", total=len(sites) + 1) as advance:
        for number, states in enumerate(values):
            scaled[number], mean, deviation = standardised(states)
            fit = cross_validate(scaled[number], design.targets, design.folds, target.learner)
            columns.append(_column(fit, (mean, deviation), target, design, len(sites)))
            fits.append(fit._replace(scores=fit.scores[:1]))
            advance(1)
        mixed = _mixed(scaled, fits, target, design) if len(sites) > 1 else None
        advance(1)
    equal = [site for site, states in zip(sites, scaled, strict=True) if not bool(states.any())]
    counts = None if target.classes is None else torch.bincount(target.values).tolist()
    return Scored(rows, target.classes, counts, design.fold_count, len(design.targets) - 1, columns, mixed, equal)


def _column(
    fit: CrossValidated, scale: tuple[torch.Tensor, torch.Tensor], target: _Target, design: _Design, sites: int
) -> Column:
    """What the result says of one site."""
    scores = [_score(some, target, design, number, sites) for number, some in enumerate(fit.scores)]
    coef, intercept = unscaled(fit.whole.coef[..., 0], fit.whole.intercept[:, 0], *scale)
    if target.classes is None:
        coef, intercept = coef[0] * target.deviation, intercept[0] * target.deviation + target.mean
    elif len(target.classes) == 2:
        coef, intercept = np.concatenate([-coef / 2, coef / 2]), np.concatenate([-intercept / 2, intercept / 2])
    return Column(
        interval=scores[0],
        control=float(np.mean([score.score for score in scores[1:]])),
        by_fold=_by_fold(fit.scores[0], target, design),
        penalty=fit.penalty.numpy(),
        penalty_whole=fit.whole_penalty,
        penalty_chosen=not bool(fit.inner_loss.isnan().any()),
        coef=coef,
        intercept=intercept,
        converged=bool(fit.whole.converged.all()),
    )


def _score(scores: torch.Tensor, target: _Target, design: _Design, number: int, sites: int) -> Interval:
    targets = design.targets[number]
    if target.classes is not None:
        return accuracy_interval((_predicted(scores) == targets).numpy(), design.groups, sites, design.fold_count)
    error, baseline = _errors(scores, targets, design.folds)
    return r2_interval(error, baseline, design.groups, sites, design.seed, design.fold_count)


def _by_fold(scores: torch.Tensor, target: _Target, design: _Design) -> NDArray[np.float64]:
    targets, folds = design.targets[0], [design.folds == fold for fold in range(design.fold_count)]
    if target.classes is not None:
        right = (_predicted(scores) == targets).numpy()
        return np.array([right[fold].mean() for fold in folds])
    error, baseline = _errors(scores, targets, design.folds)
    return np.array([1 - error[fold].sum() / baseline[fold].sum() for fold in folds])


def _predicted(scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()


def _errors(scores: torch.Tensor, targets: torch.Tensor, folds: Ints) -> tuple[NDArray[Any], NDArray[Any]]:
    """Squared errors, and those of the mean of the training folds."""
    true = targets.numpy()
    means = np.array([true[folds != fold].mean() for fold in range(int(folds.max()) + 1)])
    return (scores[:, 0].double().numpy() - true) ** 2, (means[folds] - true) ** 2


def _mixed(scaled: torch.Tensor, fits: list[CrossValidated], target: _Target, design: _Design) -> Mix:
    """A mix of all sites, in the same folds, with the penalties of the site with the least loss on inner folds."""
    inner_loss = torch.stack([fit.inner_loss for fit in fits])
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    if bool(inner_loss.isnan().any()):
        penalty, whole_penalty = torch.full((design.fold_count,), MIDDLE, dtype=torch.float64), MIDDLE
    else:
        penalty = grid[inner_loss.amin(0).argmin(0)]
        whole_penalty = float(grid[inner_loss.mean(2).amin(0).argmin()])
    train = torch.from_numpy(design.folds[None] != np.arange(design.fold_count)[:, None])
    targets = target.values if target.classes is not None else target.values.to(scaled)
    problems = Problems(
        torch.cat([train, torch.ones(1, len(design.folds), dtype=torch.bool)]),
        targets.expand(design.fold_count + 1, -1),
        torch.cat([penalty, torch.tensor([whole_penalty], dtype=torch.float64)]),
    )
    mixed = mix(scaled, problems, target.learner)
    scores = mixed.scores[torch.arange(len(design.folds)), :, torch.from_numpy(design.folds)]
    weights = mixed.weights.double().numpy()
    interval = _score(scores, target, design, 0, 1)
    return Mix(interval, weights[:, -1], weights[:, :-1].min(1), weights[:, :-1].max(1))
