"""The hashes of a model's adapters and of the base below them, for its source."""

from __future__ import annotations

from torch import nn

from hiddenscope.modules.adapters import (
    adapter_weights,
    adapters_on,
    below_adapters,
    has_adapters,
)
from hiddenscope.modules.weights import hash_weights, weight_tensors
from hiddenscope.states import AdapterSource


class AdapterProvenance:
    """Which adapters a module has now, with hashes that are computed once.

    The base of a model with adapters has the hash that it would have by itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._weights = ""
        self._base_hash = ""
        self._adapter_hashes: dict[str, str] = {}

    def sources(self, weights: str) -> tuple[str, tuple[AdapterSource, ...]]:
        """Return the hash of the base and the source of each adapter.

        `weights` is the hash of everything: while it stays, the others do.
        """
        if not has_adapters(self.module):
            return "", ()
        adapters = adapters_on(self.module)
        names = {adapter.name for adapter in adapters}
        if weights != self._weights or not names <= self._adapter_hashes.keys():
            self._hash(names)
            self._weights = weights
        sources = []
        for name, kind, strength in adapters:
            sources.append(
                AdapterSource(name, kind, self._adapter_hashes[name], strength)
            )
        return self._base_hash, tuple(sources)

    def _hash(self, names: set[str]) -> None:
        below = below_adapters(self.module)
        self._base_hash = hash_weights(list(weight_tensors(below)))
        self._adapter_hashes = {}
        for name in names:
            of_adapter = adapter_weights(self.module, name)
            self._adapter_hashes[name] = hash_weights(of_adapter)
