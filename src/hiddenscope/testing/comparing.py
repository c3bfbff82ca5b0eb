"""Compare two answers: the numbers, the labels, and what is missing in both."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import xarray

from hiddenscope.testing.entries import ROUNDING as ROUNDING
from hiddenscope.testing.entries import data_of


def differences(
    expected: Any,
    found: Any,
    tolerance: float = 0.0,
    *,
    apart: Collection[str] = (),
    labels: bool = True,
) -> list[str]:
    """Say where the numbers of two answers differ.

    Numbers may differ by the tolerance, as a share of the largest of their variable.
    With `labels`, what is no number must be equal. The variables in `apart` are left
    out.

    >>> one = xarray.Dataset({"norm": ("site", [1.0, 2.0])})
    >>> differences(one, one * 1.5, 0.1)
    ['norm is 3.0 at [1], and 2.0 was expected']
    """
    return list(
        _differences(data_of(expected), data_of(found), tolerance, apart, labels)
    )


def turned(expected: Any, found: Any, up_to_sign: Mapping[str, str]) -> xarray.Dataset:
    """Return the numbers that were found, with each direction turned as expected.

    >>> one = xarray.Dataset({"basis": (("rank", "width"), [[1.0, 2.0], [3.0, 4.0]])})
    >>> turned(one, one * -1.0, {"basis": "width"}).basis.values.tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    first, second = data_of(expected), data_of(found)
    changed = {}
    for name, along in up_to_sign.items():
        if first[name].sizes != second[name].sizes or along not in first[name].dims:
            continue
        axis = first[name].get_axis_num(along)
        values = second[name].to_numpy()
        product = np.nansum(first[name].to_numpy() * values, axis, keepdims=True)
        signs = np.where(product < 0, -1, 1)
        changed[name] = second[name].copy(data=values * signs)
    return second.assign(changed)


def _differences(
    expected: xarray.Dataset,
    found: xarray.Dataset,
    tolerance: float,
    apart: Collection[str],
    labels: bool,
) -> Iterator[str]:
    names, others = (_names(data, labels) - set(apart) for data in (expected, found))
    for name in sorted(names ^ others):
        yield f"{name} is in one of them alone"
    for name in sorted(names & others):
        first, second = expected[name], found[name]
        if first.dims != second.dims or first.shape != second.shape:
            yield f"{name} has the sizes {second.sizes}, and {first.sizes} was expected"
            continue
        if first.dtype.kind == "f":
            yield from _numbers(name, first.to_numpy(), second.to_numpy(), tolerance)
        else:
            differ = np.argwhere(first.to_numpy() != second.to_numpy())
            if len(differ):
                first_place = differ[0].tolist()
                yield f"{name} differs at {len(differ)} places, first {first_place}"


def _names(data: xarray.Dataset, labels: bool) -> set[str]:
    """Return the variables that are compared; without labels, numbers alone."""
    return {
        str(name)
        for name, variable in data.data_vars.items()
        if labels or variable.dtype.kind == "f"
    }


def _numbers(name: str, expected: Any, found: Any, tolerance: float) -> Iterator[str]:
    first, second = (np.asarray(values, np.float64) for values in (expected, found))
    missing = np.isnan(first) != np.isnan(second)
    if missing.any():
        place = np.argwhere(missing)[0].tolist()
        count = missing.sum()
        yield f"{name} is NaN in one of them alone, at {count} places, first {place}"
        return
    finite = np.isfinite(first)
    scale = np.abs(first[finite]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        wrong = (first != second) & ~(np.abs(first - second) <= tolerance * scale)
    wrong &= ~np.isnan(first)
    if wrong.any():
        worst = np.nanargmax(np.where(wrong, np.abs(first - second), -1.0))
        place = np.unravel_index(worst, first.shape)
        where = [int(index) for index in place]
        yield f"{name} is {second[place]} at {where}, and {first[place]} was expected"


def flat_facts(facts: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a result's facts with its path."""
    if isinstance(facts, Mapping):
        for key, inner in facts.items():
            yield from flat_facts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(facts, list | tuple):
        for place, inner in enumerate(facts):
            yield from flat_facts(inner, f"{path}[{place}]")
    else:
        yield path, facts
