"""Layouts of saved states: which layers a file holds, and known mix-ups of them.

An engine that computes the same numbers is easily taken for one that drifts: vLLM's
blocks return the residual apart from what the MLP adds, some count layers from the
first block's output, Hugging Face norms the last layer, TransformerLens centres its
weights. Each is tried on the reference, and named only if it explains the states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiddenscope.analyses.drift.facts import Hint
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site
from hiddenscope.states import States

# Tokens that are looked at.
MOST_TOKENS = 512
# States are the same if half of the tokens differ by no more than this share: bfloat16
# leaves a hundredth or two after many layers.
SAME = 0.05
# And if they differ this many times less than under any other name.
CLEARLY = 5


class SavedRows(Protocol):
    """Saved states, as they are read here."""

    @property
    def sites(self) -> list[Site]:
        """Return the sites of all stacks."""

    def rows(self, site: Site, numbers: Sequence[int]) -> Tensor:
        """Read some rows of a site."""


@dataclass(frozen=True)
class _Layout:
    """One mix-up: the state that a saved site really is, where there is one."""

    fault: str
    states: Mapping[Site, Tensor]
    evidence: str


def explain_layout(
    model: Model, saved: SavedRows, inputs: Inputs, drifting: Sequence[str]
) -> list[Hint]:
    """Return the mix-ups that explain every saved layer that seems to drift."""
    sites = [site for site in saved.sites if str(site) in drifting and not site.part]
    # Two stacks have other tokens each.
    if not sites or any(site.stack is not None for site in sites):
        return []
    sample, count = _sample(inputs)
    reference = _reference_states(model, sample, sites)
    rows = {site: saved.rows(site, range(count)) for site in sites}
    hints = []
    for layout in _layouts(reference, sites):
        applicable = [site for site in sites if site in layout.states]
        fits = [
            _is_same(rows[site], layout.states[site], reference[site])
            for site in applicable
        ]
        if fits and all(fits):
            names = ", ".join(map(str, applicable[:3]))
            more = " and others" if len(applicable) > 3 else ""
            evidence = layout.evidence.format(sites=f"{names}{more}")
            hints.append(Hint(fault=layout.fault, evidence=evidence))
    return hints


def name_layers(model: Model, layers: Tensor, ids: Sequence[int]) -> tuple[Site, ...]:
    """Return the sites that layers `[layer, token, width]` are, proved by the model.

    An error says which layer equals no state of the model, or more than one.
    """
    inputs = model.encode([list(ids)[:MOST_TOKENS]])
    captured = model.capture(inputs, "layer.*,final")
    problem = "Cannot tell which layers these saved states are"
    remedy = "Say it: hs.States.read(path, sites=[1, 2]), one for each layer."
    if not isinstance(captured, States):
        reason = "the model has an encoder and a decoder"
        raise StatesError(problem, reason, remedy)
    if layers.shape[-1] != captured.width:
        reason = (
            f"they are {layers.shape[-1]} wide, and those of {model.name} are"
            f" {captured.width}"
        )
        raise StatesError(problem, reason, "Give states of this model.")
    named: list[Site] = []
    for number, rows in enumerate(layers):
        distances = {
            site: _distance(rows[: len(captured.tokens)], captured[site])
            for site in captured.sites
        }
        nearest, *others = sorted(distances, key=distances.__getitem__)
        least = distances[nearest]
        is_clear = not others or distances[others[0]] >= CLEARLY * least
        if least > SAME or not is_clear or nearest in named:
            reason = (
                f"layer {number} of the file is nearest to {nearest}, and differs from"
                f" it by {least:.2g} of its size: it may drift, or be another layer"
            )
            raise StatesError(problem, reason, remedy)
        named.append(nearest)
    return tuple(named)


def _sample(inputs: Inputs) -> tuple[Inputs, int]:
    """Return the first texts, and how many tokens they have."""
    texts = [0]
    count = inputs.lengths[0]
    for text, length in enumerate(inputs.lengths[1:], 1):
        if count + length > MOST_TOKENS:
            break
        texts.append(text)
        count += length
    return inputs.some(texts), count


def _reference_states(
    model: Model, inputs: Inputs, sites: Sequence[Site]
) -> dict[Site, Tensor]:
    """Return every layer and final, and what the blocks of some layers add."""
    layers = {site.layer for site in sites}
    wanted = []
    for site in model.anatomy.sites:
        is_part = site.part in ("mlp", "mid") and site.layer in layers
        if is_part or not site.part:
            wanted.append(site)
    captured = model.capture(inputs, wanted)
    assert isinstance(captured, States)
    return {site: captured[site] for site in captured.sites}


def _layouts(
    reference: Mapping[Site, Tensor], sites: Sequence[Site]
) -> Iterator[_Layout]:
    layers = [site for site in sites if site.layer is not None]

    def of_layers(part: str = "", step: int = 0) -> dict[Site, Tensor]:
        states = {}
        for site in layers:
            other = (site.layer or 0) + step
            if other < 0 or (part and not other):
                continue
            state = reference.get(Site(other, part))
            if state is not None:
                states[site] = state
        return states

    yield _Layout(
        "residual_apart",
        of_layers("mlp"),
        "At {sites} the saved states are what the reference's MLPs add: the residual"
        " was kept apart, as vLLM's blocks return it, and the state is their sum. This"
        " is no drift; read the states with `residual=`.",
    )
    yield _Layout(
        "residual_alone",
        of_layers("mid"),
        "At {sites} the saved states are the residual before the MLP adds to it, as"
        " vLLM's blocks return it apart. This is no drift; add the two.",
    )
    for step, word in ((1, "next"), (-1, "previous")):
        yield _Layout(
            "layer_offset",
            of_layers(step=step),
            "At {sites} the saved states are those of the reference's"
            f" {word} layer: layers are counted from another number. This is no drift;"
            " read the states with other `sites`.",
        )
    last = max(site.layer for site in reference if site.layer is not None)
    normed = reference.get(Site(None))
    if normed is not None and Site(last) in layers:
        yield _Layout(
            "final_norm",
            {Site(last): normed},
            "At {sites} the saved states are those after the final norm, as Hugging"
            " Face's last hidden state is. This is no drift; call that site `final`.",
        )
    if Site(None) in sites:
        yield _Layout(
            "final_norm",
            {Site(None): reference[Site(last)]},
            "At {sites} the saved states are those before the final norm. This is no"
            f" drift; call that site `layer.{last}`.",
        )
    centred = {}
    for site in layers:
        centred[site] = reference[site] - reference[site].mean(-1, keepdim=True)
    yield _Layout(
        "centred",
        centred,
        "At {sites} the saved states are the reference's less the mean of each token's"
        " numbers, as TransformerLens centres them (center_writing_weights). This is no"
        " drift.",
    )


def _is_same(rows: Tensor, state: Tensor, named: Tensor) -> bool:
    """Tell whether rows are a state, and clearly not the one that they are named."""
    if rows.shape != state.shape:
        return False
    distance = _distance(rows, state)
    return distance <= SAME and CLEARLY * distance <= _distance(rows, named)


def _distance(rows: Tensor, state: Tensor) -> float:
    """Return the relative difference of the median token.

    The first token's state is often so large that it would hide all others.
    """
    expected, actual = state.double().cpu(), rows.double().cpu()
    sizes = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return float(((actual - expected).norm(dim=-1) / sizes).median())
