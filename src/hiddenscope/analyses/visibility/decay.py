"""How influence falls with distance and depth: averages over texts, and laws."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from hiddenscope.analyses.visibility.facts import DECAYS
from hiddenscope.analyses.visibility.jackknife import Estimate, jackknife
from hiddenscope.analyses.visibility.laws import fit_law
from hiddenscope.analyses.visibility.tallies import NamedSums, Tallies
from hiddenscope.states.arrays import Bools, Floats

# An influence of others below this share of all is rounding: a norm mixes no tokens.
ROUNDING = 1e-9
# Statistics whose intervals are those of their logarithms.
LOGARITHMIC = ("decay_below", "decay_first", "decay_depth", "reach")
# Statistics that lie between 0 and 1.
SHARES = ("own_below", "own_mean", "own_first", "own_column", "own_by_depth", "opening")


def estimate(
    tallies: Tallies, baseline: Tallies | None = None
) -> tuple[dict[str, Estimate], float]:
    """Return every statistic with its interval, and how many batches count.

    With a baseline, its statistics are named `random_...`, and `excess_...` is by how
    much an exponent is larger. Both see the same targets of the same texts, so that the
    difference is that of pairs.
    """
    sums = dict(tallies.sums)
    statistics = partial(statistics_of, mixing=mixing_sites(sums))
    if baseline is not None:
        for name, array in baseline.sums.items():
            sums[f"random_{name}"] = array
        statistics = partial(
            _paired_statistics,
            mixing=mixing_sites(tallies.sums),
            random_mixing=mixing_sites(baseline.sums),
        )
    estimates, count = jackknife(sums, statistics)
    scaled = {}
    for name, estimated in estimates.items():
        scaled[name] = _to_scale(name.removeprefix("random_"), estimated)
    return scaled, count


def mixing_sites(sums: Mapping[str, Floats]) -> Bools:
    """Mark the sites that other tokens of the site below influence."""
    others = sums["below"][..., 1:].sum((0, 2))
    targets = sums["targets"].sum(0)
    marked: Bools = others > ROUNDING * targets
    return marked


def _paired_statistics(
    sums: NamedSums, mixing: Bools, random_mixing: Bools
) -> NamedSums:
    """Return the statistics of a model, of its baseline, and their difference."""
    random_sums = {}
    for name in sums:
        if name.startswith("random_"):
            random_sums[name.removeprefix("random_")] = sums[name]
    trained = statistics_of(sums, mixing)
    drawn = statistics_of(random_sums, random_mixing)
    statistics = dict(trained)
    for name, value in drawn.items():
        statistics[f"random_{name}"] = value
    for decay in DECAYS:
        exponent = f"exponent_{decay}"
        statistics[f"excess_{decay}"] = trained[exponent] - drawn[exponent]
    return statistics


def statistics_of(sums: Mapping[str, Floats], mixing: Bools) -> NamedSums:
    """Return the statistics of sums over some batches.

    Those in `LOGARITHMIC` are logarithms.
    """
    # A site that no target was drawn of divides 0 by 0, and is not a number.
    with np.errstate(divide="ignore", invalid="ignore"):
        targets = sums["targets"]
        decays = _decays(sums, mixing)
        statistics = _own_shares(sums, decays)
        statistics["opening"] = _mean_of(sums["opening"], targets, mixing)
        statistics["reach"] = np.log(sums["reach"] / targets[-1])
        mean_distance = _mean_distance(sums["below"], mixing)
        statistics["mean_distance"] = mean_distance
        statistics["locality_trend"] = _trend(mean_distance)
        for decay, shares in decays.items():
            statistics[f"decay_{decay}"] = np.log(shares)
    for decay, shares in decays.items():
        # Depths begin with 1, and distances with 0: the token itself.
        law = fit_law(shares if decay == "depth" else shares[1:])
        for name, value in law._asdict().items():
            statistics[f"{name}_{decay}"] = np.array(value)
    return {name: np.asarray(value) for name, value in statistics.items()}


def _decays(sums: Mapping[str, Floats], mixing: Bools) -> dict[str, Floats]:
    """Return the mean shares by distance and by depth."""
    targets = sums["targets"]
    decays = {}
    # A site that mixes no tokens, such as a final norm, says nothing of distances.
    decays["below"] = _mean_of(sums["below"], targets, mixing)
    decays["first"] = sums["first"][-1] / targets[-1]
    decays["depth"] = sums["depths"] / sums["deep"]
    return decays


def _mean_of(sums: Floats, targets: Floats, mixing: Bools) -> Floats:
    """Return the mean over all targets of the marked sites."""
    mean: Floats = sums[mixing].sum(0) / targets[mixing].sum()
    return mean


def _own_shares(sums: Mapping[str, Floats], decays: Mapping[str, Floats]) -> NamedSums:
    """Return the share of the same token: by site, by depth, and on the whole."""
    targets = sums["targets"]
    same_token = sums["own"]
    shares: NamedSums = {}
    shares["own_below"] = sums["below"][:, 0] / targets
    shares["own_mean"] = decays["below"][0]
    shares["own_first"] = decays["first"][0]
    # Of each target, the mean over its lower sites.
    depths = np.arange(1, len(targets))
    of_column = same_token.sum(1)[1:] / depths
    shares["own_column"] = of_column.sum() / targets[1:].sum()
    shares["own_by_depth"] = _own_by_depth(same_token, targets)
    return shares


def _own_by_depth(same_token: Floats, targets: Floats) -> Floats:
    """Return the share of the same token by how many sites below the source is.

    The array begins with depth 1.
    """
    shares = []
    for depth in range(1, len(targets)):
        sources = np.diagonal(same_token, -depth)
        shares.append(sources.sum() / targets[depth:].sum())
    return np.array(shares)


def _mean_distance(below: Floats, mixing: Bools) -> Floats:
    """Return the mean distance of other tokens' influence, [site]."""
    others = below[:, 1:]
    distances = np.arange(1, below.shape[1])
    mean: Floats = (others * distances).sum(1) / others.sum(1)
    mean[~mixing] = np.nan
    return mean


def _trend(values: Floats) -> Floats:
    """Return how much the values [site] rise from the first site to the last."""
    depths = np.linspace(0, 1, len(values))
    known = np.isfinite(values)
    if known.sum() < 2:
        return np.array(np.nan)
    x = depths[known] - depths[known].mean()
    slope: Floats = (x * values[known]).sum() / (x**2).sum()
    return slope


def _to_scale(name: str, estimated: Estimate) -> Estimate:
    """Turn logarithms into shares, and keep shares within 0 and 1."""
    value, low, high = estimated
    if name in LOGARITHMIC:
        return Estimate(np.exp(value), np.exp(low), np.exp(high))
    if name in SHARES:
        return Estimate(value, np.clip(low, 0, 1), np.clip(high, 0, 1))
    return estimated
