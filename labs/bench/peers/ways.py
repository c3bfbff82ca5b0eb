"""Describe what a library gives to a worker: a task that is ready to run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Job = Mapping[str, Any]
Numbers = Mapping[str, Any]


def unchanged(result: Any) -> Numbers:
    """Return a result that is a mapping of arrays already."""
    numbers: Numbers = result
    return numbers


@dataclass(frozen=True)
class Way:
    """One task in one library.

    `run` is timed. `numbers` turns what it returned into named arrays, untimed.
    `times` is 12 where `run` does a twelfth of the task and the rest is more of the
    same.
    """

    run: Callable[[], Any]
    numbers: Callable[[Any], Numbers] = unchanged
    times: float = 1.0


def flat(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor or an array as one row of float64.

    Libraries differ in whether they keep the dimension of the batch; the order of the
    numbers is the same.
    """
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, dtype=np.float64).reshape(-1)
