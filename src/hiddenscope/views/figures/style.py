"""How figures look: their colours and fonts, and numbers and strings as labels.

In a label what cannot be seen is marked, what no font can draw is written out, and what
is long is cut.

>>> Lettering().token(" capital\\n"), Lettering().text("a\\u202eb"), Lettering().token("𒀀")
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
from typing import TYPE_CHECKING, Any, Final

from hiddenscope.views.values import Meaning

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.font_manager import FontProperties
    from matplotlib.ticker import Locator

INK, MUTED, FAINT, PAPER = "#14171c", "#5b6270", "#d5d9e0", "#ffffff"
ACCENT = "#b3401f"
SMALL, LABEL = 8.0, 8.0  # sizes of type, in points

# The page has the same colours, in `static/colour.js`.
SEQUENTIAL: Final = {
    "light": (
        "#faf7e1",
        "#cce3bc",
        "#89d1b1",
        "#51b8ac",
        "#049daa",
        "#037ea0",
        "#005f97",
        "#133f87",
        "#1f206d",
    ),
    "dark": (
        "#191d2f",
        "#243159",
        "#284886",
        "#136a98",
        "#148ba1",
        "#23aca6",
        "#5cca9f",
        "#abe18d",
        "#f8f085",
    ),
}
"""From little to much, evenly spaced. Lightness runs evenly, so that the order is seen
with any eyes.
"""

DIVERGING: Final = {
    "light": (
        "#004b97",
        "#3274c4",
        "#74a0d8",
        "#b3cbea",
        "#f7f6f1",
        "#e6bfae",
        "#cf8a6b",
        "#b55320",
        "#803100",
    ),
    "dark": (
        "#77c7fe",
        "#459cd4",
        "#3c7194",
        "#30495a",
        "#232321",
        "#56402e",
        "#8d6039",
        "#c78142",
        "#f8aa66",
    ),
}
"""From below zero to above, evenly spaced, zero in the middle."""

CLASSES: Final = {
    "light": (
        "#0072b2",
        "#d55e00",
        "#009e73",
        "#b8569a",
        "#c98a00",
        "#3ba3dd",
        "#7a6a00",
        "#333b4d",
    ),
    "dark": (
        "#4ba3dc",
        "#f08343",
        "#2fc49a",
        "#d98cbf",
        "#e8b13d",
        "#8fd0f5",
        "#d6ca5a",
        "#e3e8f2",
    ),
}
"""For labels and series, in this order; after eight they come round again."""

NO_CLASS: Final = {"light": ("#8a919c",), "dark": ("#737b87",)}
"""For points that belong to no class."""

FAMILY = "DejaVu Sans"  # it comes with matplotlib, so a figure is the same everywhere
OTHER_FAMILIES = (  # for what it lacks, where a machine has them
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "PingFang SC", "Hiragino Sans", "Microsoft YaHei",
    "Yu Gothic", "Malgun Gothic", "Apple SD Gothic Neo", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS",
    "Noto Sans Devanagari", "Noto Sans Thai", "Nirmala UI", "Segoe UI Symbol", "Apple Symbols", "Noto Sans Symbols2",
    "Noto Emoji", "Symbola",
)  # fmt: skip
CONTROL_PICTURES = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
BLANK = set("\u00a0\u115f\u1160\u3164\uffa0\u034f\u180b\u180c\u180d\u180e\u180f")
MARKS = {"Mn", "Mc", "Me"}
JOINED = re.compile(
    "(?<=[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff])\u200d(?=[\u2600-\u27bf\U0001f000-\U0001faff])"
)


def settings() -> dict[Any, Any]:
    """What matplotlib is set to while a figure is drawn."""
    quiet = {
        f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")
    }
    ticks = {
        f"{axis}tick.{name}": value
        for axis in "xy"
        for name, value in {
            "color": MUTED,
            "labelsize": SMALL,
            "major.width": 0.6,
            "major.pad": 3,
        }.items()
    }
    return {
        "svg.fonttype": "none",  # letters stay letters
        "svg.hashsalt": "hiddenscope",
        "pdf.fonttype": 42,
        "font.family": [*families(), "sans-serif"],
        "font.size": LABEL,
        "text.parse_math": False,  # a token may hold a dollar sign
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
        **quiet,
        **ticks,
    }


@cache
def colormap(meaning: Meaning) -> "Colormap":
    """The colours of a measure; a missing value is clear."""
    from matplotlib.colors import LinearSegmentedColormap

    table = DIVERGING if meaning == "diverging" else SEQUENTIAL
    return LinearSegmentedColormap.from_list(meaning, table["light"])


def class_colour(place: int) -> str:
    """The colour of a class or a series."""
    return CLASSES["light"][place % len(CLASSES["light"])]


def number(value: float, _: float | None = None) -> str:
    """A number at a tick, as matplotlib's formatters are called."""
    if value and not 1e-3 <= abs(value) < 1e6:
        front, power = f"{value:.2e}".split("e")
        text = f"{front.rstrip('0').rstrip('.')}e{int(power)}"
    else:
        text = f"{value:,.6g}"
    return text.replace("-", "−")


def linear_ticks(most: int) -> "Locator":
    """Round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])


def log_ticks(low: float, high: float, most: int) -> "Locator":
    """Powers of ten, and parts of them where the range is short; in less than half a
    decade just round numbers.
    """
    from matplotlib.ticker import LogLocator

    decades = math.log10(high / low)
    if decades < 0.5:
        return linear_ticks(most)
    parts = (
        (1, 2, 3, 5, 7)
        if decades < 1
        else (1, 2, 5)
        if decades < 2
        else (1, 3)
        if decades < most
        else (1,)
    )
    return LogLocator(subs=parts, numticks=most + 1)


@cache
def families() -> list[str]:
    """The one font of all figures, and those that help it out on this machine."""
    from matplotlib.font_manager import fontManager

    known = {entry.name for entry in fontManager.ttflist}
    return [FAMILY, *(name for name in OTHER_FAMILIES if name in known)]


def _font(size: float, bold: bool) -> "FontProperties":
    from matplotlib.font_manager import FontProperties

    return FontProperties(
        family=[*families(), "sans-serif"],
        size=size,
        weight="bold" if bold else "normal",
    )


@cache
def _characters(bold: bool) -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    weight = "bold" if bold else "normal"
    paths = [
        findfont(FontProperties(family=name, weight=weight)) for name in families()
    ]
    return frozenset(code for path in paths for code in get_font(path).get_charmap())


def drawable(char: str) -> bool:
    """Whether the fonts have a character, light and bold."""
    return ord(char) in _characters(False) and ord(char) in _characters(True)


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """How wide a text is, in points; a character that the fonts lack counts as a
    square.
    """
    known = "".join(char for char in text if drawable(char))
    return (_width(known, bold) + (len(text) - len(known))) * size


@lru_cache(maxsize=20_000)
def _width(text: str, bold: bool) -> float:
    from matplotlib.textpath import text_to_path

    measured = 40.0  # large, since glyphs are placed on whole pixels
    width, _, _ = text_to_path.get_text_width_height_descent(
        text, _font(measured, bold), ismath=False
    )
    return float(width) / measured


@dataclass(frozen=True)
class Lettering:
    """How strings are written in one figure.

    With `any_character` even those stay that the fonts lack, for a file whose reader
    brings fonts along.
    """

    any_character: bool = False

    def token(self, token: str | None, most: int = 18) -> str:
        """A token as a reader knows it: spaces and line ends are marked."""
        if token is None:
            return ""
        return self.text(token, most).replace(" ", "␣") if token else "∅"

    def text(self, text: str, most: int = 300) -> str:
        """A text of at most so many characters: spaces stay spaces, and what cannot be
        seen is marked.
        """
        cut = text if len(text) <= most else f"{text[: most - 1]}…"
        joined = (
            {match.start() for match in JOINED.finditer(cut)}
            if self.any_character
            else set()
        )
        seen = "".join(
            char if place in joined else self._seen(char)
            for place, char in enumerate(cut)
        )
        return f"◌{seen}" if seen and unicodedata.category(seen[0]) in MARKS else seen

    def fitted(self, text: str, room: float, size: float, *, bold: bool = False) -> str:
        """As much of a text as fits into so many points; an ellipsis shows where it is
        cut.
        """
        if width_of(text, size, bold=bold) <= room:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high)
                if width_of(f"{text[:middle]}…", size, bold=bold) <= room
                else (low, middle - 1)
            )
        return f"{text[:low]}…" if low else ""

    def wrapped(
        self, text: str, room: float, size: float, *, bold: bool = False
    ) -> str:
        """A text in lines of at most so many points; a word that is longer than a line
        is broken.
        """
        lines: list[str] = []
        for word in filter(None, text.split(" ")):
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and width_of(longer, size, bold=bold) <= room:
                lines[-1] = longer
            else:
                lines += _broken(word, room, size, bold=bold)
        return "\n".join(lines)

    def _seen(self, char: str) -> str:
        if unicodedata.category(char) not in UNSEEN and char not in BLANK:
            return char if self.any_character or drawable(char) else _code(char)
        picture = CONTROL_PICTURES.get(char) or (
            chr(0x2400 + ord(char)) if ord(char) < 32 else ""
        )
        return picture if picture and drawable(picture) else _code(char)


def _broken(word: str, room: float, size: float, *, bold: bool) -> list[str]:
    """A word in pieces of at most so many points, and of one character at least."""
    pieces = [""]
    for char in word:
        if pieces[-1] and width_of(f"{pieces[-1]}{char}", size, bold=bold) > room:
            pieces.append("")
        pieces[-1] += char
    return pieces


def _code(char: str) -> str:
    return f"‹U+{ord(char):04X}›"
