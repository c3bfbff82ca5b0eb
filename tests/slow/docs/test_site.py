"""The site builds without a warning, asks nothing of another host, and can be searched."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest

import hiddenscope as hs
from docs.site.pages import PICTURE, page_name
from docs.site.signatures import signature_of
from docs.site.structure import name_groups, sections, type_names
from hiddenscope.catalog import ANALYSES
from tests.places import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# A link that a reader may follow goes anywhere; these are fetched with the page.
FETCHED = {(tag, "src") for tag in ("script", "img", "iframe", "source", "video")}
FETCHED |= {("link", "href"), ("object", "data")}
IN_CSS = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])(https?:)?//""")
PATIENCE = 120_000
# A page of each kind, with tables, code, pictures and signatures.
LOOKED_AT = ("index", "start", "questions", "visibility", "bench", "api/load")
LOOKED_AT += ("guides/own-model",)


class Document(HTMLParser):
    """The addresses and the anchors of an HTML file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value)
            elif (tag, name) in FETCHED:
                self.fetched.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


class SilentHandler(SimpleHTTPRequestHandler):
    """Serve files, as `python -m http.server` does, and write nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does, but for the colours of source files."""
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    pytest.importorskip("myst_parser", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "docs.site", str(folder), "--plain-sources"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[Path, Document]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        # What a theme uses to make pages is not one itself.
        if "_static" not in path.parts:
            found[path] = Document(path)
    return found


def test_every_link_leads_somewhere_and_nothing_is_fetched_from_another_host(
    site: Path, documents: dict[Path, Document]
) -> None:
    wrong = []
    for path, document in documents.items():
        for address in {*document.links, *document.fetched}:
            is_foreign = address in document.fetched and urlsplit(address).netloc
            if is_foreign or not _leads_somewhere(address, path, documents):
                wrong.append(f"{path.relative_to(site)}: {address}")
    for path in site.rglob("*.css"):
        if IN_CSS.search(path.read_text("utf-8")):
            wrong.append(str(path.relative_to(site)))
    assert wrong == []


def _leads_somewhere(address: str, path: Path, documents: dict[Path, Document]) -> bool:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    target = path
    if parts.path:
        target = (path.parent / unquote(parts.path)).resolve()
    if not target.is_file():
        return False
    if not parts.fragment or target not in documents:
        return True
    return unquote(parts.fragment) in documents[target].anchors


def test_every_public_name_is_in_the_reference(
    documents: dict[Path, Document], site: Path
) -> None:
    for group in name_groups():
        anchors = documents[site / "api" / f"{group.word}.html"].anchors
        for name in group.names:
            assert name == "errors" or f"hiddenscope.{name}" in anchors


def test_llms_txt_lists_every_page(site: Path) -> None:
    index = (site / "llms.txt").read_text("utf-8")
    links = re.findall(r"^- \[.+\]\((.+)\): .+$", index, re.MULTILINE)
    missing = [link for link in links if not (site / link).is_file()]
    assert missing == []
    full = (site / "llms-full.txt").read_text("utf-8")
    for link in links:
        assert f"<!-- {link} -->" in full
    for analysis in ANALYSES:
        assert f"): {analysis.question}" in index


@pytest.fixture
def page(chromium: "Browser") -> Iterator["Page"]:
    """Open a page without a network; errors in its scripts fail the test."""
    wrong: list[str] = []
    context = chromium.new_context(
        viewport={"width": 1280, "height": 800}, offline=True
    )
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("requestfailed", lambda request: wrong.append(request.url))
    yield opened
    context.close()
    assert wrong == []


def test_a_search_finds_a_page_from_disk(site: Path, page: "Page") -> None:
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("Control+k")
    page.get_by_role("searchbox").first.fill("jacobian")
    page.keyboard.press("Enter")
    page.wait_for_selector('#search-results a[href*="visibility.html"]')
    for words, address in [
        ("calibration", "calibration.html"),
        ("hiddenscope.lens", "api/explain.html"),
        ("nearest", "search-texts.html"),
    ]:
        page.goto((site / "search.html").as_uri() + f"?q={words}")
        page.wait_for_selector(f'#search-results a[href*="{address}"]')
    page.goto((site / "search.html").as_uri() + "?q=xylophonequark")
    page.get_by_text("did not match any documents").wait_for()
    assert page.locator("#search-results ul.search a").count() == 0


def test_a_search_shows_summaries_where_a_server_answers(
    site: Path, page: "Page"
) -> None:
    handler = partial(SilentHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.context.set_offline(False)
        page.goto(f"http://127.0.0.1:{server.server_port}/search.html?q=jacobian")
        found = page.locator("#search-results li", has_text="Visibility").first
        found.locator("p.context").wait_for()
        # The scripts go on reading pages for a while, and must not be cut off.
        page.wait_for_load_state("networkidle")
        server.shutdown()


def test_a_saved_result_is_live_in_its_page(site: Path, page: "Page") -> None:
    page.goto((site / "visibility.html").as_uri())
    frame = page.locator("figure.live iframe").first
    frame.scroll_into_view_if_needed()
    inside = frame.content_frame
    inside.locator("html[data-ready=true]").wait_for(state="attached")
    stage = inside.locator('section[data-view="0"]')
    before = stage.locator(".readout").inner_text()
    stage.locator("canvas.front").hover(position={"x": 200, "y": 100})
    stage.locator(".readout").filter(has_not_text=before).wait_for()
    # The view follows the button of the site, whatever the system has.
    for mode in ("dark", "light"):
        page.locator(".theme-switch-button:visible").click()
        page.locator(f'.theme-change-button[data-mode="{mode}"]:visible').click()
        inside.locator(f'html[data-theme="{mode}"]').wait_for(state="attached")
    # A formula is drawn by the browser: a fraction is higher than a line of text.
    box = page.locator(".formula math[display=block] mfrac").first.bounding_box()
    assert box
    assert box["height"] > 25


def test_no_page_is_wider_than_the_screen(site: Path, page: "Page") -> None:
    for name in LOOKED_AT:
        page.goto((site / f"{name}.html").as_uri())
        for width in (390, 1280, 1920):
            page.set_viewport_size({"width": width, "height": 800})
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, name


def test_a_name_in_a_table_is_not_broken_within_a_word(
    site: Path, page: "Page"
) -> None:
    # A name with a mark may go on in the next line there; the others have one box.
    boxes = """(selector) => {
        const broken = [];
        for (const name of document.querySelectorAll(selector))
            if (name.getClientRects().length > 1) broken.push(name.textContent);
        return broken;
    }"""
    unmarked = "code span.pre:not(:has(wbr))"
    for name in ("coming-from", "reference", "store", "errors"):
        page.goto((site / f"{name}.html").as_uri())
        page.set_viewport_size({"width": 1280, "height": 800})
        assert page.locator("td code span.pre").count() >= 10
        assert page.evaluate(boxes, f"td {unmarked}") == []
        # On a phone the last of two columns is narrower than some names.
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate(boxes, f"td:first-child {unmarked}") == []
        wide = f"table:has(th:nth-child(3)) td {unmarked}"
        assert page.evaluate(boxes, wide) == []


def test_a_wide_table_scrolls_in_its_own_box_on_a_phone(
    site: Path, page: "Page"
) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto((site / "coming-from.html").as_uri())
    table = page.locator("table:has(th:nth-child(5))").first
    box = table.evaluate(
        "table => [table.scrollWidth, table.parentElement.clientWidth]"
    )
    assert box[0] > box[1]
    assert box[1] < 390
    # No column of prose is squeezed to a word in each line.
    prose = table.locator("td", has_text="what enters the first block").bounding_box()
    assert prose
    assert prose["width"] > 120


def test_the_gallery_shows_the_pictures_of_its_pages(
    site: Path, documents: dict[Path, Document]
) -> None:
    for word in ("questions", "experiments"):
        (section,) = [entry for entry in sections() if entry.word == word]
        document = documents[site / f"{word}.html"]
        for entry in section.pages:
            name = page_name(entry.path)
            assert f"{name}.html" in document.links
            picture = PICTURE.search(entry.path.read_text("utf-8"))
            if picture:
                _, _, shown = picture["target"].partition("pictures/")
                small = f"_images/small-{shown.replace('/', '-')}"
                assert small in document.fetched


def test_signatures_name_types_and_the_names_are_explained(
    site: Path, documents: dict[Path, Document]
) -> None:
    anchors = documents[site / "api" / "types.html"].anchors
    for entry in type_names():
        assert f"hiddenscope.{entry.name}" in anchors
    signature = signature_of(hs.lens)
    assert signature.startswith(
        "(model: ModelLike, texts: Texts | Inputs | Direction, *, k: int"
    )
    assert signature_of(hs.Model.capture).endswith(
        "keep: Literal['host', 'device'] = 'host') -> States | Pair"
    )
    # They are links to their explanations.
    links = documents[site / "api" / "explain.html"].links
    assert "types.html#hiddenscope.ModelLike" in links
    assert "types.html#hiddenscope.SitePatterns" in links
