"""Decay: how influence falls with distance and depth, over the drawn states of texts.

Influence is summed as a share: what a source has of the influence of all tokens of its
site on the target. Texts and layers whose influences differ in size then count the
same.

Groups of texts are dealt to at most `BATCHES` batches, and sums are kept for each
batch: memory does not grow with the number of texts. Intervals come from how much the
batches differ. They have nothing to do with the batches that a model computes at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hiddenscope.analyses.visibility.sampling import DistanceWindow, DrawnTarget
from hiddenscope.analyses.visibility.story import (
    DECAYS,
    BoundarySide,
    Guess,
    Interval,
)
from hiddenscope.measures.grouped import (
    LOGARITHM,
    MIN_BOOTSTRAPPED,
    PLAIN,
    SHARE,
    Scale,
)
from hiddenscope.states.arrays import Bools, Floats

BATCHES = 64
LEVEL = 0.95
# An influence of others below this share of all is rounding: a norm mixes no tokens.
ROUNDING = 1e-9
# Logarithms that differ by less differ by rounding.
SAME_LOGARITHM = 1e-12
# Two numbers lie on every line.
FEWEST_SHARES = 3
# Statistics whose intervals are those of their logarithms.
LOGARITHMIC = ("decay_below", "decay_first", "decay_depth", "reach")
# Statistics that lie between 0 and 1.
SHARES = ("own_below", "own_mean", "own_first", "own_column", "own_by_depth", "opening")

NamedSums: TypeAlias = dict[str, Floats]


class Tallies:
    """Sums of shares over the targets of each batch of texts.

    targets  [batch, site]               how many targets
    below    [batch, site, distance]     shares of the site below
    first    [batch, site, distance]     shares of the first site
    own      [batch, site, source site]  shares of the same token
    opening  [batch, site]               shares of the first token, site below
    reach    [batch, source site]        of the last site's targets: the share of each
                                         site in all influence
    deep     [batch]                     how many targets have a source at every depth
    depths   [batch, depth]              of these: the share of each site in the
                                         influence of the nearest sites
    """

    def __init__(self, batches: int, sites: int, window: DistanceWindow) -> None:
        self.window = window
        # As with distances, a depth is counted only of targets that have all depths:
        # those of the upper half of the sites.
        self.deepest = max(1, (sites - 1) // 2)
        distances = window.farthest + 1
        shapes = {
            "targets": (sites,),
            "below": (sites, distances),
            "first": (sites, distances),
            "own": (sites, sites),
            "opening": (sites,),
            "reach": (sites,),
            "deep": (),
            "depths": (self.deepest,),
        }
        self.sums: NamedSums = {}
        for name, shape in shapes.items():
            self.sums[name] = np.zeros((batches, *shape))

    def add(self, batch: int, target: DrawnTarget, influence: Floats) -> None:
        """Add the influence [source site, token] on one target."""
        row, token = target
        lower = influence[:row]
        totals = lower.sum(1)
        shares = np.zeros_like(lower)
        # A site that does not influence the target has no shares.
        known = totals > 0
        shares[known] = lower[known] / totals[known, None]
        sums = self.sums
        sums["targets"][batch, row] += 1
        sums["below"][batch, row] += self._by_distance(shares[-1], token)
        sums["first"][batch, row] += self._by_distance(shares[0], token)
        sums["own"][batch, row, :row] += shares[:, token]
        sums["opening"][batch, row] += shares[-1, 0]
        is_last = row == len(influence) - 1
        if is_last and totals.sum() > 0:
            sums["reach"][batch, :row] += totals / totals.sum()
        # The same targets count at every depth, or the fall would mix with the layers.
        nearest = totals[::-1][: self.deepest]
        if row >= self.deepest and nearest.sum() > 0:
            sums["deep"][batch] += 1
            sums["depths"][batch] += nearest / nearest.sum()

    def _by_distance(self, shares: Floats, token: int) -> Floats:
        """Return the shares [token] by their distance from the target."""
        farthest = self.window.farthest
        before = shares[token - farthest : token + 1][::-1]
        if self.window.causal:
            return before
        # An encoder looks both ways.
        after = shares[token : token + farthest + 1]
        return (before + after) / 2


class Estimate(NamedTuple):
    """Estimated numbers with the ends of their 95% intervals."""

    value: Floats
    low: Floats
    high: Floats

    @property
    def interval(self) -> Interval:
        """Return one number with its ends; None where there is none."""
        numbers = {}
        for name, number in self._asdict().items():
            numbers[name] = float(number) if np.isfinite(number) else None
        return Interval(**numbers)

    def widened(self, low: Floats, high: Floats) -> "Estimate":
        """Return it with an interval that reaches at least this far."""
        return Estimate(
            self.value, np.minimum(self.low, low), np.maximum(self.high, high)
        )

    def side(self, boundary: float = 0.0) -> BoundarySide:
        """Say on which side of a boundary the whole interval is."""
        if self.low > boundary:
            return "above"
        if self.high < boundary:
            return "below"
        return "undecided"

    def guess(self, boundary: float = 0.0) -> Guess:
        """Compare one number with the boundary that decides."""
        verdict = self.side(boundary)
        return Guess(**vars(self.interval), boundary=boundary, verdict=verdict)


def estimate(*tallies: Tallies) -> tuple[dict[str, Estimate], float]:
    """Return every statistic with its interval, and how many batches count.

    The statistics of a second model, with random weights, are named `random_...`, and
    `excess_...` is by how much an exponent is larger. Both see the same targets of the
    same texts, so that the difference is that of pairs.
    """
    sums = {}
    mixing = {}
    for prefix, of_model in zip(("", "random_"), tallies, strict=False):
        # The sites that other tokens of the site below influence.
        others = of_model.sums["below"][..., 1:].sum((0, 2))
        mixing[prefix] = others > ROUNDING * of_model.sums["targets"].sum(0)
        for name, array in of_model.sums.items():
            sums[f"{prefix}{name}"] = array

    def statistics(part: NamedSums) -> NamedSums:
        both = {}
        for prefix, marked in mixing.items():
            of_model = {name: part[f"{prefix}{name}"] for name in tallies[0].sums}
            for name, value in statistics_of(of_model, marked).items():
                both[f"{prefix}{name}"] = value
        if len(tallies) > 1:
            for decay in DECAYS:
                exponent = f"exponent_{decay}"
                both[f"excess_{decay}"] = both[exponent] - both[f"random_{exponent}"]
        return both

    def scale(name: str) -> Scale:
        statistic = name.removeprefix("random_")
        if statistic in LOGARITHMIC:
            return LOGARITHM
        return SHARE if statistic in SHARES else PLAIN

    return jackknife(sums, statistics, scale)


def statistics_of(sums: Mapping[str, Floats], mixing: Bools) -> NamedSums:
    """Return the statistics of sums over some batches."""
    targets, below, same_token = sums["targets"], sums["below"], sums["own"]
    sites, distances = below.shape
    # A site that no target was drawn of divides 0 by 0, and is not a number.
    with np.errstate(divide="ignore", invalid="ignore"):
        # A site that mixes no tokens, such as a final norm, says nothing of distances.
        of_mixing = targets[mixing].sum()
        decays = {
            "below": below[mixing].sum(0) / of_mixing,
            "first": sums["first"][-1] / targets[-1],
            "depth": sums["depths"] / sums["deep"],
        }
        own_by_depth = []
        for depth in range(1, sites):
            sources = np.diagonal(same_token, -depth)
            own_by_depth.append(sources.sum() / targets[depth:].sum())
        # Of each target, the mean over its lower sites.
        of_column = same_token.sum(1)[1:] / np.arange(1, sites)
        others = below[:, 1:]
        by_distance = others * np.arange(1, distances)
        mean_distance = by_distance.sum(1) / others.sum(1)
        mean_distance[~mixing] = np.nan
        # How much it rises from the first site to the last.
        trend = np.nan
        known = np.isfinite(mean_distance)
        if known.sum() > 1:
            depths = np.linspace(0, 1, sites)[known]
            trend = np.polyfit(depths, mean_distance[known], 1)[0]
        statistics: dict[str, Any] = {
            "own_below": below[:, 0] / targets,
            "own_mean": decays["below"][0],
            "own_first": decays["first"][0],
            "own_column": of_column.sum() / targets[1:].sum(),
            "own_by_depth": own_by_depth,
            "opening": sums["opening"][mixing].sum(0) / of_mixing,
            "reach": sums["reach"] / targets[-1],
            "mean_distance": mean_distance,
            "locality_trend": trend,
        }
        for decay, shares in decays.items():
            statistics[f"decay_{decay}"] = shares
            # Depths begin with 1, and distances with 0: the token itself.
            law = fit_law(shares if decay == "depth" else shares[1:])
            for name, value in law._asdict().items():
                statistics[f"{name}_{decay}"] = value
    return {name: np.asarray(value) for name, value in statistics.items()}


class Law(NamedTuple):
    """Two laws fitted to shares.

    `exponent` is that of the power law, share ~ distance ** -exponent, and `rate` that
    of the exponential, share ~ exp(-rate * distance). Both are least squares of log
    shares, where every doubling of the distance counts the same. `advantage` is how
    much larger the squared error of the exponential is, as a share of the variance, and
    `explained` is the share of the variance that the power law explains.
    """

    exponent: float
    rate: float
    advantage: float
    explained: float


def fit_law(shares: Floats) -> Law:
    """Fit both laws to the shares at the distances or depths 1, 2, 3, ...

    >>> law = fit_law(np.arange(1, 30) ** -1.5)
    >>> round(law.exponent, 6), law.advantage > 0
    (1.5, True)
    >>> fit_law(np.full(4, 0.1)).exponent
    0.0
    """
    if len(shares) < FEWEST_SHARES or not (shares > 0).all():
        return Law(*np.full(4, np.nan))
    distances = np.arange(1.0, len(shares) + 1)
    logarithms = np.log(shares)
    if np.ptp(logarithms) < SAME_LOGARITHM:
        # Equal shares leave nothing to explain, and neither law is better.
        return Law(0.0, 0.0, 0.0, np.nan)
    # The distances of every octave weigh as much as those of the next.
    weights = 1 / distances
    slope, error = _fit_line(np.log(distances), logarithms, weights)
    other_slope, other_error = _fit_line(distances, logarithms, weights)
    mean = np.average(logarithms, weights=weights)
    variance = float(np.average((logarithms - mean) ** 2, weights=weights))
    return Law(
        -slope, -other_slope, (other_error - error) / variance, 1 - error / variance
    )


def _fit_line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """Fit a line through points that count by their weights.

    It is returned as its slope and its mean squared error.
    """
    # polyfit takes weights of residuals, not of their squares.
    line, squares, *_ = np.polyfit(x, y, 1, w=np.sqrt(weights), full=True)
    return float(line[0]), float(squares.sum() / weights.sum())


def jackknife(
    sums: NamedSums,
    statistics: Callable[[NamedSums], Mapping[str, Floats]],
    scale: Callable[[str], Scale] = lambda _: PLAIN,
) -> tuple[dict[str, Estimate], float]:
    """Return statistics of sums [batch, ...] with their intervals over groups of texts.

    It is the jackknife (Tukey 1958) with Student's quantile: texts are what was
    sampled, and every statistic is computed again without each of the batches, on the
    scale that its name has. A ratio takes two sums of the batches, so that two degrees
    of freedom are gone, as in a line; with one, shares of a half were called more or
    less in 7% of samples of 5 to 12 texts. With fewer than eight batches there are no
    intervals. The second value is how many batches of equal size they are worth.

    >>> sums = {"targets": np.ones((4, 1)), "share": np.array([1.0, 2.0, 3.0, 4.0])}
    >>> estimates, batches = jackknife(sums, lambda part: {"sum": part["share"]})
    >>> float(estimates["sum"].value), float(estimates["sum"].low), batches
    (10.0, nan, 4.0)
    """
    from scipy.stats import t

    sizes = sums["targets"].sum(1)
    total = {name: array.sum(0) for name, array in sums.items()}
    left_out = []
    for batch in range(len(sizes)):
        rest = {name: total[name] - array[batch] for name, array in sums.items()}
        left_out.append(statistics(rest))
    # Batches of unequal size count for fewer (Kish 1965).
    count = float(sizes.sum() ** 2 / (sizes**2).sum())
    quantile = float(t.ppf((1 + LEVEL) / 2, max(1.0, count - 2)))
    batches = len(sizes)
    factor = (batches - 1) ** 2 / max(1, batches - 2)
    if batches < MIN_BOOTSTRAPPED:
        quantile = np.nan
    estimates = {}
    for name, value in statistics(total).items():
        there, back = scale(name)
        # A statistic that some batches are needed for has no error.
        with np.errstate(divide="ignore", invalid="ignore"):
            middle = there(value)
            variance = np.var([there(rest[name]) for rest in left_out], axis=0)
            half = quantile * np.sqrt(factor * variance)
            low, high = back(middle - half), back(middle + half)
        estimates[name] = Estimate(value, value, value).widened(low, high)
    return estimates, count
