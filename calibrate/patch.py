"""Patch: whether the standard error of a mean effect is what it is called, where
contrasts belong together.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from scipy.stats import t

from calibrate.graft import DESIGNS, FOLLOWS
from calibrate.trials import Claim, Experiment, Study, each
from hiddenscope.measures.grouped import effective_count, standard_error

CELLS, TRUE = 100, 0.4


def trial(seed: int, sizes: Sequence[int]) -> float:
    """How often the true effect of a cell lies within the reach of its error, by
    Student's distribution.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    together, alone = (
        random.normal(TRUE, 0.3, (len(sizes), CELLS)),
        random.normal(TRUE, 0.3, (len(groups), CELLS)),
    )
    follows = random.random((len(groups), 1)) < FOLLOWS
    effects = np.where(follows, together[groups], alone)
    error = standard_error(effects, groups)
    assert error is not None
    # Where a few large groups decide, the error is known no better than by so few.
    reach = t.ppf(0.975, effective_count(groups) - 1) * error
    return float((np.abs(effects.mean(0) - TRUE) <= reach).mean())


def sum_up(records: Sequence[float]) -> Mapping[str, Sequence[float]]:
    return {"reach": records}


STUDY = Study(
    "patch",
    f"Effects of {CELLS} cells, averaged over contrasts. Contrasts are independent of"
    f" each other; in a group, {FOLLOWS:.0%}\nof them are what the group is.",
    {
        "reach": Claim(
            "the true effect is within the 95% reach of Student's t times the error",
            0.93,
        )
    },
    [
        Experiment(
            what.replace("prompts", "contrasts"),
            each(partial(trial, sizes=sizes)),
            sum_up,
        )
        for what, sizes in DESIGNS.items()
    ],
)
