"""The other tabs in a real browser: datasets, stores, drift and every analysis; links,
files, forms, and what holds for all of them.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

import hiddenscope as hs
from tests.places import ROOT
from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench, limited, linux
from tests.workbench.texts import HOSTILE, TEXTS

if sys.platform == "linux":
    import resource

Grid = Callable[..., Workbench]
A, B = "The rest is here", "The best is here"
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
PROJECTED = json.dumps(
    {"data": "cities-incomplete", "method": "pca", "sites": "layer.1"}
)


def asked_in(shown: Workbench) -> Any:
    """What the address says was asked."""
    return json.loads(parse_qs(shown.fragment.removeprefix("#"))["q"][0])


def test_a_table_is_uploaded_its_columns_are_chosen_and_it_is_looked_at(
    look: Opener, tiny_name: str, tmp_path: Path
) -> None:
    """None of them is called text, which is no reason to refuse the file."""
    rows = "review,sentiment,author\n<img src=x onerror=alert(1)>,r,writer 0\n"
    for number, word in enumerate(("rest", "test", "real", "take") * 3):
        rows += f"the {word} is {number},{word[0]},writer {number % 3}\n"
    (tmp_path / "opinions.csv").write_text(rows)
    shown = look(fragment(tab="data", model=tiny_name))
    page = shown.page
    page.get_by_label("Upload a dataset").set_input_files(tmp_path / "opinions.csv")
    columns = page.locator("section.columns")
    columns.get_by_role("columnheader", name="sentiment").wait_for()
    assert columns.get_by_text("<img src=x onerror=alert(1)>").count() == 1
    text, label, group = columns.locator("select").all()
    assert text.input_value() == "review"
    label.select_option("sentiment")
    group.select_option("author")
    columns.get_by_role("button", name="Use these columns").click()
    card = page.get_by_role("button", name="opinions.csv")
    card.wait_for()
    assert card.get_attribute("aria-pressed") == "true"
    said = card.inner_text()
    assert "3 groups" in said
    assert "text: review, label: sentiment, group: author" in said
    page.get_by_label("Method").select_option("pca")
    shown.run()
    page.locator(".panels canvas").first.wait_for()
    page.get_by_role("radio", name="Probe the labels").check()
    shown.run()
    page.locator(".lines canvas").first.wait_for()
    # A table whose names say it all is taken at once.
    (tmp_path / "plain.jsonl").write_text('{"text": "the rest", "label": "good"}\n')
    page.get_by_label("Upload a dataset").set_input_files(tmp_path / "plain.jsonl")
    page.get_by_role("button", name="plain.jsonl").wait_for()
    chosen = [select.input_value() for select in columns.locator("select").all()]
    assert chosen == ["text", "label", ""]


def test_a_probe_is_tested_on_another_dataset_and_says_where_it_rings(
    look: Opener, tiny_name: str, tmp_path: Path
) -> None:
    shown = look(fragment(tab="data", model=tiny_name))
    page = shown.page
    for name, words in (("other", "The best is here"), ("train", "The rest is")):
        rows = [f"{words} {k},{'good' if k % 2 else 'bad'}" for k in range(12)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
        page.get_by_label("Upload a dataset").set_input_files(tmp_path / f"{name}.csv")
        page.get_by_role("button", name=f"{name}.csv").wait_for()
    page.get_by_role("radio", name="Probe the labels").check()
    on = page.get_by_label("Test on")
    assert on.input_value() == ""
    on.select_option(label="other.csv")
    page.get_by_label("Pooling").select_option("rolling")
    page.get_by_text("More options").click()
    page.get_by_label("Sites").fill("layer.1")
    shown.run()
    page.locator(".lines canvas").first.wait_for()
    found = page.locator(".found").inner_text()
    assert "On other, 12 other texts" in found
    assert "that takes 59 that are independent, and there are 6." in found
    asked = asked_in(shown)
    assert asked["test"] != asked["data"] and asked["pool"] == "rolling"
    assert "--test other.csv" in shown.code("As command")


def test_a_first_picture_that_comes_late_does_not_replace_the_whole(
    look: Opener, tiny_name: str
) -> None:
    shown = look(fragment(tab="data", model=tiny_name))
    late: list[Any] = []
    shown.page.route("**/api/jobs/*/partial", lambda route: late.append(route))
    shown.page.get_by_label("Method").select_option("tsne")
    shown.page.get_by_text("More options").click()
    shown.page.get_by_label("Sites").fill("layer.1")
    shown.run()
    shown.page.locator(".found .panels canvas").first.wait_for()
    assert late, "no first picture was asked for"
    late[0].continue_()
    shown.page.wait_for_timeout(500)
    assert shown.page.locator(".found").count() == 1
    assert shown.page.locator(".early").count() == 0


def test_a_store_is_browsed(look: Opener, store: hs.Store, tiny_name: str) -> None:
    """Texts in pages, one text with its tokens and norms, the nearest states of a cell,
    and a search.
    """
    shown = look(fragment(tab="stores", model=tiny_name))
    page = shown.page

    def heading(words: str) -> None:
        page.get_by_role("heading", name=words, exact=True).wait_for()
        shown.idle()

    page.get_by_role("button", name="corpora/states").click()
    texts = page.locator(".texts li button")
    last = len(TEXTS) - 1
    heading(f"Texts 0 to 19 of {len(TEXTS)}")
    assert "<script" not in page.locator(".texts").inner_html()
    for number, text in enumerate(HOSTILE):
        texts.nth(number).click()
        heading(f"Text {number}")
        tokens = page.locator("button.token").count()
        assert tokens == store.tokens.lengths[number], text
    later = page.get_by_role("button", name="Later texts")
    later.click()
    heading(f"Texts 20 to 39 of {len(TEXTS)}")
    later.click()
    heading(f"Texts 40 to {last} of {len(TEXTS)}")
    assert later.is_disabled()
    texts.last.click()
    heading(f"Text {last}")
    page.locator(".kept .grid .stage").focus()
    for key in ("ArrowRight", "End", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    near = page.locator(".near button")
    near.first.wait_for()
    shown.idle()
    assert "text 6" in near.first.inner_text()  # the copy of this text
    near.first.click()
    heading("Text 6")
    again = look(shown.fragment)
    again.page.get_by_role("heading", name="Text 6", exact=True).wait_for()
    again.page.locator(".near button").first.wait_for()
    page.get_by_label("Query", exact=True).fill("The rest of number 9 is here.")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("heading", name="Nearest at final").wait_for()
    first = texts.first.inner_text()
    assert "number 9" in first and "cosine 1.000" in first
    page.get_by_label("Model that encodes the query").fill("models/other")
    page.get_by_role("button", name="Search").click()
    page.locator(".texts").get_by_role("alert").get_by_text("other weights").wait_for()
    page.get_by_role("button", name="Show all texts").click()
    heading(f"Texts 0 to 19 of {len(TEXTS)}")


def test_a_store_is_analysed_and_without_one_the_tab_says_how_to_make_one(
    look: Opener, bench: Bench, root: Path, another: Any
) -> None:
    cities = list(hs.read("cities-incomplete").texts)
    model = hs.load(root / "models" / "tiny")
    hs.extract(model, cities, to=root / "corpora" / "cities").close()
    shown = look(fragment(tab="stores", store=bench.store("corpora/cities")))
    page = shown.page
    page.get_by_role("radio", name="Project").check()
    assert page.get_by_label("Truncate").count() == 0
    assert page.get_by_label("Model").count() == 0
    page.get_by_label("Dataset").select_option("cities-incomplete")
    page.get_by_label("Method").select_option("pca")
    shown.run()
    page.locator(".panels canvas").first.wait_for()
    page.get_by_role("radio", name="Cluster").check()
    shown.run()
    page.locator(".findings li").first.wait_for()
    again = look(shown.fragment)
    again.page.locator(".findings li").first.wait_for()
    assert again.page.get_by_role("radio", name="Cluster").is_checked()
    page.get_by_role("radio", name="Browse its texts").check()
    page.locator(".texts li button").first.wait_for()
    with another(root=None) as fresh:
        bare = look(fragment(tab="stores"), at=fresh)
        bare.page.get_by_text("hiddenscope extract").wait_for()


@pytest.mark.parametrize("width", [390, 1366])
def test_a_dictionary_is_trained_from_the_tab_and_chosen_on_the_grid(
    look: Opener, bench: Bench, store: hs.Store, tiny_name: str, width: int
) -> None:
    name = f"trained-{width}"
    shown = look(
        fragment(tab="stores", model=tiny_name, store=bench.store("corpora/states")),
        width=width,
    )
    page = shown.page
    page.get_by_role("radio", name="Train a dictionary").check()
    shown.run()
    page.get_by_text("Fill in “Name” first.").wait_for()
    page.get_by_label("Name").fill(name)
    page.get_by_label("Site").select_option("layer.2")
    page.get_by_role("spinbutton", name="Features").fill("8")
    page.get_by_label("Active").fill("2")
    page.get_by_label("Tokens").fill("400")
    shown.run()
    page.get_by_role("heading", name=f"The dictionary dictionaries/{name}").wait_for()
    assert f"in dictionaries/{name}." in page.locator(".findings").inner_text()
    assert f"--to {name} --site layer.2" in shown.code("As command")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    # A link fills the form in, and trains nothing.
    again = look(shown.fragment, width=width)
    assert again.page.get_by_label("Name").input_value() == name
    again.page.wait_for_timeout(500)
    assert again.page.locator(".found").count() == 0
    again.run()
    again.page.get_by_text("there is something of that name already").wait_for()
    shown.open("Grid")
    shown.overlay("Features")
    choice = page.get_by_label("Dictionary")
    assert f"dictionaries/{name}" in choice.inner_text()


def test_a_form_that_is_not_filled_in_says_what_is_missing(
    look: Opener, tiny_name: str
) -> None:
    shown = look(fragment(tab="ask", model=tiny_name))
    shown.page.get_by_role("button", name="steer").click()
    shown.run()
    shown.page.get_by_text("Fill in “Prompts” first.").wait_for()
    shown.page.get_by_role("button", name="patch").click()
    shown.page.get_by_label("Clean prompt").fill(A)
    shown.run()
    shown.page.get_by_text("Fill in “Contrast” first.").wait_for()


def test_help_explains_every_overlay_and_lists_every_analysis(
    look: Opener, bench: Bench
) -> None:
    shown = look("#tab=help")
    told = shown.page.locator("dt").all_inner_texts()
    shown.open("Grid")
    overlays = shown.page.locator("#overlays label").all_inner_texts()
    words = [one["word"] for one in bench.ask("GET", "/api/analyses").json]
    # Features are painted where there is a dictionary, which another test may have made.
    always = [name for name in overlays if name != "Features"]
    assert told == [*always, "Features", *words] and "Attention" in always


def test_pooling_is_a_word_or_a_position_and_what_is_left_alone_is_not_asked_for(
    look: Opener, tiny_name: str
) -> None:
    """A position arrives as a number, the address restores it, and a choice that is
    left alone stays Python's own.
    """
    shown = look(fragment(tab="ask", word="embed", model=tiny_name))
    page = shown.page
    page.get_by_label("Texts").fill(f"{A}\n{B}")
    shown.run()
    page.locator(".found").wait_for()
    assert asked_in(shown) == {"texts": [A, B]}
    page.get_by_text("More options").click()
    assert "as trained, or mean" in page.get_by_label("Pooling").inner_text()
    box = page.get_by_label("Pooling").bounding_box()
    assert box and box["width"] > 200, "what is chosen is not cut off"
    position = page.get_by_role("spinbutton", name="Position")
    assert position.count() == 0
    for chosen, value in (("first", "first"), ("a position", -2)):
        page.get_by_label("Pooling").select_option(label=chosen)
        if chosen == "a position":
            position.fill("-2")
        shown.run()
        assert asked_in(shown) == {"texts": [A, B], "pool": value}
        shown.idle()
    assert "pool=-2" in shown.code("As Python")
    assert "--pool=-2" in shown.code("As command")
    again = look(shown.fragment)
    again.page.locator(".found").wait_for()
    assert asked_in(again) == {"texts": [A, B], "pool": -2}
    again.page.get_by_text("More options").click()
    assert again.page.get_by_role("spinbutton", name="Position").input_value() == "-2"


def test_a_part_of_an_option_is_asked_for_if_it_is_filled_in_and_restored(
    look: Opener, tiny_name: str
) -> None:
    question = json.dumps({"texts": [A], "influence": "frobenius"})
    shown = look(fragment(tab="ask", word="visibility", model=tiny_name, q=question))
    page = shown.page
    page.locator(".found").wait_for()
    page.get_by_text("More options").click()
    page.get_by_role("spinbutton", name="Probes").fill("4")
    shown.run()
    shown.until("() => location.hash.includes('probes')")
    assert asked_in(shown)["sampling"] == {"probes": 4}
    shown.idle()
    assert "--probes 4" in shown.code("As command")
    again = look(shown.fragment)
    again.page.get_by_text("More options").click()
    assert again.page.get_by_role("spinbutton", name="Probes").input_value() == "4"
    assert again.page.get_by_role("combobox", name="Align").input_value() == "distance"


def test_back_returns_to_the_tab_and_the_form_before(grid: Grid) -> None:
    shown = grid({"0.pin": "layer.1~1"})
    page = shown.page
    shown.open("All analyses")
    for word in ("lens", "embed"):
        page.get_by_role("button", name=word).click()
    # A cell of the grid is none of another tab's view.
    assert "0.pin" not in shown.fragment
    pressed = ".card[aria-pressed=true] strong"
    for word in ("embed", "lens"):
        assert page.locator(pressed).inner_text() == word
        page.go_back()
        shown.until(
            f"() => document.querySelector('{pressed}')?.textContent !== {word!r}"
        )
    assert "All analyses" in page.title()
    page.go_back()
    shown.heading("The norm")
    shown.state()
    shown.open("Help")
    page.get_by_role("heading", name="Your own texts").wait_for()
    assert "tab=help" in shown.fragment


def test_a_model_chosen_in_one_tab_is_not_that_of_another(grid: Grid) -> None:
    shown = grid()
    shown.open("Datasets")
    model = shown.page.get_by_role("combobox", name="Model", exact=True)
    assert model.input_value() == "models/tiny"
    shown.model("models/other")
    shown.open("Grid")
    shown.heading("The norm of every state of tiny")
    shown.open("Datasets")
    assert model.input_value() == "models/other"


def test_a_view_is_saved_as_files_and_as_code(grid: Grid) -> None:
    shown = grid({"overlay": "lens"})
    shown.heading("What each layer")
    for label, part in {
        "(HTML)": b"<!doctype html>",
        "(PNG)": b"\x89PNG",
        "(SVG)": b"<svg",
        "(CSV)": b"probability",
    }.items():
        shown.page.get_by_role("button", name="Save ▾").first.click()
        with shown.page.expect_download() as waiting:
            shown.page.get_by_role("link", name=label).click()
        assert part in Path(waiting.value.path()).read_bytes()
    assert "hs.lens(model, " in shown.code("As Python")
    assert "hiddenscope lens --model" in shown.code("As command")


@pytest.mark.parametrize("allowed", [True, False])
def test_the_link_to_a_view_is_copied_or_shown(grid: Grid, allowed: bool) -> None:
    shown = grid(permissions=["clipboard-read", "clipboard-write"])
    if not allowed:  # as over plain HTTP from another machine
        shown.page.evaluate(
            "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
        )
    shown.page.get_by_role("button", name="Save ▾").first.click()
    shown.page.get_by_role("button", name="Copy the link").click()
    dialog = shown.page.get_by_role("dialog")
    said = "Copied." if allowed else "did not allow it"
    dialog.get_by_role("status").get_by_text(said).wait_for()
    assert dialog.locator("pre").inner_text() == shown.page.url
    if allowed:
        assert shown.page.evaluate("navigator.clipboard.readText()") == shown.page.url


def test_the_tour_and_the_theme_are_remembered(grid: Grid) -> None:
    """The theme is as the system has it, until somebody chooses; the tour stays away
    once it is dismissed.
    """
    shown = grid(color_scheme="light")
    page = shown.page
    tour = page.get_by_label("A short tour")
    for step in ("1 of 3", "2 of 3", "3 of 3"):
        assert step in tour.inner_text()
        tour.get_by_role("button", name="Done" if step == "3 of 3" else "Next").click()
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert light != dark
    for theme, colour, other in (("light", light, "dark"), ("dark", dark, "light")):
        page.get_by_label("Theme").select_option(theme)
        page.emulate_media(color_scheme=other)
        assert page.evaluate(paper) == colour
    page.reload()
    shown.heading("The norm")
    assert page.evaluate(paper) == dark
    assert page.get_by_label("Theme").input_value() == "dark" and tour.count() == 0


@linux
def test_a_disk_that_fills_is_said_beside_the_grid(grid: Grid) -> None:
    shown = grid()
    text = shown.page.get_by_label("Text A")
    with limited(os.getpid(), resource.RLIMIT_FSIZE, 2_000):
        text.fill("There is no room any more")
        status = shown.page.locator("#status")
        status.get_by_text("could not be kept on disk").wait_for()
    shown.heading("The norm")
    text.fill("There is room again and more")
    shown.tokens(20)


COUNT_LISTENERS = """
(() => {
  window.listening = 0;
  const { addEventListener, removeEventListener } = EventTarget.prototype;
  const ofPage = (target) => target === window || target === document || target instanceof MediaQueryList;
  EventTarget.prototype.addEventListener = function (...given) {
    if (ofPage(this)) window.listening++;
    return addEventListener.apply(this, given);
  };
  EventTarget.prototype.removeEventListener = function (...given) {
    if (ofPage(this)) window.listening--;
    return removeEventListener.apply(this, given);
  };
  const { observe, disconnect } = ResizeObserver.prototype;
  ResizeObserver.prototype.observe = function (...given) { window.listening++; return observe.apply(this, given); };
  ResizeObserver.prototype.disconnect = function () { window.listening--; return disconnect.apply(this); };
})()
"""


def test_many_repaints_and_every_tab_leave_no_listener_behind(
    grid: Grid, tiny_name: str
) -> None:
    """Grids and lines are painted anew with every overlay, panels with every dataset:
    none listens after it is gone.
    """
    shown = grid()
    here = shown.fragment
    shown.page.add_init_script(COUNT_LISTENERS)
    shown.page.reload()
    counts = []
    for _ in range(6):
        for label, words in (("Norm", "The norm"), ("Lens", "What each layer")):
            shown.overlay(label)
            shown.heading(words)
            counts.append(shown.page.evaluate("listening"))
    assert counts[0] > 0 and counts[2:] == counts[:-2], counts
    of_panels = set()
    data = fragment(tab="data", model=tiny_name, q=PROJECTED)
    for _ in range(3):
        shown.page.evaluate(f"location.hash = {data!r}")
        shown.page.locator(".panels canvas").first.wait_for()
        shown.page.locator(".lines canvas").last.wait_for()
        of_panels.add(shown.page.evaluate("listening"))
        shown.page.evaluate(f"location.hash = {here!r}")
        shown.heading("The norm")
    assert len(of_panels) == 1
    assert shown.page.evaluate("listening") == counts[0]


def test_nothing_is_wider_than_the_window_and_no_accessibility_fault_is_serious(
    grid: Grid, bench: Bench, store: hs.Store
) -> None:
    """Every tab with its results, in a phone's window and two of a desktop, light and
    dark.
    """
    drift = {"candidate": {"name": bench.folder("models/other")}, "texts": [A]}
    states = bench.store("corpora/states")
    tabs: dict[str, tuple[dict[str, Any], str]] = {
        "grid": ({"0.pin": "layer.1~1", "overlay": "lens"}, "aside.state .words"),
        "data": ({"q": PROJECTED}, ".panels canvas"),
        "stores": ({"store": states, "text": 0, "0.pin": "layer.1~2"}, ".near li"),
        "drift": ({"q": json.dumps(drift)}, ".grid canvas.front"),
        "ask": ({"word": "steer"}, "fieldset textarea"),
    }
    shown = grid(bypass_csp=True)
    here = shown.fragment
    windows = ((390, 844), (1366, 768), (1920, 1080))
    for tab, (more, seen) in tabs.items():
        address = f"{here}&{fragment(tab=tab, **more)[1:]}"
        shown.page.evaluate(f"location.hash = {address!r}")
        shown.page.locator(seen).first.wait_for()
        shown.idle()
        for (width, height), scheme in product(windows, ("light", "dark")):
            shown.page.set_viewport_size({"width": width, "height": height})
            shown.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            shown.settle()
            fits = "document.documentElement.scrollWidth <= innerWidth"
            assert shown.page.evaluate(fits), (tab, width)
            assert faults(shown) == [], (tab, width, scheme)


def faults(shown: Workbench) -> list[str]:
    """What axe-core calls serious or worse; nothing where it is not installed."""
    if not AXE.exists():
        if os.environ.get("HIDDENSCOPE_REQUIRE_BROWSER"):
            pytest.fail("axe-core is not installed: `make scripts` installs it")
        return []
    if not shown.page.evaluate("'axe' in window"):
        shown.page.add_script_tag(content=AXE.read_text("utf-8"))
    found = shown.page.evaluate("() => axe.run({ resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:160]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def test_a_lens_of_eighteen_tokens_fits_a_window_of_1400_pixels(grid: Grid) -> None:
    text = {"a": "The rest is here and there, I", "overlay": "lens"}
    shown = grid(text, width=1400, height=900)
    shown.heading("What each layer")
    shown.tokens(18)
    scroller = "document.querySelector('.grid .scroller')"
    assert shown.page.evaluate(f"{scroller}.scrollWidth <= {scroller}.clientWidth")
