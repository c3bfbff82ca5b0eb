"""Lines in a browser."""

from dataclasses import replace

import numpy as np
import pytest

from hiddenscope.results.pictures import Lines, Series
from tests.pages.looking import Opener, Shown
from tests.pages.scenes import lines


def across(shown: Shown) -> np.ndarray:
    """Return how far along the axis each dot stands, from 0 to 1."""
    places = np.array([float(dot.attrib["cx"]) for dot in shown.drawing("circle")])
    return (places - places[0]) / (places[-1] - places[0])


def test_hovering_and_keys_read_out_every_series(show: Opener) -> None:
    shown = show([lines()], color_scheme="dark")
    shown.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert shown.readout().startswith("layer.2  accuracy 0.51")
    assert "shuffled labels 0.5 [0.42 to 0.58]" in shown.readout()
    shown.press("End")
    assert shown.readout().startswith("final  ")
    shown.point(500, 150)
    assert shown.readout().startswith("layer.15")
    shown.keep("lines-dark")
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
    button = again.view().get_by_role("button", name="selectivity")
    assert button.get_attribute("aria-pressed") == "false"


def test_lines_are_saved(show: Opener) -> None:
    shown = show([lines()])
    rows = shown.rows()
    back = np.array([np.float32(row["accuracy"]) for row in rows])
    assert np.array_equal(back, lines().series[0].y) and rows[10]["selectivity"] == ""
    assert "accuracy (band: 95% interval)" in shown.written()
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
    heights = [float(dot.attrib["cy"]) for dot in shown.drawing("circle")]
    assert len(heights) == 5 and heights == sorted(heights, reverse=True)
    step = heights[1] - heights[2]
    assert step == pytest.approx(heights[2] - heights[3], abs=0.05) and step > 10
    said = shown.written()
    assert any("both sides of zero" in text for text in said) and "−0.1" in said


def test_places_on_the_axis_are_as_far_apart_as_they_say(show: Opener) -> None:
    """Layers stand at their depth, numbers of a log axis by their doublings; the last
    layer is not hidden by `final`.
    """
    sites = ("layer.0", "layer.12", "layer.24", "layer.29", "final")
    chosen = Lines("Chosen", sites, (Series("one", np.arange(5.0)),))
    shown = show([chosen, lines()], width=390)
    depths = np.array([0, 12, 24, 29, 30]) / 30
    np.testing.assert_allclose(across(shown), depths, atol=1e-3)
    shown.point(0.6 * shown.canvas().evaluate("canvas => canvas.clientWidth"), 100)
    assert shown.readout().startswith(("layer.12", "layer.24"))
    assert {"30", "final"} <= set(shown.written(1))
    shown.keep("lines-narrow-light")
    shares = Series("share", 1 / np.arange(1.0, 9.0))
    numbers = tuple(map(str, range(1, 9)))
    law = Lines("Law", numbers, (shares,), "tokens back", scale="log", x_scale="log")
    shown = show([law], width=390)
    doublings = np.log2(np.arange(1.0, 9.0))
    np.testing.assert_allclose(law.places, doublings)
    np.testing.assert_allclose(across(shown), doublings / 3, atol=1e-3)
    assert {"1", "2", "4", "8"} <= set(shown.written())
    assert not {"3", "5", "6", "7"} & set(shown.written())
