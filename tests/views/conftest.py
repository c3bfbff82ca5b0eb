"""A real browser that opens pages from disk, without a network; asking for anything but the page fails the test."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Download, Locator, Page, sync_playwright

from hiddenscope.views import View
from hiddenscope.views.page import document

SCREENSHOTS = Path(__file__).parents[2] / "out" / "screenshots"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("HIDDENSCOPE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        missing = "there is no Chromium to draw the views in: `make browser` installs it, as root and with apt"
        if os.environ.get("HIDDENSCOPE_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Shown:
    """A page as somebody looks at it."""

    page: Page
    path: Path

    def view(self, place: int = 0) -> Locator:
        return self.page.locator(f'section[data-view="{place}"]')

    def readout(self, place: int = 0) -> str:
        return self.view(place).locator(".readout").inner_text()

    def settle(self) -> None:
        """Wait until what was asked for is painted."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def point(self, x: float, y: float, place: int = 0) -> None:
        """Move the mouse to a place on the view's canvas."""
        box = self.canvas(place).bounding_box()
        assert box
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        self.settle()

    def canvas(self, place: int = 0) -> Locator:
        return self.view(place).locator("canvas.front")

    def pixel(self, x: float, y: float, place: int = 0, layer: str = "front") -> tuple[int, ...]:
        script = (
            "(c, [x, y]) => [...c.getContext('2d').getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data]"
        )
        return tuple(self.view(place).locator(f"canvas.{layer}").evaluate(script, [x, y]))

    def press(self, *keys: str, place: int = 0) -> None:
        self.view(place).locator(".stage").focus()
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def choose(self, label: str, place: int = 0) -> None:
        self.view(place).get_by_role("radio", name=label, exact=True).check()
        self.settle()

    def until(self, condition: str) -> None:
        """Wait for something to be so; playwright's own way of waiting is stopped by the page's policy."""
        for _ in range(100):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came to be: {condition}")

    def save(self, name: str, place: int = 0) -> bytes:
        """Press one of the buttons and take the file that it hands out."""
        with self.page.expect_download() as waiting:
            self.view(place).get_by_role("button", name=name, exact=True).click()
        download: Download = waiting.value
        assert download.suggested_filename.endswith(f".{name.lower()}")
        return Path(download.path()).read_bytes()

    def keep(self, name: str) -> None:
        """Keep a screenshot for people."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    @property
    def fragment(self) -> str:
        return str(self.page.evaluate("location.hash"))


Opener = Callable[..., Shown]


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open views as a page on disk. Afterwards: nothing was asked of any network, and nothing went wrong."""
    wrong: list[str] = []
    contexts = []

    def opened(views: Sequence[View], *, fragment: str = "", prose: Sequence[str] = (), **options: Any) -> Shown:
        path = tmp_path / "page.html"
        path.write_text(document(views, options.pop("title", "Views"), prose), "utf-8")
        size = {"width": options.pop("width", 1100), "height": options.pop("height", 900)}
        context = chromium.new_context(viewport=size, offline=True, **options)
        contexts.append(context)
        context.set_default_timeout(8000)
        page = context.new_page()
        page.on("request", lambda request: _check(request.url, path, wrong))
        page.on("websocket", lambda socket: wrong.append(f"a socket to {socket.url}"))
        page.on("console", lambda message: wrong.append(message.text) if _complains(message) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        context.route("**/*", lambda route: route.continue_() if _own(route.request.url, path) else route.abort())
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
    reading = message.text.startswith("Canvas2D: Multiple readback")  # that was the test itself, looking at pixels
    return message.type in ("error", "warning") and not reading


def _own(url: str, path: Path) -> bool:
    return url.split("#")[0] == path.as_uri() or url.startswith(("data:", "blob:"))


def _check(url: str, path: Path, wrong: list[str]) -> None:
    if not _own(url, path):
        wrong.append(f"a request for {url[:200]}")
