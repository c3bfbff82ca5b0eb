"""The guided page, as somebody opens it: from disk, with no network, every view alive."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from playwright.sync_api import Browser, Page

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from tests.pages.looking import PATIENCE, Contexts
from tests.places import ROOT


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_story_is_alive_offline(
    scheme: str, chromium: Browser, tmp_path: Path
) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    norms = hs.profile(model, "The cat sat on the mat.")
    path = tmp_path / "story.html"
    hs.story(
        [hs.anatomy(model), norms],
        path,
        title="A story",
        opening="Once.",
        closing="# Go on",
    )
    page = chromium.new_page(
        viewport={"width": 1000, "height": 900}, offline=True, color_scheme=scheme
    )
    page.set_default_timeout(PATIENCE)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda message: wrong.append(message.text) if message.type == "error" else None,
    )
    page.on(
        "request",
        lambda request: (
            wrong.append(request.url) if request.url != path.as_uri() else None
        ),
    )
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert page.locator(".part > .claim h2").all_inner_texts() == [
        "How do we know which state is which?",
        "How large is every state?",
    ]
    grid = page.locator('section[data-view="1"]')
    grid.locator(".stage").focus()
    page.keyboard.press("ArrowRight")
    readout = grid.locator(".readout").inner_text()
    assert "layer.0" in readout
    assert f"{norms.data['norm'].values[0, 0]:.3g}"[:3] in readout
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing hangs out at the side"
    )
    page.close()
    assert [one for one in wrong if not one.startswith("data:")] == []


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("gpt2"), tiny_tokenizer()))


@pytest.fixture(scope="module")
def written(model: hs.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A story of four parts, with folds."""
    text, other = "The cat sat on the mat.", "The cat sat on the hat."
    path = tmp_path_factory.mktemp("story") / "story.html"
    results = [
        hs.lens(model, text),
        hs.compare(model, text, other),
        hs.profile(model, text),
        hs.anatomy(model),
    ]
    hs.story(results, path, title="A story", opening="Once.", closing="# Go on")
    return path


@pytest.fixture
def opened(contexts: Contexts, written: Path) -> Iterator[Callable[..., Page]]:
    pages = []

    def at(width: int, fragment: str = "") -> Page:
        context = contexts(viewport={"width": width, "height": 900}, offline=True)
        page = context.new_page()
        pages.append(page)
        page.goto(written.as_uri() + fragment)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield at
    for page in pages:
        page.close()


def box(page: Page, selector: str) -> dict[str, float]:
    found = page.locator(selector).first.bounding_box()
    assert found, selector
    return {
        **found,
        "right": found["x"] + found["width"],
        "bottom": found["y"] + found["height"],
    }


def settled(page: Page) -> None:
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() =>"
        " requestAnimationFrame(done)))"
    )


def test_contents_stand_on_the_left_where_there_is_room_and_above_elsewhere(
    opened: Callable[..., Page],
) -> None:
    wide, narrow = opened(1200), opened(1100)
    assert box(wide, ".contents")["right"] <= box(wide, "main")["x"] + 1
    assert box(narrow, ".contents")["bottom"] <= box(narrow, "main")["y"] + 1
    titles = wide.locator(".part > .claim h2").all_inner_texts()
    assert len(titles) == 4 and wide.locator(".contents a").all_inner_texts() == titles


def test_a_large_screen_is_used(opened: Callable[..., Page]) -> None:
    page = opened(1920)
    words, picture = box(page, ".part > .guide"), box(page, ".pictures section")
    assert words["right"] <= picture["x"] and abs(words["y"] - picture["y"]) < 120, (
        "words stand beside the picture"
    )
    assert picture["right"] > 1800 and picture["width"] > 1000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "lowest"), [(1400, 540), (390, 600)])
def test_every_part_is_one_sentence_and_then_a_picture(
    opened: Callable[..., Page], width: int, lowest: int
) -> None:
    page = opened(width)
    settled(page)
    for part in page.locator(".part").all():
        top = (part.bounding_box() or {"y": 0})["y"]
        lead = part.locator(".claim > p")
        assert lead.count() == 1
        sentence, picture = (
            lead.bounding_box(),
            part.locator("canvas.front").first.bounding_box(),
        )
        assert sentence and picture
        assert sentence["y"] + sentence["height"] <= picture["y"] <= top + lowest
    first = page.locator("canvas.front").first.bounding_box()
    assert first and first["y"] <= lowest, (
        "the contents and the opening leave room for the first picture"
    )


def test_a_link_of_the_contents_goes_to_its_part_and_leaves_what_is_pinned(
    opened: Callable[..., Page],
) -> None:
    page = opened(1300)
    page.locator('section[data-view="0"] canvas.front').click(
        position={"x": 200, "y": 40}
    )
    assert "pin" in page.evaluate("location.hash")
    page.locator(".contents a").nth(2).click()
    settled(page)
    assert abs(page.locator("#part-3").bounding_box()["y"]) < 60  # type: ignore[index]
    assert page.locator(".contents a[aria-current]").all_inner_texts() == [
        "How large is every state?"
    ]
    assert "pin" in page.evaluate("location.hash")
    assert "pinned" in page.locator('section[data-view="0"] .readout').inner_text()


def test_a_link_to_a_part_opens_there(opened: Callable[..., Page]) -> None:
    page = opened(1300, "#part-3")
    settled(page)
    assert abs(page.locator("#part-3").bounding_box()["y"]) < 60  # type: ignore[index]


def test_what_is_folded_is_drawn_when_it_is_opened(opened: Callable[..., Page]) -> None:
    page = opened(1300)
    folded = page.locator("details.fold").first
    canvas = folded.locator("canvas").first
    assert not canvas.is_visible()
    folded.locator("> summary").click()
    canvas.wait_for(state="visible")
    settled(page)
    assert (canvas.bounding_box() or {"width": 0})["width"] > 600
    painted = (
        "c => c.getContext('2d').getImageData(0, 0, c.width,"
        " c.height).data.some((value) => value > 0)"
    )
    assert canvas.evaluate(painted)


def test_an_address_that_names_something_in_a_fold_opens_the_fold(
    opened: Callable[..., Page],
) -> None:
    place = (
        opened(1300)
        .locator("details.fold section[data-view]")
        .first.get_attribute("data-view")
    )
    for fragment in (f"#{place}.scale=linear", f"#at={place}~0"):
        page = opened(1300, fragment)
        settled(page)
        assert page.locator(
            f'section[data-view="{place}"] canvas'
        ).first.is_visible(), fragment


def test_terms_are_explained_once_where_they_first_occur(written: Path) -> None:
    html = written.read_text("utf-8").partition("<main>")[2].partition("<noscript>")[0]
    terms = re.findall("<dt>(.*?)</dt>", html)
    assert {"logit", "unembedding", "KL", "entropy", "kurtosis"} <= set(terms) and len(
        set(terms)
    ) == len(terms)
    parts = re.split('(?=<article class="part")', html)
    for term in ("unembedding", "KL", "kurtosis"):
        first = next(part for part in parts if re.search(rf"\b{term}\b", part))
        assert f"<dt>{term}</dt>" in first


def test_every_section_says_how_its_numbers_are_defined(model: hs.Model) -> None:
    text, other = "The cat sat on the mat.", "The cat sat on the hat."
    results = [
        hs.lens(model, text),
        hs.compare(model, text, other),
        hs.profile(model, text),
        hs.anatomy(model),
    ]
    results += [
        hs.visibility(model, text),
        hs.patch(model, hs.Contrast(text, other, 7, 9)),
    ]
    for found in results:
        sections = sections_of(found)
        assert all(section.reading for section in sections), found.kind
        assert sections[0].prose and not sections[0].folded
        shown = [view.title for section in sections for view in section.views]
        assert sorted(shown) == sorted(view.title for view in views_of(found)), (
            "every view, once"
        )


def test_the_docs_are_a_link_where_they_lie_beside_the_page(
    model: hs.Model, tmp_path: Path
) -> None:
    root = ROOT
    found = hs.anatomy(model)
    with TemporaryDirectory(dir=root) as folder:
        hs.story([found], Path(folder) / "story.html")
        (link,) = re.findall(
            '<a href="(.*?)">', (Path(folder) / "story.html").read_text("utf-8")
        )
        assert (Path(folder) / link).resolve() == root / "docs" / "anatomy.md"
        assert (Path(folder) / link).is_file()
    hs.story([found], tmp_path / "story.html")
    told = (tmp_path / "story.html").read_text("utf-8")
    assert "<a href=" not in told and "<code>docs/anatomy.md</code>" in told
