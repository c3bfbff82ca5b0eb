"""How deep panels lie in their models, and which of them are shown first: the same few
depths in every row.
"""

from collections.abc import Sequence
from itertools import groupby

FIRST = 5


def runs(rows: Sequence[str], count: int) -> list[list[int]]:
    """The panels of each row; one row has them all where there are no names.

    >>> runs(("gpt2", "gpt2", "bert"), 3), runs((), 3)
    ([[0, 1], [2]], [[0, 1, 2]])
    """
    named = rows or [""] * count
    return [
        list(run) for _, run in groupby(range(count), key=lambda panel: named[panel])
    ]


def by_order(rows: Sequence[str], count: int) -> tuple[float, ...]:
    """Depths from 0 to 1, evenly along each row.

    >>> by_order(("a", "a", "a", "b"), 4)
    (0.0, 0.5, 1.0, 0.0)
    """
    return tuple(
        place / max(1, len(run) - 1)
        for run in runs(rows, count)
        for place in range(len(run))
    )


def shown_first(
    depths: Sequence[float], rows: Sequence[str] = (), named: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """For each row the panels at five depths, which stand beneath one another, and -1
    where a row has none there.

    The depths are spread evenly, but the panels in `named` are among them. A single row
    of few panels has no choice.

    >>> shown_first([k / 30 for k in range(31)], named=[20])
    ((0, 8, 15, 20, 30),)
    """
    each = runs(rows, len(depths))
    longest = max(each, key=len)
    if len(longest) <= FIRST + 1:
        if len(each) == 1:
            return ()
        wanted = [depths[panel] for panel in longest]
    else:
        wanted = _spread([depths[panel] for panel in named])
    return tuple(_nearest(run, depths, wanted) for run in each)


def _spread(named: Sequence[float]) -> list[float]:
    """Depths spread evenly, where each that is named takes the place of the nearest but
    the ends.
    """
    wanted = [place / (FIRST - 1) for place in range(FIRST)]
    free = set(range(1, FIRST - 1))
    for depth in dict.fromkeys(named):
        if free and 0 < depth < 1:
            place = min(free, key=lambda one: abs(wanted[one] - depth))
            free.discard(place)
            wanted[place] = depth
    return sorted(wanted)


def _nearest(
    run: Sequence[int], depths: Sequence[float], wanted: Sequence[float]
) -> tuple[int, ...]:
    """For each depth the panel nearest to it, each panel once; of two that are as deep,
    the later.

    >>> _nearest([0, 1, 2], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]), _nearest([0, 1], [0.0, 1.0], [0.0, 1.0, 1.0])
    ((0, 1, 2), (0, -1, 1))
    """
    found = [-1] * len(wanted)

    def far(place: int, panel: int) -> float:
        return abs(wanted[place] - depths[panel])

    for panel in reversed(run):
        place = min(
            range(len(wanted)), key=lambda one: (far(one, panel), found[one] >= 0, -one)
        )
        if found[place] < 0 or far(place, panel) < far(place, found[place]):
            found[place] = panel
    return tuple(found)
