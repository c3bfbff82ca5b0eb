"""The story of a series: how an analysis changes along its members."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Listing, Report, Result, Section, frozen, table_of
from hiddenscope.results.drawing import labels, long_name
from hiddenscope.results.pictures import (
    ColourScale,
    Grid,
    Lines,
    Measure,
    Panels,
    Series,
)
from hiddenscope.results.sentences import capitalised, counted, in_series, number
from hiddenscope.series.options import AgainstMember, SeriesAnalysis

if TYPE_CHECKING:
    import xarray

Numbers: TypeAlias = NDArray[np.floating]

# More lines cannot be told apart; more bands hide one another.
MOST_LINES, MOST_BANDS = 8, 2
# A sentence gives the numbers of this many members.
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


@frozen
class MemberReport:
    """One member: which model it is, and what was seen of it."""

    name: str
    model: str
    revision: str | None
    at: float | None
    weights: str
    dtype: str
    layers: int
    width: int
    tokens: int
    compared_with: str | None
    same_result_as: str | None


@frozen
class SameWeights:
    """Members that have the same weights."""

    members: list[str]
    weights: str
    computed_once: bool

    def __str__(self) -> str:
        once = "They were computed once."
        if not self.computed_once:
            once = (
                "They were computed by themselves, since they differ in something else,"
                " such as the dtype or the tokenizer."
            )
        return (
            f"{in_series(self.members)} have the same weights ({self.weights[:19]}…)."
            f" {once} If they are meant to be different checkpoints, check where they"
            " come from."
        )


@frozen
class MemberValue:
    """A number of one member, with its interval where the analysis has one.

    The number is None where the member has none.
    """

    member: str
    site: str
    value: float | None
    interval: list[float] | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"none for {self.member}"
        sentence = f"{number(self.value)} for {self.member}"
        details = [self.site] if self.site else []
        if self.interval:
            low, high = self.interval
            details.append(f"interval {number(low)} to {number(high)}")
        return f"{sentence} ({', '.join(details)})" if details else sentence


@frozen
class Headline:
    """One measure at one place of every member."""

    measure: str
    name: str
    place: Literal["middle", "last", "best"]
    values: list[MemberValue]

    def __str__(self) -> str:
        count = len(self.values)
        rows = _spread(count, MOST_NAMED)
        numbers = [str(self.values[row]) for row in rows]
        some = f" ({len(rows)} of {count} members)" if len(rows) < count else ""
        place = PLACES[self.place]
        return f"{capitalised(self.name)} {place}{some}: {in_series(numbers)}."


@frozen
class MovedDirections:
    """The directions along which the states of a member moved, by number.

    Their intervals do not hold 0, and they moved farther than `random` ones do.
    """

    member: str
    of: int
    random: float
    directions: list[int]
    shifts: list[float]

    def __str__(self) -> str:
        pairs = zip(self.directions, self.shifts, strict=True)
        named = [f"{direction} by {shift:+.2g}" for direction, shift in pairs]
        which = f": {in_series(named[:MOST_NAMED])}" if named else ""
        return (
            f"In {self.member} {len(named)} of {counted(self.of, 'direction')} moved on"
            f" average over texts, and by more than {self.random:.2g}, which random"
            f" directions stay below in 95% of cases{which}."
        )


@frozen
class Option:
    """An option of the analysis that was given."""

    option: str
    value: str | int | float | bool | list[str] | None


@frozen
class SeriesReport(Report):
    """How an analysis comes out for every member of a series."""

    analysis: SeriesAnalysis
    against: AgainstMember | None
    options: list[Option]
    members: list[MemberReport]
    same_weights: list[SameWeights]
    same_depth: bool
    same_tokens: bool
    measures: list[str]
    headlines: list[Headline]
    moved: list[MovedDirections] | None = None
    notes: list[str]


def story(report: SeriesReport, result: Result) -> Iterator[Section]:
    """Yield the main measure, then all members side by side, pictures of texts, and
    the other measures.
    """
    data, noun = result.data, NOUNS[report.analysis]
    main, *others = report.measures or [""]
    views: tuple[Lines, ...] = ()
    if main:
        along_members = _along_members(report, data, main)
        views = _along_depth(report, data, main), along_members
    listing = _listing(report)
    yield Section(
        f"How does the {noun} change along the series?",
        tuple(_findings(report)),
        views,
        _reading(report),
        tables=(listing, table_of(listing)),
    )
    if main:
        yield Section(
            "All members side by side",
            views=(_grid(report, data),),
            reading="Members run across and layers up; choose the measure above the"
            " picture.",
        )
    if "x" in data:
        yield Section(
            "The texts in every member",
            views=(_pictures(report, data),),
            reading="One row for each member, at the same depths. Axes of two pictures"
            " have no common meaning: compare which points lie together.",
        )
    if others:
        yield Section(
            "Other measures",
            views=tuple(_along_depth(report, data, name) for name in others),
            reading=f"As above, for other numbers of the {noun}.",
            folded=True,
        )


def _findings(report: SeriesReport) -> Iterator[str]:
    """Yield the main number of every member, which members are the same model, and
    what limits the comparison.
    """
    members = report.members
    if report.headlines:
        yield str(report.headlines[0])
    else:
        noun = NOUNS[report.analysis]
        yield f"The {noun} of {len(members)} members has nothing in common."
    yield from map(str, report.moved or [])
    yield from map(str, report.same_weights)
    if report.against is not None:
        first = members[0].name
        which = "the one before it" if report.against == "previous" else first
        yield (
            f"Every member is compared with {which} by states of whole passes; {first}"
            " is compared with itself."
        )
    tokens = [member.tokens for member in members]
    if report.same_tokens:
        yield (
            f"All members read the same {counted(tokens[0], 'token')}, so that their"
            " numbers are paired: the texts are no reason for a difference."
        )
    else:
        yield (
            "The tokenizers of the members make different tokens of the texts"
            f" ({min(tokens):,} to {max(tokens):,}): the numbers of two members are"
            " over different tokens."
        )
    if not report.same_depth:
        layers = [str(member.layers) for member in members]
        yield (
            f"The members have {in_series(layers)} layers; each layer is placed by its"
            " depth, from 0 to 1, and nothing is interpolated in the numbers."
        )
    yield (
        f"These are descriptions of {len(members)} members: a trend along the series"
        " was not tested."
    )
    yield from report.notes


def _reading(report: SeriesReport) -> str:
    how = "was computed for every member by itself"
    if report.against is not None:
        how = "was made of the states of both members"
    reading = (
        f"The {NOUNS[report.analysis]} {how}, on the same texts. The first picture has"
        " one line for each member, the second one line for each of a few layers."
    )
    if report.analysis == "probe":
        reading += (
            " Intervals are those of one member alone; whether two members differ was"
            " not tested."
        )
    return reading


def _listing(report: SeriesReport) -> Listing:
    """Return the members as a table, with whose result each shares where some do."""
    columns = ["member", "layers x width", "dtype", "weights"]
    shares = any(member.same_result_as for member in report.members)
    if shares:
        columns.append("same result as")
    rows = []
    for member in report.members:
        row = [
            member.name,
            f"{member.layers} x {member.width}",
            member.dtype,
            member.weights.removeprefix("sha256:")[:12],
        ]
        if shares:
            row.append(member.same_result_as or "")
        rows.append(tuple(row))
    return Listing("Members", tuple(columns), tuple(rows))


def _along_depth(report: SeriesReport, data: "xarray.Dataset", name: str) -> Lines:
    """Draw one line for each member along the depth."""
    variables = [data[name]]
    # Copies are left out: two lines would hide each other.
    distinct = []
    for row, member in enumerate(report.members):
        if member.same_result_as is None:
            distinct.append(row)
    shown = [distinct[place] for place in _spread(len(distinct), MOST_LINES)]
    # Of the measures, only the score of a probe has an interval.
    has_interval = name in ("accuracy", "r2") and f"{name}_low" in data
    if has_interval and len(shown) <= MOST_BANDS:
        variables += [data[f"{name}_low"], data[f"{name}_high"]]
    values = [variable.to_numpy() for variable in variables]
    x, x_name, note = labels(data, "site"), "site", ""
    if not report.same_depth:
        places = _Places(data)
        x, x_name = places.labels, "depth"
        values = list(map(places.interpolated, values))
        note = "Dots between the layers of a member are interpolated."
    if x[-1] == "final" and not np.isfinite(values[0][:, -1]).any():
        # Some measures are of raw layers alone.
        x, values = x[:-1], [values[0][:, :-1]]
    if len(shown) < len(distinct):
        note = f"{len(shown)} of {len(report.members)} members. {note}".strip()
    names = labels(data, "member")
    lines = []
    for row in shown:
        if np.isfinite(values[0][row]).any():
            line = Series(names[row], values[0][row])
            if len(values) > 1:
                low, high = (ends[row] for ends in values[1:])
                line = replace(line, low=low, high=high, band="95% interval")
            lines.append(line)
    return Lines(
        f"{capitalised(long_name(data[name]))} along the depth",
        x,
        tuple(lines) or (Series(names[0], values[0][0]),),
        x_name=x_name,
        note=note,
        **_value_axis(data[name], values[0]),
    )


def _along_members(report: SeriesReport, data: "xarray.Dataset", name: str) -> Lines:
    """Draw one line for each of a few depths along the members."""
    rows = data[name].to_numpy()
    columns: dict[str, int] = {}
    if report.same_depth:
        sites, depths = labels(data, "site"), data["depth"].to_numpy()
        raw = [column for column, site in enumerate(sites) if "final" not in site]
        raw = raw or [*range(len(sites))]
        for depth in SHOWN_DEPTHS:
            # Of two layers as near, the lower.
            nearest = raw[int(np.argmin(np.abs(depths[raw] - depth)))]
            columns[sites[nearest]] = nearest
    else:
        places = _Places(data)
        rows = places.interpolated(rows)
        for depth in SHOWN_DEPTHS:
            columns[f"depth {depth:g}"] = round(depth * (len(places.at) - 1))
    lines = []
    for words, column in columns.items():
        lines.append(Series(words, rows[:, column].astype(np.float32)))
    drawn = [line for line in lines if np.isfinite(line.y).any()] or lines[:1]
    x, x_name = labels(data, "member"), "member"
    x_scale: ColourScale = "linear"
    if "at" in data.coords:
        at = data["at"].to_numpy()
        numbers = tuple(f"{place:g}" for place in at)
        if len(set(numbers)) == len(numbers):
            x, x_name = numbers, "place in the series"
            # Numbers stand on a log axis where they allow it.
            if (np.diff(at) > 0).all() and at[0] > 0:
                x_scale = "log"
    return Lines(
        f"{capitalised(long_name(data[name]))} along the members",
        x,
        tuple(drawn),
        x_name=x_name,
        x_scale=x_scale,
        **_value_axis(data[name], rows),
    )


def _value_axis(variable: "xarray.DataArray", values: Numbers) -> dict[str, Any]:
    """Return what a chart says of its numbers. A log scale cannot show zeros."""
    finite = values[np.isfinite(values)]
    is_log = variable.attrs.get("scale") == "log" and len(finite) and finite.min() > 0
    return {
        "y_name": long_name(variable),
        "unit": str(variable.attrs.get("units", "")),
        "scale": "log" if is_log else "linear",
    }


def _grid(report: SeriesReport, data: "xarray.Dataset") -> Grid:
    """Draw members across and layers up."""
    measures = []
    for name in report.measures:
        variable = data[name]
        values = variable.transpose("site", "member").to_numpy()
        axis = _value_axis(variable, values)
        meaning = variable.attrs.get("meaning", "sequential")
        measures.append(
            Measure(axis["y_name"], values, axis["unit"], meaning, axis["scale"])
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


def _pictures(report: SeriesReport, data: "xarray.Dataset") -> Panels:
    """Draw the texts in the layers of every member: one row of panels for each."""
    members, sites = labels(data, "member"), labels(data, "site")
    x, y = data["x"].to_numpy(), data["y"].to_numpy()
    is_drawn = np.isfinite(x).any(axis=-1)
    rows, columns = np.nonzero(is_drawn)
    classes: tuple[str, ...] = ()
    if "label" in data.coords:
        classes = tuple(map(str, data["label"].to_numpy().tolist()))
    return Panels(
        f"The texts in {len(report.members)} members",
        tuple(sites[column] for column in columns),
        np.stack([x, y], axis=-1)[is_drawn],
        labels=classes,
        texts=tuple(data.attrs.get("texts", ())),
        rows=tuple(members[row] for row in rows),
        rows_name="member",
        depths=tuple(data["depth"].to_numpy()[columns].tolist()),
    )


class _Places:
    """Evenly spaced depths that hold the layers of every member, where few suffice.

    A line between two layers is straight, so that a value between them lies on the line
    that would be drawn anyway.
    """

    def __init__(self, data: "xarray.Dataset") -> None:
        self.depths: NDArray[np.float64] = data["depth"].to_numpy()
        self.final = np.array(["final" in site for site in labels(data, "site")])
        raw = self.depths[~self.final]
        counts = np.arange(1, 1_000)
        steps = 1
        for depth in raw:
            parts = depth * counts
            whole = counts[np.abs(parts - np.round(parts)) < 1e-6]
            steps = math.lcm(steps, int(whole[0]) if len(whole) else 1_000)
        if steps > MOST_PLACES:
            steps = len(raw) - 1
        self.at = np.linspace(0, 1, max(1, steps) + 1)
        self.labels = tuple(f"{depth:.3g}" for depth in self.at)
        if self.final.any():
            self.labels += ("final",)

    def interpolated(self, rows: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the values of every member at these depths, then at `final`."""
        lines = np.full((len(rows), len(self.labels)), np.nan)
        for line, row in zip(lines, np.asarray(rows, np.float64), strict=True):
            is_known = np.isfinite(row)
            known = is_known & ~self.final
            if known.any():
                depths = self.depths[known]
                ends = {"left": np.nan, "right": np.nan}
                line[: len(self.at)] = np.interp(self.at, depths, row[known], **ends)
            last = row[is_known & self.final]
            if len(last):
                line[-1] = last[0]
        return lines


def _spread(count: int, most: int) -> list[int]:
    """Choose at most this many members: the first, the last, and some between.

    >>> _spread(3, 8), _spread(20, 4)
    ([0, 1, 2], [0, 6, 13, 19])
    """
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
