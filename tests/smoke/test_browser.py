"""A page of each kind in a real browser: nothing is asked of a network, nothing goes
wrong, the grid is drawn, and a cell can be chosen. The fixtures check the first two.
"""

import pytest

from tests.pages.looking import Opener as PageOpener
from tests.pages.scenes import norms
from tests.workbench.pages import Opener, fragment


@pytest.mark.smoke
def test_the_workbench_shows_a_lens(look: Opener, tiny_name: str) -> None:
    shown = look(fragment(model=tiny_name, a="The rest is here", overlay="lens"))
    shown.heading("What each layer of tiny")
    shown.choose(200, 40)
    shown.state()
    assert "0.pin=" in shown.fragment


@pytest.mark.smoke
def test_a_saved_page_shows_a_result(show: PageOpener) -> None:
    shown = show([norms()])
    assert shown.pixel(200, 200)[3] == 255
    shown.point(200, 200)
    read = shown.readout()
    assert "norm" in read
    shown.press("ArrowRight", "Enter")
    assert shown.readout() != read and "0.pin=" in shown.fragment
