"""Findings: the scores of all probes as a Dataset, and the facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.probe.design import Design, ProbeTarget
from hiddenscope.analyses.probe.labels import Rows
from hiddenscope.linear.crossvalidation import DEFAULT_PENALTY
from hiddenscope.linear.intervals import Interval
from hiddenscope.results import Facts
from hiddenscope.results.dataset import (
    Coordinates,
    Dims,
    Variables,
    site_names,
    to_dataset,
)
from hiddenscope.sites import Site
from hiddenscope.states import Pooling
from hiddenscope.states.arrays import Floats, Labels

if TYPE_CHECKING:
    import xarray


# Classes that the facts list.
LISTED = 20
# The largest p-value of a site that is called above chance.
SIGNIFICANCE = 0.05
# How often intervals of four classes held the truth on noise (docs/probe.md).
COVERAGE_OF_SEVERAL = 0.88


@dataclass(frozen=True, eq=False)
class Column:
    """The probes of one site: scores on test folds, and the probe of all rows."""

    interval: Interval
    p: float
    control: float
    by_fold: Floats
    penalty: Floats
    penalty_whole: float
    penalty_selected: bool
    coef: Floats
    intercept: Floats
    converged: bool


@dataclass(frozen=True, eq=False)
class Mix:
    """The probe of a mix of all sites.

    `weights` are those of the probe of all rows, `fold_weights` `[site, fold]` those of
    each fold. Neither the weights nor an R² have an interval: none of those tried held
    the truth often enough (docs/probe.md, docs/log.md).
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
    columns: Sequence[Column]
    mix: Mix | None
    equal: Sequence[Site]

    @property
    def classes(self) -> Labels | None:
        """Return the classes, None for a regression."""
        return self.target.classes

    @property
    def counts(self) -> list[int]:
        """Return the number of rows of each class."""
        counts: list[int] = torch.bincount(self.target.values).tolist()
        return counts

    @property
    def score(self) -> str:
        """Return the name of the score."""
        return "r2" if self.classes is None else "accuracy"

    @property
    def long_name(self) -> str:
        """Return the name of the score in words."""
        return "R²" if self.classes is None else "accuracy"

    @property
    def level(self) -> str:
        """Return what to call an interval: its level is not claimed if it is lower."""
        return "interval" if self.coverage else "95% interval"

    @property
    def chance(self) -> float:
        """Return the score without states: the share of the largest class, or R² 0."""
        if self.classes is None:
            return 0.0
        return max(self.counts) / sum(self.counts)

    @property
    def coverage(self) -> float | None:
        """Return how often intervals held the truth in simulations, if below 95%."""
        if self.classes is None or len(self.classes) <= 2:
            return None
        return COVERAGE_OF_SEVERAL


def probe_dataset(scored: Scored) -> "xarray.Dataset":
    """Tabulate scores, controls, penalties and coefficients by site."""
    score, name = scored.score, scored.long_name
    intervals = [column.interval for column in scored.columns]

    def along(field: str) -> NDArray[Any]:
        return np.array([getattr(column, field) for column in scored.columns])

    values = np.array([interval.score for interval in intervals])
    variables: Variables = {score: ("site", values, {"long_name": name})}
    for end in ("low", "high"):
        ends = np.array([getattr(interval, end) for interval in intervals])
        long_name = f"{name}, {end} end of the {scored.level}"
        variables[f"{score}_{end}"] = ("site", ends, {"long_name": long_name})
    controls = along("control")
    by_class: Dims = ("site",) if scored.classes is None else ("site", "class")
    variables |= {
        "p": (
            "site",
            along("p"),
            {"long_name": "permutation p-value, corrected for all sites"},
        ),
        "control": ("site", controls, {"long_name": f"{name} on control labels"}),
        "selectivity": (
            "site",
            values - controls,
            {
                "long_name": f"selectivity: {name} less that on control labels",
                "meaning": "diverging",
            },
        ),
        f"{score}_fold": (
            ("site", "fold"),
            along("by_fold"),
            {"long_name": f"{name} on each fold"},
        ),
        "penalty": (
            ("site", "fold"),
            along("penalty"),
            {"long_name": "penalty of each fold", "scale": "log"},
        ),
        "penalty_whole": (
            "site",
            along("penalty_whole"),
            {"long_name": "penalty of the probe of all rows", "scale": "log"},
        ),
        "coef": (
            (*by_class, "width"),
            along("coef"),
            {"long_name": "coefficients of the probe of all rows"},
        ),
        "intercept": (
            by_class,
            along("intercept"),
            {"long_name": "intercept of the probe of all rows"},
        ),
    }
    coords: Coordinates = {
        "site": site_names(scored.rows.vectors.sites),
        "fold": np.arange(scored.design.fold_count),
    }
    if scored.classes is not None:
        coords["class"] = scored.classes
        variables["majority"] = (
            (),
            np.array(scored.chance),
            {"long_name": "share of the largest class"},
        )
    if scored.mix is not None:
        variables |= _mix_variables(scored, scored.mix)
    return to_dataset(variables, coords)


def _mix_variables(scored: Scored, mix: Mix) -> Variables:
    score, name = scored.score, scored.long_name
    variables: Variables = {
        "mix_weight": ("site", mix.weights, {"long_name": "weight in the mix"}),
        "mix_weight_fold": (
            ("site", "fold"),
            mix.fold_weights,
            {"long_name": "weight in the mix of each fold"},
        ),
        "mix_penalty": (
            "fold",
            mix.penalty,
            {"long_name": "penalty of each fold in the mix", "scale": "log"},
        ),
        f"mix_{score}": (
            (),
            np.array(mix.score),
            {"long_name": f"{name} of the mix"},
        ),
    }
    if mix.interval is not None:
        for end in ("low", "high"):
            value = np.array(getattr(mix.interval, end))
            long_name = f"{name} of the mix, {end} end of the {scored.level}"
            variables[f"mix_{score}_{end}"] = ((), value, {"long_name": long_name})
    return variables


def probe_facts(scored: Scored, pool: Pooling | None) -> Facts:
    """Return what was probed, the best site, the sites above chance, and the mix."""
    rows, score, sites = scored.rows, scored.score, scored.rows.vectors.sites
    facts: dict[str, Any] = {
        "data": rows.name,
        "token": "each" if pool is None else pool,
        "rows": len(rows.labels),
    }
    if rows.belonging is not None:
        facts |= rows.belonging.facts
    if scored.design.serial is not None:
        facts["serial_inflation"] = scored.design.serial
    facts |= {
        "texts": len(set(rows.texts)),
        "folds": scored.design.fold_count,
        "score": score,
    }
    if rows.left_out:
        facts["left_out"] = rows.left_out
    if scored.classes is not None:
        counts = zip(scored.classes.tolist(), scored.counts, strict=True)
        listed = [{"label": str(label), "rows": count} for label, count in counts]
        facts["classes"] = listed[:LISTED]
        facts["class_count"] = len(scored.classes)
    best = int(np.argmax([column.interval.score for column in scored.columns]))
    column = scored.columns[best]
    facts["best"] = {
        "site": sites[best],
        score: column.interval.score,
        "interval": as_best(column.interval),
        "p": known(column.p),
        "control": known(column.control),
        "selectivity": known(column.interval.score - column.control),
    }
    facts["chance"] = scored.chance
    facts["above_chance_at"] = [
        site
        for site, column in zip(sites, scored.columns, strict=True)
        if is_above(column.interval, column.p, scored.chance)
    ]
    facts["permutations"] = len(scored.design.permuted) - 1
    facts["smallest_p"] = scored.design.smallest_p
    if scored.mix is not None:
        facts["mix"] = _mix_facts(scored.mix, score, sites)
    facts["control"] = {
        "kind": "shuffled" if rows.token_ids is None else "by_token_id",
        "draws": len(scored.design.targets) - 1,
    }
    return {**facts, **_conditions(scored)}


def _mix_facts(mix: Mix, score: str, sites: Sequence[Site]) -> Facts:
    facts: dict[str, Any] = {score: mix.score}
    if mix.interval is not None:
        facts["interval"] = [mix.interval.low, mix.interval.high]
    largest = int(np.argmax(mix.weights))
    largest_by_fold = np.argmax(mix.fold_weights, axis=0)
    facts["largest_weight"] = {
        "site": sites[largest],
        "weight": float(mix.weights[largest]),
        "folds": int(np.sum(largest_by_fold == largest)),
    }
    return facts


def known(number: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return number if number == number else None


def as_best(interval: Interval) -> list[float]:
    """Return the ends of the interval of the best site, corrected for its selection."""
    return [min(interval.low, interval.joint_low), interval.high]


def is_above(interval: Interval, p: float, chance: float) -> bool:
    """Return whether a score is above chance.

    Permuted labels must not explain it, and its lower bound must be above chance.
    """
    return p <= SIGNIFICANCE and interval.decision_low > chance


def _conditions(scored: Scored) -> Facts:
    """Return what limits the findings."""
    facts: dict[str, Any] = {}
    if not scored.design.calibrated:
        facts["calibrated"] = False
    if scored.coverage is not None:
        facts["interval_holds"] = scored.coverage
    if scored.equal:
        facts["all_equal_at"] = scored.equal
    if not scored.columns[0].penalty_selected:
        facts["fixed_penalty"] = DEFAULT_PENALTY
    pairs = zip(scored.rows.vectors.sites, scored.columns, strict=True)
    not_converged = [site for site, column in pairs if not column.converged]
    if not_converged:
        facts["not_converged_at"] = not_converged
    return facts
