"""Figures for print: matplotlib draws the views as PNG, SVG and PDF, from the values
that the page draws.

>>> from hiddenscope.views.values import Grid, Measure
>>> norms = Grid("Norms", ("layer.0", "layer.1"), ("The", " cat"), (Measure("norm", [[1.0, 2.0], [3.0, 4.0]]),))
>>> image([norms], ".png")[:4], b"\\xe2\\x90\\xa3cat" in image([norms], ".svg"), image([norms], ".pdf")[:5]
(b'\\x89PNG', True, b'%PDF-')
"""

import io
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from hiddenscope.views.figures.grid import draw_grid
from hiddenscope.views.figures.lines import draw_lines
from hiddenscope.views.figures.panels import draw_panels
from hiddenscope.views.figures.sheet import Sheet
from hiddenscope.views.figures.style import Lettering, settings
from hiddenscope.views.values import Grid, Panels, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format: TypeAlias = Literal[".png", ".svg", ".pdf"]

MOST_PIXELS = 30_000  # on a side
UNDATED = {
    ".png": {"Software": "hiddenscope"},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}

# Matplotlib reads its settings from one table for the whole process.
_ALONE = threading.RLock()


def image(
    views: Sequence[View],
    suffix: Format,
    *,
    dpi: float = 220,
    width: float | None = None,
) -> bytes:
    """The views, one beneath the other, as the bytes of a file; the same views give the
    same bytes.

    A grid shows its first measure. Letters stay letters in SVG and PDF; a PDF carries
    its font along, and has a page for each view. `width` is in inches.
    """
    file = io.BytesIO()
    with _own_settings():
        if suffix == ".pdf" and len(views) > 1:
            return _pages(views, width)
        drawn = _figure(views, Lettering(any_character=suffix == ".svg"), width)
        most = MOST_PIXELS / max(drawn.get_size_inches())
        drawn.savefig(
            file,
            format=suffix[1:],
            dpi=min(dpi, most),
            metadata=UNDATED[suffix],
            facecolor="white",
        )
    return file.getvalue()


def figure(views: Sequence[View], width: float | None = None) -> "Figure":
    """The views, one beneath the other, as a matplotlib figure."""
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
    """The views on ordinary matplotlib axes."""
    sheet = Sheet(lettering, None if width is None else 72 * width)
    for view in views:
        sheet.begin(view.title, view.note)
        if isinstance(view, Grid):
            draw_grid(view, sheet)
        elif isinstance(view, Panels):
            draw_panels(view, sheet)
        else:
            draw_lines(view, sheet)
    sheet.finish()
    return sheet.figure


@contextmanager
def _own_settings() -> Iterator[None]:
    """Nobody's settings but ours, and no warnings of fonts: what they lack has been
    seen to.
    """
    import matplotlib.style

    fonts = logging.getLogger("matplotlib.font_manager")
    with (
        _ALONE,
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
