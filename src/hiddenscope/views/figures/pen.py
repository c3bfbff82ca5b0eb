"""One sheet of paper, measured in points from its upper left corner, and the few strokes that figures are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.views.figures.lettering import Lettering, font
from hiddenscope.views.figures.scale import FAINT, INK

Point: TypeAlias = tuple[float, float]
MOST_VECTORS = 20_000  # with more cells or dots than this a file is quicker to read as pixels


@dataclass(frozen=True)
class Box:
    """A rectangle on the paper."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.top + self.height


@dataclass(frozen=True)
class Lead:
    """How a text is written: its ink, size in points, weight, the end it is held at, and its turn in degrees."""

    ink: str = INK
    size: float = 8
    bold: bool = False
    anchor: Literal["left", "center", "right"] = "left"
    turn: float = 0


@dataclass(frozen=True)
class Plan:
    """A view that knows how much room it needs, and paints itself at a given height of the paper."""

    width: float
    height: float
    paint: Callable[["Pen", float], None]


class Pen:
    """Draws on a matplotlib figure of its own; no state of matplotlib's is touched."""

    def __init__(self, width: float, height: float, lettering: Lettering) -> None:
        from matplotlib.figure import Figure

        self.lettering = lettering
        self.order = count()  # what is drawn later lies on top
        self.figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.set_autoscale_on(False)

    def text(self, said: str, x: float, y: float, lead: Lead) -> None:
        """A text whose middle line runs through a place."""
        if not said:
            return
        self.axes.text(
            x,
            y,
            said,
            color=lead.ink,
            fontproperties=font(lead.size, bold=lead.bold),
            ha=lead.anchor,
            va="center_baseline",
            rotation=lead.turn,
            rotation_mode="anchor",
            parse_math=False,
            zorder=next(self.order),
        )

    def line(self, points: Sequence[Point], ink: str, width: float = 0.6, dash: Sequence[float] = ()) -> None:
        """A line through some points."""
        x, y = zip(*points, strict=True)
        style: Any = (0, tuple(dash)) if dash else "solid"
        self.axes.plot(
            x, y, color=ink, linewidth=width, linestyle=style, solid_capstyle="butt", zorder=next(self.order)
        )

    def cells(self, box: Box, colours: NDArray[np.float64], *, seams: bool) -> None:
        """Coloured cells `[row, column, 4]` that fill a box, the first row on top."""
        rows, columns = colours.shape[:2]
        overlap = min(0.4, box.width / columns / 4, box.height / rows / 4)  # or some viewers show the paper between
        self.axes.pcolormesh(
            np.linspace(box.left, box.right, columns + 1),
            np.linspace(box.top, box.bottom, rows + 1),
            colours,
            edgecolors="white" if seams else "face",
            linewidth=0.5 if seams else overlap,
            antialiased=True,
            rasterized=rows * columns > MOST_VECTORS,
            zorder=next(self.order),
        )

    def rect(self, box: Box, ink: str) -> None:
        """A filled rectangle."""
        self.area([(box.left, box.top), (box.right, box.top), (box.right, box.bottom), (box.left, box.bottom)], ink)

    def outline(self, box: Box, ink: str = FAINT, width: float = 0.6) -> None:
        """The frame of a rectangle."""
        corners = [(box.left, box.top), (box.right, box.top), (box.right, box.bottom), (box.left, box.bottom)]
        self.line([*corners, corners[0], corners[1]], ink, width)

    def area(self, points: Sequence[Point], ink: str, cover: float = 1.0) -> None:
        """A filled shape."""
        x, y = zip(*points, strict=True)
        self.axes.fill(x, y, facecolor=ink, alpha=cover, linewidth=0, zorder=next(self.order))

    def dots(
        self, points: NDArray[np.floating[Any]], ink: Sequence[str] | str, radius: float, cover: float = 1
    ) -> None:
        """A dot at every place `[dot, 2]`."""
        style = {"s": (2 * radius) ** 2, "c": ink, "alpha": cover, "linewidths": 0, "zorder": next(self.order)}
        self.axes.scatter(points[:, 0], points[:, 1], rasterized=len(points) > MOST_VECTORS, **style)
