"""Figures of results: some of the views are selected and drawn with matplotlib.

`Result.views`, `Result.figure` and `Result.save` call it.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.errors import StatesError
from hiddenscope.results import Look, Result, views_of
from hiddenscope.results.drawing import long_name
from hiddenscope.results.pictures import Grid, Patterns, View
from hiddenscope.views.figures.pages import FigureFormat, figure, image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS: dict[str, float | None] = {"": None, "column": 3.3, "page": 6.9}  # inches


def figure_of(result: Result, look: Look) -> "Figure":
    """Draw the selected views as a figure."""
    return figure(_selected_views(result, look), _inches(look))


def figure_bytes(result: Result, suffix: FigureFormat, look: Look) -> bytes:
    """Draw the selected views as a file of this format."""
    return image(_selected_views(result, look), suffix, width=_inches(look))


def named_views(result: Result) -> dict[str, View]:
    """Return the views of a result by name: what a view is (grid, panels, lines), with
    a number from the second on.
    """
    views: dict[str, View] = {}
    for view in views_of(result):
        kind = type(view).__name__.lower()
        count = sum(type(other) is type(view) for other in views.values())
        views[f"{kind}-{count + 1}" if count else kind] = view
    return views


def _selected_views(result: Result, look: Look) -> list[View]:
    views = named_views(result)
    # Without a name it is the main view, which comes first.
    if look.view == "all":
        selected = list(views.values())
    elif not look.view:
        selected = [next(iter(views.values()))]
    elif look.view in views:
        selected = [views[look.view]]
    else:
        raise StatesError(
            f"No view {look.view!r} of a {result.kind}",
            f"there are {', '.join(views)}",
            'Choose one of these, or "all".',
        )
    if not look.measure:
        return selected
    measure = look.measure
    if all(isinstance(view, Patterns) for view in selected):
        return [_with_head(view, measure) for view in selected]
    # A measure may be named as the data names it, or as the grid does.
    variable = result.data.get(measure)
    if variable is not None:
        measure = long_name(variable)
    return [_with_measure(view, measure) for view in selected]


def _with_measure(view: View, name: str) -> View:
    """Return a grid whose first measure is the named one, with a title that says so."""
    measures = view.measures if isinstance(view, Grid) else ()
    places = {_plain(measure.name): place for place, measure in enumerate(measures)}
    place = places.get(_plain(name))
    if not isinstance(view, Grid) or place is None:
        names = ", ".join(measure.name for measure in measures)
        raise StatesError(
            f"No measure {name!r} in {view.title!r}",
            f"there are {names}" if measures else "it is not a grid",
            "Choose one of a grid's measures.",
        )
    first = measures[place]
    title = f"{view.title}: {first.name}" if place else view.title
    others = (*measures[:place], *measures[place + 1 :])
    return replace(view, title=first.title or title, measures=(first, *others))


def _with_head(view: View, words: str) -> View:
    """Return heads of which the named one is large, value-weighted where that is asked
    for: "layer.3.attn.head.5", "weighted", or both.
    """
    assert isinstance(view, Patterns)
    names = {}
    for row, head in np.argwhere(view.exists):
        names[view.name_of(int(row), int(head))] = (int(row), int(head))
    large, weighted = view.large, view.weighted
    for word in words.split():
        if word in ("pattern", "weighted"):
            weighted = word == "weighted"
        elif word in names:
            large = names[word]
        else:
            first, *_, last = [*names, *names]
            raise StatesError(
                f"No head {word!r} in {view.title!r}",
                f"there are {first} to {last}",
                'Name one of these, "weighted", or both.',
            )
    return replace(view, large=large, weighted=weighted)


def _plain(name: str) -> str:
    return name.lower().replace("_", " ")


def _inches(look: Look) -> float | None:
    if look.width not in WIDTHS:
        choices = " or ".join(repr(name) for name in WIDTHS if name)
        raise StatesError(
            "Cannot draw a figure of this width",
            f"got {look.width!r}",
            f"Give {choices}, or leave it out.",
        )
    return WIDTHS[look.width]
