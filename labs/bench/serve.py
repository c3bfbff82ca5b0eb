"""Time the workbench from the last keystroke to the painted grid, in a browser."""

import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hiddenscope as hs
from labs.bench.measure import Row

ALLOWED = 0.3  # seconds, beside those of the pass itself
WORDS = (
    "The Thames flows slowly through the old city of London and under nine bridges of"
    " stone to the cold grey sea"
)
WARM = 3  # texts that are typed before the first that is measured
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]

# From one changed letter to the frame in which the grid of the new text is painted, in
# milliseconds.
TYPED = """(text) => new Promise((done) => {
  const area = document.querySelector('textarea');
  const shown = () => document.querySelector('.grid .window');
  const before = shown();
  const look = new MutationObserver(() => {
    if (!shown() || shown() === before || document.querySelector('.stale')) return;
    look.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
  });
  look.observe(document.body, { subtree: true, childList: true, attributes: true });
  area.value = text;
  const start = performance.now();
  area.dispatchEvent(new InputEvent('input', { bubbles: true }));
})"""


def rows(repeats: int) -> list[Row]:
    """Compare the time to the painted grid, less the pass, with what is allowed."""
    what = (
        "smollm2: keystroke to painted grid in Chromium, less the pass itself / 300 ms"
    )
    path = (
        os.environ.get("HIDDENSCOPE_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
        or shutil.which("chromium-headless-shell")
    )
    if not path:
        return [Row("serve", what, skipped="there is no Chromium")]
    model = hs.load("smollm2")
    rest, whole, passes = [], [], []
    with _served() as link, _page(path, link) as page:
        for text in texts(repeats + WARM):
            shown = page.evaluate(TYPED, text) / 1000
            start = time.perf_counter()
            model.capture(text)
            took = time.perf_counter() - start
            rest, whole, passes = (
                [*rest, shown - took],
                [*whole, shown],
                [*passes, took],
            )
    median = [1000 * statistics.median(times[WARM:]) for times in (whole, passes)]
    what += (
        f" (median of {len(rest) - WARM} texts: {median[0]:.0f} ms in all, of which the"
        f" pass takes {median[1]:.0f})"
    )
    return [
        Row(
            "serve",
            what,
            wall=statistics.median(rest[WARM:]) / ALLOWED,
            bar=1.0,
            judged="wall",
        )
    ]


def texts(count: int) -> Iterator[str]:
    """Yield texts of a few words, each unlike the one before."""
    words = WORDS.split()
    for number in range(count):
        yield " ".join(words[: 6 + number % (len(words) - 6)]) + " again" * (
            number // (len(words) - 6)
        )


@contextmanager
def _served() -> Iterator[str]:
    """Serve a workbench with an empty cache; yield the link to it."""
    from hiddenscope import app

    with tempfile.TemporaryDirectory(prefix="hiddenscope-") as folder:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = int(trial.getsockname()[1])
        settings = app.Settings(port=port, folder=Path(folder))
        server = app.server(settings)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        try:
            yield f"{settings.address}?token={settings.token}"
        finally:
            server.should_exit = True
            thread.join(20)


@contextmanager
def _page(path: str, link: str) -> Iterator[Any]:
    """Open the grid in a browser, with smollm2 loaded and a first grid painted."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(link)
        page.goto(f"{link.partition('?')[0]}#model=smollm2&overlay=norm&a=One+text")
        page.reload()
        while not page.evaluate(
            "() => document.documentElement.dataset.ready === 'true'"
        ):
            page.wait_for_timeout(50)
        yield page
        browser.close()
