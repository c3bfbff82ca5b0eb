"""Activity: what a stream of activations says of each of many directions.

The strongest rows, how many rows are active, and a sample of rows, in one pass and in
memory that does not grow with the number of rows. Every activation is compared with
the weakest of the strongest so far, and few are above it. Which rows are sampled is
decided before the pass. On a CPU numpy compares, four times as fast as torch.

>>> activity = Activity(2, k=1, sample=np.array([2]))
>>> activity.see(torch.tensor([[0.0, 1.0], [3.0, -1.0], [2.0, 5.0]]))
>>> activity.numbers.tolist(), activity.active.tolist(), activity.sampled.tolist()
([[1], [2]], [2, 2], [[2.0, 5.0]])
"""

import numpy as np
import torch
from torch import Tensor

from hiddenscope.states.arrays import Floats32, Ints

# At most this many activations are sampled.
MOST_SAMPLED = 2**24
# Flags are added up as bytes, in runs of rows that a byte can count.
RUN = 255


def sample_rows(rows: Ints, directions: int) -> Ints:
    """Choose at random as many rows as may be sampled for this many directions.

    >>> len(sample_rows(np.arange(10**5), 1024))
    16384
    """
    size = min(len(rows), max(1, MOST_SAMPLED // directions))
    return np.sort(np.random.default_rng(0).choice(rows, size, replace=False))


class Activity:
    """The k strongest rows of each direction, its active rows, and a sample.

    `see` takes activations `[row, direction]`, any number of rows at a time; a row of
    -inf is left out. `numbers` and `values` are `[direction, rank]`, the strongest
    first, and -1 where there is none above `lowest`; of equals the first row counts.
    `counted` is the number of rows that are not left out, and `active` of those above
    the threshold. `sampled` are the activations of the rows in `sample`, which ascend.
    """

    def __init__(
        self,
        directions: int,
        k: int,
        sample: Ints,
        *,
        threshold: float = 0.0,
        lowest: float = -np.inf,
    ) -> None:
        self.seen = self.counted = 0
        self.threshold, self.lowest = threshold, lowest
        self.numbers: Ints = np.full((directions, k), -1)
        self.values: Floats32 = np.full((directions, k), lowest, np.float32)
        self.sample = sample
        self.sampled = torch.empty(len(sample), directions)
        self.active = torch.zeros(directions, dtype=torch.int64)
        self._bar = torch.full((directions,), lowest)

    def see(self, activations: Tensor) -> None:
        """Take the activations of the next rows."""
        if self._bar.device != activations.device:
            for name in ("sampled", "active", "_bar"):
                setattr(self, name, getattr(self, name).to(activations.device))
        values = activations if activations.is_cuda else activations.numpy()
        active = torch.as_tensor(values > self.threshold).view(torch.uint8)
        for run in torch.split(active, RUN):
            self.active += run.sum(0, dtype=torch.uint8)
        self.counted += int((activations[:, 0] > -torch.inf).sum())
        ends = self.seen, self.seen + len(activations)
        first, last = np.searchsorted(self.sample, ends)
        if first < last:
            rows = torch.from_numpy(self.sample[first:last] - self.seen)
            self.sampled[first:last] = activations[rows.to(activations.device)]
        while len(activations):
            # At most as many rows as before, so that the bar rises early.
            part = activations[: max(self.numbers.shape[1], self.seen)]
            self._rank(part)
            self.seen += len(part)
            activations = activations[len(part) :]

    def finish(self) -> None:
        """Drop the rows of the sample that were left out."""
        is_counted = self.sampled[:, 0] > -torch.inf
        if not is_counted.all():
            self.sample = self.sample[is_counted.cpu().numpy()]
            self.sampled = self.sampled[is_counted]

    def _rank(self, activations: Tensor) -> None:
        """Keep what is stronger than the weakest of the strongest so far."""
        if activations.is_cuda:
            above = (activations > self._bar).view(-1).nonzero()[:, 0].cpu().numpy()
        else:
            above = np.flatnonzero(activations.numpy() > self._bar.numpy())
        if not len(above):
            return
        rows, columns = np.divmod(above, len(self.numbers))
        here, places = np.unique(columns, return_inverse=True)
        count, k = len(here), self.numbers.shape[1]
        direction = np.concatenate([np.repeat(np.arange(count), k), places])
        fresh = activations[torch.from_numpy(rows), torch.from_numpy(columns)]
        values = np.concatenate([self.values[here].ravel(), fresh.cpu().numpy()])
        numbers = np.concatenate([self.numbers[here].ravel(), rows + self.seen])
        order = np.lexsort((numbers, -values, direction))
        starts = np.searchsorted(direction[order], np.arange(count))
        best = order[starts[:, None] + np.arange(k)]
        self.numbers[here] = numbers[best]
        self.values[here] = values[best]
        weakest = torch.from_numpy(self.values[here, -1]).to(self._bar)
        self._bar[torch.from_numpy(here).to(weakest.device)] = weakest
