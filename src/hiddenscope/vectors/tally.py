"""What is noticed while states are pooled: sinks, and the lengths of texts."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hiddenscope.measures.massive import MASSIVE
from hiddenscope.results.report import MostAt, Pooled
from hiddenscope.sites import Site
from hiddenscope.states import Pooling
from hiddenscope.states.arrays import Ints
from hiddenscope.states.pool import Pool
from hiddenscope.states.pooling import SINKLESS, position_of

# Lengths that account for this share of the variance rule the vectors, if at most one
# of this many permutations of them does.
RULING = 0.25
PERMUTATIONS = 199


class Tally:
    """The pools that vectors come from, which count tokens and sinks."""

    def __init__(self) -> None:
        self._pools: list[tuple[Sequence[Site], Pool]] = []

    def watch(self, pool: Pool, sites: Sequence[Site]) -> None:
        """Have a pool count sinks: among all tokens, or those that stand for a text."""
        position = position_of(pool.pooling)
        # Not where the last token stands for a text: it is hardly ever a sink, and to
        # read all tokens takes time.
        if position is None or position >= 0:
            pool.sinks = torch.zeros(len(sites), dtype=torch.long)
        self._pools.append((sites, pool))

    def report(
        self,
        sites: Sequence[Site],
        values: Tensor,
        pool: Pooling | None,
        rows: Ints | None = None,
    ) -> Pooled | None:
        """Say what rules vectors `[site, text, width]`, if anything does.

        They are those of all texts, or of those with the numbers `rows`. Tokens and
        sinks are counted over all texts.
        """
        if pool is None:
            return None
        sinks: Counter[Site] = Counter()
        counted = []
        for here, watched in self._pools:
            if sites[0] in here:
                counted += watched.lengths.tolist()
            if watched.sinks is not None:
                sinks.update(dict(zip(here, watched.sinks.tolist(), strict=True)))
        lengths = np.array(counted)
        if rows is not None and len(lengths) > len(rows):
            lengths = lengths[rows]
        massive = {}
        shares = {}
        for site, vectors in zip(sites, values, strict=True):
            norms = vectors.norm(dim=1)
            massive[site] = int((norms > MASSIVE * norms.median()).sum())
            shares[site] = _length_share(vectors, lengths)
        report = Pooled(
            texts=values.shape[1],
            tokens=sum(counted),
            kept=pool != SINKLESS,
            sinks=_most(sinks),
            massive=_most(massive),
            length_share=_most(shares),
        )
        is_ruled = report.sinks or report.massive or report.length_share
        return report if is_ruled else None


def _most(numbers: Mapping[Site, float]) -> MostAt | None:
    above = {str(site): number for site, number in numbers.items() if number}
    return MostAt(most=max(above.values()), at=[*above]) if above else None


def _length_share(vectors: Tensor, lengths: Ints) -> float:
    """Return the share of the variance along 1 / length, if that rules the vectors."""
    if len(lengths) != len(vectors) or len(np.unique(lengths)) < 2:
        return 0.0
    generator = np.random.default_rng(0)
    # The mean of n tokens with one sink, the same in all texts, moves along it by 1/n.
    inverse = 1 / lengths - (1 / lengths).mean()
    orders = [inverse, *(generator.permutation(inverse) for _ in range(PERMUTATIONS))]
    along = torch.from_numpy(np.stack(orders) / np.linalg.norm(inverse)).to(vectors)
    centred = vectors - vectors.mean(0)
    shares = (along @ centred).square().sum(1) / centred.square().sum().clamp_min(1e-30)
    is_chance = int((shares[1:] >= shares[0]).sum()) > 1
    return 0.0 if is_chance or shares[0] < RULING else float(shares[0])
