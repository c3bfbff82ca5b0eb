"""Layouts of saved states: which layers a file holds, and known mix-ups of them.

An engine that computes the same numbers is easily taken for one that drifts: vLLM's
blocks return the residual apart from what the MLP adds, some count layers from the
first block's output, Hugging Face norms the last layer, TransformerLens centres its
weights. Each is tried on the reference. It is named only for layers of which every
token is within rounding if it is true, by the comparison that found the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hiddenscope.analyses.drift.errors import Errors
from hiddenscope.analyses.drift.facts import Hint
from hiddenscope.analyses.drift.sides import as_live
from hiddenscope.analyses.drift.whole import RowReader, compare_passes
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site, summarise
from hiddenscope.states import States

# Tokens that are looked at, to see what is worth a comparison of all of them.
MOST_TOKENS = 512
# States may be the same if half of the tokens differ by no more than this share:
# bfloat16 leaves a hundredth or two after many layers.
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
    """One mix-up: the state of the reference that each saved site really is.

    With `is_centred` it is that state less the mean of each token's numbers.
    """

    fault: str
    really: Mapping[Site, Site]
    evidence: str
    remedy: str
    is_centred: bool = False


@dataclass(frozen=True)
class LayoutTrial:
    """Saved states that differ from a model's, to be compared under other names.

    `errors` are those under the names that were given, and `dtype` is the one that the
    states were computed in.
    """

    model: Model
    saved: SavedRows
    inputs: Inputs
    errors: Errors
    dtype: torch.dtype

    def explain(self) -> list[Hint]:
        """Return the mix-ups that saved layers are, with what they leave unexplained.

        A mix-up is named for a layer if no token exceeds the noise envelope under it.
        """
        sites = self._sites()
        # Two stacks have other tokens each.
        if not sites or any(site.stack is not None for site in sites):
            return []
        sample, count = _sample(self.inputs)
        reference = _reference_states(self.model, sample, sites)
        rows = {site: self.saved.rows(site, range(count)) for site in sites}
        hints = []
        for layout in _layouts(reference, sites):
            near = []
            for site, state in layout.really.items():
                expected = reference[state]
                if layout.is_centred:
                    expected = expected - expected.mean(-1, keepdim=True)
                if _is_same(rows[site], expected, reference[site]):
                    near.append(site)
            explained = self._within_rounding(layout, near)
            if explained:
                hints.append(self._hint(layout, explained))
        return hints

    def _sites(self) -> list[Site]:
        """Return the layers that differ, and final if it does."""
        drifting = self.errors.drifting
        sites = [site for site in self.saved.sites if str(site) in drifting]
        return [site for site in sites if not site.part]

    def _within_rounding(self, layout: _Layout, sites: Sequence[Site]) -> list[Site]:
        """Return the sites of which all tokens are what a layout says."""
        if not sites:
            return []
        readers: dict[str, RowReader] = {}
        for site in sites:
            reader = partial(self.saved.rows, site)
            if layout.is_centred:
                reader = partial(_rows_with_means, reader, self._means(site))
            readers[str(layout.really[site])] = reader
        with self.model.lock:
            errors = compare_passes(
                as_live(self.model), self.model, readers, self.dtype, self.inputs
            )
        within = []
        for site in sites:
            beyond = errors.verdicts[str(layout.really[site])].beyond
            as_named = self.errors.verdicts[str(site)].beyond
            if beyond <= 1 and CLEARLY * beyond <= as_named:
                within.append(site)
        return within

    def _means(self, site: Site) -> Tensor:
        """Return the mean of each token's numbers in the reference, `[token, 1]`."""
        captured = self.model.capture(self.inputs, site)
        assert isinstance(captured, States)
        return captured[site].double().mean(-1, keepdim=True).cpu()

    def _hint(self, layout: _Layout, explained: Sequence[Site]) -> Hint:
        """Say what a layout explains, and what it does not."""
        rest = set(self.errors.drifting) - set(map(str, explained))
        outcome = "This is no drift: so read, every token is within rounding."
        if rest:
            left = summarise(map(Site.parse, rest))
            outcome = f"It does not explain {left}, which differ as well."
        evidence = layout.evidence.format(sites=summarise(explained))
        return Hint(
            fault=layout.fault, evidence=f"{evidence} {outcome} {layout.remedy}"
        )


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

    def of_layers(part: str = "", step: int = 0) -> dict[Site, Site]:
        really = {}
        # No block makes layer 0, so it has no parts.
        lowest = 1 if part else 0
        for site in layers:
            other = (site.layer or 0) + step
            if other >= lowest and Site(other, part) in reference:
                really[site] = Site(other, part)
        return really

    yield _Layout(
        "residual_apart",
        of_layers("mlp"),
        "At {sites} the saved states are what the reference's MLPs add: the residual"
        " was kept apart, as vLLM's blocks return it, and the state is their sum.",
        "Read the states with `residual=`.",
    )
    yield _Layout(
        "residual_alone",
        of_layers("mid"),
        "At {sites} the saved states are the residual before the MLP adds to it, as"
        " vLLM's blocks return it apart.",
        "Add the two.",
    )
    for step, word in ((1, "next"), (-1, "previous")):
        yield _Layout(
            "layer_offset",
            of_layers(step=step),
            "At {sites} the saved states are those of the reference's"
            f" {word} layer: layers are counted from another number.",
            "Read the states with other `sites`.",
        )
    last = Site(max(site.layer for site in reference if site.layer is not None))
    final = Site(None)
    if final in reference and last in layers:
        yield _Layout(
            "final_norm",
            {last: final},
            "At {sites} the saved states are those after the final norm, as Hugging"
            " Face's last hidden state is.",
            "Call that site `final`.",
        )
    if final in sites:
        yield _Layout(
            "final_norm",
            {final: last},
            "At {sites} the saved states are those before the final norm.",
            f"Call that site `{last}`.",
        )
    yield _Layout(
        "centred",
        of_layers(),
        "At {sites} the saved states are the reference's less the mean of each token's"
        " numbers, as TransformerLens centres them.",
        "Load its model without center_writing_weights.",
        is_centred=True,
    )


def _rows_with_means(
    reader: RowReader, means: Tensor, numbers: Sequence[int]
) -> Tensor:
    """Read rows, and undo the centring of each."""
    rows = reader(numbers)
    return (rows.double() + means[list(numbers)]).to(rows.dtype)


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
