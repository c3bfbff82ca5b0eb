"""TextIndex: which texts the committed units of a store hold, and where the rows of
each lie.

A text is there when all its sequences are committed; a copy of another text is there
when that one is, and its rows are those of that one. Rows are counted in the order of
the corpus, so that a store reads like the states of its texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlannedSequences:
    """The sequences of the committed units, in order: the text, first position and unit
    of each, and where it lies.

    `first` is the first row of states in the unit's shard, `length` how many there are.
    """

    text: Ints
    start: Ints
    unit: Ints
    first: Ints
    length: Ints


@dataclass(frozen=True, eq=False)
class TextIndex:
    """The texts that are there, by their numbers in the corpus, and the rows of states
    in the order of the texts.

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
        """The index of one of the texts."""
        start, end = np.searchsorted(self.owner, [number, number + 1])
        order = self.order[start:end]
        return _with_runs(
            planned, self.texts[number : number + 1], order, np.zeros_like(order)
        )

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The rows from start to end as unit, first row and number of rows."""
        run = int(np.searchsorted(self.run_begin, start, side="right")) - 1
        while start < end:
            begin = int(self.run_begin[run])
            until = (
                int(self.run_begin[run + 1])
                if run + 1 < len(self.run_begin)
                else self.count
            )
            stop = min(end, until)
            # Of a window that is shorter than `every` no token may be kept.
            if stop > start:
                yield (
                    int(self.run_unit[run]),
                    int(self.run_first[run]) + start - begin,
                    stop - start,
                )
            start, run = stop, run + 1

    def places(self, rows: Ints) -> tuple[Ints, Ints]:
        """The unit of each row, and the row in it."""
        run = np.searchsorted(self.run_begin, rows, side="right") - 1
        return self.run_unit[run], self.run_first[run] + rows - self.run_begin[run]


def index_texts(
    planned: PlannedSequences, copies: Mapping[int, int], partial: Sequence[int]
) -> TextIndex:
    """The index of some sequences; texts in `partial` have sequences that are not
    committed, and are left out.

    >>> one = np.array([0, 1, 2])
    >>> index = index_texts(PlannedSequences(one, one * 0, one * 0, one * 2, one * 0 + 2), {3: 0}, [])
    >>> index.texts.tolist(), index.count, list(index.runs(4, 8))
    ([0, 1, 2, 3], 8, [(0, 4, 2), (0, 0, 2)])
    """
    there, at, counts = np.unique(planned.text, return_index=True, return_counts=True)
    keep = ~np.isin(there, np.array(partial, dtype=np.int64))
    there, at, counts = there[keep], at[keep], counts[keep]
    pairs = np.array(sorted(copies.items()), dtype=np.int64).reshape(-1, 2)
    pairs = pairs[np.isin(pairs[:, 1], there)]
    texts = np.concatenate([there, pairs[:, 0]])
    origin = np.concatenate(
        [np.arange(len(there)), np.searchsorted(there, pairs[:, 1])]
    )
    sorting = np.argsort(texts, kind="stable")
    texts, origin = texts[sorting], origin[sorting]
    order, owner = _spread(at[origin], counts[origin])
    return _with_runs(planned, texts, order, owner)


def _spread(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Every number from each start on, and which start it belongs to."""
    owner = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[owner] + within, owner


def _with_runs(
    planned: PlannedSequences, texts: Ints, order: Ints, owner: Ints
) -> TextIndex:
    lengths, units = planned.length[order], planned.unit[order]
    begins = np.cumsum(lengths) - lengths
    breaks = np.ones(len(order), dtype=bool)
    breaks[1:] = (np.diff(order) != 1) | (np.diff(units) != 0)
    first = planned.first[order]
    return TextIndex(
        texts,
        order,
        owner,
        begins[breaks],
        units[breaks],
        first[breaks],
        int(lengths.sum()),
    )


def spread(starts: Ints, counts: Ints) -> Ints:
    """Every number from each start on, as many as its count.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    return _spread(starts, counts)[0]
