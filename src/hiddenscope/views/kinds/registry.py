"""Kinds of results: `kinds/<word>.py` describes the findings of one analysis, once.

This module imports it by its word and finds these functions of a result by their
names. Only `views` is required:

views      the views of a result, the main one first
findings   what a person should read, as plain sentences
sections   the parts of a page: the findings and views that belong together
tables     what a terminal prints beneath the findings

A terminal prints the findings and the tables, a notebook and a page show the findings
with the views and how to read them, and so does the app; none of them adds sentences of
its own. The sentences are made of the facts, which `analyses/<word>/facts.py` lists.

A result of any other kind is shown by the dimensions of its data.

>>> import xarray
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["a", "b"]})
>>> views_of(Result("sizes", norms, {}, {"model": "toy"}))[0].series[0].name
'norm'
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module

from hiddenscope.catalog import ANALYSES
from hiddenscope.errors import StatesError
from hiddenscope.results import Result, Table
from hiddenscope.views.drawing import (
    CELLS,
    grid_of,
    has_dims,
    is_map,
    lines_of,
    numeric,
)
from hiddenscope.views.values import Section, View


@dataclass(frozen=True)
class Kind:
    """How results of one kind are shown and described."""

    views: Callable[[Result], Iterable[View]]
    findings: Callable[[Result], Iterable[str]] | None = None
    sections: Callable[[Result], Iterable[Section]] | None = None
    tables: Callable[[Result], Iterable[Table]] | None = None

    @classmethod
    def of(cls, word: str) -> "Kind":
        """Read the functions of `kinds/<word>.py`."""
        module = import_module(f"hiddenscope.views.kinds.{word}")
        names = ("findings", "sections", "tables")
        return cls(module.views, *(getattr(module, name, None) for name in names))


# Every analysis with a result has a kind, and so has `embed`, whose function returns
# vectors and whose result the app makes.
KINDS = {
    analysis.word: Kind.of(analysis.word)
    for analysis in ANALYSES
    if analysis.result or analysis.in_app
}


def views_of(result: Result) -> tuple[View, ...]:
    """Return the views of a result, the main one first.

    Where its kind is not in `KINDS`, the dimensions decide. A variable over site and
    token is a measure of the grid; one that also has source_site and source_token shows
    which states influence a state; one over site alone is a line. Names and looks are
    in the variable's attributes: `long_name`, `units`, `meaning` ("diverging" where
    zero is the middle) and `scale` ("log").
    """
    draw = KINDS[result.kind].views if result.kind in KINDS else _by_dimensions
    views = tuple(draw(result))
    if not views:
        dimensions = [
            f"{name} has {', '.join(map(str, variable.dims))}"
            for name, variable in result.data.items()
        ]
        raise StatesError(
            f"Cannot draw the {result.title}",
            "; ".join(dimensions) or "it has no data",
            "Draw its data with matplotlib, or save it as .csv, .json or .nc.",
        )
    return views


def sections_of(result: Result) -> list[Section]:
    """Return the sections of a result; without any, one that has all views."""
    sections = KINDS[result.kind].sections if result.kind in KINDS else None
    if sections is None:
        return [Section(result.title.capitalize(), "", views_of(result))]
    first, *others = sections(result)
    return [replace(first, docs=result.kind), *others]


def _by_dimensions(result: Result) -> Iterator[View]:
    cells = []
    # Series share a pair of axes if they run along the same dimension in one unit.
    series: dict[tuple[str, str, str], list[Hashable]] = {}
    for name, variable in result.data.items():
        if has_dims(variable, CELLS) or is_map(result, variable):
            cells.append(name)
        elif len(variable.dims) == 1 and numeric(variable):
            along = str(variable.dims[0])
            unit = str(variable.attrs.get("units", ""))
            scale = str(variable.attrs.get("scale", "linear"))
            if along != "token":
                series.setdefault((along, unit, scale), []).append(name)
    grid = grid_of(result, cells)
    if grid is not None:
        yield grid
    for axes in sorted(series):
        yield lines_of(result, axes[0], series[axes])
