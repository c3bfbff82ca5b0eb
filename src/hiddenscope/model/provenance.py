"""The hashes of a model's adapters and of the base below them, for its source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from hiddenscope.modules.adapters import (
    adapter_settings,
    adapter_weights,
    adapters_on,
    below_adapters,
    has_adapters,
)
from hiddenscope.modules.weights import hash_weights, weight_tensors
from hiddenscope.states import AdapterSource


class AdapterProvenance:
    """Which adapters a module has now, with hashes of their weights computed once.

    The base of a model with adapters has the hash that it would have by itself.
    `names` are those of the folders that the adapters come from, in their order.
    """

    def __init__(self, module: nn.Module, names: Sequence[str] = ()) -> None:
        self.module = module
        self._folders = names
        self._weights = ""
        self._base_hash = ""
        self._adapter_hashes: dict[str, str] = {}

    def sources(self, weights: str) -> tuple[str, tuple[AdapterSource, ...]]:
        """Return the hash of the base and the source of each adapter.

        `weights` is the hash of everything: while it stays, the others do. What is
        below merged adapters is not known, and has no hash.
        """
        if not has_adapters(self.module):
            return "", ()
        adapters = adapters_on(self.module)
        names = {adapter.name for adapter in adapters}
        if weights != self._weights or not names <= self._adapter_hashes.keys():
            self._hash(names)
            self._weights = weights
        shown = [adapter.name for adapter in adapters]
        if len(self._folders) == len(shown):
            shown = list(self._folders)
        sources = []
        for adapter, name in zip(adapters, shown, strict=True):
            settings = adapter_settings(self.module, adapter)
            both = f"{self._adapter_hashes[adapter.name]} {settings}"
            digest = hashlib.sha256(both.encode()).hexdigest()
            sources.append(
                AdapterSource(
                    name,
                    adapter.kind,
                    f"sha256:{digest}",
                    adapter.strength,
                    adapter.is_merged,
                )
            )
        if any(adapter.is_merged for adapter in adapters):
            return "", tuple(sources)
        return self._base_hash, tuple(sources)

    def _hash(self, names: set[str]) -> None:
        below = below_adapters(self.module)
        self._base_hash = hash_weights(list(weight_tensors(below)))
        self._adapter_hashes = {}
        for name in names:
            of_adapter = adapter_weights(self.module, name)
            self._adapter_hashes[name] = hash_weights(of_adapter)
