"""From the labelled arrays of a result to grids and lines; every kind of result uses
this.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results.pictures import (
    Grid,
    Lines,
    Measure,
    Series,
    View,
    Words,
)
from hiddenscope.results.sentences import capitalised, of_model

if TYPE_CHECKING:
    import xarray

    from hiddenscope.results.result import Result

CELLS = ("site", "token")
MAP = (*CELLS, "source_site", "source_token")
RANKED = (*CELLS, "rank")
# A grid shows at most this many columns; the data has all tokens.
MOST_TOKENS = 4_096
# A title names at most this many variables.
MOST_NAMES = 3


def grid_of(
    result: "Result", names: Sequence[Hashable], title: str = ""
) -> Grid | None:
    """Draw the named variables over site and token as a grid, with the words of the
    result if it has any.
    """
    data = result.data.isel(token=slice(MOST_TOKENS), missing_dims="ignore")
    # The first strings over site, token and rank, with the first numbers over the same
    # as their probabilities.
    ranked = [v.transpose(*RANKED) for v in data.values() if set(v.dims) == set(RANKED)]
    strings = [variable.to_numpy() for variable in ranked if not numeric(variable)]
    numbers = [variable.to_numpy() for variable in ranked if numeric(variable)]
    words = None
    if strings:
        words = Words.of(strings[0], numbers[0] if numbers else None)
    measures = [measure_of(data[name]) for name in names]
    # Words alone need a colour too.
    if not measures and words is not None and words.probabilities is not None:
        measures = [Measure("probability", words.probabilities[:, :, 0], limits=(0, 1))]
    if not measures:
        return None
    tokens = labels(data, "token")
    if "string" in data.coords:
        tokens = tuple(data["string"].to_numpy().tolist())
    texts, text_of = shown_texts(data)
    note = ""
    total = result.data.sizes["token"]
    if len(tokens) < total:
        note = f"The first {len(tokens):,} of {total:,} tokens."
    return Grid(
        title or title_of(result, names),
        labels(data, "site"),
        tokens,
        tuple(measures),
        words=words,
        texts=texts,
        text_of=text_of if len(set(text_of)) > 1 else (),
        note=note,
    )


def measure_of(variable: "xarray.DataArray") -> Measure:
    """Return a variable over site and token as a measure of a grid; where it also has
    sources, it is the influence of every cell on every other.
    """
    name, unit = long_name(variable), str(variable.attrs.get("units", ""))
    meaning = variable.attrs.get("meaning", "sequential")
    scale = variable.attrs.get("scale", "linear")
    if len(variable.dims) == len(MAP):
        influence = variable.transpose(*MAP).to_numpy()
        return Measure(name, None, unit, meaning, scale, influence=influence)
    return Measure(name, variable.transpose(*CELLS).to_numpy(), unit, meaning, scale)


def shown_texts(data: "xarray.Dataset") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts that stand side by side, and the text that each token belongs
    to.
    """
    if "text" not in data.coords or data["text"].dims != ("token",):
        return (), ()
    numbers = data["text"].to_numpy().tolist()
    stacks = [""] * len(numbers)
    if "stack" in data.coords:
        stacks = data["stack"].to_numpy().tolist()
    columns = list(zip(stacks, numbers, strict=True))
    strings: list[str] = []
    places = {}
    for stack, number in columns:
        if (stack, number) in places:
            continue
        places[stack, number] = len(strings)
        # A decoder reads texts of its own, the targets, which count from 0 too.
        texts = data.attrs.get("targets" if stack == "decoder" else "texts", ())
        strings.append(texts[number] if number < len(texts) else f"text {number}")
    return tuple(strings), tuple(places[column] for column in columns)


def tokens_with_gaps(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    """Return the tokens of one of two aligned texts, None where it has a gap."""
    strings = data[f"{prefix}string"].to_numpy().tolist()
    positions = data[f"{prefix}position"].to_numpy().tolist()
    tokens = []
    for string, position in zip(strings, positions, strict=True):
        tokens.append(None if position < 0 else string)
    return tuple(tokens)


def pair_grid(
    data: "xarray.Dataset", names: Sequence[str], title: str, note: str
) -> Grid:
    """Draw shares of every pair of sites, such as CKA."""
    measures = []
    for name in names:
        share = data[name]
        measures.append(Measure(long_name(share), share.to_numpy(), limits=(0, 1)))
    return Grid(
        title,
        labels(data, "site"),
        labels(data, "source_site"),
        tuple(measures),
        note=note,
        x_name="site",
    )


def level(name: str, height: float, count: int) -> Series:
    """Return a dashed line at one height, over this many places."""
    return Series(name, np.full(count, height, dtype=np.float32), style="dash")


def by_stack(sites: Sequence[str]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield the name of each stack as a prefix, and which of the sites belong to it.

    >>> for prefix, here in by_stack(["encoder.layer.0", "decoder.layer.0"]):
    ...     print(prefix, here.tolist())
    encoder  [True, False]
    decoder  [False, True]
    """
    stacks = []
    for site in sites:
        stack = site.rpartition("layer.")[0] or site.rpartition("final")[0]
        stacks.append(stack)
    for stack in dict.fromkeys(stacks):
        yield stack.replace(".", " "), np.array([other == stack for other in stacks])


def title_of(result: "Result", names: Sequence[Hashable]) -> str:
    """Return a title that names the variables and the model."""
    words = [long_name(result.data[name]) for name in names[:MOST_NAMES]]
    title = capitalised(", ".join(words) or result.kind)
    if len(names) > MOST_NAMES:
        title += f" and {len(names) - MOST_NAMES} more"
    return f"{title}{of_model(result)}"


def long_name(variable: "xarray.DataArray") -> str:
    """Return the name of a variable as a reader knows it."""
    return str(variable.attrs.get("long_name", variable.name))


def labels(data: "xarray.Dataset", dim: str) -> tuple[str, ...]:
    """Return the labels along a dimension."""
    return tuple(map(str, data[dim].to_numpy().tolist()))


def numeric(variable: "xarray.DataArray") -> bool:
    """Tell whether a variable holds any numbers."""
    return variable.dtype.kind in "biuf" and variable.size > 0


def has_dims(variable: "xarray.DataArray", dims: tuple[str, ...]) -> bool:
    """Tell whether a variable holds numbers over just these dimensions."""
    return set(variable.dims) == set(dims) and numeric(variable)


def is_map(result: "Result", variable: "xarray.DataArray") -> bool:
    """Tell whether a variable holds the influence of every cell of the grid on every
    other.
    """
    if not has_dims(variable, MAP) or variable.sizes["token"] > MOST_TOKENS:
        return False
    return all(
        labels(result.data, dim) == labels(result.data, f"source_{dim}")
        for dim in CELLS
    )


def by_dimensions(result: "Result") -> Iterator[View]:
    """Yield the views of a result that has no story, as the dimensions decide.

    A variable over site and token is a measure of the grid; one that also has
    source_site and source_token shows which states influence a state; one over site
    alone is a line. Names and looks are in the variable's attributes: `long_name`,
    `units`, `meaning` ("diverging" where zero is the middle) and `scale` ("log").
    """
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
    # Each as a line.
    for (along, unit, _), names in sorted(series.items()):
        variables = [result.data[name] for name in names]
        lines = [Series(long_name(v), v.to_numpy()) for v in variables]
        yield Lines(
            title_of(result, names),
            labels(result.data, along),
            tuple(lines),
            x_name=along,
            y_name=lines[0].name if len(lines) == 1 else "",
            unit=unit,
            scale=variables[0].attrs.get("scale", "linear"),
        )
