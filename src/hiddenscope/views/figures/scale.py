"""From values to colours and places: the scales, colours and ticks that the page has too.

>>> from hiddenscope.views.values import Measure
>>> levels(Measure("norm", [[1.0, 100.0, 10.0]], scale="log")).round(3).tolist()
[[0.0, 1.0, 0.5]]
>>> said(22345.6), said(-0.00001), linear_ticks(0, 9), log_ticks(1, 1000)
('22,346', '−1e−5', [0.0, 2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0])
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.views.colours import CLASSES as SERIES
from hiddenscope.views.colours import DIVERGING, SEQUENTIAL
from hiddenscope.views.values import Measure

Array: TypeAlias = NDArray[np.float64]

DECADES = 1e-6  # a log scale reaches this far below its top
MAPS = {"sequential": SEQUENTIAL["light"], "diverging": DIVERGING["light"]}
CLASSES = SERIES["light"]
INK, MUTED, FAINT, PAPER = "#14171c", "#5b6270", "#d5d9e0", "#ffffff"


class Tick(NamedTuple):
    """A label at a place between 0 and 1."""

    at: float
    label: str


def colours(places: Array, meaning: str) -> Array:
    """Red, green, blue and cover, each 0 to 1, of places between 0 and 1; NaN is clear."""
    anchors = np.array([[int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)] for code in MAPS[meaning]])
    there = ~np.isnan(places)
    step = np.round(np.clip(np.where(there, places, 0), 0, 1) * 255) / 255
    rgb = [np.interp(step, np.linspace(0, 1, len(anchors)), anchors[:, channel]) for channel in range(3)]
    return np.stack([*rgb, there.astype(np.float64)], axis=-1)


def ink_on(colour: Array) -> str:
    """Ink that can be read on a colour."""
    light = float(colour[:3] @ [0.299, 0.587, 0.114]) * 255
    return INK if light > 140 or colour[3] == 0 else PAPER


def levels(measure: Measure) -> Array:
    """The places of a measure's values between 0 and 1, over everything or layer by layer."""
    values = measure.numbers.astype(np.float64)
    if not measure.each_layer:
        return _places(values, ends(values, measure), measure)
    return np.stack([_places(row, ends(row, measure), measure) for row in values])


def ends(values: Array, measure: Measure) -> tuple[float, float]:
    """Where a scale begins and ends.

    A scale of amounts begins at zero, or on a log scale at the least amount there is; one of differences reaches as
    far down as up.
    """
    if measure.limits is not None and not measure.each_layer:
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


def ticks(measure: Measure) -> list[Tick]:
    """What stands beneath the key of a measure's colours."""
    diverging, log = measure.meaning == "diverging", measure.scale == "log"
    if measure.each_layer:
        return [Tick(0, "−most" if diverging else "least"), Tick(1, "most of its layer")]
    low, high = span = ends(measure.numbers.astype(np.float64), measure)
    if low == high:
        return [Tick(0.5 if diverging else 0, tick_said(low))]
    if diverging and log:
        values = [float(f"{part * high:.2g}") for part in (-1, -0.01, 0, 0.01, 1)]
    else:
        values = log_ticks(low, high, 4) if log and low > 0 else linear_ticks(low, high, 4)
    places = _places(np.array(values), span, measure)
    return [Tick(float(at), tick_said(value)) for at, value in zip(places, values, strict=True)]


def _places(values: Array, span: tuple[float, float], measure: Measure) -> Array:
    low, high = span
    if measure.scale == "log" and measure.meaning == "diverging":
        bend = max(-low, high) / 1e4 or 1.0
        reach = 2 * math.log1p(max(-low, high) / bend) or 1.0
        return np.asarray(0.5 + np.sign(values) * np.log1p(np.abs(values) / bend) / reach)
    if measure.scale == "log" and low > 0:
        logs = np.log(np.maximum(values, low))
        return np.asarray((logs - math.log(low)) / ((math.log(high) - math.log(low)) or 1.0))
    flat = 0.5 if measure.meaning == "diverging" and low == high else 0.0
    return np.asarray((values - low) / ((high - low) or 1.0) + flat)


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between two ends, some five of them."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next((size for size in (1, 2, 2.5, 5, 10) if size * power >= rough), 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def log_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Powers of ten between two ends, and parts of them where there is room."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    decades = last - first
    few = {0: (1, 2, 3, 5, 7), 1: (1, 2, 3, 5, 7), 2: (1, 2, 5)}
    fronts = few.get(decades, (1, 3) if decades < wanted else (1,))
    powers = range(first, last + 1, max(1, math.ceil(decades / wanted)))
    found = [float(f"{front}e{power}") for power in powers for front in fronts]
    return [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def tick_said(value: float) -> str:
    """A number, short, for an axis."""
    size = abs(value)
    if size != 0 and not 1e-3 <= size < 1e6:
        return _scientific(value, 2)
    text = f"{round(size):,}" if size >= 1000 else _trimmed(f"{size:.{6 - _digits(size)}f}")
    return f"−{text}" if value < 0 else text


def said(value: float) -> str:
    """A number with four digits that count."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size != 0 and not 1e-4 <= size < 1e7:
        return _scientific(value, 3)
    text = f"{round(size):,}" if size >= 1000 else _trimmed(f"{size:.{4 - _digits(size)}f}")
    return f"−{text}" if value < 0 and text != "0" else text


def _digits(size: float) -> int:
    """How many digits stand before the point; less than none where zeros follow it."""
    return math.floor(math.log10(size)) + 1 if size else 1


def _scientific(value: float, digits: int) -> str:
    front, power = f"{value:.{digits}e}".split("e")
    return f"{_trimmed(front)}e{int(power)}".replace("-", "−")


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
