"""How large pages are and how fast they paint. Times are printed, for machines differ;
sizes are law.
"""

import statistics

import numpy as np

from hiddenscope.views import Panels
from tests.pages.looking import Opener, Shown
from tests.pages.scenes import long, panels, visibility

CELLS = tuple(f" token{k}" for k in range(32))


def times(shown: Shown, act: str) -> list[float]:
    """What each repaint took, in milliseconds, while the page does something."""
    return shown.page.evaluate(f"""async () => {{
          const taken = [];
          const root = document.querySelector('section[data-view]');
          root.addEventListener('painted', (event) => taken.push(event.detail));
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          {act}
          await frame(); await frame();
          return taken;
        }}""")


HOVER = """
  const canvas = root.querySelector('canvas.front'), box = canvas.getBoundingClientRect();
  for (let i = 0; i < 150; i++) {
    const [x, y] = [box.left + 80 + (i * 37) % (box.width - 100), box.top + 10 + (i * 53) % (box.height - 120)];
    canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: x, clientY: y, bubbles: true }));
    await frame();
  }
"""


def test_a_hover_map_is_small_and_quick(show: Opener) -> None:
    shown = show([visibility(32, CELLS)])
    size = shown.path.stat().st_size
    taken = times(shown, HOVER)
    median, high = statistics.median(taken), float(np.quantile(taken, 0.95))
    print(
        f"\n[32,32,32,32] map: {size / 1e6:.2f} MB, hover repaint {median:.2f} ms (95%:"
        f" {high:.2f} ms, n={len(taken)})"
    )
    assert len(taken) > 120
    assert size < 1.3e6


def test_512_tokens_and_40_layers_scroll_smoothly(show: Opener) -> None:
    shown = show([long()])
    scroll = "const box = root.querySelector('.scroller');"
    scroll += (
        "for (let i = 0; i < 120; i++) { box.scrollLeft = 70 * i; await frame(); }"
    )
    taken = times(shown, scroll)
    hover = times(shown, HOVER)
    print(
        f"\n512 x 40 grid: scroll {statistics.median(taken):.2f} ms a frame, hover"
        f" {statistics.median(hover):.2f} ms"
    )


def test_33_panels_of_10000_points(show: Opener) -> None:
    few = panels(33, 10_000)
    given = Panels(few.title, few.sites, few.points, few.labels, captions=few.captions)
    shown = show([given])
    start = shown.page.evaluate(
        "performance.now() - performance.getEntriesByType('navigation')[0].responseEnd"
    )
    taken = times(
        shown,
        "document.querySelector('.key').click(); await frame();"
        " document.querySelector('.key').click();",
    )
    size = shown.path.stat().st_size
    print(
        f"\n33 x 10,000 points: drawn in {max(taken):.0f} ms, {start:.0f} ms after"
        f" loading, {size / 1e6:.1f} MB"
    )
    shown.keep("panels-33x10000-light")
