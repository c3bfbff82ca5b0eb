"""What is patched and what comes of it: labelled arrays, and the report."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.patch.cells import (
    Effects,
    PatchedValues,
    Plan,
    patch_contrast,
    patched_at,
)
from hiddenscope.analyses.patch.story import (
    Agreement,
    Carrier,
    CellCount,
    Clear,
    Cost,
    LargestEffect,
    LayerWindows,
    PatchReport,
    Runs,
)
from hiddenscope.causes.contrast import Contrast
from hiddenscope.causes.encoding import EncodedContrast, ask_contrasts
from hiddenscope.causes.measures import Into
from hiddenscope.errors import SiteError, TextError
from hiddenscope.measures.grouped import reach_of_all, standard_error
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes.edit import changeable
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    column_coords,
    site_names,
    stack_column,
    to_dataset,
)
from hiddenscope.results.report import SiteValue
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states.arrays import Ints

if TYPE_CHECKING:
    import xarray

# The methods that ablate: what they put into the clean run.
ABLATIONS: dict[str, PatchedValues] = {
    "zero": "zero",
    "mean": "mean",
    "resample": "run",
}
HALF = 0.5
# The ends of an interval.
ENDS = ("low", "high")
SHARE: Attributes = {"units": "share of the logit difference", "meaning": "diverging"}
ATTRIBUTES: Mapping[str, Attributes] = {
    "effect": {"long_name": "effect", **SHARE},
    "probability": {"long_name": "probability of the answer"},
    "kl": {"long_name": "KL from the clean run", "units": "nats"},
    "attribution": {"long_name": "effect estimated by attribution", **SHARE},
    "swap": SHARE,
    "swap_window": SHARE,
}


def patch_all(
    model: ModelLike,
    contrasts: Contrast | Sequence[Contrast],
    *,
    sites: SitePatterns,
    into: Into,
    window: int | Sequence[int] | None,
    layers: int | None,
    method: str,
) -> Result:
    """Patch every site and token of every contrast, and average the effects."""
    model = as_model(model)
    selected, left_out = _changeable_sites(model, sites)
    plan = _plan(model, selected, into, window, layers, method)
    asked = ask_contrasts(model, contrasts, one_form=not plan.together)
    encodings, groups, copies = asked
    # Each site has a cell for every token, or one for all, and where whole layers are
    # patched one for the layer and one for a window of layers.
    cells = 2 * len(encodings) * bool(plan.layers)
    for encoded in encodings:
        cells += 1 if plan.together else sum(map(len, encoded.columns.values()))
    means = _means(model, encodings, plan)
    with progress.track("Patching", total=len(selected) * cells) as advance:
        effects = [
            patch_contrast(model, encoded, plan, advance, means)
            for encoded in encodings
        ]
    data = patch_dataset(model, encodings[0], plan, effects, groups)
    data.attrs |= asked.texts()
    notes = [*asked.notes()]
    for of_contrast in effects:
        notes += of_contrast.notes
    if left_out:
        notes.append(f"{summarise(left_out)} cannot be changed and was left out.")
    if any(None in pair for pair in chain(*encodings[0].columns.values())):
        notes.append(
            "The prompts have different lengths: tokens that only one of them has are"
            " gaps."
        )
    report = PatchReport(
        **patch_report(model, encodings, plan, effects, data),
        method=method,
        copies=copies,
        groups=asked.group_count,
        notes=list(dict.fromkeys(notes)),
    )
    return Result("patch", data, report, model.source(selected[-1].stack))


def _plan(
    model: Model,
    sites: tuple[Site, ...],
    into: Into,
    window: int | Sequence[int] | None,
    layers: int | None,
    method: str,
) -> Plan:
    """Return what is patched, from the arguments of `patch`."""
    positions = None
    together = window is None and all(site.index is not None for site in sites)
    size = 1
    if isinstance(window, int):
        size = window
    elif window is not None:
        for position in window:
            if isinstance(position, bool) or not isinstance(position, int):
                raise TextError(
                    "window must be a number of tokens or a list of positions",
                    f"got {position!r:.60} among the positions",
                    "Give integers; -1 is the last token of the clean prompt.",
                )
        positions = tuple(window)
        together = True
    if layers is None:
        layers = max(1, model.anatomy.stacks[-1].depth // 6)
    # A window of layers is made of whole states.
    if together or any(site.index is not None for site in sites):
        layers = 0
    if method in ABLATIONS:
        into = "clean"
    return Plan(
        sites,
        size,
        layers,
        into,
        exact=method != "attribution",
        attribution=method in ("attribution", "both"),
        together=together,
        positions=positions,
        values=ABLATIONS.get(method, "run"),
    )


def _means(
    model: Model, contrasts: Sequence[EncodedContrast], plan: Plan
) -> dict[Site, Tensor]:
    """Return the mean state at each patched site, over all tokens of all prompts."""
    if plan.values != "mean":
        return {}
    sites = {patched_at(model, site).site for site in plan.sites}
    sums: dict[Site, Tensor] = {}
    tokens: Counter[Site] = Counter()
    for contrast in contrasts:
        states = model.capture(contrast.inputs, tuple(sorted(sites)))
        for site in sites:
            rows = states[site].double()
            sums[site] = sums.get(site, 0) + rows.sum(0)
            tokens[site] += len(rows)
    return {site: total / tokens[site] for site, total in sums.items()}


def _changeable_sites(
    model: Model, patterns: SitePatterns
) -> tuple[tuple[Site, ...], list[Site]]:
    """Return the sites whose states can be changed, and those whose cannot."""
    selected = model.anatomy.select(patterns)
    if not selected:
        raise SiteError(
            "No sites to patch",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    # All heads of a block are changed in one place.
    places = {site: patched_at(model, site).site for site in selected}
    able = set(changeable(model.anatomy, dict.fromkeys(places.values()))[0])
    left_out = [site for site in selected if places[site] not in able]
    return tuple(site for site in selected if places[site] in able), left_out


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
    tokens_swapped = "all tokens"
    if any(site.part in ("", "mid") for site in plan.sites):
        tokens_swapped = "all tokens except the answer's"
    swaps = {
        "swap": f"one layer, {tokens_swapped}",
        "swap_window": f"{plan.layers} layers from here up, {tokens_swapped}",
    }
    for name, known in ATTRIBUTES.items():
        if name not in effects[0].numbers:
            continue
        values = np.stack([of_contrast.numbers[name] for of_contrast in effects])
        attributes = known.copy()
        if name in swaps:
            attributes["long_name"] = swaps[name]
        dims = ("site", "token")[: values.ndim - 1]
        variables[name] = dims, values.mean(0).astype(np.float32), attributes
        error = standard_error(values, groups)
        if error is not None:
            error_attributes: Attributes = {
                "long_name": f"standard error of the {attributes['long_name']}",
                "units": attributes.get("units", ""),
            }
            error = error.astype(np.float32)
            variables[f"{name}_error"] = dims, error, error_attributes
    if plan.together:
        variables |= joint_intervals(effects, plan, groups)
    coords: Coordinates = {"site": site_names(plan.sites)}
    if plan.together:
        layers, numbers = [], []
        for site in plan.sites:
            layers.append(-1 if site.layer is None else site.layer)
            numbers.append(-1 if site.index is None else site.index)
        coords |= {
            "layer": ("site", np.array(layers)),
            "number": ("site", np.array(numbers)),
        }
    else:
        # The tokens of the clean prompt, and (`other_`) of the corrupt one.
        for side, prefix in enumerate(("", "other_")):
            tokens: list[tuple[int, int, str] | None] = []
            for stack, columns in contrast.columns.items():
                ids = contrast.inputs.of(stack).ids[side]
                # A gap has no position.
                token_at: dict[int | None, Any] = {}
                for position, token in enumerate(ids):
                    string = model.text_encoder.string(token)
                    token_at[position] = position, token, string
                tokens += [token_at.get(column[side]) for column in columns]
            coords |= column_coords(tokens, prefix=prefix)
        if len(contrast.columns) > 1:
            counts = {
                str(stack): len(pairs) for stack, pairs in contrast.columns.items()
            }
            coords["stack"] = "token", stack_column(counts)
    return to_dataset(variables, coords)


def joint_intervals(effects: Sequence[Effects], plan: Plan, groups: Ints) -> Variables:
    """Return intervals that hold all effects at once with a probability of 95%.

    Without several independent groups there are none.
    """
    measure = "effect" if plan.exact else "attribution"
    values = np.stack([of_contrast.numbers[measure] for of_contrast in effects])
    reach = reach_of_all(values, groups)
    if reach is None:
        return {}
    mean = values.mean(0)
    low: Attributes = {"long_name": "lower end", "units": SHARE["units"]}
    high: Attributes = {**low, "long_name": "upper end"}
    return {"low": ("site", mean - reach, low), "high": ("site", mean + reach, high)}


def patch_report(
    model: Model,
    contrasts: Sequence[EncodedContrast],
    plan: Plan,
    effects: Sequence[Effects],
    data: "xarray.Dataset",
) -> dict[str, Any]:
    """Return what was patched, what it restored and what that cost, as fields of the
    report.
    """
    measure = "effect" if plan.exact else "attribution"
    values = data[measure].values
    patched = np.any([of_contrast.patched for of_contrast in effects], 0)
    finite = np.isfinite(values)
    fields: dict[str, Any] = {
        "contrasts": len(contrasts),
        "into": plan.into,
        "answers": [contrast.answers(model) for contrast in contrasts],
        "window": plan.window,
        "measure": measure,
        "cells": CellCount(
            total=int(finite.sum()), equal=int((finite & ~patched).sum())
        ),
        "largest": None,
        "differing_token": None,
        "answer_token": None,
    }
    if finite.any():
        place = np.unravel_index(np.nanargmax(np.abs(values)), values.shape)
        # Patched together, tokens have no column of their own.
        token = {} if plan.together else _token(data, int(place[1]))
        site = str(plan.sites[place[0]])
        fields["largest"] = LargestEffect(
            value=float(values[place]), site=site, **token
        )
    for name in effects[0].runs:
        clean, corrupt = np.mean([of_contrast.runs[name] for of_contrast in effects], 0)
        fields[name] = Runs(clean=float(clean), corrupt=float(corrupt))
    if plan.together:
        fields["positions"] = None if plan.positions is None else list(plan.positions)
        fields["clear"] = clear_sites(data)
    else:
        fields |= _carriers(data, plan, contrasts[0], measure)
    if plan.exact and plan.attribution:
        exact = data["effect"].values[patched].astype(np.float64)
        estimate = data["attribution"].values[patched].astype(np.float64)
        correlation = error = None
        # Two points, or equal ones, have no correlation.
        if len(exact) >= 3 and exact.std() != 0 and estimate.std() != 0:
            correlation = float(np.corrcoef(exact, estimate)[0, 1])
            error = float(np.abs(exact - estimate).mean())
        fields["agreement"] = Agreement(
            cells=len(exact), correlation=correlation, mean_absolute_error=error
        )
    if "swap_window" in data:
        in_encoder = [site.stack == "encoder" for site in plan.sites]
        windows = np.where(in_encoder, np.nan, data["swap_window"].values)
        fields["layer_windows"] = None
        if np.isfinite(windows).any():
            row = np.nanargmax(windows)
            window = SiteValue(value=float(windows[row]), site=str(plan.sites[row]))
            fields["layer_windows"] = LayerWindows(layers=plan.layers, largest=window)
    if plan.exact:
        fields["cost"] = Cost(
            cells=sum(int(of_contrast.patched.sum()) for of_contrast in effects),
            passes=sum(of_contrast.passes for of_contrast in effects),
            tokens=sum(of_contrast.tokens for of_contrast in effects),
        )
        checks = [of_contrast.check for of_contrast in effects if of_contrast.check]
        fields["check"] = max(
            checks, key=lambda check: abs(check.sweep - check.alone), default=None
        )
    return fields


def _token(data: "xarray.Dataset", column: int) -> dict[str, str]:
    """Return a token as the clean and the corrupt prompt have it."""
    return {
        "token": str(data["string"].values[column]),
        "other_token": str(data["other_string"].values[column]),
    }


def clear_sites(data: "xarray.Dataset") -> list[Clear] | None:
    """Return the sites whose corrected interval excludes 0; None without intervals."""
    if "low" not in data:
        return None
    measure = "effect" if "effect" in data else "attribution"
    columns = [data[name].values.tolist() for name in ("site", measure, *ENDS)]
    clear = []
    for site, effect, low, high in zip(*columns, strict=True):
        if low > 0 or high < 0:
            clear.append(Clear(site=site, effect=effect, low=low, high=high))
    return sorted(clear, key=lambda part: -abs(part.effect))


def _carriers(
    data: "xarray.Dataset", plan: Plan, contrast: EncodedContrast, measure: str
) -> dict[str, Carrier]:
    """Return where two tokens carry half of the answer or more.

    They are the token that differs, and the token at which the answer is read.
    """
    values = data[measure].values
    sites = site_names(plan.sites)
    clean, corrupt = data["id"].values, data["other_id"].values
    # A gap holds no state that could be patched, nor a stack of which no site is read.
    paired = (clean >= 0) & (corrupt >= 0) & np.isfinite(values).any(0)
    answering = paired & (data["position"].values == contrast.at[0])
    if "stack" in data.coords:
        answering &= data["stack"].values != "encoder"
    tokens = {"differing_token": paired & (clean != corrupt), "answer_token": answering}
    carriers = {}
    for name, mask in tokens.items():
        columns = np.flatnonzero(mask)
        if not len(columns):
            continue
        largest = np.nan_to_num(values[:, columns]).max(0)
        column = int(columns[np.argmax(largest)])
        half = np.flatnonzero(np.nan_to_num(values[:, column]) >= HALF)
        half_at = [sites[row] for row in half]
        carriers[name] = Carrier(
            **_token(data, column),
            largest=float(np.nanmax(values[:, column])),
            half_at=half_at,
            from_=half_at[0] if half_at else None,
            to=half_at[-1] if half_at else None,
        )
    return carriers
