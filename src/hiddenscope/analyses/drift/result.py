"""Put a comparison into a result: errors by site and token, lines, and facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.drift.cause import Cause, ChangedWeight
from hiddenscope.analyses.drift.errors import CELLS, Errors, main_site, stack_of
from hiddenscope.analyses.drift.facts import (
    DriftingSiteFacts,
    ErrorFacts,
    Hint,
    PairingFacts,
    Restored,
    SmallestFaultFacts,
    WorstTokenFacts,
)
from hiddenscope.analyses.drift.live_model import LOGITS
from hiddenscope.analyses.drift.moved import moved_layers, moved_tokens
from hiddenscope.analyses.drift.noise import MARGIN
from hiddenscope.analyses.drift.search import FaultyModule
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
    """What was compared, and the outcome.

    `compared` is `parts`, each on equal input, or whole `passes`.
    """

    names: tuple[str, str]
    errors: Errors
    tokens: Mapping[str | None, Tokens]
    sources: Sequence[Mapping[str, object]]
    pairing: PairingFacts
    compared: str = "passes"
    fault: FaultyModule | None = None
    hints: list[Hint] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    changed_weights: Sequence[ChangedWeight] = ()
    cause: Cause | None = None
    dtypes_differ: bool = False


def drift_facts(
    comparison: DriftComparison, baseline: Facts | None
) -> dict[str, object]:
    """Return the findings of a comparison."""
    errors, fault = comparison.errors, comparison.fault
    verdicts, drifting = errors.verdicts, errors.drifting
    largest = max(verdicts, key=lambda name: verdicts[name].beyond)
    first = drifting[0] if drifting else None
    shown = verdicts[first or largest]
    facts: dict[str, object] = {
        "drifted": bool(drifting),
        "explained_by": _explained_by(comparison),
        "unexplained": _unexplained(comparison),
        "first_site": first,
        "module": fault.path if first and fault else None,
        "beyond": shown.beyond,
        "own_code": bool(first and fault and fault.own_code),
        "error": shown.error,
        "envelope": shown.envelope,
        "as_given": _as_given(errors),
        "systematic": _systematic(errors, first),
        "smallest_fault": _smallest_fault(errors),
        "changed_weights": _changed_weights(comparison),
        "first_token": None if first is None else _worst_token(comparison, first),
        "largest": {"site": largest, "beyond": verdicts[largest].beyond},
        "drifting_sites": [_drifting_site(errors, name) for name in drifting],
        "moved_layers": moved_layers(errors),
        "moved_tokens": moved_tokens(errors, comparison.tokens),
        "reference": comparison.names[0],
        "candidate": comparison.names[1],
        "compared": comparison.compared,
        "texts": max(tokens.count for tokens in comparison.tokens.values()),
        "tokens": sum(map(len, comparison.tokens.values())),
        "sites": len(verdicts),
        "passes": _passes(errors),
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


def _changed_weights(comparison: DriftComparison) -> list[Facts]:
    """List the weights that differ, and by what share of their norm."""
    changed: list[Facts] = []
    for weight in comparison.changed_weights:
        changed.append({"name": weight.name, "relative": weight.relative})
    return changed


def _drifting_site(errors: Errors, name: str) -> DriftingSiteFacts:
    """Say how far a site is off."""
    verdict = errors.verdicts[name]
    return {"site": name, "beyond": verdict.beyond, "error": verdict.error}


def _passes(errors: Errors) -> dict[str, float]:
    """Count the passes of each side; a pass of some layers is a part of one."""
    passes: dict[str, float] = {}
    for side, count in errors.passes.items():
        passes[side] = int(count) if count == int(count) else count
    return passes


def _explained_by(comparison: DriftComparison) -> str | None:
    """Name what explains the difference, where it is not a fault of code."""
    if comparison.errors.drifting:
        return None if comparison.cause is None else comparison.cause.explained_by
    # On equal terms nothing is left: only the dtypes made a difference.
    return "dtype" if comparison.dtypes_differ else None


def _unexplained(comparison: DriftComparison) -> DriftingSiteFacts | None:
    """Return the first site that still differs with the candidate's own weights."""
    cause = comparison.cause
    if cause is None or cause.errors is None:
        return None
    return _drifting_site(cause.errors, cause.errors.drifting[0])


def _as_given(errors: Errors) -> ErrorFacts | None:
    """Find the largest difference of the sides in their own dtypes and kernels."""
    largest: tuple[str, float] | None = None
    for name in errors.verdicts:
        error = _largest(errors, name, "relative")
        if not math.isnan(error) and (largest is None or error > largest[1]):
            largest = name, error
    if largest is None:
        return None
    return {"site": largest[0], "error": largest[1]}


def _systematic(errors: Errors, site: str | None) -> dict[str, object] | None:
    """Describe the strongest systematic difference at a site, or anywhere."""
    findings = {}
    for name, finding in errors.findings.items():
        if finding.patterns and site in (None, main_site(name)):
            findings[name] = finding
    if not findings:
        return None
    part = max(findings, key=lambda name: findings[name].beyond)
    pattern = findings[part].strongest
    return {
        "part": part,
        "pattern": pattern.name,
        "size": pattern.size,
        "beyond": pattern.beyond,
    }


def _smallest_fault(errors: Errors) -> SmallestFaultFacts | None:
    """Say how small a systematic difference these texts would have shown."""
    sizes = {}
    for name, finding in errors.findings.items():
        if finding.patterns:
            sizes[name] = finding.smallest
    if not sizes:
        return None
    part = max(sizes, key=lambda name: sizes[name])
    typical = float(np.median(list(sizes.values())))
    return {"typical": typical, "largest": sizes[part], "part": part}


def _largest(errors: Errors, name: str, measure: str) -> float:
    values = errors.cells.get(name, {}).get(measure)
    if values is None or not np.isfinite(values).any():
        return math.nan
    return float(np.nanmax(values))


def _worst_token(comparison: DriftComparison, name: str) -> WorstTokenFacts | None:
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


def _consequences(comparison: DriftComparison) -> dict[str, object] | None:
    """Describe what changes in the predictions."""
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


def drift_dataset(
    comparison: DriftComparison, patterns: SitePatterns
) -> xarray.Dataset:
    """Lay out errors by site and token, and along the selected sites."""
    import xarray

    errors, tokens = comparison.errors, comparison.tokens
    measured = [name for name in errors.verdicts if name in errors.cells]
    sites = [Site.parse(name) for name in measured if name != LOGITS]
    selected = {LOGITS, *map(str, select(patterns, sites, owner="this comparison"))}
    names = [name for name in measured if name in selected]
    variables: dict[str, object] = {}
    for measure, attributes in CELLS.items():
        if any(measure in errors.cells[name] for name in names):
            values = _by_site_and_token(errors, tokens, names, measure)
            variables[measure] = (("site", "token"), values, dict(attributes))
    for line, numbers in _along_sites(errors, names).items():
        values = np.array(numbers, dtype=np.float32)
        if np.isfinite(values).any():
            attributes = {"long_name": LINES[line], "scale": "log"}
            variables[line] = ("site", values, attributes)
    return xarray.Dataset(variables, {"site": names, **_token_coordinates(tokens)})


def _by_site_and_token(
    errors: Errors,
    tokens: Mapping[str | None, Tokens],
    names: Sequence[str],
    measure: str,
) -> NDArray[np.float32]:
    """Fill an array over the tokens of all stacks, one stack after another."""
    starts, count = {}, 0
    for stack, stack_tokens in tokens.items():
        starts[stack] = count
        count += len(stack_tokens)
    cells = np.full((len(names), count), np.nan, dtype=np.float32)
    for row, name in enumerate(names):
        values = errors.cells[name].get(measure)
        if values is not None:
            start = starts[stack_of(name, tokens)]
            cells[row, start : start + len(values)] = values
    return cells


def _along_sites(errors: Errors, names: Sequence[str]) -> dict[str, list[float]]:
    lines: dict[str, list[float]] = {line: [] for line in LINES}
    total_before = math.nan
    for name in names:
        total = _largest(errors, name, "relative")
        inherited = _largest(errors, name, "inherited")
        lines["total_error"].append(total)
        lines["local_error"].append(_largest(errors, name, "local"))
        lines["inherited_error"].append(inherited)
        lines["envelope"].append(errors.verdicts[name].envelope)
        lines["gain"].append(inherited / total_before if total_before else math.nan)
        lines["beyond"].append(errors.verdicts[name].beyond)
        total_before = total
    return lines


def _token_coordinates(tokens: Mapping[str | None, Tokens]) -> dict[str, object]:
    stacks = list(tokens.values())
    strings: list[str] = []
    for stack_tokens in stacks:
        strings += stack_tokens.strings
    text = np.concatenate([stack_tokens.text for stack_tokens in stacks])
    position = np.concatenate([stack_tokens.positions for stack_tokens in stacks])
    ids = np.concatenate([stack_tokens.ids for stack_tokens in stacks])
    coordinates: dict[str, object] = {
        "text": ("token", text),
        "position": ("token", position),
        "id": ("token", ids),
        # The None keeps numpy from making fixed-width strings.
        "string": ("token", np.array([*strings, None], dtype=object)[:-1]),
    }
    if len(stacks) > 1:
        names = [str(stack) for stack in tokens]
        counts = [len(stack_tokens) for stack_tokens in stacks]
        coordinates["stack"] = ("token", np.repeat(names, counts).astype(object))
    return coordinates
