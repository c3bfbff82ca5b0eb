"""Which layers and which tokens moved, and how far."""

from collections.abc import Mapping

import numpy as np

from hiddenscope.analyses.drift.errors import Errors, stack_of
from hiddenscope.analyses.drift.facts import MovedLayerFacts, MovedTokenFacts
from hiddenscope.analyses.drift.live_model import LOGITS
from hiddenscope.states import Tokens

MOST_TOKENS = 8


def moved_layers(errors: Errors) -> list[MovedLayerFacts]:
    """List the sites by how far their own weights or code move them, most first."""
    moved: list[MovedLayerFacts] = []
    for name in errors.verdicts:
        cells = errors.cells.get(name, {})
        local, total = cells.get("local"), cells.get("relative")
        if name == LOGITS or local is None or total is None:
            continue
        if not np.isfinite(local).any() or not np.nanmax(total) > 0:
            continue
        moved.append(
            MovedLayerFacts(
                site=name,
                local=float(np.nanmedian(local)),
                total=float(np.nanmedian(total)),
                largest=float(np.nanmax(local)),
            )
        )
    return sorted(moved, key=lambda layer: -layer["local"])


def moved_tokens(
    errors: Errors, tokens: Mapping[str | None, Tokens]
) -> list[MovedTokenFacts]:
    """List the tokens whose output moved most, or their last state without a head."""
    states = []
    for name in errors.verdicts:
        if name != LOGITS and "relative" in errors.cells.get(name, {}):
            states.append(name)
    if not states:
        return []
    last = states[-1]
    moved = errors.cells[last]["relative"]
    divergences = errors.cells.get(LOGITS, {}).get("kl")
    if divergences is not None and len(divergences) != len(moved):
        divergences = None
    ranking = moved if divergences is None else divergences
    order = np.argsort(-np.nan_to_num(ranking, nan=-1.0), kind="stable")
    of_stack = tokens[stack_of(last, tokens)]
    listed: list[MovedTokenFacts] = []
    for row in order[:MOST_TOKENS]:
        if not moved[row] > 0:
            continue
        listed.append(
            MovedTokenFacts(
                text=int(of_stack.text[row]),
                position=int(of_stack.positions[row]),
                token=of_stack.strings[row],
                error=float(moved[row]),
                kl=None if divergences is None else float(divergences[row]),
            )
        )
    return listed
