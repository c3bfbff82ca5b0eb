"""The layout of a graph keeps its laws, whatever the graph."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenscope.results.layering import LANE, ROOM, layered


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return rows, edges and widths of a graph."""
    count = draw(st.integers(1, 25))
    rows = sorted(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count)))
    place = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(place, place), max_size=40))
    edges = [sorted(pair) for pair in pairs if pair[0] != pair[1]]
    widths = draw(st.lists(st.floats(20, 140), min_size=count, max_size=count))
    return rows, np.array(edges, dtype=np.int32).reshape(-1, 2), np.array(widths)


@settings(max_examples=20, deadline=None)
@given(graphs())
def test_nothing_overlaps_and_every_edge_goes_up(
    graph: tuple[list[int], np.ndarray, np.ndarray],
) -> None:
    rows, edges, widths = graph
    across = layered(rows, edges, widths).astype(np.float64) * ROOM
    nodes = len(rows)
    assert (np.isfinite(across[:, :nodes]).sum(axis=0) == 1).all()
    line_of = np.isfinite(across[:, :nodes]).argmax(axis=0)
    # Rows lie above one another, and so do the lines within a row.
    assert (np.diff(line_of) >= 0).all() and (line_of % 2 == 0).all()
    below = np.diff(rows) > 0
    assert (np.diff(line_of)[below] > 0).all()
    for edge, (source, target) in enumerate(edges, start=nodes):
        here = np.flatnonzero(np.isfinite(across[:, edge]))
        assert line_of[source] < line_of[target]
        assert here.tolist() == [*range(line_of[source], line_of[target] + 1)]
        for node in (source, target):
            assert across[line_of[node], edge] == across[line_of[node], node]
    for line, places in enumerate(across):
        items = [node for node in range(nodes) if line_of[node] == line]
        size = {node: widths[node] for node in items}
        for edge, (source, target) in enumerate(edges, start=nodes):
            if line_of[source] < line < line_of[target]:
                size[edge] = 0.0
        order = sorted(size, key=lambda item: places[item])
        for item in order:
            assert places[item] - size[item] / 2 >= -1e-3
            assert places[item] + size[item] / 2 <= ROOM + 1e-3
        for left, right in zip(order, order[1:], strict=False):
            gap = (size[left] + size[right]) / 2
            assert places[right] - places[left] >= gap - 1e-3
            if right >= nodes <= left:
                assert places[right] > places[left], "two edges are never one"


def test_edges_that_need_not_cross_do_not() -> None:
    """Two ladders whose rungs come in turn: an order without crossings exists, and is
    found; the layout is the same every time.
    """
    rows = [0, 0, 1, 1, 2, 2, 3, 3]
    edges = np.array([[0, 3], [1, 2], [3, 4], [2, 5], [4, 7], [5, 6], [0, 7]])
    widths = np.full(8, 50.0)
    across = layered(rows, edges, widths)
    np.testing.assert_array_equal(across, layered(rows, edges, widths))
    left = np.sign(across[:, 8:, None] - across[:, None, 8:])
    changes = left[1:] * left[:-1]
    assert not (changes < 0).any()


def test_a_row_without_room_goes_on_above() -> None:
    across = layered([0] * 12 + [1], np.array([[0, 12]]), np.full(13, 50.0))
    line_of = np.isfinite(across[:, :13]).argmax(axis=0)
    assert np.bincount(line_of)[::2].tolist() == [4, 4, 4, 1]


def test_edges_side_by_side_are_a_lane_apart() -> None:
    """The query, the key and the value of a head may read the same part."""
    edges = np.array([[0, 1]] * 3)
    across = ROOM * layered([0, 1], edges, np.array([60.0, 60.0]))
    assert np.diff(np.sort(across[1, 2:])) == pytest.approx([LANE] * 2, abs=1e-3)
