"""What can a linear probe read from the states of each layer?"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.analyses.probe.design import Design, ProbeTarget, design_of, target_of
from hiddenscope.analyses.probe.findings import (
    Column,
    Draws,
    Mix,
    Scored,
    facts_of,
    table,
)
from hiddenscope.analyses.probe.labels import Rows, labelled_rows
from hiddenscope.analyses.probe.significance import (
    NullDistribution,
    by_chance,
    interval_of,
    jackknife_of,
    measured_of,
)
from hiddenscope.arguments import checked, integer, renamed
from hiddenscope.errors import StatesError
from hiddenscope.linear import (
    CrossValidated,
    Problems,
    cross_validate,
    mix,
    standardised,
)
from hiddenscope.linear.crossvalidation import MIDDLE, PENALTIES
from hiddenscope.linear.intervals import Chance, Estimate, Explained, chance
from hiddenscope.linear.probe import TASKS, Task, unscaled
from hiddenscope.model import ModelLike
from hiddenscope.results import Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.vectors import EachToken, rows_of


@checked
@renamed(token="pool")
def probe(
    source: ModelLike | Readable | Pair | EachToken,
    data: Any,
    *,
    task: Task = "classify",
    pool: Pooling | None = None,
    sites: SitePatterns = "layer.*,final",
    seed: int = 0,
    truncate: bool = False,
) -> Result:
    """Train a linear probe of every layer: how well is a label read from its states,
    beside a control and chance?

    With a model, `data` is a dataset: a shipped name, a path, a frame, a Hugging Face
    dataset, `(texts, labels)`, or what `hs.read` gave; with states, it is the labels,
    or what `hs.read` gave for the same texts. Texts are taken as independent unless the
    data have groups (`hs.read(..., group=)`). `pool` is what stands for a text: if not
    given, the last token in a decoder, and in an encoder the mean or what the model was
    trained for. With `hs.each_token(source)` there is a label for each token;
    "position", "word-start" and "previous-token" are ready. Probes are tested on folds that they
    did not see, standardised and regularised without them; `hs.Probe.of(result, site)`
    is fitted to all rows.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[k, k + 1, 5 + k % 2] for k in range(10, 30)]
    >>> result = hs.probe(hs.load((tiny_model("gpt2"), None)), (texts, [k % 2 for k in range(20)]))
    >>> result.facts["best"]["accuracy"], hs.Probe.of(result, "layer.0").coef_.shape
    (1.0, (1, 64))
    """
    if task not in TASKS:
        raise StatesError(
            f"No task {str(task)[:40]!r}",
            "there are two tasks",
            'Use "classify" or "regress".',
        )
    seed = integer(seed, "seed", 0)
    opened, pooling = rows_of(source, pool, sites)
    rows = labelled_rows(opened, data, task, sites, pooling, truncate)
    target = target_of(rows, task)
    scored = _scored(rows, target, design_of(rows, target, seed))
    return Result(
        "probe", table(scored), facts_of(scored, pooling), rows.vectors.source
    )


@dataclass(frozen=True, eq=False)
class _Probed:
    """The fits of one site, the mean and deviation of its states, and its scores: true,
    of controls, by chance.
    """

    fit: CrossValidated
    scale: tuple[torch.Tensor, torch.Tensor]
    measured: Estimate | Explained
    control: float
    by_chance: NullDistribution
    jackknife: float


def _scored(rows: Rows, target: ProbeTarget, design: Design) -> Scored:
    """Cross-validate every site, with true, control and permuted targets; then their
    mix.
    """
    values, sites = rows.vectors.values, rows.vectors.sites
    probed: list[_Probed] = []
    scaled = torch.empty(values.shape, dtype=values.dtype)
    with progress.track("Probing", total=len(sites) + 1) as advance:
        for number, states in enumerate(values):
            scaled[number], mean, deviation = standardised(states)
            fit = cross_validate(
                scaled[number], design.targets, design.folds, target.learner
            )
            measured = measured_of(
                fit.scores.permute(1, 2, 0), design.targets.T, target, design
            )
            kept = fit._replace(scores=fit.scores[:1])
            of_true = measured_of(
                kept.scores.permute(1, 2, 0), design.targets[:1].T, target, design
            )
            others = by_chance(
                scaled[number],
                fit.whole.scores(scaled[number])[:, 0, 0],
                target,
                design,
            )
            jackknife = jackknife_of(scaled[number], fit.penalty, target, design)
            control = float(measured.score[1:].mean())
            probed.append(
                _Probed(kept, (mean, deviation), of_true, control, others, jackknife)
            )
            advance(1)
        mixed = (
            _mixed(scaled, [one.fit for one in probed], target, design)
            if len(sites) > 1
            else None
        )
        advance(1)
    found = chance(torch.stack([one.by_chance.scores for one in probed]))
    if design.smallest_p is None:
        found = found._replace(p=[float("nan")] * len(sites))
    columns = [
        _column(one, found, number, target, design) for number, one in enumerate(probed)
    ]
    equal = [
        site
        for site, states in zip(sites, scaled, strict=True)
        if not bool(states.any())
    ]
    counts = None if target.classes is None else torch.bincount(target.values).tolist()
    draws = Draws(
        design.fold_count,
        len(design.targets) - 1,
        len(design.permuted) - 1,
        design.smallest_p,
        design.calibrated,
    )
    return Scored(rows, target.classes, counts, draws, columns, mixed, equal)


def _column(
    probed: _Probed, found: Chance, site: int, target: ProbeTarget, design: Design
) -> Column:
    """What the result says of one site."""
    fit = probed.fit
    coef, intercept = unscaled(
        fit.whole.coef[..., 0], fit.whole.intercept[:, 0], *probed.scale
    )
    if target.classes is None:
        coef, intercept = (
            coef[0] * target.deviation,
            intercept[0] * target.deviation + target.mean,
        )
    elif len(target.classes) == 2:
        coef, intercept = (
            np.concatenate([-coef / 2, coef / 2]),
            np.concatenate([-intercept / 2, intercept / 2]),
        )
    return Column(
        interval=interval_of(
            probed.measured, probed.by_chance.varies, found, design, probed.jackknife
        ),
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


def _by_fold(
    scores: torch.Tensor, target: ProbeTarget, design: Design
) -> NDArray[np.float64]:
    """The score of each fold; R² against the mean of all rows, as in the score of all
    folds.
    """
    targets, folds = (
        design.targets[0],
        [design.folds == fold for fold in range(design.fold_count)],
    )
    if target.classes is not None:
        chosen = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
        right = (chosen == targets).numpy()
        return np.array([right[fold].mean() for fold in folds])
    error, spread = (
        (given - targets).double().square().numpy()
        for given in (scores[:, 0], targets.mean())
    )
    return np.array([1 - error[fold].sum() / spread[fold].sum() for fold in folds])


def _mixed(
    scaled: torch.Tensor,
    fits: list[CrossValidated],
    target: ProbeTarget,
    design: Design,
) -> Mix:
    """A mix of all sites, in the same folds, with the penalties of the site with the
    least loss on inner folds.
    """
    inner_loss = torch.stack([fit.inner_loss for fit in fits])
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    if bool(inner_loss.isnan().any()):
        penalty, whole_penalty = (
            torch.full((design.fold_count,), MIDDLE, dtype=torch.float64),
            MIDDLE,
        )
    else:
        penalty = grid[inner_loss.amin(0).argmin(0)]
        whole_penalty = float(grid[inner_loss.mean(2).amin(0).argmin()])
    train = torch.from_numpy(
        design.folds[None] != np.arange(design.fold_count)[:, None]
    )
    targets = target.values if target.classes is not None else target.values.to(scaled)
    problems = Problems(
        torch.cat([train, torch.ones(1, len(design.folds), dtype=torch.bool)]),
        targets.expand(design.fold_count + 1, -1),
        torch.cat([penalty, torch.tensor([whole_penalty], dtype=torch.float64)]),
    )
    mixed = mix(scaled, problems, target.learner)
    scores = mixed.scores[
        torch.arange(len(design.folds)), :, torch.from_numpy(design.folds)
    ]
    weights = mixed.weights.double().numpy()
    measured = measured_of(scores[..., None], design.targets[:1].T, target, design)
    interval = None
    if target.classes is not None:
        # Where nothing favours a site, the weights of a mix stay nearly equal: so do
        # they for permuted targets.
        together = scaled.mean(0)
        others = by_chance(together, together[:, 0], target, design)
        interval = interval_of(
            measured, others.varies, chance(others.scores[None]), design
        )
    return Mix(
        float(measured.score),
        interval,
        weights[:, -1],
        weights[:, :-1].min(1),
        weights[:, :-1].max(1),
        penalty.numpy(),
    )
