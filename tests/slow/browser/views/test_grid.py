"""The grid in a browser: what is pointed at is read out, what is read out is what is
painted.
"""

import struct
from dataclasses import replace

import numpy as np
import pytest

from hiddenscope.results.pictures import Grid, Measure, Words
from hiddenscope.views.figures import style
from tests.pages.looking import Opener, Shown
from tests.pages.scenes import (
    FRANCE,
    GERMANY,
    comparison,
    lines,
    long,
    norms,
    panels,
    sites,
    visibility,
    words,
)

DARK = ("#191d2f", "#243159", "#284886", "#136a98", "#148ba1", "#23aca6")
DARK += ("#5cca9f", "#abe18d", "#f8f085")
# Of a grid of 32 or 14 sites and 7 tokens in a wide window.
TOP, HIGH, LOW, RIGHT = 6, 18, 26, 10
LEFT = """() => {
  const context = document.createElement('canvas').getContext('2d');
  context.font = `12px ${getComputedStyle(document.documentElement).getPropertyValue('--font')}`;
  return Math.ceil(Math.max(...['layer.30', 'layer.12', 'final'].map((site) => context.measureText(site).width))) + 14;
}"""


def place(shown: Shown, row: int, column: int, rows: int = 32) -> tuple[float, float]:
    left = shown.page.evaluate(LEFT)
    width = shown.canvas().evaluate("canvas => canvas.clientWidth")
    high = HIGH if rows > 14 else LOW
    return (
        left + (column + 0.5) * (width - RIGHT - left) / len(FRANCE),
        TOP + (rows - row - 0.5) * high,
    )


def shade(level: float, dark: bool = False) -> tuple[int, ...]:
    shades = DARK if dark else style.SEQUENTIAL
    at = round(255 * level) / 255 * (len(shades) - 1)
    parts = []
    for k in (1, 3, 5):
        values = [int(shade[k : k + 2], 16) for shade in shades]
        parts.append(round(float(np.interp(at, range(len(shades)), values))))
    return tuple(parts)


@pytest.mark.parametrize("dark", [False, True])
def test_hovering_reads_out_the_cell_and_its_colour_is_its_value(
    show: Opener, dark: bool
) -> None:
    grid = norms()
    values = grid.measures[0].numbers
    shown = show([grid], color_scheme="dark" if dark else "light")
    assert "Point at a cell" in shown.readout()
    for row, column in [(0, 0), (31, 6), (12, 0), (20, 3)]:
        x, y = place(shown, row, column)
        shown.point(x, y)
        said = shown.readout()
        assert grid.sites[row] in said.split()
        assert f"“{FRANCE[column].replace(' ', '␣')}” token {column}" in said
        number = float(said.split("norm ")[1].split()[0].replace(",", ""))
        assert number == pytest.approx(values[row, column], rel=1e-3)
        low, high = np.log(values.min()), np.log(values.max())
        expected = shade((np.log(values[row, column]) - low) / (high - low), dark)
        assert shown.pixel(x, y)[:3] == pytest.approx(expected, abs=3)
    shown.keep(f"grid-norms-{'dark' if dark else 'light'}")


ABOVE = """() => {
  const axis = document.querySelector('.axis'), canvas = axis.querySelector('canvas');
  const box = axis.getBoundingClientRect(), readout = document.querySelector('.readout').getBoundingClientRect();
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const columns = new Set();
  for (let at = 3; at < data.length; at += 4) {
    if (data[at] > 60) columns.add(Math.floor(((at - 3) / 4 % canvas.width) / devicePixelRatio));
  }
  return { hidden: axis.hidden, top: box.top, bottom: box.bottom, under: readout.bottom, inked: [...columns] };
}"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1920, 1080)])
@pytest.mark.parametrize("kind", ["few", "many", "two rows"])
def test_the_tokens_of_a_tall_grid_are_seen_wherever_it_is_scrolled_to(
    show: Opener, kind: str, width: int, height: int
) -> None:
    """They stand above it, and stay below the read-out while the page is scrolled."""
    values = np.abs(np.random.default_rng(3).normal(size=(32, 7)))
    grid = {
        "few": norms(),
        "many": norms(tokens=(" unbelievable",) * 60),
        "two rows": replace(
            norms(), measures=(Measure("distance", values),), second=GERMANY
        ),
    }[kind]
    shown = show([grid], width=width, height=height, prose=["", "The end.\n\n" * 60])
    shown.keep(f"grid-tokens-above-{kind}-{width}")
    left = shown.page.evaluate(LEFT)
    for scrolled in (0, 250, 450):
        shown.page.evaluate(
            f"scrollTo(0, document.querySelector('.stage').offsetTop - 60 + {scrolled})"
        )
        shown.settle()
        seen = shown.page.evaluate(ABOVE)
        assert not seen["hidden"], scrolled
        assert seen["under"] - 1 <= seen["top"] < seen["bottom"] < height, seen
        # Over the columns, not the sites alone.
        assert max(seen["inked"]) - left > 0.5 * (min(width, 1080) - left - 60)
    shown.page.evaluate("scrollTo(0, document.querySelector('.foot').offsetTop)")
    top = "document.querySelector('.foot').getBoundingClientRect().top"
    assert shown.page.evaluate(ABOVE)["bottom"] <= shown.page.evaluate(top)
    whole = show([norms(depth=8)])
    assert whole.page.evaluate(ABOVE)["hidden"], "they are seen once"


def test_arrow_keys_move_a_cursor_that_is_read_out(show: Opener) -> None:
    shown = show([norms()])
    shown.press("ArrowRight")
    assert shown.readout().startswith("layer.0  “The”")
    shown.press("ArrowUp", "ArrowUp", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert shown.readout().startswith("layer.2  “␣capital”")
    shown.press("PageUp", "End")
    assert shown.readout().startswith("final  “.”")
    shown.press("PageDown", "Home", "ArrowLeft", "ArrowDown")
    assert shown.readout().startswith("layer.0  “The”")
    live = shown.view().locator("output.readout")
    assert live.get_attribute("aria-live") == "polite"


def test_a_click_pins_a_second_click_or_escape_unpins(show: Opener) -> None:
    shown = show([norms()])
    x, y = place(shown, 5, 2)
    shown.point(x, y)
    for undo in ("click", "Escape"):
        shown.canvas().click(position={"x": x, "y": y})
        assert "(pinned)" in shown.readout()
        assert shown.fragment == "#0.pin=layer.5%7E2"
        if undo == "click":
            shown.canvas().click(position={"x": x, "y": y})
        else:
            shown.press("Escape")
        assert "(pinned)" not in shown.readout()
        assert shown.fragment in ("", "#")


def test_a_link_brings_back_what_was_shown(show: Opener) -> None:
    shown = show([words()])
    shown.view().locator("select").select_option("1")
    shown.choose("Linear")
    shown.choose("Each layer")
    shown.press("ArrowUp", "ArrowUp", "ArrowUp", "Enter")
    assert "pinned" in shown.readout() and "entropy" in shown.readout()
    again = show([words()], fragment=shown.fragment)
    assert again.readout() == shown.readout()
    checked = again.view().locator("input:checked").all()
    assert [one.input_value() for one in checked] == ["linear", "layer"]
    again.page.evaluate("location.hash = '#0.pin=layer.1~0&0.measure=99'")
    again.until("document.querySelector('.readout').textContent.startsWith('layer.1')")


def test_scales_change_the_colours(show: Opener) -> None:
    shown = show([norms()])
    x, y = place(shown, 31, 3)
    first = shown.pixel(x, y)
    shown.choose("Linear")
    second = shown.pixel(x, y)
    shown.choose("Each layer")
    third = shown.pixel(x, y)
    assert len({first, second, third}) == 3
    level = float(norms().measures[0].numbers[31, 3] / 30)
    assert third[:3] == pytest.approx(shade(level), abs=4)


def test_a_map_shows_what_influences_a_cell_and_what_it_influences(
    show: Opener,
) -> None:
    grid = visibility()
    shown = show([grid])
    x, y = place(shown, 6, 3, 14)
    shown.point(x, y)
    map_ = grid.measures[0].influence
    assert map_ is not None
    earlier = shown.pixel(*place(shown, 4, 1, 14))
    later = shown.pixel(*place(shown, 9, 5, 14))
    blank = place(shown, 9, 1, 14)
    assert earlier[2] > earlier[0] + 20  # blue: it influences the pinned cell
    assert later[0] > later[2] + 20  # orange: the pinned cell influences it
    # Neither: zero, and its mark.
    assert shown.pixel(blank[0] + 8, blank[1])[3] == 0 and shown.pixel(*blank)[3] > 0
    key = str(shown.view().locator("canvas.legend").get_attribute("aria-label"))
    for which in ("on", "of"):
        assert f"influence {which} the selected state" in key
    for words_ in ("influenced most by", "influences most"):
        assert words_ in shown.readout()
    shown.keep("grid-visibility-light")
    shown.choose("What influences it")
    shown.point(x, y)
    pair = (place(shown, 9, column, 14) for column in (5, 1))
    one, other = (shown.pixel(*at)[:3] for at in pair)
    assert one == other
    shown.choose("What it influences")
    shown.canvas().click(position={"x": x, "y": y})
    shown.point(*place(shown, 9, 5, 14))
    said = f"the pinned state’s influence on it: {map_[9, 5, 6, 3]:.3f}"[:41]
    assert said in shown.readout()
    assert "its influence on the pinned state: exactly 0" in shown.readout()
    assert "0.pin=layer.6%7E3" in shown.fragment and "0.show=targets" in shown.fragment
    shown.point(2, 2)
    cells = {(row["site"], row["position"]): row for row in shown.rows()}
    saved = float(cells["layer.9", "5"]["influence of the pinned state"])
    assert saved == pytest.approx(float(map_[9, 5, 6, 3]), rel=1e-4)


def test_fixed_limits_can_be_seen_on_a_log_scale(show: Opener) -> None:
    values = np.tile([1e-4, 1e-2, 1.0, 0.0, np.nan, np.inf, 1e-3], (14, 1))
    measure = Measure("p", values, scale="log", limits=(0, 1))
    grid = Grid("Chance", tuple(f"layer.{k}" for k in range(14)), FRANCE, (measure,))
    shown = show([grid])
    shown.choose("Linear")
    assert shown.pixel(*place(shown, 5, 1, 14))[:3] == pytest.approx(shade(0.01), abs=3)
    shown.choose("Log")
    rare, some, sure = (
        shown.pixel(*place(shown, 5, column, 14)) for column in range(3)
    )
    assert sure[:3] == pytest.approx(shade(1.0), abs=3)
    assert sum(rare[:3]) > sum(some[:3]) > sum(sure[:3])  # lighter is less
    x, y = place(shown, 5, 4, 14)
    assert shown.pixel(x, y)[3] > 0 and shown.pixel(x + 14, y)[3] == 0, (
        "no colour, and a stroke through the middle"
    )
    assert shown.pixel(*place(shown, 5, 5, 14))[:3] == sure[:3]


def test_words_are_in_the_cells_and_the_read_out_has_them_all(show: Opener) -> None:
    shown = show([words()])
    shown.press("ArrowRight")
    assert shown.readout().count("0.") >= 4 and "says" in shown.readout()
    shown.keep("grid-words-light")


def test_a_full_stop_in_a_cell_can_be_seen(show: Opener) -> None:
    """And the key of the colours is above the grid, in sight with it."""
    strings = np.full((32, 7, 1), ".", dtype=object)
    measure = Measure("probability", np.zeros((32, 7)), limits=(0, 1))
    grid = Grid("W", sites(30), FRANCE, (measure,), words=Words.of(strings))
    shown = show([grid])
    ink = shown.canvas().evaluate(
        "(canvas) => { const { data } = canvas.getContext('2d').getImageData(0, 6,"
        " canvas.width, 22); return data.filter((part, i) => i % 4 === 0 && part < 120"
        " && data[i + 3]).length; }"
    )
    assert ink >= 4 * len(FRANCE)
    key, cells = (
        shown.view().locator(part).bounding_box()
        for part in ("canvas.legend", ".scroller")
    )
    assert key and cells and key["y"] + key["height"] <= cells["y"]


def test_gaps_are_no_values(show: Opener) -> None:
    shown = show([comparison()])
    shown.press("Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert "no token against “␣Germany”" in shown.readout()
    assert "no value" in shown.readout()
    shown.keep("grid-comparison-light")
    rows = shown.rows()
    assert rows[4]["distance (L2)"] == "" and rows[4]["second"] == " Germany"


def test_a_long_text_scrolls_under_labels_that_stay(show: Opener) -> None:
    shown = show([long()])
    scroller = shown.view().locator(".scroller")
    sizes = scroller.evaluate(
        "box => [box.scrollWidth, box.clientWidth,"
        " document.documentElement.scrollWidth, innerWidth]"
    )
    assert sizes[0] > 9000 and sizes[2] <= sizes[3]
    labels = (
        "canvas => canvas.getContext('2d').getImageData(0, 0, 60,"
        " 700).data.reduce((sum, byte) => sum + byte, 0)"
    )
    canvas = shown.view().locator("canvas.back")
    before = canvas.evaluate(labels)
    scroller.evaluate("box => { box.scrollLeft = 4000 }")
    shown.settle()
    after = canvas.evaluate(labels)
    assert before == after
    shown.press("End")
    assert "token 511" in shown.readout()
    assert scroller.evaluate("box => box.scrollLeft") > 8000
    shown.keep("grid-long-light")


def test_the_saved_picture_drawing_and_numbers_and_the_table(show: Opener) -> None:
    grid = norms()
    shown = show([grid])
    png = shown.save("PNG")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24])[0] > 1500
    said = {"Norms", "layer.0", "final", "␣France", "norm (L2)"}
    assert said <= set(shown.written())
    assert len(shown.drawing("rect")) > 32 * 7
    rows = shown.rows()
    back = np.array([np.float32(row["norm (L2)"]) for row in rows]).reshape(32, 7)[::-1]
    assert np.array_equal(back, grid.measures[0].numbers)
    assert rows[1]["token"] == " capital"
    shown.view().locator("summary").click()
    shown.settle()
    table = shown.view().locator("tbody tr")
    assert table.count() == 32 * 7
    assert table.first.inner_text().split()[:3] == ["final", "0", "The"]


def test_exact_zero_has_a_mark_and_the_least_amount_has_none(show: Opener) -> None:
    values = np.tile([1.0, 0.0, 1e-30, 0.5, 0.5, 0.5, 0.5], (14, 1))
    sites = tuple(f"layer.{k}" for k in range(14))
    shown = show([Grid("Zeros", sites, FRANCE, (Measure("p", values),))])
    (zero_x, y), (small_x, _) = place(shown, 5, 1, 14), place(shown, 5, 2, 14)
    assert shown.pixel(zero_x, y)[3] > 0 and shown.pixel(zero_x + 8, y)[3] == 0
    assert shown.pixel(small_x, y) == shown.pixel(small_x + 8, y)
    shown.point(zero_x, y)
    assert "p exactly 0" in shown.readout()
    shown.point(small_x, y)
    assert "p 1e−30" in shown.readout()


def test_the_title_and_the_file_name_say_which_measure_is_shown(show: Opener) -> None:
    grid = comparison()
    first, second = grid.measures
    titled = replace(grid, measures=(first, replace(second, title="Means apart")))
    shown = show([grid, titled])
    for place_, title, name in (
        (0, f"{grid.title}: mean difference", "mean-difference"),
        (1, "Means apart", "means"),
    ):
        view = shown.view(place_)
        assert view.locator("h2").inner_text() == grid.title
        view.get_by_role("combobox").select_option("1")
        assert view.locator("h2").inner_text() == title
        with shown.page.expect_download() as waiting:
            view.get_by_role("button", name="CSV", exact=True).click()
        assert name in waiting.value.suggested_filename


def test_what_is_pointed_at_is_read_out_on_the_screen_wherever_one_has_scrolled(
    show: Opener,
) -> None:
    """The first line of a tall grid's view is above the screen when its lowest layer is
    pointed at.
    """
    shown = show([norms()], width=1366, height=500)
    for row in (31, 0):
        shown.canvas().scroll_into_view_if_needed()
        shown.page.evaluate("(y) => scrollTo(0, y)", 0 if row else 10_000)
        x, y = place(shown, row, 1)
        shown.point(x, y)
        for part in (".readout", ".hint"):
            box = shown.view().locator(part).bounding_box()
            assert box and box["y"] >= 0 and box["y"] + box["height"] <= 500, part
            assert norms().sites[row] in shown.view().locator(part).inner_text()
    shown = show([norms()])
    x, y = place(shown, 20, 3)
    shown.point(x, y)
    canvas, hint = shown.canvas().bounding_box(), shown.view().locator(".hint")
    box = hint.bounding_box()
    assert canvas and box
    assert 0 < box["y"] - (canvas["y"] + y) < 40
    assert 0 < box["x"] - (canvas["x"] + x) < 40
    shown.point(2, 2)
    assert not hint.is_visible()


def test_a_log_scale_that_would_drop_values_is_not_offered(show: Opener) -> None:
    values = np.tile(np.linspace(-1, 1, 7), (14, 1))
    sites = tuple(f"layer.{k}" for k in range(14))
    measures = (
        Measure("mean", values, scale="log"),
        Measure("size", 10 ** (2 * values)),
    )
    shown = show([Grid("Means", sites, FRANCE, measures)], fragment="#0.scale=log")
    log = shown.view().get_by_role("radio", name="Log", exact=True)
    assert log.count() == 0
    x, y = place(shown, 5, 0, 14)
    assert shown.pixel(x, y)[:3] == pytest.approx(shade(0.0), abs=3), (
        "the scale is linear, whatever the address says"
    )
    shown.view().get_by_role("combobox").select_option("1")
    assert log.is_visible()


def test_a_phone_reads_out_what_a_finger_touches_and_shows_that_there_is_more(
    show: Opener,
) -> None:
    one = Grid("One", ("final",), ("a",), (Measure("m", [[0.0]]),))
    views = [norms(), long(), lines(), visibility(), panels(), comparison(), one]
    size = {"width": 390, "height": 844, "device_scale_factor": 2}
    prose = [f"weights: {'0f' * 32}"]
    shown = show(views, **size, has_touch=True, prose=prose, title="w" * 60)
    assert not shown.is_wide
    shown.press("ArrowUp", place=6)
    assert "m exactly 0" in shown.readout(6)
    assert not shown.view(0).locator(".more").is_visible()
    assert shown.view(1).locator(".more").is_visible()
    more, cells, axis = (
        shown.view(1).locator(part).bounding_box()
        for part in (".more", ".scroller", ".axis")
    )
    assert more and cells and axis
    assert more["y"] + more["height"] <= min(cells["y"], axis["y"]), (
        "it covers no token"
    )
    shown.view(1).locator(".scroller").evaluate(
        "scroller => { scroller.scrollLeft = 1e6; }"
    )
    shown.settle()
    assert not shown.view(1).locator(".more").is_visible()
    for place_, says in ((0, "“␣capital”"), (2, "accuracy")):
        shown.canvas(place_).tap(position={"x": 120, "y": 100})
        shown.settle()
        assert says in shown.readout(place_)
    shown.page.evaluate("scrollTo(0, 0)")
    shown.keep("phone-light")


def test_the_address_restores_the_scroll_position_on_another_screen_too(
    show: Opener,
) -> None:
    shown = show([norms(), comparison(), lines()], height=500)
    shown.page.mouse.wheel(0, 900)
    shown.until("location.hash.includes('at=')")
    before = shown.view(1).bounding_box()
    assert before
    again = show([norms(), comparison(), lines()], height=500, fragment=shown.fragment)
    again.until("scrollY > 0")
    after = again.view(1).bounding_box()
    assert after and after["y"] == pytest.approx(before["y"], abs=3)
    small = show(
        [norms(), comparison(), lines()], width=390, height=700, fragment=shown.fragment
    )
    small.until("scrollY > 0")
    there = small.view(1).bounding_box()
    assert there and (there["y"] <= 0) == (before["y"] <= 0)
    small.page.evaluate("scrollTo(0, 0)")
    small.until("!location.hash.includes('at=')")


@pytest.mark.parametrize("dark", [False, True])
def test_every_word_can_be_read_and_the_answer_is_framed_where_it_is_settled(
    show: Opener, dark: bool
) -> None:
    """The contrast of WCAG 2, of every word against its cell, is 4.5 to 1 or more."""
    grid = words()
    assert grid.words is not None
    chosen = grid.words.chosen.copy()
    # Settled from this row on, after a first time by chance.
    for column, row in ((2, 5), (4, 9)):
        chosen[row:, column, 0] = chosen[1, column, 0] = chosen[-1, column, 0]
        chosen[row - 1, column, 0] = (chosen[-1, column, 0] + 1) % len(grid.words.words)
    grid = replace(grid, words=replace(grid.words, chosen=chosen, framed=not dark))
    shown = show([grid], color_scheme="dark" if dark else "light")
    ink = ("#000000", "#ffffff")
    boxes = [one.attrib for one in shown.drawing("rect")]
    cells = [box for box in boxes if 20 < float(box["height"]) < 30]
    texts = [one.attrib for one in shown.drawing("text")]
    said = [text for text in texts if text.get("fill") in ink]

    def light(shade: str) -> float:
        parts = [int(shade[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    contrasts = []
    for word in said:
        x, y = float(word["x"]), float(word["y"])
        under = next(
            cell
            for cell in cells
            if 0 <= x - float(cell["x"]) < float(cell["width"])
            and 0 <= y - float(cell["y"]) < 23
        )
        pair = sorted([light(word["fill"]), light(under["fill"])])
        contrasts.append((pair[1] + 0.05) / (pair[0] + 0.05))
    assert len(contrasts) == 14 * 7 and min(contrasts) >= 4.5
    assert grid.words is not None
    top = grid.words.chosen[:, :, 0]
    settled = [
        next(row for row in range(14) if (top[row:, column] == top[-1, column]).all())
        for column in range(7)
    ]
    first = [int(np.argmax(top[:, column] == top[-1, column])) for column in range(7)]
    assert (settled[2], settled[4]) == (5, 9) != (first[2], first[4])
    frames = [box for box in boxes if box.get("stroke") in ink]
    assert len(frames) == (0 if dark else sum(row < 13 for row in settled))
