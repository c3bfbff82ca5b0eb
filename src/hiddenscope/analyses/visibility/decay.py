"""The decay of influence over many texts: averages, laws, and their intervals.

Texts are what was sampled, and texts of one group belong together. Groups are dealt to
at most `BATCHES` batches, and sums are kept for each batch: memory does not grow with
the number of texts. Every interval is that of the jackknife over batches (Tukey 1958),
with Student's quantile. With no more groups than batches, that is the jackknife over
groups.

Influence is averaged as a share: what a source has of the influence of all tokens of
its site on the target. Texts and layers whose influences differ in size then count the
same.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from hiddenscope.analyses.visibility.sampling import DistanceWindow, DrawnTarget
from hiddenscope.states.arrays import Bools, Floats

BATCHES = 64
LEVEL = 0.95
# An influence of others below this share of all is rounding: a norm mixes no tokens.
ROUNDING = 1e-9

Estimates: TypeAlias = dict[str, Floats]
NAMES = ("targets", "below", "first", "own", "opening", "reach")


class Estimate(NamedTuple):
    """Estimated numbers with the ends of their 95% intervals."""

    value: Floats
    low: Floats
    high: Floats


class Law(NamedTuple):
    """Two laws fitted to shares by distance, from distance 1 on.

    `exponent` is that of the power law, share ~ distance ** -exponent, and `rate` that
    of the exponential, share ~ exp(-rate * distance). Both are least squares of log
    shares, where every doubling of the distance counts the same. `advantage` is how
    much larger the squared error of the exponential is, as a share of the variance.
    """

    exponent: float
    rate: float
    advantage: float


class Tallies:
    """Sums of shares over the targets of each batch of texts.

    targets  [batch, site]                         how many targets
    below    [batch, site, distance]               shares of the site below
    first    [batch, site, distance]               shares of the first site
    own      [batch, site, source site]            shares of the same token
    opening  [batch, site]                         shares of the first token, site below
    reach    [batch, source site]                  of the last site's targets: the share
                                                   of each site in all influence
    """

    def __init__(self, batches: int, sites: int, window: DistanceWindow) -> None:
        self.window = window
        distances = window.farthest + 1
        self.sums: Estimates = {
            "targets": np.zeros((batches, sites)),
            "below": np.zeros((batches, sites, distances)),
            "first": np.zeros((batches, sites, distances)),
            "own": np.zeros((batches, sites, sites)),
            "opening": np.zeros((batches, sites)),
            "reach": np.zeros((batches, sites)),
        }

    def add(self, batch: int, target: DrawnTarget, influence: Floats) -> None:
        """Add the influence [source site, token] on one target."""
        row, token = target
        seen = influence[:row]
        totals = seen.sum(1, keepdims=True)
        shares = np.divide(seen, totals, out=np.zeros_like(seen), where=totals > 0)
        self.sums["targets"][batch, row] += 1
        self.sums["below"][batch, row] += self._by_distance(shares[-1], token)
        self.sums["first"][batch, row] += self._by_distance(shares[0], token)
        self.sums["own"][batch, row, :row] += shares[:, token]
        self.sums["opening"][batch, row] += shares[-1, 0]
        if row == len(influence) - 1 and totals.sum() > 0:
            self.sums["reach"][batch, :row] += totals[:, 0] / totals.sum()

    def _by_distance(self, shares: Floats, token: int) -> Floats:
        """Return the shares [token] by their distance from the target."""
        farthest = self.window.farthest
        before = shares[token - farthest : token + 1][::-1]
        if self.window.causal:
            return before
        after = shares[token : token + farthest + 1]
        both: Floats = (before + after) / 2
        return both


def estimate(
    tallies: Tallies, baseline: Tallies | None = None
) -> tuple[dict[str, Estimate], float]:
    """Return every statistic with its interval, and how many batches count.

    With a baseline, its statistics are named `random_...`, and `excess_...` is by how
    much an exponent is larger. Both see the same targets of the same texts, so that the
    difference is that of pairs.
    """
    sums = dict(tallies.sums)
    mixing = _mixing(sums)
    if baseline is None:
        return _jackknife(sums, partial(statistics_of, mixing=mixing))
    for name, array in baseline.sums.items():
        sums[f"random_{name}"] = array
    compare = partial(_compared, mixing=mixing, random_mixing=_mixing(baseline.sums))
    return _jackknife(sums, compare)


def _compared(part: Estimates, mixing: Bools, random_mixing: Bools) -> Estimates:
    """Return the statistics of a model, of its baseline, and their difference."""
    trained = statistics_of(part, mixing)
    drawn_sums = {name: part[f"random_{name}"] for name in NAMES}
    drawn = statistics_of(drawn_sums, random_mixing)
    compared = dict(trained)
    for name, value in drawn.items():
        compared[f"random_{name}"] = value
    for end in ("below", "first"):
        name = f"exponent_{end}"
        compared[f"excess_{end}"] = trained[name] - drawn[name]
    return compared


def _mixing(sums: Mapping[str, Floats]) -> Bools:
    """Mark the sites that other tokens of the site below influence."""
    others = sums["below"][..., 1:].sum((0, 2))
    targets = sums["targets"].sum(0)
    marked: Bools = others > ROUNDING * targets
    return marked


def statistics_of(sums: Mapping[str, Floats], mixing: Bools) -> Estimates:
    """Return the statistics of sums over some batches.

    Those in `LOGARITHMIC` are logarithms.
    """
    targets = sums["targets"]
    below, first, own = sums["below"], sums["first"], sums["own"]
    last = len(targets) - 1
    depths = np.arange(1, last + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_site = below / targets[:, None]
        decay_below = below[mixing].sum(0) / targets[mixing].sum()
        decay_first = first[last] / targets[last]
        column = own.sum(1)[1:] / depths
        mean_distance = _mean_distance(below)
        mean_distance[~mixing] = np.nan
        statistics = {
            "decay_below": np.log(decay_below),
            "decay_first": np.log(decay_first),
            "own_below": by_site[:, 0],
            "own_mean": decay_below[0],
            "own_first": decay_first[0],
            "own_column": column.sum() / targets[1:].sum(),
            "own_by_depth": _by_depth(own, targets),
            "opening": sums["opening"][mixing].sum() / targets[mixing].sum(),
            "reach": np.log(sums["reach"] / targets[last]),
            "mean_distance": mean_distance,
            "locality_trend": _slope(mean_distance),
        }
    for end, decay in (("below", decay_below), ("first", decay_first)):
        law = fit_law(decay)
        statistics[f"exponent_{end}"] = np.array(law.exponent)
        statistics[f"rate_{end}"] = np.array(law.rate)
        statistics[f"advantage_{end}"] = np.array(law.advantage)
    return {name: np.asarray(value) for name, value in statistics.items()}


LOGARITHMIC = ("decay_below", "decay_first", "reach")
SHARES = ("own_below", "own_mean", "own_first", "own_column", "own_by_depth", "opening")


def fit_law(decay: Floats) -> Law:
    """Fit both laws to the shares at the distances 0, 1, 2, ...

    >>> law = fit_law(np.array([1, *np.arange(1, 30) ** -1.5]))
    >>> round(law.exponent, 6), law.advantage > 0
    (1.5, True)
    """
    shares = decay[1:]
    distances = np.arange(1.0, len(decay))
    if len(shares) < 3 or not (shares > 0).all():
        return Law(np.nan, np.nan, np.nan)
    logarithms = np.log(shares)
    # The distances of every octave weigh as much as those of the next.
    weights = 1 / distances
    power, power_error = _line(np.log(distances), logarithms, weights)
    exponential, exponential_error = _line(distances, logarithms, weights)
    mean = np.average(logarithms, weights=weights)
    variance = np.average((logarithms - mean) ** 2, weights=weights)
    if not variance > 0:
        return Law(-power, -exponential, 0.0)
    return Law(-power, -exponential, (exponential_error - power_error) / variance)


def _line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """Return the slope of a weighted line, and its mean squared error."""
    across = x - np.average(x, weights=weights)
    up = y - np.average(y, weights=weights)
    slope = float((weights * across * up).sum() / (weights * across**2).sum())
    residuals = up - slope * across
    return slope, float(np.average(residuals**2, weights=weights))


def _mean_distance(below: Floats) -> Floats:
    """Return the mean distance of other tokens' influence, [site]."""
    others = below[:, 1:]
    distances = np.arange(1, below.shape[1])
    mean: Floats = (others * distances).sum(1) / others.sum(1)
    return mean


def _slope(values: Floats) -> float:
    """Return how much the values [site] rise from the first site to the last."""
    depths = np.linspace(0, 1, len(values))
    known = np.isfinite(values)
    if known.sum() < 2:
        return np.nan
    x = depths[known] - depths[known].mean()
    return float((x * values[known]).sum() / (x**2).sum())


def _by_depth(own: Floats, targets: Floats) -> Floats:
    """Return the share of the same token by how many sites below the source is.

    The array begins with depth 1.
    """
    shares = []
    for depth in range(1, len(targets)):
        sources = np.diagonal(own, -depth)
        shares.append(sources.sum() / targets[depth:].sum())
    return np.array(shares)


def _jackknife(
    sums: Estimates, statistics: Callable[[Estimates], Estimates]
) -> tuple[dict[str, Estimate], float]:
    """Return statistics of sums [batch, ...] with their 95% intervals."""
    from scipy.stats import t

    sizes = sums["targets"].sum(1)
    batches = len(sizes)
    total = {name: array.sum(0) for name, array in sums.items()}
    whole = statistics(total)
    without: dict[str, list[Floats]] = {name: [] for name in whole}
    for batch in range(batches):
        rest = {name: total[name] - array[batch] for name, array in sums.items()}
        for name, value in statistics(rest).items():
            without[name].append(value)
    # Batches of unequal size count for fewer (Kish 1965).
    count = float(sizes.sum() ** 2 / (sizes**2).sum())
    reach = float(t.ppf((1 + LEVEL) / 2, max(1.0, count - 1)))
    estimates = {}
    for name, value in whole.items():
        with np.errstate(invalid="ignore"):
            variance = np.var(np.array(without[name]), axis=0)
            half = reach * np.sqrt((batches - 1) * variance)
            estimates[name] = _interval(name.removeprefix("random_"), value, half)
    return estimates, count


def _interval(name: str, value: Floats, half: Floats) -> Estimate:
    """Return an interval on the scale of the statistic; shares stay within 0 and 1."""
    low, high = value - half, value + half
    if name in LOGARITHMIC:
        return Estimate(np.exp(value), np.exp(low), np.exp(high))
    if name in SHARES:
        return Estimate(value, np.clip(low, 0, 1), np.clip(high, 0, 1))
    return Estimate(value, low, high)
