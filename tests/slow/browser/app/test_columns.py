"""Two texts of different length under one grid: a click opens the state of text A that
stands in its column.
"""

import pytest

from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench

A = "Paul said that Mary was late because she"
B = "Paul said that Peter was quite late because he"
COLUMNS = 9
TWO_TEXTS = {"Difference to B": "The difference between", "Patch": "preference for"}
# The token of text A in a column; it has none in the sixth, where text B has “quite”.
IN_COLUMN = {8: "she", 6: "late", 5: None, 3: "Mary"}


@pytest.fixture
def words(look: Opener, bench: Bench) -> Workbench:
    """The norms of the model whose tokens are words, with a state chosen."""
    address = {"model": bench.folder("models/words"), "a": A, "b": B}
    more = {"answer": " she", "other": " he", "overlay": "norm", "0.pin": "layer.1~5"}
    shown = look(fragment(**address, **more))
    shown.heading("The norm")
    return shown


def click(shown: Workbench, column: int) -> None:
    """Click a cell of the second row of the grid, counted from the bottom."""
    label = shown.page.locator(".grid .window").get_attribute("aria-label") or ""
    sites = int(label.split(" sites")[0].split()[-1])
    box = shown.page.locator(".grid canvas.front").bounding_box()
    assert box is not None
    left, right, below = 55, 12, 30
    wide = (box["width"] - left - right) / COLUMNS
    high = (box["height"] - below - 6) / sites
    shown.choose(left + (column + 0.5) * wide, box["height"] - below - 1.5 * high)


@pytest.mark.parametrize("overlay", TWO_TEXTS)
def test_a_click_opens_the_state_of_text_a_in_its_column(
    words: Workbench, overlay: str
) -> None:
    """Words after the gap are not moved by one, the gap is no state of text A, and the
    last column is there.
    """
    panel = words.panel
    words.overlay(overlay)
    words.heading(TWO_TEXTS[overlay])
    for column, token in IN_COLUMN.items():
        click(words, column)
        if token is None:
            alert = panel.get_by_role("alert")
            alert.get_by_text("Text A has no token here").wait_for()
            continue
        panel.get_by_role("heading", name=token).wait_for()
        words.state()
        code = panel.locator("dd code").first.inner_text()
        assert f"[{A.split().index(token)}]" in code
        near = panel.locator(".words button").all_inner_texts()
        named = {said.split(", ␣")[-1].split(", ")[-1] for said in near}
        assert named <= set(A.split()), near
    # One of the nearest states is opened where it stands.
    site, word = near[0].split(", ")
    panel.locator(".words button").first.click()
    panel.get_by_role("heading", name=f"{site}, “{word}”").wait_for()


def test_the_chosen_state_stays_the_same_when_the_overlay_changes(
    words: Workbench,
) -> None:
    """Its column is another one where text B has a token that text A lacks; patching
    from text B takes the token in the same column.
    """
    words.panel.get_by_role("heading", name="late").wait_for()
    for overlay, said in (*TWO_TEXTS.items(), ("Norm", "The norm")):
        words.overlay(overlay)
        words.heading(said)
        words.panel.get_by_role("heading", name="late").wait_for()
        words.state()
        column = "5" if overlay == "Norm" else "6"
        assert f"0.pin=layer.1%7E{column}" in words.fragment.replace("~", "%7E")
        assert "late" in words.page.locator(".readout").first.inner_text()
    words.overlay("Difference to B")
    words.heading("The difference")
    words.act("Patch from text B", "Patched")
    # It is the sixth word of text A and the seventh of text B.
    assert "“␣late”, token 6 of text B" in words.panel.inner_text()
