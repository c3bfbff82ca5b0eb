"""From the variables of a result to a grid, to lines and to their parts; every kind of
result uses these.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hiddenscope.results import Result, in_words
from hiddenscope.views.values import Grid, Lines, Measure, Series, Words

if TYPE_CHECKING:
    import xarray

CELLS = ("site", "token")
MAP = (*CELLS, "source_site", "source_token")
RANKED = (*CELLS, "rank")
MOST_TOKENS = 4_096
# Of one model: what a side is named by.
DIFFERING = (
    "dtype",
    "device",
    "attention",
    "revision",
)
UNTESTED = "These numbers describe these texts; other texts were not tested."


def grid_of(result: Result, names: Sequence[Hashable], title: str = "") -> Grid | None:
    """A grid of the named variables over site and token, with the words of the result
    if it has any.
    """
    data = (
        result.data.isel(token=slice(MOST_TOKENS))
        if "token" in result.data.sizes
        else result.data
    )
    words = words_of(data)
    measures = [measure_of(name, data[name]) for name in names]
    if words is not None and not measures and words.probabilities is not None:
        measures = [Measure("probability", words.probabilities[:, :, 0], limits=(0, 1))]
    if not measures:
        return None
    strings = (
        data["string"].to_numpy().tolist()
        if "string" in data.coords
        else labels(data, "token")
    )
    texts, text_of = texts_of(data)
    cut = len(strings) < result.data.sizes["token"]
    return Grid(
        title or title_of(result, names),
        labels(data, "site"),
        strings,
        tuple(measures),
        words=words,
        texts=texts,
        text_of=text_of if len(set(text_of)) > 1 else (),
        note=(
            f"The first {len(strings):,} of {result.data.sizes['token']:,} tokens."
            if cut
            else ""
        ),
    )


def measure_of(name: Hashable, variable: "xarray.DataArray") -> Measure:
    """A variable over site and token as a measure of the grid, or one that also has
    sources as its influence.
    """
    look = {
        key: variable.attrs[key]
        for key in ("meaning", "scale")
        if key in variable.attrs
    }
    long_name, unit = (
        str(variable.attrs.get("long_name", name)),
        str(variable.attrs.get("units", "")),
    )
    if len(variable.dims) == len(MAP):
        return Measure(
            long_name, unit=unit, influence=variable.transpose(*MAP).to_numpy(), **look
        )
    return Measure(long_name, variable.transpose(*CELLS).to_numpy(), unit, **look)


def words_of(data: "xarray.Dataset") -> Words | None:
    """Words over site, token and rank, with the first numbers that have the same
    dimensions.
    """
    ranked = [v.transpose(*RANKED) for v in data.values() if set(v.dims) == set(RANKED)]
    words = next((v for v in ranked if not numeric(v)), None)
    shares = next((v for v in ranked if numeric(v)), None)
    return (
        None
        if words is None
        else Words.of(words.to_numpy(), None if shares is None else shares.to_numpy())
    )


def texts_of(data: "xarray.Dataset") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts that stand side by side, and which of them each token belongs to; a
    decoder has texts of its own.
    """
    if "text" not in data.coords or data["text"].dims != ("token",):
        return (), ()
    stacks = (
        data["stack"].to_numpy().tolist()
        if "stack" in data.coords
        else [""] * data.sizes["token"]
    )
    keys = list(zip(stacks, data["text"].to_numpy().tolist(), strict=True))
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    known: Mapping[str, Sequence[str]] = {"decoder": data.attrs.get("targets", ())}
    named = [
        (known.get(stack, data.attrs.get("texts", ())), text) for stack, text in places
    ]
    strings = [
        texts[text] if text < len(texts) else f"text {text}" for texts, text in named
    ]
    return tuple(strings), tuple(places[key] for key in keys)


def lines_of(
    result: Result, along: str, names: Sequence[Hashable], title: str = ""
) -> Lines:
    """The named variables along one dimension, each a line."""
    variables = [result.data[name] for name in names]
    series = [
        Series(str(v.attrs.get("long_name", name)), v.to_numpy())
        for name, v in zip(names, variables, strict=True)
    ]
    attrs = variables[0].attrs
    y_name = series[0].name if len(series) == 1 else ""
    look: dict[str, Any] = {
        "unit": str(attrs.get("units", "")),
        "scale": attrs.get("scale", "linear"),
    }
    return Lines(
        title or title_of(result, names),
        labels(result.data, along),
        tuple(series),
        along,
        y_name,
        **look,
    )


def title_of(result: Result, names: Sequence[Hashable]) -> str:
    """A title that names what is shown and the model."""
    model = result.source.get("model")
    shown = (
        ", ".join(
            str(result.data[name].attrs.get("long_name", name)) for name in names[:3]
        )
        or result.kind
    )
    shown = shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
    return f"{shown[:1].upper()}{shown[1:]}{f' of {model}' if isinstance(model, str) else ''}"


def quoted(text: str) -> str:
    """A token or a text as part of a sentence: on one line, and with nothing in it that
    would be taken for code.

    >>> quoted("`a`" + chr(10) + "- b")
    '“’a’\\\\n- b”'
    """
    return f"“{in_words(text).replace('`', chr(0x2019))}”"


def as_prose(sentences: Iterable[str]) -> str:
    """Join findings as the prose of a section: the first is a paragraph of its own, as
    it stands above the picture.

    >>> as_prose(["Norms grow.", "They grow most at layer.3.", "Other texts were not tested."])
    'Norms grow.\\n\\nThey grow most at layer.3. Other texts were not tested.'
    """
    lead, *others = [*sentences] or [""]
    return f"{lead}\n\n{' '.join(others)}".strip()


def in_series(parts: Sequence[str]) -> str:
    """Join the parts of a sentence as English does.

    >>> in_series(["norms"]), in_series(["norms", "ranks"]), in_series(["norms", "ranks", "shares"])
    ('norms', 'norms and ranks', 'norms, ranks and shares')
    """
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def labels(data: "xarray.Dataset", dim: str) -> tuple[str, ...]:
    """The labels along a dimension."""
    return tuple(map(str, data[dim].to_numpy().tolist()))


def ranges(chosen: Sequence[str], sites: Sequence[str]) -> str:
    """Some of the sites as a reader would say it: neighbours as a range.

    >>> ranges(["layer.0", "layer.1", "final"], ["layer.0", "layer.1", "layer.2", "final"])
    'layer.0 to layer.1 and final'
    """
    rows = sorted(sites.index(site) for site in chosen)
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row for row in rows if row + 1 not in rows]
    names = [
        sites[a] if a == b else f"{sites[a]} to {sites[b]}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def numeric(variable: "xarray.DataArray") -> bool:
    """Whether a variable holds numbers, and any at all."""
    return variable.dtype.kind in "biuf" and variable.size > 0


def has(variable: "xarray.DataArray", dims: tuple[str, ...]) -> bool:
    """Whether a variable holds numbers over just these dimensions."""
    return set(variable.dims) == set(dims) and numeric(variable)


def is_map(result: Result, variable: "xarray.DataArray") -> bool:
    """Whether a variable holds the influence of every cell of the grid on every other."""
    if not has(variable, MAP) or variable.sizes["token"] > MOST_TOKENS:
        return False
    sides = [
        (labels(result.data, dim), labels(result.data, f"source_{dim}"))
        for dim in CELLS
    ]
    return all(target == source for target, source in sides)


def side_names(source: Mapping[str, Any]) -> tuple[str, ...]:
    """The two models, each with what it does not share with the other: dtype, device,
    kernel, revision, weights.

    >>> side_names({"model": "m", "dtype": "float32", "other": {"model": "m", "dtype": "bfloat16"}})
    ('m (float32)', 'm (bfloat16)')
    """
    sides = (source, source.get("other", source))
    differing = [
        name
        for name in DIFFERING
        if len({str(side.get(name) or "") for side in sides}) > 1
    ]
    if not differing and sides[0].get("model") == sides[1].get("model"):
        differing = [
            name for name in ("weights",) if sides[0].get(name) != sides[1].get(name)
        ]
    return tuple(_side_name(side, differing) for side in sides)


def _side_name(side: Mapping[str, Any], differing: Sequence[str]) -> str:
    shown = [str(side.get(name) or f"no {name}")[:20] for name in differing]
    return (
        f"{side.get('model', 'one')} ({', '.join(shown)})"
        if shown
        else str(side.get("model", "one"))
    )
