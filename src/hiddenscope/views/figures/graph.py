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
    most = np.abs(graph.values).max(initial=0.0) or 1.0
    for edge in np.argsort(np.abs(graph.values)):
        stops = graph.across[:, nodes + edge]
        lines = np.flatnonzero(np.isfinite(stops))
        fine = np.linspace(lines[0], lines[-1], FINE * len(lines))
        curve = PchipInterpolator(lines, stops[lines])(fine)
        axes.plot(curve, fine, **_look(graph.values[edge] / most))
    frame: dict[str, Any] = {"boxstyle": "square,pad=0.3", "linewidth": 0.6}
    frame |= {"facecolor": style.PAPER, "edgecolor": style.MUTED}
    for node, label in enumerate(graph.short):
        stops = graph.across[:, node]
        line = np.isfinite(stops).argmax()
        text = sheet.lettering.fitted(sheet.lettering.text(label), WIDEST, style.SMALL)
        axes.text(stops[line], line, text, ha="center", va="center", bbox=frame)
    unit = f" ({graph.unit})" if graph.unit else ""
    name = sheet.lettering.text(graph.value_name + unit, 60)
    axes.set_title(name, color=style.MUTED)
    signs = np.sign(graph.values)
    shares = [share for share in SHARES if np.sign(share) in signs]
    if shares:
        handles = [Line2D([], [], **_look(share)) for share in shares]
        names = [style.number(float(f"{share * most:.2g}")) for share in shares]
        sheet.legend(handles, names, sheet.extent(axes).bottom + 8, wide)


def _look(share: float) -> dict[str, Any]:
    """Return how an edge is drawn that has this share of the strongest one's value."""
    size = abs(share)
    level = np.sign(share) * (WEAKEST + (1 - WEAKEST) * size)
    colour = style.colormap("diverging")((1 + level) / 2)
    return {"color": colour, "linewidth": max(THINNEST, THICKEST * size)}
