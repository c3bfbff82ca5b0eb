"""The page in a real browser: overlays, cells, tabs, links, files, keys and errors, on
a tiny model.
"""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

import hiddenscope as hs
from tests.places import ROOT
from tests.slices import long
from tests.workbench.asking import SLOW
from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench

A, B = "The rest is here", "The best is here"
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
OVERLAYS = {
    "Norm": "The norm of every state",
    "Difference to B": "against",
    "Lens": "What each layer of",
    "Visibility": "Which states of",
    "Patch": "preference for",
    "Drift": "The error of",
}


@pytest.fixture
def here(tiny_name: str, bench: Bench) -> dict[str, str]:
    """What an address has for the tiny model."""
    second = bench.folder("models/other")
    more = {"answer": "s", "other": "t", "second": second, "seconddtype": "as it is"}
    return {"model": tiny_name, "a": A, "b": B, "overlay": "norm", **more}


def test_a_first_visit_shows_a_worked_example_without_any_model(
    look: Opener, another: Any
) -> None:
    """Every overlay of the example, and changes of its state, come with the package: no
    worker is ever started.
    """
    with another() as fresh:
        shown = look(at=fresh)
        shown.heading("What each layer of smollm2")
        shown.until(
            "() => (document.querySelector('aside.state h2')?.textContent ??"
            " '').startsWith('layer.24')"
        )
        shown.keep("workbench-light")
        for label, words in OVERLAYS.items():
            shown.overlay(label)
            shown.heading(words)
        for act, said in (("Ablate", "Ablated"), ("Patch from text B", "Patched")):
            shown.page.get_by_role("button", name=act, exact=True).click()
            shown.panel.get_by_role("heading", name=said).wait_for()
        shown.page.get_by_role("link", name="Datasets").click()
        shown.page.locator(".panels canvas").first.wait_for()
        shown.page.get_by_role("link", name="Drift").click()
        shown.heading("The error of")
        assert fresh.worker.pid is None


def test_the_tour_has_three_steps_and_stays_away_once_dismissed(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    tour = shown.page.get_by_label("A short tour")
    for step in ("1 of 3", "2 of 3", "3 of 3"):
        assert step in tour.inner_text()
        tour.get_by_role("button", name="Done" if step == "3 of 3" else "Next").click()
    assert tour.count() == 0
    shown.page.reload()
    shown.heading("The norm")
    assert tour.count() == 0


def test_every_overlay_paints_the_same_grid_and_the_address_holds_it(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    shown.heading("The norm")
    for label, words in OVERLAYS.items():
        shown.overlay(label)
        shown.heading(words)
        assert shown.page.locator(".grid canvas.front").count() == 1
        again = look(unquote(shown.fragment).replace(" ", "+"))
        again.heading(words)
        assert again.page.get_by_role("radio", name=label, exact=True).is_checked()


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


def test_fifty_repaints_and_every_tab_leave_no_listener_behind(
    look: Opener, here: dict[str, str]
) -> None:
    """Grids and lines are painted anew with every overlay, panels with every dataset:
    none listens after it is gone.
    """
    question = json.dumps(
        {"data": "cities-incomplete", "method": "pca", "sites": "layer.1"}
    )
    shown = look(fragment(**here | {"tab": "data", "q": question}))
    shown.page.locator(".panels canvas").first.wait_for()
    shown.page.add_init_script(COUNT_LISTENERS)
    shown.page.goto(f"{shown.page.url.split('#')[0]}{fragment(**here)}")
    shown.page.reload()
    counts = []
    for repaint in range(50):
        label = list(OVERLAYS)[repaint % 2 * 2]
        shown.overlay(label)
        shown.heading(OVERLAYS[label])
        counts.append(shown.page.evaluate("listening"))
    assert counts[0] > 0 and counts[2:] == counts[:-2], counts
    of_panels = set()
    for _ in range(3):
        shown.page.evaluate(
            f"location.hash = {fragment(**here | {'tab': 'data', 'q': question})!r}"
        )
        shown.page.locator(".panels canvas").first.wait_for()
        shown.page.locator(".lines canvas").last.wait_for()
        of_panels.add(shown.page.evaluate("listening"))
        shown.page.evaluate(f"location.hash = {fragment(**here)!r}")
        shown.heading("The norm")
    assert len(of_panels) == 1
    assert shown.page.evaluate("listening") == counts[0]


def test_typing_changes_the_grid_and_the_address(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    shown.heading("The norm")
    shown.page.get_by_label("Text A").fill("Another text that is longer")
    shown.until(
        "() => document.querySelector('.grid"
        " .window')?.getAttribute('aria-label')?.includes('21 tokens')"
    )
    assert "Another+text" in shown.fragment
    shown.page.get_by_label("Text A").fill(" ")
    shown.page.get_by_text("Type a text to see its states.").wait_for()


def test_a_cell_is_chosen_by_mouse_and_by_keys_and_changed(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    shown.heading("The norm")
    assert "Choose a cell" in shown.panel.inner_text()
    shown.choose(200, 40)
    shown.panel.get_by_text("Nearest states").wait_for()
    first = shown.panel.locator("h2").inner_text()
    assert "0.pin=" in shown.fragment
    shown.page.locator(".grid .stage").focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        shown.page.keyboard.press(key)
    shown.until(
        f"() => document.querySelector('aside.state h2')?.textContent !== {first!r}"
    )
    shown.panel.get_by_text("Nearest states").wait_for()
    for act, said in (("Ablate", "Ablated"), ("Patch from text B", "Patched")):
        shown.panel.get_by_role("button", name=act, exact=True).click()
        shown.panel.get_by_role("heading", name=said).wait_for()
    shown.panel.get_by_text("Steer along a direction").click()
    shown.panel.get_by_role("button", name="Steer", exact=True).click()
    shown.panel.get_by_role("heading", name="Steered").wait_for()
    shown.panel.locator(".words button").first.click()
    shown.panel.get_by_role("button", name="Show on the grid").click()
    shown.heading("Which states of")
    shown.panel.get_by_text("Sees most").wait_for()
    shown.page.locator(".grid .stage").focus()
    shown.page.keyboard.press("Escape")
    shown.panel.get_by_text("Choose a cell").wait_for()


def saved(shown: Workbench, label: str) -> bytes:
    shown.page.get_by_role("button", name="Save ▾").first.click()
    with shown.page.expect_download() as waiting:
        shown.page.get_by_role("link", name=label).click()
    return Path(waiting.value.path()).read_bytes()


def test_a_view_is_saved_as_files_and_as_code(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here | {"overlay": "lens"}))
    shown.heading("What each layer")
    assert saved(shown, "(HTML)").startswith(b"<!doctype html>")
    assert saved(shown, "(PNG)").startswith(b"\x89PNG")
    assert b"<svg" in saved(shown, "(SVG)")
    assert b"probability" in saved(shown, "(CSV)")
    for name, words in (
        ("As Python", "hs.lens(model, "),
        ("As command", "hiddenscope lens --model"),
    ):
        shown.page.get_by_role("button", name="Save ▾").first.click()
        shown.page.get_by_role("button", name=name).click()
        assert words in shown.page.locator("dialog pre").inner_text()
        shown.page.keyboard.press("Escape")


def test_errors_are_sentences_and_the_next_question_works(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    shown.heading("The norm")
    shown.page.get_by_role("combobox", name="Model", exact=True).fill("no-such/model")
    shown.page.get_by_role("combobox", name="Model", exact=True).press("Enter")
    shown.page.get_by_role("alert").get_by_text("no-such/model").wait_for()
    shown.page.get_by_role("combobox", name="Model", exact=True).fill("models/tiny")
    shown.page.get_by_role("combobox", name="Model", exact=True).press("Enter")
    shown.heading("The norm")


def test_a_model_name_that_is_refused_says_so(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here), expected=("422",))
    shown.heading("The norm")
    shown.page.get_by_role("combobox", name="Model", exact=True).fill(
        "../../etc/passwd"
    )
    shown.page.get_by_role("combobox", name="Model", exact=True).press("Enter")
    shown.page.get_by_role("alert").get_by_text("cannot be understood").wait_for()


def test_a_long_question_shows_progress_and_can_be_cancelled(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(
        fragment(
            tab="ask",
            word="visibility",
            model=here["model"],
            q=json.dumps(SLOW | {"seed": 5}),
        )
    )
    cancel = shown.page.get_by_role("button", name="Cancel")
    cancel.wait_for()
    assert "visibility" in shown.page.locator("#status").inner_text()
    cancel.click()
    shown.page.get_by_text("Cancelled.").wait_for()
    shown.page.get_by_role("link", name="Grid", exact=True).click()
    shown.heading("The norm" if "overlay=norm" in shown.fragment else "What each layer")


def test_datasets_are_uploaded_and_looked_at(
    look: Opener, here: dict[str, str], tmp_path: Path
) -> None:
    shown = look(fragment(tab="data", model=here["model"]))
    file = tmp_path / "mine.csv"
    file.write_text(
        "text,label\n"
        + "".join(
            f"the {word} is,{word[0]}\n"
            for word in ("rest", "test", "real", "take") * 3
        )
    )
    shown.page.get_by_label("Upload a dataset").set_input_files(file)
    card = shown.page.get_by_role("button", name="mine.csv")
    card.wait_for()
    assert card.get_attribute("aria-pressed") == "true"
    shown.page.get_by_label("Method").select_option("pca")
    shown.page.get_by_role("button", name="Run", exact=True).click()
    shown.page.locator(".panels canvas").first.wait_for()
    shown.keep("workbench-datasets")
    shown.page.get_by_role("radio", name="Probe the labels").check()
    shown.page.get_by_role("button", name="Run", exact=True).click()
    shown.page.locator(".lines canvas").first.wait_for()
    file.write_bytes(b"\x00\x01")
    shown.page.get_by_label("Upload a dataset").set_input_files(tmp_path / "mine.csv")


def test_drift_of_two_models_has_a_tab(look: Opener, here: dict[str, str]) -> None:
    shown = look(fragment(tab="drift", model=here["model"]))
    shown.page.get_by_label("Candidate").fill("models/other")
    shown.page.get_by_label("Texts").fill(A)
    shown.page.get_by_role("button", name="Run", exact=True).click()
    shown.page.locator(".grid canvas.front").wait_for()
    assert shown.page.locator(".findings li").count() > 0


def test_a_form_that_is_not_filled_in_says_what_is_missing(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(tab="ask", model=here["model"]))
    shown.page.get_by_role("button", name="steer").click()
    shown.page.get_by_role("button", name="Run", exact=True).click()
    shown.page.get_by_text("Fill in “Prompts” first.").wait_for()
    shown.page.get_by_role("button", name="patch").click()
    shown.page.get_by_label("Clean prompt").fill(A)
    shown.page.get_by_role("button", name="Run", exact=True).click()
    shown.page.get_by_text("Fill in “Contrast” first.").wait_for()


def test_back_returns_to_the_tab_and_the_form_before(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here | {"0.pin": "layer.1~1"}))
    shown.heading("The norm")
    shown.page.get_by_role("link", name="All analyses").click()
    for word in ("lens", "embed"):
        shown.page.get_by_role("button", name=word).click()
    # A cell of the grid is none of another tab's view.
    assert "0.pin" not in shown.fragment
    for pressed in ("embed", "lens"):
        assert (
            shown.page.locator(".card[aria-pressed=true] strong").inner_text()
            == pressed
        )
        shown.page.go_back()
        shown.until(
            "() => document.querySelector('.card[aria-pressed=true]"
            f" strong')?.textContent !== {pressed!r}"
        )
    assert "All analyses" in shown.page.title()
    shown.page.go_back()
    shown.heading("The norm")
    shown.panel.get_by_text("Nearest states").wait_for()


def test_the_address_holds_what_was_done_to_a_state(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here | {"0.pin": "layer.1~1"}))
    shown.panel.get_by_role("button", name="Patch from text B", exact=True).click()
    shown.panel.get_by_role("heading", name="Patched").wait_for()
    shown.panel.get_by_text("Steer along a direction").click()
    shown.panel.get_by_label("Steer toward this text").fill("over there")
    shown.panel.get_by_role("button", name="Steer", exact=True).click()
    shown.panel.get_by_role("heading", name="Steered").wait_for()
    again = look(shown.fragment)
    again.panel.get_by_role("heading", name="Steered").wait_for()
    again.panel.get_by_text("Steer along a direction").click()
    assert (
        again.panel.get_by_label("Steer toward this text").input_value() == "over there"
    )
    assert (
        again.panel.locator(".sides").inner_text()
        == shown.panel.locator(".sides").inner_text()
    )
    shown.choose(200, 40)
    shown.until("() => !document.querySelector('aside.state .sides')")
    assert "change=" not in shown.fragment


def test_nothing_of_an_earlier_grid_stays_beside_a_sentence(
    look: Opener, here: dict[str, str], bench: Bench
) -> None:
    """Not its files, its state or its findings: they would be of another text, or of
    another model.
    """
    shown = look(fragment(**here | {"overlay": "difference", "0.pin": "layer.1~3"}))
    shown.heading("against")
    shown.page.get_by_label("Measure").first.select_option(index=1)
    assert "0.measure=1" in shown.fragment
    shown.overlay("Lens")
    shown.heading("What each layer")
    # Its second measure is another.
    assert "0.measure" not in shown.fragment and "0.pin" in shown.fragment
    shown.page.get_by_label("Text A").fill("T")
    shown.panel.get_by_role("alert").get_by_text("tokens now").wait_for()
    model, text = (
        shown.page.get_by_role("combobox", name="Model", exact=True),
        shown.page.get_by_label("Text A"),
    )
    for field, value, said in (
        (text, " ", "Type a text"),
        (model, "no-such/model", "no-such/model"),
    ):
        text.fill(f"A text, then {said}")
        shown.page.get_by_role("button", name="Save ▾").first.wait_for()
        field.fill(value)
        field.press("Tab")
        shown.page.locator(".say", has_text=said).first.wait_for()
        assert shown.page.get_by_role("button", name="Save ▾").count() == 0
        assert "Choose a cell" in shown.panel.inner_text()
        assert shown.page.locator(".below").inner_text() == ""
    model.fill("models/tiny")
    model.press("Tab")
    shown.heading("What each layer")
    slow = bench.submit("visibility", here["model"], **SLOW | {"seed": 11}).json["id"]
    text.fill("A text that waits behind another question")
    shown.page.get_by_role("button", name="Cancel").click()
    shown.page.locator(".desk").get_by_text("Cancelled.").wait_for()
    bench.ask("DELETE", f"/api/jobs/{slow}")
    shown.page.get_by_role("button", name="Ask again").click()
    shown.heading("What each layer")


def test_a_first_picture_that_comes_late_does_not_replace_the_whole(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(tab="data", model=here["model"]))
    late: list[Any] = []
    shown.page.route("**/api/jobs/*/partial", lambda route: late.append(route))
    shown.page.get_by_label("Method").select_option("tsne")
    shown.page.get_by_text("More options").click()
    shown.page.get_by_label("Sites").fill("layer.1")
    shown.page.get_by_role("button", name="Run", exact=True).click()
    shown.page.locator(".found .panels canvas").first.wait_for()
    assert late, "no first picture was asked for"
    late[0].continue_()
    shown.page.wait_for_timeout(500)
    assert (
        shown.page.locator(".found").count() == 1
        and shown.page.locator(".early").count() == 0
    )


@pytest.mark.parametrize("allowed", [True, False])
def test_the_link_to_a_view_is_copied_or_shown(
    look: Opener, here: dict[str, str], allowed: bool
) -> None:
    shown = look(fragment(**here), permissions=["clipboard-read", "clipboard-write"])
    shown.heading("The norm")
    if not allowed:  # as over plain HTTP from another machine
        shown.page.evaluate(
            "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
        )
    shown.page.get_by_role("button", name="Save ▾").first.click()
    shown.page.get_by_role("button", name="Copy the link").click()
    dialog = shown.page.get_by_role("dialog")
    dialog.get_by_role("status").get_by_text(
        "Copied." if allowed else "did not allow it"
    ).wait_for()
    assert dialog.locator("pre").inner_text() == shown.page.url
    if allowed:
        assert shown.page.evaluate("navigator.clipboard.readText()") == shown.page.url


def test_pooling_is_a_word_or_a_position_and_nothing_is_chosen_that_the_reader_did_not_choose(
    look: Opener, here: dict[str, str]
) -> None:
    """A position arrives as a number, the address restores it, and a choice that is
    left alone stays Python's own.
    """
    shown = look(fragment(tab="ask", word="embed", model=here["model"]))
    page = shown.page
    page.get_by_label("Texts").fill(f"{A}\n{B}")
    page.get_by_role("button", name="Run", exact=True).click()
    shown.until(
        "() => location.hash.includes('q=') && !!document.querySelector('.found')"
    )
    assert asked_in(shown) == {"texts": [A, B]}
    page.get_by_text("More options").click()
    assert "as trained, or mean" in page.get_by_label("Pooling").inner_text()
    position = page.get_by_role("spinbutton", name="Position")
    assert position.count() == 0
    for chosen, value in (("first", "first"), ("cls", "cls"), ("a position", -2)):
        page.get_by_label("Pooling").select_option(label=chosen)
        if chosen == "a position":
            position.fill("-2")
        page.get_by_role("button", name="Run", exact=True).click()
        assert asked_in(shown) == {"texts": [A, B], "pool": value}
        shown.until("() => !document.querySelector('.stale')")
    assert "pool=-2" in code_of(shown, "As Python") and "--pool=-2" in code_of(
        shown, "As command"
    )
    again = look(shown.fragment)
    again.page.locator(".found").wait_for()
    assert asked_in(again) == {"texts": [A, B], "pool": -2}
    again.page.get_by_text("More options").click()
    assert again.page.get_by_role("spinbutton", name="Position").input_value() == "-2"


def test_probes_are_asked_for_below_the_other_fields_and_restored(
    look: Opener, here: dict[str, str]
) -> None:
    """They are a part of the sampling, which is asked for if any part is filled in."""
    shown = look(fragment(tab="ask", word="visibility", model=here["model"]))
    page = shown.page
    page.get_by_role("textbox", name="Texts").fill(A)
    page.get_by_role("combobox", name="Influence").select_option("frobenius")
    page.get_by_text("More options").click()
    page.get_by_role("button", name="Run", exact=True).click()
    shown.until(
        "() => location.hash.includes('q=') && !!document.querySelector('.found')"
    )
    assert asked_in(shown) == {"texts": [A], "influence": "frobenius"}
    page.get_by_role("spinbutton", name="Probes").fill("4")
    page.get_by_role("button", name="Run", exact=True).click()
    shown.until("() => location.hash.includes('probes')")
    assert asked_in(shown)["sampling"] == {"probes": 4}
    shown.until("() => !document.querySelector('.stale')")
    assert "--probes 4" in code_of(shown, "As command")
    again = look(shown.fragment)
    again.page.get_by_text("More options").click()
    assert again.page.get_by_role("spinbutton", name="Probes").input_value() == "4"
    assert again.page.get_by_role("combobox", name="Align").input_value() == "distance"


def asked_in(shown: Workbench) -> Any:
    """What the address says was asked."""
    return json.loads(parse_qs(shown.fragment.removeprefix("#"))["q"][0])


def code_of(shown: Workbench, name: str) -> str:
    """The code that a result offers."""
    shown.page.get_by_role("button", name="Save ▾").first.click()
    shown.page.get_by_role("button", name=name).click()
    text = shown.page.locator("dialog pre").inner_text()
    shown.page.keyboard.press("Escape")
    return text


def test_nothing_is_wider_than_the_window_and_no_accessibility_fault_is_serious(
    look: Opener, here: dict[str, str], bench: Bench, store: hs.Store, kept: hs.States
) -> None:
    """Every tab with its results, in a phone's window and two of a desktop, light and
    dark.
    """
    states = next(
        one["name"]
        for one in bench.ask("GET", "/api/stores").json
        if one["label"] == "corpora/states"
    )
    drift = {"candidate": {"name": here["second"]}, "texts": [A]}
    tabs = {
        "grid": ({"0.pin": "layer.1~1", "overlay": "lens"}, "aside.state .words"),
        "data": (
            {"q": json.dumps({"method": "pca", "sites": "layer.1"})},
            ".panels canvas",
        ),
        "stores": ({"store": states, "text": 0, "0.pin": "layer.1~2"}, ".near li"),
        "drift": ({"q": json.dumps(drift)}, ".grid canvas.front"),
        "ask": ({"word": "steer"}, "fieldset textarea"),
    }
    shown = look(fragment(**here), bypass_csp=True)
    for tab, (more, seen) in tabs.items():
        shown.page.evaluate(
            f"location.hash = {fragment(**here | {'tab': tab} | more)!r}"
        )
        shown.page.locator(seen).first.wait_for()
        shown.until("() => !document.querySelector('.stale')")
        for (width, height), scheme in product(
            ((390, 844), (1366, 768), (1920, 1080)), ("light", "dark")
        ):
            shown.page.set_viewport_size({"width": width, "height": height})
            shown.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            shown.settle()
            assert shown.page.evaluate(
                "document.documentElement.scrollWidth <= innerWidth"
            ), (tab, width)
            shown.keep(f"workbench-{tab}-{width}-{scheme}")
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


@pytest.mark.real
def test_the_real_model_follows_what_is_typed(look: Opener, smollm2: hs.Model) -> None:
    """On smollm2 itself: a text that nobody computed before, its grid, one of its
    states, and what its loss does.
    """
    shown = look(fragment(overlay="norm", a="The Seine flows through the city of"))
    shown.heading("The norm of every state of smollm2")
    text = "The Thames flows slowly through the old city of"
    shown.page.get_by_label("Text A").fill(text)
    tokens = f"{smollm2.encode(text).lengths[0]} tokens"
    shown.until(
        "() => document.querySelector('.grid"
        f" .window')?.getAttribute('aria-label')?.includes({tokens!r})"
    )
    shown.heading("The norm of every state of smollm2")
    shown.choose(300, 60)
    shown.panel.get_by_text("Nearest states").wait_for()
    shown.panel.get_by_role("button", name="Ablate", exact=True).click()
    shown.panel.get_by_role("heading", name="Ablated").wait_for()


@pytest.mark.real
# Other tests do each of these on tiny models.
@long
def test_every_overlay_tab_and_export_on_the_real_model(
    look: Opener, another: Any, smollm2: hs.Model, tmp_path: Path
) -> None:
    """On smollm2 itself, from the first overlay to the last tab: no console error,
    nothing asked of the network.
    """
    hs.extract(
        smollm2,
        ["The Seine flows.", "The Thames flows."],
        to=tmp_path / "root" / "rivers",
        sites="layer.9,final",
    )
    texts = {
        "a": "The Thames flows through",
        "b": "The Seine flows through",
        "answer": " London",
        "other": " Paris",
    }
    with another(root=tmp_path / "root") as bench:
        # Drift compares with bfloat16 by default, which takes minutes on a CPU that has
        # no instructions for it.
        shown = look(fragment(**texts, overlay="norm", seconddtype="float32"), at=bench)
        for label, words in OVERLAYS.items():
            shown.overlay(label)
            shown.heading(words)
        shown.overlay("Lens")
        shown.heading("What each layer")
        shown.page.locator(".grid .stage").focus()
        for key in ("ArrowRight", "End", "ArrowUp", "Enter"):
            shown.page.keyboard.press(key)
        shown.panel.get_by_text("Nearest states").wait_for()
        for act, said in (("Ablate", "Ablated"), ("Patch from text B", "Patched")):
            shown.panel.get_by_role("button", name=act, exact=True).click()
            shown.panel.get_by_role("heading", name=said).wait_for()
        assert saved(shown, "(HTML)").startswith(
            b"<!doctype html>"
        ) and b"<svg" in saved(shown, "(SVG)")
        assert saved(shown, "(PNG)").startswith(b"\x89PNG") and b"probability" in saved(
            shown, "(CSV)"
        )
        again = look(shown.fragment, at=bench)
        again.panel.get_by_text("Nearest states").wait_for()
        again.page.context.close()
        _walk_tabs(shown)


def _walk_tabs(shown: Workbench) -> None:
    """Datasets, stores, drift and all analyses; then a model that is not there, and the
    next question.
    """
    page = shown.page
    page.get_by_role("link", name="Datasets").click()
    page.locator(".panels canvas").first.wait_for()
    page.get_by_role("radio", name="Probe the labels").check()
    page.get_by_text("More options").click()
    page.get_by_label("Sites").fill("layer.9")
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".findings li").first.wait_for()
    page.get_by_role("link", name="Stores").click()
    page.locator(".texts li button").first.click()
    page.locator("button.token").last.click()
    page.locator(".near li").first.wait_for()
    page.get_by_label("Query", exact=True).fill("The Thames flows.")
    page.get_by_role("button", name="Search").click()
    page.locator(".texts li", has_text="cosine 1.000").get_by_text("Thames").wait_for()
    page.get_by_role("link", name="Drift").click()
    page.get_by_label("Texts").fill("The Rhine flows.")
    page.get_by_role("button", name="Run", exact=True).click()
    shown.heading("The error of")
    page.get_by_role("link", name="All analyses").click()
    page.get_by_role("button", name="anatomy").click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".findings li").first.wait_for()
    page.get_by_role("combobox", name="Model", exact=True).fill("no-such/model")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("alert").get_by_text("no-such/model").wait_for()
    page.get_by_role("link", name="Grid", exact=True).click()
    page.get_by_role("combobox", name="Model", exact=True).fill("smollm2")
    page.get_by_role("combobox", name="Model", exact=True).press("Enter")
    shown.heading("What each layer of smollm2")
