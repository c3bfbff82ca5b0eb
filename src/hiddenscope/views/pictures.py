"""Which views show a result: chosen by its kind, and for any other kind by the dimensions of its data.

>>> import xarray
>>> from hiddenscope.results import Result
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["layer.0", "layer.1"]})
>>> pictures(Result("sizes", norms, {}, {"model": "toy"}))[0].series[0].name
'norm'
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.errors import StatesError
from hiddenscope.results import Result
from hiddenscope.views.values import Grid, Lines, Measure, Series, View, Words

if TYPE_CHECKING:
    import xarray

CELLS = ("site", "token")
MAP = (*CELLS, "source_site", "source_token")
RANKED = (*CELLS, "rank")
MOST_TOKENS = 4_096


def pictures(result: Result) -> tuple[View, ...]:
    """The views of a result, the one to look at first in front.

    A variable over site and token is a measure of the grid, one that also has source_site and source_token shows what
    a cell sees, one over site alone is a line. Their names and looks are in the variable's attributes: `long_name`,
    `units`, `meaning` ("diverging" where zero is the middle) and `scale` ("log").
    """
    found = tuple(KINDS.get(result.kind, _by_dimensions)(result))
    if not found:
        found_dims = "; ".join(f"{name} has {', '.join(map(str, v.dims))}" for name, v in result.data.items())
        do = "Draw its data with matplotlib, or save it as .csv, .json or .nc."
        raise StatesError(f"A picture of the {result.title}", found_dims or "it has no data", do)
    return found


def _by_dimensions(result: Result) -> Iterator[View]:
    grid = _grid(result, [name for name, v in result.data.items() if _is(v, CELLS) or _is_map(result, v)])
    if grid is not None:
        yield grid
    flat = [(name, v) for name, v in result.data.items() if len(v.dims) == 1 and v.dims != ("token",) and _numeric(v)]
    for (along, _, _), some in groupby(sorted(flat, key=_axis), key=_axis):
        yield _lines(result, str(along), [name for name, _ in some])


def _axis(named: "tuple[Hashable, xarray.DataArray]") -> tuple[str, str, str]:
    """What two series must share to stand on one pair of axes."""
    _, variable = named
    return str(variable.dims[0]), str(variable.attrs.get("units", "")), str(variable.attrs.get("scale", "linear"))


def _grid(result: Result, names: Sequence[Hashable], title: str = "") -> Grid | None:
    data = result.data.isel(token=slice(MOST_TOKENS)) if "token" in result.data.sizes else result.data
    words = _words(data)
    measures = [_measure(name, data[name]) for name in names]
    if words is not None and not measures and words.probabilities is not None:
        measures = [Measure("probability", words.probabilities[:, :, 0], limits=(0, 1))]
    if not measures:
        return None
    strings = data["string"].to_numpy().tolist() if "string" in data.coords else _labels(data, "token")
    texts, text_of = _texts(data)
    cut = len(strings) < result.data.sizes["token"]
    return Grid(
        title or _title(result, names),
        _labels(data, "site"),
        strings,
        tuple(measures),
        words=words,
        texts=texts,
        text_of=text_of if len(set(text_of)) > 1 else (),
        note=f"The first {len(strings):,} of {result.data.sizes['token']:,} tokens." if cut else "",
    )


def _measure(name: Hashable, variable: "xarray.DataArray") -> Measure:
    look = {key: variable.attrs[key] for key in ("meaning", "scale") if key in variable.attrs}
    said, unit = str(variable.attrs.get("long_name", name)), str(variable.attrs.get("units", ""))
    if len(variable.dims) == len(MAP):
        return Measure(said, unit=unit, influence=variable.transpose(*MAP).to_numpy(), **look)
    return Measure(said, variable.transpose(*CELLS).to_numpy(), unit, **look)


def _words(data: "xarray.Dataset") -> Words | None:
    """Words over site, token and rank, with the first numbers that have the same dimensions."""
    ranked = [v.transpose(*RANKED) for v in data.values() if set(v.dims) == set(RANKED)]
    words = next((v for v in ranked if not _numeric(v)), None)
    shares = next((v for v in ranked if _numeric(v)), None)
    return None if words is None else Words.of(words.to_numpy(), None if shares is None else shares.to_numpy())


def _texts(data: "xarray.Dataset") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts that stand side by side, and which of them each token belongs to; a decoder's are its own."""
    if "text" not in data.coords or data["text"].dims != ("token",):
        return (), ()
    stacks = data["stack"].to_numpy().tolist() if "stack" in data.coords else [""] * data.sizes["token"]
    keys = list(zip(stacks, data["text"].to_numpy().tolist(), strict=True))
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    known: Mapping[str, Sequence[str]] = {"decoder": data.attrs.get("targets", ())}
    named = [(known.get(stack, data.attrs.get("texts", ())), text) for stack, text in places]
    said = [texts[text] if text < len(texts) else f"text {text}" for texts, text in named]
    return tuple(said), tuple(places[key] for key in keys)


def _lines(result: Result, along: str, names: Sequence[Hashable], title: str = "") -> Lines:
    variables = [result.data[name] for name in names]
    series = [
        Series(str(v.attrs.get("long_name", name)), v.to_numpy()) for name, v in zip(names, variables, strict=True)
    ]
    attrs = variables[0].attrs
    y_name = series[0].name if len(series) == 1 else ""
    look: dict[str, Any] = {"unit": str(attrs.get("units", "")), "scale": attrs.get("scale", "linear")}
    return Lines(title or _title(result, names), _labels(result.data, along), tuple(series), along, y_name, **look)


def _title(result: Result, names: Sequence[Hashable]) -> str:
    model = result.source.get("model")
    said = ", ".join(str(result.data[name].attrs.get("long_name", name)) for name in names[:3]) or result.kind
    said = said if len(names) <= 3 else f"{said} and {len(names) - 3} more"
    return f"{said[:1].upper()}{said[1:]}{f' of {model}' if isinstance(model, str) else ''}"


def _labels(data: "xarray.Dataset", dim: str) -> tuple[str, ...]:
    return tuple(map(str, data[dim].to_numpy().tolist()))


def _numeric(variable: "xarray.DataArray") -> bool:
    return variable.dtype.kind in "biuf" and variable.size > 0


def _is(variable: "xarray.DataArray", dims: tuple[str, ...]) -> bool:
    return set(variable.dims) == set(dims) and _numeric(variable)


def _is_map(result: Result, variable: "xarray.DataArray") -> bool:
    """Whether a variable says how much every cell of the grid is moved by every other."""
    if not _is(variable, MAP) or variable.sizes["token"] > MOST_TOKENS:
        return False
    sides = [(_labels(result.data, dim), _labels(result.data, f"source_{dim}")) for dim in CELLS]
    return all(target == source for target, source in sides)


def _anatomy(result: Result) -> Iterator[View]:
    """Zero at every layer but the raw last one, which stands out."""
    sites, entries = _labels(result.data, "site"), result.data["entry"].to_numpy().tolist()
    difference = result.data["difference"].to_numpy().astype(np.float64)
    raw = difference > 0
    note = "Zero means bit for bit the same."
    stacks = np.array([site.rpartition("layer.")[0] or site.rpartition("final")[0] for site in sites])
    series = [
        Series(f"the {stack.replace('.', ' ')}layer that was proved to be it", np.where(here, difference, np.nan))
        for stack in dict.fromkeys(stacks.tolist())
        if (here := ~raw & (stacks == stack)).any()
    ]
    if raw.any():
        named = [
            f"{site} is raw, and {entry} is normed" for site, entry, it in zip(sites, entries, raw, strict=True) if it
        ]
        note += f" {'; '.join(named)}."
        series.append(Series("raw last layer", np.where(raw, difference, np.nan), style="bar"))
    title = f"The layers of {result.source.get('model', 'the model')} against hidden_states"
    yield Lines(title, sites, tuple(series), y_name="largest difference from hidden_states", note=note)


def _profile(result: Result) -> Iterator[View]:
    grid = _grid(result, ["norm"], _title(result, ["norm"]).replace("Norm", "The norm of every state", 1))
    if grid is not None:
        yield grid
    columns = {str(name): v.to_numpy() for name, v in result.data.items() if v.dims == ("site",)}
    series = []
    stacks = [site.rpartition("layer.")[0] or site.rpartition("final")[0] for site in _labels(result.data, "site")]
    for stack in dict.fromkeys(stacks):
        here = np.array([one == stack for one in stacks])
        first, median, low, high = (
            np.where(here, columns[f"norm_{name}"], np.nan) for name in ("first", "median", "low", "high")
        )
        prefix = stack.replace(".", " ")
        series += [
            Series(f"{prefix}first token", first),
            Series(f"{prefix}other tokens, median", median, low, high, "middle half"),
        ]
    shown = [one for one in series if np.isfinite(one.y).any()]
    if shown:
        title = _title(result, ["norm"]).replace("Norm", "The norm along the layers", 1)
        yield Lines(title, _labels(result.data, "site"), tuple(shown), y_name="norm", unit="L2", scale="log")


def _compare(result: Result) -> Iterator[View]:
    """Two rows of tokens around the differences; along the layers; every pair of sites where there are two models."""
    title = _sides(result)
    if "l2" in result.data:
        grid = _grid(result, ["l2", "relative", "cosine", "mean", "deviation"], title)
        if grid is not None:
            data = result.data.isel(token=slice(len(grid.tokens)))
            tokens, second = (_with_gaps(data, prefix) for prefix in ("", "other_"))
            zeros = int((data["l2"].to_numpy() == 0).all(0).sum())
            same = f"{zeros} of {len(tokens)} tokens are exactly the same at every site." if zeros else ""
            gaps = "Hatched: a token that only one side has." if None in (*tokens, *second) else ""
            note = " ".join(filter(None, [grid.note, same, gaps]))
            yield replace(grid, tokens=tokens, second=second, note=note)
        for measure, said, unit in (("l2", "difference", "L2"), ("relative", "relative difference", "")):
            sides = {name: result.data[f"{measure}_{name}"].to_numpy() for name in ("median", "largest")}
            series = tuple(Series(f"{name} of the tokens that differ", y) for name, y in sides.items())
            sites, look = _labels(result.data, "site"), result.data[measure].attrs.get("scale", "linear")
            if any(np.isfinite(one.y).any() for one in series):
                along = f"The {said} along the layers of {result.source.get('model', 'the model')}"
                yield Lines(along, sites, series, y_name=said, unit=unit, scale=look)
    if "cka" in result.data:
        measures = tuple(
            Measure(str(result.data[name].attrs["long_name"]), result.data[name].to_numpy(), limits=(0, 1))
            for name in ("cka", "cka_chance")
        )
        note = f"Across run the sites of {result.source.get('other', result.source).get('model', 'the other')}."
        across = _labels(result.data, "source_site")
        yield Grid(
            f"How alike every pair of sites is: {title}", _labels(result.data, "site"), across, measures, note=note
        )


def _sides(result: Result) -> str:
    """The two sides in a title: two models, two texts, or many."""
    model, attrs = result.source.get("model", "one"), result.data.attrs
    if "other" in result.source:
        return f"{model} against {result.source['other'].get('model', 'the other')}"
    texts = [attrs.get(name, []) for name in ("texts", "other_texts")]
    if all(len(side) == 1 for side in texts) and len(texts[0][0] + texts[1][0]) <= 66 and texts[0] != texts[1]:
        return f"“{texts[0][0]}” against “{texts[1][0]}”"
    return f"The difference of {'two texts' if result.facts.get('texts', 1) == 1 else 'pairs of texts'} in {model}"


def _with_gaps(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    sides = (data[f"{prefix}{name}"].to_numpy().tolist() for name in ("string", "position"))
    return tuple(None if position < 0 else string for string, position in zip(*sides, strict=True))


KINDS: dict[str, Callable[[Result], Iterator[View]]] = {"anatomy": _anatomy, "compare": _compare, "profile": _profile}
