"""Visibility: the interval of a Frobenius norm that random vectors estimate."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from calibrate.trials import Claim, Experiment, Study, each
from hiddenscope.analyses.visibility.maps import InfluenceMeasure

WIDTH, STATES = 64, 200


def trial(seed: int, probes: int, directions: int) -> float:
    """The share of states whose interval holds the norm of a Jacobian with so many
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


def sum_up(records: Sequence[float]) -> Mapping[str, Sequence[float]]:
    return {"interval": records}


STUDY = Study(
    "visibility",
    f"A Jacobian of width {WIDTH} with one, four or sixteen equal singular values, the"
    " others 0: the fewer, the more\nskewed are the lengths that the norm is estimated"
    " from.",
    {"interval": Claim("the 95% interval holds the norm", 0.93)},
    [
        Experiment(
            f"{probes} probes, {directions} directions",
            each(partial(trial, probes=probes, directions=directions)),
            sum_up,
        )
        for probes in (4, 16)
        for directions in (1, 4, 16)
    ],
)
