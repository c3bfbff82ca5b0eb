"""The results of all members as labelled arrays `[member, site]`, and the report.

Every number is that of the member's own result, bit for bit. A variable of a result
that runs along the sites alone gets the dimension `member` before it; what also runs
along tokens stays with the members, whose tokens may differ.

A layer lies at the fraction of its model's depth: layer 6 of 12 at 0.5, `final` at 1.
Members with the same sites keep the names of these. Where depths differ, a place of
the axis is a depth, and a member has a number there only if it has a layer there:
nothing is interpolated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hiddenscope import progress
from hiddenscope.files import PathLike
from hiddenscope.results import Result
from hiddenscope.series.job import (
    Answered,
    ResultsFolder,
    SeriesJob,
    identify_members,
)
from hiddenscope.series.member import Members, members_of
from hiddenscope.series.options import LABELLED
from hiddenscope.series.question import SeriesQuestion, question_of
from hiddenscope.series.story import (
    Headline,
    MemberReport,
    MemberValue,
    MovedDirections,
    Option,
    SameWeights,
    SeriesReport,
)
from hiddenscope.sites import Site
from hiddenscope.states.arrays import AnyArray

if TYPE_CHECKING:
    import xarray

PICTURE = ("site", "text")
# Of a comparison, what is measured between sites of one name, which are not at one
# depth where the depths of the members differ.
BY_NAME = ("l2_", "relative_")

MEASURES: dict[str, tuple[str, ...]] = {
    "profile": ("norm_median", "anisotropy", "effective_rank", "added_median"),
    "compare": ("relative_median", "cka_same_depth"),
    "lens": ("kl_mean", "agreement", "accuracy"),
    "probe": ("accuracy", "r2", "selectivity"),
    "project": ("silhouette", "neighbour", "trust"),
    "drift": ("total_error", "beyond"),
}
"""The variables of each analysis that a series shows, the main one first."""

# Where a measure is read that has no best site.
DEPTHS = {"middle": 0.5, "last": 1.0}
# A raw layer, which is not of an encoder beside a decoder.
LAYER = re.compile(r"(decoder\.)?layer\.\d+")
# Hashes that cover every weight.
WHOLE = "sha256:"


def ask_members(
    models: Members,
    analysis: str,
    data: Any,
    *,
    against: str,
    options: Mapping[str, Any],
    to: PathLike | None,
) -> Result:
    """Return the results of all members as one."""
    members = members_of(models)
    question = question_of(analysis, data, options, against)
    folder = None if to is None else ResultsFolder(to)
    identities = identify_members(members)
    copies = len(members) - len({identity.weights for identity in identities})
    if copies:
        progress.note(f"{copies} of {len(members)} members repeat earlier weights.")
    answered = SeriesJob(members, identities, question, folder).run()
    dataset = _dataset(answered, question)
    # Name the model where all members are revisions of one, else the first.
    names = list(dict.fromkeys(identity.name for identity in identities))
    model = names[0]
    others = len(members) - 1
    if len(names) > 1:
        model = f"{members[0].name} and {others} other{'s' if others > 1 else ''}"
    sources = [part.record.source for part in answered]
    source = {"model": model, "members": sources}
    return Result("series", dataset, _report(answered, question, dataset), source)


class AxisPlace(NamedTuple):
    """A place of the axis: stack, depth, whether it is `final`, and part of a block."""

    stack: str
    depth: Fraction
    is_final: bool
    part: str

    @classmethod
    def of(cls, name: str, stacks: Mapping[str, int]) -> AxisPlace:
        """Return where a site lies; what is no site, such as logits, comes last.

        >>> places = [AxisPlace.of(name, {"": 3}) for name in ("layer.3", "final")]
        >>> max(places).height == AxisPlace.of("logits", {"": 3}).height
        True
        """
        if name == "logits":
            return cls("", Fraction(1), True, name)
        site = Site.parse(name)
        # A model of one stack leaves its name out.
        total = stacks[site.stack or next(iter(stacks))]
        layer = total if site.layer is None else site.layer
        depth = Fraction(layer, max(1, total))
        return cls(site.stack or "", depth, site.layer is None, site.part)

    @property
    def height(self) -> tuple[bool, Fraction, bool]:
        """Return what places are sorted by, from the bottom up."""
        return self.stack == "decoder", self.depth, self.is_final

    @property
    def label(self) -> str:
        """Return the place by its depth.

        >>> AxisPlace("", Fraction(1, 3), False, "attn").label
        'depth 0.333 attn'
        """
        name = "final" if self.is_final else f"depth {float(self.depth):.3g}"
        return " ".join(part for part in (self.stack, name, self.part) if part)


def _dataset(answered: Sequence[Answered], question: SeriesQuestion) -> xarray.Dataset:
    """Put the results of all members into one dataset, on one axis of depths."""
    import xarray

    # The results, and where the sites of each lie.
    parts: list[xarray.Dataset] = []
    sites: list[dict[AxisPlace, str]] = []
    for number, member in enumerate(answered):
        reference = answered[question.reference(number)]
        part = _along_sites(member, reference)
        names = list(map(str, part["site"].to_numpy()))
        depths = member.record.depths
        parts.append(part)
        sites.append({AxisPlace.of(name, depths): name for name in names})
    # Sorting is stable: within a block, places come as in the first member that has
    # them.
    axis = sorted(dict.fromkeys(chain(*sites)), key=lambda place: place.height)
    same_sites = all(places == sites[0] for places in sites)
    labels = {place: place.label for place in axis}
    if same_sites:
        labels = {place: sites[0][place] for place in axis}
    aligned = []
    for part, places in zip(parts, sites, strict=True):
        here = [labels[place] for place in places]
        # Nothing but the variables themselves: coordinates of members may differ.
        aligned.append(part.reset_coords(drop=True).assign_coords(site=here))
    stacked = xarray.concat(aligned, "member", join="outer", combine_attrs="override")
    stacked = stacked.reindex(site=list(labels.values()))
    coords: dict[str, Any] = {
        "member": [part.member.name for part in answered],
        "site": list(labels.values()),
        "depth": ("site", np.array([float(place.depth) for place in axis])),
    }
    if not same_sites:
        rows = [[places.get(place, "") for place in axis] for places in sites]
        coords["member_site"] = (("member", "site"), np.array(rows, dtype=object))
    at = [part.member.at for part in answered]
    if None not in at:
        coords["at"] = ("member", np.array(at, dtype=np.float64))
    attrs = {}
    if "x" in stacked:
        if "label" in parts[0].coords:
            coords["label"] = ("text", parts[0]["label"].to_numpy())
        if parts[0].attrs.get("texts"):
            attrs["texts"] = parts[0].attrs["texts"]
    stacked.attrs = attrs
    return stacked.assign_coords(coords)


def _along_sites(answer: Answered, reference: Answered) -> xarray.Dataset:
    """Return what a result has along its sites: numbers, and pictures of texts."""
    data = answer.result.data
    is_comparison = answer.result.kind == "compare"
    # A decoder and an encoder of as many layers are of one depth.
    depths = [[*part.record.depths.values()] for part in (answer, reference)]
    is_same_depth = depths[0] == depths[1]
    names = []
    for name, variable in data.items():
        by_name = str(name).startswith(BY_NAME) and is_comparison
        is_number = variable.dtype.kind in "biuf"
        is_along = variable.dims in ((), ("site",), ("direction",), PICTURE)
        if is_number and is_along and (is_same_depth or not by_name):
            names.append(name)
    measures = data[names].assign_coords(site=data["site"])
    if "cka" in data and is_comparison:
        for name in ("cka", "cka_chance"):
            values = _at_same_depth(data[name], answer, reference)
            attributes = {"long_name": f"{data[name].attrs['long_name']}, same depth"}
            measures[f"{name}_same_depth"] = ("site", values, attributes)
    return measures


def _at_same_depth(
    cka: xarray.DataArray, answer: Answered, reference: Answered
) -> AnyArray:
    """Return the CKA of each site with the site of the other model at its depth.

    Where that has no layer there, it is the nearest; of two as near, the lower.
    """
    others = [str(site) for site in cka["source_site"].to_numpy()]
    depth = next(iter(answer.record.depths.values()))
    other_depth = next(iter(reference.record.depths.values()))
    # By how deep they lie.
    raw = {}
    for name in others:
        layer = Site.parse(name).layer
        if layer is not None:
            raw[name] = layer / other_depth
    values = np.full(cka.sizes["site"], np.nan, dtype=cka.dtype)
    for row, name in enumerate(map(str, cka["site"].to_numpy())):
        layer = Site.parse(name).layer
        match = name if name in others else ""
        if layer is not None and raw:
            wanted = layer / max(1, depth)
            distances = {other: abs(raw[other] - wanted) for other in raw}
            match = min(distances, key=distances.__getitem__)
        if match:
            values[row] = cka.to_numpy()[row, others.index(match)]
    return values


def _report(
    answered: Sequence[Answered], question: SeriesQuestion, data: xarray.Dataset
) -> SeriesReport:
    """Describe the members, which of them are the same, and their main numbers."""
    records = [part.record for part in answered]
    members = []
    for place, (part, record) in enumerate(zip(answered, records, strict=True)):
        compared_with = same = None
        if question.is_paired:
            compared_with = answered[question.reference(place)].member.name
        if part.computed_as != place:
            same = answered[part.computed_as].member.name
        members.append(
            MemberReport(
                name=part.member.name,
                model=part.identity.name,
                revision=record.source.get("revision") or part.member.revision,
                at=part.member.at,
                weights=str(record.source.get("weights", "")),
                dtype=str(record.source.get("dtype", "")),
                layers=max(record.depths.values()),
                width=max(record.widths.values()),
                tokens=record.tokens,
                compared_with=compared_with,
                same_result_as=same,
            )
        )
    # The measures that some member after the first has.
    measures = []
    for name in MEASURES[question.analysis]:
        if name in data and np.isfinite(data[name].to_numpy()[1:]).any():
            measures.append(name)
    # What is noted of all members when they are loaded tells none from the others.
    noted = [record.source.get("notes", []) for record in records]
    common = set.intersection(*map(set, noted))
    notes = []
    for member, of_member in zip(members, noted, strict=True):
        notes += [f"{member.name}: {note}" for note in of_member if note not in common]
    options = question.options.items()
    return SeriesReport(
        analysis=question.analysis,
        against=question.against if question.is_paired else None,
        options=[Option(option=option, value=value) for option, value in options],
        members=members,
        same_weights=_weights_in_common(answered),
        same_depth=len({tuple(record.depths.values()) for record in records}) == 1,
        same_tokens=len({record.ids for record in records}) == 1,
        measures=measures,
        headlines=[_headline(answered, question, data, name) for name in measures[:1]],
        moved=_moved(data) if question.directions is not None else None,
        notes=notes,
    )


def _moved(data: xarray.Dataset) -> list[MovedDirections]:
    """Return which directions moved in each member but the first."""
    beyond = abs(data["shift"]) > data["shift_random"]
    beyond &= data["shift_low"] * data["shift_high"] > 0
    moved = []
    for name in data["member"].to_numpy()[1:]:
        numbers = np.flatnonzero(beyond.sel(member=name)).tolist()
        bar = float(data["shift_random"].sel(member=name)[0])
        shifts = data["shift"].sel(member=name)[numbers].to_numpy().tolist()
        count = data.sizes["direction"]
        moved.append(
            MovedDirections(
                member=str(name),
                of=count,
                random=bar,
                directions=numbers,
                shifts=shifts,
            )
        )
    return moved


def _weights_in_common(answered: Sequence[Answered]) -> list[SameWeights]:
    """Return the members with the same weights, in their files or once loaded."""
    from scipy.sparse.csgraph import connected_components

    hashes: list[set[str]] = []
    for part in answered:
        source = part.record.source
        # The strength of an adapter is no weight, and changes what weights do.
        loaded = f"{source.get('weights', '')} {source.get('adapters')}"
        covering = [part.identity.weights, loaded]
        hashes.append({text for text in covering if text.startswith(WHOLE)})
    shares = [[bool(mine & others) for others in hashes] for mine in hashes]
    _, groups = connected_components(np.array(shares))
    common = []
    for number in dict.fromkeys(groups.tolist()):
        places = np.flatnonzero(groups == number).tolist()
        same = [answered[place] for place in places]
        if len(same) > 1:
            common.append(
                SameWeights(
                    members=[part.member.name for part in same],
                    weights=str(same[0].record.source.get("weights")),
                    computed_once=len({part.computed_as for part in same}) == 1,
                )
            )
    return common


def _headline(
    answered: Sequence[Answered],
    question: SeriesQuestion,
    data: xarray.Dataset,
    measure: str,
) -> Headline:
    """Return a measure of every member at one place of its depth."""
    place: Literal["middle", "last", "best"] = "middle"
    if question.is_paired:
        place = "last"
    elif question.analysis in LABELLED:
        place = "best"
    values = []
    for part in answered:
        value = MemberValue(member=part.member.name, site="", value=None)
        if place == "best":
            value = _best(value, part, measure)
        else:
            value = _at_depth(value, data, measure, DEPTHS[place])
        values.append(value)
    name = str(data[measure].attrs.get("long_name", measure))
    return Headline(measure=measure, name=name, place=place, values=values)


def _best(empty: MemberValue, part: Answered, measure: str) -> MemberValue:
    """Return the best site of a probe or a projection, as its own facts name it."""
    facts: Any = part.result.facts
    if "parts" in facts:
        facts = facts["parts"][0].get("separation")
    if facts is None:
        return empty
    best = facts["best"]
    value, interval = _finite(best[measure]), best.get("interval")
    return replace(empty, site=best["site"], value=value, interval=interval)


def _at_depth(
    empty: MemberValue, data: xarray.Dataset, measure: str, wanted: float
) -> MemberValue:
    """Return a measure of a member at its layer that is nearest to a depth."""
    of_member = data.sel(member=empty.member)
    sites = of_member.coords.get("member_site", of_member["site"]).to_numpy().tolist()
    rows = [row for row, site in enumerate(sites) if LAYER.fullmatch(site)]
    if not rows:
        return empty
    distances = np.abs(of_member["depth"].to_numpy()[rows] - wanted)
    row = rows[int(distances.argmin())]
    return replace(empty, site=sites[row], value=_finite(of_member[measure][row]))


def _finite(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(value)
