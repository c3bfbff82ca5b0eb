"""Footing: raw states are compared with raw ones, and normed with normed."""

from collections.abc import Sequence
from typing import Any

import torch

from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import resume
from hiddenscope.sites import Site
from hiddenscope.states import Readable, States

SAID = {
    "raw": "raw layers; final is normed, so only its own states are told",
    "normed": "every layer as the model's final norm leaves it",
    "mixed": "every site as it is, raw layers beside a normed final",
}


def beside_others(sites: Sequence[Site], footing: str) -> frozenset[Site]:
    """The sites that are held against one another: without `final` on raw footing, unless there is nothing else."""
    raw = frozenset(site for site in sites if site.layer is not None)
    return raw if footing == "raw" and raw else frozenset(sites)


def footed(source: Any, captured: Any, sites: tuple[Site, ...]) -> tuple[Readable, tuple[Site, ...]]:
    """The layers of captured states, each taken through the model's own way out to `final`; which `layer.L` then is."""
    if not isinstance(source, Model) or not isinstance(captured, States):
        reason = "there are two stacks" if isinstance(source, Model) else "that takes the model, and states were given"
        raise StatesError("A profile of normed layers", reason, "Give a model of one stack and texts.")
    stack, layers = source.anatomy.stacks[0], tuple(site for site in sites if site.layer is not None and not site.part)
    if stack.proof.final is None or not layers:
        reason = "it has no final norm" if stack.proof.final is None else "no whole layers were chosen"
        raise StatesError(f"A profile of normed layers of {source.name}", reason, "Leave the footing raw.")
    raw = captured.select(sites=list(layers))
    normed = [_normed(source, raw.of(text), stack.depth) for text in range(raw.tokens.count)]
    return States(layers, torch.cat(normed, 1), raw.tokens, raw.source), layers


def _normed(model: Model, states: States, depth: int) -> torch.Tensor:
    """Every layer of one text enters the pass where the last one does, all of them in one batch of equal lengths."""
    batch = [states.tokens.ids.tolist()] * len(states.sites)
    left = resume(model, batch, Site(depth), states.values, "final", logits=False).states
    assert isinstance(left, States)
    return left["final"].reshape(len(states.sites), len(states.tokens), -1)
