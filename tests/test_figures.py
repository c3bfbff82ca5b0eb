"""Figures for print: valid, sharp, the right way up, and safe from whatever the strings hold."""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from hiddenscope.views import Grid, Lines, Measure, Panels, Series, View, Words
from hiddenscope.views.figures import Format, image
from hiddenscope.views.figures.grid import _layout as grid_layout
from hiddenscope.views.figures.grid import plan_grid
from hiddenscope.views.figures.lettering import Lettering, drawable, width_of
from hiddenscope.views.figures.lines import plan_lines
from hiddenscope.views.figures.panels import plan_panels
from hiddenscope.views.figures.scale import MAPS, ends, levels, linear_ticks, log_ticks, said, tick_said

FORMATS: list[Format] = [".png", ".svg", ".pdf"]
SVG = "{http://www.w3.org/2000/svg}"
FRANCE = ("The", " capital", " of", " France", " is", " Paris", ".")
HOSTILE = (
    "$x_1$",
    "$\\frac{",
    "</text><script>",
    "<!--",
    "]]>",
    "a\u2028b",
    "\u202eevil\u2066",
    "nul\0",
    "lone\ud83d",
    "\tTAB\r\n",
    "\x1b[31m",
    "𝕏" * 250_000,
    "e\u0301\u0301 مرحبا 你好 👩‍🔬",
    "\u0301",
    "\ufffe\uffff",
    "",
    " ",
)


def sites(depth: int) -> tuple[str, ...]:
    return (*(f"layer.{k}" for k in range(depth + 1)), "final")


def grid(depth: int = 3, tokens: tuple[str, ...] = FRANCE, **more: Any) -> Grid:
    values = np.random.default_rng(0).lognormal(3, 1, (depth + 2, len(tokens)))
    return Grid("Norms", sites(depth), tokens, (Measure("norm", values, unit="L2", scale="log"),), **more)


def lines(**more: Any) -> Lines:
    series = (
        Series("first", [1.0, 20.0, 3.0, 4.0]),
        Series("rest", [1.0, 2, 3, 4], [0.5, 1, 2, 3], [2.0, 3, 4, 5], "half"),
    )
    return Lines("Along", sites(2), series, **more)


def panels() -> Panels:
    points = np.random.default_rng(1).normal(size=(6, 20, 2))
    points[1, 3] = np.nan
    labels = ["Toronto"] * 10 + ["Montreal"] * 10
    captions, messages = [f"silhouette {k}" for k in range(6)], ["all states are equal", *[""] * 5]
    return Panels("Cities", sites(4), points, labels, captions=captions, messages=messages, rows=["a"] * 3 + ["b"] * 3)


VIEWS: dict[str, View] = {"grid": grid(), "lines": lines(), "panels": panels()}


def pixels(views: list[View]) -> NDArray[np.float64]:
    return np.asarray(imread(io.BytesIO(image(views, ".png", dpi=72)), format="png")[:, :, :3], dtype=np.float64)


def texts(views: list[View]) -> list[str]:
    root = ET.fromstring(image(views, ".svg"))
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", VIEWS)
def test_files_are_whole_and_of_a_sane_size(name: str, suffix: Format) -> None:
    made = image([VIEWS[name]], suffix)
    starts = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
    assert made.startswith(starts[suffix])
    assert 4_000 < len(made) < 250_000
    assert made == image([VIEWS[name]], suffix), "the same views give the same bytes"


def test_text_is_text_in_svg_and_fonts_travel_in_pdf() -> None:
    found = texts([grid(), lines(unit="L2", y_name="norm"), panels()])
    assert {"␣capital", "layer.0", "final", "norm (L2)", "rest (band: half)", "Montreal", "silhouette 4"} <= set(found)
    made = image([grid()], ".pdf")
    assert b"/FontFile2" in made
    assert b"/CIDFontType2" in made
    unicode = b"".join(
        zlib.decompress(part) for part in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", made, re.DOTALL)
    )
    assert b"beginbfchar" in unicode or b"beginbfrange" in unicode, "what is copied out of it is text"


def test_layer_0_is_at_the_bottom_and_the_first_token_at_the_left() -> None:
    values = np.zeros((5, 4))
    values[0, 0] = 1
    shown = Grid("One cell", sites(3), ("a", "b", "c", "d"), (Measure("x", values),))
    dark = np.array([int(MAPS["sequential"][-1][at : at + 2], 16) / 255 for at in (1, 3, 5)])
    whole = pixels([shown])
    rows, columns = np.nonzero((np.abs(whole - dark) < 0.02).all(axis=-1))
    layout = grid_layout(shown, Lettering())
    cell = rows < whole.shape[0] - 50  # what is below is the key
    left, right, top, bottom = columns[cell].min(), columns[cell].max(), rows[cell].min(), rows[cell].max()
    assert right - left == pytest.approx(layout.wide, abs=3)
    assert bottom - top == pytest.approx(layout.high, abs=3)
    assert left == pytest.approx(12 + layout.cells.left, abs=2)
    assert bottom == pytest.approx(12 + 20 + layout.cells.bottom, abs=2)


def test_a_missing_cell_is_clear() -> None:
    values = np.ones((2, 2))
    values[1, 1] = np.nan
    shown = Grid("Gap", ("layer.0", "layer.1"), ("a", None), (Measure("x", values),))
    layout, whole = grid_layout(shown, Lettering()), pixels([shown])
    x, y = int(12 + layout.cells.right - layout.wide + 4), int(32 + layout.cells.top + 3)
    assert (whole[y, x] > 0.98).all()
    assert whole[y + int(layout.high), x].min() < 0.5


@pytest.mark.parametrize("count", [1, 7, 12, 20, 60, 512])
@pytest.mark.parametrize("depth", [0, 12, 40])
def test_labels_never_overlap(count: int, depth: int) -> None:
    long = (" internationalisation", "the", "\n", " a")
    shown = grid(depth, tuple(long[k % 4] for k in range(count)))
    layout = grid_layout(shown, Lettering())
    step = int(np.ceil(8.5 / layout.wide))
    apart = {0.0: layout.wide, 45.0: layout.wide * 0.707, 90.0: layout.wide}[layout.turn] * step
    needed = max(width_of(token, 7.5) for token in layout.tokens) if layout.turn == 0 else 7.5
    assert apart >= needed
    assert layout.high * np.ceil(8.5 / layout.high) >= 8.5
    assert layout.cells.left > max(width_of(site, 7.5) for site in shown.sites)
    assert layout.width < 900 and layout.height < 900


def test_hostile_strings_are_drawn_as_text() -> None:
    words = Words.of(np.array(HOSTILE, dtype=object).reshape(1, -1, 1).repeat(2, axis=0))
    measures = (Measure("$m$\0", np.ones((2, len(HOSTILE))), unit="</svg>"),)
    named = {"title": "</svg>\0 $x$", "note": "\u202e$\\bad{\ud800"}
    shown: list[View] = [
        Grid(sites=("layer.0", "\x1b"), tokens=HOSTILE, second=HOSTILE, measures=measures, words=words, **named),
        Lines(x=HOSTILE, series=(Series("$s$\0", np.ones(len(HOSTILE)), style="bar"),), y_name="<y>\0", **named),
        Panels(
            sites=("a\0",), points=np.zeros((1, len(HOSTILE), 2)), labels=HOSTILE, captions=("$c$\ud800 </",), **named
        ),
    ]
    for suffix in FORMATS:
        assert len(image(shown, suffix)) > 10_000
    found = "\n".join(texts(shown))
    nul, end = Lettering().text("\0"), Lettering().text("\r")
    assert {"$x_1$", "</text><script>", "‹U+202E›evil‹U+2066›", f"nul{nul}", "lone‹U+D83D›", f"⇥TAB{end}⏎"} <= set(
        found.split("\n")
    )
    assert "你好" in found, "whoever reads an SVG has fonts of their own"
    assert not set(found) & {"\0", "\x1b", "\u202e", "\ud800", "\u2028"}


def test_lettering() -> None:
    plain = Lettering()
    assert plain.token(" a\nb") == "␣a⏎b"
    assert plain.token(None) == ""
    assert plain.token("") == "∅"
    assert plain.token("x" * 50) == "x" * 17 + "…"
    assert plain.text("\u0301x") == "◌\u0301x"
    assert plain.text("\0") == ("␀" if drawable("␀") else "‹U+0000›")
    assert Lettering(any_character=True).text("你\0") == f"你{plain.text(chr(0))}"
    assert plain.fitted("internationalisation", 40, 8).endswith("…")
    assert width_of(plain.fitted("internationalisation", 40, 8), 8) <= 40
    assert plain.fitted("x", 1, 8) == ""
    assert plain.wrapped("one two  three", 30, 8) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("measure", "low", "high"),
    [
        (Measure("x", [[1.0, 5.0]]), 0, 5),
        (Measure("x", [[-2.0, 5.0]]), -2, 5),
        (Measure("x", [[1.0, 5.0]], scale="log"), 1, 5),
        (Measure("x", [[0.0, 5.0, 1e-9]], scale="log"), 5e-6, 5),
        (Measure("x", [[-2.0, 5.0]], meaning="diverging"), -5, 5),
        (Measure("x", [[1.0, np.nan, np.inf]]), 0, 1),
        (Measure("x", [[np.nan]]), 0, 1),
        (Measure("x", [[3.0]], limits=(1, 4)), 1, 4),
    ],
)
def test_scales_begin_and_end_where_the_data_says(measure: Measure, low: float, high: float) -> None:
    assert ends(measure.numbers.astype(np.float64), measure) == pytest.approx((low, high))


def test_levels() -> None:
    signed = Measure("x", [[-4.0, 0.0, 2.0, np.nan]], meaning="diverging")
    assert levels(signed)[0, :3].tolist() == [0, 0.5, 0.75]
    assert np.isnan(levels(signed)[0, 3])
    log = levels(replace(signed, scale="log"))[0]
    assert (log[0], log[1]) == (0, 0.5)
    assert 0.9 < log[2] < 1
    each = Measure("x", [[1.0, 2.0], [10.0, 20.0]], each_layer=True)
    assert levels(each).tolist() == [[0.5, 1], [0.5, 1]]
    assert levels(Measure("x", [[0.0, 0.0]], meaning="diverging")).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("value", "four", "short"),
    [
        (0, "0", "0"),
        (22_345.6, "22,346", "22,346"),
        (-1234.5, "−1,234", "−1,234"),
        (0.125, "0.125", "0.125"),
        (3.14159, "3.142", "3.14159"),
        (1e-7, "1e−7", "1e−7"),
        (-2.5e9, "−2.5e9", "−2.5e9"),
        (999.96, "1000", "999.96"),
    ],
)
def test_numbers_as_a_person_reads_them(value: float, four: str, short: str) -> None:
    assert (said(value), tick_said(value)) == (four, short)
    assert (said(np.nan), said(-np.inf)) == ("none", "−∞")


def test_ticks() -> None:
    assert linear_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert linear_ticks(2, 2) == [2]
    assert log_ticks(2, 30) == [2, 5, 10, 20]
    assert log_ticks(1, 1e12) == [1, 1000, 1e6, 1e9, 1e12]


@pytest.mark.parametrize(
    "values", [[0.0, 0, 0, 0], [np.nan] * 4, [-1.0, -2, -3, -1], [1e-30, 1e30, 1, 1], [5.0, 5, 5, 5]]
)
@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("style", ["line", "dash", "bar"])
def test_lines_of_any_numbers(values: list[float], scale: Any, style: Any) -> None:
    series = Series("x", values, np.array(values) - 1, np.array(values) + 1, "band", style)
    assert image([Lines("Any", sites(2), (series,), scale=scale)], ".svg").endswith(b"</svg>\n")


def test_any_number_of_panels_and_points() -> None:
    one = Panels("None", ("layer.0",), np.full((1, 3, 2), np.nan))
    many = Panels("Many", sites(31), np.random.default_rng(0).normal(size=(33, 2_000, 2)))
    classes = Panels("Classes", ("layer.0",), np.zeros((1, 60, 2)), [f"class {k}" for k in range(60)])
    empty = Panels("Empty", ("layer.0",), np.zeros((1, 0, 2)))
    for shown in (one, many, classes, empty):
        assert image([shown], ".png", dpi=40).startswith(b"\x89PNG")
    assert "and 20 more" in texts([classes])


def test_plans_keep_their_promise() -> None:
    plans = [plan_grid(grid(), Lettering()), plan_lines(lines(), Lettering()), plan_panels(panels(), Lettering())]
    sheet = pixels(list(VIEWS.values()))
    assert sheet.shape[1] == pytest.approx(max(plan.width for plan in plans) + 24, abs=1)
    assert (sheet[:, :10] == 1).all() and (sheet[:, -10:] == 1).all(), "nothing is cut off at an edge"
    assert (sheet[:8] == 1).all() and (sheet[-8:] == 1).all()


def test_the_users_own_settings_neither_help_nor_harm() -> None:
    plain = image([grid()], ".png", dpi=50)
    ours = {
        "text.usetex": True,
        "font.size": 40,
        "savefig.bbox": "tight",
        "figure.facecolor": "black",
        "svg.fonttype": "path",
    }
    with mpl.rc_context(ours):  # type: ignore[arg-type]
        before = dict(mpl.rcParams)
        assert image([grid()], ".png", dpi=50) == plain
        assert b"<text" in image([grid()], ".svg")
        assert dict(mpl.rcParams) == before


def test_no_window_system_is_touched() -> None:
    program = (
        "import sys, hiddenscope.views as v; from hiddenscope.views.figures import image; "
        "image([v.Lines('a', ('b',), (v.Series('c', [1.0]),))], '.png'); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
