"""A real browser that opens pages from disk, without a network; asking for anything but
the page fails the test.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage

from hiddenscope.views import View
from hiddenscope.views.page import document
from tests.pages.looking import PATIENCE, Contexts, Opener, Shown


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
    """Open views as a page on disk. Afterwards: nothing was asked of any network, and
    nothing went wrong.
    """
    wrong: list[str] = []
    pages = []

    def opened(
        views: Sequence[View],
        *,
        fragment: str = "",
        prose: Sequence[str] = (),
        **options: Any,
    ) -> Shown:
        path = tmp_path / "page.html"
        path.write_text(document(views, options.pop("title", "Views"), prose), "utf-8")
        size = {
            "width": options.pop("width", 1100),
            "height": options.pop("height", 900),
        }
        context = contexts(viewport=size, offline=True, **options)
        page = context.new_page()
        pages.append(page)
        page.on("request", lambda request: _check(request.url, path, wrong))
        page.on("websocket", lambda socket: wrong.append(f"a socket to {socket.url}"))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if _complains(message) else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        # Of the context, so that it also holds for what the page opens.
        context.route(
            "**/*",
            lambda route: (
                route.continue_() if _own(route.request.url, path) else route.abort()
            ),
        )
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        shown = Shown(page, path)
        shown.settle()
        return shown

    yield opened
    for page in pages:
        page.context.unroute_all()
        page.close()
    assert wrong == []


def _complains(message: ConsoleMessage) -> bool:
    # That was the test itself, looking at pixels.
    reading = message.text.startswith("Canvas2D: Multiple readback")
    return message.type in ("error", "warning") and not reading


def _own(url: str, path: Path) -> bool:
    return url.split("#")[0] == path.as_uri() or url.startswith(("data:", "blob:"))


def _check(url: str, path: Path, wrong: list[str]) -> None:
    if not _own(url, path):
        wrong.append(f"a request for {url[:200]}")
