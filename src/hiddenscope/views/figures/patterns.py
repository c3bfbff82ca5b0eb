"""Attention on paper: small multiples of layer by head, and one head large."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results.pictures import Measure, Patterns
from hiddenscope.views.figures import style
from hiddenscope.views.figures.grid import KEY, draw_key, norm_of
from hiddenscope.views.figures.sheet import Box, Sheet
from hiddenscope.views.figures.style import Lettering, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Array: TypeAlias = NDArray[np.float64]

# The width that the small multiples may fill if the paper has none, and their height.
PAGE, HIGHEST = 470.0, 620.0
NARROWEST, WIDEST = 3.0, 34.0
# Cells of the large head are at most so wide, and all of its rows at most so high.
WIDEST_CELL, HIGHEST_LARGE = 26.0, 470.0
LONGEST_LABEL = 90.0
LABEL_APART = 10.0
# Pixels along the side of a small picture; a longer text is thinned to so many.
MOST_PIXELS = 48
READING = (
    "Tokens that read run down, and tokens that are read run across. Each small picture"
    " above runs from 0 to its own largest weight."
)
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
    every = math.ceil(LABEL_APART / side)
    axes.set_yticks(_middles(names, every), names[::every])
    widest = max(width_of(head, style.LABEL) for head in view.heads) + 3
    every = math.ceil(widest / side)
    axes.set_xticks(_middles(view.heads, every), view.heads[::every])
    axes.tick_params(length=0, pad=4)
    axes.set_xlabel("head", labelpad=2)
    name = view.name_of(*view.large)
    sheet.begin(f"What each token reads through {name}", READING)
    _draw_large(view, sheet)


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

    frame = Rectangle((head, row), 1, 1, fill=False, edgecolor=style.ACCENT)
    # The frame of a head at the edge reaches over the edge.
    frame.set(linewidth=1.2, clip_on=False)
    axes.add_patch(frame)


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


def _draw_large(view: Patterns, sheet: Sheet) -> None:
    """Draw the large head in square cells, with as many tokens as there is room for."""
    from matplotlib.cm import ScalarMappable

    queries = _labels(view.queries, sheet.lettering)
    keys = _labels(view.keys, sheet.lettering)
    left = max(width_of(query, style.LABEL) for query in queries) + 8
    label = max(width_of(key, style.LABEL) for key in keys)
    room = sheet.room(PAGE) - left
    fitting = min(room / len(keys), HIGHEST_LARGE / len(queries))
    side = min(WIDEST_CELL, fitting)
    axes = sheet.axes(Box(0, 0, side * len(keys), side * len(queries)))
    # A text runs down, and the axes of a figure run up.
    axes.set(xlim=(0, len(keys)), ylim=(len(queries), 0))
    measure = _large_measure(view)
    norm, colours = norm_of(measure), style.colormap(measure.meaning)
    values = np.where(measure.numbers == 0, np.nan, measure.numbers)
    axes.imshow(
        values,
        cmap=colours,
        norm=norm,
        extent=(0, len(keys), len(queries), 0),
        aspect="auto",
        interpolation="nearest",
    )
    axes.spines[:].set(visible=True)
    every = math.ceil(LABEL_APART / side)
    axes.set_yticks(_middles(queries, every), queries[::every])
    turn = 90 if label > side else 0
    axes.set_xticks(_middles(keys, every), keys[::every], rotation=turn)
    axes.tick_params(
        length=0, pad=4, labelcolor=style.INK, labeltop=True, labelbottom=False
    )
    bottom = sheet.extent(axes).bottom
    painted = ScalarMappable(norm, colours)
    draw_key(measure, painted, sheet, bottom, min(KEY, room), zero=False)


def _middles(names: Sequence[str], every: int) -> _Array:
    """Return where every so many of the names stand, in the middle of their cells."""
    return np.arange(0.5, len(names), every, dtype=np.float64)


def _labels(tokens: tuple[str, ...], lettering: Lettering) -> list[str]:
    """Return tokens as labels that are not too long."""
    labels = []
    for token in tokens:
        label = lettering.fitted(lettering.token(token), LONGEST_LABEL, style.LABEL)
        labels.append(label)
    return labels


def _large_measure(view: Patterns) -> Measure:
    """Return what the large head shows, with the name and unit of its numbers."""
    values = view.shown(*view.large).astype(np.float32)
    if view.weighted:
        return Measure("value-weighted attention", values, "L2")
    return Measure("attention weight", values)
