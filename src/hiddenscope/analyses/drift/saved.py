"""Saved runs: states that were captured elsewhere, as one or both sides.

Only whole passes can be compared with them. If a file does not say which layers it
holds, the model proves it.

An engine that computes the same numbers is easily taken for one that drifts: vLLM's
blocks return the residual apart from what the MLP adds, some count layers from the
first block's output, Hugging Face norms the last layer, TransformerLens centres its
weights. Each is tried on the reference. It is named only for layers of which every
token is within rounding if it is true, by the comparison that found the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.compare import (
    Claim,
    RecordedRun,
    compare_recorded,
    compare_saved,
)
from hiddenscope.analyses.drift.errors import Errors, SiteVerdict
from hiddenscope.analyses.drift.live_model import (
    LiveModel,
    as_live,
    encode,
    narrowest,
    tokens_of,
)
from hiddenscope.analyses.drift.result import DriftComparison
from hiddenscope.analyses.drift.story import Hint, Pairing
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, Readable, Source, States, load_states
from hiddenscope.states.files import is_foreign
from hiddenscope.states.foreign import UnnamedLayers, unnamed_layers
from hiddenscope.store import Store
from hiddenscope.store import open as open_store
from hiddenscope.vectors.dataset import strings_of

# Rows of saved states that are compared at a time.
BLOCK = 8192
# Tokens by which layers are recognised, before all of them are compared.
MOST_TOKENS = 512
# States may be the same if half of the tokens differ by no more than this share:
# bfloat16 leaves a hundredth or two after many layers.
SAME = 0.05
# And if they differ this many times less than under any other name.
CLEARLY = 5


@dataclass(eq=False)
class SavedRun:
    """States of another run, one value for each stack.

    A file at `path` may hold `unnamed` layers: it does not say which these are.
    """

    name: str
    stacks: tuple[States | Store, ...]
    path: Path | None = None
    unnamed: UnnamedLayers | None = None

    @property
    def named_dtype(self) -> torch.dtype:
        """Return the dtype that their source names, or float32."""
        name = str(getattr(self.stacks[0].source, "dtype", ""))
        dtype = getattr(torch, name, None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    @property
    def source(self) -> Mapping[str, object]:
        """Return where the states come from."""
        return self.stacks[0].source.to_json()

    def computed_in(self, other: nn.Module) -> torch.dtype:
        """Return the dtype the states were computed in: as named, or narrower.

        `other` is the module that they are compared with.
        """
        named = self.named_dtype
        sites = self.stacks[0].sites
        first, last = (
            narrowest([next(self.blocks(site))], named)
            for site in (sites[0], sites[-1])
        )
        if sites[-1].layer != 0 and last != named:
            return last
        if first == named:
            return named
        # The first site alone says little: a float32 model of a bfloat16 checkpoint
        # has embeddings in bfloat16 as well. It decides if the other's weights have
        # more digits, or if the residual stream is kept in float32 whatever the
        # weights are, as in Mamba.
        config = getattr(other, "config", None)
        has_wide_stream = bool(getattr(config, "residual_in_fp32", False))
        if has_wide_stream or narrowest(other.parameters(), named) == named:
            return first
        return named

    @property
    def sites(self) -> list[Site]:
        """Return the sites of all stacks."""
        sites: list[Site] = []
        for states in self.stacks:
            sites += states.sites
        return sites

    def states_of(self, stack: str | None) -> States | Store:
        """Return the states of a stack."""
        return next(states for states in self.stacks if states.sites[0].stack == stack)

    def width(self, site: Site) -> int:
        """Return the width of the states at a site."""
        return self.states_of(site.stack)[site].shape[1]

    def rows(self, site: Site, numbers: Sequence[int]) -> Tensor:
        """Read some rows of a site."""
        states = self.states_of(site.stack)
        if isinstance(states, States):
            return states[site].cpu()[list(numbers)]
        return states.rows(site, numbers)

    def blocks(self, site: Site) -> Iterator[Tensor]:
        """Read the states of a site in blocks, of equal sizes in every run."""
        return iter(self.states_of(site.stack).blocks(site, BLOCK))

    def windows(self) -> list[list[int]] | None:
        """Return the ids of each window if a store has cut long texts, else None."""
        states = self.stacks[0]
        if not isinstance(states, Store):
            return None
        if len(states.sequence_lengths) == states.tokens.count:
            return None
        ends = states.sequence_lengths.cumsum()[:-1]
        return [ids.tolist() for ids in np.split(states.tokens.ids, ends)]

    def named_by(self, model: Model) -> SavedRun:
        """Return the states with the sites that the model proves them to be."""
        if self.unnamed is None or self.path is None:
            return self
        sites = name_layers(model, self.unnamed)
        note = (
            f"The file does not say which layers it holds: each was found to be a state"
            f" of the reference ({summarise(sites)})."
        )
        source = Source(self.name, notes=(note,))
        states = States.read(self.path, sites=sites, source=source)
        return SavedRun(self.name, (states,))


def open_saved(path: Path) -> SavedRun | None:
    """Open a store or a file of states; None if the path is neither."""
    if (path / "plan.json").is_file():
        return _saved(open_store(path), path)
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return None
    return open_foreign(path) or _saved(load_states(path), path)


def open_foreign(path: Path) -> SavedRun | None:
    """Open a file that another program wrote; None if we wrote it."""
    if not is_foreign(path):
        return None
    layers = unnamed_layers(path)
    if layers is not None:
        return SavedRun(path.name, (), path, layers)
    return SavedRun(path.name, (States.read(path),))


def as_saved(states: object) -> SavedRun | None:
    """Return states in memory, or a store, as a saved run; None for anything else."""
    if isinstance(states, States | Store | Pair):
        return _saved(states)
    if not isinstance(states, Readable):
        return None
    blocks = [torch.cat(list(states.blocks(site))) for site in states.sites]
    source = getattr(states, "source", None)
    gathered = States(states.sites, torch.stack(blocks), states.tokens, source)  # type: ignore[arg-type]
    return SavedRun(str(getattr(source, "model", "states")), (gathered,))


def _saved(states: States | Store | Pair, path: Path | None = None) -> SavedRun:
    if isinstance(states, Pair):
        encoder = _saved(states.encoder, path)
        return replace(encoder, stacks=(states.encoder, states.decoder))
    name = states.source.model
    return SavedRun(name if path is None else f"{name} ({path.name})", (states,))


def compare_model_with_saved(
    model: Model,
    saved: SavedRun,
    texts: Texts | Inputs | None,
    *,
    saved_is_reference: bool,
) -> DriftComparison:
    """Compare a live model with states that were saved elsewhere."""
    saved = saved.named_by(model)
    for states in saved.stacks:
        # A pass cannot be compared with a store that lacks tokens.
        if isinstance(states, Store) and (states.pooled or states.every > 1):
            what = f"one token in {states.every}"
            if states.pooled:
                what = f"the {states.pooled} of each text"
            problem = f"Cannot compare a pass with {saved.name}"
            reason = f"the store keeps {what} alone"
            raise StatesError(problem, reason, "Extract the states of every token.")
    if texts is None:
        # The windows, texts or ids that the states were computed on.
        texts = saved.windows() or list(strings_of(saved.stacks[0].tokens))
    inputs = encode(model, texts)
    for states in saved.stacks:
        expected = inputs.of(states.sites[0].stack)
        saved_tokens = states.tokens
        lengths = states.tokens.lengths
        if isinstance(states, Store):
            lengths = states.sequence_lengths
        same_ids = np.array_equal(expected.flat, saved_tokens.ids)
        if same_ids and np.array_equal(expected.lengths, lengths):
            continue
        problem = f"The saved states of {saved.name} are of other texts"
        if saved.windows() is not None:
            reason = "they were computed in windows of long texts"
            remedy = "Leave the texts out: the store has its own."
            raise StatesError(problem, reason, remedy)
        reason = (
            f"they hold {len(saved_tokens):,} tokens of {saved_tokens.count} texts,"
            f" which are not the {sum(expected.lengths):,} given"
        )
        raise StatesError(problem, reason, "Give the texts they were captured on.")
    live = as_live(model)
    widths = {site: live.anatomy.width(site) for site in live.sites}
    sites = _common_sites(widths, saved, (model.name, saved.name))
    tokens = tokens_of(model, inputs)
    if saved.windows() is not None:
        # The store knows the places of its windows in the whole texts.
        tokens |= {states.sites[0].stack: states.tokens for states in saved.stacks}
    run = RecordedRun(
        saved.name,
        saved.source,
        saved.computed_in(model.module),
        tokens,
        {str(site): Claim(str(site), partial(saved.rows, site)) for site in sites},
        getattr(saved.stacks[0].source, "notes", ()),
        is_reference=saved_is_reference,
    )
    sides = (run, live) if saved_is_reference else (live, run)
    with model.lock:
        errors = compare_recorded(live, run, inputs)
        hints = explain_layout(live, saved, run, inputs, errors)
    return DriftComparison(sides, errors, _paired_by_site(sites), hints=hints)


def compare_two_saved(first: SavedRun, second: SavedRun) -> DriftComparison:
    """Compare two saved runs."""
    for run in (first, second):
        if run.unnamed is not None:
            reason = "nothing says which layers it holds, and no model can prove it"
            remedy = "Give hs.States.read(path, sites=[1, 2]), one for each layer."
            raise StatesError(f"Cannot compare {run.name}", reason, remedy)
    names = (first.name, second.name)
    widths = {site: first.width(site) for site in first.sites}
    sites = _common_sites(widths, second, names)
    stacks = list(dict.fromkeys(site.stack for site in sites))
    for stack in stacks:
        expected = first.states_of(stack).tokens
        other = second.states_of(stack).tokens
        same_ids = np.array_equal(expected.ids, other.ids)
        same_lengths = np.array_equal(expected.lengths, other.lengths)
        # Pooled states have no ids to tell texts apart by; the string of each row names
        # the pooling.
        is_pooled = bool((expected.ids < 0).any())
        same_texts = expected.texts == other.texts
        same_pool = expected.strings[:1] == other.strings[:1]
        is_same = not is_pooled or (same_texts and same_pool)
        if not (same_ids and same_lengths and is_same):
            raise StatesError(
                "The two saved runs are of different texts",
                f"they hold {len(expected):,} and {len(other):,} tokens that are not"
                " the same",
                "Capture both on the same texts.",
            )
    blocks = {
        str(site): zip(first.blocks(site), second.blocks(site), strict=True)
        for site in sites
    }
    tokens = {stack: first.states_of(stack).tokens for stack in stacks}
    errors = compare_saved(blocks, tokens, {first.named_dtype, second.named_dtype})
    return DriftComparison((first, second), errors, _paired_by_site(sites))


def _paired_by_site(sites: Sequence[Site]) -> Pairing:
    return Pairing.of("site", {name: (name, name) for name in map(str, sites)})


def _common_sites(
    widths: Mapping[Site, int], saved: SavedRun, names: tuple[str, str]
) -> list[Site]:
    """Return the sites that both sides have in one width; none is an error."""
    common = [site for site in widths if site in saved.sites]
    if not common:
        reason = (
            f"{names[0]} has {summarise(widths)} and {names[1]} has"
            f" {summarise(saved.sites)}"
        )
        remedy = "Choose sites that both have, or give a pairing."
        raise StatesError("Nothing to compare", reason, remedy)
    for site in common:
        width = widths[site]
        other = saved.width(site)
        if width != other:
            reason = f"{site} is {width} wide in one and {other} in the other"
            remedy = "Give two versions of one model."
            raise StatesError("Cannot compare the two runs", reason, remedy)
    return common


def name_layers(model: Model, unnamed: UnnamedLayers) -> tuple[Site, ...]:
    """Return the sites that layers `[layer, token, width]` are, proved by the model.

    An error says which layer equals no state of the model, or more than one.
    """
    layers = unnamed.values
    inputs = model.encode([unnamed.ids[:MOST_TOKENS]])
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
    named = []
    for number, rows in enumerate(layers):
        distances = {}
        actual = rows[: len(captured.tokens)].double().cpu()
        for site in captured.sites:
            expected = captured[site].double().cpu()
            sizes = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
            # Of the median token: the first token's state is often so large that it
            # would hide all others.
            distance = ((actual - expected).norm(dim=-1) / sizes).median()
            distances[site] = float(distance)
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


def explain_layout(
    model: LiveModel,
    saved: SavedRun,
    run: RecordedRun,
    inputs: Inputs,
    errors: Errors,
) -> list[Hint]:
    """Return the mix-ups that saved layers are, with what they leave unexplained.

    `run` claims the names that were given, and `errors` are those under them. A mix-up
    is named for a layer if no token exceeds the noise envelope under it.
    """
    drifting = errors.drifting
    sites = [site for site in saved.sites if str(site) in drifting and not site.part]
    # Two stacks have other tokens each.
    if not sites or any(site.stack is not None for site in sites):
        return []
    layouts = list(_layouts(model.anatomy.sites, sites))
    claims = {}
    for number, layout in enumerate(layouts):
        for site, state in layout.really.items():
            # A layer may be wider than the next.
            if saved.width(site) == model.anatomy.width(state):
                reader = partial(saved.rows, site)
                claim = Claim(str(state), reader, layout.is_centred)
                claims[f"{number} {site}"] = claim
    really = compare_recorded(model, replace(run, claims=claims), inputs)
    hints = []
    for number, layout in enumerate(layouts):
        explained = []
        for site in layout.really:
            verdict = really.verdicts.get(f"{number} {site}", SiteVerdict(inf))
            as_named = errors.verdicts[str(site)].beyond
            if verdict.beyond <= 1 and CLEARLY * verdict.beyond <= as_named:
                explained.append(site)
        if not explained:
            continue
        rest = set(drifting) - set(map(str, explained))
        outcome = "This is no drift: so read, every token is within rounding."
        if rest:
            left = summarise(map(Site.parse, rest))
            outcome = f"It does not explain {left}, which differ as well."
        evidence = layout.evidence.format(sites=summarise(explained))
        evidence = f"{evidence} {outcome} {layout.remedy}"
        hints.append(Hint(fault=layout.fault, evidence=evidence))
    return hints


def _layouts(known: Sequence[Site], sites: Sequence[Site]) -> Iterator[_Layout]:
    """Yield the mix-ups of layouts that other programs make."""
    layers = [site for site in sites if site.layer is not None]

    def of_layers(part: str = "", step: int = 0) -> dict[Site, Site]:
        really = {}
        # No block makes layer 0, so it has no parts.
        lowest = 1 if part else 0
        for site in layers:
            other = (site.layer or 0) + step
            if other >= lowest and Site(other, part) in known:
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
    last = Site(max(site.layer for site in known if site.layer is not None))
    final = Site(None)
    if final in known and last in layers:
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
