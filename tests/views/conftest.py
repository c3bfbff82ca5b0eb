"""A real browser that opens pages from disk, without a network; asking for anything but
the page fails the test.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage

from hiddenscope.views import View
from hiddenscope.views.page import document
from tests.views.looking import PATIENCE, Opener, Shown


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open views as a page on disk. Afterwards: nothing was asked of any network, and
    nothing went wrong.
    """
    wrong: list[str] = []
    contexts = []

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
        context = chromium.new_context(viewport=size, offline=True, **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("request", lambda request: _check(request.url, path, wrong))
        page.on("websocket", lambda socket: wrong.append(f"a socket to {socket.url}"))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if _complains(message) else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
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
    for context in contexts:
        context.close()
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
