"""Edges: exact path patching by plain hooks, and estimates by their own definition."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import hiddenscope as hs
from tests.oracles.plain import Plain, error_of_mean, groups_of, pairs_of
from tests.oracles.wiring import Patched, Wiring


def edges(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return the effects, and their standard error.

    Which edges were computed exactly is taken from the result: some are drawn.
    """
    data = result.data
    writers, readers = data["writer"].values.tolist(), data["reader"].values.tolist()
    wiring = Wiring(Plain(model.module), writers, readers)
    method = asked.get("method", "integrated")
    effects, exactly = [], []
    pairs = pairs_of(model, asked["contrasts"])
    for pair in pairs:
        patched = Patched(wiring, pair, asked.get("into", "corrupt"))
        exact = patched.exact()
        exactly.append(exact)
        effects.append(exact if method == "exact" else patched.estimated(method))
    computed = ~np.isnan(data["exact"].values)
    effect, exact = np.mean(effects, 0), np.mean(exactly, 0)
    if method == "exact" and asked.get("paths"):
        effect = np.where(computed, effect, np.nan)
    numbers = {"effect": effect, "exact": np.where(computed, exact, np.nan)}
    error = error_of_mean(np.array(effects), groups_of(pairs))
    return numbers if error is None else {**numbers, "effect_error": error}
