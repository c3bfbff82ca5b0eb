"""Two datasets in the same classes, compared in every model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.project.points import Points, permutation_count
from hiddenscope.analyses.project.story import DatasetComparison, DatasetDifference
from hiddenscope.measures.comparison import LEVEL, Difference, Parts, Sets, compared
from hiddenscope.results.dataset import Variables
from hiddenscope.results.sentences import in_series, quote
from hiddenscope.states.arrays import Bools
from hiddenscope.texts import number_groups

# Points of a dataset, of which each is compared with each under every permutation.
MOST_POINTS = 2_000
LONG_NAMES = {
    "dispersion_ratio": "dispersion of the first dataset over that of the second",
    "neighbour_difference": "neighbour of the first dataset less that of the second",
}
SIDES = {
    "": "",
    "_low": ", low end of the 95% interval at all sites together",
    "_high": ", high end of the 95% interval at all sites together",
    "_p": ", p-value corrected for the number of sites",
}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two datasets in one model: the report, and the numbers of each site."""

    report: DatasetComparison
    sites: list[str]
    dispersion: Difference
    neighbour: Difference


def compare_datasets(
    points: Sequence[Points], seed: int
) -> tuple[str | None, list[Comparison]]:
    """Compare two labelled datasets in every model.

    Return why they were not, where that is worth saying, and the comparisons.
    """
    by_model: dict[str, list[Points]] = {}
    for part in points:
        by_model.setdefault(part.model, []).append(part)
    sides = next(iter(by_model.values()))
    if len(sides) != 2 or any(side.classes is None for side in sides):
        return None, []
    # The dataset, the class and the group of every point that counts.
    keys = []
    groups = []
    labels = []
    for number, side in enumerate(sides):
        assert side.classes is not None
        names = side.classes.labels
        for row in side.scored:
            text = side.text_of[row]
            # A text without its label: the same text in both datasets is a pair.
            keys.append(side.belonging.texts[text].partition("\0")[0])
            labels.append(names[row])
            if side.named_groups is None:
                groups.append((number, text))
            else:
                groups.append(side.named_groups[text])
    sizes = [len(side.scored) for side in sides]
    classes = np.unique(labels, return_inverse=True)[1]
    sets = Sets(np.repeat([0, 1], sizes), classes, number_groups(keys, groups))
    reason = _obstacle(sides, sets)
    if reason:
        return reason, []
    parts = Parts(sets, permutation_count(len(sets.sets)), seed)
    comparisons = []
    total = len(by_model)
    with progress.track("Comparing the datasets", total=total) as advance:
        for model, (first, second) in by_model.items():
            pairs = zip(first.values, second.values, strict=True)
            sites = [
                torch.cat([states[first.scored], others[second.scored]])
                for states, others in pairs
            ]
            differences = compared(sites, sets, parts)
            names = [str(site) for site in first.sites]
            report = DatasetComparison(
                model=model,
                first=first.dataset,
                second=second.dataset,
                pairs=parts.pairs,
                groups=len(np.unique(sets.groups)),
                smallest_p=parts.smallest_p,
                dispersion=_reported(names, differences["dispersion"], np.exp),
                neighbour=_reported(names, differences["neighbour"], np.asarray),
            )
            comparisons.append(Comparison(report, names, **differences))
            advance(1)
    return None, comparisons


def _obstacle(sides: Sequence[Points], sets: Sets) -> str | None:
    """Say why two datasets cannot be compared, if they cannot."""
    first, second = (quote(side.dataset) for side in sides)
    classes = [set(side.classes.names) for side in sides if side.classes]
    if classes[0] != classes[1]:
        other = in_series([quote(name) for name in sorted(classes[0] ^ classes[1])[:3]])
        return f"only one of them has {other}. Give both the same classes"
    if len(classes[0]) < 2:
        return "all points are of one class. Give texts of two classes"
    for number, side in enumerate(sides):
        inside = sets.members(number)
        if len(inside.sets) > MOST_POINTS:
            return (
                f"{quote(side.dataset)} has more than {MOST_POINTS:,} points, and"
                " every pair of them is compared. Give a sample"
            )
        for code in np.unique(sets.classes):
            if len(np.unique(inside.groups[inside.classes == code])) < 2:
                return (
                    f"a class of {quote(side.dataset)} has fewer than two independent"
                    " texts, so nothing is known of its spread. Give more"
                )
    for group in np.intersect1d(sets.members(0).groups, sets.members(1).groups):
        here = [
            set(sets.classes[(sets.groups == group) & (sets.sets == k)]) for k in (0, 1)
        ]
        if here[0] != here[1]:
            return (
                f"texts of one group have other labels in {first} than in {second}, so"
                " they are no pairs. Give pairs the same label, or groups of either"
                " dataset other names"
            )
    return None


def _reported(
    names: Sequence[str], numbers: Difference, scale: Any
) -> DatasetDifference | None:
    """Report where a number is smaller or larger in the first dataset, and the site
    with the clearest difference.
    """
    value = numbers.value
    known = np.flatnonzero(np.isfinite(value)).tolist()
    if not known:
        return None
    p = np.nan_to_num(numbers.p, nan=1.0)
    site = min(known, key=lambda row: (p[row], -abs(value[row])))
    differ = p <= LEVEL
    columns = (numbers.first, numbers.second, value, numbers.low, numbers.high)
    scaled = [float(scale(column[site])) for column in columns]
    return DatasetDifference(
        site=names[site],
        first=scaled[0],
        second=scaled[1],
        difference=scaled[2],
        interval=scaled[3:] if np.isfinite(scaled[3]) else None,
        p=float(numbers.p[site]) if np.isfinite(numbers.p[site]) else None,
        sites=len(known),
        smaller_at=_names_where(names, differ & (value < 0)),
        larger_at=_names_where(names, differ & (value > 0)),
    )


def _names_where(names: Sequence[str], marked: Bools) -> list[str]:
    return [name for name, is_marked in zip(names, marked, strict=True) if is_marked]


def compared_variables(
    comparisons: Sequence[Comparison],
    models: Sequence[str],
    datasets: Sequence[str],
    sites: Sequence[str],
) -> Variables:
    """Tabulate the comparisons by model and site."""
    if not comparisons:
        return {}
    dispersion = np.full((len(models), len(datasets), len(sites)), np.nan)
    numbers = {}
    for name in LONG_NAMES:
        for side in SIDES:
            numbers[f"{name}{side}"] = np.full((len(models), len(sites)), np.nan)
    for comparison in comparisons:
        model = models.index(comparison.report.model)
        rows = [sites.index(site) for site in comparison.sites]
        looser, nearer = comparison.dispersion, comparison.neighbour
        dispersion[model, 0, rows] = np.exp(looser.first)
        dispersion[model, 1, rows] = np.exp(looser.second)
        ratio = (*np.exp([looser.value, looser.low, looser.high]), looser.p)
        share = (nearer.value, nearer.low, nearer.high, nearer.p)
        for name, columns in zip(LONG_NAMES, (ratio, share), strict=True):
            for side, column in zip(SIDES, columns, strict=True):
                numbers[f"{name}{side}"][model, rows] = column
    meaning = "distance to the mean of the class over that between classes"
    variables: Variables = {
        "dispersion": (("model", "dataset", "site"), dispersion, meaning)
    }
    for name, long_name in LONG_NAMES.items():
        for side, more in SIDES.items():
            values = numbers[f"{name}{side}"]
            if np.isfinite(values).any():
                words = f"{long_name}{more}"
                variables[f"{name}{side}"] = ("model", "site"), values, words
    return variables
