"""Lines on paper: series along the layers, with bands."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results.pictures import Lines, PackedFloats, Series
from hiddenscope.views.figures import style
from hiddenscope.views.figures.style import Lettering, number, width_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from hiddenscope.views.figures.pages import Sheet

_Array: TypeAlias = NDArray[np.float64]

WIDTH, HEIGHT = 440.0, 190.0
# The numbers of the axis take this much room.
TICKS = 40.0
# A label beneath the axis is cut here, in characters.
LONGEST_LABEL = 60
# The narrowest place whose label is wrapped beneath it; in a narrower one it is turned.
NARROWEST_SLOT = 36.0
LABEL_APART = 10.0
DASH = (0, (3.0, 2.0))
# With more points than this, dots would hide the line.
MOST_DOTS = 60
WIDEST_BAR = 26.0
# Layers from one label to the next.
STEPS = (1, 2, 4, 5, 10, 20, 50, 100)


def draw_lines(lines: Lines, sheet: "Sheet") -> None:
    """Draw every series; the legend says what its band is."""
    wide = sheet.room(WIDTH + TICKS) - TICKS
    axes = sheet.axes(0, 0, wide, min(HEIGHT, 0.6 * wide))
    low, high = _limits(lines)
    axes.set(xlim=(-0.5, lines.places[-1] + 0.5), yscale=lines.scale, ylim=(low, high))
    ticks = style.linear_ticks(6)
    if lines.scale == "log":
        ticks = style.log_ticks(low, high, 6)
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(number)
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.tick_params("y", length=0)
    axes.tick_params("x", length=2.5)
    _label_places(axes, lines, sheet.lettering, wide)
    handles = _draw_series(axes, lines)
    unit = f"({lines.unit})" if lines.unit else ""
    name = " ".join(sheet.lettering.text(part) for part in (lines.y_name, unit) if part)
    axes.set_title(sheet.lettering.wrapped(name, wide, style.LABEL), color=style.MUTED)
    # A single line without a band is named by the axis.
    if [series.name for series in lines.series if not series.band] != [lines.y_name]:
        names = []
        for series in lines.series:
            band = (
                f" (band: {sheet.lettering.text(series.band)})" if series.band else ""
            )
            names.append(f"{sheet.lettering.text(series.name)}{band}")
        sheet.legend(handles, names, sheet.extent(axes).bottom + 8, wide)


def _limits(lines: Lines) -> tuple[float, float]:
    """Return the values at the lower and the upper edge: zero where it is near, and
    some room.
    """
    is_log = lines.scale == "log"
    # Bars stand on zero, which a log scale does not have.
    has_bars = any(series.style == "bar" for series in lines.series)
    sides = [np.zeros(1)] if has_bars and not is_log else []
    for series in lines.series:
        for side in (series.y, series.low, series.high):
            if side is not None:
                sides.append(_drawable(side, is_log))
    values = np.concatenate(sides)
    values = values[np.isfinite(values)]
    if not len(values):
        # Nothing is drawn, but the axis still needs two ends.
        values = np.array([0.1 if is_log else 0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    if is_log:
        return low / 1.15, high * 1.15
    if 0 < low < 0.6 * high:
        low = 0.0
    room = ((high - low) or abs(high) or 1.0) * 0.06
    # An end at zero stays there, unless all values are zero.
    if low == 0:
        return 0.0, high + room
    upper = high + room if high else 0.0
    return low - room, upper


def _label_places(
    axes: "Axes", lines: Lines, lettering: Lettering, wide: float
) -> None:
    """Label the places: in one line if they fit, else wrapped, else turned."""
    places = lines.places
    labels = []
    for x in lines.x:
        # `layer.3` is 3, and `encoder.layer.3` is enc 3.
        short = re.sub(r"^(enc|dec)oder\.", r"\1 ", x).replace("layer.", "")
        labels.append(lettering.text(short, LONGEST_LABEL))
    slot = wide / (places[-1] + 1)
    widest = max(width_of(label, style.SMALL) for label in labels)
    if lines.x_name == "site" or widest <= slot - 4:
        shown = _labels_that_fit(labels, places, slot)
        axes.set_xticks([places[index] for index in shown], list(shown.values()))
    elif slot >= NARROWEST_SLOT:
        labels = [lettering.wrapped(label, slot - 4, style.SMALL) for label in labels]
        axes.set_xticks(places, labels)
    else:
        step = math.ceil(LABEL_APART / slot)
        # A label that leans would reach out of a narrow paper.
        leans = 0.71 * widest < TICKS + slot / 2
        axes.set_xticks(
            places[::step],
            labels[::step],
            rotation=45 if leans else 90,
            rotation_mode="anchor",
            ha="right",
            va="center",
        )
    name = "layer" if lines.x_name == "site" else lettering.text(lines.x_name, 80)
    axes.set_xlabel(name)


def _labels_that_fit(
    labels: Sequence[str], places: Sequence[float], slot: float
) -> dict[int, str]:
    """Return as many labels as there is room for, by index; `final` goes beneath where
    it would hide the last layer.
    """
    widths = [width_of(label, style.SMALL) for label in labels]

    def clash(index: int, other: int) -> bool:
        distance = abs(places[index] - places[other]) * slot
        return distance < (widths[index] + widths[other]) / 2 + 4

    last = len(labels) - 1
    beneath = last > 0 and labels[last].endswith("final") and clash(last, last - 1)
    labelled = [last - 1 if beneath else last]
    widest = max(widths[:-1], default=0.0)
    wide_enough = (step for step in STEPS if step * slot >= widest + 5)
    step = next(wide_enough, len(labels))
    for index in range(labelled[0] - 1, -1, -1):
        is_free = not any(clash(index, other) for other in labelled)
        if places[index] % step == 0 and is_free:
            labelled.append(index)
    shown = {index: labels[index] for index in sorted(labelled)}
    if beneath:
        shown[last] = f"\n{labels[last]}"
    return shown


def _draw_series(axes: "Axes", lines: Lines) -> "list[Artist]":
    """Draw bands, then bars, then lines; return the handles for the legend in the order
    of the series.
    """
    is_log = lines.scale == "log"
    x = np.array(lines.places)
    colours = [style.class_colour(place) for place in range(len(lines.series))]
    bars = [place for place, s in enumerate(lines.series) if s.style == "bar"]
    handles = {}
    for place, series in enumerate(lines.series):
        if place not in bars and series.low is not None and series.high is not None:
            axes.fill_between(
                lines.places,
                _drawable(series.low, is_log),
                _drawable(series.high, is_log),
                color=colours[place],
                alpha=0.16,
                linewidth=0,
            )
    # Bars of several series stand side by side.
    thick = min(WIDEST_BAR * len(x) / WIDTH, 0.76 / max(1, len(bars)))
    for side, place in enumerate(bars):
        shifted = x + (side - (len(bars) - 1) / 2) * thick
        series = lines.series[place]
        handles[place] = _draw_bars(
            axes, shifted, series, thick, colours[place], is_log
        )
    for place, series in enumerate(lines.series):
        if place not in bars:
            y = _drawable(series.y, is_log)
            is_dashed = series.style == "dash"
            finite = np.isfinite(y)
            dots = finite
            if is_dashed or len(y) > MOST_DOTS:
                # A point between two gaps has no line to either side, so only a dot
                # shows it.
                padded = np.concatenate([[False], finite, [False]])
                dots = finite & ~padded[:-2] & ~padded[2:]
            (handles[place],) = axes.plot(
                x,
                y,
                color=colours[place],
                linestyle=DASH if is_dashed else "solid",
                marker="o" if dots.any() else "",
                markersize=3.4,
                markeredgewidth=0,
                markevery=np.flatnonzero(dots).tolist(),
                zorder=3,
            )
    return [handles[place] for place in range(len(lines.series))]


def _drawable(values: PackedFloats, is_log: bool) -> _Array:
    """Return the values, and NaN where there is nothing to draw."""
    exact = values.astype(np.float64)
    has_place = np.isfinite(exact) & ((exact > 0) | (not is_log))
    return np.where(has_place, exact, np.nan)


def _draw_bars(
    axes: "Axes", x: _Array, series: Series, thick: float, colour: str, is_log: bool
) -> "Artist":
    from matplotlib.patches import Patch

    y = _drawable(series.y, is_log)
    bottom = axes.get_ylim()[0] if is_log else 0.0
    finite = np.isfinite(y)
    axes.bar(
        x[finite],
        y[finite] - bottom,
        0.92 * thick,
        bottom=bottom,
        zorder=2,
        color=colour,
        # An edge shows even a zero.
        edgecolor=colour,
        linewidth=0.4,
    )
    if series.low is not None and series.high is not None:
        low, high = _drawable(series.low, is_log), _drawable(series.high, is_log)
        both = np.isfinite(low) & np.isfinite(high) & finite
        axes.vlines(
            x[both], low[both], high[both], color=style.INK, linewidth=0.9, zorder=4
        )
    return Patch(facecolor=colour, linewidth=0)
