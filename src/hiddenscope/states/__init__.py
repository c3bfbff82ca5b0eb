"""States: values `[site, token, width]` of one or many texts, one row per token, never
padded.

What needs torch is imported when it is first used, so that tokens and sources can be
had without it.

>>> import torch
>>> from hiddenscope.sites import Site
>>> from hiddenscope.states import States
>>> tokens = Tokens(("a b", "c"), text=[0, 0, 1], positions=[0, 1, 0], ids=[5, 6, 7], strings=("a", " b", "c"))
>>> states = States((Site(0), Site(None)), torch.zeros(2, 3, 4), tokens, Source("toy"))
>>> states["final"].shape, states.of(0).values.shape, states.pool("mean").shape
(torch.Size([3, 4]), torch.Size([2, 2, 4]), torch.Size([2, 2, 4]))
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hiddenscope.states.tokens import Source, Tokens

if TYPE_CHECKING:
    from hiddenscope.states.values import (
        POOLINGS,
        Pair,
        Pooling,
        Readable,
        States,
        join,
        load_states,
    )

__all__ = [
    "POOLINGS",
    "Pair",
    "Pooling",
    "Readable",
    "Source",
    "States",
    "Tokens",
    "join",
    "load_states",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.values"), name)
        globals()[name] = value
        return value
