"""Steer: the interval of the best setting's effect, and those of what settings cost."""

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np
import xarray as xr

from hiddenscope.analyses.steer.compute import perplexities, strongest_setting
from hiddenscope.analyses.steer.sweep import Measured
from hiddenscope.states.arrays import Floats, Ints
from hiddenscope.texts import belonging
from labs.calibrate.trials import Claim, Experiment, Study, each

SITES, STRENGTHS = 3, (-1.0, -0.5, 0.5, 1.0)
SETTINGS = SITES * len(STRENGTHS)
WITHIN = 0.05
MANY = 400_000


def effect_trial(seed: int, groups: int, size: int, copies: int) -> dict[str, float]:
    """Steer prompts whose effects are skewed, and alike in a group; all settings do as
    much, and the best of them is the best by choice.
    """
    random = np.random.default_rng(seed)
    drawn = np.repeat(_effects(random, groups * SETTINGS, size), copies, axis=1)
    number = np.repeat(np.arange(groups), size * copies)
    texts = []
    for group in range(groups):
        for member in range(size):
            texts += [f"{group} {member}"] * copies
    # [group, setting, prompt] as [setting, prompt of each group].
    effects = drawn.reshape(groups, SETTINGS, -1).swapaxes(0, 1).reshape(SETTINGS, -1)
    shape = SITES, len(STRENGTHS), len(texts), 1
    cells, settings = ("site", "strength", "text", "answer"), ("site", "strength")
    nothing, zeros = np.zeros(shape), np.zeros(shape[:2])
    data = xr.Dataset(
        {
            "log_odds": (cells, effects.reshape(shape)),
            "probability": (cells, nothing),
            "perplexity": (settings, zeros),
        },
        {"site": list("abc"), "strength": list(STRENGTHS), "answer": ["x"]},
    )
    for end in ("", "_low", "_high"):
        data[f"perplexity_change{end}"] = settings, zeros
    for name in ("log_odds", "probability"):
        data[f"{name}_before"] = cells[2:], nothing[0, 0]
    named = number if size > 1 else None
    together = belonging(texts, [""] * len(texts), named)
    best = strongest_setting(data, together, 0, np.zeros(len(STRENGTHS)))
    assert best is not None
    told = isinstance(best.interval, list)
    held = np.nan
    if isinstance(best.interval, list):
        held = float(best.interval[0] <= _median(size) <= best.interval[1])
    return {"median": held, "told": float(told)}


def _effects(random: np.random.Generator, groups: int, size: int) -> Floats:
    shared = random.lognormal(size=(groups, 1)) - 1
    effects: Floats = shared + 0.5 * random.normal(size=(groups, size))
    return effects


@cache
def _median(size: int) -> float:
    """Return the median of what a group comes to on average."""
    drawn = _effects(np.random.default_rng(0), MANY, size)
    return float(np.median(drawn.mean(1)))


def cost_trial(seed: int, groups: int, size: int) -> dict[str, float]:
    """Measure the losses of texts, whose rises are skewed, and alike in a group."""
    random = np.random.default_rng(seed)
    tokens, rises = _rises(random, groups, size)
    before = [random.normal(-3, 2, (count, 1)) for count in tokens]
    after = []
    for row in rises.T.reshape(SITES, len(STRENGTHS), -1):
        steered = []
        for setting in row:
            pairs = zip(before, setting, strict=True)
            steered.append([logs - rise for logs, rise in pairs])
        after.append(steered)
    number = np.repeat(np.arange(groups), size)
    costs = perplexities(Measured(before, after), number)
    low, high = costs["perplexity_change_low"], costs["perplexity_change_high"]
    true = _true_costs(size).reshape(low.shape)
    cheap = (low >= -WITHIN) & (high <= WITHIN)
    # Of few texts there is no interval that could hold anything.
    has_intervals = np.isfinite(low).all()
    holds = float(((low <= true) & (true <= high)).all())
    return {
        "costs": holds if has_intervals else np.nan,
        "cheap": float((cheap & (np.abs(true) > WITHIN)).any()),
        "known": float(cheap[np.abs(true) < WITHIN / 5].mean()),
    }


def _rises(random: np.random.Generator, groups: int, size: int) -> tuple[Ints, Floats]:
    """Draw lengths, and the rise of the mean loss of each text by setting."""
    tokens = np.repeat(random.integers(5, 30, groups), size)
    scales = np.geomspace(0.002, 0.2, SETTINGS)
    shared = np.repeat(random.lognormal(size=(groups, SETTINGS)), size, axis=0)
    own = random.lognormal(size=(groups * size, SETTINGS))
    return tokens, scales * (shared + own - 1.5)


@cache
def _true_costs(size: int) -> Floats:
    tokens, rises = _rises(np.random.default_rng(0), MANY // size, size)
    true: Floats = np.expm1(tokens @ rises / tokens.sum())
    return true


def sum_up(records: Sequence[Mapping[str, float]]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    return {key: [record[key] for record in records] for key in records[0]}


STUDY = Study(
    "steer",
    f"{SETTINGS} settings that do as much, on prompts whose effects are skewed: single"
    " ones, the same four times, or paraphrases\nwhose groups the data name. Then losses"
    " of texts that rise by 0.3 to 40%, by skewed amounts.",
    {
        "median": Claim("the interval of the best setting holds the median", 0.93),
        "told": Claim("there is an interval"),
        "costs": Claim("the intervals of what all settings cost hold it", 0.93),
        "cheap": Claim("a setting is said to cost at most 5% that costs more", 0, 0.05),
        "known": Claim("one that costs less than 1% is said to cost at most 5%"),
    },
    [
        Experiment(what, each(partial(effect_trial, **how)), sum_up)
        for what, how in (
            ("4 prompts", {"groups": 4, "size": 1, "copies": 1}),
            ("6 prompts", {"groups": 6, "size": 1, "copies": 1}),
            ("6 groups of 4 paraphrases", {"groups": 6, "size": 4, "copies": 1}),
            ("20 pairs of paraphrases", {"groups": 20, "size": 2, "copies": 1}),
            ("12 prompts", {"groups": 12, "size": 1, "copies": 1}),
            ("40 prompts", {"groups": 40, "size": 1, "copies": 1}),
            ("12 prompts, each four times", {"groups": 12, "size": 1, "copies": 4}),
            ("12 groups of 4 paraphrases", {"groups": 12, "size": 4, "copies": 1}),
            ("40 groups of 4 paraphrases", {"groups": 40, "size": 4, "copies": 1}),
        )
    ]
    + [
        Experiment(what, each(partial(cost_trial, **how)), sum_up)
        for what, how in (
            ("6 texts", {"groups": 6, "size": 1}),
            ("20 pairs of texts", {"groups": 20, "size": 2}),
            ("10 texts", {"groups": 10, "size": 1}),
            ("40 texts", {"groups": 40, "size": 1}),
            ("10 groups of 4 texts", {"groups": 10, "size": 4}),
        )
    ],
)
