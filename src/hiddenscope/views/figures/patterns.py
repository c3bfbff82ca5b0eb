"""Attention on paper: small multiples of layer by head, and one head large."""

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.views.figures import style
from hiddenscope.views.figures.grid import draw_grid
from hiddenscope.views.figures.sheet import Box, Sheet
from hiddenscope.views.figures.style import Lettering, width_of
from hiddenscope.views.values import Grid, Measure, Patterns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Array: TypeAlias = NDArray[np.float64]

# The width that the small multiples may fill if the paper has none, and their height.
PAGE, HIGHEST = 470.0, 620.0
NARROWEST, WIDEST = 5.0, 34.0
LABEL_APART = 10.0
# Pixels along the side of a small picture; a longer text is thinned to so many.
MOST_PIXELS = 48
# The gap between two pictures, as a share of a cell.
GAP = 0.08


def draw_patterns(view: Patterns, sheet: Sheet) -> None:
    """Draw every head small, and beneath them the large one with its tokens."""
    lettering = sheet.lettering
    names = [lettering.text(site, 40) for site in view.sites]
    left = max(width_of(name, style.LABEL) for name in names) + 8
    room = sheet.room(PAGE) - left
    fitting = min(room / len(view.heads), HIGHEST / len(view.sites))
    side = min(WIDEST, max(NARROWEST, fitting))
    axes = sheet.axes(Box(0, 0, side * len(view.heads), side * len(view.sites)))
    axes.set(xlim=(0, len(view.heads)), ylim=(0, len(view.sites)))
    for row, head in np.argwhere(view.exists):
        _draw_small(axes, view, int(row), int(head))
    _frame(axes, *view.large)
    rows = range(0, len(names), math.ceil(LABEL_APART / side))
    axes.set_yticks([row + 0.5 for row in rows], [names[row] for row in rows])
    widest = max(width_of(head, style.LABEL) for head in view.heads) + 3
    heads = range(0, len(view.heads), math.ceil(widest / side))
    axes.set_xticks([head + 0.5 for head in heads], [view.heads[h] for h in heads])
    axes.tick_params(length=0, pad=4)
    axes.set_xlabel("head", labelpad=2)
    grid = large_grid(view, lettering)
    sheet.begin(grid.title, grid.note)
    draw_grid(grid, sheet)


def _draw_small(axes: "Axes", view: Patterns, row: int, head: int) -> None:
    """Draw one head from 0 to its own largest weight."""
    values = pooled(view.shown(row, head), MOST_PIXELS)
    most = float(np.nanmax(values)) or 1.0
    # What cannot be read stays clear, as in a grid.
    values = np.where(values == 0, np.nan, values)
    edges = (head + GAP / 2, head + 1 - GAP / 2, row + GAP / 2, row + 1 - GAP / 2)
    axes.imshow(
        values,
        cmap=style.colormap("sequential"),
        vmin=0.0,
        vmax=most,
        extent=edges,
        aspect="auto",
        interpolation="nearest",
    )


def _frame(axes: "Axes", row: int, head: int) -> None:
    """Mark the head that is drawn large."""
    from matplotlib.patches import Rectangle

    corner = (head, row)
    axes.add_patch(
        Rectangle(corner, 1, 1, fill=False, edgecolor=style.ACCENT, linewidth=1.2)
    )


def pooled(values: _Array, most: int) -> _Array:
    """Return a pattern with at most so many rows and columns, each the largest of those
    that it stands for.

    >>> pooled(np.arange(16.0).reshape(4, 4), 2).tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    for axis in (0, 1):
        count = values.shape[axis]
        if count > most:
            starts = np.arange(most) * count // most
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def large_grid(view: Patterns, lettering: Lettering) -> Grid:
    """Return the large head as a grid: queries down, keys across."""
    row, head = view.large
    name = "value-weighted attention" if view.weighted else "attention weight"
    values = view.shown(row, head).astype(np.float32)
    # Rows of a grid run up, and a text runs down.
    queries = [lettering.token(query) for query in view.queries[::-1]]
    measure = Measure(name, values[::-1], "L2" if view.weighted else "")
    title = f"What each token reads through {view.name_of(row, head)}"
    return Grid(
        title,
        tuple(queries),
        view.keys,
        (measure,),
        note="Tokens that read run down, and tokens that are read run across.",
        x_name="key",
        y_name="query",
    )
