"""Feed: the states of one site in random order, pass after pass, a portion at a time.

States are read in pieces: runs of rows that follow one another, or whole texts. In each
pass the pieces are shuffled and cut into portions, and the rows of a portion are
shuffled once more. The order follows from the seed alone, so that a run can go on where
it was interrupted, and memory holds two portions however long the corpus is.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite, SiteError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site
from hiddenscope.states import States
from hiddenscope.states.arrays import Ints
from hiddenscope.states.pooling import refuse_pooled
from hiddenscope.store import Store

# Rows that are read together: fewer mix better, more are read faster.
RUN = 256
# Bytes of a portion, as states are stored.
PORTION = 2**30


@dataclass(frozen=True, eq=False)
class Feed:
    """The states of a site: how many there are in each piece, and how to read some."""

    site: str
    model: str
    width: int
    itemsize: int
    counts: Ints
    read: Callable[[Ints], Tensor]
    device: torch.device

    @property
    def rows(self) -> int:
        """Return the number of states."""
        return int(self.counts.sum())

    def sample(self, size: int, seed: int, device: str) -> Tensor:
        """Return about this many states, of pieces drawn at random."""
        order = np.random.default_rng(seed).permutation(len(self.counts))
        enough = np.searchsorted(np.cumsum(self.counts[order]), size) + 1
        states = self._portion(np.sort(order[:enough]), device)
        return states[:: max(1, len(states) // size)].float()

    def batches(
        self, size: int, seed: int, start: int, device: str
    ) -> Iterator[Tensor]:
        """Yield batches of this size without end, from number `start` on."""
        reading: Future[Tensor] | None = None
        # What the last portion leaves is the beginning of the next batch.
        begun: list[Tensor] = []
        needed = size
        with ThreadPoolExecutor(1, "states") as thread:
            for (pieces, order), (following, _) in pairwise(
                self._orders(size, seed, start * size)
            ):
                reading = reading or thread.submit(self._portion, pieces, device)
                portion = reading.result()
                # All of a small corpus is one portion, which stays.
                if not np.array_equal(pieces, following):
                    reading = thread.submit(self._portion, following, device)
                for rows in np.split(order, range(needed, len(order), size)):
                    begun.append(portion[torch.from_numpy(rows).to(device)].float())
                    needed -= len(rows)
                    if not needed:
                        yield torch.cat(begun)
                        begun, needed = [], size

    def _orders(self, size: int, seed: int, done: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield the pieces of each portion and the order of its rows, of which the
        first that were `done` are left out.
        """
        most = max(size, PORTION // (self.width * self.itemsize))
        for number in count():
            order = np.random.default_rng((seed, number)).permutation(len(self.counts))
            portions = np.array_split(order, min(len(order), -(-self.rows // most)))
            for place, pieces in enumerate(map(np.sort, portions)):
                rows = int(self.counts[pieces].sum())
                if done < rows:
                    generator = np.random.default_rng((seed, number, place))
                    yield pieces, generator.permutation(rows)[done:]
                done = max(0, done - rows)

    def _portion(self, pieces: Ints, device: str) -> Tensor:
        states = self.read(pieces).detach().to(device)
        if not states.isfinite().all():
            raise NotFinite(
                f"Cannot fit a dictionary to {self.site}",
                "a state has a NaN or an infinity",
                "Find the text with hs.profile, and leave it out.",
            )
        return states


def feed_of(
    source: Model | Store | States, site: str, texts: Any, first_tokens: bool
) -> Feed:
    """Return the states of a model's texts, of a store, or in memory, as a feed."""
    problem = "Cannot fit a dictionary"
    if isinstance(source, Model) == (texts is None):
        reason = "a model needs texts, and states have their own"
        raise TextError(problem, reason, "Give fit(model, site, texts=...), or states.")
    sites = source.anatomy.select(site) if isinstance(source, Model) else source.sites
    refuse_pooled(source, problem)
    if len(sites) != 1 and (not site or isinstance(source, Model)):
        reason = f"it lies at one site, and these are {len(sites)}"
        raise SiteError(problem, reason, "Give site='layer.12'.")
    if isinstance(source, Model):
        return _of_texts(source, sites[0], source.encode(texts), first_tokens)
    return _of_rows(source, str(Site.parse(site or str(sites[0]))), first_tokens)


def _of_texts(model: Model, site: Site, inputs: Inputs, first_tokens: bool) -> Feed:
    def read(pieces: Ints) -> Tensor:
        states = model.capture(inputs.some(pieces.tolist()), site, keep="device")
        assert isinstance(states, States)  # one site is of one stack
        is_used = torch.from_numpy(first_tokens | (states.tokens.positions > 0))
        return states[site][is_used.to(model.device)]

    counts = np.array(inputs.lengths, np.int64) - (not first_tokens)
    width, itemsize = model.anatomy.width(site), model.dtype.itemsize
    return Feed(str(site), model.name, width, itemsize, counts, read, model.device)


def _of_rows(source: Store | States, site: str, first_tokens: bool) -> Feed:
    if isinstance(source, Store):
        some, firsts = source.rows(site, []), source.firsts
        rows = np.arange(len(source))
    else:
        some, firsts = source[site], source.tokens.positions == 0
        rows = np.arange(len(some))
    if not first_tokens:
        rows = np.delete(rows, firsts)
    starts = np.arange(0, len(rows), RUN)

    def read(pieces: Ints) -> Tensor:
        places = (starts[pieces][:, None] + np.arange(RUN)).reshape(-1)
        numbers = rows[places[places < len(rows)]]
        if isinstance(source, Store):
            return source.rows(site, numbers)
        return some[torch.from_numpy(numbers).to(some.device)]

    counts = np.minimum(RUN, len(rows) - starts)
    name, width = source.source.model, some.shape[1]
    return Feed(site, name, width, some.itemsize, counts, read, some.device)
