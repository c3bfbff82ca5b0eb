"""Features: intervals of what a dictionary leaves of states beside other ways, of the
loss that it recovers, and of how well one number tells labels apart.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.measures.grouped import estimate
from hiddenscope.results.report import Estimate
from hiddenscope.states.arrays import Floats, Ints
from labs.calibrate.graft import TEXT_DESIGNS
from labs.calibrate.trials import Claim, Experiment, Study, each

# What three ways leave of the variance, and recover of the loss, in truth.
LEFT, RECOVERED = (0.3, 0.3, 0.5), (0.9, 0.9, 0.7)
# The deviation of logarithms, of which half is the group's.
SPREAD = 0.5
LENGTHS = 5, 60
WIDTH, TOKENS = 12, 5
# How far apart labels lie along one direction, in deviations of a token.
APART = 0.5
# Texts that estimate how well a selected number does on others.
FRESH = 4_000


class Shares(NamedTuple):
    """How often intervals hold the truth, and alike ways are told apart."""

    left: float
    gap: float
    alike: float
    recovered: float


def trial(seed: int, sizes: Sequence[int]) -> Shares:
    """Ratios of sums over texts of unequal lengths: what three ways leave of a variance
    that differs between texts, and recover of a loss.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    lengths = random.integers(*LENGTHS, len(groups))[:, None].astype(float)
    spread = lengths * _lognormal(random, groups, 1)
    left = np.array(LEFT) * spread * _lognormal(random, groups, 3)
    shares = estimate(left, groups, spread)
    gaps = estimate(left[:, :1] - left[:, 1:], groups, spread)
    harm = _lognormal(random, groups, 1)
    recovered = harm * np.array(RECOVERED) + 0.2 * (_lognormal(random, groups, 3) - 1)
    losses = estimate(recovered, groups, harm)
    return Shares(
        _hold(shares, LEFT),
        _hold(gaps, [LEFT[0] - way for way in LEFT[1:]]),
        float(bool(gaps[0].side)),
        _hold(losses, RECOVERED),
    )


def _lognormal(random: np.random.Generator, groups: Ints, columns: int) -> Floats:
    """Draw numbers `[text, column]` with mean 1, half of whose variance is the group's."""
    together = random.normal(size=(groups.max() + 1, columns))[groups]
    alone = random.normal(size=(len(groups), columns))
    numbers: Floats = SPREAD * (together + alone) / 2**0.5
    return np.exp(numbers - SPREAD**2 / 2)


def _hold(estimates: Sequence[Estimate], truths: Sequence[float]) -> float:
    """Tell whether all intervals hold their truths."""
    held = []
    for number, truth in zip(estimates, truths, strict=True):
        if number.low is None or number.high is None:
            return np.nan
        held.append(number.low <= truth <= number.high)
    return float(all(held))


class Detected(NamedTuple):
    """How often the intervals of all AUROCs hold the truth, and any leaves out 0.5."""

    auroc: float
    chance: float


def labels_trial(seed: int, sizes: Sequence[int], apart: float) -> Detected:
    """Labels that lie apart along one direction, or nowhere; the texts of a group have
    a part in common.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    # Both labels are in groups of several texts, as in pairs.
    labels = np.arange(len(groups)) % 2
    states = _states(random, groups, labels, apart)
    basis = hs.Dictionary.of(torch.eye(WIDTH), "layer.1")
    data = hs.texts.Labelled(
        tuple(states.tokens.texts or ()), tuple(labels.tolist()), "drawn", tuple(groups)
    )
    facts = hs.features(states, dictionary=basis, data=data).facts
    scores = next(c["scores"] for c in facts["comparisons"] if c["measure"] == "auroc")
    chance = float(any(not score["low"] <= 0.5 <= score["high"] for score in scores))
    if not apart:
        return Detected(1 - chance, chance)
    # The basis is known: only its numbers have a truth that is known without a fit.
    (score,) = (score for score in scores if score["way"] == "the dictionary")
    truth = 0.5
    if score["number"] == 0:
        fresh = np.arange(FRESH)
        drawn = _states(random, fresh, fresh % 2, apart)
        means = drawn["layer.1"].reshape(FRESH, TOKENS, WIDTH)[:, 1:, 0].mean(1).numpy()
        above = means[1::2][:, None] > means[::2]
        truth = float(above.mean())
    return Detected(float(score["low"] <= truth <= score["high"]), np.nan)


def _states(
    random: np.random.Generator, groups: Ints, labels: Ints, apart: float
) -> hs.States:
    text = np.repeat(np.arange(len(groups)), TOKENS)
    values = random.normal(size=(len(text), WIDTH))
    values += random.normal(size=(groups.max() + 1, WIDTH))[groups][text]
    values[:, 0] += apart * labels[text]
    tokens = hs.Tokens(
        [f"text {number}" for number in range(len(groups))],
        text,
        np.tile(np.arange(TOKENS), len(groups)),
        np.arange(len(text)),
        ["t"] * len(text),
    )
    rows = torch.from_numpy(values)[None].float()
    return hs.States((hs.Site(1),), rows, tokens, hs.Source("drawn"))


def sum_up(records: Sequence[Any]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    fields = records[0]._fields
    return {key: [getattr(record, key) for record in records] for key in fields}


LABEL_DESIGNS = {
    "40 texts": (1,) * 40,
    "200 texts": (1,) * 200,
    "40 pairs": (2,) * 40,
    "6 pairs": (2,) * 6,
    "10 groups of 4 paraphrases": (4,) * 10,
    "30 groups of 1 to 10 texts": tuple(max(1, 10 // rank) for rank in range(1, 31)),
}
STUDY = Study(
    "features",
    "What three ways leave of a variance, and recover of a loss: lognormal over texts of"
    f" {LENGTHS[0]} to {LENGTHS[1]} tokens,\nwith half of the variance of the logarithm"
    " from the group; the first two are alike. Then labels that lie apart\nalong one of"
    f" {WIDTH} directions or nowhere, with states that a group has in common.",
    {
        "left": Claim("the intervals of what all ways leave hold it", 0.93),
        "gap": Claim("the intervals of both gaps hold them", 0.93),
        "alike": Claim("ways that are alike are told apart", high=0.05),
        "recovered": Claim("the intervals of what all ways recover hold it", 0.93),
        "auroc": Claim("the intervals of the AUROC hold it", 0.93),
        "chance": Claim("an AUROC of noise is said to be off 0.5", high=0.05),
    },
    [
        Experiment(what, each(partial(trial, sizes=sizes)), sum_up)
        for what, sizes in TEXT_DESIGNS.items()
    ]
    + [
        Experiment(
            f"{word} labels, {what}",
            each(partial(labels_trial, sizes=sizes, apart=apart)),
            sum_up,
        )
        for what, sizes in LABEL_DESIGNS.items()
        for word, apart in (("noise", 0.0), ("planted", APART))
    ],
)
