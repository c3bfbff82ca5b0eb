"""A page as somebody looks at it, and works it with mouse and keys."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from playwright.sync_api import BrowserContext, Download, Locator, Page

from tests.places import ROOT

# What hangs out at the right of a page of this width, unless it lies in something that
# scrolls or hides it.
WIDER = """(width) => [...document.querySelectorAll('body *')].filter((one) => {
  const box = one.getBoundingClientRect();
  for (let up = one.parentElement; up; up = up.parentElement) {
    if (up !== document.body && getComputedStyle(up).overflowX !== 'visible') return false;
  }
  return box.width && box.height && (box.right > width + 0.5 || box.left < -0.5);
}).map((one) => `${one.tagName} ${one.className} ${(one.textContent ?? '').slice(0, 60)}`)"""

# Texts whose contrast with what is behind them is below 4.5 to 1, as WCAG computes it.
CONTRAST = """() => {
  const colour = (text) => {
    const context = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const linear = (part) => (part <= 10.31 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (one) => {
    const own = colour(getComputedStyle(one).backgroundColor);
    return own[3] === 1 ? own : over(own, one.parentElement ? behind(one.parentElement) : colour('Canvas'));
  };
  const opacity = (one) => (one ? Number(getComputedStyle(one).opacity) * opacity(one.parentElement) : 1);
  const wrong = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const one = node.parentElement;
    if (!node.textContent.trim() || !one.getClientRects().length || one.matches('script, noscript')) continue;
    const paper = behind(one), [r, g, b, a] = colour(getComputedStyle(one).color);
    const [low, high] = [light(over([r, g, b, a * opacity(one)], paper)), light(paper)].sort((x, y) => x - y);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) wrong.push(`${ratio.toFixed(2)} ${one.tagName}.${one.className} ${node.textContent.slice(0, 40)}`);
  }
  return wrong;
}"""

PAINTED = (
    "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
)
PATIENCE = 300_000  # milliseconds: a busy machine paints a page in minutes
SCREENSHOTS = ROOT / "out" / "screenshots"


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
        self.page.evaluate(PAINTED)

    def point(self, x: float, y: float, place: int = 0) -> None:
        """Move the mouse to a place on the view's canvas."""
        box = self.canvas(place).bounding_box()
        assert box
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        self.settle()

    def canvas(self, place: int = 0) -> Locator:
        return self.view(place).locator("canvas.front")

    def pixel(
        self, x: float, y: float, place: int = 0, layer: str = "front"
    ) -> tuple[int, ...]:
        script = (
            "(c, [x, y]) => [...c.getContext('2d').getImageData(x * devicePixelRatio, y"
            " * devicePixelRatio, 1, 1).data]"
        )
        return tuple(
            self.view(place).locator(f"canvas.{layer}").evaluate(script, [x, y])
        )

    def press(self, *keys: str, place: int = 0) -> None:
        self.view(place).locator(".stage").focus()
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def choose(self, label: str, place: int = 0) -> None:
        self.view(place).get_by_role("radio", name=label, exact=True).check()
        self.settle()

    def until(self, condition: str) -> None:
        """Wait for something to be so; playwright's own way of waiting is stopped by
        the page's policy.
        """
        for _ in range(PATIENCE // 50):
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

    def rows(self, place: int = 0) -> list[dict[str, str]]:
        """Return the numbers that a view hands out."""
        text = self.save("CSV", place).decode("utf-8-sig")
        return list(csv.DictReader(io.StringIO(text)))

    def svg(self, place: int = 0) -> ElementTree.Element:
        """Return the drawing that a view hands out."""
        return ElementTree.fromstring(self.save("SVG", place))

    def drawing(self, tag: str, place: int = 0) -> list[ElementTree.Element]:
        """Return the elements of this tag in the drawing."""
        return list(self.svg(place).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))

    def written(self, place: int = 0) -> list[str]:
        """Return every text of the drawing."""
        return [node.text or "" for node in self.drawing("text", place)]

    @property
    def is_wide(self) -> bool:
        """Tell whether anything hangs out at the side."""
        return bool(
            self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        )

    def keep(self, name: str) -> None:
        """Keep a screenshot for people."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    @property
    def fragment(self) -> str:
        return str(self.page.evaluate("location.hash"))


def opened(page: Page, path: Path, fragment: str = "") -> Shown:
    """Open a page from disk, and wait until it is painted."""
    page.goto(path.as_uri() + fragment)
    page.wait_for_selector("html[data-ready=true]", state="attached")
    shown = Shown(page, path)
    shown.settle()
    return shown


Contexts = Callable[..., BrowserContext]
Opener = Callable[..., Shown]
