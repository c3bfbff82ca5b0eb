"""What a store of `hs.extract` should hold: the states of every text, one by one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import hiddenscope as hs
from tests.oracles import naive


def extract(
    model: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected rows of every site of a store, `[row, width]`."""
    naive.need_model(model)
    corpus, pool = asked["corpus"], asked.get("pool")
    if isinstance(corpus, str) or hasattr(corpus, "stride"):
        raise naive.Uncovered("a corpus in files or in windows")
    # Units are committed in any order: the store numbers its texts.
    texts = naive.strings(corpus)
    texts = [texts[number] for number in np.asarray(result.texts).tolist()]
    expected = {}
    for site in map(str, result.sites):
        if pool is None:
            expected[site] = naive.rows_at(model, texts, site).values
        else:
            expected[site] = naive.vectors(model, texts, site, pool)
    return expected
