"""The probes of every site and of their mix, as labelled arrays and a report."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.probe.design import Design, ProbeTarget, design_of, target_of
from hiddenscope.analyses.probe.labels import Rows, labelled_rows
from hiddenscope.analyses.probe.monitor import pooled_design, rows_of_test, tested
from hiddenscope.analyses.probe.significance import (
    NullDistribution,
    above_largest,
    centre_of,
    estimate_score,
    jackknife_of,
    null_distribution,
    score_interval,
)
from hiddenscope.analyses.probe.story import (
    BestSite,
    Centre,
    ClassCount,
    Control,
    LargestWeight,
    MixScore,
    ProbeReport,
)
from hiddenscope.arguments import require
from hiddenscope.linear import (
    CrossValidated,
    Learner,
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
    DEPENDENCE,
    AccuracyEstimate,
    ExplainedVariance,
    Interval,
    VarianceFactors,
    permutation_test,
)
from hiddenscope.linear.logistic import predicted_classes
from hiddenscope.linear.pooled import pooled_logistic
from hiddenscope.linear.probe import Task, key_number, unscaled
from hiddenscope.model import ModelLike
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Coordinates,
    Dims,
    Variables,
    site_names,
    to_dataset,
)
from hiddenscope.results.report import known
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.states.arrays import AnyArray, Floats
from hiddenscope.states.pooling import ScorePooling, score_pooling
from hiddenscope.vectors import EachToken, rows_of

if TYPE_CHECKING:
    import xarray

# Classes that the facts list.
LISTED = 20
# The largest p-value of a site that is called above chance.
SIGNIFICANCE = 0.05
# How often intervals of four classes held the truth on noise (docs/methods.md).
COVERAGE_OF_SEVERAL = 0.88


@dataclass(frozen=True, eq=False)
class ProbedSite:
    """The probes of one site: scores on test folds, and the probe of all rows."""

    fit: CrossValidated
    estimate: AccuracyEstimate | ExplainedVariance
    null: NullDistribution
    jackknife: float
    control: float
    by_fold: Floats
    coef: Floats
    intercept: Floats
    query: Floats | None = None


@dataclass(frozen=True, eq=False)
class Mix:
    """The probe of a mix of all sites.

    `weights` are those of the probe of all rows, `fold_weights` `[site, fold]` those of
    each fold. Neither the weights nor an R² have an interval: none of those tried held
    the truth often enough (docs/methods.md, docs/log.md).
    """

    score: float
    interval: Interval | None
    weights: Floats
    fold_weights: Floats
    penalty: Floats


@dataclass(frozen=True, eq=False)
class Scored:
    """Everything that was computed; `equal` are sites where all states are equal."""

    rows: Rows
    target: ProbeTarget
    design: Design
    probed: list[ProbedSite]
    intervals: list[Interval]
    p_values: list[float]
    mix: Mix | None
    equal: list[str]
    centre: Centre | None

    @property
    def score(self) -> Literal["accuracy", "r2"]:
        """Return the name of the score."""
        return "r2" if self.target.classes is None else "accuracy"

    @property
    def coverage(self) -> float | None:
        """Return how often intervals held the truth in simulations, if below 95%."""
        if self.target.classes is None or len(self.target.classes) <= 2:
            return None
        return COVERAGE_OF_SEVERAL


def train_probes(
    source: ModelLike | Readable | Pair | EachToken,
    data: Any,
    test: Any,
    task: Task,
    pool: Pooling | None,
    sites: SitePatterns,
    seed: int,
) -> Result:
    """Return the scores of the probes of every site as a result."""
    require(task, Task, "task", "probe")
    opened, pooling = rows_of(source, pool, sites, scores=True)
    rows = labelled_rows(opened, data, task, sites, pooling)
    test_rows = None
    if test is not None:
        test_rows = rows_of_test(opened, test, rows, task, pooling)
    target = target_of(rows, task)
    design = design_of(rows, target, seed)
    if rows.scored is not None:
        design = pooled_design(rows, target, design)
    scored = _score_sites(rows, target, design, score_pooling(pooling))
    report = _report(scored, "each" if pooling is None else pooling)
    result = Result("probe", _dataset(scored), report, rows.source)
    return result if test_rows is None else tested(result, report, test_rows)


def _score_sites(
    rows: Rows, target: ProbeTarget, design: Design, pooling: ScorePooling | None
) -> Scored:
    """Probe every site with true, control and permuted targets, then their mix."""
    values, sites = rows.values, rows.sites
    probed: list[ProbedSite] = []
    scaled = torch.empty(values.shape, dtype=values.dtype)
    mixed = None
    with progress.track("Probing", total=len(sites) + 1) as advance:
        for number, states in enumerate(values):
            scaled[number], *scale = standardised(states)
            learner = target.learner
            if rows.scored is not None and pooling is not None:
                # First tokens are left out, as by `Probe.so_far`.
                texts = [
                    text[number, min(1, text.shape[1] - 1) :] for text in rows.scored
                ]
                tokens, *scale = standardised(torch.cat(texts))
                parts = torch.split(tokens, [len(text) for text in texts])
                learner = pooled_logistic(parts, pooling)
                scaled[number] = torch.stack([part.mean(0) for part in parts])
            probed.append(_probe_site(scaled[number], scale, target, design, learner))
            advance(1)
        if len(sites) > 1 and pooling is None:
            mixed = _probe_mix(scaled, [site.fit for site in probed], target, design)
        advance(1)
    test = permutation_test(torch.stack([site.null.scores for site in probed]))
    p_values = test.p_values
    if design.smallest_p is None:
        # Nothing could be permuted, so there is nothing to compare with.
        p_values = [float("nan")] * len(sites)
        test = test._replace(p_values=p_values)
    intervals = [
        score_interval(
            site.estimate, site.null.variability, test, design, site.jackknife
        )
        for site in probed
    ]
    pairs = zip(sites, scaled, strict=True)
    equal = [str(site) for site, states in pairs if not states.any()]
    centre = centre_of(
        sites,
        [site.fit.scores[0] for site in probed],
        [site.null.variability for site in probed],
        target,
        design,
    )
    return Scored(
        rows, target, design, probed, intervals, p_values, mixed, equal, centre
    )


def _probe_site(
    states: torch.Tensor,
    scale: list[torch.Tensor],
    target: ProbeTarget,
    design: Design,
    learner: Learner,
) -> ProbedSite:
    """Probe standardised states; `scale` is their mean and deviation.

    Where the scores of tokens are pooled, permuted targets are learnt like the true
    ones, and the states are means over tokens, which tell how scores vary.
    """
    controls = len(design.targets)
    targets = design.targets
    if learner is not target.learner:
        targets = torch.cat([targets, design.permuted[1:]])
    fit = cross_validate(states, targets, design.folds, learner)
    by_set = fit.scores.permute(1, 2, 0)
    # The true targets come first, the others are controls.
    estimate = estimate_score(by_set[..., :1], targets[:1].T, target, design)
    estimates = estimate_score(by_set, targets.T, target, design)
    whole = fit.whole
    predicted = whole.scores(states)[:, 0, 0]
    null = null_distribution(states, predicted, target, design)
    query = None
    if learner is not target.learner:
        permuted = torch.cat([estimates.score[:1], estimates.score[controls:]])
        factors = null.variability
        assert isinstance(factors, VarianceFactors)
        # The factor of means over tokens is about that of a pooling, which may vary
        # more: 19 permutations do not tell.
        null = NullDistribution(
            above_largest(permuted, design.permuted),
            factors._replace(within=max(DEPENDENCE, factors.within)),
        )
    if whole.query is not None and len(whole.query):
        query = (whole.query[:, -1].double() / scale[1]).numpy()
    coef, intercept = unscaled(whole.coef[..., 0], whole.intercept[:, 0], *scale)
    if target.classes is None:
        coef = coef[0] * target.deviation
        intercept = intercept[0] * target.deviation + target.mean
    elif len(target.classes) == 2:
        # The fit has one score, that of the second class. A result has one per class.
        coef = np.concatenate([-coef / 2, coef / 2])
        intercept = np.concatenate([-intercept / 2, intercept / 2])
    return ProbedSite(
        fit=fit,
        estimate=estimate,
        null=null,
        jackknife=jackknife_of(states, fit.penalty, target, design),
        control=float(estimates.score[1:controls].mean()),
        by_fold=_by_fold(fit.scores[0], target, design),
        coef=coef,
        intercept=intercept,
        query=query,
    )


def _by_fold(scores: torch.Tensor, target: ProbeTarget, design: Design) -> Floats:
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


def _probe_mix(
    scaled: torch.Tensor,
    fits: list[CrossValidated],
    target: ProbeTarget,
    design: Design,
) -> Mix:
    """Probe a weighted sum of all sites, in the same folds.

    Its penalties are those of the site with the least loss on inner folds: one for each
    fold, and the last for all rows.
    """
    inner_loss = torch.stack([fit.inner_loss for fit in fits])
    penalty = torch.full((design.fold_count + 1,), DEFAULT_PENALTY, dtype=torch.float64)
    if not inner_loss.isnan().any():
        of_folds = inner_loss.amin(0).argmin(0)
        of_all_rows = inner_loss.mean(2).amin(0).argmin()
        grid = torch.tensor(PENALTIES, dtype=torch.float64)
        penalty = grid[torch.cat([of_folds, of_all_rows[None]])]
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
        # with this variance held the truth (docs/methods.md).
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


def _dataset(scored: Scored) -> "xarray.Dataset":
    """Tabulate scores, controls, penalties and coefficients by site."""
    score, classes, mixed = scored.score, scored.target.classes, scored.mix
    name = "R²" if classes is None else "accuracy"
    # The level of an interval is not claimed where it is lower.
    level = "interval" if scored.coverage else "95% interval"
    variables: Variables = {}

    def put(key: str, dims: Dims, values: Any, long_name: str, **details: str) -> None:
        attributes: Any = {"long_name": long_name, **details}
        variables[key] = dims, np.array(values), attributes

    def along(field: str) -> AnyArray:
        return np.array([getattr(site, field) for site in scored.probed])

    values = np.array([interval.score for interval in scored.intervals])
    put(score, "site", values, name)
    for end in ("low", "high"):
        ends = [getattr(interval, end) for interval in scored.intervals]
        put(f"{score}_{end}", "site", ends, f"{name}, {end} end of the {level}")
    controls = along("control")
    corrected = "permutation p-value, corrected for all sites"
    put("p", "site", scored.p_values, corrected)
    put("control", "site", controls, f"{name} on control labels")
    put(
        "selectivity",
        "site",
        values - controls,
        f"selectivity: {name} less that on control labels",
        meaning="diverging",
    )
    put(f"{score}_fold", ("site", "fold"), along("by_fold"), f"{name} on each fold")
    fits = [site.fit for site in scored.probed]
    by_fold = [fit.penalty.numpy() for fit in fits]
    put("penalty", ("site", "fold"), by_fold, "penalty of each fold", scale="log")
    of_all = [fit.whole_penalty for fit in fits]
    of_all_rows = "penalty of the probe of all rows"
    put("penalty_whole", "site", of_all, of_all_rows, scale="log")
    by_class: Dims = ("site",) if classes is None else ("site", "class")
    coefficients = "coefficients of the probe of all rows"
    put("coef", (*by_class, "width"), along("coef"), coefficients)
    put("intercept", by_class, along("intercept"), "intercept of the probe of all rows")
    coords: Coordinates = {
        "site": site_names(scored.rows.sites),
        "fold": np.arange(scored.design.fold_count),
    }
    if classes is not None:
        coords["class"] = classes
        put("majority", (), scored.target.chance, "share of the largest class")
    trained = sorted(map(key_number, scored.rows.keys))
    put("trained_on", "trained", trained, "hash of each text it was trained on")
    if scored.probed[0].query is not None:
        put("query", ("site", "width"), along("query"), "query of the attention")
    if mixed is not None:
        of_fold = "weight in the mix of each fold"
        in_mix = "penalty of each fold in the mix"
        put("mix_weight", "site", mixed.weights, "weight in the mix")
        put("mix_weight_fold", ("site", "fold"), mixed.fold_weights, of_fold)
        put("mix_penalty", "fold", mixed.penalty, in_mix, scale="log")
        put(f"mix_{score}", (), mixed.score, f"{name} of the mix")
    if mixed is not None and mixed.interval is not None:
        for end in ("low", "high"):
            long_name = f"{name} of the mix, {end} end of the {level}"
            put(f"mix_{score}_{end}", (), getattr(mixed.interval, end), long_name)
    return to_dataset(variables, coords)


def _report(scored: Scored, token: Pooling) -> ProbeReport:
    """Return what was probed, the best site, the sites above chance, and the mix."""
    rows, target, design = scored.rows, scored.target, scored.design
    sites = [str(site) for site in rows.sites]
    scores = [interval.score for interval in scored.intervals]
    best = int(np.argmax(scores))
    at_sites = zip(sites, scores, strict=True)
    tied = [site for site, score in at_sites if score == scores[best]]
    interval, control = scored.intervals[best], scored.probed[best].control
    best_score: dict[str, Any] = {scored.score: interval.score}
    tested = zip(sites, scored.intervals, scored.p_values, strict=True)
    above = [site for site, at, p in tested if is_above(at, p, target.chance)]
    fits = [site.fit for site in scored.probed]
    converged = [bool(fit.whole.converged.all()) for fit in fits]
    pairs = zip(sites, converged, strict=True)
    is_fixed = bool(fits[0].inner_loss.isnan().any())
    mix_score, mixed = None, scored.mix
    if mixed is not None:
        largest = int(np.argmax(mixed.weights))
        by_fold = np.argmax(mixed.fold_weights, axis=0)
        weight = LargestWeight(
            site=sites[largest],
            weight=float(mixed.weights[largest]),
            folds=int(np.sum(by_fold == largest)),
        )
        score: dict[str, Any] = {scored.score: mixed.score}
        if mixed.interval is not None and not design.serial:
            score["interval"] = [mixed.interval.low, mixed.interval.high]
        mix_score = MixScore(largest_weight=weight, **score)
    classes = None
    if target.classes is not None:
        counts = zip(target.classes.tolist(), target.counts, strict=True)
        listed = [ClassCount(label=str(label), rows=count) for label, count in counts]
        classes = listed[:LISTED]
    return ProbeReport(
        data=rows.name,
        token=token,
        rows=len(rows.labels),
        **rows.belonging.facts | {"texts": len(set(rows.text_names))},
        serial_inflation=design.serial,
        folds=design.fold_count,
        score=scored.score,
        left_out=rows.left_out,
        classes=classes,
        class_count=0 if target.classes is None else len(target.classes),
        best=BestSite(
            site=sites[best],
            tied=tied if len(tied) > 1 else None,
            interval=None if design.serial else as_best(interval),
            p=known(scored.p_values[best]),
            control=known(control),
            selectivity=known(interval.score - control),
            **best_score,
        ),
        chance=target.chance,
        above_chance_at=above,
        centre=scored.centre if above else None,
        permutations=len(design.permuted) - 1,
        smallest_p=design.smallest_p,
        mix=mix_score,
        control=Control(
            kind="shuffled" if rows.tokens is None else "by_token_id",
            draws=len(design.targets) - 1,
        ),
        calibrated=design.calibrated and rows.scored is None,
        interval_holds=scored.coverage,
        all_equal_at=scored.equal or None,
        fixed_penalty=DEFAULT_PENALTY if is_fixed else None,
        not_converged_at=[site for site, is_done in pairs if not is_done] or None,
        pooled=rows.pooled,
    )


def as_best(interval: Interval) -> list[float]:
    """Return the ends of the interval of the best site, corrected for its selection."""
    return [min(interval.low, interval.joint_low), interval.high]


def is_above(interval: Interval, p: float, chance: float) -> bool:
    """Return whether a score is above chance.

    Permuted labels must not explain it, and its lower bound must be above chance.
    """
    return p <= SIGNIFICANCE and interval.decision_low > chance
