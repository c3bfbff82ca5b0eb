"""Examples: intervals of how much more often a kind of token is strong, and whether
noise is said to prefer a kind.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from hiddenscope.analyses.examples.kinds import tested_kinds
from labs.calibrate.trials import Claim, Experiment, Study, each

TOKENS, KINDS, PLANTED = 30, 12, 3
NAN = float("nan")


def trial(
    seed: int, groups: Sequence[int], rate: float, alike: float, planted: float
) -> tuple[float, float, float]:
    """Draw strong tokens, and test kinds: does the interval hold the planted
    difference, is any other kind said to be preferred, is the planted one?

    Tokens of one group are alike: their rate of strong tokens is drawn for the group.
    """
    generator = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(groups)), np.array(groups) * TOKENS)
    ids = generator.zipf(1.5, len(group)) % KINDS
    chance = np.full(len(groups), rate)
    if alike:
        spread = (1 - alike) / alike
        chance = generator.beta(rate * spread, (1 - rate) * spread, len(groups))
    hits = generator.random(len(group)) < chance[group]
    hits |= (ids == PLANTED) & (generator.random(len(group)) < planted)
    kinds = {kind.id: kind for kind in tested_kinds(hits, ids, group, 1)}
    found = kinds.pop(PLANTED, None)
    # What is planted is added to what is strong by chance.
    truth = planted * (1 - rate)
    held = NAN if found is None else float(found.low <= truth <= found.high)
    false = float(any(kind.low > 0 for kind in kinds.values()))
    preferred = float(found is not None and found.low > 0)
    if planted:
        return held, false, preferred
    return held, max(false, preferred), NAN


def sum_up(
    records: Sequence[tuple[float, float, float]],
) -> Mapping[str, Sequence[float]]:
    columns = zip(*records, strict=True)
    return dict(zip(("held", "false", "power"), columns, strict=True))


UNEQUAL = tuple(max(1, 20 // rank) for rank in range(1, 41))
DESIGNS = {
    "40 texts": (1,) * 40,
    "200 texts": (1,) * 200,
    "20 groups of 4 texts": (4,) * 20,
    "40 groups of 1 to 20 texts": UNEQUAL,
    "12 texts": (1,) * 12,
    "6 groups of 4 texts": (4,) * 6,
    "40 pairs of texts": (2,) * 40,
}
EFFECTS = {
    "noise, 5% strong": (0.05, 0.0, 0.0),
    "noise, 5% strong, alike in a group": (0.05, 0.2, 0.0),
    "noise, 1% strong": (0.01, 0.1, 0.0),
    "planted 20%": (0.05, 0.0, 0.2),
    "planted 60%, alike in a group": (0.05, 0.2, 0.6),
}


def _experiments() -> list[Experiment]:
    experiments = []
    for effect, (rate, alike, planted) in EFFECTS.items():
        for design, groups in DESIGNS.items():
            run = partial(trial, groups=groups, rate=rate, alike=alike, planted=planted)
            experiments.append(Experiment(f"{effect}, {design}", each(run), sum_up))
    return experiments


STUDY = Study(
    "examples",
    f"Texts of {TOKENS} tokens of {KINDS} kinds; tokens are strong at random, with a rate"
    " that differs between groups or not, and of one kind\nmore often.",
    {
        "held": Claim("the 95% interval holds the planted difference", 0.93),
        "false": Claim(
            "a kind that is like the others is said to be preferred", high=0.05
        ),
        "power": Claim("the planted kind is said to be preferred"),
    },
    _experiments(),
)
