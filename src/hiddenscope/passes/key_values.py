"""Key-value caches of Hugging Face: whether one can be reused, and its first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor

# The cache layers that hold every token's keys and values and nothing else.
PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def why_not_reusable(cache: Any, blocks: int, tokens: int) -> str:
    """Say why a pass's cache cannot be reused; empty if it holds all its tokens."""
    if cache is None:
        return "it gave no keys and values"
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or len(layers) != blocks:
        kind = type(cache).__name__
        return (
            f"its cache ({kind}) does not hold keys and values for each of its"
            f" {blocks} blocks"
        )
    for layer in layers:
        kind = type(layer).__name__
        if kind not in PLAIN_LAYERS:
            return f"its cache holds a {kind}, which is more than keys and values"
        keys = layer.keys
        if not isinstance(keys, Tensor) or keys.ndim != 4 or keys.shape[2] != tokens:
            return (
                "its cache does not hold every token: its attention looks back only"
                " so far"
            )
    return ""


def first_tokens(
    cache: Any, row: int, tokens: int, rows: Sequence[int], source: int
) -> Any:
    """Return the first tokens of one row of a cache, repeated for a batch.

    `rows` is the batch size in each block. `source` is the length of the encoder's
    text, where there is one: every variant shares its keys and values. The cache itself
    is not changed.
    """
    if not hasattr(cache, "self_attention_cache"):
        return _cut_cache(cache, row, tokens, rows)
    new = copy(cache)
    new.self_attention_cache = _cut_cache(cache.self_attention_cache, row, tokens, rows)
    new.cross_attention_cache = _cut_cache(
        cache.cross_attention_cache, row, source, rows
    )
    new.is_updated = dict(cache.is_updated)
    return new


def _cut_cache(cache: Any, row: int, tokens: int, rows: Sequence[int]) -> Any:
    new = copy(cache)
    new.layers = []
    for layer, batch in zip(cache.layers, rows, strict=True):
        cut = copy(layer)
        cut.keys = layer.keys[row : row + 1, :, :tokens].expand(batch, -1, -1, -1)
        cut.values = layer.values[row : row + 1, :, :tokens].expand(batch, -1, -1, -1)
        # Layers with a sliding window count their tokens by themselves.
        if hasattr(layer, "cumulative_length"):
            cut.cumulative_length = tokens
        new.layers.append(cut)
    return new
