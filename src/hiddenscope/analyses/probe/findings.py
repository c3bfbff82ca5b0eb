"""Findings: the scores of all probes as a Dataset, and the facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.probe.labels import Rows
from hiddenscope.linear.crossvalidation import MIDDLE
from hiddenscope.linear.intervals import Interval
from hiddenscope.results import Facts
from hiddenscope.sites import Site
from hiddenscope.states import Pooling

if TYPE_CHECKING:
    import xarray

Floats: TypeAlias = NDArray[np.float64]

LISTED = 20  # classes that the facts list
LEAST_LIKELY = 0.05  # the largest p-value of a site that is above chance
HELD_OF_SEVERAL = (
    # How often intervals of four classes held the truth of noise (docs/probe.md).
    0.88
)


@dataclass(frozen=True, eq=False)
class Column:
    """The probes of one site: scores on test folds, and the probe of all rows."""

    interval: Interval
    p: float
    control: float
    by_fold: Floats
    penalty: Floats
    penalty_whole: float
    penalty_chosen: bool
    coef: Floats
    intercept: Floats
    converged: bool


@dataclass(frozen=True, eq=False)
class Mix:
    """The probe of a mix of all sites: its score, the weight of each site with its
    range over the folds, the penalties.

    Of the R² of a mix no interval is known that holds.
    """

    score: float
    interval: Interval | None
    weights: Floats
    low: Floats
    high: Floats
    penalty: Floats


class Draws(NamedTuple):
    """How many folds, control targets and permutations there were, and whether
    intervals are calibrated for so few.

    `smallest_p` is the smallest p-value that these permutations can give; None where
    nothing can be permuted.
    """

    folds: int
    controls: int
    permutations: int
    smallest_p: float | None
    calibrated: bool


@dataclass(frozen=True, eq=False)
class Scored:
    """Everything that was computed; `counts` has the number of rows of each class, None
    for a regression.
    """

    rows: Rows
    classes: NDArray[Any] | None
    counts: list[int] | None
    draws: Draws
    columns: Sequence[Column]
    mix: Mix | None
    equal: Sequence[Site]

    @property
    def score(self) -> str:
        """The name of the score."""
        return "r2" if self.classes is None else "accuracy"

    @property
    def chance(self) -> float:
        """The score without any states: the share of the largest class, or 0 for R²."""
        return 0.0 if self.counts is None else max(self.counts) / sum(self.counts)

    @property
    def interval_holds(self) -> float | None:
        """How often such intervals held the truth of simulations, where that is less
        than 95%.
        """
        return (
            HELD_OF_SEVERAL
            if self.classes is not None and len(self.classes) > 2
            else None
        )


def table(scored: Scored) -> "xarray.Dataset":
    """Scores, controls, penalties and coefficients by site."""
    import xarray

    score, name = scored.score, "R²" if scored.classes is None else "accuracy"
    level = "interval" if scored.interval_holds else "95% interval"
    intervals = [column.interval for column in scored.columns]
    by_class: tuple[str, ...] = (
        ("site",) if scored.classes is None else ("site", "class")
    )

    def along(field: str) -> NDArray[Any]:
        return np.array([getattr(column, field) for column in scored.columns])

    values, controls = (
        np.array([interval.score for interval in intervals]),
        along("control"),
    )
    variables: dict[str, Any] = {score: ("site", values, {"long_name": name})}
    for end in ("low", "high"):
        ends = np.array([getattr(interval, end) for interval in intervals])
        variables[f"{score}_{end}"] = (
            "site",
            ends,
            {"long_name": f"{name}, {end} end of the {level}"},
        )
    variables["p"] = (
        "site",
        along("p"),
        {"long_name": "permutation p-value, corrected for all sites"},
    )
    selectivity = {
        "long_name": f"selectivity: {name} less that on control labels",
        "meaning": "diverging",
    }
    variables |= {
        "control": ("site", controls, {"long_name": f"{name} on control labels"}),
        "selectivity": ("site", values - controls, selectivity),
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
    coords: dict[str, Any] = {
        "site": [str(site) for site in scored.rows.vectors.sites],
        "fold": np.arange(scored.draws.folds),
    }
    if scored.classes is not None:
        coords["class"] = scored.classes
        variables["majority"] = (
            (),
            scored.chance,
            {"long_name": "share of the largest class"},
        )
    if scored.mix is not None:
        variables |= _mix_variables(scored.mix, score, name, level)
    return xarray.Dataset(variables, coords)


def _mix_variables(mix: Mix, score: str, name: str, level: str) -> dict[str, Any]:
    variables: dict[str, Any] = {
        "mix_weight": ("site", mix.weights, {"long_name": "weight in the mix"}),
        "mix_weight_low": (
            "site",
            mix.low,
            {"long_name": "weight in the mix, least of the folds"},
        ),
        "mix_weight_high": (
            "site",
            mix.high,
            {"long_name": "weight in the mix, most of the folds"},
        ),
        "mix_penalty": (
            "fold",
            mix.penalty,
            {"long_name": "penalty of each fold in the mix", "scale": "log"},
        ),
        f"mix_{score}": ((), mix.score, {"long_name": f"{name} of the mix"}),
    }
    for end in ("low", "high") if mix.interval is not None else ():
        described = {"long_name": f"{name} of the mix, {end} end of the {level}"}
        variables[f"mix_{score}_{end}"] = ((), getattr(mix.interval, end), described)
    return variables


def facts_of(scored: Scored, pool: Pooling | None) -> Facts:
    """What was probed, the best site, the sites above chance, and the mix."""
    rows, score, sites = scored.rows, scored.score, scored.rows.vectors.sites
    facts: dict[str, Any] = {
        "data": rows.name,
        "token": "each" if pool is None else pool,
        "rows": len(rows.labels),
    }
    if rows.belonging is not None:
        facts |= rows.belonging.facts
    facts |= {
        "texts": len(set(rows.texts)),
        "folds": scored.draws.folds,
        "score": score,
    }
    if rows.left_out:
        facts["left_out"] = rows.left_out
    if scored.classes is not None and scored.counts is not None:
        listed = list(zip(scored.classes.tolist(), scored.counts, strict=True))[:LISTED]
        facts["classes"] = [
            {"label": str(label), "rows": count} for label, count in listed
        ]
        facts["class_count"] = len(scored.classes)
    best = max(
        range(len(sites)), key=lambda number: scored.columns[number].interval.score
    )
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
    facts["permutations"] = scored.draws.permutations
    facts["smallest_p"] = scored.draws.smallest_p
    if scored.mix is not None:
        top, interval = int(np.argmax(scored.mix.weights)), scored.mix.interval
        facts["mix"] = {score: scored.mix.score} | (
            {"interval": [interval.low, interval.high]} if interval else {}
        )
        facts["mix"]["largest_weight"] = {
            "site": sites[top],
            "weight": float(scored.mix.weights[top]),
        }
    facts["control"] = {
        "kind": "shuffled" if rows.token_ids is None else "by_token_id",
        "draws": scored.draws.controls,
    }
    return {**facts, **_conditions(scored)}


def known(number: float) -> float | None:
    """None in place of NaN, which JSON does not have."""
    return number if number == number else None


def as_best(interval: Interval) -> list[float]:
    """The ends of the interval of the best site, corrected for its choice."""
    return [min(interval.low, interval.joint_low), interval.high]


def is_above(interval: Interval, p: float, chance: float) -> bool:
    """Whether permuted labels do not explain the score, and its interval is above
    chance.
    """
    return p <= LEAST_LIKELY and interval.above > chance


def _conditions(scored: Scored) -> Facts:
    """What limits the findings."""
    facts: dict[str, Any] = {}
    if not scored.draws.calibrated:
        facts["calibrated"] = False
    if scored.interval_holds is not None:
        facts["interval_holds"] = scored.interval_holds
    if scored.equal:
        facts["all_equal_at"] = scored.equal
    if not scored.columns[0].penalty_chosen:
        facts["fixed_penalty"] = MIDDLE
    pairs = zip(scored.rows.vectors.sites, scored.columns, strict=True)
    if not_converged := [site for site, column in pairs if not column.converged]:
        facts["not_converged_at"] = not_converged
    return facts
