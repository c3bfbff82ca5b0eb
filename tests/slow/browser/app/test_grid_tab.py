"""The grid tab beyond its overlays: dead ends, answers, a second model, history,
continuations, menus, theme.
"""

import pytest

import hiddenscope as hs
from tests.workbench.asking import SLOW
from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench

A, B = "The rest is here", "The best is here"


@pytest.fixture
def here(tiny_name: str) -> dict[str, str]:
    """What an address has for the tiny model."""
    return {"model": tiny_name, "a": A, "b": B, "overlay": "norm"}


def state(shown: Workbench) -> None:
    shown.panel.get_by_text("Nearest states").wait_for()
    shown.until("() => !document.querySelector('.stale')")


def test_a_model_without_a_lens_shows_norms_and_says_why(
    look: Opener, here: dict[str, str], bench: Bench
) -> None:
    """Lens is the overlay of the first visit. A sentence encoder has none, and must not
    be a dead end.
    """
    encoder = bench.folder("models/encoder")
    shown = look(fragment(model=encoder, a=A))
    shown.heading("The norm of every state")
    assert shown.page.get_by_role("radio", name="Norm", exact=True).is_checked()
    said = shown.page.locator(".first .say").inner_text()
    assert "no language-model head" in said and "in place of Lens" in said
    shown.page.get_by_role("combobox", name="Model", exact=True).fill("models/tiny")
    shown.page.get_by_role("combobox", name="Model", exact=True).press("Tab")
    shown.heading("What each layer")  # what was wanted in the first place
    assert shown.page.locator(".first .say").count() == 0


def test_patch_that_is_refused_offers_the_norms(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(
        fragment(**here | {"overlay": "patch", "answer": "no token", "other": "t"})
    )
    shown.page.locator(".first").get_by_role("alert").wait_for()
    shown.page.get_by_role("button", name="Show the norms").click()
    shown.heading("The norm")


def test_patch_asks_the_model_for_answers_to_texts_of_ones_own(
    look: Opener, here: dict[str, str], bench: Bench
) -> None:
    """Paris and Berlin answer the example alone; what is typed comes first."""
    shown = look(fragment(**here | {"overlay": "patch"}))
    found = bench.answer("answers", here["model"], a=A, b=B)["answers"]
    shown.heading("preference for")
    title = shown.page.locator(".grid h2").first.inner_text()
    assert "Paris" not in title and all(
        found[name].strip() in title for name in ("answer", "other")
    )
    field = shown.page.get_by_label("Answer to A")
    assert (
        field.input_value() == ""
        and field.get_attribute("placeholder") == found["answer"]
    )
    field.fill("s")
    shown.heading("preference for “s” over")


def test_a_caption_is_that_of_the_overlay_also_without_a_text(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here | {"overlay": "difference"}))
    shown.heading("against")
    shown.page.get_by_label("Text A").fill(" ")
    shown.page.get_by_text("Type a text to see its states.").wait_for()
    shown.overlay("Lens")
    shown.settle()
    assert shown.page.locator(".lead.tight").inner_text().startswith("Logit lens")


def test_cancelled_is_not_said_of_a_later_result(
    look: Opener, here: dict[str, str], bench: Bench
) -> None:
    """What comes from the cache shows no progress, which would have wiped it away."""
    shown = look(fragment(**here))
    shown.heading("The norm")
    slow = bench.submit("visibility", here["model"], **SLOW | {"seed": 12}).json["id"]
    shown.page.get_by_label("Text A").fill("A text that waits behind another question")
    shown.page.get_by_role("button", name="Cancel").click()
    status = shown.page.locator("#status")
    status.get_by_text("Cancelled.").wait_for()
    bench.ask("DELETE", f"/api/jobs/{slow}")
    shown.page.get_by_label("Text A").fill(A)
    shown.heading("The norm")
    assert status.inner_text() == ""


def test_the_menu_of_the_panel_can_be_clicked(
    look: Opener, here: dict[str, str]
) -> None:
    """The panel scrolls, and clipped the menu at its end; in a low window too."""
    shown = look(fragment(**here | {"0.pin": "layer.1~1"}), height=600)
    shown.panel.get_by_role("button", name="Ablate", exact=True).click()
    shown.panel.get_by_role("heading", name="Ablated").wait_for()
    save = shown.panel.get_by_role("button", name="Save ▾").last
    save.click()
    item = shown.panel.get_by_role("button", name="As Python")
    box = item.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    assert (
        shown.page.evaluate(f"document.elementFromPoint({x}, {y})?.textContent")
        == "As Python"
    )
    item.click()
    assert "hs.Scale(0.0" in shown.page.locator("dialog pre").inner_text()


def test_a_steered_result_stands_in_sight_with_its_direction_and_strength(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here | {"0.pin": "layer.1~1"}), height=768)
    state(shown)
    shown.panel.get_by_text("Steer along a direction").click()
    shown.panel.get_by_label("Steer toward this text").fill("over there")
    shown.panel.get_by_label("Steer away from this text").fill("<b>here</b>")
    shown.panel.get_by_label("Strength").fill("2.5")
    shown.panel.get_by_role("button", name="Steer", exact=True).click()
    heading = shown.panel.get_by_role("heading", name="Steered")
    heading.wait_for()
    assert (
        shown.panel.locator(".used").inner_text()
        == "2.5 × (“over there” − “<b>here</b>”)"
    )
    box = heading.bounding_box()
    assert box is not None and box["y"] + box["height"] < 768
    shown.keep("workbench-steered")
    shown.panel.get_by_role("button", name="Write on").click()
    shown.panel.get_by_role("heading", name="It writes, as it is").wait_for()
    shown.panel.get_by_role("heading", name="It writes, steered").wait_for()


def test_two_models_stand_side_by_side(look: Opener, here: dict[str, str]) -> None:
    """The second answers the same question, and its states are read too."""
    shown = look(fragment(**here))
    shown.heading("The norm")
    second = shown.page.get_by_label("Second model, beside it")
    second.fill("models/other")
    second.press("Tab")
    beside = shown.page.locator(".beside")
    beside.locator("h2", has_text="other").wait_for()
    first = shown.page.locator(".pairing > .views").first.bounding_box()
    other = beside.bounding_box()
    assert first is not None and other is not None
    assert (
        other["x"] > first["x"] + first["width"] - 1
        and abs(other["y"] - first["y"]) < 40
    )
    beside.locator("canvas.front").click(position={"x": 150, "y": 40})
    shown.panel.get_by_role("heading", name="in other").wait_for()
    shown.keep("workbench-beside")
    again = look(shown.fragment)
    again.page.locator(".beside h2", has_text="other").wait_for()
    second.fill("")
    second.press("Tab")
    shown.until("() => document.querySelector('.beside').hidden")


def test_a_model_chosen_in_one_tab_is_not_that_of_another(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    shown.heading("The norm")
    page = shown.page
    page.get_by_role("link", name="Datasets").click()
    model = page.get_by_role("combobox", name="Model", exact=True)
    assert model.input_value() == "models/tiny"
    model.fill("models/other")
    model.press("Tab")
    page.get_by_role("link", name="Grid", exact=True).click()
    shown.heading("The norm of every state of tiny")
    page.get_by_role("link", name="Datasets").click()
    assert model.input_value() == "models/other"


def test_what_was_asked_is_listed_and_undone(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here | {"0.pin": "layer.1~1"}))
    page = shown.page
    shown.heading("The norm")
    state(shown)
    undo = page.get_by_role("button", name="Undo")
    shown.overlay("Lens")
    shown.heading("What each layer")
    state(shown)
    shown.panel.get_by_role("button", name="Ablate", exact=True).click()
    shown.panel.get_by_role("heading", name="Ablated").wait_for()
    page.get_by_role("button", name="History").click()
    dialog = page.get_by_role("dialog")
    listed = dialog.locator("li").all_inner_texts()
    assert [words.split(" of ")[0].split("\n")[0] for words in listed] == [
        "ablate layer.1",
        "Lens",
        "Norm",
    ]
    dialog.get_by_role("button", name="Close").click()
    undo.click()
    shown.until("() => !document.querySelector('aside.state .sides')")
    shown.heading("What each layer")
    undo.click()
    shown.heading("The norm")
    assert (
        page.get_by_role("radio", name="Norm", exact=True).is_checked()
        and undo.is_disabled()
    )


def test_the_theme_is_chosen_and_remembered(look: Opener, here: dict[str, str]) -> None:
    """As the system has it, until somebody chooses; grids follow."""
    shown = look(fragment(**here), color_scheme="light")
    shown.heading("The norm")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = shown.page.evaluate(paper)
    shown.page.emulate_media(color_scheme="dark")
    dark = shown.page.evaluate(paper)
    assert light != dark
    for theme, colour in (("light", light), ("dark", dark)):
        shown.page.get_by_label("Theme").select_option(theme)
        assert shown.page.evaluate(paper) == colour
        shown.page.emulate_media(color_scheme="dark" if theme == "light" else "light")
        assert shown.page.evaluate(paper) == colour
    shown.page.reload()
    shown.heading("The norm")
    assert (
        shown.page.evaluate(paper) == dark
        and shown.page.get_by_label("Theme").input_value() == "dark"
    )


def test_help_is_a_link_and_comes_with_the_page(
    look: Opener, here: dict[str, str]
) -> None:
    shown = look(fragment(**here))
    shown.page.get_by_role("link", name="Help").click()
    shown.page.get_by_role("heading", name="Your own texts").wait_for()
    assert "tab=help" in shown.fragment
    shown.page.go_back()
    shown.heading("The norm")


def test_a_lens_of_eighteen_tokens_fits_a_window_of_1400_pixels(
    look: Opener, here: dict[str, str], root: object
) -> None:
    text = "The rest is here and there, I"
    assert len(hs.load(f"{root}/models/tiny").capture(text).tokens) >= 18  # type: ignore[union-attr]
    shown = look(
        fragment(**here | {"a": text, "overlay": "lens"}), width=1400, height=900
    )
    shown.heading("What each layer")
    assert shown.page.evaluate(
        "() => { const s = document.querySelector('.grid .scroller'); return"
        " s.scrollWidth <= s.clientWidth; }"
    )
