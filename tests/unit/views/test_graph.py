"""A graph of parts: what it is made of, and the graph on paper."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from hiddenscope.results.pictures import Graph
from hiddenscope.views.figures.pages import figure, image
from hiddenscope.views.figures.style import DIVERGING
from hiddenscope.views.terms import words_on
from tests.pages.scenes import HOSTILE, graph


def test_a_graph_has_the_parts_with_an_edge_and_both_ends_of_the_model() -> None:
    edges = [
        ("layer.2.attn.head.1", "layer.2.mlp", "", 0.5),
        ("layer.1.mlp", "layer.2.attn.head.1", "q", -1.0),
        ("layer.1.mlp", "layer.2.attn.head.1", "k", 2.0),
    ]
    made = Graph.of("Edges", edges, exact=[1.0, np.nan, 2.0])
    parts = ("layer.1.mlp", "layer.2.attn.head.1", "layer.2.mlp")
    assert made.nodes == ("layer.0", *parts, "logits")
    assert made.short == ("embeddings", "mlp 1", "2.1", "mlp 2", "logits")
    assert made.rows[2] == made.rows[3], "a block is one row"
    back = []
    for source, target, kind in zip(made.source, made.target, made.kinds, strict=True):
        back.append((made.nodes[source], made.nodes[target], kind))
    assert back == [edge[:3] for edge in edges]
    assert made.values.tolist() == [0.5, -1.0, 2.0]
    two = Graph.of("Two", [("encoder.layer.2.mlp", "decoder.layer.1.cross", "k", 1.0)])
    assert two.short[1:3] == ("enc mlp 2", "dec cross 1")
    assert "exact effect" in words_on(made)


def boxes(drawn: Figure, made: Graph) -> list[Bbox]:
    """Return the frames of the nodes on paper."""
    drawn.canvas.draw()
    frames = []
    for text in drawn.findobj(Text):
        if text.get_text() in made.short and text.get_bbox_patch():
            frames.append(text.get_bbox_patch().get_window_extent())
    return frames


@pytest.mark.parametrize("width", [3.3, 6.9])
def test_labels_on_paper_neither_overlap_nor_leave_it(width: float) -> None:
    made = graph()
    drawn = figure([made], width)
    frames = boxes(drawn, made)
    assert len(frames) == len(made.nodes)
    for first, second in combinations(frames, 2):
        assert not first.overlaps(second)
    paper = drawn.bbox
    for frame in frames:
        assert paper.x0 <= frame.x0 and frame.x1 <= paper.x1
        assert paper.y0 <= frame.y0 and frame.y1 <= paper.y1


def test_edges_on_paper_have_the_width_and_the_colour_of_their_values() -> None:
    edges = [
        ("layer.0", "layer.1.mlp", "", 0.1),
        ("layer.0", "layer.2.mlp", "", -4.0),
        ("layer.1.mlp", "logits", "", 2.0),
    ]
    drawn = figure([Graph.of("Edges", edges)])
    lines = drawn.axes[0].lines
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths), "the strongest lies on top"
    assert widths[2] == pytest.approx(2 * widths[1])
    assert to_hex(lines[2].get_color()) == DIVERGING[0]
    for line in lines:
        assert (np.diff(line.get_ydata()) > 0).all(), "edges go up"
    names = [text.get_text() for text in drawn.axes[1].get_legend().get_texts()]
    assert names == ["−4", "−1", "1", "4"]


def test_graphs_of_any_names_and_numbers_are_drawn() -> None:
    nodes, count = HOSTILE, len(HOSTILE)
    source = np.arange(count - 1)
    values = np.resize([0.0, 1e-30, -3e38], count - 1)
    strange = Graph("Odd", nodes, range(count), source, source + 1, values, unit="$x$")
    assert all(len(label) <= 16 for label in strange.short)
    for made in (strange, Graph.of("None", [])):
        assert image([made], ".png", dpi=40).startswith(b"\x89PNG")
