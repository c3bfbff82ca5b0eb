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
# Column by column: the token of text A, and of text B.
ALIGNED = (
    ("Paul", "Paul"),
    (" said", " said"),
    (" that", " that"),
    (" Mary", " Peter"),
    (" was", " was"),
    (None, " quite"),
    (" late", " late"),
    (" because", " because"),
    (" she", " he"),
)


@pytest.fixture
def here(bench: Bench) -> dict[str, str]:
    """What an address has for the model whose tokens are words."""
    return {
        "model": bench.folder("models/words"),
        "a": A,
        "b": B,
        "answer": " she",
        "other": " he",
        "overlay": "norm",
    }


def click(shown: Workbench, column: int, row: int = 1) -> None:
    """Click a cell of the grid; rows are counted from the bottom."""
    label = shown.page.locator(".grid .window").get_attribute("aria-label") or ""
    sites = int(label.split(" sites")[0].split()[-1])
    box = shown.page.locator(".grid canvas.front").bounding_box()
    assert box is not None
    left, right, below = 55, 12, 30
    wide = (box["width"] - left - right) / COLUMNS
    high = (box["height"] - below - 6) / sites
    shown.choose(
        left + (column + 0.5) * wide, box["height"] - below - (row + 0.5) * high
    )


def title(shown: Workbench) -> str:
    return shown.panel.locator("h2").inner_text()


@pytest.mark.parametrize("overlay", TWO_TEXTS)
def test_a_click_opens_the_state_of_text_a_in_its_column(
    look: Opener, here: dict[str, str], overlay: str
) -> None:
    """Words after the gap are not moved by one, the gap is no state of text A, and the
    last column is there.
    """
    shown = look(fragment(**here))
    shown.heading("The norm")
    shown.overlay(overlay)
    shown.heading(TWO_TEXTS[overlay])
    for column in (6, 8, 5, 3):
        click(shown, column)
        token = ALIGNED[column][0]
        if token is None:
            shown.panel.get_by_role("alert").get_by_text(
                "Text A has no token here"
            ).wait_for()
            continue
        shown.panel.get_by_role("heading", name=token.strip()).wait_for()
        shown.panel.get_by_text("Nearest states").wait_for()
        assert (
            f"[{A.split().index(token.strip())}]"
            in shown.panel.locator("dd code").first.inner_text()
        )
        near = shown.panel.locator(".words button").all_inner_texts()
        words = {words.split(", ␣")[-1].split(", ")[-1] for words in near}
        assert words <= set(A.split()), near


@pytest.mark.parametrize("overlay", TWO_TEXTS)
def test_a_state_among_the_nearest_is_opened_where_it_stands(
    look: Opener, here: dict[str, str], overlay: str
) -> None:
    shown = look(fragment(**here))
    shown.heading("The norm")
    shown.overlay(overlay)
    shown.heading(TWO_TEXTS[overlay])
    click(shown, 6)
    shown.panel.get_by_role("heading", name="late").wait_for()
    near = shown.panel.locator(".words button")
    near.first.wait_for()
    site, word = near.first.inner_text().split(", ")
    near.first.click()
    shown.panel.get_by_role("heading", name=f"{site}, “{word}”").wait_for()


def test_the_chosen_state_stays_the_same_when_the_overlay_changes(
    look: Opener, here: dict[str, str]
) -> None:
    """Its column is another one where text B has a token that text A lacks."""
    shown = look(fragment(**here | {"0.pin": "layer.1~5"}))
    shown.heading("The norm")
    shown.panel.get_by_role("heading", name="late").wait_for()
    for overlay, words in (*TWO_TEXTS.items(), ("Norm", "The norm")):
        shown.overlay(overlay)
        shown.heading(words)
        shown.panel.get_by_role("heading", name="late").wait_for()
        shown.panel.get_by_text("Nearest states").wait_for()
        column = "5" if overlay == "Norm" else "6"
        assert f"0.pin=layer.1%7E{column}" in shown.fragment.replace("~", "%7E")
        assert "late" in shown.page.locator(".readout").first.inner_text()


def test_patching_from_text_b_takes_the_token_in_the_same_column(
    look: Opener, here: dict[str, str]
) -> None:
    """“late” is the sixth word of text A and the seventh of text B."""
    shown = look(fragment(**here | {"overlay": "difference"}))
    shown.heading("The difference")
    click(shown, 6)
    shown.panel.get_by_role("button", name="Patch from text B", exact=True).click()
    shown.panel.get_by_role("heading", name="Patched").wait_for()
    assert "“␣late”, token 6 of text B" in shown.panel.inner_text()
