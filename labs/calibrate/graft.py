"""Graft: the test of a difference between windows, and the interval of a share of right
answers, also of the lowest; of texts, the intervals of losses and of what windows change
in them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hiddenscope.analyses.graft.compute import by_third, sign_flip_p
from hiddenscope.analyses.graft.losses import compare_losses
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import effective_count
from hiddenscope.passes.losses import Losses
from hiddenscope.results.report import Estimate
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints
from labs.calibrate.trials import Claim, Experiment, Study, each

TESTS, SHARES, TRUE = 4, 200, (0.3, 0.95)
FOLLOWS = 0.8
WINDOWS = 12
# What windows add to the loss of texts, whose mean is this.
HARM, LOSS = 0.3, 4.0


class Shares(NamedTuple):
    """How often differences without a mean get p <= 0.05, and how often an interval
    holds the true share.
    """

    test: float
    interval: float
    lowest: float


def trial(seed: int, sizes: Sequence[int]) -> Shares:
    """Differences that are not skewed; shares alone; and the lowest of several windows
    of one true share.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    small = [
        sign_flip_p(_differences(random, groups), groups) <= 0.05 for _ in range(TESTS)
    ]
    true = random.uniform(*TRUE, SHARES)
    right = np.stack([_right(random, true, groups) for _ in range(WINDOWS)])
    held = _held(right[0], true, groups, 1), _held(right.min(0), true, groups, WINDOWS)
    return Shares(float(np.mean(small)), *held)


def _differences(random: np.random.Generator, groups: Ints) -> Floats:
    """Differences with a heavy tail and mean 0, of which those of a group have a part
    in common.
    """
    together = random.normal(size=groups.max() + 1) ** 3
    alone = random.normal(size=len(groups)) ** 3
    differences: Floats = np.where(
        random.random(len(groups)) < FOLLOWS, together[groups], alone
    )
    return differences


def _right(random: np.random.Generator, true: Floats, groups: Ints) -> Floats:
    """The shares of right answers, where most prompts of a group are right or wrong
    together.
    """
    together = random.random((SHARES, groups.max() + 1)) < true[:, None]
    alone = random.random((SHARES, len(groups))) < true[:, None]
    follows = random.random((SHARES, len(groups))) < FOLLOWS
    shares: Floats = np.where(follows, together[:, groups], alone).mean(1)
    return shares


def _held(right: Floats, true: Floats, groups: Ints, shares: int) -> float:
    """How often the interval of a share of right answers, jointly for this many, holds
    the true one.
    """
    ends = [wilson(float(share), effective_count(groups), shares) for share in right]
    return float(
        np.mean(
            [
                low <= share <= high
                for (low, high), share in zip(ends, true, strict=True)
            ]
        )
    )


def sum_up(records: Sequence[Shares]) -> Mapping[str, Sequence[float]]:
    return {key: [getattr(record, key) for record in records] for key in Shares._fields}


class TextShares(NamedTuple):
    """How often noise is called a change, and how often intervals hold the truth."""

    changed: float
    apart: float
    loss: float
    changes: float
    difference: float


def texts_trial(seed: int, sizes: Sequence[int]) -> TextShares:
    """Windows that change nothing on average, and windows that all do the same harm:
    lognormal, so that a few texts decide.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    loss = LOSS * _lognormal(random, groups, 1)[0]
    noise = np.cbrt(_lognormal(random, groups, WINDOWS) - 1) * loss / 20
    signs = random.choice((-1.0, 1.0), noise.shape)
    alike = compare_losses(*_scored(loss, signs * noise, groups))[0]
    harms = HARM * _lognormal(random, groups, WINDOWS)
    harmed, data = compare_losses(*_scored(loss, harms, groups))
    assert alike.late_less_middle is not None
    assert alike.early_less_middle is not None
    assert harmed.late_less_middle is not None
    low, high = (data[f"loss_change_{end}"][1] for end in ("low", "high"))
    return TextShares(
        float(bool(alike.raised or alike.lowered)),
        float(bool(alike.late_less_middle.side or alike.early_less_middle.side)),
        _holds(alike.model, LOSS),
        np.nan if np.isnan(low).all() else _all_hold(low, high, HARM),
        _holds(harmed.late_less_middle, 0.0),
    )


def _lognormal(random: np.random.Generator, groups: Ints, windows: int) -> Floats:
    """Draw numbers `[window, text]` with mean 1, of which most texts of a group have
    those of the group; half of the variance of the logarithms is the text's.
    """

    def drawn(count: int) -> Floats:
        of_text = random.normal(size=(1, count))
        numbers: Floats = (random.normal(size=(windows, count)) + of_text) / 2**0.5
        return np.exp(0.7 * numbers - 0.7**2 / 2)

    follows = random.random(len(groups)) < FOLLOWS
    together = drawn(int(groups.max()) + 1)[:, groups]
    numbers: Floats = np.where(follows, together, drawn(len(groups)))
    return numbers


def _scored(loss: Floats, changes: Floats, groups: Ints) -> tuple[Any, ...]:
    """Return what `compare_losses` takes."""
    windows = [(Site(layer),) for layer in range(1, WINDOWS + 1)]
    losses = np.concatenate([[loss, loss], loss + changes])
    scores = Losses(losses, np.ones(losses.shape))
    return windows, scores, by_third(windows, WINDOWS), groups, 100


def _all_hold(low: Floats, high: Floats, true: float) -> float:
    return float(((low <= true) & (high >= true)).all())


def _holds(estimate: Estimate, true: float) -> float:
    if estimate.low is None or estimate.high is None:
        return np.nan
    return float(estimate.low <= true <= estimate.high)


def sum_up_texts(records: Sequence[TextShares]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    return {
        key: [getattr(record, key) for record in records] for key in TextShares._fields
    }


DESIGNS = {
    **{f"{prompts} prompts": (1,) * prompts for prompts in (10, 25, 50)},
    "10 groups of 4 prompts": (4,) * 10,
    "25 groups of 4 prompts": (4,) * 25,
    "20 groups of 1 to 20 prompts": tuple(max(1, 20 // rank) for rank in range(1, 21)),
}
# What is asked of a few: three to six groups, pairs, and paraphrases.
FEW = {
    **{f"{prompts} prompts": (1,) * prompts for prompts in (3, 4, 6)},
    "6 groups of 4 prompts": (4,) * 6,
    "12 pairs of prompts": (2,) * 12,
}
TEXT_DESIGNS = {
    **{f"{texts} texts": (1,) * texts for texts in (6, 10, 25, 50, 200)},
    "6 groups of 4 texts": (4,) * 6,
    "20 pairs of texts": (2,) * 20,
    "25 groups of 4 texts": (4,) * 25,
    "20 groups of 1 to 20 texts": DESIGNS["20 groups of 1 to 20 prompts"],
}

STUDY = Study(
    "graft",
    "Differences between windows with a heavy tail and mean 0, and right answers to"
    f" {TRUE[0]:.0%} to {TRUE[1]:.0%} of the prompts. In a\ngroup,"
    f" {FOLLOWS:.0%} of the prompts are what the group is. Then losses of texts:"
    " windows that change nothing\non average, and windows that all do the same"
    " lognormal harm.",
    {
        "test": Claim("p ≤ 0.05 of a difference that is 0", 0.0, 0.05),
        "interval": Claim("the 95% interval holds the share", 0.93),
        "lowest": Claim(
            f"the interval of the lowest of {WINDOWS} windows holds its share", 0.93
        ),
        "changed": Claim("a window that changes no loss is called changed", 0.0, 0.05),
        "apart": Claim("thirds of the depth that are alike are told apart", 0.0, 0.05),
        "loss": Claim("the interval of the loss holds it", 0.93),
        "changes": Claim("the intervals of all changes of the loss hold them", 0.93),
        "difference": Claim("the interval of last less middle third holds it", 0.93),
    },
    [
        Experiment(what, each(partial(trial, sizes=sizes)), sum_up)
        for what, sizes in (DESIGNS | FEW).items()
    ]
    + [
        Experiment(what, each(partial(texts_trial, sizes=sizes)), sum_up_texts)
        for what, sizes in TEXT_DESIGNS.items()
    ],
)
