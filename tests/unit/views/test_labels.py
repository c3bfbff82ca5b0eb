"""Labels of figures: every one is whole and on the paper, for every kind of result, at
every width.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from hiddenscope.results.pictures import Grid, Lines, Measure, Panels, Series, View
from hiddenscope.results.result import Width
from hiddenscope.views.figures.pages import figure
from tests.unit.views.recorded import KINDS, names, recorded

WIDTHS: dict[Width, float | None] = {"": None, "column": 3.3, "page": 6.9}
LONG = (
    "relative error (L2 over the reference), the greatest of all tokens of all texts"
    " that were given"
)
WORDS = " ".join(f"word{k}" for k in range(30))
ENDS = ("layer.0", "final")
VALUES = [[0.0, 1.0], [2.0, 3.0]]
BANDED = Series(LONG, [1.0, 2.0], [0.0, 1.0], [2.0, 3.0], WORDS)
UNIT = "relative units"
VIEWS: list[View] = [
    Grid("T", ENDS, ("a", "b"), (Measure(LONG, VALUES, unit=UNIT),)),
    Lines("T", ENDS, (BANDED, Series("b", [1.0, 1.0]))),
    Lines(LONG, ENDS, (Series(LONG, [1.0, 2.0]),), y_name=LONG, unit=UNIT),
    Panels(
        "T",
        ("decoder.layer.10.cross",),
        np.zeros((1, 2, 2)),
        [LONG, "b"],
        captions=(LONG,),
        messages=(WORDS,),
        rows=(LONG,),
    ),
]


def labels(drawn: Figure) -> Iterator[Text]:
    """Every text but tokens and the words in cells, which are cut where they are longer
    than their place.
    """
    left_out = {
        id(label)
        for axes in drawn.axes
        if _is_grid(axes)
        for label in [*_across(axes), *axes.texts]
    }
    for axes in drawn.axes:
        # Ticks beyond the ends of an axis are not drawn, nor any where it is off.
        for axis in (axes.xaxis, axes.yaxis):
            shown = {id(tick) for tick in axis._update_ticks()}  # type: ignore[attr-defined]
            if not axes.axison:
                shown = set()
            left_out |= {
                id(tick.label1)
                for tick in axis.get_major_ticks()
                if id(tick) not in shown
            }
    return (
        text
        for text in drawn.findobj(Text)
        if text.get_text().strip() and id(text) not in left_out
    )  # type: ignore[attr-defined]


def _is_grid(axes: object) -> bool:
    return (
        any(type(part).__name__ == "QuadMesh" for part in axes.collections)
        and len(axes.get_yticks()) > 0
    )  # type: ignore[attr-defined]


def _across(axes: object) -> Iterator[Text]:
    for part in (axes, *axes.child_axes):  # type: ignore[attr-defined]
        yield from part.get_xticklabels()


def check(drawn: Figure, inches: float | None) -> None:
    drawn.draw_without_rendering()  # type: ignore[no-untyped-call]
    wide, high = drawn.get_size_inches() * drawn.dpi
    if inches is not None:
        assert drawn.get_size_inches()[0] == pytest.approx(inches, abs=0.02)
    for text in labels(drawn):
        box = text.get_window_extent()
        assert "\u2026" not in text.get_text(), text
        assert (
            box.x0 >= -1 and box.y0 >= -1 and box.x1 <= wide + 1 and box.y1 <= high + 1
        ), (text, box, wide, high)
        assert text.get_fontsize() >= 8


@pytest.mark.parametrize("word", KINDS)
def test_no_label_of_any_analysis_is_cut(word: str) -> None:
    result = recorded(f"{word}-0")
    for view in [*result.views][:3]:
        check(result.figure(view, width="column"), WIDTHS["column"])


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_no_label_is_cut_at_any_width(name: str) -> None:
    result = recorded(name)
    for view, (width, inches) in product(result.views, WIDTHS.items()):
        check(result.figure(view, width=width), inches)


@pytest.mark.parametrize("inches", WIDTHS.values())
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_long_names_are_written_in_lines(view: View, inches: float | None) -> None:
    drawn = figure([view], inches)
    check(drawn, inches)
    written = " ".join(
        text.get_text().replace("\n", " ") for text in drawn.findobj(Text)
    )  # type: ignore[attr-defined]
    assert "the greatest of all tokens of all texts that were given" in written
