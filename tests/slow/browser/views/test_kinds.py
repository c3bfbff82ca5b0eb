"""The page of every kind of result: one sentence, then the picture; it fits a
telephone, in the light and the dark, asks for nothing, and complains of nothing.
"""

from pathlib import Path

import pytest

from hiddenscope.catalog import ANALYSES
from hiddenscope.results import findings_of
from tests.pages.fixtures import listen
from tests.pages.looking import CONTRAST, PAINTED, WIDER, Contexts, Shown, opened
from tests.registry import RUNS, result_of

TELEPHONE = {"width": 390, "height": 844}
SCREEN = {"width": 1400, "height": 900}
# A picture is at first in sight: how far down it may begin, in pixels, on a screen and
# on a telephone.
LOWEST, LOWEST_ON_A_TELEPHONE = 540, 600
FIRST_PICTURE = """() => {
  const seen = [...document.querySelectorAll('canvas.front, .listing')].filter((one) => one.getClientRects().length);
  return Math.min(...seen.map((one) => one.getBoundingClientRect().top + scrollY));
}"""


def check_the_claim_and_the_picture(shown: Shown, lead: str, lowest: float) -> None:
    """Check that a page begins with one finding, and that a picture follows soon."""
    claim = shown.page.locator(".claim").first
    assert claim.inner_text() == lead.replace("`", ""), "one finding, and nothing else"
    box = claim.bounding_box()
    assert box
    top = shown.page.evaluate(FIRST_PICTURE)
    assert box["y"] + box["height"] <= top <= lowest, top


@pytest.mark.parametrize("word", [*RUNS, "project-1", "drift-1"])
def test_a_page_can_be_read_on_a_screen_and_on_a_telephone(
    word: str, contexts: Contexts, tmp_path: Path
) -> None:
    word, _, place = word.partition("-")
    result, path = result_of(word, int(place or 0)), tmp_path / "page.html"
    result.save(path)
    lead = next(iter(findings_of(result)))
    wrong: list[str] = []
    screen = contexts(viewport=SCREEN).new_page()
    listen(screen, path, wrong)
    check_the_claim_and_the_picture(opened(screen, path), lead, LOWEST)
    screen.close()
    still = {"reduced_motion": "reduce"}  # so that no colour is on its way to another
    telephone = contexts(
        viewport=TELEPHONE, offline=True, has_touch=True, is_mobile=True, **still
    ).new_page()
    listen(telephone, path, wrong)
    shown = opened(telephone, path)
    check_the_claim_and_the_picture(shown, lead, LOWEST_ON_A_TELEPHONE)
    assert telephone.evaluate(WIDER, TELEPHONE["width"]) == []
    assert not shown.is_wide
    for view in telephone.locator("section.grid, section.lines").all():
        before, canvas = (
            view.locator(".readout").inner_text(),
            view.locator("canvas.front"),
        )
        box = canvas.bounding_box()
        assert box
        # Below a single row there is more for labels than for the row.
        share = 0.4 if box["height"] > 100 else 0.25
        canvas.tap(position={"x": 0.7 * box["width"], "y": share * box["height"]})
        telephone.evaluate(PAINTED)
        assert view.locator(".readout").inner_text() != before, "a finger reads out"
    for scheme in ("light", "dark"):
        telephone.emulate_media(color_scheme=scheme)
        telephone.evaluate(PAINTED)
        assert telephone.evaluate(CONTRAST) == [], scheme
    telephone.close()
    for page in (screen, telephone):
        page.context.unroute_all()
    assert wrong == []


def test_every_kind_is_looked_at() -> None:
    assert set(RUNS) == {analysis.word for analysis in ANALYSES if analysis.result}
