"""Findings of attention: labelled arrays, and the heads that the tests found."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.analyses.attention.facts import FoundHeadFacts
from hiddenscope.analyses.attention.relations import RelationTests, weights_on_places
from hiddenscope.analyses.attention.selection import Selection
from hiddenscope.analyses.attention.weights import TextWeights
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.states import Tokens

if TYPE_CHECKING:
    import xarray

LEVEL = 0.05
CELLS = ("layer", "head", "query", "key")
ATTRIBUTES: Mapping[str, Attributes] = {
    "pattern": {"long_name": "attention weight"},
    "weighted": {"long_name": "value-weighted attention", "units": "L2"},
    "write_norm": {"long_name": "norm of what a token writes", "units": "L2"},
    "previous": {"long_name": "mean weight on the previous token"},
    "first": {"long_name": "mean weight on the first token"},
    "same": {"long_name": "mean weight on the same token"},
    "score": {"long_name": "mean weight on random tokens"},
    "null": {"long_name": "mean weight by chance"},
    "p": {"long_name": "corrected p of a score above chance"},
    "p_half": {"long_name": "corrected p of a score above a half"},
}


def attention_dataset(
    selection: Selection,
    weights: TextWeights,
    positions: Sequence[int],
    queries: Tokens,
    keys: Tokens,
    tests: RelationTests | None,
) -> "xarray.Dataset":
    """Return the weights of a text, and the tests on random tokens."""
    pattern = weights.pattern
    variables: Variables = {}
    _put(variables, "pattern", CELLS, pattern)
    weighted = pattern * weights.write_norm[:, :, None, :]
    _put(variables, "weighted", CELLS, weighted)
    _put(variables, "write_norm", ("layer", "head", "key"), weights.write_norm)
    if not selection.is_cross:
        for name, means in weights_on_places(pattern, positions).items():
            _put(variables, name, ("layer", "head"), means)
    coords: Coordinates = {
        "layer": np.array([site.layer for site in selection.sites]),
        "head": np.array(selection.heads),
        "site": ("layer", text_array(site_names(selection.sites))),
        "query_string": ("query", text_array(queries.strings)[list(positions)]),
        "query_position": ("query", np.array(positions)),
        "key_string": ("key", text_array(keys.strings)),
        "key_position": ("key", np.array(keys.positions)),
    }
    if tests is not None:
        coords["relation"] = list(tests.relations)
        for name in ("score", "null", "p", "p_half"):
            dims = ("relation", "layer", "head")
            _put(variables, name, dims, getattr(tests, name))
    return to_dataset(variables, coords)


def _put(
    variables: Variables, name: str, dims: tuple[str, ...], values: np.ndarray
) -> None:
    variables[name] = dims, values, ATTRIBUTES[name]


def found_heads(
    selection: Selection, tests: RelationTests
) -> dict[str, list[FoundHeadFacts]]:
    """Return the heads above chance for each relation, the strongest first."""
    by_relation = {}
    for number, relation in enumerate(tests.relations):
        heads: list[FoundHeadFacts] = []
        for layer, column in np.argwhere(tests.p[number] < LEVEL):
            place = number, layer, column
            site = selection.sites[layer]
            head = selection.heads[column]
            heads.append(
                {
                    "site": f"{site}.head.{head}",
                    "score": float(tests.score[place]),
                    "null": float(tests.null[place]),
                    "p": float(tests.p[place]),
                    "p_half": float(tests.p_half[place]),
                }
            )
        # The p-values of strong heads are all the smallest that there is.
        heads.sort(key=lambda head: -head["score"])
        by_relation[f"{relation}_heads"] = heads
    return by_relation
