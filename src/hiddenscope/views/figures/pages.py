"""Figures for print: matplotlib draws the views as PNG, SVG and PDF, from the values
that the page draws.

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
from typing import TYPE_CHECKING, Literal, TypeAlias

from hiddenscope.results.pictures import Grid, Panels, Patterns, View
from hiddenscope.views.figures.grid import draw_grid
from hiddenscope.views.figures.lines import draw_lines
from hiddenscope.views.figures.panels import draw_panels
from hiddenscope.views.figures.patterns import draw_patterns
from hiddenscope.views.figures.sheet import Sheet
from hiddenscope.views.figures.style import Lettering, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FigureFormat: TypeAlias = Literal[".png", ".svg", ".pdf"]

# On the longer side of a PNG.
MOST_PIXELS = 30_000
UNDATED = {
    ".png": {"Software": "hiddenscope"},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}

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
    file = io.BytesIO()
    with _own_settings():
        if suffix == ".pdf" and len(views) > 1:
            return _pages(views, width)
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
        return _figure(views, Lettering(any_character=False), width)


def _pages(views: Sequence[View], width: float | None) -> bytes:
    from matplotlib.backends.backend_pdf import PdfPages

    file = io.BytesIO()
    with PdfPages(file, metadata=UNDATED[".pdf"]) as pages:
        for view in views:
            drawn = _figure([view], Lettering(any_character=False), width)
            pages.savefig(drawn, facecolor="white")
    return file.getvalue()


def _figure(
    views: Sequence[View], lettering: Lettering, width: float | None = None
) -> "Figure":
    sheet = Sheet(lettering, None if width is None else 72 * width)
    for view in views:
        sheet.begin(view.title, view.note)
        if isinstance(view, Grid):
            draw_grid(view, sheet)
        elif isinstance(view, Panels):
            draw_panels(view, sheet)
        elif isinstance(view, Patterns):
            draw_patterns(view, sheet)
        else:
            draw_lines(view, sheet)
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
