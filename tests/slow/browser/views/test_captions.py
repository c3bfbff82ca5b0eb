"""What is said of a picture holds for what is drawn in a browser: rows of tokens, cells
left out, scales.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Locator

import hiddenscope as hs
from hiddenscope.results import views_of
from hiddenscope.results.pictures import Grid, Lines, Measure, Panels, Series
from tests.pages.looking import Opener, Shown
from tests.registry import RUNS, result_of

# Every text that is written on a canvas, with its height on the page.
RECORDER = """(() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const at = this.getTransform().transformPoint(new DOMPoint(x, y));
    window.written.push({ text, y: at.y / devicePixelRatio, where: this.canvas.className });
    return write.apply(this, arguments);
  };
})()"""


@pytest.mark.parametrize("depth", [4, 30], ids=["short", "tall"])
def test_a_row_of_tokens_has_its_name_at_its_side(depth: int, show: Opener) -> None:
    """Of two rows the first is the upper one, wherever they stand."""
    grid = Grid(
        "Patch",
        tuple(f"layer.{k}" for k in range(depth)),
        ("The", " cat", " sat"),
        (Measure("effect", np.ones((depth, 3))),),
        second=("The", " dog", " sat"),
        token_rows=("clean", "corrupted"),
    )
    page = show([grid], width=1400, before=RECORDER).page
    heights: dict[str, set[float]] = {}
    for one in page.evaluate("window.written"):
        # The tokens above a tall grid are on a canvas of their own, the others on that
        # of the grid.
        key = f"{one['where']} {one['text']}"
        heights.setdefault(key, set()).add(round(one["y"]))
    for name, token in (("clean", "␣cat"), ("corrupted", "␣dog")):
        for canvas in ("back", "tokens-above"):
            rows = heights.get(f"{canvas} {token}", set())
            assert heights.get(f"{canvas} {name}", set()) == rows
    canvas = "back" if depth == 4 else "tokens-above"
    assert min(heights[f"{canvas} clean"]) < min(heights[f"{canvas} corrupted"])


def saved(result: hs.Result, show: Opener, folder: Path) -> Shown:
    result.save(folder / "saved.html")
    return show((folder / "saved.html").read_text("utf-8"))


def table_of(view: Locator) -> tuple[list[str], list[list[str]]]:
    view.locator("summary").click()
    view.locator("tr").first.wait_for()
    head, *rows = [row.split("\t") for row in view.locator("tr").all_inner_texts()]
    return head, rows


def test_what_a_state_does_to_itself_is_left_out_and_not_called_zero(
    show: Opener, tmp_path: Path
) -> None:
    shown = saved(result_of("visibility", 0), show, tmp_path)
    view = shown.view()
    shown.canvas().click(position={"x": 400, "y": 40})
    key = view.locator("canvas.legend").get_attribute("aria-label") or ""
    assert "exactly 0" in key and "itself, left out" in key
    head, rows = table_of(view)
    pinned = re.search(
        r"pin=([^~]*)~(\d+)",
        shown.page.evaluate("decodeURIComponent(location.hash)"),
    )
    assert pinned
    on, of = (place for place, name in enumerate(head) if "pinned state" in name)
    itself = next(row for row in rows if tuple(row[:2]) == pinned.groups())
    assert itself[on] == itself[of] == "none"


def test_a_prediction_shows_the_influence_of_the_state_that_it_is_made_from(
    show: Opener, tmp_path: Path
) -> None:
    """The top row stands for the predictions, and is also the last layer: a cell of it
    has a number for itself.
    """
    shown = saved(result_of("visibility", 3), show, tmp_path)
    shown.press("ArrowRight", "End", "PageUp", "Enter")
    assert "is influenced most by" in shown.readout()
    head, rows = table_of(shown.view())
    named = [name for name in head if "influence on the pinned state" in name]
    last = max(int(row[1]) for row in rows)
    itself = next(row for row in rows if row[:2] == ["final", str(last)])
    assert float(itself[head.index(named[0])]) > 0


def spans_decades(values: np.ndarray) -> bool:
    numbers = np.asarray(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() <= 0:
        return False
    span = 100 if numbers.max() > 1 else 10_000  # what is at most 1 may be a share
    return bool(numbers.max() >= span * numbers.min())


def worth_a_log_scale(view: Grid | Lines) -> bool:
    if isinstance(view, Lines):
        values = np.concatenate([series.y for series in view.series])
        return view.scale == "log" or spans_decades(values)
    measure = view.measures[0]
    sequential = measure.meaning == "sequential"
    return measure.scale == "log" or (sequential and spans_decades(measure.numbers))


def test_a_log_scale_is_offered_where_it_shows_something(show: Opener) -> None:
    """Shares and accuracies have none."""
    x = ("layer.0", "layer.1")
    views = [
        Lines("Right answers", x, (Series("share", [0.002, 0.98]),), y_name="accuracy"),
        Lines("Norms", x, (Series("norm", [0.2, 98.0]),), y_name="norm"),
    ]
    for word in RUNS:
        for view in views_of(result_of(word, 0)):
            if isinstance(view, Grid | Lines) and not isinstance(view, Panels):
                views.append(view)
    shown = show(views)
    offered = []
    for place, view in enumerate(views):
        log = shown.view(place).get_by_role("radio", name="Log", exact=True)
        offered.append(log.count())
        assert offered[-1] == int(worth_a_log_scale(view)), view.title
    assert offered[:2] == [0, 1]


def test_a_grid_of_other_things_than_tokens_is_read_out_as_what_it_is(
    show: Opener,
) -> None:
    sites, texts = ("layer.0", "layer.1"), ("a dog", "a cat")
    measures = (Measure("linear CKA", [[1.0, 0.5], [0.5, 1.0]], limits=(0, 1)),)
    across = Grid("Pairs", sites, sites, measures, x_name="site")
    other = Grid("Texts", texts[::-1], texts, measures, x_name="text", y_name="text")
    shown = show([across, other])
    for place, (words, ranges) in enumerate(
        [("site layer.1", "Each layer"), ("text a cat", "Each row")]
    ):
        shown.press("ArrowRight", "ArrowRight", place=place)
        readout = shown.readout(place)
        assert words in readout and "token" not in readout
        ways = shown.view(place).get_by_role("radio", name=ranges, exact=True)
        assert ways.count() == 1
