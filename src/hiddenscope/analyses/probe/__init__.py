"""What can a linear probe read from the states of each layer?

labels    what is predicted: given or ready-made labels, and control labels
findings  the scores as a Dataset, and the facts
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.analyses.probe.findings import Column, Draws, Mix, Scored, facts_of, table
from hiddenscope.analyses.probe.labels import Ints, Rows, control, labelled_rows
from hiddenscope.arguments import checked
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
from hiddenscope.linear.intervals import (
    FEWEST,
    Chance,
    Estimate,
    Interval,
    Redrawn,
    accuracy,
    accuracy_interval,
    chance,
    r2,
    r2_interval,
    redrawn_accuracy,
    variance_factor,
)
from hiddenscope.linear.permutations import redrawn, under_labellings
from hiddenscope.linear.probe import TASKS, Task, unscaled
from hiddenscope.measures.separation import shuffled
from hiddenscope.model import ModelLike, as_source
from hiddenscope.results import Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Readable
from hiddenscope.vectors import Token

FOLDS = 5
MOST_CONTROLS, ROWS_OF_CONTROLS = 10, 1_000  # one control is uncertain where rows are few, so several are drawn
PERMUTATIONS, PERMUTATIONS_OF_MANY, MANY = 199, 99, 1_000  # of the labels; fewer where there are many rows
REDRAWN = 99  # labellings with drawn class sizes


@checked
def probe(
    source: ModelLike | Readable | Pair,
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
    rows = labelled_rows(as_source(source), data, task, sites, token, truncate)
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
    """The fold and the text of each row, and sets of targets `[set, row]`, the true ones first.

    `targets` goes on with control targets, `permuted` with the true ones permuted between texts. `redrawn` has classes
    of drawn sizes, and no true ones; None for numbers.
    """

    folds: Ints
    groups: Ints
    targets: torch.Tensor
    permuted: torch.Tensor
    redrawn: torch.Tensor | None

    @property
    def fold_count(self) -> int:
        return int(self.folds.max()) + 1

    @property
    def calibrated(self) -> bool:
        return int(self.groups.max()) + 1 >= FEWEST


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
    # Classes are spread evenly over folds, and so they are when labels are permuted within them.
    strata = folds if target.classes is not None else None
    count = PERMUTATIONS if len(groups) <= MANY else PERMUTATIONS_OF_MANY
    groups = groups.reshape(-1)
    permuted = shuffled(target.values, count, seed, groups, strata)
    of_sizes = redrawn(codes, REDRAWN, seed, groups, folds) if target.classes is not None else None
    return _Design(folds, groups, torch.stack([target.values, *sets]), permuted, of_sizes)


class _ByChance(NamedTuple):
    """The scores of the true and of permuted targets, their variance within classes if rows were independent, and
    those of classes of drawn sizes."""

    scores: torch.Tensor
    within: torch.Tensor
    redrawn: Redrawn | None


@dataclass(frozen=True, eq=False)
class _Probed:
    """The fits of one site, the mean and deviation of its states, and its scores: true, of controls, by chance."""

    fit: CrossValidated
    scale: tuple[torch.Tensor, torch.Tensor]
    measured: Estimate
    control: float
    by_chance: _ByChance


def _scored(rows: Rows, target: _Target, design: _Design) -> Scored:
    """Cross-validate every site, with true, control and permuted targets; then their mix."""
    values, sites = rows.vectors.values, rows.vectors.sites
    probed: list[_Probed] = []
    scaled = torch.empty(values.shape, dtype=values.dtype)
    with progress.track("Probing", total=len(sites) + 1) as advance:
        for number, states in enumerate(values):
            scaled[number], mean, deviation = standardised(states)
            fit = cross_validate(scaled[number], design.targets, design.folds, target.learner)
            measured = _measured(fit.scores.permute(1, 2, 0), design.targets.T, target, design)
            of_true = Estimate(*(part[:1] for part in measured))
            kept = fit._replace(scores=fit.scores[:1])
            by_chance = _by_chance(scaled[number], target, design)
            probed.append(_Probed(kept, (mean, deviation), of_true, float(measured.score[1:].mean()), by_chance))
            advance(1)
        mixed = _mixed(scaled, [one.fit for one in probed], target, design) if len(sites) > 1 else None
        advance(1)
    found = _chance([one.by_chance for one in probed], target, design)
    columns = [_column(one, found, number, target, design) for number, one in enumerate(probed)]
    equal = [site for site, states in zip(sites, scaled, strict=True) if not bool(states.any())]
    counts = None if target.classes is None else torch.bincount(target.values).tolist()
    draws = Draws(design.fold_count, len(design.targets) - 1, len(design.permuted) - 1, design.calibrated)
    return Scored(rows, target.classes, counts, draws, columns, mixed, equal)


def _measured(scores: torch.Tensor, targets: torch.Tensor, target: _Target, design: _Design) -> Estimate:
    return (r2 if target.classes is None else accuracy)(scores, targets, design.groups)


def _by_chance(states: torch.Tensor, target: _Target, design: _Design) -> _ByChance:
    def permuted(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _measured(scores, targets, target, design)[:2]

    def of_sizes(scores: torch.Tensor, targets: torch.Tensor) -> Redrawn:
        return redrawn_accuracy(scores, targets, design.groups, shares)

    scores, within = under_labellings(states, design.permuted, design.folds, target.learner, permuted)
    if design.redrawn is None:
        return _ByChance(scores, within, None)
    shares = torch.bincount(target.values) / len(target.values)
    measured = under_labellings(states, design.redrawn, design.folds, target.learner, of_sizes)
    return _ByChance(scores, within, Redrawn(*measured))


def _chance(by_chance: list[_ByChance], target: _Target, design: _Design) -> Chance:
    scores = torch.stack([one.scores for one in by_chance])
    within = torch.stack([one.within for one in by_chance])
    of_sizes = [one.redrawn for one in by_chance if one.redrawn is not None]
    together = Redrawn(*map(torch.stack, zip(*of_sizes, strict=True))) if of_sizes else None
    least = 1.0 if design.calibrated else variance_factor(design.fold_count)
    return chance(scores, within, redrawn=together, least=least, logarithmic=target.classes is None)


def _interval(measured: Estimate, found: Chance, site: int, target: _Target, design: _Design) -> Interval:
    if target.classes is None:
        return r2_interval(measured, site, found)
    return accuracy_interval(measured, len(design.folds), design.groups, site, found)


def _column(probed: _Probed, found: Chance, site: int, target: _Target, design: _Design) -> Column:
    """What the result says of one site."""
    fit = probed.fit
    coef, intercept = unscaled(fit.whole.coef[..., 0], fit.whole.intercept[:, 0], *probed.scale)
    if target.classes is None:
        coef, intercept = coef[0] * target.deviation, intercept[0] * target.deviation + target.mean
    elif len(target.classes) == 2:
        coef, intercept = np.concatenate([-coef / 2, coef / 2]), np.concatenate([-intercept / 2, intercept / 2])
    return Column(
        interval=_interval(probed.measured, found, site, target, design),
        p=found.p[site],
        control=probed.control,
        by_fold=_by_fold(fit.scores[0], target, design),
        penalty=fit.penalty.numpy(),
        penalty_whole=fit.whole_penalty,
        penalty_chosen=not bool(fit.inner_loss.isnan().any()),
        coef=coef,
        intercept=intercept,
        converged=bool(fit.whole.converged.all()),
    )


def _by_fold(scores: torch.Tensor, target: _Target, design: _Design) -> NDArray[np.float64]:
    """The score of each fold; R² against the mean of all rows, as in the score of all folds."""
    targets, folds = design.targets[0], [design.folds == fold for fold in range(design.fold_count)]
    if target.classes is not None:
        chosen = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
        right = (chosen == targets).numpy()
        return np.array([right[fold].mean() for fold in folds])
    error, spread = ((given - targets).double().square().numpy() for given in (scores[:, 0], targets.mean()))
    return np.array([1 - error[fold].sum() / spread[fold].sum() for fold in folds])


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
    measured = _measured(scores[..., None], design.targets[:1].T, target, design)
    # Where nothing favours a site, the weights of a mix stay nearly equal: so do they for permuted targets.
    found = _chance([_by_chance(scaled.mean(0), target, design)], target, design)
    interval = _interval(measured, found, 0, target, design)
    return Mix(interval, weights[:, -1], weights[:, :-1].min(1), weights[:, :-1].max(1))
