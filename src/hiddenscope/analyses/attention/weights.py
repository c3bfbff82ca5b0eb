"""Weights: the attention weights of one text, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.attention.selection import Selection
from hiddenscope.errors import TooLarge
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.attention_weights import (
    WeightRows,
    WeightsReport,
    run_weights,
)
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory


@dataclass(frozen=True)
class TextWeights:
    """The weights of one text.

    `pattern` is [layer, head, query, key], `write_norm` [layer, head, key]; both are
    NaN where a layer has no such head.
    """

    pattern: NDArray[np.float32]
    write_norm: NDArray[np.float32]
    report: WeightsReport


def read_weights(
    model: Model,
    inputs: Inputs,
    selection: Selection,
    positions: Sequence[int],
    keys: int,
) -> TextWeights:
    """Run one text and return the weights at some positions."""
    sites, heads = selection.sites, selection.heads
    layers = dict(zip(sites, range(len(sites)), strict=True))
    columns = dict(zip(heads, range(len(heads)), strict=True))
    columns_of = {}
    for part in selection.attentions:
        columns_of[part.site] = [columns[head] for head in part.heads]
    rows_of = dict(zip(positions, range(len(positions)), strict=True))
    shape = (len(layers), len(columns), len(positions), keys)
    _check_memory(shape)
    # Blocks may differ in their number of heads, and then some cells stay empty.
    pattern = np.full(shape, np.nan, dtype=np.float32)
    write_norm = np.full((*shape[:2], keys), np.nan, dtype=np.float32)

    def receive(rows: WeightRows) -> None:
        # Rows come in the order in which they are asked for.
        start = rows_of[rows.positions[0]]
        end = start + len(rows.positions)
        of_sites = rows.values[:, 0].float().cpu().numpy()
        for site, values in zip(rows.sites, of_sites, strict=True):
            pattern[layers[site]][columns_of[site], start:end] = values

    report = run_weights(
        model,
        inputs,
        selection.attentions,
        receive,
        positions=positions,
        writes=True,
    )
    for site, norms in report.write_norms.items():
        values = norms.float().cpu().numpy()
        write_norm[layers[site], columns_of[site]] = values
    return TextWeights(pattern, write_norm, report)


def _check_memory(shape: tuple[int, int, int, int]) -> None:
    """Refuse weights that memory does not hold."""
    layers, heads, queries, keys = shape
    # The weights and the value-weighted ones, in float32.
    size = 2 * 4 * layers * heads * queries * keys
    free = free_memory()
    if size > SHARE_OF_FREE_MEMORY * free:
        raise TooLarge(
            f"The weights of {layers} layers, {heads} heads and {queries:,} by"
            f" {keys:,} tokens do not fit in memory",
            f"they take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "Choose some tokens that read, such as queries=-1, or some layers, such as"
            " layers=1.",
        )
