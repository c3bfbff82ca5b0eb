"""Strings that nobody should trust are text in a browser, and run nothing."""

import csv
import io
from pathlib import Path

from playwright.sync_api import Browser

from hiddenscope.views import pack
from hiddenscope.views.page import document, frame
from tests.pages.looking import PATIENCE, Opener
from tests.pages.scenes import HOSTILE, hostile, norms, panels, visibility

csv.field_size_limit(10_000_000)
MARKED = [
    "‹U+2028›",
    "‹U+202E›‹U+2066›evil‹U+2069›",
    "nul␀nul",
    "lone‹U+D83D›",
    "⇥TAB␍⏎",
]


def test_hostile_strings_are_text(show: Opener) -> None:
    shown = show(hostile(), title=HOSTILE[0], prose=HOSTILE[:3])
    assert shown.page.evaluate("window.hacked") is None
    assert shown.page.locator("img").count() == 0
    assert shown.page.locator("script").count() == 1
    assert shown.view().locator("h2").inner_text() == HOSTILE[0]
    said = []
    for _ in HOSTILE:
        shown.press("ArrowRight")
        said.append(shown.readout())
    assert HOSTILE[0] in said[0] and "<img␣src=x␣onerror" in said[2]
    assert all(any(mark in one for one in said) for mark in MARKED)
    assert all(len(one) < 2000 for one in said)  # the megabyte too
    assert "👩‍🔬" in said[12] and "∅" in said[13]
    for place in range(3):
        shown.view(place).locator("summary").click()
        shown.settle()
        assert HOSTILE[1] in shown.view(place).locator("table").inner_text()
    assert shown.page.evaluate("window.hacked") is None
    shown.keep("hostile-light")


def test_hostile_strings_are_saved_as_text(show: Opener) -> None:
    shown = show(hostile())
    rows = list(csv.reader(io.StringIO(shown.save("CSV").decode("utf-8-sig"))))
    tokens = [row[2] for row in rows[1 : 1 + len(HOSTILE)]]
    assert tokens[7:10] == ["'=HYPERLINK(1)", "'-1+1", "'@SUM(1)"]
    assert tokens[10] == "'\tTAB\r\n"
    assert tokens[5] == r"nul\x00nul" and tokens[6] == r"lone\ud83d"
    assert tokens[11] == HOSTILE[11]
    for place in range(3):
        tags = {node.tag.rpartition("}")[2] for node in shown.svg(place).iter()}
        assert not tags & {"script", "img", "foreignObject"}
        shown.save("PNG", place)


def test_a_hostile_link_is_harmless(show: Opener) -> None:
    for fragment in (
        "#0.measure=-1&0.pin=layer.0~99&0.show=<script>",
        "#0.measure=1e9&0.pin=%E0%A4%A&1.lasso=9:1_2~x_y~&1.labels=a.-1.99&1.layer=__proto__",
        "#__proto__.x=1&0.__proto__=2&constructor.pin=1",
        "#%",
    ):
        shown = show([norms(), panels()], fragment=fragment)
        assert "Point at" in shown.readout() and "Point at" in shown.readout(1)


def test_the_policy_stops_what_is_put_into_the_page(
    chromium: Browser, tmp_path: Path
) -> None:
    """The other way round: were a string to become markup after all, it would still not
    run, nor reach anything.
    """
    wild = (
        "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'><img"
        " src='https://example.org/x'>"
    )
    text = document([norms()], "Norms").replace(
        "<main>", f"<main>{wild}<p style='color:red' id=red>red</p>"
    )
    path = tmp_path / "wild.html"
    path.write_text(text)
    context = chromium.new_context()
    asked: list[str] = []
    context.route(
        "https://**", lambda route: (asked.append(route.request.url), route.abort())
    )
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert page.evaluate("window.hacked") is None
    red = page.evaluate("getComputedStyle(document.getElementById('red')).color")
    assert red != "rgb(255, 0, 0)"
    fetched = "fetch('https://example.org').then(() => 'came', () => 'refused')"
    assert page.evaluate(fetched) == "refused"
    assert asked == []
    context.close()


def test_a_frame_shows_the_view_tells_its_height_and_reaches_nothing(
    chromium: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(
        "<!doctype html><p>a"
        f" notebook</p>{frame(document([visibility()], 'Seen'), height=200)}"
    )
    context = chromium.new_context(offline=True)
    context.set_default_timeout(PATIENCE)
    wrong: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(path.as_uri())
    inside = page.frame_locator("iframe")
    inside.locator("canvas.front").click(position={"x": 300, "y": 100})
    assert "pinned" in inside.locator(".readout").inner_text()
    page.wait_for_function(
        "() => Number(document.querySelector('iframe').height) > 400"
    )
    with page.expect_download() as waiting:
        inside.get_by_role("button", name="CSV").click()
    assert Path(waiting.value.path()).stat().st_size > 1000
    reach = (
        "() => { try { return String(parent.document) } catch (error) { return"
        " error.name } }"
    )
    assert page.frames[1].evaluate(reach) == "SecurityError"
    assert wrong == []
    context.close()


def test_a_damaged_payload_says_so(chromium: Browser, tmp_path: Path) -> None:
    text = document([norms()], "Norms").replace(pack([norms()]), "AAAA")
    path = tmp_path / "damaged.html"
    path.write_text(text)
    page = chromium.new_page()
    page.goto(path.as_uri())
    page.get_by_text("The picture cannot be shown").wait_for(timeout=PATIENCE)
    page.close()
