"""States that are read in blocks, as those on disk are."""

import weakref
from collections.abc import Iterator

import torch

import hiddenscope as hs
from hiddenscope.sites import Site


class Blocks:
    """States that can be read in blocks and in no other way.

    It counts how many rows were asked for, and how many were alive at once.
    """

    def __init__(self, states: hs.States, rows: int) -> None:
        self.sites, self.tokens = states.sites, states.tokens
        self.states, self.rows = states, rows
        self.alive = self.most = self.asked = 0

    def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
        for block in self.states.blocks(site, self.rows):
            fresh = block.clone()
            self.asked += len(fresh)
            self.alive += len(fresh)
            self.most = max(self.most, self.alive)
            weakref.finalize(fresh, self._gone, len(fresh))
            yield fresh
            del fresh

    def _gone(self, rows: int) -> None:
        self.alive -= rows
