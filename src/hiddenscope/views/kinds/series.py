"""Series: one analysis along checkpoints, sizes or variants of a model."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Listing, Result, Section, Table, table_of
from hiddenscope.results.drawing import labels, long_name, of_type
from hiddenscope.results.pictures import (
    ColourScale,
    Grid,
    Lines,
    Measure,
    Panels,
    Series,
    View,
)
from hiddenscope.results.sentences import (
    as_prose,
    capitalised,
    counted,
    in_series,
    number,
)

if TYPE_CHECKING:
    import xarray

    from hiddenscope.series.facts import (
        HeadlineFacts,
        MemberValueFacts,
        SameWeightsFacts,
        SeriesFacts,
    )

Bands: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The lower and upper ends of intervals, by member and site."""


class ValueAxis(TypedDict):
    """What a chart says of its numbers."""

    y_name: str
    unit: str
    scale: ColourScale


# More lines cannot be told apart; more bands hide one another.
MOST_LINES, MOST_BANDS = 8, 2
# A sentence gives the numbers of so many members.
MOST_NAMED = 6
# Depths of the lines along the members.
SHOWN_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Places of a common axis that fit a picture.
MOST_PLACES = 64

NOUNS = {
    "profile": "profile",
    "compare": "comparison",
    "lens": "lens",
    "probe": "probe",
    "project": "projection",
    "drift": "drift",
}
PLACES = {
    "middle": "in the middle of the depth",
    "last": "at the last layer that is compared",
    "best": "at the best site of each",
}


def views(result: Result) -> Iterator[View]:
    """Yield the main measure along the depth and along the members, then all members
    side by side, pictures of texts, and the other measures.
    """
    facts = cast("SeriesFacts", result.facts)
    measures = facts["measures"]
    for name in measures[:1]:
        yield _along_depth(result, name)
        yield _along_members(result, name)
    if measures:
        yield _grid(result, measures)
    if "x" in result.data:
        yield _pictures(result)
    for name in measures[1:]:
        yield _along_depth(result, name)


def findings(result: Result) -> Iterator[str]:
    """Yield the main number of every member, which members are the same model, and
    what limits the comparison.
    """
    facts = cast("SeriesFacts", result.facts)
    if facts["headlines"]:
        yield _headline(facts["headlines"][0])
    else:
        noun, count = NOUNS[facts["analysis"]], len(facts["members"])
        yield f"The {noun} of {count} members has nothing in common."
    for same in facts["same_weights"]:
        yield _same(same)
    yield from _against(facts)
    yield _pairing(facts)
    if not facts["same_depth"]:
        layers = [str(member["layers"]) for member in facts["members"]]
        yield (
            f"The members have {in_series(layers)} layers; each layer is placed by its"
            " depth, from 0 to 1, and nothing is interpolated in the numbers."
        )
    yield (
        f"These are descriptions of {len(facts['members'])} members: a trend along the"
        " series was not tested."
    )
    yield from facts["notes"]


def sections(result: Result) -> Iterator[Section]:
    """Yield the main measure, then all members side by side, then other measures."""
    facts = cast("SeriesFacts", result.facts)
    every = tuple(views(result))
    lines = of_type(every, Lines)
    yield Section(
        f"How does the {NOUNS[facts['analysis']]} change along the series?",
        as_prose(findings(result)),
        lines[:2],
        _reading(result),
        tables=tuple(_listings(result)),
    )
    grids = of_type(every, Grid)
    if grids:
        yield Section(
            "All members side by side",
            "",
            grids,
            "Members run across and layers up; choose the measure above the picture.",
        )
    panels = of_type(every, Panels)
    if panels:
        yield Section(
            "The texts in every member",
            "",
            panels,
            "One row for each member, at the same depths. Axes of two pictures have no"
            " common meaning: compare which points lie together.",
        )
    if lines[2:]:
        yield Section(
            "Other measures",
            "",
            lines[2:],
            f"As above, for other numbers of the {NOUNS[facts['analysis']]}.",
            folded=True,
        )


def tables(result: Result) -> Iterator[Table]:
    """Yield the members."""
    for listing in _listings(result):
        yield table_of(listing)


def _along_depth(result: Result, name: str) -> Lines:
    """Draw one line for each member along the depth."""
    data, facts = result.data, cast("SeriesFacts", result.facts)
    rows = data[name].to_numpy()
    distinct = _distinct_members(facts)
    shown = [distinct[place] for place in _spread(len(distinct), MOST_LINES)]
    bands = _bands(data, name) if len(shown) <= MOST_BANDS else None
    x, x_name, note = labels(data, "site"), "site", ""
    if not facts["same_depth"]:
        places = _Places(data)
        x, x_name = places.labels, "depth"
        rows = places.interpolated(rows)
        if bands is not None:
            bands = (places.interpolated(bands[0]), places.interpolated(bands[1]))
        note = "Dots between the layers of a member are interpolated."
    if x[-1] == "final" and not np.isfinite(rows[:, -1]).any():
        # Some measures are of raw layers alone.
        x, rows = x[:-1], rows[:, :-1]
        bands = None
    if len(shown) < len(distinct):
        note = f"{len(shown)} of {len(facts['members'])} members. {note}".strip()
    return Lines(
        f"{capitalised(long_name(data[name]))} along the depth",
        x,
        tuple(_member_lines(labels(data, "member"), shown, rows, bands)),
        x_name=x_name,
        note=note,
        **_value_axis(data[name], rows),
    )


def _distinct_members(facts: "SeriesFacts") -> list[int]:
    """Return the members that are no copies: two lines would hide each other."""
    distinct = []
    for row, member in enumerate(facts["members"]):
        if member["same_result_as"] is None:
            distinct.append(row)
    return distinct


def _member_lines(
    names: Sequence[str],
    shown: Sequence[int],
    rows: NDArray[np.floating],
    bands: Bands | None,
) -> list[Series]:
    """Return a line for each member that has numbers."""
    lines = []
    for row in shown:
        if not np.isfinite(rows[row]).any():
            continue
        line = Series(names[row], rows[row])
        if bands is not None:
            low, high = bands[0][row], bands[1][row]
            line = Series(names[row], rows[row], low, high, "95% interval")
        lines.append(line)
    return lines or [Series(names[0], rows[0])]


def _along_members(result: Result, name: str) -> Lines:
    """Draw one line for each of a few depths along the members."""
    data, facts = result.data, cast("SeriesFacts", result.facts)
    rows = data[name].to_numpy()
    if facts["same_depth"]:
        lines = _lines_of_layers(data, rows)
    else:
        places = _Places(data)
        rows = places.interpolated(rows)
        lines = _lines_of_depths(places, rows)
    drawn = [line for line in lines if np.isfinite(line.y).any()] or lines[:1]
    x, x_name, x_scale = _member_axis(data)
    return Lines(
        f"{capitalised(long_name(data[name]))} along the members",
        x,
        tuple(drawn),
        x_name=x_name,
        x_scale=x_scale,
        **_value_axis(data[name], rows),
    )


def _lines_of_layers(
    data: "xarray.Dataset", rows: NDArray[np.floating]
) -> list[Series]:
    """Return a line along the members for the layers nearest to a few depths."""
    sites, depths = labels(data, "site"), data["depth"].to_numpy()
    raw = [column for column, site in enumerate(sites) if "final" not in site]
    columns = []
    for depth in SHOWN_DEPTHS:
        nearest = min(raw or range(len(sites)), key=_distance(depths, depth))
        columns.append(nearest)
    lines = []
    for column in dict.fromkeys(columns):
        lines.append(Series(sites[column], rows[:, column].astype(np.float32)))
    return lines


def _lines_of_depths(places: "_Places", rows: NDArray[np.floating]) -> list[Series]:
    """Return a line along the members for a few depths of a common axis."""
    steps = len(places.labels) - 1 - places.has_final
    lines = []
    for depth in SHOWN_DEPTHS:
        column = round(depth * steps)
        lines.append(Series(f"depth {depth:g}", rows[:, column].astype(np.float32)))
    return lines


def _value_axis(variable: "xarray.DataArray", rows: NDArray[np.floating]) -> ValueAxis:
    """Return what a chart says of its numbers."""
    return {
        "y_name": long_name(variable),
        "unit": str(variable.attrs.get("units", "")),
        "scale": _scale(variable, rows),
    }


def _member_axis(data: "xarray.Dataset") -> tuple[tuple[str, ...], str, ColourScale]:
    """Return the labels of the members: numbers on a log axis where they allow it."""
    names = labels(data, "member")
    if "at" not in data.coords:
        return names, "member", "linear"
    at = data["at"].to_numpy()
    rises = bool((np.diff(at) > 0).all())
    numbers = tuple(f"{place:g}" for place in at)
    if len(set(numbers)) < len(numbers):
        return names, "member", "linear"
    if rises and at[0] > 0:
        return numbers, "place in the series", "log"
    return numbers, "place in the series", "linear"


def _grid(result: Result, names: Sequence[str]) -> Grid:
    """Draw members across and layers up."""
    data = result.data
    measures = []
    for name in names:
        variable = data[name]
        values = variable.transpose("site", "member").to_numpy()
        measures.append(
            Measure(
                long_name(variable),
                values,
                str(variable.attrs.get("units", "")),
                variable.attrs.get("meaning", "sequential"),
                _scale(variable, values),
            )
        )
    # A grid marks the spaces of tokens, and its columns are usually tokens.
    members = [name.replace(" ", "-") for name in labels(data, "member")]
    return Grid(
        "Every member and every layer",
        labels(data, "site"),
        tuple(members),
        tuple(measures),
        x_name="member",
    )


def _pictures(result: Result) -> Panels:
    """Draw the texts in the layers of every member: one row of panels for each."""
    data, facts = result.data, cast("SeriesFacts", result.facts)
    members, sites = labels(data, "member"), labels(data, "site")
    x, y = data["x"].to_numpy(), data["y"].to_numpy()
    points, rows, names, depths = [], [], [], []
    for member, name in enumerate(members):
        for site, label in enumerate(sites):
            if not np.isfinite(x[member, site]).any():
                continue
            points.append(np.stack([x[member, site], y[member, site]], axis=-1))
            rows.append(name)
            names.append(label)
            depths.append(float(data["depth"].to_numpy()[site]))
    classes: tuple[str, ...] = ()
    if "label" in data.coords:
        classes = tuple(map(str, data["label"].to_numpy().tolist()))
    return Panels(
        f"The texts in {len(facts['members'])} members",
        tuple(names),
        np.array(points),
        labels=classes,
        texts=tuple(data.attrs.get("texts", ())),
        rows=tuple(rows),
        rows_name="member",
        depths=tuple(depths),
    )


class _Places:
    """Evenly spaced depths that hold the layers of every member, where few suffice.

    A line between two layers is straight, so that a value between them lies on the line
    that would be drawn anyway.
    """

    def __init__(self, data: "xarray.Dataset") -> None:
        self.depths: NDArray[np.float64] = data["depth"].to_numpy()
        sites = labels(data, "site")
        self.final = np.array(["final" in site for site in sites])
        self.has_final = bool(self.final.any())
        steps = 1
        for depth in self.depths[~self.final]:
            denominator = _denominator(float(depth))
            steps = math.lcm(steps, denominator)
        if steps > MOST_PLACES:
            steps = int(np.isfinite(self.depths[~self.final]).sum()) - 1
        self.at = np.linspace(0, 1, max(1, steps) + 1)
        self.labels = tuple(f"{depth:.3g}" for depth in self.at)
        if self.has_final:
            self.labels += ("final",)

    def interpolated(self, rows: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the values of every member at these depths, then at `final`."""
        lines = []
        for row in np.asarray(rows, dtype=np.float64):
            known = np.isfinite(row) & ~self.final
            line = np.full(len(self.at), np.nan)
            if known.any():
                line = np.interp(
                    self.at, self.depths[known], row[known], left=np.nan, right=np.nan
                )
            if self.has_final:
                last = row[self.final]
                last = last[np.isfinite(last)]
                line = np.append(line, last[0] if len(last) else np.nan)
            lines.append(line)
        return np.array(lines)


def _denominator(depth: float) -> int:
    for count in range(1, 1_000):
        if abs(depth * count - round(depth * count)) < 1e-6:
            return count
    return 1_000


def _distance(depths: NDArray[np.float64], wanted: float) -> Callable[[int], float]:
    return lambda place: abs(float(depths[place]) - wanted)


def _spread(count: int, most: int) -> list[int]:
    """Choose at most so many members: the first, the last, and some between.

    >>> _spread(3, 8), _spread(20, 4)
    ([0, 1, 2], [0, 6, 13, 19])
    """
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _bands(data: "xarray.Dataset", name: str) -> Bands | None:
    """Return the interval of a probe's score; other measures have none."""
    is_interval = name in ("accuracy", "r2")
    if not is_interval or f"{name}_low" not in data:
        return None
    return data[f"{name}_low"].to_numpy(), data[f"{name}_high"].to_numpy()


def _scale(variable: "xarray.DataArray", values: NDArray[np.floating]) -> ColourScale:
    """Return the scale of a variable; zeros of a log scale need a linear one."""
    finite = values[np.isfinite(values)]
    if variable.attrs.get("scale") == "log" and len(finite) and finite.min() > 0:
        return "log"
    return "linear"


def _headline(headline: "HeadlineFacts") -> str:
    place = PLACES[headline["place"]]
    values = headline["values"]
    shown = [values[row] for row in _spread(len(values), MOST_NAMED)]
    numbers = [_value(value) for value in shown]
    some = ""
    if len(shown) < len(values):
        some = f" ({len(shown)} of {len(values)} members)"
    return f"{capitalised(headline['name'])} {place}{some}: {in_series(numbers)}."


def _value(value: "MemberValueFacts") -> str:
    if value["value"] is None:
        return f"none for {value['member']}"
    sentence = f"{number(value['value'])} for {value['member']}"
    details = [value["site"]] if value["site"] else []
    if "interval" in value:
        low, high = value["interval"]
        details.append(f"interval {number(low)} to {number(high)}")
    return f"{sentence} ({', '.join(details)})" if details else sentence


def _same(same: "SameWeightsFacts") -> str:
    names = in_series(same["members"])
    once = "They were computed once."
    if not same["computed_once"]:
        once = (
            "They were computed by themselves, since they differ in something else,"
            " such as the dtype or the tokenizer."
        )
    return (
        f"{names} have the same weights ({same['weights'][:19]}…). {once} If they are"
        " meant to be different checkpoints, check where they come from."
    )


def _against(facts: "SeriesFacts") -> Iterator[str]:
    """Yield what each member is compared with."""
    if facts["against"] is None:
        return
    first = facts["members"][0]["name"]
    which = f"with {first}"
    if facts["against"] == "previous":
        which = "with the one before it"
    yield (
        f"Every member is compared {which} by states of whole passes; {first} is"
        " compared with itself."
    )


def _pairing(facts: "SeriesFacts") -> str:
    tokens = [member["tokens"] for member in facts["members"]]
    if facts["same_tokens"]:
        return (
            f"All members read the same {counted(tokens[0], 'token')}, so"
            " that their numbers are paired: the texts are no reason for a difference."
        )
    return (
        "The tokenizers of the members make different tokens of the texts"
        f" ({min(tokens):,} to {max(tokens):,}): the numbers of two members are over"
        " different tokens."
    )


def _reading(result: Result) -> str:
    facts = cast("SeriesFacts", result.facts)
    how = "was computed for every member by itself"
    if facts["against"] is not None:
        how = "was made of the states of both members"
    noun = NOUNS[facts["analysis"]]
    reading = (
        f"The {noun} {how}, on the same texts. The first picture has one line for each"
        " member, the second one line for each of a few layers."
    )
    if facts["analysis"] == "probe":
        reading += (
            " Intervals are those of one member alone; whether two members differ was"
            " not tested."
        )
    return reading


def _listings(result: Result) -> Iterator[Listing]:
    """Yield the members as a table, with whose result each shares where some do."""
    facts = cast("SeriesFacts", result.facts)
    columns = ["member", "layers x width", "dtype", "weights"]
    shares = any(member["same_result_as"] for member in facts["members"])
    if shares:
        columns.append("same result as")
    rows = []
    for member in facts["members"]:
        row = [
            member["name"],
            f"{member['layers']} x {member['width']}",
            member["dtype"],
            member["weights"].removeprefix("sha256:")[:12],
        ]
        if shares:
            row.append(member["same_result_as"] or "")
        rows.append(tuple(row))
    yield Listing("Members", tuple(columns), tuple(rows))
