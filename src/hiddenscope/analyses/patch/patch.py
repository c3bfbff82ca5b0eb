"""Which states carry the answer? Put states of one run into another and see how much of
the answer comes along.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from hiddenscope import progress
from hiddenscope.analyses.patch.cells import Effects, Into, Plan, patch_contrast
from hiddenscope.analyses.patch.contrast import Contrast, EncodedContrast, encode
from hiddenscope.arguments import checked
from hiddenscope.errors import PassError, SiteError, TextError
from hiddenscope.measures.grouped import Ints, joined, standard_error
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes.edit import plan as changeable
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, SitePatterns, summarise

if TYPE_CHECKING:
    import xarray

Method: TypeAlias = Literal["exact", "attribution", "both"]

HALF = 0.5
LOOKS: Mapping[str, Mapping[str, str]] = {
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


@checked
def patch(
    model: ModelLike,
    contrasts: Contrast | Sequence[Contrast],
    *,
    sites: SitePatterns = "layer.*",
    into: Into = "corrupt",
    window: int = 1,
    layers: int | None = None,
    method: Method = "exact",
) -> Result:
    """Put states of the clean run into the corrupt run, one site and token at a time,
    and see what they restore.

    The effect is the share of the logit difference between `answer` and `other` that
    comes back: 0 as in the corrupt run, 1 as in the clean one. With `into="clean"`
    corrupt states go into the clean run, and it is the share that is lost. `window`
    tokens are exchanged at a time. Whole layers are exchanged too, `layers` of them in
    a row (0: none). Several contrasts are averaged; a copy counts once, and those of a
    `group` belong together. `method="attribution"` estimates all effects from one
    gradient.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> result = hs.patch(model, hs.Contrast([5, 6, 7], [5, 9, 7], answer=11, other=12))
    >>> result.data["effect"].sel(site="layer.0").values.round(5).tolist()
    [0.0, 1.0, 0.0]
    """
    model = as_model(model)
    listed = _listed(contrasts)
    _check_choice("into", into, get_args(Into))
    _check_choice("method", method, get_args(Method))
    if not model.anatomy.makes_logits:
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(
            f"Cannot patch {model.name}", "it has no head, and makes no logits", remedy
        )
    chosen, left_out = _changeable_sites(model, sites)
    plan = Plan(
        chosen,
        _check_count("window", window),
        _check_count(
            "layers",
            max(1, model.anatomy.stacks[-1].depth // 6) if layers is None else layers,
            least=0,
        ),
        into,
        exact=method != "attribution",
        attribution=method != "exact",
    )
    every = encode(model, listed)
    firsts = _firsts(every)
    listed, encoded = (
        [listed[number] for number in firsts],
        [every[number] for number in firsts],
    )
    groups = _groups(encoded)
    columns = sum(
        len(columns) for contrast in encoded for columns in contrast.columns.values()
    )
    with progress.track(
        "Patching", total=len(chosen) * (columns + 2 * len(encoded))
    ) as advance:
        effects = [
            patch_contrast(model, contrast, plan, advance) for contrast in encoded
        ]
    data = _data(model, encoded, plan, effects, groups)
    for name, side in (("texts", "clean"), ("other_texts", "corrupt")):
        if isinstance(listed[0].clean, str):
            data.attrs[name] = [getattr(contrast, side) for contrast in listed]
    facts = _facts(model, encoded, plan, effects, data)
    counts = {"copies": len(every) - len(encoded), "groups": int(groups.max()) + 1}
    notes = [
        *_notes_on_evidence(len(encoded), **counts),
        *_notes(encoded, effects, left_out),
    ]
    return Result(
        "patch",
        data,
        {**facts, **counts, "notes": notes},
        model.source(chosen[-1].stack),
    )


def _firsts(contrasts: Sequence[EncodedContrast]) -> list[int]:
    """Where each contrast comes first; a copy says nothing new."""
    first: dict[Hashable, int] = {}
    for number, contrast in enumerate(contrasts):
        first.setdefault(contrast.key, number)
    return list(first.values())


def _groups(contrasts: Sequence[EncodedContrast]) -> Ints:
    """Number the groups of contrasts that belong together: those that were named so,
    and those of the same prompts.
    """
    named: list[Hashable] = []
    for number, contrast in enumerate(contrasts):
        alone = ("contrast", number)
        named.append(alone if contrast.group is None else ("group", contrast.group))
    return joined([contrast.prompts for contrast in contrasts], named)


def _notes_on_evidence(contrasts: int, copies: int, groups: int) -> Iterator[str]:
    """Say which contrasts are no further evidence."""
    if copies:
        are = (
            "One pair of prompts is a copy"
            if copies == 1
            else f"{copies:,} pairs of prompts are copies"
        )
        yield f"{are} of another and counted once."
    if groups == 1 < contrasts:
        yield "All pairs of prompts belong together, so there is no standard error."


def _listed(contrasts: Contrast | Sequence[Contrast]) -> list[Contrast]:
    listed = [contrasts] if isinstance(contrasts, Contrast) else contrasts
    if (
        not isinstance(listed, list | tuple)
        or not listed
        or not all(isinstance(one, Contrast) for one in listed)
    ):
        remedy = "Give hs.Contrast(clean, corrupt, answer, other)."
        raise TextError(
            "contrasts must be a Contrast or a list of them",
            f"got {contrasts!r:.60}",
            remedy,
        )
    return list(listed)


def _check_choice(name: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        known = " or ".join(map(repr, choices))
        raise TextError(
            f"{name} must be {known}", f"got {given!r}", "Choose one of these."
        )


def _check_count(name: str, given: object, *, least: int = 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise TextError(
            f"{name} must be an integer >= {least}",
            f"got {given!r}",
            "Give such a number.",
        )
    return given


def _changeable_sites(
    model: Model, patterns: SitePatterns
) -> tuple[tuple[Site, ...], list[Site]]:
    """The chosen sites at which a state can be changed, and those at which it cannot."""
    chosen = model.anatomy.select(patterns)
    if not chosen:
        raise SiteError(
            "No sites to patch",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    kept: list[Site] = []
    for site in chosen:
        try:
            changeable(model.anatomy, {site: lambda states: states})
            kept.append(site)
        except SiteError:
            if len(chosen) == 1:
                raise
    return tuple(kept), [site for site in chosen if site not in kept]


def _data(
    model: Model,
    contrasts: Sequence[EncodedContrast],
    plan: Plan,
    effects: Sequence[Effects],
    groups: Ints,
) -> "xarray.Dataset":
    """The mean over the contrasts, with its standard error if there are several that do
    not belong together.
    """
    import xarray

    variables: dict[str, Any] = {}
    for part, dims in (("cells", ("site", "token")), ("along", ("site",))):
        for name in getattr(effects[0], part):
            values = np.stack([getattr(one, part)[name] for one in effects])
            look = {
                **LOOKS[name],
                **({"long_name": _swap_name(name, plan)} if part == "along" else {}),
            }
            variables[name] = (dims, values.mean(0).astype(np.float32), look)
            error = standard_error(values, groups)
            if error is not None:
                attrs = {
                    "long_name": f"standard error of the {look['long_name']}",
                    "units": look.get("units", ""),
                }
                variables[f"{name}_error"] = (dims, error.astype(np.float32), attrs)
    return xarray.Dataset(
        variables,
        {"site": [str(site) for site in plan.sites], **_coords(model, contrasts[0])},
    )


def _swap_name(name: str, plan: Plan) -> str:
    parts = all(site.part not in ("", "mid") for site in plan.sites)
    tokens = "all tokens" if parts else "all tokens except the answer's"
    return (
        f"one layer, {tokens}"
        if name == "swap"
        else f"{plan.layers} layers from here up, {tokens}"
    )


def _coords(model: Model, contrast: EncodedContrast) -> dict[str, Any]:
    """The tokens of the first contrast: of its clean prompt, and (`other_`) of its
    corrupt one.
    """
    columns = [
        (stack, column) for stack, pairs in contrast.columns.items() for column in pairs
    ]
    coords: dict[str, Any] = {}
    for side, prefix in enumerate(("", "other_")):
        tokens = {
            stack: contrast.inputs.of(stack).ids[side] for stack in contrast.columns
        }
        positions = [
            -1 if (position := column[side]) is None else position
            for _, column in columns
        ]
        ids = [
            -1 if position == -1 else tokens[stack][position]
            for (stack, _), position in zip(columns, positions, strict=True)
        ]
        coords[f"{prefix}position"] = "token", np.array(positions)
        coords[f"{prefix}id"] = "token", np.array(ids)
        coords[f"{prefix}string"] = (
            "token",
            _objects(["" if i < 0 else model.text_encoder.string(i) for i in ids]),
        )
    if len(contrast.columns) > 1:
        coords["stack"] = "token", _objects([str(stack) for stack, _ in columns])
    return coords


def _objects(strings: list[str]) -> "np.ndarray[Any, Any]":
    return np.array([*strings, None], dtype=object)[:-1]


def _facts(
    model: Model,
    contrasts: Sequence[EncodedContrast],
    plan: Plan,
    effects: Sequence[Effects],
    data: "xarray.Dataset",
) -> Facts:
    measure = "effect" if plan.exact else "attribution"
    exchanged, finite = (
        np.any([one.exchanged for one in effects], 0),
        np.isfinite(data[measure].to_numpy()),
    )
    strings = [
        (model.text_encoder.string(one.answer), model.text_encoder.string(one.other))
        for one in contrasts
    ]
    facts: dict[str, Any] = {
        "contrasts": len(contrasts),
        "into": plan.into,
        "answers": [{"answer": answer, "other": other} for answer, other in strings],
        **{
            name: {
                side: np.mean([one.runs[name][k] for one in effects])
                for k, side in enumerate(("clean", "corrupt"))
            }
            for name in effects[0].runs
        },
        "window": plan.window,
        "measure": measure,
        "cells": {
            "total": int(finite.sum()),
            "equal": int((finite & ~exchanged).sum()),
        },
        "largest": _largest(data[measure].to_numpy(), data),
        "differing_token": None,
        "answer_token": None,
        **_carriers(data, plan, contrasts[0], measure),
    }
    if plan.exact and plan.attribution:
        facts["agreement"] = _agreement(data, exchanged)
    if "swap_window" in data:
        facts["layer_windows"] = _layer_windows(data, plan)
    if plan.exact:
        facts["cost"] = {
            "cells": sum(int(one.exchanged.sum()) for one in effects),
            "passes": sum(one.passes for one in effects),
            "tokens": sum(one.tokens for one in effects),
        }
        checks = [one.check for one in effects if one.check]
        facts["check"] = (
            max(checks, key=lambda check: abs(check["sweep"] - check["alone"]))
            if checks
            else None
        )
    return facts


def _notes(
    contrasts: Sequence[EncodedContrast],
    effects: Sequence[Effects],
    left_out: Sequence[Site],
) -> list[str]:
    notes = [note for contrast in contrasts for note in contrast.notes]
    notes += [note for one in effects for note in one.notes]
    if left_out:
        notes.append(f"{summarise(left_out)} cannot be changed and was left out.")
    if any(
        None in column
        for columns in contrasts[0].columns.values()
        for column in columns
    ):
        notes.append(
            "The prompts have different lengths: tokens that only one of them has are"
            " gaps."
        )
    return list(dict.fromkeys(notes))


def _token(data: "xarray.Dataset", column: int) -> dict[str, str]:
    """A token as the clean and the corrupt prompt have it."""
    clean, corrupt = (
        str(data[name].values[column]) for name in ("string", "other_string")
    )
    return {"token": clean, "other_token": corrupt}


def _largest(values: "np.ndarray[Any, Any]", data: "xarray.Dataset") -> Facts | None:
    if not np.isfinite(values).any():
        return None
    row, column = np.unravel_index(np.nanargmax(np.abs(values)), values.shape)
    where = {"site": str(data["site"].values[row]), **_token(data, int(column))}
    return {"value": float(values[row, column]), **where}


def _carriers(
    data: "xarray.Dataset", plan: Plan, contrast: EncodedContrast, measure: str
) -> dict[str, Facts]:
    """Where the token that differs, and the token at which the answer is read, carry
    half of the answer or more.
    """
    values, sites = data[measure].to_numpy(), [str(site) for site in plan.sites]
    # A gap holds no state that could be exchanged.
    paired = (data["id"].values >= 0) & (data["other_id"].values >= 0)
    differing = np.flatnonzero((data["id"].values != data["other_id"].values) & paired)
    stacks = (
        data["stack"].values
        if "stack" in data.coords
        else np.full(data.sizes["token"], None)
    )
    answering = np.flatnonzero(
        (data["position"].values == contrast.at[0]) & (stacks != "encoder") & paired
    )
    facts: dict[str, Facts] = {}
    for name, columns in (("differing_token", differing), ("answer_token", answering)):
        if not len(columns):
            continue
        column = int(columns[np.argmax(np.nan_to_num(values[:, columns]).max(0))])
        half = np.flatnonzero(np.nan_to_num(values[:, column]) >= HALF)
        ends = (
            {"from": sites[half[0]], "to": sites[half[-1]]}
            if len(half)
            else {"from": None, "to": None}
        )
        carried = {"half_at": [sites[row] for row in half], **ends}
        facts[name] = {
            **_token(data, column),
            "largest": float(np.nanmax(values[:, column])),
            **carried,
        }
    return facts


def _agreement(data: "xarray.Dataset", exchanged: "np.ndarray[Any, Any]") -> Facts:
    """How attribution agrees with the exact effect, over the cells whose states differ
    between the runs.
    """
    exact, estimate = (
        data[name].to_numpy()[exchanged].astype(np.float64)
        for name in ("effect", "attribution")
    )
    if len(exact) < 3 or exact.std() == 0 or estimate.std() == 0:
        return {"cells": len(exact), "correlation": None, "mean_absolute_error": None}
    error = float(np.abs(exact - estimate).mean())
    return {
        "cells": len(exact),
        "correlation": float(np.corrcoef(exact, estimate)[0, 1]),
        "mean_absolute_error": error,
    }


def _layer_windows(data: "xarray.Dataset", plan: Plan) -> Facts | None:
    """The window of whole layers with the largest effect; windows are named by the site
    where they begin.
    """
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
