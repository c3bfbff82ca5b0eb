"""Caches: the keys and values of tokens that are the same in every row of a batch, taken from a pass that was made."""

from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor

KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer")


def unusable(cache: Any, blocks: int, tokens: int) -> str:
    """Why the keys and values of a pass over so many tokens cannot be used again; empty if they can."""
    if cache is None:
        return "it gave no keys and values"
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or len(layers) != blocks:
        return f"its cache ({type(cache).__name__}) does not keep keys and values for each of its {blocks} blocks"
    for layer in layers:
        if type(layer).__name__ not in KNOWN:
            return f"its cache keeps a {type(layer).__name__}, which is more than keys and values"
        if not isinstance(layer.keys, Tensor) or layer.keys.ndim != 4 or layer.keys.shape[2] != tokens:
            return "its cache does not keep every token: its attention looks back only so far"
    return ""


def beginning(cache: Any, text: int, tokens: int, rows: Sequence[int], source: int) -> Any:
    """The first tokens of one text of a cache, for so many rows in each block; the cache itself stays as it is.

    `source` is how many tokens the encoder's text has, where there is one: its keys and values are the same for all.
    """
    new = copy(cache)
    if hasattr(cache, "self_attention_cache"):
        new.self_attention_cache = _cut(cache.self_attention_cache, text, tokens, rows)
        new.cross_attention_cache = _cut(cache.cross_attention_cache, text, source, rows)
        new.is_updated = dict(cache.is_updated)
        return new
    return _cut(cache, text, tokens, rows)


def _cut(cache: Any, text: int, tokens: int, rows: Sequence[int]) -> Any:
    new = copy(cache)
    new.layers = [_layer(layer, text, tokens, many) for layer, many in zip(cache.layers, rows, strict=True)]
    return new


def _layer(layer: Any, text: int, tokens: int, rows: int) -> Any:
    new = copy(layer)
    new.keys, new.values = (
        side[text : text + 1, :, :tokens].expand(rows, -1, -1, -1) for side in (layer.keys, layer.values)
    )
    if hasattr(layer, "cumulative_length"):
        new.cumulative_length = tokens
    return new
