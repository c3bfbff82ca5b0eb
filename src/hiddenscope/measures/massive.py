"""Massive states: a few tokens, often the first of a text, whose states are a hundred
times as long as most.

In a sum they outweigh all others: the first principal component, the variance that is
left, the strongest tokens would all be theirs. So they are left out wherever directions
are fitted, proved, scored or looked up, and out of the means over texts, where such a
token is a sink.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# A state is massive if it is longer than this many times the median.
MASSIVE = 4.0
# The median is that of as many states of a site, the first ones.
LOOKED_AT = 4096


def length_limit(blocks: Iterable[Tensor]) -> Tensor:
    """Return the length above which states of a site are massive.

    >>> limit = length_limit([torch.ones(3, 4)])
    >>> is_massive(torch.tensor([[9.0, 0, 0, 0], [1.0, 0, 0, 0]]), limit)
    tensor([ True, False])
    """
    lengths = torch.empty(0)
    for block in blocks:
        few = block[: LOOKED_AT - len(lengths)].float().norm(dim=-1)
        lengths = torch.cat([lengths.to(few.device), few])
        if len(lengths) == LOOKED_AT:
            break
    return MASSIVE * lengths.median()


def sinks_of(states: Tensor) -> Tensor:
    """Tell of each token of a text, `[site, token, width]`, whether it is a sink.

    Its own text decides, so that a text gets the same vector among any others. Of two
    tokens the median is the shorter; a text of sinks alone has none.

    >>> sinks_of(torch.tensor([[[1.0], [90.0], [2.0]], [[1.0], [2.0], [3.0]]])).tolist()
    [[False, True, False], [False, False, False]]
    """
    lengths: Tensor = states.float().norm(dim=-1)
    return is_massive(states, MASSIVE * lengths.median(-1, keepdim=True).values)


def is_massive(states: Tensor, limit: Tensor) -> Tensor:
    """Tell of each state whether it is massive; one that is not finite never is."""
    lengths: Tensor = states.float().norm(dim=-1)
    return (lengths > limit) & lengths.isfinite()
