"""The layout of a layered graph: lines of nodes from the bottom up, edges that pass the
lines between their ends, and few crossings (Sugiyama, Tagawa and Toda 1981).

>>> edges = np.array([[0, 1], [0, 2]])
>>> across = layered([0, 1, 2], edges, [60.0, 40.0, 60.0])
>>> np.isfinite(across).astype(int).tolist()
[[1, 0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 0, 1, 0, 1]]
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A picture is at least this wide, in pixels. Nodes on one line fill a part of it, and
# leave the rest to edges that pass.
ROOM, NODES_ROOM = 320.0, 220.0
# From one edge that passes to the next, and from one that ends in a node to the next.
LANE, PORT = 8.0, 4.0
# The first sweeps look to one side alone, which finds an order with few crossings; the
# others look to both sides, which straightens the edges.
ORDERING, SWEEPS = 12, 30


def layered(
    rows: Sequence[int], edges: NDArray[np.int32], widths: Sequence[float]
) -> NDArray[np.float32]:
    """Return where each node and each edge stands on each line, from 0 to 1, `[line,
    node + edge]`, NaN where it does not.

    Nodes run in the order of the forward pass; `edges` are `[edge, 2]`, source and
    target. On the line of such an end, an edge is as many parts of `ROOM` from the
    middle of the node as it is to be drawn in pixels, however wide the picture is.
    """
    lines = _lines(rows, edges, widths)
    nodes, depth = len(rows), max(lines) + 1
    across = np.full((depth, nodes + len(edges)), np.nan)
    # The edges of each node; each edge is its own.
    edges_of: list[list[int]] = [[] for _ in rows]
    items: list[list[int]] = [[] for _ in range(depth)]
    ends: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    for node, line in enumerate(lines):
        items[line].append(node)
        across[line, node] = len(items[line]) * ROOM / 2
    for edge, (source, target) in enumerate(edges.tolist(), start=nodes):
        edges_of.append([edge])
        for line in range(lines[source] + 1, lines[target]):
            items[line].append(edge)
        for node in (source, target):
            edges_of[node].append(edge)
            ends[lines[node]].append((edge, node))
    for sweep in range(SWEEPS):
        step = -1 if sweep % 2 else 1
        sides = (-step,) if sweep < ORDERING else (-1, 1)
        for line in range(depth)[::step]:
            near = [line + side for side in sides if 0 <= line + side < depth]
            wishes = {}
            for item in items[line]:
                places = across[np.ix_(near, edges_of[item])]
                places = places[np.isfinite(places)]
                wishes[item] = places.mean() if places.size else across[line, item]
            order = sorted(wishes, key=wishes.__getitem__)
            sizes = np.array([widths[i] if i < nodes else 0.0 for i in order])
            wish = np.array([wishes[item] for item in order])
            across[line, order] = _apart(wish, sizes)
            # Edges end in the middle of a node until its own place is known.
            for edge, node in ends[line]:
                across[line, edge] = across[line, node]
    _fan_out(across, lines, edges, widths)
    return np.float32(across / ROOM)


def _lines(
    rows: Sequence[int], edges: NDArray[np.int32], widths: Sequence[float]
) -> list[int]:
    """Return the line of each node: a row has several where nodes read others of the
    row, or where one line has no room for all of them.
    """
    steps = [0] * len(rows)
    # In this order, the step of a source is known before it is read.
    for source, target in sorted(edges.tolist(), key=lambda edge: edge[1]):
        if rows[source] == rows[target]:
            steps[target] = max(steps[target], steps[source] + 1)
    lines = [0] * len(rows)
    line, room, before = -1, 0.0, (-1, -1)
    for row, step, node in sorted(zip(rows, steps, range(len(rows)), strict=True)):
        if (row, step) != before or room < widths[node]:
            line, room, before = line + 1, NODES_ROOM, (row, step)
        lines[node] = line
        room -= widths[node]
    return lines


def _apart(
    wishes: NDArray[np.float64], widths: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the nearest places to those wished for at which nothing overlaps; what has
    no width is an edge.
    """
    from scipy.optimize import isotonic_regression

    lane = (ROOM - widths.sum()) / max(1, (widths == 0).sum())
    widths = np.where(widths == 0, min(LANE, lane), widths)
    middles = np.cumsum(widths) - widths / 2
    # Items keep their order where the free room before them never shrinks.
    free = isotonic_regression(wishes - middles).x
    return middles + np.clip(free, 0.0, ROOM - widths.sum())


def _fan_out(
    across: NDArray[np.float64],
    lines: Sequence[int],
    edges: NDArray[np.int32],
    widths: Sequence[float],
) -> None:
    """Spread the ends of edges along their node, in the order in which they arrive."""
    straight = across.copy()
    for side, step in ((0, 1), (1, -1)):
        for node in np.unique(edges[:, side]):
            line = lines[node]
            ends = len(lines) + np.flatnonzero(edges[:, side] == node)
            ends = ends[np.argsort(straight[line + step, ends], kind="stable")]
            gap = min(PORT, 0.8 * widths[node] / len(ends))
            across[line, ends] += gap * (np.arange(len(ends)) - (len(ends) - 1) / 2)
