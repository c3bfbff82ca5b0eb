"""What a series shows, as facts: which members are the same, and a few numbers each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.series.facts import (
    HeadlineFacts,
    MemberFacts,
    MemberValueFacts,
    OptionFacts,
    SameWeightsFacts,
    SeriesFacts,
)
from hiddenscope.series.question import SeriesQuestion
from hiddenscope.series.run import Answered

if TYPE_CHECKING:
    import xarray

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


def series_facts(
    answered: Sequence[Answered], question: SeriesQuestion, data: xarray.Dataset
) -> SeriesFacts:
    """Describe the members, which of them are the same, and their main numbers."""
    records = [part.answer.record for part in answered]
    depths = {tuple(record.depths.values()) for record in records}
    options: list[OptionFacts] = []
    for option, value in question.options.items():
        options.append({"option": option, "value": value})
    measures = _measured(MEASURES[question.analysis], data)
    return {
        "analysis": question.analysis,
        "against": question.against if question.is_paired else None,
        "options": options,
        "members": _member_facts(answered, question),
        "same_weights": weights_in_common(answered),
        "same_depth": len(depths) == 1,
        "same_tokens": len({record.ids for record in records}) == 1,
        "measures": measures,
        "headlines": _headlines(answered, question, data, measures),
        "notes": _notes(answered),
    }


def _member_facts(
    answered: Sequence[Answered], question: SeriesQuestion
) -> list[MemberFacts]:
    facts: list[MemberFacts] = []
    for place, part in enumerate(answered):
        record = part.answer.record
        compared_with = None
        if question.is_paired:
            compared_with = answered[question.reference(place)].member.name
        same = None
        if part.computed_as != place:
            same = answered[part.computed_as].member.name
        facts.append(
            {
                "name": part.member.name,
                "model": part.identity.name,
                "revision": record.source.get("revision") or part.member.revision,
                "at": part.member.at,
                "weights": str(record.source.get("weights", "")),
                "dtype": str(record.source.get("dtype", "")),
                "layers": max(record.depths.values()),
                "width": max(record.widths.values()),
                "tokens": record.tokens,
                "compared_with": compared_with,
                "same_result_as": same,
            }
        )
    return facts


def weights_in_common(answered: Sequence[Answered]) -> list[SameWeightsFacts]:
    """Return the members with the same weights, in their files or once loaded."""
    groups: list[set[int]] = []
    for place, part in enumerate(answered):
        hashes = _hashes(part)
        joined = {place}
        for group in [*groups]:
            if any(_hashes(answered[other]) & hashes for other in group):
                joined |= group
                groups.remove(group)
        groups.append(joined)
    facts: list[SameWeightsFacts] = []
    for group in sorted(groups, key=min):
        if len(group) < 2:
            continue
        places = sorted(group)
        weights = answered[places[0]].answer.record.source.get("weights")
        computed = {answered[place].computed_as for place in places}
        facts.append(
            {
                "members": [answered[place].member.name for place in places],
                "weights": str(weights),
                "computed_once": len(computed) == 1,
            }
        )
    return facts


def _hashes(part: Answered) -> set[str]:
    """Return the hashes of a member's weights that cover all of them."""
    source = part.answer.record.source
    loaded = str(source.get("weights", ""))
    hashes = set()
    if part.identity.weights.startswith(WHOLE):
        hashes.add(part.identity.weights)
    if loaded.startswith(WHOLE):
        # The strength of an adapter is no weight, and changes what weights do.
        hashes.add(f"{loaded} {source.get('adapters')}")
    return hashes


def _notes(answered: Sequence[Answered]) -> list[str]:
    """Collect what was out of the ordinary when some of the members were loaded.

    What is noted of all of them tells none from the others.
    """
    notes_of = {}
    for part in answered:
        notes_of[part.member.name] = part.answer.record.source.get("notes", [])
    lists = [set(notes) for notes in notes_of.values()]
    common = set.intersection(*lists)
    notes = []
    for name, of_member in notes_of.items():
        for note in of_member:
            if note not in common:
                notes.append(f"{name}: {note}")
    return notes


def _headlines(
    answered: Sequence[Answered],
    question: SeriesQuestion,
    data: xarray.Dataset,
    measures: Sequence[str],
) -> list[HeadlineFacts]:
    """Return the main measure of every member at one place of its depth."""
    if not measures:
        return []
    measure = measures[0]
    headline: HeadlineFacts = {
        "measure": measure,
        "name": str(data[measure].attrs.get("long_name", measure)),
        "place": "middle",
        "values": [],
    }
    if question.analysis in ("probe", "project"):
        headline["place"] = "best"
    elif question.is_paired:
        headline["place"] = "last"
    for part in answered:
        if headline["place"] == "best":
            value = _best(part, measure)
        else:
            wanted = MIDDLE if headline["place"] == "middle" else 1.0
            value = _at_depth(part.member.name, data, measure, wanted)
        headline["values"].append(value)
    return [headline]


def _best(part: Answered, measure: str) -> MemberValueFacts:
    """Return the best site of a probe or a projection, as its own facts name it."""
    facts: Any = part.answer.result.facts
    name = part.member.name
    if "parts" in facts:
        separation = facts["parts"][0].get("separation")
        if separation is None:
            return {"member": name, "site": "", "value": None}
        best = separation["best"]
    else:
        best = facts["best"]
    value: MemberValueFacts = {
        "member": name,
        "site": best["site"],
        "value": _finite(best[measure]),
    }
    if "interval" in best:
        value["interval"] = best["interval"]
    return value


def _at_depth(
    name: str, data: xarray.Dataset, measure: str, wanted: float
) -> MemberValueFacts:
    """Return a measure of a member at its layer that is nearest to a depth."""
    of_member = data.sel(member=name)
    sites = of_member.coords.get("member_site", of_member["site"]).to_numpy()
    distances = {}
    for row, site in enumerate(map(str, sites)):
        stack, _, layer = site.rpartition("layer.")
        if layer.isdigit() and not stack.startswith("encoder"):
            distances[row] = abs(float(of_member["depth"][row]) - wanted)
    if not distances:
        return {"member": name, "site": "", "value": None}
    row = min(distances, key=lambda row: distances[row])
    value = _finite(float(of_member[measure][row]))
    return {"member": name, "site": str(sites[row]), "value": value}


def _measured(names: Sequence[str], data: xarray.Dataset) -> list[str]:
    """Return the measures that some member after the first has."""
    measured = []
    for name in names:
        if name in data and np.isfinite(data[name].to_numpy()[1:]).any():
            measured.append(name)
    return measured


def _finite(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(value)
