"""Reads: which tokens one token reads in each layer, for the grid of the page."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import SiteError
from hiddenscope.results import Result
from hiddenscope.results.dataset import Coordinates, Variables, to_dataset
from hiddenscope.results.sentences import model_name, quoted_token

if TYPE_CHECKING:
    import xarray


def reads_of(result: Result, token: int) -> Result:
    """Return what a token reads in each layer, from a result of `hs.attention`.

    A cell has the largest weight that any head puts on a token, and the mean over
    heads; both also value-weighted.
    """
    data = result.data
    queries = data["query_position"].to_numpy().tolist()
    if token not in queries:
        raise SiteError(
            f"No attention of token {token}",
            f"the result has the tokens {queries[0]} to {queries[-1]}",
            "Choose one of these.",
        )
    row = data.isel(query=queries.index(token))
    cells = ("site", "token")
    variables: Variables = {}
    kinds = {"pattern": ("weight", ""), "weighted": ("value-weighted weight", "L2")}
    for name, (words, unit) in kinds.items():
        weights = row[name].transpose("layer", "head", "key").to_numpy()
        # Unlike nanmax, fmax gives no warning where a layer has no head at all.
        variables[f"largest_{name}"] = (
            cells,
            np.fmax.reduce(weights, axis=1),
            {"long_name": f"largest {words} of any head", "units": unit},
        )
        variables[f"mean_{name}"] = (
            cells,
            _mean_over_heads(weights),
            {"long_name": f"mean {words} of all heads", "units": unit},
        )
    coords: Coordinates = {
        "site": [_layer_of(site) for site in data["site"].to_numpy().tolist()],
        "string": ("token", data["key_string"].to_numpy()),
        "position": ("token", data["key_position"].to_numpy()),
    }
    return Result("reads", to_dataset(variables, coords), {}, result.source)


def title_of_reads(result: Result, token: int) -> str:
    """Return the title of the grid: which token reads, and in which model."""
    data: xarray.Dataset = result.data
    queries = data["query_position"].to_numpy().tolist()
    string = str(data["query_string"].to_numpy()[queries.index(token)])
    return (
        f"What {quoted_token(string)}, token {token}, reads in each layer of"
        f" {model_name(result)}"
    )


def _mean_over_heads(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Average over the heads that a layer has."""
    exists = ~np.isnan(weights)
    counts = np.maximum(exists.sum(axis=1), 1)
    sums = np.where(exists, weights, 0).sum(axis=1)
    means: NDArray[np.float32] = (sums / counts).astype(np.float32)
    means[~exists.any(axis=1)] = np.nan
    return means


def _layer_of(site: str) -> str:
    """Return the layer that a block makes, which is a row of the page's grid.

    >>> _layer_of("layer.3.attn"), _layer_of("decoder.layer.3.cross")
    ('layer.3', 'decoder.layer.3')
    """
    return site.rpartition(".")[0]
