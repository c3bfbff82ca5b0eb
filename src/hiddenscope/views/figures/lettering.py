"""Words on paper: what cannot be seen is marked, what no font can draw is written out, what is long is cut.

>>> Lettering().token(" capital\\n"), Lettering().text("a\\u202eb"), Lettering().token("𒀀")
('␣capital⏎', 'a‹U+202E›b', '‹U+12000›')
>>> Lettering(any_character=True).token("𒀀")
'𒀀'
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

FAMILY = "DejaVu Sans"  # it comes with matplotlib, so a figure is the same everywhere
OTHERS = (  # for what it lacks, where a machine has them
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "PingFang SC", "Hiragino Sans", "Microsoft YaHei",
    "Yu Gothic", "Malgun Gothic", "Apple SD Gothic Neo", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS",
    "Noto Sans Devanagari", "Noto Sans Thai", "Nirmala UI", "Segoe UI Symbol", "Apple Symbols", "Noto Sans Symbols2",
    "Noto Emoji", "Symbola",
)  # fmt: skip
NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
BLANK = set("\u00a0\u115f\u1160\u3164\uffa0\u034f\u180b\u180c\u180d\u180e\u180f")
MARKS = {"Mn", "Mc", "Me"}
JOINED = re.compile("(?<=[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff])\u200d(?=[\u2600-\u27bf\U0001f000-\U0001faff])")


@dataclass(frozen=True)
class Lettering:
    """How strings are written in one figure.

    With `any_character` even those stay that the font lacks, for a file whose reader brings fonts along.
    """

    any_character: bool = False

    def token(self, token: str | None, most: int = 18) -> str:
        """A token, as a reader knows it: spaces and line ends are marked."""
        if token is None:
            return ""
        return self.text(token, most).replace(" ", "␣") if token else "∅"

    def text(self, text: str, most: int = 300) -> str:
        """A text: spaces are spaces, and the rest is marked."""
        cut = text if len(text) <= most else f"{text[: most - 1]}…"
        joined = {match.start() for match in JOINED.finditer(cut)} if self.any_character else set()
        seen = "".join(char if place in joined else self._seen(char) for place, char in enumerate(cut))
        return f"◌{seen}" if seen and unicodedata.category(seen[0]) in MARKS else seen

    def fitted(self, text: str, room: float, size: float, *, bold: bool = False) -> str:
        """As much of a text as there is room for, in points; where it is cut it says so."""
        if width_of(text, size, bold=bold) <= room:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if width_of(f"{text[:middle]}…", size, bold=bold) <= room else (low, middle - 1)
        return f"{text[:low]}…" if low else ""

    def wrapped(self, text: str, room: float, size: float) -> list[str]:
        """Words in lines that are at most so wide, in points."""
        lines: list[str] = []
        for word in filter(None, text.split(" ")):
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and width_of(longer, size) <= room:
                lines[-1] = longer
            else:
                lines.append(self.fitted(word, room, size))
        return lines

    def _seen(self, char: str) -> str:
        if unicodedata.category(char) not in UNSEEN and char not in BLANK:
            return char if self.any_character or drawable(char) else _code(char)
        picture = NAMED.get(char) or (chr(0x2400 + ord(char)) if ord(char) < 32 else "")
        return picture if picture and drawable(picture) else _code(char)


@lru_cache(maxsize=1)
def families() -> list[str]:
    """The one font of all figures, and those that help it out on this machine."""
    from matplotlib.font_manager import fontManager

    known = {entry.name for entry in fontManager.ttflist}
    return [FAMILY, *(name for name in OTHERS if name in known)]


def font(size: float, *, bold: bool = False) -> "FontProperties":
    """The fonts in one size."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(family=[*families(), "sans-serif"], size=size, weight="bold" if bold else "normal")


@lru_cache(maxsize=4)
def _drawn(bold: bool) -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    weight = "bold" if bold else "normal"
    paths = [findfont(FontProperties(family=name, weight=weight)) for name in families()]
    return frozenset(code for path in paths for code in get_font(path).get_charmap())


def drawable(char: str) -> bool:
    """Whether the font has a character, light and bold."""
    return ord(char) in _drawn(False) and ord(char) in _drawn(True)


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """How wide a text is, in points; a character that the font lacks counts as a square."""
    known = "".join(char for char in text if drawable(char))
    return (_width(known, bold) + (len(text) - len(known))) * size


@lru_cache(maxsize=20_000)
def _width(text: str, bold: bool) -> float:
    from matplotlib.textpath import text_to_path

    measured = 40.0  # large, since glyphs are placed on whole pixels
    width, _, _ = text_to_path.get_text_width_height_descent(text, font(measured, bold=bold), ismath=False)
    return float(width) / measured


def _code(char: str) -> str:
    return f"‹U+{ord(char):04X}›"
