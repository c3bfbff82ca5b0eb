"""The grid in a real browser: overlays, cells, changes of a state, a second model, and
what is said where something is missing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import hiddenscope as hs
from tests.workbench.asking import SLOW
from tests.workbench.models import save_adapter, save_word_model
from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench

Grid = Callable[..., Workbench]
A, B = "The rest is here", "The best is here"
PIN = {"0.pin": "layer.1~1"}
OVERLAYS = {
    "Norm": "The norm of every state",
    "Difference to B": "against",
    "Lens": "What each layer of",
    "Visibility": "Which states of",
    "Patch": "preference for",
    "Drift": "The error of",
}


def test_a_first_visit_shows_a_worked_example_without_any_model(
    look: Opener, another: Any
) -> None:
    """Every overlay of the example, and changes of its state, come with the package: no
    worker is ever started.
    """
    with another() as fresh:
        shown = look(at=fresh)
        shown.heading("What each layer of smollm2")
        shown.panel.get_by_role("heading", name="layer.24").wait_for()
        for label, words in OVERLAYS.items():
            shown.overlay(label)
            shown.heading(words)
        shown.act("Ablate", "Ablated")
        shown.act("Patch from text B", "Patched")
        shown.open("Datasets")
        shown.page.locator(".panels canvas").first.wait_for()
        shown.open("Drift")
        shown.heading("The error of")
        assert fresh.worker.pid is None


def test_every_overlay_paints_the_same_grid_and_the_address_holds_it(
    look: Opener, grid: Grid, bench: Bench
) -> None:
    second = {"second": bench.folder("models/other"), "seconddtype": "as it is"}
    shown = grid({"answer": "s", "other": "t", **second})
    for label, words in OVERLAYS.items():
        shown.overlay(label)
        shown.heading(words)
        assert shown.page.locator(".grid canvas.front").count() == 1
        again = look(unquote(shown.fragment).replace(" ", "+"))
        again.heading(words)
        assert again.page.get_by_role("radio", name=label, exact=True).is_checked()


def test_typing_changes_the_grid_and_the_address(grid: Grid) -> None:
    shown = grid()
    text = shown.page.get_by_label("Text A")
    text.fill("Another text that is longer")
    shown.tokens(21)
    assert "Another+text" in shown.fragment
    text.fill(" ")
    shown.page.get_by_text("Type a text to see its states.").wait_for()
    # The caption is that of the overlay also without a text.
    shown.overlay("Lens")
    shown.settle()
    assert shown.page.locator(".lead.tight").inner_text().startswith("Logit lens")


def test_a_link_that_leads_nowhere_says_so(
    look: Opener, tiny_name: str, store: hs.Store
) -> None:
    shown = look(fragment(model=tiny_name, a=A, b=B, overlay="nonsense", **PIN))
    shown.heading("The norm")
    shown.state()
    shown.page.get_by_text("There is no overlay “nonsense”.").wait_for()
    assert shown.page.get_by_role("radio", name="Norm", exact=True).is_checked()
    for parts, said in (
        ({"tab": "nonsense"}, "There is no tab “nonsense”."),
        ({"tab": "ask", "word": "nonsense"}, "There is no analysis “nonsense”."),
        ({"tab": "data", "data": "upload:0"}, "This link's dataset is not here"),
        ({"tab": "stores", "store": "store:0"}, "is not below the folder of --root"),
        (
            {"tab": "stores", "text": "1", "0.pin": "layer.99~1"},
            "This text has no state layer.99 at token 1.",
        ),
    ):
        linked = look(fragment(model=tiny_name, **parts)).page
        linked.get_by_text(said).wait_for()


def test_what_the_workbench_does_not_take_is_said_with_what_it_takes(
    grid: Grid, look: Opener, store: hs.Store, tiny_name: str
) -> None:
    shown = grid(expected=("422",))
    shown.page.get_by_label("Text A").fill("x" * 20_001)
    shown.page.get_by_text("20,000 characters: shorten it, or ask in Py").wait_for()
    asked = look(fragment(tab="ask", word="examples")).page
    neuron = asked.get_by_label("Neuron", exact=False).first
    assert neuron.get_attribute("placeholder") == "layer.3.mlp.neuron.7"
    stores = look(fragment(tab="stores", model=tiny_name)).page
    stores.get_by_role("button", name="Search").click()
    stores.get_by_text("Type a text to search for: all texts are shown.").wait_for()


def test_a_cell_is_chosen_by_mouse_and_by_keys_and_changed(grid: Grid) -> None:
    shown = grid()
    assert "Choose a cell" in shown.panel.inner_text()
    shown.choose(200, 40)
    shown.state()
    first = shown.panel.locator("h2").inner_text()
    assert "0.pin=" in shown.fragment
    shown.press("ArrowRight", "ArrowDown", "Enter")
    shown.until(
        f"() => document.querySelector('aside.state h2')?.textContent !== {first!r}"
    )
    shown.state()
    shown.act("Ablate", "Ablated")
    shown.act("Patch from text B", "Patched")
    shown.panel.locator(".words button").first.click()
    shown.panel.get_by_role("button", name="Show on the grid").click()
    shown.heading("Which states of")
    shown.panel.get_by_text("Sees most").wait_for()
    shown.press("Escape")
    shown.panel.get_by_text("Choose a cell").wait_for()


def test_choosing_a_token_paints_what_it_reads(grid: Grid) -> None:
    shown = grid()
    shown.overlay("Attention")
    shown.heading("reads in each layer")
    title = shown.page.locator(".grid h2").first
    assert "token 11," in title.inner_text()
    said = shown.page.locator(".lead.tight").inner_text()
    assert "largest weight of any head" in said
    box = shown.page.locator(".grid canvas.front").bounding_box()
    assert box
    shown.choose(box["width"] * 0.6, 20)
    shown.until(
        "() => !document.querySelector('.grid h2').textContent.includes('token 11,')"
    )
    shown.idle()
    chosen = title.inner_text().split("token ")[1].split(",")[0]
    assert int(chosen) < 11 and f"%7E{chosen}" in shown.fragment
    shown.state()
    names = shown.page.get_by_label("Measure").locator("option").all_inner_texts()
    assert any("value-weighted" in name for name in names)


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_features_are_painted_and_those_of_a_state_are_listed(
    grid: Grid, bench: Bench, dictionaries: dict[str, hs.Dictionary], width: int
) -> None:
    shown = grid(width=width)
    shown.overlay("Features")
    shown.heading("The strongest features of each token at layer.2")
    shown.page.get_by_label("Dictionary").select_option(bench.dictionary("layer.2.mlp"))
    shown.heading("at layer.2.mlp")
    assert "dictionary=" in shown.fragment
    shown.page.get_by_label("Dictionary").select_option(bench.dictionary("layer.2"))
    shown.until(
        "() => document.querySelector('.grid h2').textContent.endsWith('at layer.2')"
    )
    shown.idle()
    shown.press("Home", "ArrowRight", "Enter")
    shown.state()
    assert "token 1 " in shown.page.locator(".grid .readout").inner_text()
    assert 'states["layer.2"][1]' in shown.panel.inner_text()
    shown.panel.get_by_role("heading", name="Strongest features here").wait_for()
    features = shown.panel.locator("h3:text('Strongest features here') + ul li")
    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    first = hs.features(model, A, dictionaries["layer.2"]).data.isel(site=0, token=1)
    texts = [item.split()[0] for item in features.all_inner_texts()]
    assert texts == first["strongest"].values.tolist()
    # Under another overlay they are listed too.
    shown.overlay("Norm")
    shown.heading("The norm")
    shown.panel.get_by_role("heading", name="Strongest features here").wait_for()
    assert shown.page.evaluate(
        "document.documentElement.scrollWidth <= window.innerWidth"
    )


@pytest.mark.parametrize("width", [390, 1366, 1920])
def test_a_listed_feature_is_added_scaled_and_held_by_the_address(
    look: Opener,
    grid: Grid,
    bench: Bench,
    dictionaries: dict[str, hs.Dictionary],
    width: int,
) -> None:
    chosen = {"overlay": "features", "dictionary": bench.dictionary("layer.2")}
    shown = grid(chosen, width=width)
    shown.heading("The strongest features of each token at layer.2")
    shown.press("Home", "ArrowRight", "Enter")
    shown.state()
    listed = shown.panel.locator("h3:text('Strongest features here') + ul li button")
    feature = listed.nth(1).inner_text()
    listed.nth(1).click()
    number = shown.panel.get_by_label("Feature", exact=True)
    assert number.input_value() == feature
    strength = shown.panel.get_by_label("Strength of the feature")
    assert strength.evaluate("(field) => field === document.activeElement")
    strength.fill("9")
    shown.act("Add", "Feature added")
    used = shown.panel.locator(".used")
    assert used.inner_text() == f"9 × feature {feature}"
    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    added = hs.Add(dictionaries["layer.2"][int(feature)], tokens=1, scale=9.0)
    logits: Any = hs.edit(model, [A], {"layer.2": added}, (), logits=True).logits
    sides = shown.panel.locator(".sides").first
    top = sides.locator("ol").nth(1).locator("li span").first.inner_text()
    assert float(top) == pytest.approx(float(logits[-1].softmax(-1).max()), abs=1e-3)
    assert shown.page.evaluate(
        "document.documentElement.scrollWidth <= window.innerWidth"
    )
    # Under another overlay, and in another window, the same was done.
    shown.overlay("Norm")
    shown.heading("The norm")
    again = look(shown.fragment, width=width)
    for page in (shown, again):
        page.panel.get_by_role("heading", name="Feature added").wait_for()
        assert page.panel.locator(".used").inner_text() == f"9 × feature {feature}"
    again.panel.get_by_role("button", name="Write on").click()
    again.panel.get_by_role("heading", name="It writes, feature added").wait_for()
    again.panel.get_by_text("Add or scale a feature").click()
    again.panel.get_by_label("Strength of the feature").fill("0")
    again.act("Scale", "Feature scaled")
    again.panel.get_by_text("Add or scale a feature").click()
    again.panel.get_by_label("Feature", exact=True).fill("99")
    again.panel.get_by_role("button", name="Scale", exact=True).click()
    again.panel.get_by_text("No feature 99: the dictionary has 32").wait_for()


def test_a_steered_result_stands_in_sight_and_the_address_holds_it(
    look: Opener, grid: Grid
) -> None:
    shown = grid(PIN, height=768)
    shown.state()
    shown.act("Patch from text B", "Patched")
    shown.panel.get_by_text("Steer along a direction").click()
    shown.panel.get_by_label("Steer toward this text").fill("over there")
    shown.panel.get_by_label("Steer away from this text").fill("<b>here</b>")
    shown.panel.get_by_label("Strength").fill("2.5")
    shown.act("Steer", "Steered")
    used = shown.panel.locator(".used").inner_text()
    assert used == "2.5 × (“over there” − “<b>here</b>”)"
    box = shown.panel.get_by_role("heading", name="Steered").bounding_box()
    assert box is not None and box["y"] + box["height"] < 768
    shown.panel.get_by_role("button", name="Write on").click()
    for heading in ("It writes, as it is", "It writes, steered"):
        shown.panel.get_by_role("heading", name=heading).wait_for()
    again = look(shown.fragment)
    again.panel.get_by_role("heading", name="Steered").wait_for()
    again.panel.get_by_text("Steer along a direction").click()
    toward = again.panel.get_by_label("Steer toward this text")
    assert toward.input_value() == "over there"
    sides = again.panel.locator(".sides").first.inner_text()
    assert sides == shown.panel.locator(".sides").first.inner_text()
    shown.choose(200, 40)
    shown.until("() => !document.querySelector('aside.state .sides')")
    assert "change=" not in shown.fragment


def test_the_menu_of_the_panel_can_be_clicked(grid: Grid) -> None:
    """The panel scrolls, and clipped the menu at its end; in a low window too."""
    shown = grid(PIN, height=600)
    shown.act("Ablate", "Ablated")
    shown.panel.get_by_role("button", name="Save ▾").last.click()
    item = shown.panel.get_by_role("button", name="As Python")
    box = item.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    there = f"document.elementFromPoint({x}, {y})?.textContent"
    assert shown.page.evaluate(there) == "As Python"
    item.click()
    assert "hs.Scale(0.0" in shown.page.locator("dialog pre").inner_text()


def test_two_models_stand_side_by_side(look: Opener, grid: Grid) -> None:
    """The second answers the same question, and its states are read too."""
    shown = grid()
    second = shown.page.get_by_label("Second model, beside it")
    second.fill("models/other")
    second.press("Tab")
    beside = shown.page.locator(".beside")
    beside.locator("h2", has_text="other").wait_for()
    first = shown.page.locator(".pairing > .views").first.bounding_box()
    other = beside.bounding_box()
    assert first is not None and other is not None
    assert other["x"] > first["x"] + first["width"] - 1
    assert abs(other["y"] - first["y"]) < 40
    beside.locator("canvas.front").click(position={"x": 150, "y": 40})
    shown.panel.get_by_role("heading", name="in other").wait_for()
    again = look(shown.fragment)
    again.page.locator(".beside h2", has_text="other").wait_for()
    second.fill("")
    second.press("Tab")
    shown.until("() => document.querySelector('.beside').hidden")


def test_the_rows_of_two_grids_line_up_and_a_pin_stands_in_both(
    look: Opener, tiny_name: str, bench: Bench
) -> None:
    """What is pinned is read out above a grid, in more lines in one than in the other."""
    other = bench.folder("models/words")
    address = {"model": tiny_name, "beside": other, "a": "Paul said that Mary was late"}
    shown = look(fragment(**address, overlay="lens", **{"0.pin": "layer.2~1"}))
    page = shown.page
    page.locator(".beside canvas.front").wait_for()
    for width in (1440, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        shown.idle()
        tops = page.evaluate(
            "() => [...document.querySelectorAll('.pairing .window')].map((one) =>"
            " one.getBoundingClientRect().top)"
        )
        assert len(tops) == 2 and tops[0] == pytest.approx(tops[1], abs=0.5)
    second = look(fragment(**address | {"beside": tiny_name}, **{"0.pin": "layer.2~1"}))
    readouts = second.page.locator(".pairing .readout")
    second.page.locator(".beside canvas.front").wait_for()
    second.idle()
    said = readouts.all_inner_texts()
    assert said[0] == said[1] and said[0].startswith("layer.2")
    second.page.locator(".beside canvas.front").click(position={"x": 200, "y": 40})
    second.idle()
    first, mirrored = readouts.all_inner_texts()
    assert first.split("(pinned)")[0].strip() in mirrored and first != said[0]
    second.press("Escape")
    second.panel.get_by_text("Choose a cell").wait_for()
    assert "pinned" not in "".join(readouts.all_inner_texts())


def test_a_folder_that_was_made_later_is_offered(
    look: Opener, another: Any, tmp_path: Path
) -> None:
    """An adapter too, whose base lies beside it."""
    root = tmp_path / "root"
    save_word_model(root / "first")
    with another(root=root) as fresh:
        first = fresh.folder("first")
        shown = look(fragment(model=first, a=A, overlay="norm"), at=fresh)
        shown.heading("The norm")
        save_word_model(root / "later")
        shown.model("later")
        shown.heading("The norm of every state of later")
        save_adapter(root / "later", root / "lora")
        shown.model("lora")
        shown.heading("later + lora")


def test_what_was_asked_is_listed_and_undone(grid: Grid) -> None:
    shown = grid(PIN)
    page = shown.page
    shown.state()
    undo = page.get_by_role("button", name="Undo")
    shown.overlay("Lens")
    shown.heading("What each layer")
    shown.state()
    shown.act("Ablate", "Ablated")
    page.get_by_role("button", name="History").click()
    dialog = page.get_by_role("dialog")
    # Its numbers stand outside the lines, where what scrolls is cut off.
    room = dialog.locator("ol").evaluate(
        "(list) => parseFloat(getComputedStyle(list).paddingLeft)"
    )
    assert room >= 2 * 16
    listed = dialog.locator("li").all_inner_texts()
    asked = [words.split(" of ")[0].split("\n")[0] for words in listed]
    assert asked == ["ablate layer.1", "Lens", "Norm"]
    dialog.get_by_role("button", name="Close").click()
    undo.click()
    shown.until("() => !document.querySelector('aside.state .sides')")
    shown.heading("What each layer")
    undo.click()
    shown.heading("The norm")
    assert page.get_by_role("radio", name="Norm", exact=True).is_checked()
    assert undo.is_disabled()


def test_a_model_without_a_lens_shows_norms_and_says_why(
    look: Opener, bench: Bench
) -> None:
    """Lens is the overlay of the first visit. A sentence encoder has none, and must not
    be a dead end.
    """
    shown = look(fragment(model=bench.folder("models/encoder"), a=A))
    shown.heading("The norm of every state")
    assert shown.page.get_by_role("radio", name="Norm", exact=True).is_checked()
    said = shown.page.locator(".first .say").inner_text()
    assert "has no head" in said and "in place of Lens" in said
    # Nobody is asked for answers that the model cannot compare.
    assert shown.page.get_by_role("radio", name="Patch", exact=True).is_disabled()
    shown.model("models/tiny")
    shown.heading("What each layer")  # what was wanted in the first place
    assert shown.page.get_by_role("radio", name="Patch", exact=True).is_enabled()
    assert shown.page.locator(".first .say").count() == 0


def test_patch_asks_the_model_for_answers_and_offers_the_norms_where_it_is_refused(
    grid: Grid, bench: Bench, tiny_name: str
) -> None:
    """Paris and Berlin answer the example alone; what is typed comes first."""
    shown = grid({"overlay": "patch"})
    found = bench.answer("answers", tiny_name, a=A, b=B)["answers"]
    shown.heading("preference for")
    title = shown.page.locator(".grid h2").first.inner_text()
    assert "Paris" not in title
    assert all(found[name].strip() in title for name in ("answer", "other"))
    field = shown.page.get_by_label("Answer to A")
    assert field.input_value() == ""
    assert field.get_attribute("placeholder") == found["answer"]
    field.fill("s")
    shown.heading("preference for “s” over")
    field.fill("no token")
    shown.page.locator(".first").get_by_role("alert").wait_for()
    shown.page.get_by_role("button", name="Show the norms").click()
    shown.heading("The norm")


def test_nothing_of_an_earlier_grid_stays_beside_a_sentence(
    grid: Grid, bench: Bench, tiny_name: str
) -> None:
    """Not its files, its state or its findings: they would be of another text, or of
    another model. And the next question works.
    """
    shown = grid({"overlay": "difference", "0.pin": "layer.1~3"})
    page, text = shown.page, shown.page.get_by_label("Text A")
    shown.heading("against")
    page.get_by_label("Measure").first.select_option(index=1)
    assert "0.measure=1" in shown.fragment
    shown.overlay("Lens")
    shown.heading("What each layer")
    # Its second measure is another.
    assert "0.measure" not in shown.fragment and "0.pin" in shown.fragment
    text.fill("T")
    shown.panel.get_by_role("alert").get_by_text("tokens now").wait_for()
    for said, ask in (
        ("Type a text", lambda: text.fill(" ")),
        ("no-such/model", lambda: shown.model("no-such/model")),
    ):
        text.fill(f"A text, then {said}")
        page.get_by_role("button", name="Save ▾").first.wait_for()
        ask()
        page.locator(".say", has_text=said).first.wait_for()
        assert page.get_by_role("button", name="Save ▾").count() == 0
        assert "Choose a cell" in shown.panel.inner_text()
        assert page.locator(".below").inner_text() == ""
    shown.model("models/tiny")
    shown.heading("What each layer")

    def cancel(words: str) -> None:
        slow = bench.submit("visibility", tiny_name, **SLOW | {"seed": 11}).json["id"]
        text.fill(words)
        page.get_by_role("button", name="Cancel").wait_for()
        assert "lens" in page.locator("#status").inner_text().lower()
        page.get_by_role("button", name="Cancel").click()
        page.locator(".desk").get_by_text("Cancelled.").wait_for()
        bench.ask("DELETE", f"/api/jobs/{slow}")

    cancel("A text that waits behind another question")
    page.get_by_role("button", name="Ask again").click()
    shown.heading("What each layer")
    cancel("Another text that waits")
    # What comes from the cache shows no progress, which would have wiped it away.
    text.fill("A text, then Type a text")
    shown.heading("What each layer")
    assert page.locator("#status").inner_text() == ""


def test_a_model_name_that_is_refused_says_so(grid: Grid) -> None:
    shown = grid(expected=("422",))
    shown.model("../../etc/passwd")
    shown.page.get_by_role("alert").get_by_text("no model has such a name").wait_for()
