"""The results of all members as labelled arrays `[member, site]`.

Every number is that of the member's own result, bit for bit. A variable of a result
that runs along the sites alone gets the dimension `member` before it; what also runs
along tokens stays with the members, whose tokens may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    to_dataset,
)
from hiddenscope.series.depths import DepthAxis, depth_axis
from hiddenscope.series.folder import MemberAnswer
from hiddenscope.series.member import Member
from hiddenscope.sites import Site
from hiddenscope.states.arrays import AnyArray

if TYPE_CHECKING:
    import xarray

PICTURE = ("site", "text")
SAME_DEPTH = "_same_depth"
# Of a comparison, what is measured between sites of one name, which are not at one
# depth where the depths of the members differ.
BY_NAME = ("l2_", "relative_")


def series_dataset(
    members: Sequence[Member],
    answers: Sequence[MemberAnswer],
    references: Sequence[MemberAnswer],
) -> xarray.Dataset:
    """Put the results of all members into one dataset, on one axis of depths."""
    parts, sites, depths = [], [], []
    for answer, reference in zip(answers, references, strict=True):
        part = _along_sites(answer, reference)
        parts.append(part)
        sites.append(list(map(str, part["site"].to_numpy())))
        depths.append(answer.record.depths)
    axis = depth_axis(sites, depths)
    variables: Variables = {}
    for name in _names(parts):
        variables[name] = _stacked(name, parts, axis)
    names, places = [], []
    for member in members:
        names.append(member.name)
        places.append(member.at)
    coords: Coordinates = {
        "member": names,
        "site": axis.labels,
        "depth": ("site", np.array(axis.depths)),
    }
    if len({tuple(row) for row in axis.sites}) > 1:
        dims: Any = ("member", "site")
        coords["member_site"] = (dims, np.array(axis.sites, dtype=object))
    if None not in places:
        coords["at"] = ("member", np.array(places, dtype=np.float64))
    labels = [part.coords.get("label") for part in parts]
    if "x" in variables and labels[0] is not None:
        coords["label"] = ("text", labels[0].to_numpy())
    attrs = {}
    texts = parts[0].attrs.get("texts")
    if "x" in variables and texts:
        attrs["texts"] = texts
    return to_dataset(variables, coords, attrs)


def _along_sites(answer: MemberAnswer, reference: MemberAnswer) -> xarray.Dataset:
    """Return what a result has along its sites: numbers, and pictures of texts."""
    data = answer.result.data
    is_same_depth = answer.record.depths == reference.record.depths
    names = []
    for name, variable in data.items():
        is_number = variable.dtype.kind in "biuf"
        by_name = str(name).startswith(BY_NAME) and answer.result.kind == "compare"
        if variable.dims not in ((), ("site",), PICTURE) or not is_number:
            continue
        if is_same_depth or not by_name:
            names.append(name)
    measures = data[names].assign_coords(site=data["site"])
    if "cka" in data and answer.result.kind == "compare":
        for name in ("cka", "cka_chance"):
            values = _at_same_depth(data[name], answer, reference)
            attributes = {"long_name": f"{data[name].attrs['long_name']}, same depth"}
            measures[f"{name}{SAME_DEPTH}"] = ("site", values, attributes)
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
    raw = [name for name in others if Site.parse(name).layer is not None]
    values = np.full(cka.sizes["site"], np.nan, dtype=cka.dtype)
    for row, name in enumerate(map(str, cka["site"].to_numpy())):
        site = Site.parse(name)
        match = name if name in others else ""
        if site.layer is not None and raw:
            wanted = site.layer / max(1, depth)
            match = min(
                raw, key=lambda other: abs(_layer(other) / other_depth - wanted)
            )
        if match:
            values[row] = cka.to_numpy()[row, others.index(match)]
    return values


def _layer(name: str) -> int:
    layer = Site.parse(name).layer
    assert layer is not None
    return layer


def _names(parts: Sequence[xarray.Dataset]) -> list[str]:
    """Return the names of all variables, those of the first member first."""
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(map(str, part))
    return list(names)


def _stacked(name: str, parts: Sequence[xarray.Dataset], axis: DepthAxis) -> Any:
    """Stack one variable of all members, NaN where a member has none."""
    present = [part[name] for part in parts if name in part]
    first = present[0]
    attributes: Attributes = dict(first.attrs)  # type: ignore[assignment]
    dims = tuple(map(str, first.dims))
    shape = [len(parts)]
    if "site" in dims:
        shape.append(len(axis.labels))
    if "text" in dims:
        shape.append(max(variable.sizes["text"] for variable in present))
    values = np.full(shape, np.nan, dtype=_dtype(present, shape))
    for member, part in enumerate(parts):
        if name not in part:
            continue
        numbers = part[name].to_numpy()
        if "site" not in dims:
            values[member] = numbers
        elif "text" in dims:
            values[member, axis.rows(member), : numbers.shape[1]] = numbers
        else:
            values[member, axis.rows(member)] = numbers
    return ("member", *dims), values, attributes


def _dtype(present: Sequence[xarray.DataArray], shape: Sequence[int]) -> np.dtype[Any]:
    """Return a dtype that holds every number exactly, and NaN where one is missing."""
    dtype = np.result_type(*(variable.dtype for variable in present))
    full = sum(variable.size for variable in present) == np.prod(shape)
    if full or dtype.kind == "f":
        return dtype
    return np.dtype(np.float64)
