"""Put a comparison into a result: errors by site and token, lines, and the report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hiddenscope.analyses.drift.cause import Cause, ChangedWeight
from hiddenscope.analyses.drift.errors import (
    CELLS,
    MARGIN,
    Errors,
    main_site,
    stack_of,
)
from hiddenscope.analyses.drift.live_model import LOGITS, Side
from hiddenscope.analyses.drift.search import FaultyModule
from hiddenscope.analyses.drift.story import (
    Baseline,
    Consequences,
    DriftingSite,
    DriftReport,
    Hint,
    MovedLayer,
    MovedToken,
    Noise,
    Pairing,
    Passes,
    Restored,
    SelfCheck,
    SiteBeyond,
    SiteError,
    SmallestFault,
    Systematic,
    WeightChange,
    WorstToken,
)
from hiddenscope.errors import FileError
from hiddenscope.files import PathLike, check_file, replacing
from hiddenscope.results.dataset import Variables, to_dataset, token_coords
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Tokens

if TYPE_CHECKING:
    import xarray


MOST_TOKENS = 8
FORMAT = "hiddenscope.drift-baseline/1"
# A model of a thousand layers takes about a hundred thousand bytes.
MOST_BYTES = 2**24


@dataclass
class DriftComparison:
    """What was compared, and the outcome.

    `compared` is `parts`, each on equal input, or whole `passes`.
    """

    sides: tuple[Side, Side]
    errors: Errors
    pairing: Pairing
    compared: Literal["parts", "passes"] = "passes"
    fault: FaultyModule | None = None
    hints: list[Hint] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    changed_weights: Sequence[ChangedWeight] = ()
    cause: Cause | None = None
    dtypes_differ: bool = False

    @property
    def tokens(self) -> Mapping[str | None, Tokens]:
        """Return the tokens of each stack."""
        return self.errors.tokens

    def report(self, baseline: Baseline | None) -> DriftReport:
        """Return the findings of a comparison."""
        errors = self.errors
        fault = self.fault
        cause = self.cause
        verdicts = errors.verdicts
        drifting = errors.drifting
        largest = max(verdicts, key=lambda name: verdicts[name].beyond)
        first = drifting[0] if drifting else None
        shown = verdicts[first or largest]
        # On equal terms nothing is left: only the dtypes made a difference.
        explained_by: Any = "dtype" if self.dtypes_differ else None
        if drifting:
            explained_by = None if cause is None else cause.explained_by
        # The first site that still differs with the candidate's own weights.
        unexplained = None
        if cause is not None and cause.errors is not None:
            unexplained = _drifting_site(cause.errors, cause.errors.drifting[0])
        reference, candidate = self.sides
        return DriftReport(
            drifted=bool(drifting),
            explained_by=explained_by,
            unexplained=unexplained,
            first_site=first,
            module=fault.path if first and fault else None,
            beyond=shown.beyond,
            own_code=bool(first and fault and fault.own_code),
            error=shown.error,
            envelope=shown.envelope,
            as_given=_as_given(errors),
            systematic=_systematic(errors, first),
            smallest_fault=_smallest_fault(errors),
            changed_weights=[
                WeightChange(name=weight.name, relative=weight.relative)
                for weight in self.changed_weights
            ],
            first_token=None if first is None else self._worst_token(first),
            largest=SiteBeyond(site=largest, beyond=verdicts[largest].beyond),
            drifting_sites=[_drifting_site(errors, name) for name in drifting],
            moved_layers=_moved_layers(errors),
            moved_tokens=self._moved_tokens(),
            reference=reference.name,
            candidate=candidate.name,
            compared=self.compared,
            texts=max(tokens.count for tokens in self.tokens.values()),
            tokens=sum(map(len, self.tokens.values())),
            sites=len(verdicts),
            passes=Passes(**errors.passes),
            noise=Noise(made_of=errors.noise_sources, margin=MARGIN),
            self_check=SelfCheck(
                observing_changed_nothing=errors.observing_changed_nothing
            ),
            pairing=self.pairing,
            hints=self.hints if first else [],
            consequences=self._consequences(),
            notes=errors.notes,
            baseline=baseline,
        )

    def _worst_token(self, name: str) -> WorstToken | None:
        """Find the token at which a site is farthest off."""
        cells = self.errors.cells.get(name, {})
        values = cells.get("local", cells.get("relative"))
        if values is None or not np.isfinite(values).any():
            return None
        return WorstToken(**self._token(name, int(np.nanargmax(values))))

    def _token(self, name: str, row: int) -> dict[str, Any]:
        tokens = self.tokens[stack_of(name, self.tokens)]
        return {
            "text": int(tokens.text[row]),
            "position": int(tokens.positions[row]),
            "token": tokens.strings[row],
        }

    def _moved_tokens(self) -> list[MovedToken]:
        """List the tokens whose output moved most, or without a head their state."""
        cells = self.errors.cells
        states = [
            name
            for name in self.errors.verdicts
            if name != LOGITS and "relative" in cells.get(name, {})
        ]
        if not states:
            return []
        moved = cells[states[-1]]["relative"]
        divergences = cells.get(LOGITS, {}).get("kl", np.empty(0))
        has_head = len(divergences) == len(moved)
        ranking = divergences if has_head else moved
        order = np.argsort(-np.nan_to_num(ranking, nan=-1.0), kind="stable")
        listed = []
        for row in order[:MOST_TOKENS]:
            kl = float(divergences[row]) if has_head else None
            if moved[row] > 0:
                token = self._token(states[-1], row)
                listed.append(MovedToken(**token, error=float(moved[row]), kl=kl))
        return listed

    def _consequences(self) -> Consequences | None:
        """Describe what changes in the predictions."""
        errors = self.errors
        if not errors.kl:
            return None
        kl = np.concatenate(errors.kl)
        changed = np.concatenate(errors.top1_changed)
        return Consequences(
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            top1_changed=int(changed.sum()),
            of=len(kl),
            restored=self.restored if errors.drifting else [],
        )

    def dataset(self, patterns: SitePatterns) -> xarray.Dataset:
        """Lay out errors by site and token, and along the selected sites."""
        errors = self.errors
        measured = [name for name in errors.verdicts if name in errors.cells]
        sites = [Site.parse(name) for name in measured if name != LOGITS]
        selected = {LOGITS, *map(str, select(patterns, sites, owner="this comparison"))}
        names = [name for name in measured if name in selected]
        # The tokens of all stacks, one stack after another.
        *ends, count = accumulate(map(len, self.tokens.values()))
        starts = dict(zip(self.tokens, [0, *ends], strict=True))
        variables: Variables = {}
        for measure, attributes in CELLS.items():
            if not any(measure in errors.cells[name] for name in names):
                continue
            cells = np.full((len(names), count), np.nan, dtype=np.float32)
            for row, name in enumerate(names):
                values = errors.cells[name].get(measure)
                if values is not None:
                    start = starts[stack_of(name, self.tokens)]
                    cells[row, start : start + len(values)] = values
            variables[measure] = (("site", "token"), cells, attributes)
        total, local, inherited = (
            np.array([_largest(errors, name, measure) for name in names])
            for measure in ("relative", "local", "inherited")
        )
        # No error before has no gain: it becomes a gap.
        before = np.array([math.nan, *total])[:-1]
        gain = inherited / np.where(before == 0, math.nan, before)
        verdicts = [errors.verdicts[name] for name in names]
        envelope = [verdict.envelope for verdict in verdicts]
        beyond = [verdict.beyond for verdict in verdicts]
        for line, numbers, words in (
            ("total_error", total, "error of the whole pass"),
            ("local_error", local, "local error, on equal input"),
            ("inherited_error", inherited, "inherited error"),
            ("envelope", envelope, "noise envelope"),
            ("gain", gain, "inherited error over the error before"),
            ("beyond", beyond, "times over the envelope"),
        ):
            if np.isfinite(numbers).any():
                variables[line] = (
                    "site",
                    np.array(numbers, np.float32),
                    {"long_name": words, "scale": "log"},
                )
        stacks = list(map(str, self.tokens)) if len(self.tokens) > 1 else []
        coords = token_coords(list(self.tokens.values()), stacks)
        return to_dataset(variables, {"site": names, **coords})


def _drifting_site(errors: Errors, name: str) -> DriftingSite:
    """Say how far a site is off."""
    verdict = errors.verdicts[name]
    return DriftingSite(site=name, beyond=verdict.beyond, error=verdict.error)


def _as_given(errors: Errors) -> SiteError | None:
    """Find the largest difference of the sides in their own dtypes and kernels."""
    sizes = [(_largest(errors, name, "relative"), name) for name in errors.verdicts]
    finite = [pair for pair in sizes if not math.isnan(pair[0])]
    if not finite:
        return None
    error, site = max(finite, key=itemgetter(0))
    return SiteError(site=site, error=error)


def _systematic(errors: Errors, site: str | None) -> Systematic | None:
    """Describe the strongest systematic difference at a site, or anywhere."""
    findings = {name: test for name, test in errors.findings.items() if test.patterns}
    here = [name for name in findings if site in (None, main_site(name))]
    if not here:
        return None
    part = max(here, key=lambda name: findings[name].beyond)
    pattern = findings[part].strongest
    return Systematic(
        part=part, pattern=pattern.name, size=pattern.size, beyond=pattern.beyond
    )


def _smallest_fault(errors: Errors) -> SmallestFault | None:
    """Say how small a systematic difference these texts would have shown."""
    sizes = {
        name: test.smallest for name, test in errors.findings.items() if test.patterns
    }
    if not sizes:
        return None
    part = max(sizes, key=sizes.__getitem__)
    typical = float(np.median(list(sizes.values())))
    return SmallestFault(typical=typical, largest=sizes[part], part=part)


def _largest(errors: Errors, name: str, measure: str) -> float:
    values = errors.cells.get(name, {}).get(measure)
    if values is None or not np.isfinite(values).any():
        return math.nan
    return float(np.nanmax(values))


def _moved_layers(errors: Errors) -> list[MovedLayer]:
    """List the sites by how far their own weights or code move them, most first."""
    moved = []
    for name in errors.verdicts:
        cells = errors.cells.get(name, {})
        local = cells.get("local")
        total = cells.get("relative")
        if name == LOGITS or local is None or total is None:
            continue
        if np.isfinite(local).any() and np.nanmax(total) > 0:
            moved.append(
                MovedLayer(
                    site=name,
                    local=float(np.nanmedian(local)),
                    total=float(np.nanmedian(total)),
                    largest=float(np.nanmax(local)),
                )
            )
    return sorted(moved, key=lambda layer: -layer.local)


def read_baseline(path: PathLike) -> dict[str, float] | None:
    """Read the accepted error of each site; None if there is no file.

    >>> read_baseline("no/such/file.json") is None
    True
    """
    problem = f"Cannot use {str(Path(path))[:200]!r} as a baseline"
    if not os.path.exists(path):
        return None
    try:
        check_file(path, problem, MOST_BYTES)
        stored = json.loads(Path(path).read_bytes())
        if not isinstance(stored, dict) or not isinstance(stored.get("accepted"), dict):
            raise ValueError("it has no table `accepted`")
        if stored.get("format") != FORMAT:
            raise ValueError(
                f"its format is {str(stored.get('format'))[:100]}, not {FORMAT}"
            )
        levels = {}
        for site, level in stored["accepted"].items():
            is_number = isinstance(level, int | float) and not isinstance(level, bool)
            if not is_number or not 0 <= level < math.inf:
                raise ValueError(f"the level of {site[:100]} is {str(level)[:100]}")
            levels[site] = float(level)
        return levels
    except FileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = f"it is damaged or of another kind ({error})"
        raise FileError(
            problem, reason, "Remove it to have it written anew."
        ) from error


def write_baseline(path: PathLike, levels: Mapping[str, float]) -> int:
    """Write the finite errors of sites, and return their number."""
    accepted = {site: level for site, level in levels.items() if math.isfinite(level)}
    with replacing(path) as fresh:
        fresh.write_text(
            json.dumps({"format": FORMAT, "accepted": accepted}, indent=1), "utf-8"
        )
    return len(accepted)
