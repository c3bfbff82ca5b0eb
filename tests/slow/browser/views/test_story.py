"""The guided page, as somebody opens it: from disk, with no network, every view alive."""

import pytest

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.pages.looking import Opener, Shown

TITLES = [
    "What would each layer predict?",
    "Where do two texts differ?",
    "How large is every state?",
    "How do we know which state is which?",
]


@pytest.fixture(scope="module")
def results() -> list[hs.Result]:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    text, other = "The cat sat on the mat.", "The cat sat on the hat."
    return [
        hs.lens(model, text),
        hs.compare(model, text, other),
        hs.profile(model, text),
        hs.anatomy(model),
    ]


@pytest.fixture(scope="module")
def story(results: list[hs.Result], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A story of four parts, with folds."""
    path = tmp_path_factory.mktemp("story") / "story.html"
    hs.story(results, path, title="A story", opening="Once.", closing="# Go on")
    return path.read_text("utf-8")


def box(shown: Shown, selector: str) -> dict[str, float]:
    found = shown.page.locator(selector).first.bounding_box()
    assert found, selector
    right, bottom = found["x"] + found["width"], found["y"] + found["height"]
    return {**found, "right": right, "bottom": bottom}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_story_is_alive_offline(
    scheme: str, story: str, results: list[hs.Result], show: Opener
) -> None:
    shown = show(story, width=1000, color_scheme=scheme)
    assert shown.page.locator(".part > .claim h2").all_inner_texts() == TITLES
    grid = shown.page.locator("section.grid").nth(2)
    place = int(grid.get_attribute("data-view") or 0)
    shown.press("ArrowRight", place=place)
    readout = shown.readout(place)
    norm = results[2].data["norm"].values[0, 0]
    assert "layer.0" in readout and f"{norm:.3g}"[:3] in readout
    assert not shown.is_wide, "nothing hangs out at the side"


def test_words_and_contents_stand_where_there_is_room(story: str, show: Opener) -> None:
    """Contents on the left or above; words beside the picture on a large screen."""
    wide, narrow = show(story, width=1200), show(story, width=1100)
    assert box(wide, ".contents")["right"] <= box(wide, "main")["x"] + 1
    assert box(narrow, ".contents")["bottom"] <= box(narrow, "main")["y"] + 1
    assert wide.page.locator(".contents a").all_inner_texts() == TITLES
    large = show(story, width=1920)
    words, picture = box(large, ".part > .guide"), box(large, ".pictures section")
    assert words["right"] <= picture["x"] and abs(words["y"] - picture["y"]) < 120
    assert picture["right"] > 1800 and picture["width"] > 1000
    assert not large.is_wide


@pytest.mark.parametrize(("width", "lowest"), [(1400, 540), (390, 600)])
def test_every_part_is_one_sentence_and_then_a_picture(
    story: str, show: Opener, width: int, lowest: int
) -> None:
    page = show(story, width=width).page
    for part in page.locator(".part").all():
        top = (part.bounding_box() or {"y": 0})["y"]
        lead = part.locator(".claim > p")
        assert lead.count() == 1
        sentence = lead.bounding_box()
        picture = part.locator("canvas.front").first.bounding_box()
        assert sentence and picture
        assert sentence["y"] + sentence["height"] <= picture["y"] <= top + lowest
    first = page.locator("canvas.front").first.bounding_box()
    assert first and first["y"] <= lowest, (
        "the contents and the opening leave room for the first picture"
    )


def test_a_link_goes_to_its_part_and_leaves_what_is_pinned(
    story: str, show: Opener
) -> None:
    shown = show(story, width=1300)
    shown.canvas().click(position={"x": 200, "y": 40})
    assert "pin" in shown.fragment
    shown.page.locator(".contents a").nth(2).click()
    shown.settle()
    assert abs(box(shown, "#part-3")["y"]) < 60
    current = shown.page.locator(".contents a[aria-current]").all_inner_texts()
    assert current == [TITLES[2]]
    assert "pin" in shown.fragment and "pinned" in shown.readout()
    assert abs(box(show(story, width=1300, fragment="#part-3"), "#part-3")["y"]) < 60


def test_what_is_folded_is_drawn_when_it_is_opened(story: str, show: Opener) -> None:
    """By a click, or by an address that names something in it."""
    shown = show(story, width=1300)
    folded = shown.page.locator("details.fold").first
    canvas = folded.locator("canvas").first
    assert not canvas.is_visible()
    folded.locator("> summary").click()
    canvas.wait_for(state="visible")
    shown.settle()
    assert (canvas.bounding_box() or {"width": 0})["width"] > 600
    painted = (
        "c => c.getContext('2d').getImageData(0, 0, c.width,"
        " c.height).data.some((value) => value > 0)"
    )
    assert canvas.evaluate(painted)
    place = folded.locator("section[data-view]").first.get_attribute("data-view")
    for fragment in (f"#{place}.scale=linear", f"#at={place}~0"):
        again = show(story, width=1300, fragment=fragment)
        assert again.view(int(place or 0)).locator("canvas").first.is_visible()
