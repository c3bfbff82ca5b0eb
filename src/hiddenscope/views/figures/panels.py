"""Panels on paper: one scatter for each layer, the same points in each."""

from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.views.figures.sheet import Box, Sheet
from hiddenscope.views.figures.style import (
    ACCENT,
    FAINT,
    LABEL,
    MUTED,
    NO_CLASS,
    class_colour,
    width_of,
)
from hiddenscope.views.values import Panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, GAP = 480.0, 10.0
CAPTION = 8.0
# How high a line of a panel's title is, and of the name of a row.
TITLE_LINE, ROW_LINE = (
    11.0,
    13.0,
)
MOST_CLASSES = 40
MOST_VECTORS = 20_000  # with more dots than this a file is quicker to read as pixels


def draw_panels(panels: Panels, sheet: Sheet) -> None:
    """Every panel, wrapped, with its caption; the names of the classes stand above."""
    count = len(panels.sites)
    page = sheet.room(PAGE)
    across = max(1, min(count, int((page + GAP) / ((84 if count > 4 else 110) + GAP))))
    size = min(120.0 if count > 4 else 180.0, (page - GAP * (across - 1)) / across)
    top = _draw_legend(panels, sheet)
    titles = [
        sheet.lettering.wrapped(sheet.lettering.text(site), size, LABEL, bold=True)
        for site in panels.sites
    ]
    lines = max(title.count("\n") + 1 for title in titles)
    row: list[Axes] = []
    for panel in range(count):
        fresh = bool(panels.rows) and (
            panel == 0 or panels.rows[panel] != panels.rows[panel - 1]
        )
        if row and (len(row) == across or fresh):
            top = max(sheet.extent(axes).bottom for axes in row) + GAP
            row = []
        name = (
            sheet.lettering.wrapped(
                sheet.lettering.text(panels.rows[panel]), page, 9, bold=True
            )
            if fresh
            else ""
        )
        if not row:
            top += (
                TITLE_LINE * lines
                + 2
                + (5 + ROW_LINE * len(name.splitlines()) if fresh else 0)
            )
        axes = sheet.axes(Box(len(row) * (size + GAP), top, size, size))
        if fresh:
            above = (0, 7 + TITLE_LINE * lines)
            axes.annotate(
                name,
                (0, 1),
                above,
                "axes fraction",
                "offset points",
                size=9,
                weight="bold",
            )
        axes.set_title(titles[panel], weight="bold", pad=3)
        _draw_panel(panels, panel, axes, size, sheet)
        row.append(axes)


def _draw_legend(panels: Panels, sheet: Sheet) -> float:
    """The classes by their colours; where the panels may begin."""
    from matplotlib.lines import Line2D

    if not (classes := panels.classes):
        return 0.0
    colours = _colours(panels)
    names = [sheet.lettering.text(label) or "∅" for label in classes[:MOST_CLASSES]]
    handles = [
        Line2D(
            [],
            [],
            color=colours[label],
            linestyle="",
            marker="o",
            markersize=5.2,
            markeredgewidth=0,
        )
        for label in classes[:MOST_CLASSES]
    ]
    if len(classes) > MOST_CLASSES:
        names.append(f"and {len(classes) - MOST_CLASSES} more")
        handles.append(Line2D([], [], linestyle=""))
    return sheet.legend(handles, names, Box(0, 0, sheet.room(PAGE), 0), handle=5) + 6


def _draw_panel(
    panels: Panels, panel: int, axes: "Axes", size: float, sheet: Sheet
) -> None:
    lettering = sheet.lettering
    mark = lettering.text(panels.marks[panel], 40) if panels.marks else ""
    beside = width_of(axes.get_title(loc="left").split("\n")[-1], LABEL, bold=True) + 4
    # A name comes first; the frame is the mark's colour anyway.
    if mark and beside + width_of(mark, LABEL) <= size:
        axes.set_title(mark, loc="right", pad=3, color=ACCENT)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=ACCENT if mark else FAINT)
    if panels.captions:
        caption = lettering.wrapped(
            lettering.text(panels.captions[panel].replace("\n", "; ")), size, CAPTION
        )
        axes.set_xlabel(caption, loc="left", size=CAPTION, labelpad=3)
    if panels.messages and panels.messages[panel]:
        message = lettering.wrapped(
            lettering.text(panels.messages[panel], 200), size - 12, LABEL
        )
        axes.text(
            0.5,
            0.5,
            message,
            transform=axes.transAxes,
            color=MUTED,
            size=LABEL,
            ha="center",
            va="center",
        )
        return
    points = panels.points[panel].astype(np.float64)
    there = np.isfinite(points).all(axis=1)
    known = _colours(panels)
    colours = np.array(
        [known[label] for label in panels.labels] or [class_colour(0)] * len(points)
    )
    order = (
        np.argsort([label != panels.grey for label in panels.labels], kind="stable")
        if panels.grey
        else ...
    )
    # Grey points lie beneath the others.
    points, colours, there = (
        points[order],
        colours[order],
        there[order],
    )
    radius, cover = _dots(len(points))
    if there.any():
        axes.set_aspect("equal", adjustable="datalim")  # both axes to one scale
        axes.scatter(
            points[there, 0], points[there, 1], s=(2 * radius) ** 2, c=colours[there].tolist(), alpha=cover,
            linewidths=0, rasterized=len(points) > MOST_VECTORS,
        )  # fmt: skip


def _colours(panels: Panels) -> dict[str, str]:
    """The colour of each class."""
    classes = [
        label for label in panels.classes if not panels.grey or label != panels.grey
    ]
    colours = {label: class_colour(place) for place, label in enumerate(classes)}
    return colours | ({panels.grey: NO_CLASS["light"][0]} if panels.grey else {})


def _dots(count: int) -> tuple[float, float]:
    """The radius of a dot and how much it covers: the more there are, the less."""
    radius = (
        1.9 if count <= 200 else 1.5 if count <= 1500 else 1.1 if count <= 4000 else 0.8
    )
    return radius, 0.88 if count <= 1500 else 0.7 if count <= 4000 else 0.55
