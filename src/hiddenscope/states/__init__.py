"""States: values `[site, token, width]` of one or many texts, one row per token, never
padded.

Each name is imported when it is first used: the names of poolings are read without
numpy, tokens and sources without torch.

>>> import torch
>>> from hiddenscope.sites import Site
>>> from hiddenscope.states import Source, States, Tokens
>>> tokens = Tokens(("a b", "c"), [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", " b", "c"))
>>> states = States((Site(0), Site(None)), torch.zeros(2, 3, 4), tokens, Source("toy"))
>>> states["final"].shape, states.of(0).values.shape, states.pool("mean").shape
(torch.Size([3, 4]), torch.Size([2, 2, 4]), torch.Size([2, 2, 4]))
"""

from typing import TYPE_CHECKING

from hiddenscope.lazy import lazy_names

if TYPE_CHECKING:
    from hiddenscope.states.mixed import MixedValues, stack_sites
    from hiddenscope.states.pooling import Pooling
    from hiddenscope.states.tokens import AdapterSource, Source, Tokens
    from hiddenscope.states.values import Pair, Readable, States, join, load_states

__all__ = [
    "AdapterSource",
    "MixedValues",
    "Pair",
    "Pooling",
    "Readable",
    "Source",
    "States",
    "Tokens",
    "join",
    "load_states",
    "stack_sites",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, "pooling", "tokens", "mixed", "values")
