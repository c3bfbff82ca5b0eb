"""A graph in a browser."""

from itertools import combinations

import numpy as np
import pytest

from hiddenscope.results.pictures import Graph
from tests.pages.looking import WIDER, Opener, Shown
from tests.pages.scenes import HOSTILE, graph

# At this width the picture on the page is as wide as the one that is saved, which has
# a title above it.
AS_SAVED, TITLE = 876, 40

# What is painted on the page is noted: frames, and how far the words in them reach.
NOTED = """
  window.painted = { frames: [], words: [] };
  const own = CanvasRenderingContext2D.prototype, { strokeRect, fillText } = own;
  own.strokeRect = function (x, y, w, h) {
    painted.frames.push([x, y, x + w, y + h]);
    return strokeRect.call(this, x, y, w, h);
  };
  own.fillText = function (text, x, y) {
    const half = this.measureText(text).width / 2;
    if (this.textAlign === 'center') painted.words.push([x - half, x + half]);
    return fillText.call(this, text, x, y);
  };
"""


def named(made: Graph, edge: int) -> str:
    """Return what a reader sees of an edge."""
    ends = made.source[edge], made.target[edge]
    return " → ".join(made.nodes[end] for end in ends)


def weakest_first(made: Graph) -> list[int]:
    """Return the edges in the order in which they are drawn."""
    return [int(edge) for edge in np.argsort(np.abs(made.values))]


def curves(shown: Shown) -> list[np.ndarray]:
    """Return the points of every edge of the drawing; the key has two points each."""
    points = []
    for line in shown.drawing("polyline"):
        pairs = [pair.split(",") for pair in line.attrib["points"].split()]
        if len(pairs) > 2:
            points.append(np.array(pairs, dtype=np.float64))
    return points


def test_every_edge_is_read_out_where_it_is_drawn(show: Opener) -> None:
    made = graph()
    shown = show([made], width=AS_SAVED, height=1500)
    assert shown.canvas().evaluate("canvas => canvas.clientWidth") == 820
    drawn, still = curves(shown), shown.canvas().bounding_box()["y"]
    assert len(drawn) == len(made.values)
    for edge, points in zip(weakest_first(made), drawn, strict=True):
        assert (np.diff(points[:, 1]) < 0).all(), "an edge goes up"
        x, y = points[len(points) // 2]
        shown.point(x, y - TITLE)
        assert shown.readout().startswith(named(made, edge)), edge
        assert "attribution " in shown.readout()
        measured = not np.isnan(made.exact[edge])
        assert ("exact effect" in shown.readout()) == measured
        top = shown.canvas().bounding_box()["y"]
        assert top == still, "what is read out does not move the picture"


@pytest.mark.parametrize("width", [390, 1440, 1920])
def test_labels_can_be_read_at_every_width(show: Opener, width: int) -> None:
    made = graph()
    shown = show([made], width=width, before=NOTED)
    assert shown.page.evaluate(WIDER, width) == [] and not shown.is_wide
    count = len(made.nodes)
    boxes = np.array(shown.page.evaluate("painted.frames"))[-count:]
    words = np.array(shown.page.evaluate("painted.words"))[-count:]
    assert (words[:, 0] > boxes[:, 0]).all() and (words[:, 1] < boxes[:, 2]).all()
    for first, second in combinations(boxes, 2):
        apart = (first[2:] < second[:2]) | (second[2:] < first[:2])
        assert apart.any(), (first, second)
    wide = shown.canvas().evaluate("canvas => canvas.clientWidth")
    assert boxes[:, 0].min() >= 0 and boxes[:, 2].max() <= wide
    shown.keep(f"graph-{width}-light")


def test_a_node_is_kept_and_a_link_remembers(show: Opener) -> None:
    made = graph()
    shown = show([made], width=AS_SAVED, height=1500, color_scheme="dark")
    rest = shown.readout()
    letters = {node.text: node.attrib for node in shown.drawing("text")}
    x, y = float(letters["embeddings"]["x"]), float(letters["embeddings"]["y"])
    shown.point(x, y - TITLE)
    out = int((made.source == 0).sum())
    assert shown.readout().startswith(f"layer.0  edges in 0, edges out {out}")
    strongest = weakest_first(made)[::-1]
    first = next(edge for edge in strongest if made.source[edge] == 0)
    assert named(made, first) in shown.view().locator(".hint").inner_text()
    shown.page.mouse.down()
    shown.page.mouse.up()
    shown.point(2, 2)
    assert shown.readout().startswith("layer.0  ")
    shown.keep("graph-kept-dark")
    faint = [
        line for line in shown.drawing("polyline") if "rgb" not in str(line.attrib)
    ]
    assert len(faint) == len(made.values) - out, "the others recede"
    again = show([made], fragment=shown.fragment)
    assert again.readout().startswith("layer.0  ")
    again.press("Escape")
    assert again.readout() == rest and again.fragment in ("", "#")


def test_keys_follow_the_edges_and_the_nodes(show: Opener) -> None:
    made = graph()
    shown = show([made])
    strongest = weakest_first(made)[::-1]
    for edge in strongest[:3]:
        shown.press("ArrowRight")
        assert shown.readout().startswith(named(made, edge))
    shown.press("ArrowLeft")
    assert shown.readout().startswith(named(made, strongest[1]))
    shown.press("ArrowUp", "ArrowUp", "Enter", "ArrowRight")
    node = made.nodes[1]
    assert node in shown.readout(), "the edges of the node that is kept"
    shown.press("Escape", "ArrowUp")
    assert shown.readout().startswith("layer.0  ")


def test_a_finger_reads_out_an_edge(show: Opener) -> None:
    made = Graph.of("One", [("layer.0", "logits", "", 0.25)], unit="logits")
    shown = show([made], width=390, has_touch=True, is_mobile=True)
    assert shown.readout() == "Touch an edge or a node."
    x = shown.canvas().evaluate("canvas => canvas.clientWidth / 2")
    shown.canvas().tap(position={"x": x, "y": 37})
    assert shown.readout() == "layer.0 → logits  effect 0.25 logits"


def test_a_graph_is_saved_and_is_a_table(show: Opener) -> None:
    made = graph()
    shown = show([made])
    rows = shown.rows()
    for row, edge in zip(rows, weakest_first(made)[::-1], strict=True):
        assert f"{row['from']} → {row['to']}" == named(made, edge)
        assert row["kind"] == made.kinds[edge]
        assert np.float32(row["attribution"]) == made.values[edge]
        assert (row["exact effect"] == "") == bool(np.isnan(made.exact[edge]))
    assert {"attribution (logits)", "embeddings"} <= set(shown.written())
    assert shown.save("PNG")[:4] == b"\x89PNG"
    shown.view().locator("summary").click()
    shown.settle()
    assert shown.view().locator("tbody tr").count() == len(made.values)


def test_odd_graphs_are_drawn(show: Opener) -> None:
    """Hostile names, equal and huge values, and no edge at all."""
    count = len(HOSTILE)
    source = np.arange(count - 1)
    values = np.resize([0.0, 1e-30, -3e38], count - 1)
    odd = Graph(HOSTILE[0], HOSTILE, range(count), source, source + 1, values)
    zero = Graph.of("Zero", [("layer.0", "logits", "", 0.0)])
    shown = show([odd, Graph.of("None", []), zero], width=390)
    assert shown.page.evaluate("window.hacked") is None and not shown.is_wide
    said = []
    for _ in range(count - 1):
        shown.press("ArrowRight")
        said.append(shown.readout())
    assert any("‹U+202E›" in one for one in said)
    assert all(len(one) < 400 for one in said)
    shown.press("ArrowRight", "ArrowUp", place=1)
    assert shown.readout(1).startswith("layer.0  edges in 0, edges out 0")
    shown.press("ArrowRight", place=2)
    assert shown.readout(2).startswith("layer.0 → logits  effect 0")
