"""The folders of tiny models, for every test of the room."""

from tests.folders import llama, no_network, own_cache, saved_bert, saved_llama

__all__ = ["llama", "no_network", "own_cache", "saved_bert", "saved_llama"]
