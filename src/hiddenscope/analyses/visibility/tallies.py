"""Sums over the drawn states of many texts.

Groups of texts are dealt to at most `BATCHES` batches, and sums are kept for each
batch: memory does not grow with the number of texts. Intervals come from how much the
batches differ. They have nothing to do with the batches that a model computes at once.

Influence is summed as a share: what a source has of the influence of all tokens of its
site on the target. Texts and layers whose influences differ in size then count the
same.
"""

from typing import TypeAlias

import numpy as np

from hiddenscope.analyses.visibility.sampling import (
    DistanceWindow,
    DrawnTarget,
    deepest_of,
)
from hiddenscope.states.arrays import Floats

BATCHES = 64
NamedSums: TypeAlias = dict[str, Floats]


class Tallies:
    """Sums of shares over the targets of each batch of texts.

    targets  [batch, site]               how many targets
    below    [batch, site, distance]     shares of the site below
    first    [batch, site, distance]     shares of the first site
    own      [batch, site, source site]  shares of the same token
    opening  [batch, site]               shares of the first token, site below
    reach    [batch, source site]        of the last site's targets: the share of each
                                         site in all influence
    deep     [batch]                     how many targets have a source at every depth
    depths   [batch, depth]              of these: the share of each site in the
                                         influence of the nearest sites
    """

    def __init__(self, batches: int, sites: int, window: DistanceWindow) -> None:
        self.window = window
        self.deepest = deepest_of(sites)
        distances = window.farthest + 1
        shapes: dict[str, tuple[int, ...]] = {
            "targets": (sites,),
            "below": (sites, distances),
            "first": (sites, distances),
            "own": (sites, sites),
            "opening": (sites,),
            "reach": (sites,),
            "deep": (),
            "depths": (self.deepest,),
        }
        self.sums: NamedSums = {}
        for name, shape in shapes.items():
            self.sums[name] = np.zeros((batches, *shape))

    def add(self, batch: int, target: DrawnTarget, influence: Floats) -> None:
        """Add the influence [source site, token] on one target."""
        row, token = target
        lower = influence[:row]
        totals = lower.sum(1)
        shares = np.zeros_like(lower)
        # A site that does not influence the target has no shares.
        known = totals > 0
        shares[known] = lower[known] / totals[known, None]
        self.sums["targets"][batch, row] += 1
        self.sums["below"][batch, row] += self._by_distance(shares[-1], token)
        self.sums["first"][batch, row] += self._by_distance(shares[0], token)
        self.sums["own"][batch, row, :row] += shares[:, token]
        self.sums["opening"][batch, row] += shares[-1, 0]
        self._add_sites(batch, row, totals, is_last=row == len(influence) - 1)

    def _add_sites(
        self, batch: int, row: int, totals: Floats, *, is_last: bool
    ) -> None:
        """Add the share of each lower site in all influence on a target."""
        if is_last and totals.sum() > 0:
            self.sums["reach"][batch, :row] += totals / totals.sum()
        # The same targets count at every depth, or the fall would mix with the layers.
        nearest = totals[::-1][: self.deepest]
        if row >= self.deepest and nearest.sum() > 0:
            self.sums["deep"][batch] += 1
            self.sums["depths"][batch] += nearest / nearest.sum()

    def _by_distance(self, shares: Floats, token: int) -> Floats:
        """Return the shares [token] by their distance from the target."""
        farthest = self.window.farthest
        before = shares[token - farthest : token + 1][::-1]
        if self.window.causal:
            return before
        # An encoder looks both ways.
        after = shares[token : token + farthest + 1]
        both: Floats = (before + after) / 2
        return both
