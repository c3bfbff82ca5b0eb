"""The workbench as somebody looks at it in a browser."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Locator, Page

from tests.places import ROOT
from tests.workbench.serving import SECONDS

SCREENSHOTS = ROOT / "out" / "screenshots"


@dataclass
class Workbench:
    """A page of the workbench."""

    page: Page

    def settle(self) -> None:
        """Wait until what was asked for is painted."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() =>"
            " requestAnimationFrame(done)))"
        )

    def until(self, condition: str) -> None:
        """Wait for something to be so; playwright's own way of waiting is stopped by
        the page's policy.
        """
        for _ in range(int(20 * SECONDS)):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came to be: {condition}")

    def heading(self, words: str) -> None:
        """Wait until the grid's title has these words."""
        self.until(
            "() => (document.querySelector('.grid h2')?.textContent ??"
            f" '').includes({words!r})"
        )
        self.until("() => !document.querySelector('.stale')")
        self.settle()

    def overlay(self, label: str) -> None:
        self.page.get_by_role("radio", name=label, exact=True).check()

    def choose(self, x: float, y: float) -> None:
        self.page.locator(".grid canvas.front").click(position={"x": x, "y": y})

    @property
    def panel(self) -> Locator:
        return self.page.locator("aside.state")

    @property
    def fragment(self) -> str:
        return str(self.page.evaluate("location.hash"))

    def keep(self, name: str) -> None:
        """Keep a screenshot for people."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


def fragment(**values: Any) -> str:
    return "#" + "&".join(
        f"{name}={quote(str(value))}" for name, value in values.items()
    )


Opener = Callable[..., Workbench]
