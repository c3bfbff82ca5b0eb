"""The page of every kind of result: one sentence, then the picture; it fits a
telephone, in the light and the dark.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES
from hiddenscope.results import FINDINGS
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.page import inline
from tests.every import RUNS, result_of
from tests.pages.looking import CONTRAST, WIDER, Contexts

PAINTED = (
    "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
)
TELEPHONE = {"width": 390, "height": 844}
MAIN = [pytest.param(word, 0, id=word) for word in RUNS]
MAIN += [
    pytest.param("project", 1, id="project-two"),
    pytest.param("drift", 1, id="drift-found"),
]

# A picture is at first in sight: how far down it may begin, in pixels, on a screen and
# on a telephone.
SCREEN = {"width": 1400, "height": 900}
LOWEST, LOWEST_ON_A_TELEPHONE = 540, 600
FIRST_PICTURE = """() => {
  const seen = [...document.querySelectorAll('canvas.front, .listing')].filter((one) => one.getClientRects().length);
  return Math.min(...seen.map((one) => one.getBoundingClientRect().top + scrollY));
}"""


@pytest.fixture
def screen(contexts: Contexts) -> Iterator[Page]:
    page = contexts(viewport=SCREEN).new_page()
    yield page
    page.close()


@pytest.fixture
def telephone(contexts: Contexts) -> Iterator[Page]:
    still = {"reduced_motion": "reduce"}  # so that no colour is on its way to another
    context = contexts(
        viewport=TELEPHONE, offline=True, has_touch=True, is_mobile=True, **still
    )
    page = context.new_page()
    yield page
    page.close()


def open_page(page: Page, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.evaluate(PAINTED)


def check_the_claim_and_the_picture(
    page: Page, result: hs.Result, lowest: float
) -> None:
    """Check that a page begins with one finding, and that a picture follows soon."""
    lead = next(iter(FINDINGS[result.kind](result)))
    claim = page.locator(".claim").first
    assert claim.inner_text() == lead.replace("`", ""), "one finding, and nothing else"
    box = claim.bounding_box()
    assert box
    top = page.evaluate(FIRST_PICTURE)
    assert box["y"] + box["height"] <= top <= lowest, top


@pytest.mark.parametrize(("word", "place"), MAIN)
def test_one_sentence_and_then_the_picture(
    word: str, place: int, screen: Page, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    result = result_of(word, place)
    result.save(path)
    open_page(screen, path)
    check_the_claim_and_the_picture(screen, result, LOWEST)


def test_every_kind_is_looked_at() -> None:
    assert set(RUNS) == {analysis.word for analysis in ANALYSES if analysis.result}


@pytest.mark.parametrize(("word", "place"), MAIN)
def test_a_page_fits_a_telephone_and_can_be_read(
    word: str, place: int, telephone: Page, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    result = result_of(word, place)
    result.save(path)
    told = path.read_text("utf-8")
    assert all(section.reading for section in sections_of(result)), (
        "every section says what its numbers are"
    )
    assert not any("Point at" in view.note for view in views_of(result)), (
        "a note is printed too"
    )
    first = inline(next(iter(FINDINGS[result.kind](result))))
    assert told.index(first) < told.index("<section data-view"), (
        "what was found is read before the picture"
    )
    open_page(telephone, path)
    check_the_claim_and_the_picture(telephone, result, LOWEST_ON_A_TELEPHONE)
    assert telephone.evaluate(WIDER, TELEPHONE["width"]) == []
    assert (
        telephone.evaluate("document.scrollingElement.scrollWidth")
        <= TELEPHONE["width"]
    )
    headings = telephone.locator("h2").all_inner_texts()
    assert "Facts" not in headings and not any(
        "{'" in text for text in telephone.locator(".prose").all_inner_texts()
    )
    for view in telephone.locator("section.grid, section.lines").all():
        before, canvas = (
            view.locator(".readout").inner_text(),
            view.locator("canvas.front"),
        )
        box = canvas.bounding_box()
        assert box
        canvas.tap(position={"x": 0.7 * box["width"], "y": 0.4 * box["height"]})
        telephone.evaluate(PAINTED)
        assert view.locator(".readout").inner_text() != before, "a finger reads out"
    for scheme in ("light", "dark"):
        telephone.emulate_media(color_scheme=scheme)
        telephone.evaluate(PAINTED)
        assert telephone.evaluate(CONTRAST) == [], scheme
