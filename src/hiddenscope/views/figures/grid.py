"""Cells on paper: the grid, tokens across and layers up, and attention, small multiples
of layer by head and one head large.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results.pictures import Grid, Measure, Patterns
from hiddenscope.views.figures import style
from hiddenscope.views.figures.style import Lettering, number, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    from hiddenscope.views.figures.pages import Sheet

_Array: TypeAlias = NDArray[np.float64]
_Flags: TypeAlias = NDArray[np.bool_]

# The width that a grid fills if the paper has none.
PAGE = 470.0
# The label of a token is cut here.
LONGEST_LABEL = 100.0
# Names of models begin alike, and would look the same where they are cut.
LONGEST_NAME = 220.0
# Beyond this a grid grows no further: its cells get thinner, and only some are
# labelled.
LONGEST = 760.0
LABEL_APART = 10.0
# How wide the scale of colours is, and how high a line above it.
KEY, KEY_LINE = 190.0, 10.0
# Room for what the dot means, beside the name of the scale.
ZERO_MARK = 60.0
NARROWEST_CELL, NARROWEST_WORD_CELL = 10.5, 44.0
WIDEST_CELL, WIDEST_WORD_CELL = 60.0, 80.0
LOWEST_WORD_CELL = 7.0
# How wide a column of bars is, and how much of its cell a bar fills.
BAR_WIDTH, BAR_SHARE = 70.0, 0.7
FEW_SITES = 14
HIGH_CELL, LOW_CELL = 14.0, 11.0
# All lines of tokens together; a longer text gets thinner cells instead.
HIGHEST = 700.0
# With more cells than this a file is quicker to read as pixels.
MOST_VECTORS = 20_000
# With more cells than this, marks would only be a pattern.
MOST_MARKS = 2_000
# A log scale reaches this far below its top.
DECADES = 1e-6
# A log scale of differences is linear below this share of its top.
BEND = 1e-4
# The brightness of a colour as the eye has it, and from where on ink is dark.
BRIGHTNESS, LIGHT = (0.299, 0.587, 0.114), 140 / 255
# How high all small pictures of heads may be, and how wide each.
HIGHEST_HEADS, NARROWEST_HEAD, WIDEST_HEAD = 620.0, 3.0, 34.0
# Cells of the large head are at most this wide, and all of its rows this high.
WIDEST_LARGE_CELL, HIGHEST_LARGE = 26.0, 470.0
LONGEST_HEAD_LABEL = 90.0
# Pixels along the side of a small picture; a longer text is thinned to this many.
MOST_PIXELS = 48
READING = (
    "Tokens that read run down, and tokens that are read run across. Each small picture"
    " above runs from 0 to its own largest weight."
)
# The gap between two pictures, as a share of a cell.
GAP = 0.08


def draw_grid(grid: Grid, sheet: "Sheet") -> None:
    """Draw the grid's first measure, with its words where it has some, and what the
    colours mean.

    A text that is too long for the page goes on beneath itself, as lines of a book do.
    """
    lettering = sheet.lettering
    measure = grid.measures[0]
    painted, colours = _colours_of(measure)
    cells = len(grid.tokens) - grid.bars
    is_zero = (measure.numbers == 0) & (grid.words is None)
    colours[:, :cells][is_zero[:, :cells]] = (1, 1, 1, 0)
    longest = LONGEST_LABEL if grid.x_name == "token" else LONGEST_NAME
    first = _fitted_labels(grid.tokens, lettering, longest, grid.x_name)
    second = _fitted_labels(grid.second, lettering, longest, grid.x_name)
    label = max(width_of(token, style.LABEL) for token in (*first, *second)) + 5
    # Names stand at the left of the cells, and a turned token reaches as far.
    row_names = grid.token_rows or ("first", "second")
    left = max(width_of(site[:40], style.LABEL) for site in grid.sites)
    if second:
        widest = max(width_of(name, style.SMALL) for name in row_names)
        left = max(left, min(widest, LONGEST_LABEL))
    room = sheet.room(PAGE) - max(left + 8, 0.75 * label) - BAR_WIDTH * grid.bars
    lines, wide, high = _layout(grid, room, label, fixed=sheet.width is not None)
    top = bottom = 0.0
    for here in lines:
        # Where columns begin and end, in widths of a cell: bars are wider.
        widths = np.ones(here.stop - here.start)
        widths[len(widths) - grid.bars :] = BAR_WIDTH / wide
        edges = np.concatenate([[0.0], np.cumsum(widths)])
        axes = sheet.axes(0, top, wide * edges[-1], high * len(grid.sites))
        axes.set(xlim=(0, edges[-1]), ylim=(0, len(grid.sites)))
        shown = slice(here.start, min(here.stop, cells))
        _draw_cells(axes, measure, colours, is_zero, shown, min(wide, high))
        # Words of thinner rows would stand on one another.
        if high >= LOWEST_WORD_CELL:
            _write_words(axes, grid, colours, here, wide, lettering)
        # A line where a text ends and the next begins has paper on both sides.
        for column, (before, after) in enumerate(pairwise(grid.text_of[here]), 1):
            for colour, width in ((style.PAPER, 2.4), (style.INK, 0.8)):
                if before != after:
                    ends_at = {"ymin": -0.02, "ymax": 1.02, "clip_on": False}
                    axes.axvline(column, color=colour, linewidth=width, **ends_at)
        if grid.bars:
            _draw_bars(axes, grid, colours, edges)
        rows = range(0, len(grid.sites), math.ceil(LABEL_APART / high))
        sites = [lettering.text(grid.sites[row], 40) for row in rows]
        axes.set_yticks([row + 0.5 for row in rows], sites)
        axes.tick_params("y", length=0, pad=5, labelsize=style.LABEL)
        upper, lower = (first, second) if second else ([], first)
        middles = (edges[:-1] + edges[1:]) / 2
        _label_tokens(axes, upper[here], lower[here], middles, wide, label)
        for name, corner, away in zip(row_names, (1, 0), (8, -8), strict=True):
            if second:
                name = lettering.fitted(
                    lettering.text(name), LONGEST_LABEL, style.SMALL
                )
                style.note(axes, name, (0, corner), (-5, away), "right", "center")
        bottom = sheet.extent(axes).bottom
        # The labels of a second row stand above the next line.
        top = bottom + 8 + (label if second else 0)
    draw_key(measure, painted, sheet, bottom, min(KEY, room), zero=bool(is_zero.any()))


def _fitted_labels(
    tokens: Sequence[str | None], lettering: Lettering, room: float, name: str = "token"
) -> list[str]:
    labels = []
    for token in tokens:
        label = lettering.token(token)
        if name != "token":
            label = lettering.text(token or "")
        labels.append(lettering.fitted(label, room, style.LABEL))
    return labels


def _layout(
    grid: Grid, room: float, label: float, *, fixed: bool
) -> tuple[list[slice], float, float]:
    """Return the columns of each line of tokens, and the width and height of a cell.

    A grid of pairs of sites, with bars, or of very many tokens, stays in one line.
    Cells are as wide as the page allows, within reason; labels that nearly fit get the
    room they need. A page of a `fixed` width does not grow with them.
    """
    count, sites = len(grid.tokens), len(grid.sites)
    narrowest = NARROWEST_WORD_CELL if grid.words else NARROWEST_CELL
    most = max(1, int(room / narrowest))
    lines = math.ceil(count / most)
    is_of_sites = grid.tokens[:sites] == grid.sites or grid.bars > 0
    is_too_high = lines * (sites * LOW_CELL + label) > HIGHEST
    if lines == 1 or is_of_sites or (is_too_high and not grid.words):
        most = count
    starts = range(0, count, most)
    columns = [slice(start, min(start + most, count)) for start in starts]
    high = HIGH_CELL if grid.words or sites <= FEW_SITES else LOW_CELL
    high = min(high, max(LONGEST / sites, 0.5))
    cells = min(most, count) - grid.bars
    share = room / cells
    if grid.words:
        return columns, min(WIDEST_WORD_CELL, max(narrowest, share)), high
    narrowest = min(narrowest, LONGEST / cells)
    if fixed or grid.bars:
        narrowest = min(narrowest, max(share, 0.1))
    wide = max(narrowest, share)
    if label <= min(WIDEST_CELL, share * 1.02):
        wide = max(wide, label)
    return columns, min(WIDEST_CELL, wide), high


def _colours_of(measure: Measure) -> "tuple[ScalarMappable, _Array]":
    """Return what paints a measure, and the colour of each cell."""
    from matplotlib.cm import ScalarMappable

    painted = ScalarMappable(norm_of(measure), style.colormap(measure.meaning))
    values = measure.numbers.astype(np.float64)
    if measure.each_layer:
        # A value is coloured by its place on the scale of its layer.
        whole_scale = replace(measure, influence=None, each_layer=False, limits=None)
        for row in values:
            layer = replace(whole_scale, values=row[None])
            placed = norm_of(layer)(layer.numbers[0].astype(np.float64))
            row[:] = np.ma.filled(placed, np.nan)
    return painted, painted.to_rgba(values)


def norm_of(measure: Measure) -> "Normalize":
    """Return the values at both ends of the colours, and whether they run evenly or by
    their logarithm.

    A scale of amounts begins at zero, or on a log scale at the smallest amount there
    is; one of differences reaches as far down as up.
    """
    from matplotlib.colors import FuncNorm, LogNorm, Normalize

    if measure.each_layer:
        return Normalize(0, 1)
    low, high = ends(measure.numbers.astype(np.float64), measure)
    if low == high and measure.meaning == "diverging":
        return Normalize(-1.0, 1.0, clip=True)
    if low == high:
        return Normalize(low, low + 1, clip=True)
    if measure.scale == "log" and measure.meaning == "diverging":
        bend = max(-low, high) * BEND
        functions = (
            lambda value: np.sign(value) * np.log1p(np.abs(value) / bend),
            lambda place: np.sign(place) * np.expm1(np.abs(place)) * bend,
        )
        return FuncNorm(functions, low, high, clip=True)
    if measure.scale == "log" and low > 0:
        return LogNorm(low, high, clip=True)
    return Normalize(low, high, clip=True)


def ends(values: _Array, measure: Measure) -> tuple[float, float]:
    """Return the smallest and the largest value that colours can tell apart."""
    if measure.limits is not None:
        return measure.limits
    finite = values[np.isfinite(values)]
    sizes = np.abs(finite)
    if measure.meaning == "diverging":
        largest = float(sizes.max(initial=0.0))
        return -largest, largest
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if measure.scale == "log" and high > 0:
        return max(float(sizes[sizes > 0].min()), high * DECADES), high
    return min(0.0, low), max(0.0, high)


def _draw_cells(
    axes: "Axes",
    measure: Measure,
    colours: _Array,
    is_zero: _Flags,
    here: slice,
    smaller: float,
) -> None:
    """Draw some columns of cells, and marks for what is missing or exactly zero, while
    these are few enough to be looked at one by one.
    """
    colours = colours[:, here]
    has_seams = smaller >= 8
    axes.pcolormesh(
        colours,
        edgecolors="white" if has_seams else "face",
        # Cells without seams overlap, or some viewers show the paper between them.
        linewidth=0.5 if has_seams else min(0.4, smaller / 4),
        antialiased=True,
        rasterized=colours.shape[0] * colours.shape[1] > MOST_VECTORS,
    )
    marks: list[tuple[_Flags, Any, float, str]] = [
        (np.isnan(measure.numbers), (2, 2, -45), smaller - 4, style.FAINT),
        (is_zero, ".", 2.4, style.MUTED),
    ]
    for cells, marker, size, colour in marks:
        rows, columns = np.nonzero(cells[:, here])
        if smaller > 6 and 0 < len(rows) <= MOST_MARKS:
            look = {"marker": marker, "markersize": size, "color": colour}
            axes.plot(columns + 0.5, rows + 0.5, linestyle="", mew=0.6, **look)


def _draw_bars(axes: "Axes", grid: Grid, colours: _Array, edges: _Array) -> None:
    """Draw the last columns as bars that begin in the middle of their column; the
    longest is the largest number of the grid.
    """
    measure = grid.measures[0]
    low, high = ends(measure.numbers.astype(np.float64), measure)
    most = max(abs(low), abs(high)) or 1.0
    for column in range(len(grid.tokens) - grid.bars, len(grid.tokens)):
        values = np.nan_to_num(measure.numbers[:, column].astype(np.float64))
        middle = (edges[column] + edges[column + 1]) / 2
        reach = 0.46 * (edges[column + 1] - edges[column])
        axes.barh(
            np.arange(len(values)) + 0.5,
            values / most * reach,
            left=middle,
            height=BAR_SHARE,
            color=[tuple(colour) for colour in colours[:, column]],
        )
        axes.plot([middle] * 2, [0, len(values)], color=style.MUTED, linewidth=0.6)


def _write_words(
    axes: "Axes",
    grid: Grid,
    colours: _Array,
    here: slice,
    wide: float,
    lettering: Lettering,
) -> None:
    """Write the first word of every cell, in an ink that can be read on its colour;
    framed where it is settled.
    """
    from matplotlib.patches import Rectangle

    words = grid.words
    if words is None:
        return
    settled, top_words = words.settled_rows()[here], words.chosen[:, here, 0]
    for row, column in np.argwhere(top_words >= 0):
        word = lettering.token(words.words[top_words[row, column]], 30)
        *colour, alpha = colours[:, here][row, column]
        is_light = float(np.array(colour) @ BRIGHTNESS) > LIGHT or alpha == 0
        ink = style.INK if is_light else style.PAPER
        if words.framed and row == settled[column]:
            corner = (column + 0.03, row + 0.1)
            axes.add_patch(
                Rectangle(corner, 0.94, 0.8, fill=False, linewidth=0.9, edgecolor=ink)
            )
        axes.text(
            column + 0.5,
            row + 0.5,
            lettering.fitted(word, wide - 5, style.SMALL),
            color=ink,
            size=style.SMALL,
            ha="center",
            va="center_baseline",
            in_layout=False,
        )


def _label_tokens(
    axes: "Axes",
    upper: list[str],
    lower: list[str],
    middles: _Array,
    wide: float,
    label: float,
) -> None:
    """Write the tokens below, and where there are two texts those of the first above;
    turned where they do not fit.
    """
    step = math.ceil(LABEL_APART / wide)
    places = middles[::step]
    below: dict[str, Any] = {"ha": "center"}
    above = below
    turn = 0
    if label > wide:
        turn = 45 if wide >= 1.8 * style.LABEL else 90
        below = {"ha": "right", "va": "center"}
        above = {"ha": "left", "va": "center"}
    look: dict[str, Any] = {
        "rotation": turn,
        "rotation_mode": "anchor",
        "color": style.INK,
        "size": style.LABEL,
    }
    axes.set_xticks(places, lower[::step], **look, **below)
    axes.tick_params("x", length=0, pad=4)
    if upper:
        top = axes.secondary_xaxis("top")
        top.set_xticks(places, upper[::step], **look, **above)
        top.tick_params("x", length=0, pad=4)


def draw_key(
    measure: Measure,
    painted: "ScalarMappable",
    sheet: "Sheet",
    above: float,
    wide: float,
    *,
    zero: bool,
) -> None:
    """Draw what the colours mean: a bar, its ticks, its name and its unit."""
    lettering = sheet.lettering
    unit = f" ({lettering.text(measure.unit)})" if measure.unit else ""
    room = wide - ZERO_MARK if zero else wide
    name = f"{lettering.text(measure.name)}{unit}"
    name = lettering.wrapped(name, room, style.LABEL)
    top = above + 8 + KEY_LINE * (name.count("\n") + 1)
    axes = sheet.axes(0, top, wide, 7)
    bar = sheet.figure.colorbar(
        painted, cax=axes, orientation="horizontal", format=number
    )
    assert bar.solids is not None
    # Without edges, some viewers show lines between the colours.
    bar.solids.set_edgecolor("face")
    bar.outline.set(edgecolor=style.FAINT, linewidth=0.6, visible=True)
    bar.minorticks_off()
    low, high = painted.get_clim()
    assert low is not None
    assert high is not None
    is_diverging = measure.meaning == "diverging"
    if measure.each_layer:
        lowest = "−most" if is_diverging else "least"
        bar.set_ticks([0, 1], labels=[lowest, "most of its layer"])
        left, right = bar.ax.get_xticklabels()
        left.set_horizontalalignment("left")
        right.set_horizontalalignment("right")
    elif measure.scale == "log" and is_diverging and high > 0:
        bar.set_ticks([float(f"{part * high:.2g}") for part in (-1, -0.01, 0, 0.01, 1)])
    elif measure.scale == "log" and low > 0:
        bar.ax.xaxis.set_major_locator(style.log_ticks(low, high, 4))
    else:
        bar.ax.xaxis.set_major_locator(style.linear_ticks(4))
    axes.tick_params("x", length=2.5, labelsize=style.SMALL)
    if zero:
        style.note(axes, "·  exactly 0", (1, 1), (0, 4), "right", "bottom")
    axes.set_title(name, color=style.MUTED, pad=3)


def draw_patterns(view: Patterns, sheet: "Sheet") -> None:
    """Draw every head small, and beneath them the large one with its tokens."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Rectangle

    names = [sheet.lettering.text(site, 40) for site in view.sites]
    left = max(width_of(name, style.LABEL) for name in names) + 8
    room = sheet.room(PAGE) - left
    fitting = min(room / len(view.heads), HIGHEST_HEADS / len(names))
    side = min(WIDEST_HEAD, max(NARROWEST_HEAD, fitting))
    axes = sheet.axes(0, 0, side * len(view.heads), side * len(names))
    axes.set(xlim=(0, len(view.heads)), ylim=(0, len(names)))
    for row, head in np.argwhere(view.exists):
        values = pooled(view.shown(int(row), int(head)), MOST_PIXELS)
        most = float(np.nanmax(values)) or 1.0
        edges = (head + GAP / 2, head + 1 - GAP / 2, row + GAP / 2, row + 1 - GAP / 2)
        _draw_image(axes, values, edges, vmin=0.0, vmax=most)
    # The frame of a large head at the edge reaches over the edge.
    row, head = view.large
    frame = Rectangle((head, row), 1, 1, fill=False, edgecolor=style.ACCENT)
    frame.set(linewidth=1.2, clip_on=False)
    axes.add_patch(frame)
    every = math.ceil(LABEL_APART / side)
    axes.set_yticks(_middles(names, every), names[::every])
    widest = max(width_of(name, style.LABEL) for name in view.heads) + 3
    every = math.ceil(widest / side)
    axes.set_xticks(_middles(view.heads, every), view.heads[::every])
    axes.tick_params(length=0, pad=4)
    axes.set_xlabel("head", labelpad=2)
    name = view.name_of(*view.large)
    sheet.begin(f"What each token reads through {name}", READING)
    # The large head, in square cells, with as many tokens as there is room for.
    queries = _fitted_labels(view.queries, sheet.lettering, LONGEST_HEAD_LABEL)
    keys = _fitted_labels(view.keys, sheet.lettering, LONGEST_HEAD_LABEL)
    left = max(width_of(query, style.LABEL) for query in queries) + 8
    label = max(width_of(key, style.LABEL) for key in keys)
    room = sheet.room(PAGE) - left
    fitting = min(room / len(keys), HIGHEST_LARGE / len(queries))
    side = min(WIDEST_LARGE_CELL, fitting)
    axes = sheet.axes(0, 0, side * len(keys), side * len(queries))
    # A text runs down, and the axes of a figure run up.
    axes.set(xlim=(0, len(keys)), ylim=(len(queries), 0))
    weights = view.shown(*view.large).astype(np.float32)
    measure = Measure("attention weight", weights)
    if view.weighted:
        measure = Measure("value-weighted attention", weights, "L2")
    norm = norm_of(measure)
    _draw_image(axes, measure.numbers, (0, len(keys), len(queries), 0), norm=norm)
    axes.spines[:].set(visible=True)
    every = math.ceil(LABEL_APART / side)
    axes.set_yticks(_middles(queries, every), queries[::every])
    turn = 90 if label > side else 0
    axes.set_xticks(_middles(keys, every), keys[::every], rotation=turn)
    axes.tick_params(
        length=0, pad=4, labelcolor=style.INK, labeltop=True, labelbottom=False
    )
    bottom = sheet.extent(axes).bottom
    painted = ScalarMappable(norm, style.colormap("sequential"))
    draw_key(measure, painted, sheet, bottom, min(KEY, room), zero=False)


def _draw_image(
    axes: "Axes",
    values: NDArray[Any],
    edges: tuple[float, float, float, float],
    **scale: Any,
) -> None:
    """Draw one head; what cannot be read stays clear, as in a grid."""
    axes.imshow(
        np.where(values == 0, np.nan, values),
        cmap=style.colormap("sequential"),
        extent=edges,
        aspect="auto",
        interpolation="nearest",
        **scale,
    )


def pooled(values: _Array, most: int) -> _Array:
    """Return a pattern with at most this many rows and columns, each the largest of
    those that it stands for.

    >>> pooled(np.arange(16.0).reshape(4, 4), 2).tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    for axis in (0, 1):
        count = values.shape[axis]
        if count > most:
            starts = np.arange(most) * count // most
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def _middles(names: Sequence[str], every: int) -> _Array:
    """Return where every n-th name stands, in the middle of its cell."""
    return np.arange(0.5, len(names), every, dtype=np.float64)
