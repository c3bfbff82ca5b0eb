"""Panels on paper: one scatter for each layer, the same points in each."""

from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.results.pictures import Panels
from hiddenscope.views.figures.style import (
    ACCENT,
    FAINT,
    LABEL,
    MUTED,
    NO_CLASS,
    class_colour,
    width_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hiddenscope.views.figures.pages import Sheet

PAGE, GAP = 480.0, 10.0
# This many panels may be larger.
FEW = 4
NARROWEST, WIDEST = 84.0, 120.0
NARROWEST_OF_FEW, WIDEST_OF_FEW = 110.0, 180.0
CAPTION = 8.0
ROW_NAME = 9
# How high a line of a panel's title is, and of the name of a row.
TITLE_LINE, ROW_LINE = 11.0, 13.0
MOST_CLASSES = 40
# With more dots than this a file is quicker to read as pixels.
MOST_VECTORS = 20_000


def draw_panels(panels: Panels, sheet: "Sheet") -> None:
    """Draw every panel, wrapped, with its caption; the classes stand above."""
    count, page, lettering = len(panels.sites), sheet.room(PAGE), sheet.lettering
    narrowest, widest = NARROWEST, WIDEST
    if count <= FEW:
        narrowest, widest = NARROWEST_OF_FEW, WIDEST_OF_FEW
    across = max(1, min(count, int((page + GAP) / (narrowest + GAP))))
    size = min(widest, (page - GAP * (across - 1)) / across)
    titles = [
        lettering.wrapped(lettering.text(site), size, LABEL, bold=True)
        for site in panels.sites
    ]
    title_height = TITLE_LINE * max(title.count("\n") + 1 for title in titles)
    top = _draw_legend(panels, sheet)
    row: list[Axes] = []
    for panel in range(count):
        begins_row = bool(panels.rows) and (
            panel == 0 or panels.rows[panel] != panels.rows[panel - 1]
        )
        if row and (len(row) == across or begins_row):
            top = max(sheet.extent(axes).bottom for axes in row) + GAP
            row = []
        name = ""
        if begins_row:
            name = lettering.text(panels.rows[panel])
            name = lettering.wrapped(name, page, ROW_NAME, bold=True)
        if not row:
            top += title_height + 2
        if begins_row:
            top += 5 + ROW_LINE * len(name.splitlines())
        axes = sheet.axes(len(row) * (size + GAP), top, size, size)
        if begins_row:
            axes.annotate(
                name,
                (0, 1),
                (0, 7 + title_height),
                "axes fraction",
                "offset points",
                size=ROW_NAME,
                weight="bold",
            )
        axes.set_title(titles[panel], weight="bold", pad=3)
        _draw_panel(panels, panel, axes, size, sheet)
        row.append(axes)


def _draw_legend(panels: Panels, sheet: "Sheet") -> float:
    """Draw the classes by their colours, and return where the panels may begin."""
    from matplotlib.lines import Line2D

    classes = panels.classes
    if not classes:
        return 0.0
    colours = _colours(panels)
    names, handles = [], []
    for label in classes[:MOST_CLASSES]:
        names.append(sheet.lettering.text(label) or "∅")
        handles.append(
            Line2D(
                [],
                [],
                color=colours[label],
                linestyle="",
                marker="o",
                markersize=5.2,
                markeredgewidth=0,
            )
        )
    if len(classes) > MOST_CLASSES:
        names.append(f"and {len(classes) - MOST_CLASSES} more")
        handles.append(Line2D([], [], linestyle=""))
    return sheet.legend(handles, names, 0, sheet.room(PAGE), handle=5) + 6


def _draw_panel(
    panels: Panels, panel: int, axes: "Axes", size: float, sheet: "Sheet"
) -> None:
    lettering = sheet.lettering
    mark = lettering.text(panels.marks[panel], 40) if panels.marks else ""
    # Where both do not fit, the title stays: the frame has the mark's colour anyway.
    last_line = axes.get_title(loc="left").split("\n")[-1]
    beside = width_of(last_line, LABEL, bold=True) + 4
    if mark and beside + width_of(mark, LABEL) <= size:
        axes.set_title(mark, loc="right", pad=3, color=ACCENT)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=ACCENT if mark else FAINT)
    if panels.captions:
        caption = lettering.text(panels.captions[panel].replace("\n", "; "))
        caption = lettering.wrapped(caption, size, CAPTION)
        axes.set_xlabel(caption, loc="left", size=CAPTION, labelpad=3)
    if panels.messages and panels.messages[panel]:
        message = lettering.text(panels.messages[panel], 200)
        axes.text(
            0.5,
            0.5,
            lettering.wrapped(message, size - 12, LABEL),
            transform=axes.transAxes,
            color=MUTED,
            size=LABEL,
            ha="center",
            va="center",
        )
    else:
        _scatter(panels, panel, axes)


def _scatter(panels: Panels, panel: int, axes: "Axes") -> None:
    points = panels.points[panel].astype(np.float64)
    colours = np.array([class_colour(0)] * len(points))
    if panels.labels:
        colour_of = _colours(panels)
        colours = np.array([colour_of[label] for label in panels.labels])
    if panels.grey:
        # Grey points lie beneath the others.
        is_coloured = [label != panels.grey for label in panels.labels]
        order = np.argsort(is_coloured, kind="stable")
        points, colours = points[order], colours[order]
    finite = np.isfinite(points).all(axis=1)
    if not finite.any():
        return
    # The more dots there are, the smaller and the fainter each is.
    count, radius, alpha = len(points), 1.9, 0.88
    for most, smaller, fainter in (
        (200, 1.5, 0.88),
        (1500, 1.1, 0.7),
        (4000, 0.8, 0.55),
    ):
        if count > most:
            radius, alpha = smaller, fainter
    # Both axes have one scale, so that distances can be compared.
    axes.set_aspect("equal", adjustable="datalim")
    axes.scatter(
        points[finite, 0],
        points[finite, 1],
        s=(2 * radius) ** 2,
        c=colours[finite].tolist(),
        alpha=alpha,
        linewidths=0,
        rasterized=len(points) > MOST_VECTORS,
    )


def _colours(panels: Panels) -> dict[str, str]:
    """Return the colour of each class; grey uses up none of them."""
    # A label may be empty where there is no grey.
    classes = [name for name in panels.classes if name != panels.grey or not name]
    colours = {label: class_colour(place) for place, label in enumerate(classes)}
    if panels.grey:
        colours[panels.grey] = NO_CLASS
    return colours
