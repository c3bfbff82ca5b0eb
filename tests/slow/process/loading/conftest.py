"""The folders of tiny models, for processes that load them."""

from tests.folders import llama, no_network, own_cache, saved_llama

__all__ = ["llama", "no_network", "own_cache", "saved_llama"]
