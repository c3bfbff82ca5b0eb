"""A graph on paper: the parts of a model in layers, and the edges between them."""

from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results.pictures import Graph
from hiddenscope.views.figures import style

if TYPE_CHECKING:
    from hiddenscope.views.figures.pages import Sheet

# In points: how wide a graph is, and how far from line to line.
WIDTH, PITCH = 440.0, 13.0
THINNEST, THICKEST = 0.8, 4.2
# How far from the middle of the colours the weakest edge is.
WEAKEST = 0.5
# What the legend shows, as shares of the strongest edge.
SHARES = (-1.0, -0.25, 0.25, 1.0)
# A label is cut here, in points.
WIDEST = 84.0
# Points of a curve from line to line.
FINE = 8


def draw_graph(graph: Graph, sheet: "Sheet") -> None:
    """Draw the edges, the strongest on top, then the nodes; the legend says what widths
    and colours mean.
    """
    from matplotlib.lines import Line2D
    from scipy.interpolate import PchipInterpolator

    assert graph.across is not None
    wide = sheet.room(WIDTH)
    depth, nodes = len(graph.across), len(graph.nodes)
    axes = sheet.axes(0, 0, wide, PITCH * depth)
    axes.set(xlim=(0, 1), ylim=(-1, depth))
    axes.set_axis_off()
    sizes = np.abs(graph.values)
    most = sizes.max(initial=0.0) or 1.0
    for edge in np.argsort(sizes):
        stops = graph.across[:, nodes + edge]
        lines = np.flatnonzero(np.isfinite(stops))
        fine = np.linspace(lines[0], lines[-1], FINE * len(lines))
        curve = PchipInterpolator(lines, stops[lines])
        look = _look(graph.values[edge] / most)
        axes.plot(curve(fine), fine, **look)
    paper, edge_colour = style.PAPER, style.MUTED
    frame = {"boxstyle": "square,pad=0.3", "lw": 0.6, "fc": paper, "ec": edge_colour}
    for node, label in enumerate(graph.short):
        stops = graph.across[:, node]
        stands = np.isfinite(stops)
        line = int(stands.argmax())
        text = sheet.lettering.text(label)
        text = sheet.lettering.fitted(text, WIDEST, style.SMALL)
        axes.text(stops[line], line, text, ha="center", va="center", bbox=frame)
    unit = f" ({graph.unit})" if graph.unit else ""
    name = sheet.lettering.text(graph.value_name + unit, 60)
    axes.set_title(name, color=style.MUTED)
    signs = np.sign(graph.values)
    shares = [share for share in SHARES if np.sign(share) in signs]
    if shares:
        handles = [Line2D([], [], **_look(share)) for share in shares]
        rounded = [float(f"{share * most:.2g}") for share in shares]
        below = sheet.extent(axes).bottom + 8
        sheet.legend(handles, [*map(style.number, rounded)], below, wide)


def _look(share: float) -> dict[str, Any]:
    """Return how an edge is drawn that has this share of the strongest one's value."""
    size = abs(share)
    # Zero has the middle of the colours.
    distance = np.sign(share) * (WEAKEST + (1 - WEAKEST) * size)
    colours = style.colormap("diverging")
    colour = colours((1 + distance) / 2)
    return {"color": colour, "linewidth": max(THINNEST, THICKEST * size)}
