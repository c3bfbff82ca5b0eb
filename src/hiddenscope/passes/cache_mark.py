"""Cache marks: whether a pass goes on with the texts of the pass before it.

A pass adds to the cache and leaves it to the next. Between the two, beam search puts
its rows into another order, and assisted generation cuts off tokens that it rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CacheMark:
    """What a cache held at the end of a pass: how many tokens, and one tensor of it.

    The tensor has a row for each text. It is None if the cache shows none.
    """

    length: int
    rows: Tensor | None

    @classmethod
    def of(cls, cache: Any) -> CacheMark:
        """Mark a cache as it is now."""
        return cls(cached_tokens(cache), next(_tensors(cache), None))

    def is_left(self, cache: Any) -> bool:
        """Tell whether a cache still holds what it held, in the same rows."""
        now = CacheMark.of(cache)
        if self.rows is None or now.rows is None or self.length != now.length:
            return False
        # Every change of the rows makes a new tensor.
        if self.rows is now.rows:
            return True
        return torch.equal(self.rows.cpu(), now.rows.cpu())


def cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache holds; None stands for an empty cache.

    >>> cached_tokens(None)
    0
    """
    if cache is None:
        return 0
    get_length: Any = getattr(cache, "get_seq_length", None)
    if get_length is not None:
        return int(get_length())
    # The tuples of older versions hold keys [text, head, token, width].
    keys = next(_tensors(cache), None)
    return 0 if keys is None else keys.shape[-2]


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache that have a row for each text, layer by layer."""
    # An encoder-decoder has another cache for the encoder's states.
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", cache)
    if not isinstance(layers, list | tuple):
        return
    for layer in layers:
        held = layer
        if not isinstance(layer, list | tuple):
            held = getattr(layer, "__dict__", {}).values()
        for value in held:
            if isinstance(value, Tensor) and value.ndim > 1:
                yield value
