"""Lines on paper: series along the layers, with bands."""

import math
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.views.figures import style
from hiddenscope.views.figures.sheet import Box, Sheet
from hiddenscope.views.figures.style import Lettering, number, width_of
from hiddenscope.views.values import Floats, Lines, Series

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

Array: TypeAlias = NDArray[np.float64]

WIDTH, HEIGHT = 440.0, 190.0
TICKS = 40.0  # room for the numbers of the axis
LONGEST_LABEL = 60  # characters of what stands beneath the axis
# How narrow a place may be for a label in lines beneath it; in a narrower one it is
# turned.
LEAST_SLOT = 36.0
LABEL_APART = 10.0
DASH = (0, (3.0, 2.0))


def draw_lines(lines: Lines, sheet: Sheet) -> None:
    """Every series, with what its band is in the legend."""
    wide = sheet.room(WIDTH + TICKS) - TICKS
    axes = sheet.axes(Box(0, 0, wide, min(HEIGHT, 0.6 * wide)))
    low, high = _limits(lines)
    axes.set(xlim=(-0.5, lines.places[-1] + 0.5), yscale=lines.scale, ylim=(low, high))
    axes.yaxis.set_major_locator(
        style.log_ticks(low, high, 6) if lines.scale == "log" else style.linear_ticks(6)
    )
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
    if [series.name for series in lines.series if not series.band] != [lines.y_name]:
        sheet.legend(
            handles,
            _names(lines, sheet.lettering),
            Box(0, sheet.extent(axes).bottom + 8, wide, 0),
        )


def _names(lines: Lines, lettering: Lettering) -> list[str]:
    bands = (
        f" (band: {lettering.text(series.band)})" if series.band else ""
        for series in lines.series
    )
    return [
        f"{lettering.text(series.name)}{band}"
        for series, band in zip(lines.series, bands, strict=True)
    ]


def _limits(lines: Lines) -> tuple[float, float]:
    """The values at the lower and the upper edge: zero where it is near, and some room."""
    log = lines.scale == "log"
    sides = [
        side
        for one in lines.series
        for side in (one.y, one.low, one.high)
        if side is not None
    ]
    values = np.concatenate(sides).astype(np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if any(one.style == "bar" for one in lines.series) and not log:
        values = np.append(values, 0.0)
    low, high = (
        (float(values.min()), float(values.max()))
        if len(values)
        else (0.1 if log else 0.0, 1.0)
    )
    if log:
        return low / 1.15, high * 1.15
    low = 0.0 if 0 < low < 0.6 * high else low
    room = ((high - low) or abs(high) or 1.0) * 0.06
    flat = low == high == 0
    return (
        low if low == 0 else low - room,
        high if high == 0 and not flat else high + room,
    )


def _label_places(
    axes: "Axes", lines: Lines, lettering: Lettering, wide: float
) -> None:
    labels = [lettering.text(_short(place), LONGEST_LABEL) for place in lines.x]
    slot = wide / (lines.places[-1] + 1)
    if (
        lines.x_name == "site"
        or max(width_of(label, style.SMALL) for label in labels) <= slot - 4
    ):
        shown = _labelled(labels, lines.places, slot)
        axes.set_xticks([lines.places[place] for place in shown], list(shown.values()))
    elif slot >= LEAST_SLOT:
        axes.set_xticks(
            lines.places,
            [lettering.wrapped(label, slot - 4, style.SMALL) for label in labels],
        )
    else:
        step = math.ceil(LABEL_APART / slot)
        turned: dict[str, Any] = {
            "rotation": 45,
            "rotation_mode": "anchor",
            "ha": "right",
            "va": "center",
        }
        axes.set_xticks(lines.places[::step], labels[::step], **turned)
    axes.set_xlabel(
        "layer" if lines.x_name == "site" else lettering.text(lines.x_name, 80)
    )


def _short(place: str) -> str:
    """A site for a narrow place: `layer.3` is 3, `encoder.layer.3` is enc 3."""
    return re.sub(r"^(enc|dec)oder\.", r"\1 ", place).replace("layer.", "")


def _labelled(
    labels: list[str], places: tuple[float, ...], slot: float
) -> dict[int, str]:
    """As many labels as there is room for; `final` goes beneath where it would hide the
    last layer.
    """
    widths = [width_of(label, style.SMALL) for label in labels]

    def clash(one: int, other: int) -> bool:
        return (
            abs(places[one] - places[other]) * slot
            < (widths[one] + widths[other]) / 2 + 4
        )

    last = len(labels) - 1
    beneath = last > 0 and labels[last].endswith("final") and clash(last, last - 1)
    kept = [last - 1 if beneath else last]
    ordinary = max(widths[:-1], default=0.0)
    step = next(
        (size for size in (1, 2, 4, 5, 10, 20, 50, 100) if size * slot >= ordinary + 5),
        len(labels),
    )
    for place in range(kept[0] - 1, -1, -1):
        if places[place] % step == 0 and not any(clash(place, other) for other in kept):
            kept.append(place)
    shown = {place: labels[place] for place in sorted(kept)}
    return shown | ({last: f"\n{labels[last]}"} if beneath else {})


def _draw_series(axes: "Axes", lines: Lines) -> "list[Artist]":
    """Bands first, then bars, then lines; the handles for the legend, in the order of
    the series.
    """
    handles: dict[int, Artist] = {}
    log = lines.scale == "log"
    numbered = list(enumerate(lines.series))
    bars = [(place, series) for place, series in numbered if series.style == "bar"]
    thick = min(26.0 * len(lines.x) / WIDTH, 0.76 / max(1, len(bars)))
    at = np.array(lines.places)
    for place, series in numbered:
        if series.style != "bar" and series.low is not None and series.high is not None:
            low, high = _drawable(series.low, log), _drawable(series.high, log)
            axes.fill_between(
                lines.places,
                low,
                high,
                color=style.class_colour(place),
                alpha=0.16,
                linewidth=0,
            )
    for side, (place, series) in enumerate(bars):
        x = at + (side - (len(bars) - 1) / 2) * thick
        handles[place] = _draw_bars(
            axes, x, series, thick, style.class_colour(place), log
        )
    for place, series in numbered:
        if series.style != "bar":
            handles[place] = _draw_line(
                axes, at, _drawable(series.y, log), series, style.class_colour(place)
            )
    return [handles[place] for place, _ in numbered]


def _drawable(values: Floats, log: bool) -> Array:
    """The values, and NaN where there is nothing to draw."""
    exact = values.astype(np.float64)
    return np.where(np.isfinite(exact) & ((exact > 0) | (not log)), exact, np.nan)


def _draw_line(
    axes: "Axes", x: Array, y: Array, series: Series, colour: str
) -> "Artist":
    dashed = series.style == "dash"
    there = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    alone = there[1:-1] & ~there[:-2] & ~there[2:]
    # A line of one point is a dot.
    dotted = alone if dashed or len(y) > 60 else there[1:-1]
    (line,) = axes.plot(
        x, y, color=colour, linestyle=DASH if dashed else "solid", marker="o" if dotted.any() else "",
        markersize=3.4, markeredgewidth=0, markevery=np.flatnonzero(dotted).tolist(), zorder=3,
    )  # fmt: skip
    return line


def _draw_bars(
    axes: "Axes",
    x: NDArray[np.floating],
    series: Series,
    thick: float,
    colour: str,
    log: bool,
) -> "Artist":
    from matplotlib.patches import Patch

    y = _drawable(series.y, log)
    bottom = axes.get_ylim()[0] if log else 0.0
    there = np.isfinite(y)
    # An edge shows even a zero.
    look: dict[str, Any] = {
        "color": colour,
        "edgecolor": colour,
        "linewidth": 0.4,
    }
    axes.bar(x[there], y[there] - bottom, 0.92 * thick, bottom=bottom, zorder=2, **look)
    if series.low is not None and series.high is not None:
        low, high = _drawable(series.low, log), _drawable(series.high, log)
        both = np.isfinite(low) & np.isfinite(high) & there
        axes.vlines(
            x[both], low[both], high[both], color=style.INK, linewidth=0.9, zorder=4
        )
    return Patch(facecolor=colour, linewidth=0)
