"""The index of texts: which ones the committed units hold, and where their rows lie.

A text is there when all its sequences are committed; a copy of another text is there
when that one is, and its rows are those of that one. Rows are counted in the order of
the corpus, so that a store reads like the states of its texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hiddenscope.states.arrays import Ints


@dataclass(frozen=True, eq=False)
class PlannedSequences:
    """The sequences of the committed units, in order.

    Each has its text, the position of its first token and its unit. `first` is its
    first row of states in the unit's shard, and `length` the number of its rows.
    """

    text: Ints
    start: Ints
    unit: Ints
    first: Ints
    length: Ints


@dataclass(frozen=True, eq=False)
class TextIndex:
    """The texts that are there, by their numbers in the corpus, and their rows.

    `order` are the sequences, text after text (a copy names those of another again),
    and `owner` the text of each, counted among those that are there. Rows of states
    that follow one another in one shard are a run: `run_begin` is the first among all
    rows, `run_unit` its unit and `run_first` the first in that unit's shard.
    """

    texts: Ints
    order: Ints
    owner: Ints
    run_begin: Ints
    run_unit: Ints
    run_first: Ints
    count: int

    def part(self, number: int, planned: PlannedSequences) -> "TextIndex":
        """Return the index of one of the texts."""
        start, end = np.searchsorted(self.owner, [number, number + 1])
        order = self.order[start:end]
        texts = self.texts[number : number + 1]
        return _with_runs(planned, texts, order, np.zeros_like(order))

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the rows from start to end as unit, first row and number of rows."""
        run = int(np.searchsorted(self.run_begin, start, side="right")) - 1
        ends = [*self.run_begin[run + 1 :].tolist(), self.count]
        for run_end in ends:
            if start >= end:
                return
            stop = min(end, run_end)
            # A run may be empty: no token of a window shorter than `every` is stored.
            if stop > start:
                first = self.run_first[run] + start - self.run_begin[run]
                yield int(self.run_unit[run]), int(first), stop - start
            start = stop
            run += 1

    def places(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the unit of each row, and the row in it."""
        run = np.searchsorted(self.run_begin, rows, side="right") - 1
        return self.run_unit[run], self.run_first[run] + rows - self.run_begin[run]


def index_texts(
    planned: PlannedSequences, copies: Mapping[int, int], partial: Sequence[int]
) -> TextIndex:
    """Index sequences by their texts.

    Texts in `partial` have sequences that are not committed, and are left out.

    >>> texts, zeros = np.arange(3), np.zeros(3, np.int64)
    >>> planned = PlannedSequences(texts, zeros, zeros, texts * 2, zeros + 2)
    >>> index = index_texts(planned, {3: 0}, [])
    >>> index.texts.tolist(), index.count, list(index.runs(4, 8))
    ([0, 1, 2, 3], 8, [(0, 4, 2), (0, 0, 2)])
    """
    originals, firsts, counts = np.unique(
        planned.text, return_index=True, return_counts=True
    )
    is_whole = ~np.isin(originals, np.array(partial, dtype=np.int64))
    originals = originals[is_whole]
    firsts = firsts[is_whole]
    counts = counts[is_whole]
    pairs = np.array(sorted(copies.items()), dtype=np.int64).reshape(-1, 2)
    pairs = pairs[np.isin(pairs[:, 1], originals)]
    texts = np.concatenate([originals, pairs[:, 0]])
    # Which of the originals each text is.
    origin = np.searchsorted(originals, np.concatenate([originals, pairs[:, 1]]))
    sorting = np.argsort(texts, kind="stable")
    origin = origin[sorting]
    order, owner = _spread(firsts[origin], counts[origin])
    return _with_runs(planned, texts[sorting], order, owner)


def _spread(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return every number from each start on, and which start it belongs to."""
    owner = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[owner] + within, owner


def _with_runs(
    planned: PlannedSequences, texts: Ints, order: Ints, owner: Ints
) -> TextIndex:
    """Join sequences that follow one another in one shard into runs."""
    lengths = planned.length[order]
    units = planned.unit[order]
    begins = np.cumsum(lengths) - lengths
    breaks = np.ones(len(order), dtype=bool)
    breaks[1:] = (np.diff(order) != 1) | (np.diff(units) != 0)
    return TextIndex(
        texts,
        order,
        owner,
        begins[breaks],
        units[breaks],
        planned.first[order][breaks],
        int(lengths.sum()),
    )


def spread(starts: Ints, counts: Ints) -> Ints:
    """Return every number from each start on, as many as its count.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    return _spread(starts, counts)[0]
