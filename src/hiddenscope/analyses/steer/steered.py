"""A direction in one model: which vector is added where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hiddenscope.analyses.steer.story import Origin
from hiddenscope.directions.direction import (
    EVERY_SITE,
    Direction,
    changed_sites,
    in_stack,
    spread_layers,
)
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Scale
from hiddenscope.passes.edit import plan
from hiddenscope.results.report import read_report
from hiddenscope.sites import Site

# The share of its norm that is left of a direction along the first token's state.
PARALLEL = 1e-6
USE = "Give hs.Direction.between(model, toward, away) or hs.Direction.of(vector)."


@dataclass(frozen=True)
class Steered:
    """A direction in one model: a vector for each changed site.

    `sites` are steered one at a time.
    """

    vectors: Mapping[Site, Tensor]
    sites: tuple[Site, ...]
    origin: Origin


def in_model(direction: Direction, model: Model) -> Steered:
    """Select the sites of a direction in a model, and check that its vectors fit."""
    if not isinstance(direction, Direction):
        raise StatesError(
            "direction must be a Direction", f"got {type(direction).__name__}", USE
        )
    anatomy = model.anatomy
    known, default = anatomy.sites, spread_layers(model)
    if EVERY_SITE not in direction.vectors:
        known = default = anatomy.select(tuple(direction.vectors))
    selected = default
    if direction.sites is not None:
        selected = anatomy.select(direction.sites)
    changed = changed_sites(known, selected, upwards=direction.upwards)
    plan(anatomy, dict.fromkeys(changed, Scale(1.0)))
    vectors = {}
    for site in changed:
        vectors[site] = direction.vector_at(site, anatomy.width(site))
    facts = {"origin": "vector", **direction.facts}
    if direction.fitted:
        # Sites where a probe is used that was fitted at another.
        elsewhere = []
        for site in changed:
            name = str(site)
            fitted = direction.fitted.get(EVERY_SITE, name)
            if direction.fitted.get(name, fitted) != name:
                elsewhere.append(str(site))
        facts["used_elsewhere"] = elsewhere
    facts["spare_first"] = direction.spare_first
    return Steered(vectors, selected, read_report(Origin, facts))


def without_first_tokens(
    model: Model, steered: Steered, texts: Sequence[tuple[int, ...]]
) -> Steered:
    """Project the mean state of the texts' first tokens out of the vectors."""
    ids = tuple(texts)
    if model.anatomy.stacks[0].causal:
        # The first token sees no other, so nothing else need be run.
        ids = tuple(text[:1] for text in texts)
    states = model.capture(Inputs(ids), list(steered.vectors))
    vectors = {}
    for site, vector in steered.vectors.items():
        stack = in_stack(states, site)
        first_tokens = torch.from_numpy(stack.tokens.positions == 0)
        first = stack[site].double().cpu()[first_tokens].mean(0)
        rest = vector - (vector @ first) / (first @ first) * first
        if float(rest.norm()) <= PARALLEL * float(vector.norm()):
            raise StatesError(
                "spare_first leaves nothing",
                f"the direction at {site} lies along the mean state of the first"
                " tokens",
                "Leave `spare_first` out, or give another direction.",
            )
        vectors[site] = rest
    return replace(steered, vectors=vectors)
