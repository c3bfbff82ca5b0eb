"""Which views show a result: chosen by its kind, and for any other kind by the dimensions of its data.

>>> import xarray
>>> from hiddenscope.results import Result
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["layer.0", "layer.1"]})
>>> pictures(Result("sizes", norms, {}, {"model": "toy"}))[0].series[0].name
'norm'
"""

from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from hiddenscope.errors import StatesError
from hiddenscope.results import Result
from hiddenscope.views.drawing import CELLS, grid_of, has, is_map, lines_of, numeric
from hiddenscope.views.kinds import KINDS
from hiddenscope.views.values import View

if TYPE_CHECKING:
    import xarray


def pictures(result: Result) -> tuple[View, ...]:
    """The views of a result, the one to look at first in front.

    A variable over site and token is a measure of the grid, one that also has source_site and source_token shows what
    a cell sees, one over site alone is a line. Their names and looks are in the variable's attributes: `long_name`,
    `units`, `meaning` ("diverging" where zero is the middle) and `scale` ("log").
    """
    found = tuple((KINDS[result.kind].pictures if result.kind in KINDS else _by_dimensions)(result))
    if not found:
        found_dims = "; ".join(f"{name} has {', '.join(map(str, v.dims))}" for name, v in result.data.items())
        remedy = "Draw its data with matplotlib, or save it as .csv, .json or .nc."
        raise StatesError(f"A picture of the {result.title}", found_dims or "it has no data", remedy)
    return found


def _by_dimensions(result: Result) -> Iterator[View]:
    grid = grid_of(result, [name for name, v in result.data.items() if has(v, CELLS) or is_map(result, v)])
    if grid is not None:
        yield grid
    flat = [(name, v) for name, v in result.data.items() if len(v.dims) == 1 and v.dims != ("token",) and numeric(v)]
    for (along, _, _), some in groupby(sorted(flat, key=_axis), key=_axis):
        yield lines_of(result, str(along), [name for name, _ in some])


def _axis(named: "tuple[Hashable, xarray.DataArray]") -> tuple[str, str, str]:
    """What two series must share to stand on one pair of axes."""
    _, variable = named
    return str(variable.dims[0]), str(variable.attrs.get("units", "")), str(variable.attrs.get("scale", "linear"))
