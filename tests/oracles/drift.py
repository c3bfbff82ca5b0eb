"""Drift: each block of the candidate on the input of the reference's, by plain hooks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from tests.oracles.plain import NoTable, Plain, texts_of


def drift(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return the errors of states and parts, and what is summed up of them.

    What rounding makes is left out: `ulp`, `mismatched`, `envelope` and `beyond`; and
    `gain`, a ratio of errors that may be rounding.
    """
    data = result.data
    candidate = asked["candidate"]
    if isinstance(candidate, tuple):
        candidate = candidate[0]
    candidate = getattr(candidate, "module", candidate)
    if not isinstance(candidate, torch.nn.Module) or "local" not in data:
        raise NoTable("no oracle of a candidate that is not a model")
    sides = Plain(model.module), Plain(candidate)
    names = ("relative", "local", "inherited", "max_abs", "cosine")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for row in texts_of(model, asked["texts"], asked.get("targets")):
        for name, values in _of_text(sides, row, data).items():
            columns[name].append(values)
    numbers = {name: np.concatenate(parts, 1) for name, parts in columns.items()}
    for name, summed in (
        ("relative", "total_error"),
        ("local", "local_error"),
        ("inherited", "inherited_error"),
    ):
        with np.errstate(invalid="ignore"):
            known = np.isfinite(numbers[name]).any(1)
            largest = np.full(len(known), np.nan)
            largest[known] = np.nanmax(numbers[name][known], 1)
            numbers[summed] = largest
    return {name: values for name, values in numbers.items() if name in data}


def _of_text(
    sides: tuple[Plain, Plain], row: Mapping[str, Any], data: Any
) -> dict[str, np.ndarray]:
    """Return the errors [site, token] of one text."""
    reference, candidate = sides
    sites = data["site"].values.tolist()
    states = [site for site in sites if site != "logits"]
    right, true = reference.run(row, states)
    wrong, moved = candidate.run(row, states)
    true["logits"], moved["logits"] = right, wrong
    tokens = max(state.shape[1] for state in true.values())
    if len(reference.shapes) == 2:
        raise NoTable("no oracle of two stacks")
    numbers = {
        name: np.full((len(sites), tokens), np.nan)
        for name in ("relative", "local", "inherited", "max_abs", "cosine")
    }
    for number, site in enumerate(sites):
        expected, found = true[site][0], moved[site][0]
        size = expected.norm(dim=-1)
        numbers["relative"][number] = (found - expected).norm(dim=-1) / size
        numbers["max_abs"][number] = (found - expected).abs().amax(-1)
        cosine = torch.cosine_similarity(expected, found, dim=-1)
        numbers["cosine"][number] = cosine
        local = found
        numbers["inherited"][number] = 0
        below = _below(site, sites, reference.depth)
        if below is not None:
            local = _given(candidate, row, (below, true[below]), site)[0]
            numbers["inherited"][number] = (found - local).norm(dim=-1) / size
        numbers["local"][number] = (local - expected).norm(dim=-1) / size
    return numbers


def _below(site: str, sites: list[str], depth: int) -> str | None:
    """Return the state that the part which makes a site takes in."""
    if site == "logits":
        return "final" if "final" in sites else f"layer.{depth}"
    if site == "final":
        return f"layer.{depth}"
    layer = int(site.split(".")[1])
    return f"layer.{layer - 1}" if layer else None


def _given(
    plain: Plain, row: Mapping[str, Any], entry: tuple[str, Tensor], site: str
) -> Tensor:
    """Return a state of a run in which another is forced."""
    below, state = entry
    record = [] if site == "logits" else [site]
    logits, states = plain.run(row, record, {below: lambda _: state})
    return states.get(site, logits)
