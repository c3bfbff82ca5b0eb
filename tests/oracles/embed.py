"""What `hs.embed` should return: the mean of each text's states, scaled to norm 1."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import hiddenscope as hs
from tests.oracles import naive


def embed(
    model: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected vectors."""
    naive.need_model(model)
    if model.sentences is not None:
        raise naive.Uncovered("a folder of sentence-transformers says how")
    texts, pool = asked["texts"], asked.get("pool") or "mean"
    truncate = asked.get("truncate", False)
    site = str(asked.get("site") or last_site(model, texts))
    values = naive.vectors(model, texts, site, pool, truncate)
    adjust = asked.get("adjust")
    if adjust is not None:
        if not isinstance(adjust, str):
            raise naive.Uncovered("an adjustment fitted elsewhere")
        values = values - values.mean(0)
    if adjust == "whiten":
        covariance = values.T @ values / (len(values) - 1)
        variances, axes = np.linalg.eigh(covariance)
        values = values @ axes @ np.diag(variances**-0.5) @ axes.T
    if asked.get("normalize", True):
        values = np.array([row / np.sqrt((row**2).sum()) for row in values])
    return {"": values}


def last_site(model: Any, texts: Any) -> str:
    """Return `final`, or the last layer; of two stacks the encoder's."""
    states = naive.run(model, naive.encoded(model, texts)[0])
    stack = "encoder." if "encoder.layer.0" in states else ""
    width = states[f"{stack}layer.0"].shape[1]
    # A `final` of another width is in no default (decision 17).
    if states.get(f"{stack}final", np.empty((0, 0))).shape[1] == width:
        return f"{stack}final"
    layers = [site for site in states if site.startswith(f"{stack}layer.")]
    numbers = [site.rpartition("layer.")[2] for site in layers]
    return f"{stack}layer.{max(int(n) for n in numbers if n.isdecimal())}"
