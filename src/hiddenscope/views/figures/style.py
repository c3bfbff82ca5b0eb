"""The style of figures: their colours and fonts, and numbers and strings as labels.

In a label what cannot be seen is marked, what no font can draw is written out, and what
is long is cut.

>>> plain = Lettering()
>>> plain.token(" capital\\n"), plain.text("a\\u202eb"), plain.token("𒀀")
('␣capital⏎', 'a‹U+202E›b', '‹U+12000›')
>>> Lettering(any_character=True).token("𒀀")
'𒀀'
>>> number(22345.6), number(-0.00001), number(0.25)
('22,345.6', '−1e−5', '0.25')
"""

import math
import re
import unicodedata
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from hiddenscope.results.pictures import Meaning
from hiddenscope.results.sentences import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.ticker import Locator

INK, MUTED, FAINT, PAPER = "#14171c", "#5b6270", "#d5d9e0", "#ffffff"
ACCENT = "#b3401f"
# Font sizes, in points.
SMALL, LABEL = 8.0, 8.0

# The light colours of `static/colour.js`, which the page has. From little to much,
# evenly spaced: lightness runs evenly, so that colour-blind readers see the order too.
SEQUENTIAL = (
    "#faf7e1",
    "#cce3bc",
    "#89d1b1",
    "#51b8ac",
    "#049daa",
    "#037ea0",
    "#005f97",
    "#133f87",
    "#1f206d",
)
# From below zero to above, evenly spaced, zero in the middle.
DIVERGING = (
    "#004b97",
    "#3274c4",
    "#74a0d8",
    "#b3cbea",
    "#f7f6f1",
    "#e6bfae",
    "#cf8a6b",
    "#b55320",
    "#803100",
)
# For labels and series, in this order; after eight they begin again.
CLASSES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b8569a",
    "#c98a00",
    "#3ba3dd",
    "#7a6a00",
    "#333b4d",
)
# For points that belong to no class.
NO_CLASS = "#8a919c"

# It comes with matplotlib, so a figure is the same everywhere.
FAMILY = "DejaVu Sans"
# For characters that it lacks, where a machine has them.
OTHER_FAMILIES = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Apple SD Gothic Neo",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Arial Unicode MS",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Nirmala UI",
    "Segoe UI Symbol",
    "Apple Symbols",
    "Noto Sans Symbols2",
    "Noto Emoji",
    "Symbola",
)
CONTROL_PICTURES = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
BLANK = set("\u00a0\u115f\u1160\u3164\uffa0\u034f\u180b\u180c\u180d\u180e\u180f")
MARKS = {"Mn", "Mc", "Me"}
# A zero-width joiner between two emoji makes one of them, and is not written out.
JOINED = re.compile(
    "(?<=[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff])"
    "\u200d"
    "(?=[\u2600-\u27bf\U0001f000-\U0001faff])"
)


def settings() -> dict[Any, Any]:
    """Return what matplotlib is set to while a figure is drawn."""
    looks: dict[str, Any] = {}
    for side in ("left", "right", "top", "bottom"):
        looks[f"axes.spines.{side}"] = False
    for axis in ("xtick", "ytick"):
        looks[f"{axis}.color"] = MUTED
        looks[f"{axis}.labelsize"] = SMALL
        looks[f"{axis}.major.width"] = 0.6
        looks[f"{axis}.major.pad"] = 3
    return {
        # Letters stay letters in SVG and PDF, and the same figure has the same bytes.
        "svg.fonttype": "none",
        "svg.hashsalt": "hiddenscope",
        "pdf.fonttype": 42,
        "font.family": [*font_families(), "sans-serif"],
        "font.size": LABEL,
        # A token may hold a dollar sign.
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.labelsize": LABEL,
        "axes.titlesize": LABEL,
        "axes.titlelocation": "left",
        "axes.edgecolor": FAINT,
        "axes.linewidth": 0.6,
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "legend.frameon": False,
        **looks,
    }


@cache
def colormap(meaning: Meaning) -> "Colormap":
    """Return the colours of a measure; a missing value is clear."""
    from matplotlib.colors import LinearSegmentedColormap

    table = DIVERGING if meaning == "diverging" else SEQUENTIAL
    return LinearSegmentedColormap.from_list(meaning, table)


def class_colour(place: int) -> str:
    """Return the colour of a class or a series."""
    return CLASSES[place % len(CLASSES)]


def note(
    axes: "Axes",
    text: str,
    corner: tuple[float, float],
    offset: tuple[float, float],
    ha: str,
    va: str,
) -> None:
    """Write a small text beside a corner of the axes, some points away from it."""
    places = ("axes fraction", "offset points")
    look: dict[str, Any] = {"ha": ha, "va": va, "color": MUTED, "size": SMALL}
    axes.annotate(text, corner, offset, *places, **look)


def number(value: float, _: float | None = None) -> str:
    """Format a number at a tick; matplotlib passes its position too."""
    if value and not 1e-3 <= abs(value) < 1e6:
        front, power = f"{value:.2e}".split("e")
        text = f"{front.rstrip('0').rstrip('.')}e{int(power)}"
    else:
        text = f"{value:,.6g}"
    return text.replace("-", "−")


def linear_ticks(most: int) -> "Locator":
    """Place at most this many ticks, at round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])


def log_ticks(low: float, high: float, most: int) -> "Locator":
    """Place ticks at powers of ten, and at parts of them where the range is short; in
    less than half a decade at round numbers.
    """
    from matplotlib.ticker import LogLocator

    decades = math.log10(high / low)
    parts: tuple[int, ...] = (1,)
    if decades < 0.5:
        return linear_ticks(most)
    if decades < 1:
        parts = (1, 2, 3, 5, 7)
    elif decades < 2:
        parts = (1, 2, 5)
    elif decades < most:
        parts = (1, 3)
    return LogLocator(subs=parts, numticks=most + 1)


@cache
def font_families() -> list[str]:
    """Return the font of all figures, and those that help it out on this machine."""
    from matplotlib.font_manager import fontManager

    installed = {entry.name for entry in fontManager.ttflist}
    return [FAMILY, *(name for name in OTHER_FAMILIES if name in installed)]


@cache
def _characters() -> frozenset[int]:
    """Return the characters that the fonts have, light and bold."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    weights = []
    for weight in ("normal", "bold"):
        characters: set[int] = set()
        for name in font_families():
            path = findfont(FontProperties(family=name, weight=weight))
            characters.update(get_font(path).get_charmap())
        weights.append(characters)
    return frozenset.intersection(*map(frozenset, weights))


def drawable(char: str) -> bool:
    """Tell whether the fonts have a character, light and bold."""
    return ord(char) in _characters()


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return how wide a text is, in points; a character that the fonts lack counts as
    a square.
    """
    known = "".join(filter(drawable, text))
    return (_width(known, bold) + (len(text) - len(known))) * size


@lru_cache(maxsize=20_000)
def _width(text: str, bold: bool) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    # Glyphs are placed on whole pixels, so a text is measured at a large size.
    size = 40.0
    font = FontProperties(
        family=[*font_families(), "sans-serif"],
        size=size,
        weight="bold" if bold else "normal",
    )
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / size


@dataclass(frozen=True)
class Lettering:
    """How strings are written in one figure.

    With `any_character`, characters that the fonts lack stay too, for a file whose
    reader brings fonts along.
    """

    any_character: bool = False

    def token(self, token: str | None, most: int = 18) -> str:
        """Return a token as a reader knows it: spaces and line ends are marked."""
        if token is None:
            return ""
        return self.text(token, most).replace(" ", "␣") or "∅"

    def text(self, text: str, most: int = 300) -> str:
        """Return a text of at most this many characters: spaces stay spaces, and what
        cannot be seen is marked.
        """
        text = shortened(text, most)
        joiners = set()
        if self.any_character:
            joiners = {match.start() for match in JOINED.finditer(text)}
        visible = ""
        for place, char in enumerate(text):
            visible += char if place in joiners else self._visible(char)
        if visible and unicodedata.category(visible[0]) in MARKS:
            # A mark is drawn on the character before it, so it gets one.
            return f"◌{visible}"
        return visible

    def fitted(self, text: str, room: float, size: float) -> str:
        """Return as much of a text as fits into this many points; an ellipsis shows
        where it is cut.
        """
        if width_of(text, size) <= room:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if width_of(f"{text[:middle]}…", size) <= room:
                low = middle
            else:
                high = middle - 1
        return f"{text[:low]}…" if low else ""

    def wrapped(
        self, text: str, room: float, size: float, *, bold: bool = False
    ) -> str:
        """Return a text in lines of at most this many points; a word that is longer
        than a line is broken.
        """
        lines: list[str] = []
        for word in filter(None, text.split(" ")):
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and width_of(longer, size, bold=bold) <= room:
                lines[-1] = longer
                continue
            lines.append("")
            for char in word:
                longer = f"{lines[-1]}{char}"
                if lines[-1] and width_of(longer, size, bold=bold) > room:
                    lines.append("")
                lines[-1] += char
        return "\n".join(lines)

    def _visible(self, char: str) -> str:
        code = f"‹U+{ord(char):04X}›"
        if unicodedata.category(char) not in UNSEEN and char not in BLANK:
            return char if self.any_character or drawable(char) else code
        picture = CONTROL_PICTURES.get(char, "")
        if not picture and ord(char) < 32:
            # Unicode has pictures of the control characters, in their order.
            picture = chr(0x2400 + ord(char))
        return picture if picture and drawable(picture) else code
