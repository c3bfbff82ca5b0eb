"""Panels in a browser: points chosen in one are chosen in all."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from hiddenscope.results.pictures import Panels
from tests.pages.looking import Opener, Shown
from tests.pages.scenes import panels

SIDE, TITLE, GAP = 330, 20, 16  # of three panels in a wide window


def places(panel: int, count: int = 3, points: int = 50) -> np.ndarray:
    """Where the points of a panel are on the canvas."""
    given = panels(count, points).points[panel].astype(float)
    low, high = given.min(0), given.max(0)
    unit = (given - (low + high) / 2) / (high - low).max() * 0.9 * [1, -1] + 0.5
    return unit * SIDE + [panel * (SIDE + GAP), TITLE]


def lonely(panel: int, besides: int = -1) -> int:
    """Return the point, besides one, that no other is near to."""
    at = places(panel)
    far = np.linalg.norm(at[:, None] - at[None], axis=-1) + 1e9 * np.eye(len(at))
    return int(np.where(np.arange(len(at)) == besides, 0, far.min(1)).argmax())


def city(point: int) -> str:
    return "Toronto" if point % 2 else "Montreal"


def loop(shown: Shown, corners: list[tuple[float, float]]) -> None:
    shown.choose("Select")
    box = shown.canvas().bounding_box()
    assert box
    mouse = shown.page.mouse
    mouse.move(box["x"] + corners[0][0], box["y"] + corners[0][1])
    mouse.down()
    for x, y in [*corners[1:], corners[0]]:
        mouse.move(box["x"] + x, box["y"] + y, steps=4)
    mouse.up()
    shown.settle()


def test_a_pointer_and_a_finger_show_the_text(show: Opener) -> None:
    shown = show([panels()], color_scheme="dark", has_touch=True)
    point = lonely(1)
    x, y = places(1)[point]
    text = f"Sentence {point} about a city on the lake"
    shown.canvas().tap(position={"x": x, "y": y})
    shown.settle()
    assert shown.readout().endswith(text)
    shown = show([panels()], color_scheme="dark")
    shown.point(x, y)
    assert shown.readout().endswith(text)
    hint = shown.view().locator(".hint")
    assert hint.is_visible() and city(point) in hint.inner_text()
    ringed = places(2)[point] + [0, -6.5]
    assert shown.pixel(*ringed)[3] > 0  # the same point, in the other panel
    shown.keep("panels-3-dark")
    shown.point(5, 100)  # a panel that has no picture
    assert not hint.is_visible()


def test_a_loop_chooses_the_same_points_in_every_panel(show: Opener) -> None:
    shown = show([panels()])
    point = lonely(1)
    (x, y), other = places(1)[point], places(2)
    before = shown.pixel(*other[point], layer="back")
    loop(shown, [(x - 8, y - 8), (x + 8, y - 8), (x + 8, y + 8), (x - 8, y + 8)])
    assert shown.readout().startswith("1 of 50 points chosen")
    lit = shown.pixel(*other[point], layer="back")
    assert lit[:3] == pytest.approx(before[:3], abs=40)
    grey = shown.pixel(*other[lonely(2, besides=point)], layer="back")
    assert max(grey[:3]) - min(grey[:3]) < 16
    rows = shown.rows()
    assert {row["point"] for row in rows if row["chosen"] == "1"} == {str(point)}
    again = show([panels()], fragment=shown.fragment)
    assert again.readout() == f"1 of 50 points chosen: {city(point)} 1"
    shown.press("Escape")
    assert "Point at a dot" in shown.readout() and shown.fragment in ("", "#")


def test_a_label_chooses_its_points(show: Opener) -> None:
    shown = show([panels()])
    toronto = shown.view().get_by_role("button", name="Toronto")
    key, picture = toronto.bounding_box(), shown.canvas().bounding_box()
    # The legend is on top.
    assert key and picture and key["y"] + key["height"] <= picture["y"]
    toronto.click()
    assert shown.readout() == "25 of 50 points chosen: Toronto 25"
    assert toronto.get_attribute("aria-pressed") == "true"
    assert shown.fragment == "#0.labels=1"
    shown.view().get_by_role("button", name="Montreal").click()
    assert shown.readout().startswith("50 of 50")
    toronto.click()
    assert shown.readout() == "25 of 50 points chosen: Montreal 25"


# Time goes on by a sixtieth of a second with every frame, however long a busy machine
# takes for one.
CLOCK = """() => {
  const next = requestAnimationFrame.bind(window);
  let now = performance.now();
  performance.now = () => now;
  const tick = () => { now += 1000 / 60; next(tick); };
  next(tick);
  window.requestAnimationFrame = (act) => next(() => act(now));
}"""
# Keeps every picture that the canvas shows from now on.
FRAMES = """canvas => {
  window.pictures_seen = new Set();
  const look = () => { pictures_seen.add(canvas.toDataURL()); requestAnimationFrame(look); };
  look();
}"""
HUNDRED_FRAMES = """() => new Promise((done) => {
  let left = 100;
  const wait = () => (left-- ? requestAnimationFrame(wait) : done());
  wait();
})"""


@pytest.mark.parametrize("still", [True, False])
def test_the_slider_goes_through_the_layers(show: Opener, still: bool) -> None:
    shown = show([panels(5)], reduced_motion="reduce" if still else "no-preference")
    shown.page.evaluate(CLOCK)
    slider = shown.view().locator("input[type=range]")
    assert not slider.is_visible()
    shown.choose("One layer")
    slider.fill("2")
    shown.settle()
    assert shown.view().locator(".now").inner_text() == "layer.2"
    assert shown.fragment == "#0.layer=layer.2"
    assert slider.get_attribute("aria-valuetext") == "layer.2"
    shown.page.evaluate(HUNDRED_FRAMES)  # it has come to layer.2
    shown.view().locator("canvas.back").evaluate(FRAMES)
    shown.press("ArrowRight")
    shown.page.evaluate(HUNDRED_FRAMES)
    # Two layers, and in between where things move.
    pictures = shown.page.evaluate("pictures_seen.size")
    assert pictures == 2 if still else pictures > 2
    again = show([panels(5)], fragment=shown.fragment)
    assert again.view().locator(".now").inner_text() == "layer.3"
    shown.keep("panels-one-light")


def test_play_goes_to_the_end_and_stops(show: Opener) -> None:
    shown = show([panels(3)], reduced_motion="reduce")
    shown.choose("One layer")
    shown.view().get_by_role("button", name="Play").click()
    shown.until("document.querySelector('.now').textContent === 'final'")
    shown.until(
        "[...document.querySelectorAll('button')].some(b => b.textContent === 'Play')"
    )


def test_keys_go_through_points_and_the_drawing_has_them_all(show: Opener) -> None:
    shown = show([panels()])
    shown.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp")
    assert shown.readout() == "Toronto  Sentence 1 about a city on the lake"
    # Two panels, two keys.
    assert len(shown.drawing("circle")) == 2 * 50 + 2
    texts = {"All states are equal here.", "silhouette 0.02, p 0.250"}
    assert texts <= set(shown.written())
    assert struct.unpack(">II", shown.save("PNG")[16:24])[0] > 1500


def test_the_table_of_two_datasets_says_whose_a_point_is(show: Opener) -> None:
    given = panels(4, 10)
    points = given.points.copy()
    points[:2, 5:], points[2:, :5] = np.nan, np.nan
    rows = ("here", "here", "there", "there")
    shown = show([replace(given, points=points, rows=rows, rows_name="dataset")])
    table = shown.rows()
    assert len(table) == 20 and all(row["x"] and row["y"] for row in table)
    owners = {(row["dataset"], int(row["point"]) < 5) for row in table}
    assert owners == {("here", True), ("there", False)}


def drawn(shown: Shown) -> dict[str, list[tuple[float, float]]]:
    """Where each text stands in the drawing."""
    found: dict[str, list[tuple[float, float]]] = {}
    for node in shown.drawing("text"):
        place = float(node.get("x", "")), float(node.get("y", ""))
        found.setdefault(node.text or "", []).append(place)
    return found


def titles(shown: Shown) -> list[str]:
    return [text for text in drawn(shown) if text.startswith(("layer.", "final"))]


def test_five_layers_come_first_and_all_are_a_click_away(show: Opener) -> None:
    shown = show([panels(33)])
    assert titles(shown) == ["layer.0", "layer.8", "layer.16", "layer.24", "final"]
    shown.choose("All layers")
    assert len(titles(shown)) == 33 and "0.show=all" in shown.fragment
    assert not shown.is_wide and len(shown.save("PNG")) > 20_000
    shown.keep("panels-33-light")
    assert len(titles(show([panels(33)], fragment=shown.fragment))) == 33
    shown.choose("5 layers")
    assert len(titles(shown)) == 5 and "show" not in shown.fragment
    given = replace(panels(33), first=((0, 3, 32),))
    assert titles(show([given])) == ["layer.0", "layer.3", "final"]


def two_models() -> Panels:
    given = panels(38, 20)
    sites = tuple(f"layer.{k}" for k in [*range(31), *range(7)])
    rows = ("deep",) * 31 + ("flat",) * 7
    depths = tuple(k / 30 for k in range(31)) + tuple(k / 6 for k in range(7))
    plain = {"messages": (), "first": ()}
    return replace(given, sites=sites, rows=rows, depths=depths, **plain)


def test_two_models_stand_side_by_side_at_equal_depth(show: Opener) -> None:
    shown = show([two_models()])
    found = drawn(shown)
    for deep, flat in (
        ("layer.0, 0%",) * 2,
        ("layer.15, 50%", "layer.3, 50%"),
        ("layer.30, 100%", "layer.6, 100%"),
    ):
        assert found[deep][0][0] == found[flat][-1][0], "one column"
        assert found[deep][0][1] < found[flat][-1][1]
    shown.choose("One layer")
    shown.view().locator("input[type=range]").fill("15")
    shown.page.wait_for_timeout(800)  # longer than it glides
    shown.settle()
    found = drawn(shown)
    assert found["layer.15, 50%"][0][1] == found["layer.3, 50%"][0][1], "one line"
    assert found["deep"][0][0] < found["flat"][0][0]
    assert shown.view().locator(".now").inner_text() == "layer.15 · layer.3"
    small = show([two_models()], width=390, height=844)
    assert not small.is_wide
    again = small.canvas().bounding_box()
    assert again and again["width"] <= 358


def test_panels_whose_classes_are_apart_are_marked(show: Opener) -> None:
    shown = show([replace(panels(), marks=("", "", "apart"))])
    assert len(drawn(shown)["apart"]) == 1
    right = 2 * (SIDE + GAP) + SIDE
    edge = shown.pixel(right - 0.5, TITLE + 100, layer="back")
    assert edge[0] > edge[1] + 60 and edge[0] > edge[2] + 60, (
        "its frame is the accent's"
    )
    plain = shown.pixel(2 * (SIDE + GAP) - GAP - 0.5, TITLE + 100, layer="back")
    assert max(plain[:3]) - min(plain[:3]) < 20
    label = shown.view().locator(".window").get_attribute("aria-label")
    assert "1 marked apart" in (label or "")
    assert {row["site"] for row in shown.rows() if row["mark"]} == {"final"}


@pytest.mark.parametrize("dark", [False, True])
def test_points_of_no_class_are_grey_and_lie_beneath(show: Opener, dark: bool) -> None:
    labels = ("no cluster", "0: cats", "1: dogs", "no cluster")
    points = np.array([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]])
    given = Panels("Clusters", ("layer.6",), points, labels, grey="no cluster")
    shown = show([given], color_scheme="dark" if dark else "light")
    box = shown.canvas().bounding_box()
    assert box
    wide, high = box["width"], box["height"] - TITLE - GAP
    grey = shown.pixel(wide / 2 - 0.45 * high, TITLE + 0.95 * high, layer="back")
    assert max(grey[:3]) - min(grey[:3]) < 24 and 90 < grey[0] < 170
    over = shown.pixel(wide / 2 + 0.45 * high, TITLE + 0.05 * high, layer="back")
    assert over[2] > over[0] + 60, "the first colour is that of the first cluster"


def test_the_wheel_zooms_where_it_is_asked_to(show: Opener) -> None:
    shown = show([panels()], prose=["a", "\n\n".join("b" * 40)])
    point = lonely(1)
    x, y = places(1)[point]
    shown.point(x, y)
    shown.page.mouse.wheel(0, 120)
    shown.until("scrollY > 0")
    assert "zoom" not in shown.fragment, "the page scrolls"
    shown.page.evaluate("scrollTo(0, 0)")
    shown.until("scrollY === 0")
    shown.point(x, y)
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -120)
    shown.page.keyboard.up("Control")
    shown.until("location.hash.includes('0.zoom=')")
    shown.point(x + 1, y)
    assert f"Sentence {point} about" in shown.readout(), (
        "what is under the pointer stays there"
    )
    other = places(1)
    far = int(np.linalg.norm(other - other[point], axis=1).argmax())
    shown.point(*other[far])
    assert f"Sentence {far} about" not in shown.readout(), "what was far is farther"
    again = show([panels()], fragment=shown.fragment)
    again.point(x + 1, y)
    assert f"Sentence {point} about" in again.readout()
    shown.canvas().dblclick(position={"x": SIDE + GAP + 4, "y": TITLE + 4})
    shown.until("!location.hash.includes('zoom')")
    shown.point(*other[far])
    assert f"Sentence {far} about" in shown.readout()


def test_a_drag_moves_what_is_zoomed_and_keys_do_the_same(show: Opener) -> None:
    shown = show([panels()])
    assert shown.view().get_by_role("button", name="Reset").is_disabled()
    shown.press("+", "+")
    middle = np.array([SIDE + GAP + SIDE / 2, TITLE + SIDE / 2])
    point = int(np.abs(places(1) - middle).sum(1).argmin())
    zoomed = middle + (places(1)[point] - middle) * 1.5**2
    shown.point(*zoomed)
    assert f"Sentence {point} about" in shown.readout()
    box = shown.canvas().bounding_box()
    assert box
    shown.page.mouse.move(box["x"] + middle[0], box["y"] + TITLE + 10)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + middle[0] + 30, box["y"] + TITLE + 30, steps=5)
    shown.page.mouse.up()
    shown.settle()
    shown.point(*(zoomed + [30, 20]))
    assert f"Sentence {point} about" in shown.readout()
    shown.press("Shift+ArrowRight")
    shown.point(*(zoomed + [-10, 20]))
    assert f"Sentence {point} about" in shown.readout()
    shown.press("0")
    shown.point(*places(1)[point])
    assert f"Sentence {point} about" in shown.readout()


def test_two_fingers_zoom_and_one_does_not(show: Opener) -> None:
    shown = show([panels()], has_touch=True)
    box = shown.canvas().bounding_box()
    assert box
    x, y = box["x"] + SIDE + GAP + SIDE / 2, box["y"] + TITLE + SIDE / 2
    hand = shown.page.context.new_cdp_session(shown.page)

    def touch(kind: str, *apart: float) -> None:
        points = [
            {"x": x + far, "y": y, "id": place} for place, far in enumerate(apart)
        ]
        hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 0)
    touch("touchMove", 12)
    touch("touchEnd")
    shown.page.wait_for_timeout(400)
    assert "zoom" not in shown.fragment
    touch("touchStart", -20)
    touch("touchStart", -20, 20)
    for far in (30, 45, 60):
        touch("touchMove", -far, far)
    touch("touchEnd")
    shown.until("location.hash.includes('0.zoom=')")
    scale = float(shown.fragment.split("zoom=")[1].split("_")[0])
    assert scale == pytest.approx(3, rel=0.1)


def test_words_are_found_in_every_panel(show: Opener) -> None:
    shown = show([panels()])
    shown.view().get_by_role("searchbox").fill("Sentence 17 ")
    shown.settle()
    assert (
        shown.readout() == "1 of 50 points have “Sentence 17” in their text: Toronto 1"
    )
    assert shown.fragment == "#0.find=Sentence+17"
    for panel in (1, 2):
        pair = 17, lonely(panel, besides=17)
        lit, faint = (shown.pixel(*places(panel)[k], layer="back") for k in pair)
        assert max(lit[:3]) - min(lit[:3]) > 60 and max(faint[:3]) - min(faint[:3]) < 16
    shown.view().get_by_role("searchbox").fill("nowhere")
    assert shown.readout().startswith("0 of 50 points have “nowhere”")
    again = show([panels()], fragment="#0.find=sentence+4")
    assert again.view().get_by_role("searchbox").input_value() == "sentence 4"
    assert again.readout().startswith("11 of 50")


def test_one_layer_has_the_full_width_and_labels_for_what_is_chosen(
    show: Opener,
) -> None:
    shown = show([panels()], fragment="#0.layer=final")
    room = shown.view().locator(".stage").evaluate("stage => stage.clientWidth")
    picture = shown.canvas().bounding_box()
    assert picture and picture["width"] == room
    assert not any(text.startswith("Sentence") for text in drawn(shown))
    shown.press("ArrowDown", "ArrowDown", "Enter", "ArrowDown", "ArrowDown", "Enter")
    assert {text for text in drawn(shown) if text.startswith("Sentence")} == {
        f"Sentence {k} about a city on the lake" for k in (1, 3)
    }
    assert "0.points=1.3" in shown.fragment
    again = show([panels()], fragment=shown.fragment)
    assert again.readout() == "2 of 50 points chosen: Toronto 2"
    shown.keep("panels-one-chosen-light")


def test_a_click_chooses_a_point_and_the_ground_clears_it(show: Opener) -> None:
    shown = show([panels()])
    point = lonely(1)
    x, y = places(1)[point]
    shown.canvas().click(position={"x": x, "y": y})
    assert shown.fragment == f"#0.points={point}"
    shown.canvas().click(position={"x": SIDE + GAP + 4, "y": TITLE + 4})
    shown.settle()
    assert shown.fragment in ("", "#")
