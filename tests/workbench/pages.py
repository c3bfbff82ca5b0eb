"""The workbench as somebody looks at it in a browser."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tests.workbench.serving import SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@dataclass
class Workbench:
    """A page of the workbench."""

    page: "Page"

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

    def idle(self) -> None:
        """Wait until nothing on the page is of an earlier question."""
        self.until("() => !document.querySelector('.stale')")
        self.settle()

    def heading(self, words: str) -> None:
        """Wait until the grid's title has these words."""
        self.until(
            "() => (document.querySelector('.grid h2')?.textContent ??"
            f" '').includes({words!r})"
        )
        self.idle()

    def tokens(self, count: int) -> None:
        """Wait until the grid has so many columns."""
        self.until(
            "() => document.querySelector('.grid .window')"
            f"?.getAttribute('aria-label')?.includes('{count} tokens')"
        )

    def overlay(self, label: str) -> None:
        self.page.get_by_role("radio", name=label, exact=True).check()

    def choose(self, x: float, y: float) -> None:
        self.page.locator(".grid canvas.front").click(position={"x": x, "y": y})

    def press(self, *keys: str) -> None:
        """Press keys on the grid."""
        self.page.locator(".grid .stage").first.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def open(self, tab: str) -> None:
        self.page.get_by_role("link", name=tab, exact=True).click()

    def run(self) -> None:
        self.page.get_by_role("button", name="Run", exact=True).click()

    def model(self, name: str) -> None:
        """Choose another model."""
        field = self.page.get_by_role("combobox", name="Model", exact=True)
        field.fill(name)
        field.press("Tab")

    def act(self, button: str, said: str) -> None:
        """Change the chosen state, and wait until the panel says so."""
        self.panel.get_by_role("button", name=button, exact=True).click()
        self.panel.get_by_role("heading", name=said).wait_for()

    def state(self) -> None:
        """Wait until the panel has all of the chosen state."""
        self.panel.get_by_text("Nearest states").wait_for()

    def code(self, name: str) -> str:
        """Return the code that a result offers."""
        self.page.get_by_role("button", name="Save ▾").first.click()
        self.page.get_by_role("button", name=name).click()
        text = self.page.locator("dialog pre").inner_text()
        self.page.keyboard.press("Escape")
        return text

    @property
    def panel(self) -> "Locator":
        return self.page.locator("aside.state")

    @property
    def fragment(self) -> str:
        return str(self.page.evaluate("location.hash"))


def fragment(**values: Any) -> str:
    return "#" + "&".join(
        f"{name}={quote(str(value))}" for name, value in values.items()
    )


Opener = Callable[..., Workbench]
