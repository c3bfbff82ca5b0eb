"""The folders of tiny models, for processes that load them."""

from tests.folders import own_cache, saved_llama

__all__ = ["own_cache", "saved_llama"]
