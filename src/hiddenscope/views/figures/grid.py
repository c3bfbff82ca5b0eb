"""The grid on paper: tokens across, layers up."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.views.figures import style
from hiddenscope.views.figures.sheet import Box, Sheet
from hiddenscope.views.figures.style import Lettering, number, width_of
from hiddenscope.views.values import Grid, Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

Array: TypeAlias = NDArray[np.float64]

PAGE = 470.0  # what a grid would like to fill
LONGEST_LABEL = 100.0  # of a token
# Beyond this a grid grows no further: its cells get thinner, and only some are
# labelled.
LONGEST = 760.0
LABEL_APART = 10.0
# How wide the scale of colours is, and how high a line above it.
KEY, KEY_LINE = (
    190.0,
    10.0,
)
LEAST_CELL, WORD_CELL = 10.5, 44.0  # how narrow a cell may be
MOST_HIGH = 700.0  # of all lines of tokens; a longer text gets thinner cells instead
MOST_VECTORS = 20_000  # with more cells than this a file is quicker to read as pixels
DECADES = 1e-6  # a log scale reaches this far below its top
BEND = 1e-4  # a log scale of differences is linear below this share of its top


def draw_grid(grid: Grid, sheet: Sheet) -> None:
    """The grid's first measure, with its words where it has some, and what the colours
    mean.

    A text that is too long for the page goes on beneath itself, as lines of a book do.
    """
    from matplotlib.cm import ScalarMappable

    measure = grid.measures[0]
    painted = ScalarMappable(norm_of(measure), style.colormap(measure.meaning))
    shown, zero = _shown(measure), (measure.numbers == 0) & (grid.words is None)
    labels = [_labels(row, sheet.lettering) for row in (grid.tokens, grid.second)]
    label = max(width_of(token, style.LABEL) for token in (*labels[0], *labels[1])) + 5
    page = sheet.room(PAGE)
    rows = _rows_of_tokens(grid, page, label)
    size = _cell_size(grid, label, page, len(rows[0]))
    top = 0.0
    for columns in rows:
        part = _part_of(grid, columns)
        tokens, second = (
            [row[column] for column in columns] if row else [] for row in labels
        )
        wide, high = size
        axes = sheet.axes(Box(0, top, wide * len(columns), high * len(grid.sites)))
        axes.set(xlim=(0, len(columns)), ylim=(0, len(grid.sites)))
        _draw_cells(
            axes,
            part,
            painted.to_rgba(shown[:, columns]),
            zero[:, columns],
            size,
            sheet.lettering,
        )
        _label_sites(axes, grid, high, sheet.lettering)
        upper, lower = (tokens, second) if second else ([], tokens)
        _label_tokens(axes, upper, lower, wide, label)
        if second:
            _name_token_rows(axes, grid, sheet.lettering)
        top = sheet.extent(axes).bottom + 8 + (label if second else 0)
    bottom = top - 8 - (label if labels[1] else 0)
    wide = min(KEY, _room(grid, page, label))
    name = _key_name(measure, wide - (60 if zero.any() else 0), sheet.lettering)
    at = Box(0, bottom + 8 + KEY_LINE * (name.count("\n") + 1), wide, 7)
    _draw_key(measure, name, painted, sheet, at, zero=bool(zero.any()))


def _rows_of_tokens(grid: Grid, page: float, label: float) -> list[range]:
    """The columns of each line of tokens; a grid of pairs of sites, or of very many
    tokens, stays in one.
    """
    count = len(grid.tokens)
    most = max(
        1, int(_room(grid, page, label) / (WORD_CELL if grid.words else LEAST_CELL))
    )
    lines = math.ceil(count / most)
    tall = lines * (len(grid.sites) * 11.0 + label) > MOST_HIGH
    if (
        lines == 1
        or grid.tokens[: len(grid.sites)] == grid.sites
        or (tall and not grid.words)
    ):
        return [range(count)]
    return [range(start, min(start + most, count)) for start in range(0, count, most)]


def _part_of(grid: Grid, columns: range) -> Grid:
    """Some columns of a grid."""
    place = slice(columns.start, columns.stop)
    words = grid.words
    if words is not None:
        words = replace(words, chosen=words.chosen[:, place], probabilities=None)
    measure = replace(
        grid.measures[0], values=grid.measures[0].numbers[:, place], influence=None
    )
    cut = {name: getattr(grid, name)[place] for name in ("tokens", "second", "text_of")}
    return replace(grid, measures=(measure,), words=words, **cut)


def _draw_cells(
    axes: "Axes",
    grid: Grid,
    colours: Array,
    zero: NDArray[np.bool_],
    size: tuple[float, float],
    lettering: Lettering,
) -> None:
    """Cells with their words; marks for what is missing and for what is exactly zero."""
    wide, high = size
    colours[zero] = (1, 1, 1, 0)
    _paint_cells(axes, colours, wide, high)
    if min(wide, high) > 6:
        _mark(
            axes,
            np.isnan(grid.measures[0].numbers),
            (2, 2, -45),
            min(wide, high) - 4,
            style.FAINT,
        )
        _mark(axes, zero, ".", 2.4, style.MUTED)
    _write_words(axes, grid, colours, wide, lettering)
    _part_texts(axes, grid)


def _labels(tokens: tuple[str | None, ...], lettering: Lettering) -> list[str]:
    return [
        lettering.fitted(lettering.token(token), LONGEST_LABEL, style.LABEL)
        for token in tokens
    ]


def _room(grid: Grid, page: float, label: float) -> float:
    """Say how wide all cells of a row may be: names stand at their left, and a turned
    token reaches as far.
    """
    left = max(width_of(site[:40], style.LABEL) for site in grid.sites)
    if grid.second:
        names = max(width_of(name, style.SMALL) for name in _row_names(grid))
        left = max(left, min(names, LONGEST_LABEL))
    return page - max(left + 8, 0.75 * label)


def _row_names(grid: Grid) -> tuple[str, ...]:
    """Return what the row of tokens above the grid is called, and the one below it."""
    return grid.token_rows or ("first", "second")


def _cell_size(
    grid: Grid, label: float, page: float, columns: int
) -> tuple[float, float]:
    """Cells as wide as the page allows, within reason; labels that nearly fit get the
    room they need.
    """
    high = min(
        14.0 if grid.words or len(grid.sites) <= 14 else 11.0,
        max(LONGEST / len(grid.sites), 0.5),
    )
    share = _room(grid, page, label) / columns
    if grid.words:
        return min(80.0, max(WORD_CELL, share)), high
    least, most = (
        min(
            LEAST_CELL,
            LONGEST / columns,
            max(share, 1.0) if page < PAGE else LEAST_CELL,
        ),
        60.0,
    )
    fitting = label if label <= min(most, share * 1.02) else least
    return min(most, max(least, fitting, share)), high


def norm_of(measure: Measure) -> "Normalize":
    """The values at both ends of the colours, and whether they run evenly or by their
    logarithm.

    A scale of amounts begins at zero, or on a log scale at the least amount there is;
    one of differences reaches as far down as up.
    """
    from matplotlib.colors import FuncNorm, LogNorm, Normalize

    if measure.each_layer:
        return Normalize(0, 1)
    low, high = ends(measure.numbers.astype(np.float64), measure)
    if low == high:
        low, high = (-1.0, 1.0) if measure.meaning == "diverging" else (low, low + 1)
    elif measure.scale == "log" and measure.meaning == "diverging":
        bend = max(-low, high) * BEND
        functions = (
            lambda value: np.sign(value) * np.log1p(np.abs(value) / bend),
            lambda place: np.sign(place) * np.expm1(np.abs(place)) * bend,
        )
        return FuncNorm(functions, low, high, clip=True)
    elif measure.scale == "log" and low > 0:
        return LogNorm(low, high, clip=True)
    return Normalize(low, high, clip=True)


def ends(values: Array, measure: Measure) -> tuple[float, float]:
    """The least and the greatest value that colours can tell apart."""
    if measure.limits is not None:
        return measure.limits
    finite = values[np.isfinite(values)]
    sizes = np.abs(finite)
    if measure.meaning == "diverging":
        most = float(sizes.max(initial=0.0))
        return -most, most
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if measure.scale == "log" and high > 0:
        return max(float(sizes[sizes > 0].min()), high * DECADES), high
    return min(0.0, low), max(0.0, high)


def _shown(measure: Measure) -> Array:
    """The values to colour; where each layer has its own scale, their places on it."""
    values = measure.numbers.astype(np.float64)
    if not measure.each_layer:
        return values
    rows = [
        replace(
            measure, values=row[None], influence=None, each_layer=False, limits=None
        )
        for row in values
    ]
    return np.concatenate(
        [
            np.ma.filled(norm_of(row)(row.numbers.astype(np.float64)), np.nan)
            for row in rows
        ]
    )


def _paint_cells(axes: "Axes", colours: Array, wide: float, high: float) -> None:
    seams = min(wide, high) >= 8
    # Or some viewers show the paper between two cells.
    overlap = min(0.4, wide / 4, high / 4)
    axes.pcolormesh(
        colours,
        edgecolors="white" if seams else "face",
        linewidth=0.5 if seams else overlap,
        antialiased=True,
        rasterized=colours.shape[0] * colours.shape[1] > MOST_VECTORS,
    )


def _mark(
    axes: "Axes", cells: NDArray[np.bool_], marker: Any, size: float, colour: str
) -> None:
    """A mark in every such cell, while they are few enough to be looked at one by one."""
    if 0 < cells.sum() <= 2_000:
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
    axes: "Axes", grid: Grid, colours: Array, wide: float, lettering: Lettering
) -> None:
    """The first word of every cell, in an ink that can be read on its colour; framed
    where it is settled.
    """
    from matplotlib.patches import Rectangle

    if grid.words is None:
        return
    settled = grid.words.settled_rows()
    for row, column in np.argwhere(grid.words.chosen[:, :, 0] >= 0):
        word = lettering.token(grid.words.words[grid.words.chosen[row, column, 0]], 30)
        light = (
            float(colours[row, column, :3] @ [0.299, 0.587, 0.114]) > 140 / 255
            or colours[row, column, 3] == 0
        )
        ink = style.INK if light else style.PAPER
        if grid.words.framed and row == settled[column]:
            axes.add_patch(
                Rectangle(
                    (column + 0.03, row + 0.1),
                    0.94,
                    0.8,
                    fill=False,
                    linewidth=0.9,
                    edgecolor=ink,
                )
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
    """Where one text ends and the next begins."""
    for column, (before, after) in enumerate(pairwise(grid.text_of), 1):
        if before != after:
            axes.axvline(
                column, -0.02, 1.02, color=style.PAPER, linewidth=2.4, clip_on=False
            )
            axes.axvline(
                column, -0.02, 1.02, color=style.INK, linewidth=0.8, clip_on=False
            )


def _label_sites(axes: "Axes", grid: Grid, high: float, lettering: Lettering) -> None:
    rows = range(0, len(grid.sites), math.ceil(LABEL_APART / high))
    axes.set_yticks(
        [row + 0.5 for row in rows],
        [lettering.text(grid.sites[row], 40) for row in rows],
    )
    axes.tick_params("y", length=0, pad=5, labelsize=style.LABEL)


def _label_tokens(
    axes: "Axes", upper: list[str], lower: list[str], wide: float, label: float
) -> None:
    """Write the tokens below, and where there are two texts those of the first above:
    turned where they do not fit.
    """
    turn = 0 if label <= wide else 45 if wide >= 1.8 * style.LABEL else 90
    columns = range(0, len(lower), math.ceil(LABEL_APART / wide))
    places = [column + 0.5 for column in columns]
    below: dict[str, Any] = (
        {"ha": "right", "va": "center"} if turn else {"ha": "center"}
    )
    above: dict[str, Any] = {"ha": "left", "va": "center"} if turn else {"ha": "center"}
    turned: dict[str, Any] = {
        "rotation": turn,
        "rotation_mode": "anchor",
        "color": style.INK,
        "size": style.LABEL,
    }
    axes.set_xticks(places, [lower[column] for column in columns], **turned, **below)
    axes.tick_params("x", length=0, pad=4)
    if upper:
        top = axes.secondary_xaxis("top")
        top.set_xticks(places, [upper[column] for column in columns], **turned, **above)
        top.tick_params("x", length=0, pad=4)


def _name_token_rows(axes: "Axes", grid: Grid, lettering: Lettering) -> None:
    """Name the row of tokens above the grid and the one below it, at the left of each."""
    look: dict[str, Any] = {
        "ha": "right",
        "va": "center",
        "color": style.MUTED,
        "size": style.SMALL,
    }
    for name, (corner, away) in zip(_row_names(grid), ((1, 8), (0, -8)), strict=True):
        shown = lettering.fitted(lettering.text(name), LONGEST_LABEL, style.SMALL)
        axes.annotate(
            shown, (0, corner), (-5, away), "axes fraction", "offset points", **look
        )


def _key_name(measure: Measure, room: float, lettering: Lettering) -> str:
    """What the colours measure and in which unit, in lines."""
    unit = f" ({lettering.text(measure.unit)})" if measure.unit else ""
    return lettering.wrapped(f"{lettering.text(measure.name)}{unit}", room, style.LABEL)


def _draw_key(
    measure: Measure, name: str, painted: Any, sheet: Sheet, box: Box, *, zero: bool
) -> None:
    """What the colours mean: a bar, its ticks, what it measures and in which unit."""
    axes = sheet.axes(box)
    bar = sheet.figure.colorbar(
        painted, cax=axes, orientation="horizontal", format=number
    )
    assert bar.solids is not None
    bar.solids.set_edgecolor("face")  # or some viewers show lines between the colours
    bar.outline.set(edgecolor=style.FAINT, linewidth=0.6, visible=True)
    bar.minorticks_off()
    low, high = painted.norm.vmin, painted.norm.vmax
    if measure.each_layer:
        bar.set_ticks(
            [0, 1],
            labels=[
                "−most" if measure.meaning == "diverging" else "least",
                "most of its layer",
            ],
        )
        least, most = bar.ax.get_xticklabels()
        least.set_horizontalalignment("left")
        most.set_horizontalalignment("right")
    elif measure.scale == "log" and measure.meaning == "diverging" and high > 0:
        bar.set_ticks([float(f"{part * high:.2g}") for part in (-1, -0.01, 0, 0.01, 1)])
    elif measure.scale == "log" and low > 0:
        bar.ax.xaxis.set_major_locator(style.log_ticks(low, high, 4))
    else:
        bar.ax.xaxis.set_major_locator(style.linear_ticks(4))
    axes.tick_params("x", length=2.5, labelsize=style.SMALL)
    if zero:
        look: dict[str, Any] = {
            "size": style.SMALL,
            "color": style.MUTED,
            "va": "bottom",
            "ha": "right",
        }
        axes.annotate(
            "·  exactly 0", (1, 1), (0, 4), "axes fraction", "offset points", **look
        )
    axes.set_title(name, color=style.MUTED, pad=3)
