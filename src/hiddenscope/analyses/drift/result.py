"""Put a comparison into a result: errors by site and token, errors along the sites, and
the facts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.drift.errors import CELLS, Errors, main_site, stack_of
from hiddenscope.analyses.drift.noise import MARGIN
from hiddenscope.analyses.drift.observe import LOGITS
from hiddenscope.analyses.drift.search import FaultyModule, Hint
from hiddenscope.results import Facts
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Tokens

if TYPE_CHECKING:
    import xarray

LINES = {
    "total_error": "error of the whole pass",
    "local_error": "local error, on equal input",
    "inherited_error": "inherited error",
    "envelope": "noise envelope",
    "gain": "inherited error over the error before",
    "beyond": "times over the envelope",
}


@dataclass
class DriftComparison:
    """What was compared, and what came out.

    `compared` is `parts`, each on equal input, or whole `passes`. `restored` says how
    much of the change of the output disappears when the reference's states are put
    back.
    """

    names: tuple[str, str]
    errors: Errors
    tokens: dict[str | None, Tokens]
    sources: Sequence[Mapping[str, Any]]
    pairing: dict[str, Any]
    compared: str = "passes"
    fault: FaultyModule | None = None
    hints: list[Hint] = field(default_factory=list)
    restored: list[dict[str, Any]] = field(default_factory=list)
    changed_weights: Sequence[tuple[str, float]] = ()


def facts_of(comparison: DriftComparison, baseline: Facts | None) -> dict[str, Any]:
    """List the findings of a comparison."""
    errors, fault = comparison.errors, comparison.fault
    drifting = errors.drifting
    first = drifting[0] if drifting else None
    largest = max(errors.beyond, key=lambda name: errors.beyond[name])
    shown = first or largest
    facts: dict[str, Any] = {
        "drifted": bool(drifting),
        "first_site": first,
        "module": fault.path if first and fault else None,
        "beyond": errors.beyond[shown],
        "own_code": bool(first and fault and fault.own_code),
        "error": errors.error[shown],
        "envelope": errors.envelope[shown],
        "as_given": _as_given(errors),
        "systematic": _systematic(errors, first),
        "smallest_fault": _smallest_fault(errors),
        "changed_weights": [
            {"name": name, "relative": share}
            for name, share in comparison.changed_weights
        ],
        "first_token": None if first is None else _worst_token(comparison, first),
        "largest": {"site": largest, "beyond": errors.beyond[largest]},
        "drifting_sites": [_site_facts(errors, name) for name in drifting],
        "reference": comparison.names[0],
        "candidate": comparison.names[1],
        "compared": comparison.compared,
        "texts": max(tokens.count for tokens in comparison.tokens.values()),
        "tokens": sum(map(len, comparison.tokens.values())),
        "sites": len(errors.beyond),
        "passes": {side: _plain_number(count) for side, count in errors.passes.items()},
        "noise": {"made_of": errors.noise_sources, "margin": MARGIN},
        "self_check": {"observing_changed_nothing": errors.observing_changed_nothing},
        "pairing": comparison.pairing,
        "hints": comparison.hints if first else [],
        "consequences": _consequences(comparison),
        "notes": errors.notes,
    }
    if baseline is not None:
        facts["baseline"] = baseline
    return facts


def _plain_number(count: float) -> float:
    return int(count) if count == int(count) else count


def _site_facts(errors: Errors, name: str) -> dict[str, Any]:
    return {"site": name, "beyond": errors.beyond[name], "error": errors.error[name]}


def _as_given(errors: Errors) -> dict[str, Any] | None:
    """Find the largest difference between the two as they were given, each in its own
    dtype and kernel.
    """
    worst: dict[str, float] = {}
    for name in errors.beyond:
        worst[name] = _largest(errors, name, "relative")
    measured = {name: error for name, error in worst.items() if not math.isnan(error)}
    if not measured:
        return None
    site = max(measured, key=lambda name: measured[name])
    return {"site": site, "error": measured[site]}


def _systematic(errors: Errors, site: str | None) -> dict[str, Any] | None:
    """Describe the strongest systematic difference of a site's parts; of all parts if
    no site differs.
    """
    parts = [name for name, finding in errors.findings.items() if finding.patterns]
    parts = [name for name in parts if site is None or main_site(name) == site]
    if not parts:
        return None
    part = max(parts, key=lambda name: errors.findings[name].beyond)
    finding = errors.findings[part]
    pattern = finding.strongest
    return {
        "part": part,
        "pattern": pattern.name,
        "size": pattern.size,
        "beyond": finding.beyond,
    }


def _smallest_fault(errors: Errors) -> dict[str, Any] | None:
    """Tell how small a systematic difference these texts would have shown, as a share
    of a part's output.
    """
    sizes = {
        name: finding.smallest
        for name, finding in errors.findings.items()
        if finding.patterns
    }
    if not sizes:
        return None
    part = max(sizes, key=lambda name: sizes[name])
    return {
        "typical": float(np.median(list(sizes.values()))),
        "largest": sizes[part],
        "part": part,
    }


def _largest(errors: Errors, name: str, measure: str) -> float:
    values = errors.cells.get(name, {}).get(measure)
    if values is None or not np.isfinite(values).any():
        return math.nan
    return float(np.nanmax(values))


def _worst_token(comparison: DriftComparison, name: str) -> dict[str, Any] | None:
    """Find the token at which a site is farthest off."""
    cells = comparison.errors.cells.get(name, {})
    values = cells.get("local", cells.get("relative"))
    if values is None or not np.isfinite(values).any():
        return None
    tokens = comparison.tokens[stack_of(name, comparison.tokens)]
    row = int(np.nanargmax(values))
    return {
        "text": int(tokens.text[row]),
        "position": int(tokens.positions[row]),
        "token": tokens.strings[row],
    }


def _consequences(comparison: DriftComparison) -> dict[str, Any] | None:
    errors = comparison.errors
    if not errors.kl:
        return None
    kl, changed = np.concatenate(errors.kl), np.concatenate(errors.top1_changed)
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_changed": int(changed.sum()),
        "of": len(kl),
        "restored": comparison.restored if errors.drifting else [],
    }


def dataset_of(comparison: DriftComparison, patterns: SitePatterns) -> xarray.Dataset:
    """Lay out errors by site and token, and along the sites that were asked for."""
    import xarray

    errors, tokens = comparison.errors, comparison.tokens
    names = _selected(
        patterns, [name for name in errors.beyond if name in errors.cells]
    )
    variables: dict[str, Any] = {}
    for measure, attributes in CELLS.items():
        if any(measure in errors.cells[name] for name in names):
            values = _by_site_and_token(errors, tokens, names, measure)
            variables[measure] = (("site", "token"), values, dict(attributes))
    variables |= _along_sites(errors, names)
    return xarray.Dataset(variables, {"site": names, **_token_coordinates(tokens)})


def _selected(patterns: SitePatterns, names: list[str]) -> list[str]:
    sites = [Site.parse(name) for name in names if name != LOGITS]
    selected = {str(site) for site in select(patterns, sites)} | {LOGITS}
    return [name for name in names if name in selected]


def _by_site_and_token(
    errors: Errors,
    tokens: Mapping[str | None, Tokens],
    names: Sequence[str],
    measure: str,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Fill an array over the tokens of all stacks, one after another."""
    counts = [len(stack_tokens) for stack_tokens in tokens.values()]
    starts = dict(zip(tokens, np.cumsum([0, *counts]), strict=False))
    cells = np.full((len(names), sum(counts)), np.nan, dtype=np.float32)
    for row, name in enumerate(names):
        values = errors.cells[name].get(measure)
        if values is not None:
            start = starts[stack_of(name, tokens)]
            cells[row, start : start + len(values)] = values
    return cells


def _along_sites(errors: Errors, names: Sequence[str]) -> dict[str, Any]:
    lines = {
        "total_error": [_largest(errors, name, "relative") for name in names],
        "local_error": [_largest(errors, name, "local") for name in names],
        "inherited_error": [_largest(errors, name, "inherited") for name in names],
        "envelope": [errors.envelope[name] for name in names],
        "beyond": [errors.beyond[name] for name in names],
    }
    lines["gain"] = [math.nan]
    for before, inherited in zip(
        lines["total_error"], lines["inherited_error"][1:], strict=False
    ):
        lines["gain"].append(inherited / before if before else math.nan)
    variables: dict[str, Any] = {}
    for key, long_name in LINES.items():
        values = np.array(lines[key], dtype=np.float32)
        if np.isfinite(values).any():
            variables[key] = ("site", values, {"long_name": long_name, "scale": "log"})
    return variables


def _token_coordinates(tokens: Mapping[str | None, Tokens]) -> dict[str, Any]:
    stacks = list(tokens.values())
    strings: list[str] = []
    for stack_tokens in stacks:
        strings += stack_tokens.strings
    coordinates: dict[str, Any] = {
        "text": (
            "token",
            np.concatenate([stack_tokens.text for stack_tokens in stacks]),
        ),
        "position": (
            "token",
            np.concatenate([stack_tokens.positions for stack_tokens in stacks]),
        ),
        "id": ("token", np.concatenate([stack_tokens.ids for stack_tokens in stacks])),
        # The None keeps numpy from making fixed-width strings.
        "string": ("token", np.array([*strings, None], dtype=object)[:-1]),
    }
    if len(stacks) > 1:
        names = [str(stack) for stack in tokens]
        counts = [len(stack_tokens) for stack_tokens in stacks]
        coordinates["stack"] = ("token", np.repeat(names, counts).astype(object))
    return coordinates
