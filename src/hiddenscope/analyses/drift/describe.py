"""Describe the module at fault: collect what the hints need of a search."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor

from hiddenscope.analyses.drift.hints import argument_hints, hints
from hiddenscope.analyses.drift.noise import Noise
from hiddenscope.analyses.drift.observe import Side
from hiddenscope.analyses.drift.search import FaultyModule, Hint, Search
from hiddenscope.analyses.drift.suspect import Suspect
from hiddenscope.modules import hooks


def describe(search: Search, fault: FaultyModule) -> tuple[list[Hint], list[str]]:
    """Say what a fault looks like, the surest first, and what could not be tried."""
    described: list[Hint] = []
    notes: list[str] = []
    call = fault.call
    if call is not None and _runs_blocks(search, call.path):
        reference = _block_arguments(search, search.reference, call.path)
        candidate = _block_arguments(search, search.candidate, call.path)
        described += argument_hints(reference, candidate)
    elif call is not None and fault.made is not None:
        tried = hints(_suspect(search, fault, fault.made))
        described += tried
        notes += tried.notes
    return [*described, *fault.hints], notes


def _runs_blocks(search: Search, path: str) -> bool:
    return search.holds_blocks(path) and path not in search.reference.blocks.values()


def _suspect(search: Search, fault: FaultyModule, made: Tensor) -> Suspect:
    call = fault.call
    assert call is not None
    reference = search.reference
    role: Literal["module", "block"] = (
        "block" if call.path in reference.blocks.values() else "module"
    )
    return Suspect(
        fault.path,
        reference.part(call.path),
        search.candidate.part(fault.path),
        call,
        made,
        reference.device,
        role,
        same_make=not search.candidate.is_port,
        padded=search.batch.has_padding,
        mask=search.masks[-1],
        blocks={
            str(site): reference.part(path) for site, path in reference.blocks.items()
        },
        model=reference.module,
        distance=partial(_distance, search),
        rounding=Noise.assumed(made.dtype).envelope,
    )


def _distance(search: Search, expected: Tensor, other: Tensor) -> float:
    return search.gap(expected, other).worst


def _block_arguments(search: Search, side: Side, container: str) -> Mapping[str, Any]:
    """Record the named arguments that the first block inside a module is given."""
    prefix = f"{container}." if container else ""
    paths = [path for path in side.blocks.values() if path.startswith(prefix)]
    if not paths:
        return {}
    arguments: list[Mapping[str, Any]] = []

    def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments.append(dict(kwargs))

    with hooks.watching([hooks.Watch(side.part(paths[0]), "input", before)]):
        side.run(side.batch(search.inputs))
    return arguments[0] if arguments else {}
