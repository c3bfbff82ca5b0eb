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
    Mix,
    Scored,
    probe_dataset,
    probe_facts,
)
from hiddenscope.analyses.probe.labels import Rows, labelled_rows
from hiddenscope.analyses.probe.significance import (
    NullDistribution,
    estimate_score,
    jackknife_of,
    null_distribution,
    score_interval,
)
from hiddenscope.arguments import checked, integer, renamed
from hiddenscope.linear import (
    CrossValidated,
    Problems,
    cross_validate,
    mix,
    standardised,
)
from hiddenscope.linear.crossvalidation import (
    DEFAULT_PENALTY,
    PENALTIES,
    training_rows,
)
from hiddenscope.linear.intervals import (
    AccuracyEstimate,
    ExplainedVariance,
    PermutationTest,
    permutation_test,
)
from hiddenscope.linear.logistic import predicted_classes
from hiddenscope.linear.probe import Task, check_task, unscaled
from hiddenscope.model import ModelLike
from hiddenscope.results import Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.states.pooling import EACH_TOKEN_REMEDY
from hiddenscope.vectors import EachToken, rows_of


@checked
@renamed({"each": EACH_TOKEN_REMEDY}, token="pool")
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
    """Train a linear probe of every layer, and compare it with a control and chance.

    With a model, `data` is a dataset: a shipped name, a path, a frame, a Hugging Face
    dataset, `(texts, labels)`, or what `hs.read` gave; with states, it is a list of
    labels, or a dataset of the same texts. Texts are taken as independent unless the
    data have groups (`hs.read(..., group=)`). `pool` is what stands for a text: if not
    given, the last token in a decoder, and in an encoder the mean or what the model was
    trained for. With `hs.each_token(source)` there is a label for each token;
    "position", "word-start" and "previous-token" are ready. Probes are tested on folds
    that they did not see, standardised and regularised without them;
    `hs.Probe.of(result, site)` is fitted to all rows.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[k, k + 1, 5 + k % 2] for k in range(10, 30)]
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> result = hs.probe(model, (texts, [k % 2 for k in range(20)]))
    >>> result.facts["best"]["accuracy"], hs.Probe.of(result, "layer.0").coef_.shape
    (1.0, (1, 64))
    """
    check_task(task)
    seed = integer(seed, "seed", 0)
    opened, pooling = rows_of(source, pool, sites)
    rows = labelled_rows(opened, data, task, sites, pooling, truncate)
    target = target_of(rows, task)
    scored = _score_sites(rows, target, design_of(rows, target, seed))
    facts = probe_facts(scored, pooling)
    return Result("probe", probe_dataset(scored), facts, rows.vectors.source)


@dataclass(frozen=True, eq=False)
class _ProbedSite:
    """The fits of one site, the mean and deviation of its states, and its scores."""

    fit: CrossValidated
    scale: tuple[torch.Tensor, torch.Tensor]
    estimate: AccuracyEstimate | ExplainedVariance
    control: float
    null: NullDistribution
    jackknife: float


def _score_sites(rows: Rows, target: ProbeTarget, design: Design) -> Scored:
    """Probe every site with true, control and permuted targets, then their mix."""
    values, sites = rows.vectors.values, rows.vectors.sites
    probed: list[_ProbedSite] = []
    scaled = torch.empty(values.shape, dtype=values.dtype)
    mixed = None
    with progress.track("Probing", total=len(sites) + 1) as advance:
        for number, states in enumerate(values):
            scaled[number], mean, deviation = standardised(states)
            scale = (mean, deviation)
            probed.append(_probe_site(scaled[number], scale, target, design))
            advance(1)
        if len(sites) > 1:
            mixed = _probe_mix(scaled, [site.fit for site in probed], target, design)
        advance(1)
    test = permutation_test(torch.stack([site.null.scores for site in probed]))
    if design.smallest_p is None:
        # Nothing could be permuted, so there is nothing to compare with.
        test = test._replace(p_values=[float("nan")] * len(sites))
    columns = []
    equal = []
    for number, name in enumerate(sites):
        columns.append(_column(probed[number], test, number, target, design))
        if not bool(scaled[number].any()):
            equal.append(name)
    return Scored(rows, target, design, columns, mixed, equal)


def _probe_site(
    states: torch.Tensor,
    scale: tuple[torch.Tensor, torch.Tensor],
    target: ProbeTarget,
    design: Design,
) -> _ProbedSite:
    fit = cross_validate(states, design.targets, design.folds, target.learner)
    by_set = fit.scores.permute(1, 2, 0)
    # The true targets come first, the others are controls.
    estimate = estimate_score(by_set[..., :1], design.targets[:1].T, target, design)
    estimates = estimate_score(by_set, design.targets.T, target, design)
    predicted = fit.whole.scores(states)[:, 0, 0]
    return _ProbedSite(
        # The scores of controls are not needed any more.
        fit=fit._replace(scores=fit.scores[:1]),
        scale=scale,
        estimate=estimate,
        control=float(estimates.score[1:].mean()),
        null=null_distribution(states, predicted, target, design),
        jackknife=jackknife_of(states, fit.penalty, target, design),
    )


def _column(
    site: _ProbedSite,
    test: PermutationTest,
    number: int,
    target: ProbeTarget,
    design: Design,
) -> Column:
    """Return what the result says of one site."""
    whole = site.fit.whole
    coef, intercept = unscaled(whole.coef[..., 0], whole.intercept[:, 0], *site.scale)
    if target.classes is None:
        coef = coef[0] * target.deviation
        intercept = intercept[0] * target.deviation + target.mean
    elif len(target.classes) == 2:
        # The fit has one score, that of the second class. A result has one per class.
        coef = np.concatenate([-coef / 2, coef / 2])
        intercept = np.concatenate([-intercept / 2, intercept / 2])
    return Column(
        interval=score_interval(
            site.estimate, site.null.variability, test, design, site.jackknife
        ),
        p=test.p_values[number],
        control=site.control,
        by_fold=_by_fold(site.fit.scores[0], target, design),
        penalty=site.fit.penalty.numpy(),
        penalty_whole=site.fit.whole_penalty,
        penalty_selected=not bool(site.fit.inner_loss.isnan().any()),
        coef=coef,
        intercept=intercept,
        converged=bool(whole.converged.all()),
    )


def _by_fold(
    scores: torch.Tensor, target: ProbeTarget, design: Design
) -> NDArray[np.float64]:
    """Return the score of each fold.

    R² is relative to the mean of all rows, like the score of all folds.
    """
    targets = design.targets[0]
    folds = [design.folds == fold for fold in range(design.fold_count)]
    if target.classes is not None:
        correct = (predicted_classes(scores) == targets).numpy()
        return np.array([correct[fold].mean() for fold in folds])
    error = (scores[:, 0] - targets).double().square().numpy()
    spread = (targets.mean() - targets).double().square().numpy()
    return np.array([1 - error[fold].sum() / spread[fold].sum() for fold in folds])


def _mix_penalty(fits: list[CrossValidated], design: Design) -> torch.Tensor:
    """Return the penalty of the mix for each fold, and last that for all rows."""
    inner_loss = torch.stack([fit.inner_loss for fit in fits])
    if bool(inner_loss.isnan().any()):
        count = design.fold_count + 1
        return torch.full((count,), DEFAULT_PENALTY, dtype=torch.float64)
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    of_folds = inner_loss.amin(0).argmin(0)
    of_all_rows = inner_loss.mean(2).amin(0).argmin()
    return grid[torch.cat([of_folds, of_all_rows[None]])]


def _probe_mix(
    scaled: torch.Tensor,
    fits: list[CrossValidated],
    target: ProbeTarget,
    design: Design,
) -> Mix:
    """Probe a weighted sum of all sites, in the same folds.

    Its penalties are those of the site with the least loss on inner folds.
    """
    penalty = _mix_penalty(fits, design)
    targets = target.values
    if target.classes is None:
        targets = targets.to(scaled)
    train = training_rows(design.folds)
    problems = Problems(train, targets.expand(len(train), -1), penalty)
    mixed = mix(scaled, problems, target.learner)
    rows = torch.arange(len(design.folds))
    held_out = mixed.scores[rows, :, torch.from_numpy(design.folds)]
    estimate = estimate_score(held_out[..., None], design.targets[:1].T, target, design)
    interval = None
    if target.classes is not None:
        # The mix is not fitted again under permuted targets: the mean of all sites
        # stands for it. On noise the weights often single out a site, yet intervals
        # with this variance held the truth (docs/probe.md).
        mean = scaled.mean(0)
        null = null_distribution(mean, mean[:, 0], target, design)
        test = permutation_test(null.scores[None])
        interval = score_interval(estimate, null.variability, test, design)
    weights = mixed.weights.double().numpy()
    return Mix(
        score=float(estimate.score),
        interval=interval,
        weights=weights[:, -1],
        fold_weights=weights[:, :-1],
        penalty=penalty[:-1].numpy(),
    )
