"""States: values `[site, token, width]` of one or many texts, one row per token, never padded.

>>> import torch
>>> from hiddenscope.sites import Site
>>> tokens = Tokens(("a b", "c"), text=[0, 0, 1], positions=[0, 1, 0], ids=[5, 6, 7], strings=("a", " b", "c"))
>>> states = States((Site(0), Site(None)), torch.zeros(2, 3, 4), tokens, Source("toy"))
>>> states["final"].shape, states.of(0).values.shape, states.pool("mean").shape
(torch.Size([3, 4]), torch.Size([2, 2, 4]), torch.Size([2, 2, 4]))
"""

from hiddenscope.states.tokens import Source, Tokens
from hiddenscope.states.values import POOLINGS, Pair, Pooling, Readable, States, join

__all__ = ["POOLINGS", "Pair", "Pooling", "Readable", "Source", "States", "Tokens", "join"]
