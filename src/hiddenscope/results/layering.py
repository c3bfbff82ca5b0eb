"""The layout of a layered graph: lines of nodes from the bottom up, edges that pass the
lines between their ends, and few crossings (Sugiyama, Tagawa and Toda 1981).

>>> edges = np.array([[0, 1], [0, 2]])
>>> across = layered([0, 1, 2], edges, np.array([60.0, 40.0, 60.0]))
>>> np.isfinite(across).astype(int).tolist()
[[1, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 1, 0, 1]]
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int32]

# A picture is at least this wide, in pixels. Nodes on one line fill a part of it, and
# leave the rest to edges that pass.
ROOM, NODES_ROOM = 320.0, 220.0
# From one edge that passes to the next.
LANE = 8.0
# The first sweeps look to one side alone, which finds an order with few crossings; the
# others look to both sides, which straightens the edges.
ORDERING, SWEEPS = 6, 16


def layered(rows: Sequence[int], edges: _Ints, widths: _Floats) -> _Floats:
    """Return where each node stands and each edge passes on each line, from 0 to 1,
    `[line, node + edge]`, NaN where it does not.

    Nodes and rows rise; `edges` are `[edge, 2]`, source and target. An edge has a place
    on the lines of its ends too. On every other line there are edges alone, so that no
    two are drawn as one.
    """
    lines = 2 * _lines(rows, edges, widths)
    depth, nodes = lines.max() + 1, len(rows)
    level = np.arange(depth)[:, None]
    start, end = lines[edges].T
    passes = (level > start) & (level < end)
    stands = np.hstack([level == lines, passes])
    across = np.where(stands, ROOM / 2, np.nan)
    # Which edges pull at an item: those of a node, and an edge at itself.
    is_end = edges == np.arange(nodes)[:, None, None]
    itself = np.eye(len(edges), dtype=bool)
    pulls = np.vstack([is_end.any(axis=2), itself])
    sizes = np.hstack([widths, np.zeros(len(edges))])
    for sweep in range(SWEEPS):
        step = -1 if sweep % 2 else 1
        sides = [-step] if sweep < ORDERING else [-1, 1]
        for line in range(depth)[::step]:
            beside = [line + side for side in sides if 0 <= line + side < depth]
            places = across[beside, nodes:]
            items = np.flatnonzero(stands[line])
            counted = np.isfinite(places).sum(axis=0)
            counts = pulls[items] @ counted
            sums = pulls[items] @ np.nansum(places, axis=0)
            # What nothing pulls at stays where it is.
            wishes = across[line, items]
            np.divide(sums, counts, out=wishes, where=counts > 0)
            order = np.argsort(wishes, kind="stable")
            items = items[order]
            across[line, items] = _apart(wishes[order], sizes[items])
            # Edges end in the middle of their node.
            for side, ends in enumerate((start, end)):
                met = np.flatnonzero(ends == line)
                across[line, nodes + met] = across[line, edges[met, side]]
    return across / ROOM


def _lines(rows: Sequence[int], edges: _Ints, widths: _Floats) -> _Ints:
    """Return the line of each node; a row has several where a node reads another of the
    row, or where there is no room for all.
    """
    lines = np.zeros(len(rows), dtype=np.int32)
    line, room = -1, 0.0
    for node, row in enumerate(rows):
        read = edges[edges[:, 1] == node, 0]
        if room < widths[node] or row != rows[node - 1] or line in lines[read]:
            line += 1
            room = NODES_ROOM
        lines[node] = line
        room -= widths[node]
    return lines


def _apart(wishes: _Floats, widths: _Floats) -> _Floats:
    """Return the nearest places to those wished for at which nothing overlaps; what has
    no width is an edge.
    """
    from scipy.optimize import isotonic_regression

    is_edge = widths == 0
    free = ROOM - widths.sum()
    lane = free / max(1, is_edge.sum())
    widths = widths + is_edge * min(LANE, lane)
    middles = np.cumsum(widths) - widths / 2
    # Items keep their order where the free room before them never shrinks.
    before = isotonic_regression(wishes - middles).x
    before = before.clip(0.0, ROOM - widths.sum())
    places: _Floats = middles + before
    return places
