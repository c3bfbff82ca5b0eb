"""A real browser that opens pages from disk, without a network; asking for anything but
the page fails the test.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from hiddenscope.results.pictures import View
from hiddenscope.views.page import document
from tests.pages.looking import PATIENCE, Contexts, Opener, Shown, opened


@pytest.fixture(scope="session")
def contexts(chromium: Browser) -> Iterator[Contexts]:
    """Contexts of the browser by their options, each made once.

    A context costs more than a page. Pages on disk store nothing, so that nothing goes
    from one test to the next.
    """
    made: dict[str, BrowserContext] = {}

    def context(**options: Any) -> BrowserContext:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = chromium.new_context(**options)
            made[key].set_default_timeout(PATIENCE)
        return made[key]

    yield context
    for each in made.values():
        each.close()


@pytest.fixture
def show(contexts: Contexts, tmp_path: Path) -> Iterator[Opener]:
    """Open views, or the text of a page, as a page on disk. Afterwards: nothing was
    asked of any network, and nothing went wrong.
    """
    wrong: list[str] = []
    pages: list[Page] = []

    def at(
        views: Sequence[View] | str,
        *,
        fragment: str = "",
        prose: Sequence[str] = (),
        title: str = "Views",
        before: str = "",
        **options: Any,
    ) -> Shown:
        path = tmp_path / "page.html"
        text = views if isinstance(views, str) else document(views, title, prose)
        path.write_text(text, "utf-8")
        width, height = options.pop("width", 1100), options.pop("height", 900)
        size = {"width": width, "height": height}
        context = contexts(viewport=size, offline=True, **options)
        page = context.new_page()
        pages.append(page)
        listen(page, path, wrong)
        if before:
            page.add_init_script(before)
        return opened(page, path, fragment)

    yield at
    for page in pages:
        page.context.unroute_all()
        page.close()
    assert wrong == []


def listen(page: Page, path: Path, wrong: list[str]) -> None:
    """Keep everything that a page does and should not."""

    def is_own(url: str) -> bool:
        return url.split("#")[0] == path.as_uri() or url.startswith(("data:", "blob:"))

    def on_request(url: str) -> None:
        if not is_own(url):
            wrong.append(f"a request for {url[:200]}")

    def on_message(kind: str, text: str) -> None:
        # That was the test itself, looking at pixels.
        reading = text.startswith("Canvas2D: Multiple readback")
        if kind in ("error", "warning") and not reading:
            wrong.append(text)

    page.on("request", lambda request: on_request(request.url))
    page.on("websocket", lambda socket: wrong.append(f"a socket to {socket.url}"))
    page.on("console", lambda message: on_message(message.type, message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    # Of the context, so that it also holds for what the page opens.
    page.context.route(
        "**/*",
        lambda route: route.continue_() if is_own(route.request.url) else route.abort(),
    )
