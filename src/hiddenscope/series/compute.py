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
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hiddenscope import progress
from hiddenscope.results import Result
from hiddenscope.results.dataset import Coordinates, to_dataset
from hiddenscope.series.job import (
    Answered,
    MemberAnswer,
    ResultsFolder,
    SeriesJob,
    identify_members,
)
from hiddenscope.series.member import Members, members_of
from hiddenscope.series.question import SeriesQuestion, question_of
from hiddenscope.series.story import (
    Headline,
    MemberReport,
    MemberValue,
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

MIDDLE = 0.5
# Hashes that cover every weight.
WHOLE = "sha256:"


def ask_members(
    models: Members,
    analysis: str,
    data: Any,
    *,
    against: str,
    options: Mapping[str, Any],
    to: str | os.PathLike[str] | None,
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
    sources = [part.answer.record.source for part in answered]
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
        """Return where a site lies; what is no site, such as logits, comes last."""
        if name == "logits":
            return cls("", Fraction(1), True, name)
        site = Site.parse(name)
        # A model of one stack leaves its name out.
        total = stacks[site.stack or next(iter(stacks))]
        layer = total if site.layer is None else site.layer
        depth = Fraction(layer, max(1, total))
        return cls(site.stack or "", depth, site.layer is None, site.part)

    @property
    def label(self) -> str:
        """Return the place by its depth.

        >>> AxisPlace("", Fraction(1, 3), False, "attn").label
        'depth 0.333 attn'
        """
        name = "final" if self.is_final else f"depth {float(self.depth):.3g}"
        return " ".join(part for part in (self.stack, name, self.part) if part)


def depth_axis(
    sites: Sequence[Sequence[str]], depths: Sequence[Mapping[str, int]]
) -> dict[AxisPlace, list[str]]:
    """Lay the sites of all members on one axis, from the bottom up.

    Each place has the site of every member there, "" where it has none.

    >>> axis = depth_axis([["layer.0", "layer.1"], ["layer.0", "layer.1", "layer.2"]],
    ...                   [{"decoder": 1}, {"decoder": 2}])
    >>> [place.label for place in axis], [sites[0] for sites in axis.values()]
    (['depth 0', 'depth 0.5', 'depth 1'], ['layer.0', '', 'layer.1'])
    """
    axis: dict[AxisPlace, list[str]] = {}
    # Within a block, places come as the forward pass of the first member has them.
    within: dict[AxisPlace, int] = {}
    for member, (names, stacks) in enumerate(zip(sites, depths, strict=True)):
        for row, name in enumerate(names):
            place = AxisPlace.of(name, stacks)
            axis.setdefault(place, [""] * len(sites))[member] = name
            within.setdefault(place, row)

    def order(place: AxisPlace) -> tuple[bool, Fraction, bool, int]:
        return place.stack == "decoder", place.depth, place.is_final, within[place]

    return {place: axis[place] for place in sorted(axis, key=order)}


def _dataset(answered: Sequence[Answered], question: SeriesQuestion) -> xarray.Dataset:
    """Put the results of all members into one dataset, on one axis of depths."""
    import xarray

    parts, sites = [], []
    for place, member in enumerate(answered):
        reference = answered[question.reference(place)]
        part = _along_sites(member.answer, reference.answer)
        parts.append(part)
        sites.append(list(map(str, part["site"].to_numpy())))
    axis = depth_axis(sites, [part.answer.record.depths for part in answered])
    labels = [place.label for place in axis]
    same_sites = all(len(set(names)) == 1 for names in axis.values())
    if same_sites:
        labels = [names[0] for names in axis.values()]
    aligned = []
    for row, part in enumerate(parts):
        pairs = zip(labels, axis.values(), strict=True)
        here = [label for label, names in pairs if names[row]]
        # Nothing but the variables themselves: coordinates of members may differ.
        bare = part.reset_coords(drop=True).assign_coords(site=here)
        aligned.append(bare.reindex(site=labels))
    stacked = xarray.concat(aligned, "member", join="exact", combine_attrs="override")
    variables: Any = {}
    for name, variable in stacked.items():
        variables[name] = variable.dims, variable.to_numpy(), variable.attrs
    coords: Coordinates = {
        "member": [part.member.name for part in answered],
        "site": labels,
        "depth": ("site", np.array([float(place.depth) for place in axis])),
    }
    if not same_sites:
        member_sites = np.array(list(axis.values()), dtype=object).T
        dims: Any = ("member", "site")
        coords["member_site"] = (dims, member_sites)
    places = [part.member.at for part in answered]
    if None not in places:
        coords["at"] = ("member", np.array(places, dtype=np.float64))
    attrs = {}
    if "x" in stacked:
        if "label" in parts[0].coords:
            coords["label"] = ("text", parts[0]["label"].to_numpy())
        if parts[0].attrs.get("texts"):
            attrs["texts"] = parts[0].attrs["texts"]
    return to_dataset(variables, coords, attrs)


def _along_sites(answer: MemberAnswer, reference: MemberAnswer) -> xarray.Dataset:
    """Return what a result has along its sites: numbers, and pictures of texts."""
    data = answer.result.data
    is_comparison = answer.result.kind == "compare"
    is_same_depth = answer.record.depths == reference.record.depths
    names = []
    for name, variable in data.items():
        by_name = str(name).startswith(BY_NAME) and is_comparison
        is_number = variable.dtype.kind in "biuf"
        is_along = variable.dims in ((), ("site",), PICTURE)
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
    cka: xarray.DataArray, answer: MemberAnswer, reference: MemberAnswer
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
    records = [part.answer.record for part in answered]
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
        notes=notes,
    )


def _weights_in_common(answered: Sequence[Answered]) -> list[SameWeights]:
    """Return the members with the same weights, in their files or once loaded."""
    hashes: list[set[str]] = []
    for part in answered:
        source = part.answer.record.source
        # The strength of an adapter is no weight, and changes what weights do.
        loaded = f"{source.get('weights', '')} {source.get('adapters')}"
        covering = [part.identity.weights, loaded]
        hashes.append({text for text in covering if text.startswith(WHOLE)})
    groups: list[set[int]] = []
    for place, of_member in enumerate(hashes):
        joined = {place}
        for group in [*groups]:
            if any(hashes[other] & of_member for other in group):
                joined |= group
                groups.remove(group)
        groups.append(joined)
    common = []
    for places in sorted(map(sorted, groups)):
        if len(places) > 1:
            same = [answered[place] for place in places]
            common.append(
                SameWeights(
                    members=[part.member.name for part in same],
                    weights=str(same[0].answer.record.source.get("weights")),
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
    name = str(data[measure].attrs.get("long_name", measure))
    if question.analysis in ("probe", "project"):
        values = [_best(part, measure) for part in answered]
        return Headline(measure=measure, name=name, place="best", values=values)
    wanted = 1.0 if question.is_paired else MIDDLE
    values = [_at_depth(part.member.name, data, measure, wanted) for part in answered]
    place: Literal["last", "middle"] = "last" if question.is_paired else "middle"
    return Headline(measure=measure, name=name, place=place, values=values)


def _best(part: Answered, measure: str) -> MemberValue:
    """Return the best site of a probe or a projection, as its own facts name it."""
    facts: Any = part.answer.result.facts
    if "parts" in facts:
        facts = facts["parts"][0].get("separation")
    if facts is None:
        return MemberValue(member=part.member.name, site="", value=None)
    best = facts["best"]
    return MemberValue(
        member=part.member.name,
        site=best["site"],
        value=_finite(best[measure]),
        interval=best.get("interval"),
    )


def _at_depth(
    name: str, data: xarray.Dataset, measure: str, wanted: float
) -> MemberValue:
    """Return a measure of a member at its layer that is nearest to a depth."""
    of_member = data.sel(member=name)
    sites = of_member.coords.get("member_site", of_member["site"]).to_numpy()
    distances = {}
    for row, site in enumerate(map(str, sites)):
        stack, _, layer = site.rpartition("layer.")
        if layer.isdigit() and not stack.startswith("encoder"):
            distances[row] = abs(float(of_member["depth"][row]) - wanted)
    if not distances:
        return MemberValue(member=name, site="", value=None)
    row = min(distances, key=distances.__getitem__)
    value = _finite(float(of_member[measure][row]))
    return MemberValue(member=name, site=str(sites[row]), value=value)


def _finite(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(value)
