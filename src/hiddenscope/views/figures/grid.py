"""The grid on paper: tokens across, layers up."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results.pictures import Grid, Measure
from hiddenscope.views.figures import style
from hiddenscope.views.figures.sheet import Box, Sheet
from hiddenscope.views.figures.style import Lettering, number, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

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


class CellSize(NamedTuple):
    """The size of every cell, in points."""

    wide: float
    high: float


def draw_grid(grid: Grid, sheet: Sheet) -> None:
    """Draw the grid's first measure, with its words where it has some, and what the
    colours mean.

    A text that is too long for the page goes on beneath itself, as lines of a book do.
    """
    from matplotlib.cm import ScalarMappable

    measure = grid.measures[0]
    painted = ScalarMappable(norm_of(measure), style.colormap(measure.meaning))
    values = _values_to_colour(measure)
    is_zero = (measure.numbers == 0) & (grid.words is None)
    first = _token_labels(grid.tokens, sheet.lettering, grid.x_name)
    second = _token_labels(grid.second, sheet.lettering, grid.x_name)
    label = max(width_of(token, style.LABEL) for token in (*first, *second)) + 5
    room = _room(grid, sheet.room(PAGE), label)
    room -= BAR_WIDTH * grid.bars
    lines = _lines_of_tokens(grid, room, label)
    count = len(lines[0]) - grid.bars
    size = _cell_size(grid, label, room, count, fixed=sheet.width is not None)
    top = bottom = 0.0
    for columns in lines:
        across = _edges(len(columns), grid.bars, size)
        axes = sheet.axes(
            Box(0, top, size.wide * across[-1], size.high * len(grid.sites))
        )
        axes.set(xlim=(0, across[-1]), ylim=(0, len(grid.sites)))
        colours = painted.to_rgba(values[:, columns])
        part = _part_of(grid, columns)
        _draw_cells(axes, part, colours, is_zero[:, columns], size, sheet.lettering)
        _draw_bars(axes, part, colours, across)
        _label_sites(axes, grid, size.high, sheet.lettering)
        here = slice(columns.start, columns.stop)
        upper, lower = (first, second) if second else ([], first)
        middles = (across[:-1] + across[1:]) / 2
        _label_tokens(axes, upper[here], lower[here], middles, size.wide, label)
        if second:
            _name_token_rows(axes, grid, sheet.lettering)
        bottom = sheet.extent(axes).bottom
        # The labels of a second row stand above the next line.
        top = bottom + 8 + (label if second else 0)
    draw_key(measure, painted, sheet, bottom, min(KEY, room), zero=bool(is_zero.any()))


def _edges(columns: int, bars: int, size: CellSize) -> _Array:
    """Return where columns begin and end, in widths of a cell: bars are wider."""
    widths = np.ones(columns)
    if bars:
        widths[-bars:] = BAR_WIDTH / size.wide
    return np.concatenate([[0.0], np.cumsum(widths)])


def _token_labels(
    tokens: tuple[str | None, ...], lettering: Lettering, x_name: str
) -> list[str]:
    if x_name == "token":
        shown = [lettering.token(token) for token in tokens]
        room = LONGEST_LABEL
    else:
        shown = [lettering.text(token or "") for token in tokens]
        room = LONGEST_NAME
    return [lettering.fitted(label, room, style.LABEL) for label in shown]


def _room(grid: Grid, page: float, label: float) -> float:
    """Return how wide all cells of a row may be: names stand at their left, and a
    turned token reaches as far.
    """
    left = max(width_of(site[:40], style.LABEL) for site in grid.sites)
    if grid.second:
        names = max(width_of(name, style.SMALL) for name in _row_names(grid))
        left = max(left, min(names, LONGEST_LABEL))
    return page - max(left + 8, 0.75 * label)


def _row_names(grid: Grid) -> tuple[str, ...]:
    """Return what the row of tokens above the grid is called, and the one below it."""
    return grid.token_rows or ("first", "second")


def _lines_of_tokens(grid: Grid, room: float, label: float) -> list[range]:
    """Return the columns of each line of tokens; a grid of pairs of sites, with bars,
    or of very many tokens, stays in one.
    """
    count = len(grid.tokens)
    narrowest = NARROWEST_WORD_CELL if grid.words else NARROWEST_CELL
    most = max(1, int(room / narrowest))
    lines = math.ceil(count / most)
    is_of_sites = grid.tokens[: len(grid.sites)] == grid.sites or grid.bars > 0
    is_too_high = lines * (len(grid.sites) * LOW_CELL + label) > HIGHEST
    if lines == 1 or is_of_sites or (is_too_high and not grid.words):
        return [range(count)]
    return [range(start, min(start + most, count)) for start in range(0, count, most)]


def _cell_size(
    grid: Grid, label: float, room: float, columns: int, *, fixed: bool
) -> CellSize:
    """Return cells as wide as the page allows, within reason; labels that nearly fit
    get the room they need. A page of a `fixed` width does not grow with them.
    """
    high = HIGH_CELL if grid.words or len(grid.sites) <= FEW_SITES else LOW_CELL
    high = min(high, max(LONGEST / len(grid.sites), 0.5))
    share = room / columns
    if grid.words:
        return CellSize(min(WIDEST_WORD_CELL, max(NARROWEST_WORD_CELL, share)), high)
    narrowest = min(NARROWEST_CELL, LONGEST / columns)
    if fixed or grid.bars:
        narrowest = min(narrowest, max(share, 0.1))
    wide = max(narrowest, share)
    if label <= min(WIDEST_CELL, share * 1.02):
        wide = max(wide, label)
    return CellSize(min(WIDEST_CELL, wide), high)


def _part_of(grid: Grid, columns: range) -> Grid:
    """Return some columns of a grid."""
    here = slice(columns.start, columns.stop)
    words, measure = grid.words, grid.measures[0]
    if words is not None:
        words = replace(words, chosen=words.chosen[:, here], probabilities=None)
    return replace(
        grid,
        measures=(replace(measure, values=measure.numbers[:, here], influence=None),),
        words=words,
        tokens=grid.tokens[here],
        second=grid.second[here],
        text_of=grid.text_of[here],
    )


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


def _values_to_colour(measure: Measure) -> _Array:
    """Return the values; where each layer has its own scale, their places on it."""
    values = measure.numbers.astype(np.float64)
    if not measure.each_layer:
        return values
    places = []
    whole_scale = replace(measure, influence=None, each_layer=False, limits=None)
    for row in values:
        layer = replace(whole_scale, values=row[None])
        placed = norm_of(layer)(layer.numbers.astype(np.float64))
        places.append(np.ma.filled(placed, np.nan))
    return np.concatenate(places)


def _draw_cells(
    axes: "Axes",
    grid: Grid,
    colours: _Array,
    is_zero: _Flags,
    size: CellSize,
    lettering: Lettering,
) -> None:
    """Draw cells with their words, and marks for what is missing or exactly zero."""
    cells = colours.shape[1] - grid.bars
    is_zero, colours = is_zero[:, :cells], colours[:, :cells]
    colours[is_zero] = (1, 1, 1, 0)
    smaller = min(size)
    has_seams = smaller >= 8
    axes.pcolormesh(
        colours,
        edgecolors="white" if has_seams else "face",
        # Cells without seams overlap, or some viewers show the paper between them.
        linewidth=0.5 if has_seams else min(0.4, smaller / 4),
        antialiased=True,
        rasterized=colours.shape[0] * colours.shape[1] > MOST_VECTORS,
    )
    if smaller > 6:
        is_missing = np.isnan(grid.measures[0].numbers[:, :cells])
        _mark(axes, is_missing, (2, 2, -45), smaller - 4, style.FAINT)
        _mark(axes, is_zero, ".", 2.4, style.MUTED)
    # Words of thinner rows would stand on one another.
    if size.high >= LOWEST_WORD_CELL:
        _write_words(axes, grid, colours, size.wide, lettering)
    _part_texts(axes, grid)


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


def _mark(
    axes: "Axes",
    cells: _Flags,
    marker: str | tuple[int, int, int],
    size: float,
    colour: str,
) -> None:
    """Mark cells, while they are few enough to be looked at one by one."""
    if 0 < cells.sum() <= MOST_MARKS:
        rows, columns = np.nonzero(cells)
        axes.plot(
            columns + 0.5,
            rows + 0.5,
            linestyle="",
            marker=marker,
            markersize=size,
            color=colour,
            mew=0.6,
        )


def _write_words(
    axes: "Axes", grid: Grid, colours: _Array, wide: float, lettering: Lettering
) -> None:
    """Write the first word of every cell, in an ink that can be read on its colour;
    framed where it is settled.
    """
    from matplotlib.patches import Rectangle

    words = grid.words
    if words is None:
        return
    settled = words.settled_rows()
    for row, column in np.argwhere(words.chosen[:, :, 0] >= 0):
        word = lettering.token(words.words[words.chosen[row, column, 0]], 30)
        *colour, alpha = colours[row, column]
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


def _part_texts(axes: "Axes", grid: Grid) -> None:
    """Draw a line where one text ends and the next begins, with paper on both sides."""
    for column, (before, after) in enumerate(pairwise(grid.text_of), 1):
        if before != after:
            for colour, width in ((style.PAPER, 2.4), (style.INK, 0.8)):
                axes.axvline(
                    column, -0.02, 1.02, color=colour, linewidth=width, clip_on=False
                )


def _label_sites(axes: "Axes", grid: Grid, high: float, lettering: Lettering) -> None:
    rows = range(0, len(grid.sites), math.ceil(LABEL_APART / high))
    names = [lettering.text(grid.sites[row], 40) for row in rows]
    axes.set_yticks([row + 0.5 for row in rows], names)
    axes.tick_params("y", length=0, pad=5, labelsize=style.LABEL)


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


def _name_token_rows(axes: "Axes", grid: Grid, lettering: Lettering) -> None:
    """Name the row of tokens above the grid and the one below it, at their left."""
    for name, (corner, away) in zip(_row_names(grid), ((1, 8), (0, -8)), strict=True):
        axes.annotate(
            lettering.fitted(lettering.text(name), LONGEST_LABEL, style.SMALL),
            (0, corner),
            (-5, away),
            "axes fraction",
            "offset points",
            ha="right",
            va="center",
            color=style.MUTED,
            size=style.SMALL,
        )


def draw_key(
    measure: Measure,
    painted: "ScalarMappable",
    sheet: Sheet,
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
    axes = sheet.axes(Box(0, top, wide, 7))
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
        axes.annotate(
            "·  exactly 0",
            (1, 1),
            (0, 4),
            "axes fraction",
            "offset points",
            size=style.SMALL,
            color=style.MUTED,
            va="bottom",
            ha="right",
        )
    axes.set_title(name, color=style.MUTED, pad=3)
