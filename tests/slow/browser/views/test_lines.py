"""Lines in a browser."""

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from hiddenscope.views import Lines, Series
from tests.pages.looking import Opener
from tests.pages.scenes import lines
from tests.slices import sliced


@pytest.mark.parametrize("dark", sliced([False, True], 1))
def test_hovering_and_keys_read_out_every_series(show: Opener, dark: bool) -> None:
    shown = show([lines()], color_scheme="dark" if dark else "light")
    shown.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert (
        shown.readout().startswith("layer.2  accuracy 0.51")
        and "shuffled labels 0.5 [0.42 to 0.58]" in shown.readout()
    )
    shown.press("End")
    assert shown.readout().startswith("final  ")
    shown.point(500, 150)
    assert shown.readout().startswith("layer.15")
    shown.keep(f"lines-{'dark' if dark else 'light'}")
    shown.press("Home", *["ArrowRight"] * 10)
    assert "selectivity no value" in shown.readout()


def test_a_series_is_put_away_and_a_link_remembers(show: Opener) -> None:
    scene = replace(lines(), scale="log")
    shown = show([scene])
    shown.view().get_by_role("button", name="selectivity").click()
    shown.choose("Linear")
    shown.press("ArrowRight")
    assert "selectivity" not in shown.readout()
    again = show([scene], fragment=shown.fragment)
    again.press("ArrowRight")
    assert again.readout() == shown.readout()
    assert again.view().get_by_role("radio", name="Linear", exact=True).is_checked()
    assert (
        again.view()
        .get_by_role("button", name="selectivity")
        .get_attribute("aria-pressed")
        == "false"
    )


def test_lines_are_saved(show: Opener) -> None:
    shown = show([lines()])
    rows = list(csv.DictReader(io.StringIO(shown.save("CSV").decode("utf-8-sig"))))
    back = np.array([np.float32(row["accuracy"]) for row in rows])
    assert np.array_equal(back, lines().series[0].y) and rows[10]["selectivity"] == ""
    drawing = ElementTree.fromstring(shown.save("SVG"))
    assert "accuracy (band: 95% interval)" in [
        node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert shown.save("PNG")[:4] == b"\x89PNG"


def test_odd_numbers_are_drawn_or_left_out(show: Opener) -> None:
    odd = [np.nan, np.inf, -np.inf, 0.0, -1e-30, 3e38]
    series = tuple(
        Series(style, odd, odd, odd, style=style) for style in ("line", "dash", "bar")
    )
    flat = Lines("Flat", ("0",), (Series("one", [2.0]),), x_name="strength")
    shown = show([Lines("Odd", tuple("abcdef"), series, scale="log"), flat])
    shown.choose("Linear")
    shown.press("End")
    assert "line 3e38" in shown.readout()
    shown.press("ArrowRight", place=1)
    assert shown.readout(1) == "0  one 2"


def test_a_log_scale_leaves_out_no_value(show: Opener) -> None:
    """Below zero a log scale goes on to the other side; each point is drawn, in the
    order of the values.
    """
    y = [-1.0, -0.01, 0.0, 0.01, 1.0]
    shown = show([Lines("Signs", tuple("abcde"), (Series("one", y),), scale="log")])
    drawing = ElementTree.fromstring(shown.save("SVG"))
    name = "{http://www.w3.org/2000/svg}"
    heights = [float(dot.attrib["cy"]) for dot in drawing.iter(f"{name}circle")]
    assert len(heights) == 5 and heights == sorted(heights, reverse=True)
    assert (
        heights[1] - heights[2] == pytest.approx(heights[2] - heights[3], abs=0.05)
        and heights[1] - heights[2] > 10
    )
    said = [node.text or "" for node in drawing.iter(f"{name}text")]
    assert any("both sides of zero" in text for text in said) and "−0.1" in said


def test_layers_stand_at_their_depth_and_final_does_not_hide_the_last(
    show: Opener,
) -> None:
    chosen = Lines(
        "Chosen",
        ("layer.0", "layer.12", "layer.24", "layer.29", "final"),
        (Series("one", np.arange(5.0)),),
    )
    deep = lines()
    shown = show([chosen, deep], width=390)
    name = "{http://www.w3.org/2000/svg}"
    drawing = ElementTree.fromstring(shown.save("SVG"))
    across = np.array(
        [float(dot.attrib["cx"]) for dot in drawing.iter(f"{name}circle")]
    )
    np.testing.assert_allclose(
        (across - across[0]) / (across[-1] - across[0]),
        np.array([0, 12, 24, 29, 30]) / 30,
        atol=1e-3,
    )
    shown.point(0.6 * shown.canvas().evaluate("canvas => canvas.clientWidth"), 100)
    assert shown.readout().startswith("layer.12") or shown.readout().startswith(
        "layer.24"
    )
    said = [
        node.text
        for node in ElementTree.fromstring(shown.save("SVG", 1)).iter(f"{name}text")
    ]
    assert "30" in said and "final" in said
    shown.keep("lines-narrow-light")


def test_numbers_of_a_log_axis_stand_by_their_doublings(show: Opener) -> None:
    """On the page and on paper; the powers of two are labelled."""
    shares = Series("share", 1 / np.arange(1.0, 9.0))
    distances = tuple(map(str, range(1, 9)))
    law = Lines("Law", distances, (shares,), "tokens back", scale="log", x_scale="log")
    expected = np.log2(np.arange(1.0, 9.0))
    np.testing.assert_allclose(law.places, expected)
    shown = show([law], width=390)
    name = "{http://www.w3.org/2000/svg}"
    drawing = ElementTree.fromstring(shown.save("SVG"))
    across = np.array(
        [float(dot.attrib["cx"]) for dot in drawing.iter(f"{name}circle")]
    )
    np.testing.assert_allclose(
        (across - across[0]) / (across[-1] - across[0]), expected / 3, atol=1e-3
    )
    texts = [node.text for node in drawing.iter(f"{name}text")]
    assert {"1", "2", "4", "8"} <= set(texts)
    assert not {"3", "5", "6", "7"} & set(texts)
