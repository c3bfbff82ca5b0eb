"""A sheet of paper: a matplotlib figure on which views stand one beneath the other.

A view is drawn on ordinary axes, whose size and place are in points. How much room its
labels take is measured on the axes, and when all views are drawn each is moved to its
place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hiddenscope.views.figures.style import LABEL, MUTED, Lettering, width_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Around the sheet, and between two views.
EDGE, APART = 12.0, 24.0
TITLE = 10.5
TITLE_LINE, NOTE_LINE = 14.0, 10.0
# Pixels for each point while views are laid out: glyphs stand on whole pixels, so text
# on few of them would come out too narrow.
FINE = 4
# The side of the figure while views are laid out, in points.
SIDE = 720.0
# A sheet is at least so wide, so that a title has room over a narrow view.
NARROWEST = 240.0


@dataclass(frozen=True)
class Box:
    """A rectangle on the paper, in points from its upper left corner."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Return the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Return the lower edge."""
        return self.top + self.height


@dataclass
class _Block:
    """One view on the sheet: its title, its note, and its axes with their places."""

    title: str
    note: str
    axes: "list[tuple[Axes, Box]]"


@dataclass(frozen=True)
class _Head:
    """The lines of the title and of the note of a view."""

    title: list[str]
    note: list[str]

    @property
    def height(self) -> float:
        """Return how much room both take."""
        height = TITLE_LINE * len(self.title) + 7
        if self.note:
            height += NOTE_LINE * len(self.note) + 3
        return height


class Sheet:
    """A figure that grows as views are drawn on it, apart from pyplot's state."""

    def __init__(self, lettering: Lettering, width: float | None = None) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.lettering = lettering
        # Of the paper, in points; None where it may be as wide as the views are.
        self.width = width
        self.figure = Figure(figsize=(SIDE / 72, SIDE / 72), dpi=72 * FINE)
        self.canvas = FigureCanvasAgg(self.figure)
        self.blocks: list[_Block] = []

    def room(self, default: float) -> float:
        """Return how wide a view may be, in points."""
        return default if self.width is None else self.width - 2 * EDGE

    def begin(self, title: str, note: str) -> None:
        """Begin a view, which the axes that follow belong to."""
        title, note = self.lettering.text(title, 200), self.lettering.text(note, 600)
        self.blocks.append(_Block(title, note, []))

    def axes(self, box: Box) -> "Axes":
        """Add axes at a place within the view."""
        count = len(self.figure.axes)
        axes = self.figure.add_axes(_share(box, SIDE, SIDE), label=f"axes {count}")
        axes.set_zorder(count + 1)
        self.blocks[-1].axes.append((axes, box))
        return axes

    def legend(
        self,
        handles: "Sequence[Artist]",
        names: Sequence[str],
        at: Box,
        *,
        handle: float = 14,
    ) -> float:
        """Draw a legend in as many columns as there is room for, with handles of so
        many points, and return where it ends.
        """
        axes = self.axes(Box(at.left, at.top, at.width, 1))
        axes.set_axis_off()
        room = at.width - handle - 6
        names = [self.lettering.wrapped(name, room, LABEL) for name in names]
        lines = "\n".join(names).splitlines()
        widest = max(width_of(line, LABEL) for line in lines)
        columns = max(1, int((at.width + 16) / (widest + handle + 5 + 16)))
        # Matplotlib leaves out names that begin with an underscore, so they are written
        # afterwards.
        legend = axes.legend(
            list(handles),
            ["x"] * len(names),
            loc="upper left",
            ncols=min(columns, len(names)),
            handlelength=handle / LABEL,
            handletextpad=0.7,
            columnspacing=2.1,
            labelspacing=0.5,
            borderpad=0,
            borderaxespad=0,
        )
        for text, name in zip(legend.get_texts(), names, strict=True):
            text.set_text(name)
        return self.extent(axes).bottom

    def extent(self, axes: "Axes") -> Box:
        """Return how far axes reach with all their labels, within the view."""
        bounds = axes.get_tightbbox(self.canvas.get_renderer())  # type: ignore[no-untyped-call]
        assert bounds is not None
        return Box(
            bounds.x0 / FINE,
            SIDE - bounds.y1 / FINE,
            bounds.width / FINE,
            bounds.height / FINE,
        )

    def finish(self) -> None:
        """Move every view to its place, and write titles and notes."""
        extents = [
            _union([self.extent(axes) for axes, _ in block.axes])
            for block in self.blocks
        ]
        width = max(self.room(NARROWEST), *(extent.width for extent in extents))
        heads = [self._head(block, width) for block in self.blocks]
        height = sum(head.height for head in heads)
        height += sum(extent.height for extent in extents)
        height += APART * (len(self.blocks) - 1)
        across, down = width + 2 * EDGE, height + 2 * EDGE
        self.figure.set_size_inches(across / 72, down / 72)
        top = EDGE
        for block, extent, head in zip(self.blocks, extents, heads, strict=True):
            self._write_head(head, top, across, down)
            top += head.height
            for axes, box in block.axes:
                left, upper = EDGE + box.left - extent.left, top + box.top - extent.top
                moved = Box(left, upper, box.width, box.height)
                axes.set_position(_share(moved, across, down))
            top += extent.height + APART

    def _head(self, block: _Block, width: float) -> _Head:
        wrapped = self.lettering.wrapped
        title = wrapped(block.title, width, TITLE, bold=True).splitlines()
        note = wrapped(block.note, width, LABEL).splitlines()
        return _Head(title, note)

    def _write_head(self, head: _Head, top: float, across: float, down: float) -> None:
        for place, line in enumerate(head.title):
            x, y = EDGE / across, 1 - (top + TITLE_LINE * (place + 0.5)) / down
            self.figure.text(
                x, y, line, va="center_baseline", size=TITLE, weight="bold"
            )
        top += TITLE_LINE * len(head.title) + 2
        for place, line in enumerate(head.note):
            x, y = EDGE / across, 1 - (top + NOTE_LINE * (place + 0.5)) / down
            self.figure.text(x, y, line, va="center_baseline", size=LABEL, color=MUTED)


def _share(box: Box, across: float, down: float) -> tuple[float, float, float, float]:
    """Return a place as matplotlib has it: shares of the figure, from its lower left
    corner.
    """
    return (
        box.left / across,
        1 - box.bottom / down,
        box.width / across,
        box.height / down,
    )


def _union(boxes: Sequence[Box]) -> Box:
    left = min(box.left for box in boxes)
    top = min(box.top for box in boxes)
    right = max(box.right for box in boxes)
    bottom = max(box.bottom for box in boxes)
    return Box(left, top, right - left, bottom - top)
