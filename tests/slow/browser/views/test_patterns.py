"""The views of `attention` and `contributions` in a browser: what is drawn and read out
is what the data has, with the pointer, the keyboard and a finger.
"""

import re
from pathlib import Path

import pytest

from hiddenscope.results import views_of
from tests.pages.inside import EVIL, SENTENCE, attention, contributions, heads_of
from tests.pages.looking import CONTRAST, WIDER, Contexts, Opener, Shown, opened
from tests.places import ROOT
from tests.slow.browser.views.test_grid import shade

AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"


def token(shown: Shown, place: int, kind: str) -> str:
    found = shown.view().locator(".readtoken").nth(place).locator(f".{kind}")
    return found.inner_text()


def test_a_token_shows_what_it_reads_and_who_reads_it(show: Opener) -> None:
    result = attention()
    view = heads_of(result)
    shown = show([view])
    row, head = view.large
    pattern = result.data["pattern"].to_numpy()[row, head]
    shown.view().locator(".readtoken").nth(4).hover()
    shown.settle()
    for key in range(len(SENTENCE)):
        for kind, expected in (
            ("reads", pattern[4, key]),
            ("readers", pattern[key, 4]),
        ):
            text = token(shown, key, kind)
            assert bool(text) == (expected > 0)
            assert float(text or 0) == pytest.approx(expected, abs=0.006)
    strongest = int(pattern[4].argmax())
    said = shown.readout()
    assert "“␣is” token 4 reads" in said and SENTENCE[strongest].strip() in said
    # Without the pointer, the last token is shown again.
    shown.page.mouse.move(2, 2)
    shown.settle()
    assert "token 7 reads" in shown.readout()


def test_value_weighted_numbers_are_those_of_the_data(show: Opener) -> None:
    result = attention()
    view = heads_of(result)
    shown = show([view])
    shown.choose("Value-weighted")
    row, head = view.large
    weighted = result.data["weighted"].to_numpy()[row, head]
    for key in range(len(SENTENCE)):
        text = token(shown, key, "reads")
        assert float(text) == pytest.approx(weighted[7, key], abs=0.006, rel=0.01)
    assert "0.shows=weighted" in shown.fragment
    rows = shown.rows()
    assert list(rows[0])[-2:] == ["weight", "value-weighted (L2)"]
    assert len(rows) == 8 * 9 // 2
    for row in rows:
        line = list(row.values())
        number = weighted[int(line[1]), int(line[3])]
        assert float(line[6]) == pytest.approx(number, rel=0.01, abs=1e-3)


def test_the_keyboard_chooses_heads_and_tokens(show: Opener) -> None:
    view = heads_of(attention(6, 4, missing=[(2, 3)]))
    shown = show([view])
    large = shown.view().locator(".onehead h3")
    assert large.inner_text() == "layer.4.attn.head.3"
    shown.press("ArrowLeft", "ArrowUp")
    assert large.inner_text() == "layer.5.attn.head.2"
    shown.press("PageDown", "Home")
    assert large.inner_text() == "layer.1.attn.head.0"
    shown.press("End", "ArrowUp", "ArrowUp")
    assert large.inner_text() == "layer.2.attn.head.3", "a head that is missing is none"
    assert "head=layer.2.attn.head.3" in shown.fragment
    shown.view().locator(".largestage").focus()
    shown.page.keyboard.press("ArrowUp")
    shown.page.keyboard.press("ArrowLeft")
    shown.page.keyboard.press("ArrowLeft")
    shown.settle()
    assert "“.” token 6 reads “␣Paris” token 5" in shown.readout()
    shown.page.keyboard.press("Tab")
    shown.page.keyboard.press("Shift+Tab")
    shown.view().locator('.readtoken[tabindex="0"]').focus()
    shown.page.keyboard.press("Home")
    shown.page.keyboard.press("ArrowRight")
    shown.settle()
    assert "“␣capital” token 1 reads" in shown.readout()
    assert shown.view().locator('.readtoken[tabindex="0"]').count() == 1


def test_a_click_chooses_a_head_and_a_link_keeps_it(show: Opener) -> None:
    view = heads_of(attention(6, 4))
    shown = show([view])
    box = shown.canvas().bounding_box()
    assert box
    # The lowest row is the first layer; the right edge is the last head.
    shown.canvas().click(position={"x": box["width"] - 12, "y": box["height"] - 50})
    shown.settle()
    name = shown.view().locator(".onehead h3").inner_text()
    assert name == "layer.1.attn.head.3"
    scores = shown.view().locator("table.scores").inner_text()
    tested = view.scores[0].score
    assert tested is not None and f"{tested[0, 3]:.3f}".rstrip("0") in scores
    again = show([view], fragment=shown.fragment)
    assert again.view().locator(".onehead h3").inner_text() == name


@pytest.mark.parametrize(("scale", "power"), [("Linear", 1.0), ("Root", 0.5)])
def test_the_colour_of_a_cell_is_its_weight(
    show: Opener, scale: str, power: float
) -> None:
    result = attention(2, 3, seed=3)
    view = heads_of(result)
    shown = show([view])
    shown.choose(scale)
    pattern = result.data["pattern"].to_numpy()[view.large]
    canvas = shown.view().locator("canvas.large")
    box = canvas.bounding_box()
    assert box
    # The last row ends 4 pixels above the lower edge, and cells are at most 36 high.
    y = box["height"] - 14
    seen = {}
    for x in range(40, int(box["width"]), 12):
        canvas.hover(position={"x": x, "y": y})
        shown.settle()
        match = re.search(
            r"token 7 reads “[^”]*” token (\d+): ([\d.]+)", shown.readout()
        )
        if match:
            seen.setdefault(int(match[1]), []).append((x, float(match[2])))
    assert set(seen) == set(range(7)), "every cell of the row is found"
    for key, places in seen.items():
        x, said = places[len(places) // 2]
        assert said == pytest.approx(pattern[7, key], abs=6e-4)
        level = (pattern[7, key] / pattern.max()) ** power
        painted = shown.pixel(x, y, layer="large")[:3]
        assert painted == pytest.approx(shade(float(level)), abs=2)


def test_tokens_of_two_texts_stand_apart(show: Opener) -> None:
    result = attention(3, 2, SENTENCE, memory=("Il", " fait", " beau"))
    view = heads_of(result)
    assert view.positions == ()
    shown = show([view])
    texts = shown.view().locator(".tokentext")
    assert texts.count() == 2
    pattern = result.data["pattern"].to_numpy()[view.large]
    texts.nth(1).locator(".readtoken").nth(1).hover()
    shown.settle()
    for query in range(len(SENTENCE)):
        token = texts.nth(0).locator(".readtoken").nth(query)
        said = float(token.locator(".readers").inner_text())
        assert said == pytest.approx(pattern[query, 1], abs=0.006)


def test_hostile_tokens_stay_text(show: Opener) -> None:
    result = attention(2, 2, EVIL)
    grid = views_of(contributions(3, 2, EVIL[:3]))[0]
    shown = show([heads_of(result), grid])
    assert shown.page.evaluate("window.hacked") is None
    tokens = shown.view().locator(".readtoken bdi").all_inner_texts()
    assert tokens[0].startswith("</script>") and tokens[-1] == "∅"
    everything = shown.page.locator("body").inner_text()
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", everything)
    assert b"<script>window" not in shown.save("SVG")


def test_bars_are_read_out_and_saved_as_cells_are(show: Opener) -> None:
    result = contributions(6, 4)
    grid = views_of(result)[0]
    shown = show([grid])
    shown.press("Home", "End")
    value = float(result.data["mlp"][0, 0])
    said = shown.readout()
    assert "layer.1" in said and "MLP" in said
    assert f"{abs(value):.4g}"[:4] in said
    assert shown.save("SVG").count(b"<rect") > 6 * 4
    shown.press("ArrowLeft")
    assert "head.3" in shown.readout()


def test_nothing_hangs_out_at_any_width(show: Opener) -> None:
    views = [heads_of(attention(32, 32)), views_of(contributions(32, 32))[0]]
    for width in (390, 1280, 1920):
        shown = show(views, width=width, color_scheme="dark", has_touch=True)
        assert shown.page.evaluate(WIDER, width) == []
        assert shown.page.evaluate(CONTRAST) == []
        shown.view().locator(".readtoken").nth(2).tap()
        assert "“␣of” token 2 reads" in shown.readout()
        shown.keep(f"heads-{width}")


def test_axe_finds_no_fault(contexts: Contexts, tmp_path: Path) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make scripts` installs it")
    context = contexts(bypass_csp=True, reduced_motion="reduce")
    for result in (attention(), attention(memory=SENTENCE), contributions()):
        result.save(tmp_path / "page.html")
        page = opened(context.new_page(), tmp_path / "page.html").page
        page.add_script_tag(path=AXE)
        faults = page.evaluate("axe.run().then(({ violations }) => violations)")
        assert [fault["id"] for fault in faults] == []
        page.close()
