"""Findings of a graft: labelled arrays along the windows, and the facts they show."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.graft.runs import Window
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import effective_count, group_sums
from hiddenscope.results import Facts
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints

if TYPE_CHECKING:
    import xarray


# Random sign flips of the test, where not all of them can be tried.
FLIPS = 9_999
# Prompts for which all 4,096 sign flips are tried.
MOST_EXACT = 12
ATTRIBUTES: Mapping[str, Attributes] = {
    "accuracy": {"long_name": "right answers", "units": "share of the prompts"},
    "accuracy_low": {"long_name": "lower end, 95%", "units": "share of the prompts"},
    "accuracy_high": {"long_name": "upper end, 95%", "units": "share of the prompts"},
    "probability": {"long_name": "mean probability of the answer"},
}


def graft_dataset(
    windows: Sequence[Window],
    right: NDArray[np.bool_],
    probability: Floats,
    groups: Ints,
) -> "xarray.Dataset":
    """Return accuracies along the windows, each named by its first site."""
    accuracy = right.mean(1)
    count = effective_count(groups)
    intervals = np.array([wilson(float(share), count) for share in accuracy])
    columns = {
        "accuracy": accuracy,
        "accuracy_low": intervals[:, 0],
        "accuracy_high": intervals[:, 1],
        "probability": probability.mean(1),
    }
    variables: Variables = {}
    for name, values in columns.items():
        variables[name] = "site", values.astype(np.float32), ATTRIBUTES[name]
    last_sites = site_names(window[-1] for window in windows)
    coords: Coordinates = {
        "site": site_names(window[0] for window in windows),
        "last_site": ("site", text_array(last_sites)),
    }
    return to_dataset(variables, coords)


def graft_facts(
    windows: Sequence[Window],
    right: NDArray[np.bool_],
    right_ungrafted: Mapping[str, NDArray[np.bool_]],
    depth: int,
    groups: Ints,
) -> Facts:
    """Return both models' own accuracy, the lowest window, and middle against late.

    Middle and late are the windows in the middle and in the last third of the depth.
    """
    facts: dict[str, Any] = {}
    for name, flags in right_ungrafted.items():
        facts[f"{name}_alone"] = _accuracy(flags, groups)
    lowest = int(right.mean(1).argmin())
    facts["lowest"] = {
        **_accuracy(right[lowest], groups, len(windows)),
        **_ends([windows[lowest]]),
    }
    facts |= _middle_and_late(windows, right, depth, groups)
    return facts


def _middle_and_late(
    windows: Sequence[Window], right: NDArray[np.bool_], depth: int, groups: Ints
) -> dict[str, Any]:
    """Compare the middle third with the last; nothing where one has no window."""
    by_third: dict[int, list[int]] = {}
    for row, window in enumerate(windows):
        third = int(3 * _centre(window, depth) // depth)
        by_third.setdefault(third, []).append(row)
    # Thirds count from 0, at the bottom.
    rows_of = {"middle": by_third.get(1), "late": by_third.get(2)}
    facts: dict[str, Any] = {}
    shares = {}
    for name, rows in rows_of.items():
        if rows is None:
            return {}
        # The share of right answers of each prompt, over the windows.
        shares[name] = right[rows].mean(0)
        ends = _ends([windows[row] for row in rows])
        facts[name] = {"accuracy": float(shares[name].mean()), **ends}
    differences = shares["middle"] - shares["late"]
    facts["middle_less_late"] = {
        "value": float(differences.mean()),
        "p": sign_flip_p(differences, groups),
    }
    return facts


def _centre(window: Window, depth: int) -> float:
    """Return the depth in the middle of a window, in blocks from the bottom.

    The middle of the last block is depth - 1/2.
    """
    first, last = _layer(window[0], depth), _layer(window[-1], depth)
    return max(0.0, (first - 1 + last) / 2)


def _layer(site: Site, depth: int) -> int:
    """Return the layer of a site; `final` counts as the last."""
    return depth if site.layer is None else site.layer


def _ends(windows: Sequence[Window]) -> dict[str, str]:
    return {"from": str(windows[0][0]), "to": str(windows[-1][-1])}


def _accuracy(
    flags: NDArray[np.bool_], groups: Ints, shares: int = 1
) -> dict[str, float]:
    """Return the share of right answers with its 95% interval.

    The interval holds jointly for so many shares.
    """
    accuracy = float(flags.mean())
    low, high = wilson(accuracy, effective_count(groups), shares)
    return {"accuracy": accuracy, "low": low, "high": high}


def sign_flip_p(differences: Floats, groups: Ints | None = None) -> float:
    """Return the p-value of a mean difference, by flipping signs at random.

    It is how often a mean so far from zero comes up if each difference is as likely to
    have the other sign. The differences of a group have one sign together. It is exact
    for few prompts, where a bootstrap interval is too narrow: of two prompts that agree
    it shows nothing.

    >>> sign_flip_p(np.array([0.5, 0.5])), sign_flip_p(np.full(6, 0.5))
    (0.5, 0.03125)
    >>> sign_flip_p(np.full(6, 0.5), np.array([0, 0, 0, 1, 1, 1]))
    0.5
    """
    sums = differences if groups is None else group_sums(differences, groups)
    totals = np.abs(_signs(len(sums)) @ sums)
    # The first row is the data as they are; rounding must not tell equal sums apart.
    return float((totals >= totals[0] * (1 - 1e-9)).mean())


def _signs(count: int) -> Floats:
    """Return rows of signs, of which the first changes nothing.

    Few sums get every combination of signs, and many get random ones.
    """
    if count <= MOST_EXACT:
        return np.array(list(product((1, -1), repeat=count)), dtype=float)
    random_signs = np.random.default_rng(0).choice((1.0, -1.0), (FLIPS, count))
    return np.concatenate([np.ones((1, count)), random_signs])
