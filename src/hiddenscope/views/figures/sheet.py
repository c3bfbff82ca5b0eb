"""One sheet of paper: a matplotlib figure on which views stand one beneath the other.

A view draws itself on ordinary axes, whose size and place it gives in points. How much
room its labels take is measured on the axes, and when all views are there each is moved
to its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hiddenscope.views.figures.style import LABEL, MUTED, Lettering, width_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

EDGE, APART = 12.0, 24.0  # around the sheet, and between two views
TITLE = 10.5
TITLE_LINE, NOTE_LINE = 14.0, 10.0
# Pixels for each point while views are laid out: glyphs stand on whole pixels, so a
# coarse text is too narrow.
FINE = 4
LEAST_WIDTH = 240.0  # so that a title has room over a narrow view


@dataclass(frozen=True)
class Box:
    """A rectangle on the paper, in points from its upper left corner."""

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


@dataclass
class _Block:
    """One view on the sheet: its title, its note, and its axes with their places within
    it.
    """

    title: str
    note: str
    axes: "list[tuple[Axes, Box]]"


class Sheet:
    """A figure that grows as views are drawn on it; matplotlib's own state is not
    touched.
    """

    def __init__(self, lettering: Lettering, width: float | None = None) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.lettering = lettering
        self.width = width  # of the paper, in points, where it is given
        self.figure = Figure(figsize=(10, 10), dpi=72 * FINE)
        self.canvas = FigureCanvasAgg(self.figure)
        self.blocks: list[_Block] = []

    def room(self, otherwise: float) -> float:
        """How wide a view may be, in points."""
        return otherwise if self.width is None else self.width - 2 * EDGE

    def begin(self, title: str, note: str) -> None:
        """A new view; the axes that follow are its."""
        self.blocks.append(
            _Block(self.lettering.text(title, 200), self.lettering.text(note, 600), [])
        )

    def axes(self, box: Box) -> "Axes":
        """New axes, at a place within the view."""
        axes = self.figure.add_axes(
            _share(box, 720, 720), label=f"axes {len(self.figure.axes)}"
        )
        axes.set_zorder(len(self.figure.axes))
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
        """A legend in as many columns as there is room for, with handles of so many
        points; where it ends.
        """
        axes = self.axes(Box(at.left, at.top, at.width, 1))
        axes.set_axis_off()
        names = [
            self.lettering.wrapped(name, at.width - handle - 6, LABEL) for name in names
        ]
        widest = max(
            width_of(line, LABEL) for name in names for line in name.splitlines()
        )
        columns = max(1, int((at.width + 16) / (widest + handle + 5 + 16)))
        # Matplotlib leaves out names that begin with an underscore, so they are written
        # afterwards.
        apart = {
            "handletextpad": 0.7,
            "columnspacing": 2.1,
            "labelspacing": 0.5,
            "borderpad": 0,
            "borderaxespad": 0,
        }
        legend = axes.legend(
            list(handles),
            ["x"] * len(names),
            loc="upper left",
            ncols=min(columns, len(names)),
            handlelength=handle / LABEL,
            **apart,
        )
        for text, name in zip(legend.get_texts(), names, strict=True):
            text.set_text(name)
        return self.extent(axes).bottom

    def extent(self, axes: "Axes") -> Box:
        """How far axes reach with all their labels, within the view."""
        bounds = axes.get_tightbbox(self.canvas.get_renderer())  # type: ignore[no-untyped-call]
        assert bounds is not None
        return Box(
            bounds.x0 / FINE,
            720 - bounds.y1 / FINE,
            bounds.width / FINE,
            bounds.height / FINE,
        )

    def finish(self) -> None:
        """Move every view to its place, and write titles and notes."""
        extents = [
            _union([self.extent(axes) for axes, _ in block.axes])
            for block in self.blocks
        ]
        least = LEAST_WIDTH if self.width is None else self.width - 2 * EDGE
        width = max(least, *(extent.width for extent in extents))
        heads = [self._head(block, width) for block in self.blocks]
        total = sum(
            head + extent.height
            for (_, _, head), extent in zip(heads, extents, strict=True)
        )
        across, down = (
            width + 2 * EDGE,
            total + APART * (len(self.blocks) - 1) + 2 * EDGE,
        )
        self.figure.set_size_inches(across / 72, down / 72)
        top = EDGE
        for block, extent, (title, note, head) in zip(
            self.blocks, extents, heads, strict=True
        ):
            self._write(title, top, across, down, size=TITLE, weight="bold")
            self._write(
                note,
                top + TITLE_LINE * len(title) + 2,
                across,
                down,
                size=LABEL,
                color=MUTED,
            )
            for axes, box in block.axes:
                moved = Box(
                    EDGE + box.left - extent.left,
                    top + head + box.top - extent.top,
                    box.width,
                    box.height,
                )
                axes.set_position(_share(moved, across, down))
            top += head + extent.height + APART

    def _head(self, block: _Block, width: float) -> tuple[list[str], list[str], float]:
        """The lines of the title and of the note, and how much room both take."""
        title = self.lettering.wrapped(
            block.title, width, TITLE, bold=True
        ).splitlines()
        note = self.lettering.wrapped(block.note, width, LABEL).splitlines()
        return (
            title,
            note,
            TITLE_LINE * len(title) + NOTE_LINE * len(note) + 7 + (3 if note else 0),
        )

    def _write(
        self, lines: Sequence[str], top: float, across: float, down: float, **look: Any
    ) -> None:
        step = TITLE_LINE if look["size"] == TITLE else NOTE_LINE
        for place, line in enumerate(lines):
            y = top + step * (place + 0.5)
            self.figure.text(
                EDGE / across, 1 - y / down, line, va="center_baseline", **look
            )


def _share(box: Box, across: float, down: float) -> tuple[float, float, float, float]:
    """A place as matplotlib has it: shares of the figure, from its lower left corner."""
    return (
        box.left / across,
        1 - box.bottom / down,
        box.width / across,
        box.height / down,
    )


def _union(boxes: Sequence[Box]) -> Box:
    left, top = min(box.left for box in boxes), min(box.top for box in boxes)
    right, bottom = max(box.right for box in boxes), max(box.bottom for box in boxes)
    return Box(left, top, right - left, bottom - top)
