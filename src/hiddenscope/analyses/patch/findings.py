"""Findings of patching: effects as labelled arrays, and the facts they show."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.patch.cells import Effects, Plan
from hiddenscope.analyses.patch.contrast import EncodedContrast
from hiddenscope.analyses.patch.facts import (
    AgreementFacts,
    ClearFacts,
    LayerWindowsFacts,
)
from hiddenscope.measures.grouped import reach_of_all, standard_error
from hiddenscope.model import Model
from hiddenscope.results import Facts
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Dims,
    Variables,
    column_coords,
    site_names,
    stack_column,
    to_dataset,
)
from hiddenscope.states.arrays import Floats, Ints

if TYPE_CHECKING:
    import xarray

HALF = 0.5
ATTRIBUTES: Mapping[str, Attributes] = {
    "effect": {
        "long_name": "effect",
        "units": "share of the logit difference",
        "meaning": "diverging",
    },
    "probability": {"long_name": "probability of the answer"},
    "kl": {"long_name": "KL from the clean run", "units": "nats"},
    "attribution": {
        "long_name": "effect estimated by attribution",
        "units": "share of the logit difference",
        "meaning": "diverging",
    },
    "swap": {"units": "share of the logit difference", "meaning": "diverging"},
    "swap_window": {"units": "share of the logit difference", "meaning": "diverging"},
}


def patch_dataset(
    model: Model,
    contrast: EncodedContrast,
    plan: Plan,
    effects: Sequence[Effects],
    groups: Ints,
) -> "xarray.Dataset":
    """Return the mean over the contrasts, labelled by the tokens of the first one.

    It comes with its standard error if there are several independent groups.
    """
    variables: Variables = {}
    for name in effects[0].cells:
        values = np.stack([of_contrast.cells[name] for of_contrast in effects])
        attributes = ATTRIBUTES[name]
        dims: Dims = ("site", "token")
        if plan.together:
            dims, values = "site", values[..., 0]
        variables |= _averaged(name, dims, values, attributes, groups)
    if plan.together:
        variables |= _intervals(effects, plan, groups)
    for name in effects[0].along:
        values = np.stack([of_contrast.along[name] for of_contrast in effects])
        attributes = {**ATTRIBUTES[name], "long_name": _swap_name(name, plan)}
        variables |= _averaged(name, "site", values, attributes, groups)
    coords: Coordinates = {"site": site_names(plan.sites)}
    if plan.together:
        coords |= _index_coords(plan)
    else:
        coords |= _coords(model, contrast)
    return to_dataset(variables, coords)


def _averaged(
    name: str, dims: Dims, values: Floats, attributes: Attributes, groups: Ints
) -> Variables:
    """Average over the contrasts, with the standard error where there is one."""
    mean = values.mean(0).astype(np.float32)
    variables: Variables = {name: (dims, mean, attributes)}
    error = standard_error(values, groups)
    if error is not None:
        error_attributes: Attributes = {
            "long_name": f"standard error of the {attributes['long_name']}",
            "units": attributes.get("units", ""),
        }
        variables[f"{name}_error"] = dims, error.astype(np.float32), error_attributes
    return variables


def _intervals(effects: Sequence[Effects], plan: Plan, groups: Ints) -> Variables:
    """Return intervals that hold all effects at once with a probability of 95%.

    Without several independent groups there are none.
    """
    measure = "effect" if plan.exact else "attribution"
    values = np.stack([of_contrast.cells[measure][..., 0] for of_contrast in effects])
    reach = reach_of_all(values, groups)
    if reach is None:
        return {}
    mean = values.mean(0)
    low: Attributes = {"long_name": "lower end", "units": ATTRIBUTES["effect"]["units"]}
    high: Attributes = {**low, "long_name": "upper end"}
    return {"low": ("site", mean - reach, low), "high": ("site", mean + reach, high)}


def _index_coords(plan: Plan) -> Coordinates:
    """Label sites by their layer and by the number of their head or neuron."""
    layers, numbers = [], []
    for site in plan.sites:
        layers.append(-1 if site.layer is None else site.layer)
        numbers.append(-1 if site.index is None else site.index)
    return {
        "layer": ("site", np.array(layers)),
        "number": ("site", np.array(numbers)),
    }


def _swap_name(name: str, plan: Plan) -> str:
    tokens = "all tokens"
    if any(site.part in ("", "mid") for site in plan.sites):
        tokens = "all tokens except the answer's"
    if name == "swap":
        return f"one layer, {tokens}"
    return f"{plan.layers} layers from here up, {tokens}"


def _coords(model: Model, contrast: EncodedContrast) -> Coordinates:
    """Label the columns by the clean prompt, and (`other_`) by the corrupt one."""
    coords: Coordinates = {}
    for side, prefix in enumerate(("", "other_")):
        tokens: list[tuple[int, int, str] | None] = []
        for stack, columns in contrast.columns.items():
            ids = contrast.inputs.of(stack).ids[side]
            for column in columns:
                position = column[side]
                if position is None:
                    tokens.append(None)
                else:
                    string = model.text_encoder.string(ids[position])
                    tokens.append((position, ids[position], string))
        coords |= column_coords(tokens, prefix=prefix)
    if len(contrast.columns) > 1:
        counts = {str(stack): len(pairs) for stack, pairs in contrast.columns.items()}
        coords["stack"] = "token", stack_column(counts)
    return coords


def patch_facts(
    model: Model,
    contrasts: Sequence[EncodedContrast],
    plan: Plan,
    effects: Sequence[Effects],
    data: "xarray.Dataset",
) -> Facts:
    """Return what was patched, what it restored and what that cost."""
    measure = "effect" if plan.exact else "attribution"
    values = data[measure].to_numpy()
    patched = np.any([of_contrast.patched for of_contrast in effects], 0)
    if plan.together:
        patched = patched[:, 0]
    finite = np.isfinite(values)
    string = model.text_encoder.string
    answers = [
        {"answer": string(contrast.answer), "other": string(contrast.other)}
        for contrast in contrasts
    ]
    facts: dict[str, Any] = {
        "contrasts": len(contrasts),
        "into": plan.into,
        "answers": answers,
    }
    for name in effects[0].runs:
        clean, corrupt = np.mean([of_contrast.runs[name] for of_contrast in effects], 0)
        facts[name] = {"clean": clean, "corrupt": corrupt}
    facts |= {
        "window": plan.window,
        "measure": measure,
        "cells": {
            "total": int(finite.sum()),
            "equal": int((finite & ~patched).sum()),
        },
        "largest": _largest(values, data),
        "differing_token": None,
        "answer_token": None,
    }
    if plan.together:
        facts["positions"] = None if plan.positions is None else list(plan.positions)
        facts["clear"] = _clear(data)
    else:
        facts |= _carriers(data, plan, contrasts[0], measure)
    if plan.exact and plan.attribution:
        facts["agreement"] = _agreement(data, patched)
    if "swap_window" in data:
        facts["layer_windows"] = _layer_windows(data, plan)
    if plan.exact:
        facts["cost"] = {
            "cells": sum(int(of_contrast.patched.sum()) for of_contrast in effects),
            "passes": sum(of_contrast.passes for of_contrast in effects),
            "tokens": sum(of_contrast.tokens for of_contrast in effects),
        }
        checks = [of_contrast.check for of_contrast in effects if of_contrast.check]
        facts["check"] = max(
            checks,
            key=lambda check: abs(check["sweep"] - check["alone"]),
            default=None,
        )
    return facts


def _token(data: "xarray.Dataset", column: int) -> dict[str, str]:
    """Return a token as the clean and the corrupt prompt have it."""
    return {
        "token": str(data["string"].values[column]),
        "other_token": str(data["other_string"].values[column]),
    }


def _largest(values: NDArray[Any], data: "xarray.Dataset") -> Facts | None:
    if not np.isfinite(values).any():
        return None
    row, *columns = np.unravel_index(np.nanargmax(np.abs(values)), values.shape)
    if not columns:
        site = str(data["site"].values[row])
        return {"value": float(values[row]), "site": site}
    column = columns[0]
    return {
        "value": float(values[row, column]),
        "site": str(data["site"].values[row]),
        **_token(data, int(column)),
    }


def _clear(data: "xarray.Dataset") -> list[ClearFacts] | None:
    """Return the sites whose corrected interval excludes 0; None without intervals."""
    if "low" not in data:
        return None
    measure = "effect" if "effect" in data else "attribution"
    effects, low, high = (data[name].to_numpy() for name in (measure, "low", "high"))
    rows = np.flatnonzero((low > 0) | (high < 0))
    clear: list[ClearFacts] = []
    for row in sorted(rows, key=lambda row: -abs(effects[row])):
        clear.append(
            {
                "site": str(data["site"].values[row]),
                "effect": float(effects[row]),
                "low": float(low[row]),
                "high": float(high[row]),
            }
        )
    return clear


def _carriers(
    data: "xarray.Dataset", plan: Plan, contrast: EncodedContrast, measure: str
) -> dict[str, Facts]:
    """Return where two tokens carry half of the answer or more.

    They are the token that differs, and the token at which the answer is read.
    """
    values = data[measure].to_numpy()
    sites = site_names(plan.sites)
    clean, corrupt = data["id"].values, data["other_id"].values
    # A gap holds no state that could be patched.
    paired = (clean >= 0) & (corrupt >= 0)
    answering = paired & (data["position"].values == contrast.at[0])
    if "stack" in data.coords:
        answering &= data["stack"].values != "encoder"
    tokens = {"differing_token": paired & (clean != corrupt), "answer_token": answering}
    facts: dict[str, Facts] = {}
    for name, mask in tokens.items():
        columns = np.flatnonzero(mask)
        if not len(columns):
            continue
        largest = np.nan_to_num(values[:, columns]).max(0)
        column = int(columns[np.argmax(largest)])
        half = np.flatnonzero(np.nan_to_num(values[:, column]) >= HALF)
        half_at = [sites[row] for row in half]
        facts[name] = {
            **_token(data, column),
            "largest": float(np.nanmax(values[:, column])),
            "half_at": half_at,
            "from": half_at[0] if half_at else None,
            "to": half_at[-1] if half_at else None,
        }
    return facts


def _agreement(data: "xarray.Dataset", patched: NDArray[np.bool_]) -> AgreementFacts:
    """Compare attribution with the exact effect, over the cells that were patched."""
    exact = data["effect"].to_numpy()[patched].astype(np.float64)
    estimate = data["attribution"].to_numpy()[patched].astype(np.float64)
    # Two points, or equal ones, have no correlation.
    if len(exact) < 3 or exact.std() == 0 or estimate.std() == 0:
        return {"cells": len(exact), "correlation": None, "mean_absolute_error": None}
    return {
        "cells": len(exact),
        "correlation": float(np.corrcoef(exact, estimate)[0, 1]),
        "mean_absolute_error": float(np.abs(exact - estimate).mean()),
    }


def _layer_windows(data: "xarray.Dataset", plan: Plan) -> LayerWindowsFacts | None:
    """Return the window of layers with the largest effect, by the site it begins at."""
    values = data["swap_window"].to_numpy()
    rows = [
        row
        for row, site in enumerate(plan.sites)
        if site.stack != "encoder" and np.isfinite(values[row])
    ]
    if not rows:
        return None
    largest = max(rows, key=lambda row: values[row])
    return {
        "layers": plan.layers,
        "largest": {"value": float(values[largest]), "site": str(plan.sites[largest])},
    }
