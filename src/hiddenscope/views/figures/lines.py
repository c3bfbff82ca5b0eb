"""Lines on paper: series along the layers, with bands."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hiddenscope.views.figures.lettering import Lettering, width_of
from hiddenscope.views.figures.pen import Box, Lead, Pen, Plan, Point
from hiddenscope.views.figures.scale import CLASSES, FAINT, MUTED, linear_ticks, log_ticks, tick_said
from hiddenscope.views.values import Floats, Lines, Series

SMALL, NAME = 7.0, 7.5
WIDTH, HEIGHT = 470.0, 190.0
ROW = 13.0  # of the key


@dataclass(frozen=True)
class _Chart:
    """The rectangle that the series lie in, the values at its lower and upper edge, and the ticks between."""

    box: Box
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]
    count: int

    def across(self, place: float) -> float:
        return self.box.left + (place + 0.5) / self.count * self.box.width

    def down(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.box.bottom - share * self.box.height

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def runs(self, values: Floats) -> Iterator[list[int]]:
        """Places without a gap between them."""
        run: list[int] = []
        for place, value in enumerate(values.tolist()):
            if self.shows(value):
                run.append(place)
            elif run:
                yield run
                run = []
        if run:
            yield run


def plan_lines(lines: Lines, lettering: Lettering) -> Plan:
    """Every series, with what its band is in the key."""
    rows = 1 + max((row for _, row, _, _ in _keys(lines, lettering)), default=-1)
    named = 14.0 if lines.y_name or lines.unit else 4.0
    height = named + HEIGHT + 28 + ROW * rows
    return Plan(WIDTH, height, partial(_paint, lines, named))


def _paint(lines: Lines, named: float, pen: Pen, top: float) -> None:
    chart = _chart(lines, top + named)
    _paint_axes(lines, chart, pen)
    unit = f"({lines.unit})" if lines.unit else ""
    said = " ".join(pen.lettering.text(part, 80) for part in (lines.y_name, unit) if part)
    pen.text(said, 0, top + 5, Lead(MUTED, NAME))
    _paint_series(lines, chart, pen)
    for (x, row, said, series), ink in zip(_keys(lines, pen.lettering), _inks(lines), strict=False):
        y = chart.box.bottom + 38 + ROW * row
        dash = (3.0, 2.0) if series.style == "dash" else ()
        pen.line([(x, y), (x + 14, y)], ink, 5.0 if series.style == "bar" else 1.6, dash)
        pen.text(said, x + 19, y, Lead(size=NAME))


def _keys(lines: Lines, lettering: Lettering) -> list[tuple[float, int, str, Series]]:
    """For each series: where its key stands, in which row, and what it says; one that has said it all needs none."""
    found: list[tuple[float, int, str, Series]] = []
    if [one.name for one in lines.series if not one.band] == [lines.y_name]:
        return found
    x, row = 0.0, 0
    for series in lines.series:
        band = f" (band: {lettering.text(series.band, 60)})" if series.band else ""
        said = lettering.fitted(f"{lettering.text(series.name, 60)}{band}", WIDTH - 19, NAME)
        wide = 19 + width_of(said, NAME)
        if x and x + wide > WIDTH:
            x, row = 0.0, row + 1
        found.append((x, row, said, series))
        x += wide + 16
    return found


def _inks(lines: Lines) -> list[str]:
    return [CLASSES[place % len(CLASSES)] for place in range(len(lines.series))]


def _chart(lines: Lines, top: float) -> _Chart:
    low, high, ticks = _range(lines)
    left = max(width_of(tick_said(tick), SMALL) for tick in ticks) + 9
    box = Box(left, top, WIDTH - left - 4, HEIGHT)
    return _Chart(box, low, high, lines.scale == "log", tuple(ticks), len(lines.x))


def _range(lines: Lines) -> tuple[float, float, list[float]]:
    log = lines.scale == "log"
    sides = [side for one in lines.series for side in (one.y, one.low, one.high) if side is not None]
    values = np.concatenate(sides).astype(np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if any(one.style == "bar" for one in lines.series) and not log:
        values = np.append(values, 0.0)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1 if log else 0.0, 1.0)
    if log:
        return low / 1.15, high * 1.15, log_ticks(low / 1.15, high * 1.15, 6) or [low]
    low = 0.0 if 0 < low < 0.6 * high else low
    room = ((high - low) or abs(high) or 1.0) * 0.06
    flat = low == high == 0
    low, high = low if low == 0 else low - room, high if high == 0 and not flat else high + room
    return low, high, linear_ticks(low, high, 5)


def _paint_axes(lines: Lines, chart: _Chart, pen: Pen) -> None:
    box = chart.box
    for tick in chart.ticks:
        y = chart.down(tick)
        pen.line([(box.left, y), (box.right, y)], FAINT, 0.9 if tick == 0 else 0.6)
        pen.text(tick_said(tick), box.left - 5, y, Lead(MUTED, SMALL, anchor="right"))
    labels = [pen.lettering.text(_short(place), 16) for place in lines.x]
    for place in _labelled(labels, box.width / len(labels)):
        x = chart.across(place)
        pen.line([(x, box.bottom), (x, box.bottom + 2.5)], MUTED)
        pen.text(labels[place], x, box.bottom + 9, Lead(MUTED, SMALL, anchor="center"))
    along = "layer" if lines.x_name == "site" else pen.lettering.text(lines.x_name, 80)
    pen.text(along, (box.left + box.right) / 2, box.bottom + 21, Lead(MUTED, NAME, anchor="center"))


def _short(place: str) -> str:
    """A site for a narrow place: `layer.3` is 3, `encoder.layer.3` is enc 3."""
    return re.sub(r"^(enc|dec)oder\.", r"\1 ", place).replace("layer.", "")


def _labelled(labels: list[str], slot: float) -> list[int]:
    """As many places as there is room to label, the last among them."""
    wide = max(width_of(label, SMALL) for label in labels)
    ordinary = max((width_of(label, SMALL) for label in labels[:-1]), default=0.0)
    step = next((size for size in (1, 2, 4, 5, 10, 20, 50, 100) if size * slot >= ordinary + 5), len(labels))
    last = len(labels) - 1
    clear = [place for place in range(0, last, step) if (last - place) * slot >= (wide + ordinary) / 2 + 4]
    return [*clear, last]


def _paint_series(lines: Lines, chart: _Chart, pen: Pen) -> None:
    inked = list(zip(lines.series, _inks(lines), strict=True))
    bars = [(series, ink) for series, ink in inked if series.style == "bar"]
    thick = min(26.0, 0.76 * chart.box.width / chart.count / max(1, len(bars)))
    for series, ink in inked:
        if series.style != "bar":
            _paint_band(series, ink, chart, pen)
    for place, (series, ink) in enumerate(bars):
        _paint_bars(series, ink, chart, pen, ((place - (len(bars) - 1) / 2) * thick, thick))
    for series, ink in inked:
        if series.style != "bar":
            _paint_line(series, ink, chart, pen)


def _paint_line(series: Series, ink: str, chart: _Chart, pen: Pen) -> None:
    dash = (3.0, 2.0) if series.style == "dash" else ()
    for run in chart.runs(series.y):
        points = _points(chart, run, series.y)
        if len(run) > 1:
            pen.line(points, ink, 1.4, dash)
        if len(run) == 1 or (chart.count <= 60 and not dash):
            pen.dots(np.array(points), ink, 1.7)


def _points(chart: _Chart, places: list[int], values: NDArray[np.floating]) -> list[Point]:
    return [(chart.across(place), chart.down(float(values[place]))) for place in places]


def _paint_band(series: Series, ink: str, chart: _Chart, pen: Pen) -> None:
    if series.low is None or series.high is None:
        return
    for run in chart.runs(np.where(np.isfinite(series.high), series.low, np.nan)):
        back = _points(chart, run[::-1], series.low)
        pen.area([*_points(chart, run, series.high), *back], ink, 0.16)


def _paint_bars(series: Series, ink: str, chart: _Chart, pen: Pen, place: tuple[float, float]) -> None:
    shift, thick = place
    base = chart.down(chart.low if chart.log else 0.0)
    for at in (at for run in chart.runs(series.y) for at in run):
        x, y = chart.across(at) + shift, chart.down(float(series.y[at]))
        pen.rect(Box(x - thick / 2 + 0.3, min(y, base), thick - 0.6, max(0.4, abs(base - y))), ink)
        if series.low is not None and series.high is not None:
            ends = [float(series.low[at]), float(series.high[at])]
            if all(map(chart.shows, ends)):
                pen.line([(x, chart.down(end)) for end in ends], "#000000", 0.9)
