"""Figures for print: matplotlib draws the views as PNG, SVG and PDF, from the values
that the page draws.

A view is drawn on ordinary axes of a `Sheet`, whose size and place are in points. How
much room its labels take is measured on the axes, and when all views are drawn each is
moved to its place.

>>> from hiddenscope.results.pictures import Grid, Measure
>>> norm = Measure("norm", [[1.0, 2.0], [3.0, 4.0]])
>>> norms = Grid("Norms", ("layer.0", "layer.1"), ("The", " cat"), (norm,))
>>> image([norms], ".png")[:4], image([norms], ".pdf")[:5]
(b'\\x89PNG', b'%PDF-')
>>> b"\\xe2\\x90\\xa3cat" in image([norms], ".svg")
True
"""

import io
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hiddenscope.results.pictures import Graph, Grid, Lines, Panels, Patterns, View
from hiddenscope.views.figures.graph import draw_graph
from hiddenscope.views.figures.grid import draw_grid, draw_patterns
from hiddenscope.views.figures.lines import draw_lines
from hiddenscope.views.figures.panels import draw_panels
from hiddenscope.views.figures.style import LABEL, MUTED, Lettering, settings, width_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FigureFormat: TypeAlias = Literal[".png", ".svg", ".pdf"]

# On the longer side of a PNG.
MOST_PIXELS = 30_000
UNDATED = {
    ".png": {"Software": "hiddenscope"},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
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

# Matplotlib reads its settings from one table for the whole process, so that only one
# thread may draw.
_SETTINGS_LOCK = threading.RLock()


def image(
    views: Sequence[View],
    suffix: FigureFormat,
    *,
    dpi: float = 220,
    width: float | None = None,
) -> bytes:
    """Draw the views, one beneath the other, and return the bytes of the file; the same
    views give the same bytes.

    A grid shows its first measure. Letters stay letters in SVG and PDF; a PDF carries
    its font along, and has a page for each view. `width` is in inches.
    """
    from matplotlib.backends.backend_pdf import PdfPages

    file = io.BytesIO()
    with _own_settings():
        if suffix == ".pdf" and len(views) > 1:
            with PdfPages(file, metadata=UNDATED[suffix]) as pages:
                for view in views:
                    pages.savefig(
                        _figure([view], Lettering(), width), facecolor="white"
                    )
            return file.getvalue()
        # The reader of an SVG brings its own fonts along.
        drawn = _figure(views, Lettering(any_character=suffix == ".svg"), width)
        highest_dpi = MOST_PIXELS / max(drawn.get_size_inches())
        drawn.savefig(
            file,
            format=suffix[1:],
            dpi=min(dpi, highest_dpi),
            metadata=UNDATED[suffix],
            facecolor="white",
        )
    return file.getvalue()


def figure(views: Sequence[View], width: float | None = None) -> "Figure":
    """Draw the views, one beneath the other, as a matplotlib figure."""
    with _own_settings():
        return _figure(views, Lettering(), width)


def _figure(
    views: Sequence[View], lettering: Lettering, width: float | None = None
) -> "Figure":
    sheet = Sheet(lettering, None if width is None else 72 * width)
    draw: dict[type[View], Any] = {
        Grid: draw_grid,
        Panels: draw_panels,
        Lines: draw_lines,
        Patterns: draw_patterns,
        Graph: draw_graph,
    }
    for view in views:
        sheet.begin(view.title, view.note)
        draw[type(view)](view, sheet)
    sheet.finish()
    return sheet.figure


@contextmanager
def _own_settings() -> Iterator[None]:
    """Draw with our settings whatever the user's are, and without warnings of fonts:
    what they lack is written out.
    """
    import matplotlib.style

    fonts = logging.getLogger("matplotlib.font_manager")
    with (
        _SETTINGS_LOCK,
        matplotlib.style.context(["default", settings()]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        level = fonts.level
        fonts.setLevel(logging.ERROR)
        try:
            yield
        finally:
            fonts.setLevel(level)


@dataclass(frozen=True)
class Box:
    """A rectangle on the paper, in points from its upper left corner."""

    left: float
    top: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        """Return the lower edge."""
        return self.top + self.height

    def share(self, across: float, down: float) -> tuple[float, float, float, float]:
        """Return the place as matplotlib has it: shares of a paper of this size, from
        its lower left corner.
        """
        left, bottom = self.left / across, 1 - self.bottom / down
        return left, bottom, self.width / across, self.height / down


@dataclass
class _Block:
    """One view on the sheet: its title, its note, and its axes with their places."""

    title: str
    note: str
    axes: "list[tuple[Axes, Box]]"


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

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Add axes at a place within the view."""
        box = Box(left, top, width, height)
        count = len(self.figure.axes)
        axes = self.figure.add_axes(box.share(SIDE, SIDE), label=f"axes {count}")
        axes.set_zorder(count + 1)
        self.blocks[-1].axes.append((axes, box))
        return axes

    def legend(
        self,
        handles: "Sequence[Artist]",
        names: Sequence[str],
        top: float,
        width: float,
        *,
        handle: float = 14,
    ) -> float:
        """Draw a legend in as many columns as there is room for, with handles of this
        many points, and return where it ends.
        """
        axes = self.axes(0, top, width, 1)
        axes.set_axis_off()
        room = width - handle - 6
        names = [self.lettering.wrapped(name, room, LABEL) for name in names]
        lines = "\n".join(names).splitlines()
        widest = max(width_of(line, LABEL) for line in lines)
        columns = max(1, int((width + 16) / (widest + handle + 5 + 16)))
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
        # The extent of each view with all its labels: left, top, width and height.
        extents = []
        for block in self.blocks:
            boxes = [self.extent(axes) for axes, _ in block.axes]
            left = min(box.left for box in boxes)
            top = min(box.top for box in boxes)
            right = max(box.left + box.width for box in boxes)
            bottom = max(box.bottom for box in boxes)
            extents.append(Box(left, top, right - left, bottom - top))
        width = max(self.room(NARROWEST), *(extent.width for extent in extents))
        wrapped = self.lettering.wrapped
        heads = []
        height = APART * (len(self.blocks) - 1)
        for block, extent in zip(self.blocks, extents, strict=True):
            title = wrapped(block.title, width, TITLE, bold=True).splitlines()
            note = wrapped(block.note, width, LABEL).splitlines()
            head = TITLE_LINE * len(title) + 7
            if note:
                head += NOTE_LINE * len(note) + 3
            heads.append((title, note, head))
            height += head + extent.height
        across, down = width + 2 * EDGE, height + 2 * EDGE
        self.figure.set_size_inches(across / 72, down / 72)
        top = EDGE
        for block, extent, (title, note, head) in zip(
            self.blocks, extents, heads, strict=True
        ):
            self._write(title, top, TITLE_LINE, size=TITLE, weight="bold")
            below = top + TITLE_LINE * len(title) + 2
            self._write(note, below, NOTE_LINE, size=LABEL, color=MUTED)
            top += head
            for axes, box in block.axes:
                left, upper = EDGE + box.left - extent.left, top + box.top - extent.top
                moved = Box(left, upper, box.width, box.height)
                axes.set_position(moved.share(across, down))
            top += extent.height + APART

    def _write(self, lines: list[str], top: float, high: float, **look: Any) -> None:
        """Write lines of text from a height of the paper on."""
        across, down = 72 * self.figure.get_size_inches()
        for place, line in enumerate(lines):
            x, y = EDGE / across, 1 - (top + high * (place + 0.5)) / down
            self.figure.text(x, y, line, va="center_baseline", **look)
