"""Visibility: the interval of a Frobenius norm that random vectors estimate, and the
intervals over texts of how influence falls with the distance and of how much of it goes
to later predictions.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from hiddenscope.analyses.visibility.decay import (
    BATCHES,
    Estimate,
    Tallies,
    estimate,
    statistics_of,
)
from hiddenscope.analyses.visibility.maps import InfluenceMeasure
from hiddenscope.analyses.visibility.outgoing import estimate as estimate_outgoing
from hiddenscope.analyses.visibility.outgoing import future_of
from hiddenscope.analyses.visibility.sampling import DistanceWindow, draw_targets
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints
from labs.calibrate.trials import Claim, Experiment, Study, each

WIDTH, STATES = 64, 200
# Planted texts: this many sites and tokens, and this many drawn states.
SITES, TOKENS, TARGETS = 4, 33, 4
# How many texts stand for all texts, for the true values.
ALL_TEXTS = 30_000
# Texts whose influence falls with the depth: short, with more sites.
DEEP_SITES, SHORT = 9, 8
# Texts whose states have effects on later predictions: shares by site, and how many
# tokens are drawn of each text, with how many later ones.
AHEAD_SITES, AHEAD_TOKENS, LATER = 6, 2, 8
PlantedShares: TypeAlias = Literal["falling", "equal"]
PlantedLaw: TypeAlias = Literal["power", "exponential", "none"]


def trial(seed: int, probes: int, directions: int) -> float:
    """The share of states whose interval holds the norm of a Jacobian with this many
    singular values that are 1.
    """
    measure = InfluenceMeasure("frobenius", probes, seed)
    generator = torch.Generator().manual_seed(seed)
    vectors = measure.vectors(
        torch.zeros(STATES, WIDTH, dtype=torch.float64), generator
    )
    sizes = measure.size(vectors[..., :directions].transpose(0, 1))
    norm, half = measure.values(sizes.sum(0).numpy(), sizes.square().sum(0).numpy())
    assert half is not None
    return float(np.mean(np.abs(norm - directions**0.5) <= half))


class Texts(NamedTuple):
    """How many texts, how many of them a group, and how their influence falls."""

    count: int
    of_group: int
    law: PlantedLaw


def planted_tallies(texts: Texts, seed: int) -> Tallies:
    """Tally drawn states of texts whose influence falls by a law, each text in its own
    way; half of the variance of a text is that of its group.
    """
    generator = np.random.default_rng(seed)
    groups = -(-texts.count // texts.of_group)
    window = DistanceWindow.of(TOKENS, causal=True)
    tallies = Tallies(min(BATCHES, groups), SITES, window)
    of_group = generator.standard_normal((groups, 2))
    for text in range(texts.count):
        group = text // texts.of_group
        traits = generator.standard_normal(2)
        if texts.of_group > 1:
            traits = (traits + of_group[group]) / 2**0.5
        targets = draw_targets(
            range(1, SITES), window.places(TOKENS), TARGETS, generator
        )
        for target in targets:
            influence = _influence(texts.law, traits, target, generator)
            tallies.add(group % min(BATCHES, groups), target, influence)
    return tallies


def _influence(
    law: PlantedLaw, traits: Floats, target: Any, generator: np.random.Generator
) -> Floats:
    """Draw the influence [source site, token] on one state."""
    row, token = target
    back = token - np.arange(TOKENS)
    distance = np.maximum(back, 1).astype(float)
    steepness = 1 + 0.3 * traits[0]
    if law == "power":
        fall = distance**-steepness
    elif law == "exponential":
        fall = np.exp(-0.2 * steepness * distance)
    else:
        fall = np.ones(TOKENS)
    # The own token has about as much as all others, more or less of it by text.
    seen = 0.2 * fall
    seen[token] = seen[1:token].sum() * np.exp(0.5 * traits[1])
    seen[back < 0] = 0
    noise = np.exp(0.8 * generator.standard_normal((SITES, TOKENS)))
    influence: Floats = seen * noise
    influence[row:] = 0
    return influence


@cache
def _truth(law: PlantedLaw) -> dict[str, Floats]:
    """Return every statistic of very many texts."""
    tallies = planted_tallies(Texts(ALL_TEXTS, 1, law), 10**6)
    total = {name: array.sum(0) for name, array in tallies.sums.items()}
    return statistics_of(total, total["targets"] > 0)


def _holds(estimated: Estimate, truth: Floats) -> float:
    return float(np.mean((estimated.low <= truth) & (truth <= estimated.high)))


def texts_trial(seed: int, texts: Texts) -> dict[str, float]:
    """Tell which intervals of one sample of texts hold, and what is called wrongly."""
    truth = _truth(texts.law)
    estimates, _ = estimate(planted_tallies(texts, seed))
    better = estimates["advantage_below"]
    falls = estimates["exponent_below"].low > 0
    called = {
        "power": falls and better.low > 0,
        "exponential": falls and better.high < 0,
    }
    wrong = [called[law] for law in called if law != texts.law]
    return {
        "distance": _holds(estimates["decay_below"], truth["decay_below"]),
        "exponent": _holds(estimates["exponent_below"], truth["exponent_below"]),
        "own": _holds(estimates["own_column"], truth["own_column"]),
        "trend": _holds(estimates["locality_trend"], np.zeros(())),
        "wrong": float(any(wrong)),
        "right": float(called.get(texts.law, np.nan)),
    }


def depth_tallies(texts: Texts, seed: int) -> Tallies:
    """Tally drawn states of texts whose influence falls with the depth, each text in
    its own way.
    """
    generator = np.random.default_rng(seed)
    window = DistanceWindow.of(SHORT, causal=True)
    tallies = Tallies(min(BATCHES, texts.count), DEEP_SITES, window)
    rows = range(1, DEEP_SITES)
    for text in range(texts.count):
        steepness = 1 + 0.3 * generator.standard_normal()
        for target in draw_targets(rows, window.places(SHORT), TARGETS, generator):
            depth = np.maximum(target.row - np.arange(DEEP_SITES), 1.0)
            fall = np.ones(DEEP_SITES)
            if texts.law == "power":
                fall = depth**-steepness
            elif texts.law == "exponential":
                fall = np.exp(-0.5 * steepness * depth)
            noise = np.exp(0.8 * generator.standard_normal((DEEP_SITES, SHORT)))
            influence = fall[:, None] * noise
            influence[target.row :] = 0
            tallies.add(text % min(BATCHES, texts.count), target, influence)
    return tallies


@cache
def _depth_truth(law: PlantedLaw) -> float:
    """Return the exponent by depth of very many texts."""
    tallies = depth_tallies(Texts(ALL_TEXTS, 1, law), 10**6)
    total = {name: array.sum(0) for name, array in tallies.sums.items()}
    statistics = statistics_of(total, total["targets"] > 0)
    return float(statistics["exponent_depth"])


def depth_trial(seed: int, texts: Texts) -> float:
    """Tell whether the interval of the exponent by depth holds it."""
    estimates, _ = estimate(depth_tallies(texts, seed))
    return _holds(estimates["exponent_depth"], np.array(_depth_truth(texts.law)))


class Ahead(NamedTuple):
    """Texts whose states serve later predictions, more at the first sites or alike.

    With `signed` effects some are below 0, as changes of a loss are. `apart`, what a
    state does to its own prediction says nothing of what it does to later ones.
    """

    count: int
    of_group: int
    shares: PlantedShares
    signed: bool = False
    apart: bool = False

    @property
    def planted(self) -> Floats:
        """The shares of later predictions, at each site."""
        if self.shares == "equal":
            return np.full(AHEAD_SITES, 0.5)
        return np.linspace(0.8, 0.2, AHEAD_SITES)


def ahead_effects(texts: Ahead, seed: int) -> tuple[Floats, Ints]:
    """Draw effects [state, site, distance], and the batch of each state.

    Texts differ in what they do to the own and to later predictions; half of the
    variance of a text is that of its group.
    """
    generator = np.random.default_rng(seed)
    groups = np.arange(texts.count) // texts.of_group
    traits = generator.standard_normal((texts.count, 2))
    if texts.of_group > 1:
        of_group = generator.standard_normal((groups[-1] + 1, 2))
        traits = (traits + of_group[groups]) / 2**0.5
    # Numbers around 1, skewed as norms and losses are.
    factors = np.exp(0.5 * traits - 0.125).repeat(AHEAD_TOKENS, axis=0)
    columns = 2 if texts.apart else 1
    factors = factors * generator.gamma(2.0, 0.5, (len(factors), columns))
    shares = texts.planted
    means = np.repeat(shares[:, None] / LATER, LATER + 1, axis=1)
    means[:, 0] = 1 - shares
    effects = np.broadcast_to(means, (len(factors), *means.shape)).copy()
    effects[..., 0] *= factors[:, :1]
    effects[..., 1:] *= factors[:, 1, None, None]
    effects *= generator.gamma(2.0, 0.5, effects.shape)
    if texts.signed:
        # Far more noise than effect at a single distance, as in changes of a loss.
        effects += 0.2 * generator.standard_t(4, effects.shape)
    batches = groups % min(BATCHES, groups[-1] + 1)
    return effects, batches.repeat(AHEAD_TOKENS)


@cache
def _together(shares: PlantedShares, signed: bool, apart: bool) -> float:
    """Return the mean rank correlation over very many texts."""
    if apart:
        return 0.0
    effects, batches = ahead_effects(Ahead(ALL_TEXTS, 1, shares, signed), 10**6)
    reaching = np.ones(AHEAD_SITES, dtype=bool)
    estimates, _ = estimate_outgoing(
        {"": effects}, batches % 2, reaching, signed=signed
    )
    return float(estimates["together_mean"].value)


def ahead_trial(seed: int, texts: Ahead) -> dict[str, float]:
    """Tell which intervals hold, and what is claimed of equal shares of one half."""
    effects, batches = ahead_effects(texts, seed)
    reaching = np.ones(AHEAD_SITES, dtype=bool)
    estimates, _ = estimate_outgoing(
        {"": effects}, batches, reaching, signed=texts.signed
    )
    sites = [Site(layer) for layer in range(AHEAD_SITES)]
    future = future_of(estimates, "", sites, reaching)
    assert future is not None
    shares = texts.planted
    fall = shares[:2].mean() - shares[-2:].mean()
    ahead = half = np.nan
    if texts.shares == "equal":
        ahead = future.fall.verdict != "undecided"
        half = bool(future.own_from or future.later_until)
    together = np.array(_together(texts.shares, texts.signed, texts.apart))
    related = np.nan
    if texts.apart:
        related = future.together.verdict != "undecided"
    return {
        "future": _holds(estimates["future"], shares),
        "fall": _holds(estimates["fall"], fall),
        "together": _holds(estimates["together_mean"], together),
        "ahead": float(ahead),
        "half": float(half),
        "related": float(related),
    }


def _named_ahead(texts: Ahead) -> str:
    words = f"{texts.count} texts"
    if texts.of_group > 1:
        words = f"{texts.count // texts.of_group} groups of {texts.of_group} texts"
    signed = ", with a sign" if texts.signed else ""
    apart = ", unrelated" if texts.apart else ""
    return f"{words}, {texts.shares} shares{signed}{apart}"


def sum_up_depth(records: Sequence[float]) -> Mapping[str, Sequence[float]]:
    """Name what came of all trials by its claim."""
    return {"depth": records}


def sum_up_texts(records: Sequence[dict[str, float]]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    return {key: [record[key] for record in records] for key in records[0]}


def sum_up(records: Sequence[float]) -> Mapping[str, Sequence[float]]:
    return {"interval": records}


def _named(texts: Texts) -> str:
    """Name a condition in a table."""
    law = {"power": "power law", "exponential": "exponential", "none": "no decay"}
    if texts.of_group == 1:
        return f"{texts.count} texts, {law[texts.law]}"
    groups = texts.count // texts.of_group
    return f"{groups} groups of {texts.of_group} texts, {law[texts.law]}"


PLANTED = (
    Texts(10, 1, "power"),
    Texts(20, 1, "power"),
    Texts(50, 1, "power"),
    Texts(200, 1, "power"),
    Texts(20, 1, "exponential"),
    Texts(50, 1, "exponential"),
    Texts(20, 1, "none"),
    Texts(50, 1, "none"),
    Texts(200, 1, "none"),
    Texts(80, 4, "power"),
)

DEEP = (
    Texts(20, 1, "power"),
    Texts(20, 1, "exponential"),
    Texts(20, 1, "none"),
    Texts(50, 1, "power"),
)

AHEAD = (
    Ahead(20, 1, "falling"),
    Ahead(50, 1, "falling"),
    Ahead(200, 1, "falling"),
    Ahead(200, 1, "falling", signed=True),
    Ahead(80, 4, "falling"),
    Ahead(20, 1, "equal"),
    Ahead(200, 1, "equal"),
    Ahead(200, 1, "equal", signed=True),
    Ahead(80, 4, "equal"),
    Ahead(5, 1, "equal", apart=True),
    Ahead(8, 1, "equal", apart=True),
    Ahead(12, 1, "equal", apart=True),
    Ahead(12, 1, "equal", signed=True, apart=True),
)

STUDY = Study(
    "visibility",
    f"A Jacobian of width {WIDTH} with one, four or sixteen equal singular values, the"
    " others 0: the fewer, the more skewed are\nthe lengths that the norm is estimated"
    " from. Then texts whose influence falls by a law, each in its own way and with\n"
    "noise; 4 states of each are drawn. In a group, half of the variance of a text is"
    " that of its group. Last, states\nthat serve later predictions, at the first sites"
    " more than at the last, or one half at all sites; with a sign, some effects are\n"
    "below 0.",
    {
        "interval": Claim("the 95% interval holds the norm", 0.93),
        "distance": Claim("the interval of a share at a distance holds it", 0.93),
        "exponent": Claim("the interval of the exponent by distance holds it", 0.93),
        "depth": Claim("the interval of the exponent by depth holds it", 0.93),
        "own": Claim("the interval of the own column's share holds it", 0.93),
        "trend": Claim("the interval of the trend over layers holds 0", 0.93),
        "wrong": Claim("a law that is not there is called the better one", high=0.05),
        "right": Claim("the law that is there is called so"),
        "future": Claim("the interval of a share of later predictions holds it", 0.93),
        "fall": Claim("the interval of the first less the last sites holds it", 0.93),
        "together": Claim("the interval of the rank correlation holds it", 0.93),
        "ahead": Claim("equal shares of the first and last are told apart", high=0.05),
        "half": Claim("a share of one half is called more or less", high=0.05),
        "related": Claim("unrelated effects are said to go together", high=0.05),
    },
    [
        Experiment(
            f"{probes} probes, {directions} directions",
            each(partial(trial, probes=probes, directions=directions)),
            sum_up,
        )
        for probes in (4, 16)
        for directions in (1, 4, 16)
    ]
    + [
        Experiment(_named(texts), each(partial(texts_trial, texts=texts)), sum_up_texts)
        for texts in PLANTED
    ]
    + [
        Experiment(
            f"{_named(texts)} by depth",
            each(partial(depth_trial, texts=texts)),
            sum_up_depth,
        )
        for texts in DEEP
    ]
    + [
        Experiment(
            _named_ahead(texts), each(partial(ahead_trial, texts=texts)), sum_up_texts
        )
        for texts in AHEAD
    ],
)
