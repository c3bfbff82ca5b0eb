"""Figures for print: valid, sharp, the right way up, and safe from whatever the strings
hold.
"""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from hiddenscope.results.pictures import (
    Grid,
    Lines,
    Measure,
    Panels,
    Series,
    View,
    Words,
)
from hiddenscope.views.figures.grid import ends, norm_of
from hiddenscope.views.figures.pages import FigureFormat, _figure, _own_settings, image
from hiddenscope.views.figures.style import (
    ACCENT,
    CLASSES,
    FAINT,
    NO_CLASS,
    Lettering,
    colormap,
    drawable,
    linear_ticks,
    log_ticks,
    number,
    width_of,
)
from tests.unit.views.recorded import recorded

FORMATS: list[FigureFormat] = [".png", ".svg", ".pdf"]
SVG = "{http://www.w3.org/2000/svg}"
FRANCE = ("The", " capital", " of", " France", " is", " Paris", ".")
HOSTILE = ("$x_1$", "$\\frac{", "</text><script>", "<!--", "]]>", "a\u2028b", "")
HOSTILE += ("\u202eevil\u2066", "nul\0", "lone\ud83d", "\tTAB\r\n", "\x1b[31m", " ")
HOSTILE += ("𝕏" * 250_000, "e\u0301\u0301 مرحبا 你好 👩‍🔬", "\u0301", "\ufffe\uffff")


def sites(depth: int) -> tuple[str, ...]:
    return (*(f"layer.{k}" for k in range(depth + 1)), "final")


def grid(depth: int = 3, tokens: tuple[str, ...] = FRANCE, **more: Any) -> Grid:
    values = np.random.default_rng(0).lognormal(3, 1, (depth + 2, len(tokens)))
    measures = (Measure("norm", values, unit="L2", scale="log"),)
    return Grid("Norms", sites(depth), tokens, measures, **more)


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
    words = {
        "captions": [f"silhouette {k}" for k in range(6)],
        "messages": ["all states are equal", *[""] * 5],
    }
    return Panels("Cities", sites(4), points, labels, rows=[*"aaabbb"], **words)


VIEWS: list[View] = [grid(), lines(), panels()]


def pixels(views: list[View]) -> NDArray[np.float64]:
    picture = imread(io.BytesIO(image(views, ".png", dpi=72)), format="png")
    return np.asarray(picture[:, :, :3], dtype=np.float64)


def drawn(views: list[View]) -> Figure:
    with _own_settings():
        return _figure(views, Lettering())


def place(axes: Axes, figure: Figure) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of axes in points, from the upper left corner."""
    box, (wide, high) = axes.get_position(), figure.get_size_inches() * 72
    return box.x0 * wide, (1 - box.y1) * high, box.x1 * wide, (1 - box.y0) * high


def texts(views: list[View]) -> list[str]:
    root = ET.fromstring(image(views, ".svg"))
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_files_are_whole_and_of_a_sane_size() -> None:
    for suffix, start in ((".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml")):
        made = image([lines()], suffix)
        assert made.startswith(start) and 4_000 < len(made) < 250_000
        assert made == image([lines()], suffix), "the same views give the same bytes"


def test_text_is_text_in_svg_and_fonts_travel_in_pdf() -> None:
    found = texts([grid(), lines(unit="L2", y_name="norm"), panels()])
    expected = {"␣capital", "layer.0", "final", "norm (L2)", "rest (band: half)"}
    assert expected | {"Montreal", "silhouette 4"} <= set(found)
    made = image([grid()], ".pdf")
    assert made.startswith(b"%PDF-") and b"/FontFile2" in made
    assert b"/CIDFontType2" in made
    streams = re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", made, re.DOTALL)
    unicode = b"".join(map(zlib.decompress, streams))
    # What is copied out of it is text.
    assert b"beginbfchar" in unicode or b"beginbfrange" in unicode


def test_layer_0_is_at_the_bottom_and_the_first_token_at_the_left() -> None:
    values = np.zeros((5, 4))
    values[0, 0] = 1
    shown = Grid("One cell", sites(3), ("a", "b", "c", "d"), (Measure("x", values),))
    whole, figure = pixels([shown]), drawn([shown])
    rows, columns = np.nonzero(
        (np.abs(whole - colormap("sequential")(1.0)[:3]) < 0.02).all(axis=-1)
    )
    left, top, right, bottom = place(figure.axes[0], figure)
    cell = rows < bottom + 2  # what is below is the key
    assert columns[cell].min() == pytest.approx(left, abs=2)
    assert columns[cell].max() == pytest.approx(left + (right - left) / 4, abs=2)
    assert rows[cell].max() == pytest.approx(bottom, abs=2)
    assert rows[cell].min() == pytest.approx(bottom - (bottom - top) / 5, abs=2)


def test_a_missing_cell_is_clear() -> None:
    values = np.ones((2, 2))
    values[1, 1] = np.nan
    shown = Grid("Gap", ("layer.0", "layer.1"), ("a", None), (Measure("x", values),))
    whole, figure = pixels([shown]), drawn([shown])
    _, top, right, bottom = place(figure.axes[0], figure)
    x, y = int(right - 4), int(top + 3)
    assert (whole[y, x] > 0.98).all()
    assert whole[int(bottom - 4), x].min() < 0.5


@pytest.mark.parametrize(
    ("count", "depth"), [(1, 0), (7, 40), (12, 12), (20, 0), (60, 40), (512, 12)]
)
def test_labels_never_overlap(count: int, depth: int) -> None:
    long = (" internationalisation", "the", "\n", " a")
    shown = grid(depth, tuple(long[k % 4] for k in range(count)))
    figure = drawn([shown])
    axes = figure.axes[0]
    points = Affine2D().scale(72 / figure.dpi)
    across, up = (
        [label.get_window_extent().transformed(points) for label in labels]
        for labels in (axes.get_xticklabels(), axes.get_yticklabels())
    )
    if axes.get_xticklabels()[0].get_rotation() == 45:
        gaps = np.diff([box.x1 for box in across]) * 0.707
        assert (gaps >= 7.5).all()
    else:
        assert all(after.x0 >= before.x1 - 0.5 for before, after in pairwise(across))
    assert all(above.y0 >= below.y1 - 1.5 for below, above in pairwise(up))
    left, *_ = place(axes, figure)
    assert left > 12 + max(width_of(site, 7.5) for site in shown.sites)
    assert (figure.get_size_inches() * 72 < 950).all()


@pytest.fixture(scope="module")
def hostile() -> list[View]:
    words = Words.of(
        np.array(HOSTILE, dtype=object).reshape(1, -1, 1).repeat(2, axis=0)
    )
    measures = (Measure("$m$\0", np.ones((2, len(HOSTILE))), unit="</svg>"),)
    named = {"title": "</svg>\0 $x$", "note": "\u202e$\\bad{\ud800"}
    evil = {"tokens": HOSTILE, "second": HOSTILE, "measures": measures, "words": words}
    series = (Series("$s$\0", np.ones(len(HOSTILE)), style="bar"),)
    points = {"points": np.zeros((1, len(HOSTILE), 2)), "labels": HOSTILE}
    return [
        Grid(sites=("layer.0", "\x1b"), **evil, **named),
        Lines(x=HOSTILE, series=series, y_name="<y>\0", **named),
        Panels(sites=("a\0",), captions=("$c$\ud800 </",), **points, **named),
    ]


@pytest.mark.slow
def test_hostile_strings_are_drawn_in_every_format(hostile: list[View]) -> None:
    for suffix in FORMATS:
        made = image(hostile, suffix)
        assert len(made) > 10_000 and made == image(hostile, suffix)


def test_hostile_strings_are_drawn_as_text(hostile: list[View]) -> None:
    found = "\n".join(texts(hostile))
    nul, end = Lettering().text("\0"), Lettering().text("\r")
    expected = {"$x_1$", "</text><script>", "‹U+202E›evil‹U+2066›", f"nul{nul}"}
    assert expected | {"lone‹U+D83D›", f"⇥TAB{end}⏎"} <= set(found.split("\n"))
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
    assert plain.wrapped("one two  three", 30, 8) == "one\ntwo\nthree"


def test_scales_begin_and_end_where_the_data_says() -> None:
    for measure, low, high in (
        (Measure("x", [[1.0, 5.0]]), 0, 5),
        (Measure("x", [[-2.0, 5.0]]), -2, 5),
        (Measure("x", [[1.0, 5.0]], scale="log"), 1, 5),
        (Measure("x", [[0.0, 5.0, 1e-9]], scale="log"), 5e-6, 5),
        (Measure("x", [[-2.0, 5.0]], meaning="diverging"), -5, 5),
        (Measure("x", [[1.0, np.nan, np.inf]]), 0, 1),
        (Measure("x", [[np.nan]]), 0, 1),
        (Measure("x", [[3.0]], limits=(1, 4)), 1, 4),
    ):
        found = ends(measure.numbers.astype(np.float64), measure)
        assert found == pytest.approx((low, high)), measure


def places(measure: Measure) -> list[float]:
    found = norm_of(measure)(measure.numbers.astype(np.float64))
    return np.ma.filled(found, np.nan)[0].tolist()


def test_where_values_are_on_the_scale_of_colours() -> None:
    assert places(Measure("norm", [[1.0, 100.0, 10.0]], scale="log")) == pytest.approx(
        [0, 1, 0.5]
    )
    signed = Measure("x", [[-4.0, 0.0, 2.0, np.nan]], meaning="diverging")
    assert places(signed)[:3] == [0, 0.5, 0.75]
    log = places(replace(signed, scale="log"))
    assert log[:2] == pytest.approx([0, 0.5])
    assert 0.9 < log[2] < 1
    assert places(Measure("x", [[0.0, 0.0]], meaning="diverging")) == [0.5, 0.5]
    by_layer = Measure("x", [[1.0, 2.0], [10.0, 20.0]], each_layer=True)
    each = drawn([Grid("Each", ("a", "b"), ("x", "y"), (by_layer,))])
    labels = [label.get_text() for label in each.axes[1].get_xticklabels()]
    assert labels == ["least", "most of its layer"]
    low, high = np.asarray(each.axes[0].collections[0].get_array())
    assert np.array_equal(low, high)


def test_numbers_as_a_person_reads_them() -> None:
    texts = {0: "0", 22_345.6: "22,345.6", -1234.5: "−1,234.5", 0.125: "0.125"}
    texts |= {3.14159: "3.14159", 1e-7: "1e−7", -2.5e9: "−2.5e9", 1_000: "1,000"}
    assert {value: number(value) for value in texts} == texts


def test_ticks() -> None:
    assert linear_ticks(5).tick_values(0, 1) == pytest.approx(
        [0, 0.2, 0.4, 0.6, 0.8, 1]
    )
    log = log_ticks(2, 30, 5).tick_values(2, 30)
    assert log[(log >= 2) & (log <= 30)].tolist() == [2, 5, 10, 20]
    assert len(log_ticks(11, 18, 5).tick_values(11, 18)) > 2
    assert len(log_ticks(1, 1e12, 5).tick_values(1, 1e12)) <= 8


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_lines_of_any_numbers(scale: Any) -> None:
    """Zeros, gaps, negative, extreme and equal numbers, in every style."""
    odd = [[0.0, 0, 0, 0], [np.nan] * 4, [-1.0, -2, -3, -1], [1e-30, 1e30, 1, 1]]
    for values in [*odd, [5.0, 5, 5, 5]]:
        y = np.array(values)
        series = [
            Series(style, y, y - 1, y + 1, "band", style)
            for style in ("line", "dash", "bar")
        ]
        made = image([Lines("Any", sites(2), tuple(series), scale=scale)], ".svg")
        assert made.endswith(b"</svg>\n")


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_the_largest_number_of_a_line_is_on_its_axis(scale: Any) -> None:
    series = Series("s", [0.5, 4.0, 2.0])
    figure = drawn([Lines("l", sites(1), (series,), scale=scale)])
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert low <= 0.5
    assert high > 4.0


def test_any_number_of_panels_and_points() -> None:
    one = Panels("None", ("layer.0",), np.full((1, 3, 2), np.nan))
    points = np.random.default_rng(0).normal(size=(17, 200, 2))
    many = Panels("Many", sites(15), points)
    names = [f"class {k}" for k in range(60)]
    classes = Panels("Classes", ("layer.0",), np.zeros((1, 60, 2)), names)
    empty = Panels("Empty", ("layer.0",), np.zeros((1, 0, 2)))
    for shown in (one, many, classes, empty):
        assert image([shown], ".png", dpi=40).startswith(b"\x89PNG")
    assert "and 20 more" in texts([classes])


def test_panels_on_paper_have_marks_and_grey_points() -> None:
    points = np.array([[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]])
    given = {"labels": ("none", "cats"), "grey": "none", "marks": ("", "apart")}
    shown = Panels("Two", ("layer.0", "layer.1"), points, **given)
    assert texts([shown]).count("apart") == 1
    figure = drawn([shown])
    plain, marked = (axes for axes in figure.axes if axes.collections)
    spines = (axes.spines["left"] for axes in (plain, marked))
    assert [to_hex(spine.get_edgecolor()) for spine in spines] == [FAINT, ACCENT]
    colours = map(to_hex, np.atleast_2d(plain.collections[0].get_facecolor()))
    assert [*colours] == [NO_CLASS, CLASSES[0]]
    legend = next(axes for axes in figure.axes if axes.get_legend())
    assert place(legend, figure)[1] <= place(plain, figure)[1], "the legend is on top"


def test_nothing_is_cut_off_at_an_edge() -> None:
    sheet = pixels(VIEWS)
    assert (sheet[:, :10] == 1).all() and (sheet[:, -10:] == 1).all()
    assert (sheet[:8] == 1).all() and (sheet[-8:] == 1).all()


def test_the_users_own_settings_neither_help_nor_harm() -> None:
    plain = image([grid()], ".png", dpi=50)
    theirs = {"text.usetex": True, "font.size": 40, "savefig.bbox": "tight"}
    theirs |= {"figure.facecolor": "black", "svg.fonttype": "path"}
    with mpl.rc_context(theirs):  # type: ignore[arg-type]
        before = dict(mpl.rcParams)
        assert image([grid()], ".png", dpi=50) == plain
        assert b"<text" in image([grid()], ".svg")
        assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_no_window_system_is_touched() -> None:
    program = (
        "import sys, hiddenscope.views as v; from hiddenscope.views.figures.pages"
        " import image; image([v.Lines('a', ('b',), (v.Series('c', [1.0]),))], '.png');"
        " print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_long_text_goes_on_beneath_itself() -> None:
    """Rows of tokens, none cut off, on a page and not on a banner."""
    tokens = tuple(f" w{k}" for k in range(120))
    said = Words.of(np.array([[[f"s{k}"] for k in range(120)]] * 3, dtype=object))
    values = np.arange(360.0).reshape(3, 120)
    shown = drawn([Grid("Long", sites(1), tokens, (Measure("x", values),), words=said)])
    assert shown.get_size_inches()[0] < 8
    rows = [axes for axes in shown.axes if axes.get_ylim() == (0, 3)]
    assert len(rows) > 5
    labels = [label.get_text() for axes in rows for label in axes.get_xticklabels()]
    assert [label.strip("␣") for label in labels] == [token.strip() for token in tokens]


def test_an_exact_zero_is_marked_on_paper_and_the_least_amount_is_not() -> None:
    shown = drawn(
        [Grid("Zero", ("a",), ("x", "y", "z"), (Measure("x", [[0.0, 1e-30, 1.0]]),))]
    )
    marks = [line.get_xydata().tolist() for line in shown.axes[0].lines]
    assert marks == [[[0.5, 0.5]]]
    assert any("exactly 0" in text.get_text() for text in shown.findobj(Text))


def test_layers_stand_at_their_depth_and_final_does_not_hide_the_last() -> None:
    places = ("layer.0", "layer.12", "layer.24", "layer.29", "final")
    axes = drawn([Lines("Chosen", places, (Series("s", np.arange(5.0)),))]).axes[0]
    assert axes.get_xticks().tolist() == [0, 12, 24, 29, 30]
    assert axes.lines[0].get_xdata().tolist() == [0, 12, 24, 29, 30]
    for depth in (12, 30, 48):
        series = Series("s", np.arange(depth + 2.0))
        axes = drawn([Lines("All", sites(depth), (series,))]).axes[0]
        labels = [label.get_text().strip() for label in axes.get_xticklabels()]
        assert labels[-2:] == [str(depth), "final"]


def test_a_printed_row_of_tokens_has_its_name_at_its_side() -> None:
    result = recorded("compare-short")
    figure = result.figure("grid")
    figure.canvas.draw()
    heights: dict[str, set[int]] = {}
    for text in figure.findobj(Text):
        if text.get_visible():
            height = round(text.get_window_extent().y0)
            heights.setdefault(text.get_text(), set()).add(height)
    (upper,), (lower,) = heights["first"], heights["second"]
    assert upper > lower
    for own, other, token in ((upper, lower, "␣c"), (lower, upper, "m")):
        shown = heights[token]
        assert min(abs(own - place) for place in shown) < 25
        assert min(abs(other - place) for place in shown) > 40


def test_a_point_between_gaps_is_a_dot() -> None:
    """A dashed line has no other dots."""
    y = [1.0, np.nan, 2.0, 3.0, np.nan, 4.0]
    series = tuple(Series(style, y, style=style) for style in ("line", "dash"))
    axes = drawn([Lines("Gaps", tuple("abcdef"), series)]).axes[0]
    dots = [line.get_markevery() for line in axes.lines[:2]]
    assert dots == [[0, 2, 3, 5], [0, 5]]
