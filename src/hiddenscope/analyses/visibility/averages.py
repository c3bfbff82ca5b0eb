"""The labelled arrays and the facts of averages over texts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from hiddenscope.analyses.visibility.decay import LOGARITHMIC
from hiddenscope.analyses.visibility.facts import (
    DECAYS,
    AveragesFacts,
    BoundarySide,
    DecayName,
    GuessFacts,
    IntervalFacts,
    LawFacts,
    RandomFacts,
)
from hiddenscope.analyses.visibility.jackknife import Estimate
from hiddenscope.analyses.visibility.sampling import DistanceWindow
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    to_dataset,
)
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats

if TYPE_CHECKING:
    import xarray

# The dim of each statistic that has a dim, and what it is.
STATISTICS = {
    "decay_below": ("distance", "share of a token in the influence of the site below"),
    "decay_first": (
        "distance",
        "share of a token in the influence of the first site on the last",
    ),
    "decay_depth": (
        "depth",
        "share of a site so many sites below in the influence of the nearest sites",
    ),
    "own_below": (
        "site",
        "share of the same token in the influence of the site below",
    ),
    "own_by_depth": (
        "depth",
        "share of the same token in the influence of a site so many sites below",
    ),
    "reach": ("source_site", "share of each site in the influence on the last"),
    "mean_distance": (
        "site",
        "mean distance of the influence of other tokens of the site below",
    ),
}
# The mean share of the own column is compared with a half.
HALF = 0.5


def averages_dataset(
    sites: Sequence[Site], window: DistanceWindow, estimates: Mapping[str, Estimate]
) -> "xarray.Dataset":
    """Return every statistic that has a dim, with the ends of its interval."""
    names = site_names(sites)
    coords: Coordinates = {
        "site": names,
        "source_site": names,
        "distance": np.arange(window.farthest + 1),
        "depth": np.arange(1, len(sites)),
    }
    variables: Variables = {}
    for name, (dim, long_name) in STATISTICS.items():
        attributes: Attributes = {"long_name": long_name, "units": "share"}
        if name == "mean_distance":
            attributes["units"] = "tokens"
        if name in LOGARITHMIC:
            attributes["scale"] = "log"
        size = len(coords[dim])
        _put(variables, name, dim, size, estimates[name], attributes)
        of_random = estimates.get(f"random_{name}")
        if of_random is not None:
            words = f"{long_name}, with random weights"
            named: Attributes = {**attributes, "long_name": words}
            _put(variables, f"random_{name}", dim, size, of_random, named)
    return to_dataset(variables, coords, {})


def _put(
    variables: Variables,
    name: str,
    dim: str,
    size: int,
    estimated: Estimate,
    attributes: Attributes,
) -> None:
    """Add an estimate and the ends of its interval to the variables."""
    for suffix, values in zip(("", "_low", "_high"), estimated, strict=True):
        # Not every depth is counted; those that are not have no share.
        numbers = np.full(size, np.nan, dtype=np.float32)
        numbers[: len(values)] = _known(values, name)
        variables[f"{name}{suffix}"] = ((dim,), numbers, attributes)


def _known(values: Floats, name: str) -> Floats:
    """Replace what is not known by NaN."""
    known = np.isfinite(values)
    # A site that nothing was measured of has no share.
    if name.endswith("reach"):
        known &= values > 0
    numbers: Floats = np.where(known, values, np.nan)
    return numbers


def averages_facts(estimates: Mapping[str, Estimate]) -> AveragesFacts:
    """Return the laws and the answers to the guesses, as far as the data tell."""
    facts: AveragesFacts = {
        "laws": [_law(decay, estimates) for decay in DECAYS],
        "own_column": _guess(estimates["own_column"], HALF),
        "own_below": _guess(estimates["own_mean"], HALF),
        "own_first": _guess(estimates["own_first"], HALF),
        "opening": _interval(estimates["opening"]),
        "locality": _guess(estimates["locality_trend"], 0.0),
    }
    if "excess_below" in estimates:
        facts["random"] = [_random(decay, estimates) for decay in DECAYS]
    return facts


def _law(decay: DecayName, estimates: Mapping[str, Estimate]) -> LawFacts:
    """Return both fits, and which is better where the data tell them apart."""
    exponent = estimates[f"exponent_{decay}"]
    advantage = estimates[f"advantage_{decay}"]
    decays = _side(exponent, 0.0)
    side = _side(advantage, 0.0)
    better: Literal["power", "exponential"] | None = None
    # Of shares that do not fall, neither law says anything.
    if decays == "above" and side != "undecided":
        better = "power" if side == "above" else "exponential"
    return {
        "source": decay,
        "exponent": _interval(exponent),
        "rate": _interval(estimates[f"rate_{decay}"]),
        "advantage": _interval(advantage),
        "explained": _number(estimates[f"explained_{decay}"].value),
        "better": better,
        "decays": decays,
    }


def _random(decay: DecayName, estimates: Mapping[str, Estimate]) -> RandomFacts:
    """Return the exponent with random weights, and how much larger the model's is."""
    exponent = estimates[f"random_exponent_{decay}"]
    excess = estimates[f"excess_{decay}"]
    return {
        "source": decay,
        "exponent": _interval(exponent),
        "decays": _side(exponent, 0.0),
        "excess": _interval(excess),
        "verdict": _side(excess, 0.0),
    }


def _guess(estimated: Estimate, boundary: float) -> GuessFacts:
    """Compare an estimate with the boundary that decides."""
    return {
        **_interval(estimated),
        "boundary": boundary,
        "verdict": _side(estimated, boundary),
    }


def _side(estimated: Estimate, boundary: float) -> BoundarySide:
    """Say on which side of a boundary the whole interval is."""
    if estimated.low > boundary:
        return "above"
    if estimated.high < boundary:
        return "below"
    return "undecided"


def _interval(estimated: Estimate) -> IntervalFacts:
    value, low, high = map(_number, estimated)
    return {"value": value, "low": low, "high": high}


def _number(value: Floats) -> float | None:
    """Return a finite number; None where there is none."""
    number = float(value)
    return number if np.isfinite(number) else None
