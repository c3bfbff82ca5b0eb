"""Seeds: the vectors of targets, in batches that go through a model together."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.passes.jacobian import Tape
from hiddenscope.sites import Site


class Seed(NamedTuple):
    """The vectors [vector, width] of one target, and where in a text they start."""

    target: int
    site: Site
    token: int
    vectors: Tensor


class SeedBatch:
    """Vectors that go through the model together, with the target of each."""

    def __init__(self, run: Tape) -> None:
        self._run = run
        self._parts: dict[Site, list[Tensor]] = {}
        self._targets: list[int] = []

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def vectors(self) -> dict[Site, Tensor]:
        """Return the vectors [vector, token, width] of each site."""
        return {site: torch.cat(parts) for site, parts in self._parts.items()}

    @property
    def targets(self) -> Tensor:
        """Return the target of each vector."""
        return torch.tensor(self._targets)

    def add(self, seed: Seed) -> None:
        """Add the vectors of one target; targets come from the top down."""
        states = self._run.values(seed.site)
        count = len(seed.vectors)
        part = states.new_zeros((count, *states.shape))
        part[:, seed.token] = seed.vectors
        parts = self._parts.setdefault(seed.site, [])
        parts.append(part)
        self._targets += [seed.target] * count


def batched(run: Tape, seeds: Iterable[Seed], most: int) -> Iterator[SeedBatch]:
    """Yield batches of at most `most` vectors; a target with more is split."""
    batch = SeedBatch(run)
    for seed in seeds:
        for vectors in torch.split(seed.vectors, most):
            is_full = len(batch) + len(vectors) > most
            if len(batch) and is_full:
                yield batch
                batch = SeedBatch(run)
            part = seed._replace(vectors=vectors)
            batch.add(part)
    yield batch
