"""Figures for print: matplotlib draws the views as PNG, SVG and PDF, from the values that the page draws.

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
from typing import Any, Literal, TypeAlias

from hiddenscope.views.figures.grid import plan_grid
from hiddenscope.views.figures.lettering import FAMILY, Lettering
from hiddenscope.views.figures.lines import plan_lines
from hiddenscope.views.figures.panels import plan_panels
from hiddenscope.views.figures.pen import Lead, Pen, Plan
from hiddenscope.views.figures.scale import MUTED
from hiddenscope.views.values import Grid, Panels, View

Format: TypeAlias = Literal[".png", ".svg", ".pdf"]

EDGE, APART = 12.0, 24.0  # around the sheet, and between two views
TITLE, NOTE = 10.5, 7.5
MOST_PIXELS = 30_000  # on a side
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hiddenscope",
    "pdf.fonttype": 42,
    "font.sans-serif": [FAMILY],
}
UNDATED = {".png": {"Software": "hiddenscope"}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

_ALONE = threading.RLock()  # matplotlib reads its settings from one table for the whole process


def image(views: Sequence[View], suffix: Format, *, dpi: float = 220) -> bytes:
    """The views, one beneath the other, as the bytes of a file; the same views give the same bytes.

    A grid shows its first measure. Letters stay letters in SVG and PDF; a PDF carries its font along.
    """
    file = io.BytesIO()
    with _matplotlib_as_it_comes():
        pen = _drawn(views, Lettering(any_character=suffix == ".svg"))
        longest = max(pen.figure.get_size_inches())
        pen.figure.savefig(
            file, format=suffix[1:], dpi=min(dpi, MOST_PIXELS / longest), metadata=UNDATED[suffix], facecolor="white"
        )
    return file.getvalue()


@contextmanager
def _matplotlib_as_it_comes() -> Iterator[None]:
    """Nobody's settings but ours, and no word on fonts: what one lacks has been seen to."""
    import matplotlib.style

    fonts = logging.getLogger("matplotlib.font_manager")
    with _ALONE, matplotlib.style.context(["default", LOOK]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        level = fonts.level
        fonts.setLevel(logging.ERROR)
        try:
            yield
        finally:
            fonts.setLevel(level)


def _drawn(views: Sequence[View], lettering: Lettering) -> Pen:
    plans = [_plan(view, lettering) for view in views]
    width = max(plan.width for plan in plans)
    blocks = [_head(view, lettering, width) for view in views]
    heights = [head + plan.height for (_, _, head), plan in zip(blocks, plans, strict=True)]
    pen = Pen(width + 2 * EDGE, sum(heights) + APART * (len(views) - 1) + 2 * EDGE, lettering)
    pen.axes.set_xlim(-EDGE, width + EDGE)
    top = EDGE
    for (title, note, head), plan, height in zip(blocks, plans, heights, strict=True):
        pen.text(title, 0, top + 6, Lead(size=TITLE, bold=True))
        for place, line in enumerate(note):
            pen.text(line, 0, top + 21 + 10 * place, Lead(MUTED, NOTE))
        plan.paint(pen, top + head)
        top += height + APART
    return pen


def _plan(view: View, lettering: Lettering) -> Plan:
    if isinstance(view, Grid):
        return plan_grid(view, lettering)
    return plan_panels(view, lettering) if isinstance(view, Panels) else plan_lines(view, lettering)


def _head(view: View, lettering: Lettering, width: float) -> tuple[str, list[str], float]:
    """The title, the note in lines, and how much room both take."""
    title = lettering.fitted(lettering.text(view.title, 200), width, TITLE, bold=True)
    note = lettering.wrapped(lettering.text(view.note, 600), width, NOTE)
    return title, note, 20.0 + 10 * len(note) + (3 if note else 0)
