"""How an analysis turns its arrays into a labelled xarray.Dataset.

An analysis lists its variables as `(dims, values, attributes)`, or with the long name
alone for attributes, and its coordinates as `(dim, values)`, or as the plain labels of
a dimension. Tokens always carry the same coordinates: `text`, `position`, `id`,
`string`, and `stack` where there are two stacks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results.export import text_array as text_array
from hiddenscope.results.report import Extremes, SiteValue
from hiddenscope.sites import Site
from hiddenscope.states.arrays import AnyArray

if TYPE_CHECKING:
    import xarray

    from hiddenscope.states import Tokens

Dims: TypeAlias = str | tuple[str, ...]


class Attributes(TypedDict, total=False):
    """How a variable is named and drawn.

    `meaning` chooses the colour map and `scale` the axis; views read both.
    """

    long_name: str
    units: str
    meaning: Literal["diverging"]
    scale: Literal["log"]


Variable: TypeAlias = tuple[Dims, AnyArray, Attributes | str]
Coordinate: TypeAlias = Sequence[str] | AnyArray | tuple[str, AnyArray]
Variables: TypeAlias = dict[str, Variable]
Coordinates: TypeAlias = dict[str, Coordinate]


def to_dataset(
    variables: Mapping[str, Variable],
    coords: Mapping[str, Coordinate],
    attrs: Mapping[str, object] | None = None,
) -> "xarray.Dataset":
    """Assemble a Dataset.

    >>> norms: Variables = {"norm": ("site", np.array([1.0, 2.5]), {"units": "L2"})}
    >>> data = to_dataset(norms, {"site": site_names([Site(0), Site(1)])})
    >>> data["norm"].sel(site="layer.1").item()
    2.5
    """
    # xarray takes long to import, and the command line imports this module.
    import xarray

    # Without `fastpath`, xarray looks at every string, which takes longer than running
    # a short text on a GPU.
    data = {}
    for name, (dims, values, attributes) in variables.items():
        if isinstance(attributes, str):
            attributes = {"long_name": attributes}
        data[name] = xarray.Variable(dims, values, attributes, fastpath=True)
    labels: dict[str, Any] = {}
    for name, coordinate in coords.items():
        if isinstance(coordinate, tuple):
            dim, values = coordinate
            labels[name] = xarray.Variable(dim, values, fastpath=True)
        else:
            labels[name] = coordinate
    return xarray.Dataset(data, labels, attrs)


def site_names(sites: Iterable[Site]) -> list[str]:
    """Return sites as the labels of a dimension."""
    return [str(site) for site in sites]


def extremes(
    sites: Sequence[Site], values: AnyArray, *, median: bool = False
) -> Extremes | None:
    """Return where a number along the sites is lowest and highest; None without any.

    >>> extremes([Site(0), Site(1)], np.array([2.0, np.nan])).highest
    SiteValue(site='layer.0', value=2.0)
    """
    if not np.isfinite(values).any():
        return None
    lowest, highest = (
        SiteValue(site=str(sites[place]), value=float(values[place]))
        for place in (int(np.nanargmin(values)), int(np.nanargmax(values)))
    )
    middle = float(np.nanmedian(values)) if median else None
    return Extremes(lowest=lowest, highest=highest, median=middle)


def token_coords(
    tokens: Sequence["Tokens"], stacks: Sequence[str] = ()
) -> dict[str, tuple[str, AnyArray]]:
    """Label the dimension `token`: the tokens of every stack, one stack after another.

    `stacks` are the names of the stacks, where tokens must be told apart by them.
    """
    strings: list[str] = []
    for of_stack in tokens:
        strings += of_stack.strings
    columns = {
        "text": np.concatenate([of_stack.text for of_stack in tokens]),
        "position": np.concatenate([of_stack.positions for of_stack in tokens]),
        "id": np.concatenate([of_stack.ids for of_stack in tokens]),
        "string": text_array(strings),
    }
    if stacks:
        counts = map(len, tokens)
        columns["stack"] = stack_column(dict(zip(stacks, counts, strict=True)))
    return {name: ("token", column) for name, column in columns.items()}


def column_coords(
    tokens: Iterable[tuple[int, int, str] | None],
    *,
    dim: str = "token",
    prefix: str = "",
) -> dict[str, tuple[str, AnyArray]]:
    """Label columns of tokens that are not the rows of one `Tokens`.

    Each token is a position, an id and a string. Columns may pair the tokens of two
    texts: None is a gap, where this text has no token. `prefix` names the text.

    >>> gap = column_coords([(0, 7, "a"), None], prefix="other_")
    >>> gap["other_id"][1].tolist(), gap["other_string"][1].tolist()
    ([7, -1], ['a', ''])
    """
    columns = [token or (-1, -1, "") for token in tokens]
    return {
        f"{prefix}position": (dim, np.array([column[0] for column in columns])),
        f"{prefix}id": (dim, np.array([column[1] for column in columns])),
        f"{prefix}string": (dim, text_array([column[2] for column in columns])),
    }


def stack_column(counts: Mapping[str, int]) -> NDArray[np.object_]:
    """Name the stack of every token, given how many tokens each stack has."""
    return np.repeat(text_array(list(counts)), list(counts.values()))


def block_diagonal(blocks: Sequence[AnyArray]) -> NDArray[np.float32]:
    """Join the arrays `[row, column]` of several stacks corner to corner.

    The cells between them are NaN: a site of one stack has no state at a token of the
    other.

    >>> block_diagonal([np.ones((1, 1)), np.ones((1, 2))]).tolist()
    [[1.0, nan, nan], [nan, 1.0, 1.0]]
    """
    rows = sum(block.shape[0] for block in blocks)
    columns = sum(block.shape[1] for block in blocks)
    whole = np.full((rows, columns), np.nan, dtype=np.float32)
    row = column = 0
    for block in blocks:
        height, width = block.shape
        whole[row : row + height, column : column + width] = block
        row += height
        column += width
    return whole
