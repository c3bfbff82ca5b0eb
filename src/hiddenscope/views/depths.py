"""Depths of panels in their models, and which panels are shown first.

Every row shows panels at the same few depths, so that those of one column can be
compared.
"""

from collections.abc import Sequence
from itertools import groupby

FIRST = 5


def runs(rows: Sequence[str], count: int) -> list[list[int]]:
    """Return the panels of each row; without names there is one row.

    >>> runs(("gpt2", "gpt2", "bert"), 3), runs((), 3)
    ([[0, 1], [2]], [[0, 1, 2]])
    """
    names = rows or [""] * count
    return [list(run) for _, run in groupby(range(count), key=names.__getitem__)]


def by_order(rows: Sequence[str], count: int) -> tuple[float, ...]:
    """Return depths from 0 to 1, evenly along each row.

    >>> by_order(("a", "a", "a", "b"), 4)
    (0.0, 0.5, 1.0, 0.0)
    """
    depths: list[float] = []
    for run in runs(rows, count):
        last = max(1, len(run) - 1)
        depths += [place / last for place in range(len(run))]
    return tuple(depths)


def shown_first(
    depths: Sequence[float], rows: Sequence[str] = (), named: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return for each row the panels at five depths, and -1 where it has none there.

    The depths are spread evenly, but those of the panels in `named` are among them. A
    single row of few panels is shown whole.

    >>> shown_first([k / 30 for k in range(31)], named=[20])
    ((0, 8, 15, 20, 30),)
    """
    rows_of_panels = runs(rows, len(depths))
    longest = max(rows_of_panels, key=len)
    if len(longest) > FIRST + 1:
        wanted = _spread([depths[panel] for panel in named])
    elif len(rows_of_panels) > 1:
        wanted = [depths[panel] for panel in longest]
    else:
        return ()
    return tuple(_nearest(panels, depths, wanted) for panels in rows_of_panels)


def _spread(named: Sequence[float]) -> list[float]:
    """Spread depths evenly, then move the nearest inner one to each named depth."""
    wanted = [place / (FIRST - 1) for place in range(FIRST)]
    free = set(range(1, FIRST - 1))
    for depth in dict.fromkeys(named):
        if free and 0 < depth < 1:
            nearest = min(free, key=lambda place: abs(wanted[place] - depth))
            free.discard(nearest)
            wanted[nearest] = depth
    return sorted(wanted)


def _nearest(
    panels: Sequence[int], depths: Sequence[float], wanted: Sequence[float]
) -> tuple[int, ...]:
    """Return the nearest panel for each depth, every panel at most once; of two that
    are equally deep, the later.

    >>> _nearest([0, 1, 2], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    (0, 1, 2)
    >>> _nearest([0, 1], [0.0, 1.0], [0.0, 1.0, 1.0])
    (0, -1, 1)
    """
    selected = [-1] * len(wanted)

    def distance(place: int, panel: int) -> float:
        return abs(wanted[place] - depths[panel])

    for panel in reversed(panels):

        def preference(place: int, panel: int = panel) -> tuple[float, bool, int]:
            return distance(place, panel), selected[place] >= 0, -place

        place = min(range(len(wanted)), key=preference)
        holder = selected[place]
        if holder < 0 or distance(place, panel) < distance(place, holder):
            selected[place] = panel
    return tuple(selected)
