"""Panels in a browser: points chosen in one are chosen in all."""

import csv
import io
import struct
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from looking import Opener, Shown
from scenes import panels

SIDE, TITLE, GAP = 330, 20, 16  # of three panels in a wide window


def places(panel: int, count: int = 3, points: int = 50) -> np.ndarray:
    """Where the points of a panel are on the canvas."""
    given = panels(count, points).points[panel].astype(float)
    low, high = given.min(0), given.max(0)
    unit = (given - (low + high) / 2) / (high - low).max() * 0.9 * [1, -1] + 0.5
    return unit * SIDE + [panel * (SIDE + GAP), TITLE]


def apart(panel: int) -> int:
    """A point that no other is near to."""
    at = places(panel)
    far = np.linalg.norm(at[:, None] - at[None], axis=-1) + 1e9 * np.eye(len(at))
    return int(far.min(1).argmax())


def loop(shown: Shown, corners: list[tuple[float, float]]) -> None:
    box = shown.canvas().bounding_box()
    assert box
    mouse = shown.page.mouse
    mouse.move(box["x"] + corners[0][0], box["y"] + corners[0][1])
    mouse.down()
    for x, y in [*corners[1:], corners[0]]:
        mouse.move(box["x"] + x, box["y"] + y, steps=4)
    mouse.up()
    shown.settle()


@pytest.mark.parametrize("dark", [False, True])
def test_hovering_shows_the_text(show: Opener, dark: bool) -> None:
    shown = show([panels()], color_scheme="dark" if dark else "light")
    point = apart(1)
    shown.point(*places(1)[point])
    assert shown.readout().endswith(f"Sentence {point} about a city on the lake")
    assert shown.view().locator(".hint").is_visible()
    assert ("Toronto" if point % 2 else "Montreal") in shown.view().locator(".hint").inner_text()
    ringed = places(2)[point] + [0, -6.5]
    assert shown.pixel(*ringed)[3] > 0  # the same point, in the other panel
    shown.keep(f"panels-3-{'dark' if dark else 'light'}")
    shown.point(5, 100)  # a panel that has no picture
    assert not shown.view().locator(".hint").is_visible()


def test_a_loop_chooses_the_same_points_in_every_panel(show: Opener) -> None:
    shown = show([panels()])
    point = apart(1)
    (x, y), other = places(1)[point], places(2)
    before = shown.pixel(*other[point], layer="back")
    loop(shown, [(x - 8, y - 8), (x + 8, y - 8), (x + 8, y + 8), (x - 8, y + 8)])
    assert shown.readout().startswith("1 of 50 points chosen")
    near = np.linalg.norm(other - other[point], axis=1)
    lonely = int(
        np.argmax(
            [near[k] if min(np.delete(np.linalg.norm(other - other[k], axis=1), k)) > 9 else 0 for k in range(50)]
        )
    )
    assert shown.pixel(*other[point], layer="back")[:3] == pytest.approx(before[:3], abs=40)
    grey = shown.pixel(*other[lonely], layer="back")
    assert max(grey[:3]) - min(grey[:3]) < 16
    rows = list(csv.DictReader(io.StringIO(shown.save("CSV").decode("utf-8-sig"))))
    assert {row["point"] for row in rows if row["chosen"] == "1"} == {str(point)}
    again = show([panels()], fragment=shown.fragment)
    assert again.readout() == "1 of 50 points chosen: " + ("Toronto 1" if point % 2 else "Montreal 1")
    shown.press("Escape")
    assert "Point at a dot" in shown.readout() and shown.fragment in ("", "#")


def test_a_label_chooses_its_points(show: Opener) -> None:
    shown = show([panels()])
    toronto = shown.view().get_by_role("button", name="Toronto")
    key, picture = toronto.bounding_box(), shown.canvas().bounding_box()
    assert key and picture and key["y"] + key["height"] <= picture["y"]  # the legend is on top
    toronto.click()
    assert shown.readout() == "25 of 50 points chosen: Toronto 25"
    assert toronto.get_attribute("aria-pressed") == "true"
    assert shown.fragment == "#0.labels=1"
    shown.view().get_by_role("button", name="Montreal").click()
    assert shown.readout().startswith("50 of 50")
    toronto.click()
    assert shown.readout() == "25 of 50 points chosen: Montreal 25"


@pytest.mark.parametrize("still", [False, True])
def test_the_slider_goes_through_the_layers(show: Opener, still: bool) -> None:
    shown = show([panels(5)], reduced_motion="reduce" if still else "no-preference")
    slider = shown.view().locator("input[type=range]")
    slider.fill("2")
    shown.settle()
    assert shown.view().locator(".now").inner_text() == "layer.2"
    assert shown.fragment == "#0.layer=layer.2"
    assert slider.get_attribute("aria-valuetext") == "layer.2"
    one = "canvas => canvas.toDataURL()"
    first = shown.view().locator("canvas.back").evaluate(one)
    shown.press("ArrowRight")
    moving = shown.view().locator("canvas.back").evaluate(one)
    shown.page.wait_for_timeout(900)
    there = shown.view().locator("canvas.back").evaluate(one)
    assert first != there
    assert (moving == there) is still
    assert show([panels(5)], fragment=shown.fragment).view().locator(".now").inner_text() == "layer.3"
    shown.keep("panels-one-light")


def test_play_goes_to_the_end_and_stops(show: Opener) -> None:
    shown = show([panels(3)], reduced_motion="reduce")
    shown.view().get_by_role("button", name="Play").click()
    shown.until("document.querySelector('.now').textContent === 'final'")
    shown.until("[...document.querySelectorAll('button')].some(b => b.textContent === 'Play')")


def test_many_panels_wrap(show: Opener) -> None:
    shown = show([panels(33, 400)])
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown.keep("panels-33-light")
    assert len(shown.save("PNG")) > 20_000


def test_keys_go_through_points_and_the_drawing_has_them_all(show: Opener) -> None:
    shown = show([panels()])
    shown.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp")
    assert shown.readout() == "Toronto  Sentence 1 about a city on the lake"
    drawing = ElementTree.fromstring(shown.save("SVG"))
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}circle"))) == 2 * 50 + 2  # two panels, two keys
    said = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "All states are equal here." in said and "silhouette 0.02, p 0.250" in said
    assert struct.unpack(">II", shown.save("PNG")[16:24])[0] > 1500


def test_the_table_of_two_datasets_says_whose_a_point_is(show: Opener) -> None:
    given = panels(4, 10)
    points = given.points.copy()
    points[:2, 5:], points[2:, :5] = np.nan, np.nan
    rows = ("here", "here", "there", "there")
    shown = show([replace(given, points=points, rows=rows, rows_name="dataset")])
    table = list(csv.DictReader(io.StringIO(shown.save("CSV").decode("utf-8-sig"))))
    assert len(table) == 20 and all(row["x"] and row["y"] for row in table)
    assert {(row["dataset"], int(row["point"]) < 5) for row in table} == {("here", True), ("there", False)}


def test_a_finger_reads_out_a_point(show: Opener) -> None:
    shown = show([panels()], has_touch=True)
    point = apart(1)
    x, y = places(1)[point]
    shown.canvas().tap(position={"x": x, "y": y})
    shown.settle()
    assert shown.readout().endswith(f"Sentence {point} about a city on the lake")
