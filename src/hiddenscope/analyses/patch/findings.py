"""Findings: what pairs gave, averaged and labelled, and what it shows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.patch.cells import Patched, Plan
from hiddenscope.analyses.patch.pairs import TextPair
from hiddenscope.model import Model
from hiddenscope.sites import Site, summarise

if TYPE_CHECKING:
    import xarray

HALF = 0.5
LOOKS: Mapping[str, Mapping[str, str]] = {
    "effect": {"long_name": "effect", "units": "share of the logit difference", "meaning": "diverging"},
    "probability": {"long_name": "probability of the answer"},
    "kl": {"long_name": "KL from the clean run", "units": "nats"},
    "attribution": {
        "long_name": "effect as the gradient estimates it",
        "units": "share of the logit difference",
        "meaning": "diverging",
    },
    "swap": {"units": "share of the logit difference", "meaning": "diverging"},
    "swap_window": {"units": "share of the logit difference", "meaning": "diverging"},
}


def data_of(
    model: Model, pairs: Sequence[TextPair], plan: Plan, made: Sequence[Patched], texts: Sequence[Any]
) -> "xarray.Dataset":
    """One Dataset: the mean over the pairs, and for several its standard error."""
    import xarray

    variables: dict[str, Any] = {}
    for part, dims in (("cells", ("site", "token")), ("along", ("site",))):
        for name in getattr(made[0], part):
            every = np.stack([getattr(one, part)[name] for one in made])
            look = {**LOOKS[name], **({"long_name": _swapped(name, plan)} if part == "along" else {})}
            variables[name] = (dims, every.mean(0).astype(np.float32), look)
            if len(made) > 1:
                error = every.std(0, ddof=1) / len(made) ** 0.5
                told = {"long_name": f"standard error of the {look['long_name']}", "units": look.get("units", "")}
                variables[f"{name}_error"] = (dims, error.astype(np.float32), told)
    data = xarray.Dataset(variables, {"site": [str(site) for site in plan.sites], **_coords(model, pairs[0])})
    for name, side in zip(("texts", "other_texts"), texts, strict=True):
        listed = [side] if isinstance(side, str) else list(side)
        if all(isinstance(text, str) for text in listed):
            data.attrs[name] = listed
    return data


def _swapped(name: str, plan: Plan) -> str:
    parts = any(site.part for site in plan.sites)
    tokens = "all tokens at once" if parts else "all tokens but the answer's at once"
    return tokens if name == "swap" else f"{tokens}, {plan.layers} layers from here up"


def _coords(model: Model, pair: TextPair) -> dict[str, Any]:
    """What stands in each column in the clean and (`other_`) in the corrupt text of the first pair."""
    columns = [(stack, column) for stack, some in pair.columns.items() for column in some]
    coords: dict[str, Any] = {}
    for side, prefix in enumerate(("", "other_")):
        fed = {stack: pair.targets if stack == "decoder" else pair.ids[side] for stack in pair.columns}
        places = [column[side] for _, column in columns]
        ids = [
            -1 if place is None else (fed[stack] or ())[place]
            for (stack, _), place in zip(columns, places, strict=True)
        ]
        coords[f"{prefix}position"] = "token", np.array([-1 if place is None else place for place in places])
        coords[f"{prefix}id"] = "token", np.array(ids)
        strings = ["" if i < 0 else model.encoder.string(i) for i in ids]
        coords[f"{prefix}string"] = "token", np.array([*strings, None], dtype=object)[:-1]
    if len(pair.columns) > 1:
        coords["stack"] = "token", np.array([*(str(stack) for stack, _ in columns), None], dtype=object)[:-1]
    return coords


def facts_of(
    model: Model,
    pairs: Sequence[TextPair],
    plan: Plan,
    made: Sequence[Patched],
    data: "xarray.Dataset",
    left_out: Sequence[Site],
) -> dict[str, Any]:
    """What was patched into what, both runs, where it matters, what it cost, and what was done otherwise."""
    base, source = ("corrupt", "clean") if plan.denoise else ("clean", "corrupt")
    first = pairs[0]
    facts: dict[str, Any] = {"pairs": len(pairs), "patched": f"states of the {source} run in the {base} run"}
    for name in ("answer", "other"):
        facts[name] = " /".join(dict.fromkeys(model.encoder.string(getattr(pair, name)) for pair in pairs))
    for name in made[0].runs:
        facts[name] = {
            side: float(np.mean([one.runs[name][k] for one in made])) for k, side in enumerate(("clean", "corrupt"))
        }
    if plan.window > 1:
        facts["tokens at a time"] = f"{plan.window}, from each token on"
    measure = "effect" if plan.exact else "attribution"
    facts |= _largest(data, measure) | _where(data, plan, pairs[0], measure)
    if plan.exact and plan.estimate:
        facts["exact against estimate"] = _agreement(data, made)
    same = ~np.any([one.changed for one in made], 0) & np.isfinite(data[measure].to_numpy())
    facts["exactly zero"] = (
        f"{int(same.sum())} of {int(np.isfinite(data[measure].to_numpy()).sum())} cells: both runs have one state there"
    )
    facts |= _swaps(data, plan)
    if plan.exact:
        plain = sum(int(one.changed.sum()) for one in made)
        fed = sum(one.tokens for one in made)
        facts["cost"] = {
            "cells computed": plain,
            "passes": sum(one.passes for one in made),
            "tokens through the model": fed,
        }
        checks = [one.check for one in made if one.check]
        if checks:
            facts["largest effect computed again alone"] = max(
                checks, key=lambda c: abs(c["in the sweep"] - c["alone"])
            )
    told = [*(note for pair in pairs for note in pair.notes), *(note for one in made for note in one.notes)]
    notes = list(dict.fromkeys(told))
    notes += [f"{summarise(left_out)} cannot be changed and is left out"] if left_out else []
    if any(None in column for some in first.columns.values() for column in some):
        notes.append("the texts have different lengths: tokens that only one has are gaps")
    return facts | ({"notes": notes} if notes else {})


def _token(data: "xarray.Dataset", column: int) -> str:
    """A token as both texts have it."""
    names = [str(data[name].values[column]) for name in ("string", "other_string")]
    return names[0] if names[0] == names[1] else f"{names[0]} /{names[1]}"


def _largest(data: "xarray.Dataset", measure: str) -> dict[str, Any]:
    values = data[measure].to_numpy()
    if not np.isfinite(values).any():
        return {}
    site, token = np.unravel_index(np.nanargmax(np.abs(values)), values.shape)
    where = {"site": str(data["site"].values[site]), "token": _token(data, int(token))}
    return {"largest effect": {measure: values[site, token], **where}}


def _where(data: "xarray.Dataset", plan: Plan, pair: TextPair, measure: str) -> dict[str, Any]:
    """Up to which site the tokens that differ carry half of the answer, and from which on the token it is read at."""
    values, sites = data[measure].to_numpy(), [str(site) for site in plan.sites]
    both = (data["id"].values >= 0) & (data["other_id"].values >= 0)  # a gap holds no state that could be exchanged
    differ = np.flatnonzero((data["id"].values != data["other_id"].values) & both)
    stacks = data["stack"].values if "stack" in data.coords else np.full(data.sizes["token"], None)
    answers = np.flatnonzero((data["position"].values == pair.at[0]) & (stacks != "encoder") & both)
    facts: dict[str, Any] = {}
    for name, columns in (("tokens that differ", differ), ("token of the answer", answers)):
        if not len(columns):
            continue
        token = int(columns[np.argmax(np.nan_to_num(values[:, columns]).max(0))])
        over = np.flatnonzero(np.nan_to_num(values[:, token]) >= HALF)
        found: dict[str, Any] = {"token": _token(data, token), "largest": float(np.nanmax(values[:, token]))}
        if len(over):
            found["half or more"] = [sites[over[0]], sites[over[-1]]]
        facts[name] = found
    return facts


def _agreement(data: "xarray.Dataset", made: Sequence[Patched]) -> dict[str, Any]:
    """How the estimate goes with the exact effect, over the cells where a state was exchanged for another."""
    changed = np.any([one.changed for one in made], 0)
    x, y = (data[name].to_numpy()[changed].astype(np.float64) for name in ("effect", "attribution"))
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return {"cells": len(x)}
    return {
        "correlation": float(np.corrcoef(x, y)[0, 1]),
        "cells": len(x),
        "mean absolute error": float(np.abs(x - y).mean()),
    }


def _swaps(data: "xarray.Dataset", plan: Plan) -> dict[str, Any]:
    """What whole layers bring, in the middle and late; windows are named by their first site."""
    if "swap_window" not in data:
        return {}
    values = data["swap_window"].to_numpy()
    rows = [row for row, site in enumerate(plan.sites) if site.stack != "encoder" and np.isfinite(values[row])]
    if not rows:
        return {}
    third = max(1, len(rows) // 3)
    parts = {"early": rows[:third], "middle": rows[third : len(rows) - third], "late": rows[len(rows) - third :]}
    told: dict[str, Any] = {name: float(values[some].mean()) for name, some in parts.items() if some}
    best = max(rows, key=lambda row: values[row])
    told["largest"] = {"effect": float(values[best]), "from": str(plan.sites[best]), "layers": plan.layers}
    return {"windows of whole layers": told}
