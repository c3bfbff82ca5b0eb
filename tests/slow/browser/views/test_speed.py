"""How large pages are and how fast they paint. Times are printed, for machines differ;
sizes are law.
"""

import statistics

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
SCROLL = """
  const scroller = root.querySelector('.scroller');
  for (let i = 0; i < 120; i++) { scroller.scrollLeft = 70 * i; await frame(); }
"""
CHOOSE = """
  document.querySelector('.key').click();
  await frame();
  document.querySelector('.key').click();
"""


def test_large_pages_are_small_and_repaint_at_every_frame(show: Opener) -> None:
    for name, view, act, fewest, largest in (
        ("a map of 32 x 32 states", visibility(32, CELLS), HOVER, 120, 1.3e6),
        ("512 tokens x 40 layers", long(), SCROLL, 1, 1e6),
        ("33 panels x 10,000 points", panels(33, 10_000), CHOOSE, 2, 4e6),
    ):
        shown = show([view])
        taken, size = times(shown, act), shown.path.stat().st_size
        middle = statistics.median(taken)
        print(f"\n{name}: {size / 1e6:.2f} MB, {middle:.2f} ms of {len(taken)} paints")
        assert len(taken) >= fewest and size < largest
