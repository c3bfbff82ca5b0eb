"""The grid on paper: tokens across, layers up."""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from hiddenscope.views.figures.lettering import Lettering, width_of
from hiddenscope.views.figures.pen import Box, Lead, Pen, Plan, Point
from hiddenscope.views.figures.scale import FAINT, INK, MUTED, PAPER, Array, colours, ink_on, levels, ticks
from hiddenscope.views.values import Grid, Measure

SITE, TOKEN, WORD, KEY = 7.5, 7.5, 7.0, 7.0  # sizes of type
PAGE = 470.0  # what a grid would like to fill
LABEL = 100.0  # the longest label of a token
LONGEST = 760.0  # beyond this a grid grows no further: its cells get thinner, and only some are labelled
LEGEND = Box(0, 0, 190, 34)


@dataclass(frozen=True)
class _Layout:
    """Where things lie, in points."""

    cells: Box
    wide: float
    high: float
    turn: float
    tokens: tuple[str, ...]
    second: tuple[str, ...]
    width: float
    height: float

    def corner(self, row: int, column: int) -> Point:
        """The upper left corner of a cell; `layer.0` is at the bottom."""
        return self.cells.left + column * self.wide, self.cells.bottom - (row + 1) * self.high


def plan_grid(grid: Grid, lettering: Lettering) -> Plan:
    """The grid's first measure, with its words where it has some."""
    layout = _layout(grid, lettering)
    return Plan(layout.width, layout.height, partial(_paint, grid, layout))


def _layout(grid: Grid, lettering: Lettering) -> _Layout:
    labels = (map(lettering.token, row) for row in (grid.tokens, grid.second))
    tokens, second = (tuple(lettering.fitted(token, LABEL, TOKEN) for token in row) for row in labels)
    left = max(width_of(lettering.text(site, 40), SITE) for site in grid.sites) + 8
    label = max(width_of(token, TOKEN) for token in (*tokens, *second)) + 5
    wide = _cell_width(grid, (PAGE - left) / len(tokens), label)
    high = min(14.0 if grid.words or len(grid.sites) <= 14 else 11.0, max(LONGEST / len(grid.sites), 0.5))
    turn = 0.0 if label <= wide else 45.0 if wide >= 1.6 * TOKEN else 90.0
    tall = {0.0: 16.0, 45.0: 0.72 * label + 10, 90.0: label + 6}[turn]
    if turn == 45:  # what hangs out to the left of its column
        left = max(left, *(0.72 * width_of(token, TOKEN) - (k + 0.5) * wide for k, token in enumerate(tokens)))
    across = wide * len(tokens)
    beyond = 0.72 * label if turn == 45 and second else 0.0
    cells = Box(left, tall if second else 2, across, high * len(grid.sites))
    width = max(left + across + beyond, left + LEGEND.width)
    return _Layout(cells, wide, high, turn, tokens, second, width, cells.bottom + tall + LEGEND.height)


def _cell_width(grid: Grid, share: float, label: float) -> float:
    """As wide as fits, within reason; labels that nearly fit get the room they need."""
    if grid.words:
        return min(80.0, max(44.0, share))
    least, most = min(9.5, LONGEST / len(grid.tokens)), 60.0
    fitting = label if label <= min(most, share * 1.02) else least
    return min(most, max(least, fitting, share))


def _paint(grid: Grid, layout: _Layout, pen: Pen, top: float) -> None:
    cells = replace(layout.cells, top=layout.cells.top + top)
    layout = replace(layout, cells=cells)
    painted = colours(levels(grid.measures[0]), grid.measures[0].meaning)
    pen.cells(cells, painted[::-1], seams=min(layout.wide, layout.high) >= 8)
    _paint_missing(grid.measures[0], layout, pen)
    _paint_words(grid, layout, painted, pen)
    _paint_seams(grid, layout, pen)
    _paint_sites(grid, layout, pen)
    _paint_tokens(layout, pen)
    paint_key(grid.measures[0], pen, cells.left, top + layout.height - LEGEND.height + 4)


def _paint_sites(grid: Grid, layout: _Layout, pen: Pen) -> None:
    for row in range(0, len(grid.sites), math.ceil(8.5 / layout.high)):
        _, y = layout.corner(row, 0)
        said = pen.lettering.text(grid.sites[row], 40)
        pen.text(said, layout.cells.left - 5, y + layout.high / 2, Lead(MUTED, SITE, anchor="right"))


def _paint_tokens(layout: _Layout, pen: Pen) -> None:
    for column in range(0, len(layout.tokens), math.ceil(8.5 / layout.wide)):
        x = layout.cells.left + (column + 0.5) * layout.wide
        away, down = {0.0: (0.0, 8.0), 45.0: (3.0, 6.0), 90.0: (0.0, 4.0)}[layout.turn]
        below = Lead(INK, TOKEN, anchor="right" if layout.turn else "center", turn=layout.turn)
        pen.text(layout.tokens[column], x + away, layout.cells.bottom + down, below)
        if layout.second:
            above = Lead(INK, TOKEN, anchor="left" if layout.turn else "center", turn=layout.turn)
            pen.text(layout.second[column], x - away / 2, layout.cells.top - down + 1, above)


def _paint_missing(measure: Measure, layout: _Layout, pen: Pen) -> None:
    """A stroke through every cell that has no value, while they are few enough to be looked at one by one."""
    reach = min(layout.wide, layout.high) / 2 - 2
    missing = np.argwhere(np.isnan(measure.numbers))
    if reach < 1 or len(missing) > 2_000:
        return
    for row, column in missing:
        left, top = layout.corner(int(row), int(column))
        x, y = left + layout.wide / 2, top + layout.high / 2
        pen.line([(x - reach, y + reach), (x + reach, y - reach)], FAINT)


def _paint_words(grid: Grid, layout: _Layout, painted: Array, pen: Pen) -> None:
    """The first word of every cell."""
    if grid.words is None:
        return
    for row, column in np.argwhere(grid.words.chosen[:, :, 0] >= 0):
        word = pen.lettering.token(grid.words.words[grid.words.chosen[row, column, 0]], 30)
        left, top = layout.corner(int(row), int(column))
        said = pen.lettering.fitted(word, layout.wide - 5, WORD)
        lead = Lead(ink_on(painted[row, column]), WORD, anchor="center")
        pen.text(said, left + layout.wide / 2, top + layout.high / 2, lead)


def _paint_seams(grid: Grid, layout: _Layout, pen: Pen) -> None:
    """Where one text ends and the next begins."""
    for column, (before, after) in enumerate(pairwise(grid.text_of), 1):
        if before != after:
            x = layout.cells.left + column * layout.wide
            for ink, thick in ((PAPER, 2.4), (INK, 0.8)):
                pen.line([(x, layout.cells.top - 2.5), (x, layout.cells.bottom + 2.5)], ink, thick)


def paint_key(measure: Measure, pen: Pen, x: float, y: float) -> None:
    """What the colours mean: a bar, its ticks, what it measures and in which unit."""
    unit = f" ({pen.lettering.text(measure.unit, 40)})" if measure.unit else ""
    name = pen.lettering.fitted(f"{pen.lettering.text(measure.name, 60)}{unit}", LEGEND.width, SITE)
    pen.text(name, x, y + 4, Lead(MUTED, SITE))
    bar = Box(x, y + 11, LEGEND.width, 7)
    inside = Box(bar.left + 0.3, bar.top + 0.3, bar.width - 0.6, bar.height - 0.6)
    pen.cells(inside, colours(np.linspace(0, 1, 64)[None], measure.meaning), seams=False)
    pen.outline(bar)
    end = -math.inf
    for tick in sorted(ticks(measure)):
        wide = width_of(tick.label, KEY)
        start = min(max(tick.at * bar.width - wide / 2, 0), bar.width - wide)
        if start < end + 5 or not 0 <= tick.at <= 1:
            continue
        end = start + wide
        at = bar.left + tick.at * bar.width
        pen.line([(at, bar.bottom), (at, bar.bottom + 2.5)], MUTED)
        pen.text(tick.label, bar.left + start, bar.bottom + 8, Lead(MUTED, KEY))
