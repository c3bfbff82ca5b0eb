"""Kinds of results: one module for each, which gives the views of a result, its
findings and the sections of a page.

`kinds/<word>.py` has these functions of a result, of which only the first must be
there:

views      the views of a result, the one to look at first in front
findings   what a person should read, as plain sentences: on a terminal, in a notebook and on a page
sections   the same as a story: parts of a page, each with a title, a few paragraphs and its views
tables     what a terminal prints beneath the findings

A result of any other kind is shown by the dimensions of its data.

>>> import xarray
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["layer.0", "layer.1"]})
>>> views_of(Result("sizes", norms, {}, {"model": "toy"}))[0].series[0].name
'norm'
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING

from hiddenscope.catalog import ANALYSES
from hiddenscope.errors import StatesError
from hiddenscope.results import Result, Table
from hiddenscope.views.drawing import CELLS, grid_of, has, is_map, lines_of, numeric
from hiddenscope.views.values import Section, View

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True)
class Kind:
    """How results of one kind are shown and described."""

    views: Callable[[Result], Iterable[View]]
    findings: Callable[[Result], Iterable[str]] | None = None
    sections: Callable[[Result], Iterable[Section]] | None = None
    tables: Callable[[Result], Iterable[Table]] | None = None


def _kind(word: str) -> Kind:
    module = import_module(f"hiddenscope.views.kinds.{word}")
    return Kind(
        module.views,
        *(getattr(module, name, None) for name in ("findings", "sections", "tables")),
    )


KINDS = {
    analysis.word: _kind(analysis.word) for analysis in ANALYSES if analysis.in_app
}


def views_of(result: Result) -> tuple[View, ...]:
    """The views of a result, the one to look at first in front.

    Where its kind is not in `KINDS`, the dimensions decide. A variable over site and
    token is a measure of the grid; one that also has source_site and source_token shows
    which states influence a state; one over site alone is a line. Names and looks are
    in the variable's attributes: `long_name`, `units`, `meaning` ("diverging" where
    zero is the middle) and `scale` ("log").
    """
    views = tuple(
        (KINDS[result.kind].views if result.kind in KINDS else _by_dimensions)(result)
    )
    if not views:
        dimensions = "; ".join(
            f"{name} has {', '.join(map(str, v.dims))}"
            for name, v in result.data.items()
        )
        remedy = "Draw its data with matplotlib, or save it as .csv, .json or .nc."
        raise StatesError(
            f"Cannot draw the {result.title}", dimensions or "it has no data", remedy
        )
    return views


def sections_of(result: Result) -> list[Section]:
    """The sections of a result; a kind that has none shows its views and no more."""
    sections = KINDS[result.kind].sections if result.kind in KINDS else None
    if sections is None:
        return [Section(result.title.capitalize(), "", views_of(result))]
    first, *others = sections(result)
    return [replace(first, docs=result.kind), *others]


def _by_dimensions(result: Result) -> Iterator[View]:
    grid = grid_of(
        result,
        [name for name, v in result.data.items() if has(v, CELLS) or is_map(result, v)],
    )
    if grid is not None:
        yield grid
    flat = [
        (name, v)
        for name, v in result.data.items()
        if len(v.dims) == 1 and v.dims != ("token",) and numeric(v)
    ]
    for (along, _, _), variables in groupby(sorted(flat, key=_axis), key=_axis):
        yield lines_of(result, str(along), [name for name, _ in variables])


def _axis(named: "tuple[Hashable, xarray.DataArray]") -> tuple[str, str, str]:
    """What two series must share to stand on one pair of axes."""
    _, variable = named
    return (
        str(variable.dims[0]),
        str(variable.attrs.get("units", "")),
        str(variable.attrs.get("scale", "linear")),
    )
