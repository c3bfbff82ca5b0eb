"""Saved runs: states that were captured elsewhere, as one or both sides.

Only whole passes can be compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.dtypes import narrowest
from hiddenscope.analyses.drift.facts import PairFacts, PairingFacts
from hiddenscope.analyses.drift.result import DriftComparison
from hiddenscope.analyses.drift.saved_layouts import LayoutTrial, name_layers
from hiddenscope.analyses.drift.sides import as_live, encode, tokens_of
from hiddenscope.analyses.drift.whole import compare_passes, compare_saved
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, Readable, Source, States, load_states
from hiddenscope.states.files import is_foreign
from hiddenscope.states.foreign import UnnamedLayers, unnamed_layers
from hiddenscope.store import Store
from hiddenscope.store import open as open_store

# Rows of saved states that are compared at a time.
BLOCK = 8192


@dataclass(eq=False)
class SavedRun:
    """States of another run, one value for each stack."""

    name: str
    stacks: tuple[States | Store, ...]

    @property
    def named_dtype(self) -> torch.dtype:
        """Return the dtype that their source names, or float32."""
        name = str(getattr(self.stacks[0].source, "dtype", ""))
        dtype = getattr(torch, name, None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def computed_in(self, other: nn.Module) -> torch.dtype:
        """Return the dtype the states were computed in: as named, or narrower.

        `other` is the module that they are compared with.
        """
        named = self.named_dtype
        first_site, last_site = self.stacks[0].sites[0], self.stacks[0].sites[-1]
        first = narrowest([next(self.blocks(first_site))], named)
        last = narrowest([next(self.blocks(last_site))], named)
        if last_site.layer != 0 and last != named:
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

    def width(self, site: Site) -> int:
        """Return the width of the states at a site."""
        states = self.states_of(site.stack)
        return states[site].shape[1]

    def rows(self, site: Site, numbers: Sequence[int]) -> Tensor:
        """Read some rows of a site."""
        states = self.states_of(site.stack)
        if isinstance(states, States):
            return states[site].cpu()[list(numbers)]
        return states.rows(site, numbers)

    def blocks(self, site: Site) -> Iterator[Tensor]:
        """Read the states of a site in blocks, of equal sizes in every run."""
        return iter(self.states_of(site.stack).blocks(site, BLOCK))

    def states_of(self, stack: str | None) -> States | Store:
        """Return the states of a stack."""
        return next(states for states in self.stacks if states.sites[0].stack == stack)

    def texts(self) -> list[str] | list[list[int]]:
        """Return the windows, texts or ids that the states were computed on."""
        tokens = self.stacks[0].tokens
        windows = self.windows()
        if windows is not None:
            return windows
        if tokens.texts is not None:
            return list(tokens.texts)
        return [tokens.ids[tokens.rows(text)].tolist() for text in range(tokens.count)]

    def windows(self) -> list[list[int]] | None:
        """Return the ids of each window if a store has cut long texts, else None."""
        states = self.stacks[0]
        if not isinstance(states, Store):
            return None
        if len(states.sequence_lengths) == states.tokens.count:
            return None
        ends = states.sequence_lengths.cumsum()[:-1]
        return [ids.tolist() for ids in np.split(states.tokens.ids, ends)]


@dataclass(eq=False)
class UnnamedRun(SavedRun):
    """States of another program whose file does not say which layers they are."""

    path: Path
    layers: UnnamedLayers

    def named_by(self, model: Model) -> SavedRun:
        """Return the states with the sites that the model proves them to be."""
        sites = name_layers(model, self.layers.values, self.layers.ids)
        note = (
            f"The file does not say which layers it holds: each was found to be a state"
            f" of the reference ({summarise(sites)})."
        )
        source = Source(self.name, notes=(note,))
        states = States.read(self.path, sites=sites, source=source)
        return SavedRun(self.name, (states,))


def open_saved(path: Path) -> SavedRun | None:
    """Open a store or a file of states; None if the path is neither."""
    stacks: tuple[States | Store, ...]
    if (path / "plan.json").is_file():
        stacks = (open_store(path),)
    elif path.suffix.lower() == ".safetensors" and path.is_file():
        if is_foreign(path):
            return _open_foreign(path)
        stacks = _stacks_of(load_states(path))
    else:
        return None
    return SavedRun(f"{stacks[0].source.model} ({path.name})", stacks)


def check_foreign(path: Path) -> None:
    """Raise if a file that another program wrote cannot be compared."""
    if is_foreign(path):
        _open_foreign(path)


def _open_foreign(path: Path) -> SavedRun:
    """Open a file that another program wrote."""
    layers = unnamed_layers(path)
    if layers is not None:
        return UnnamedRun(path.name, (), path, layers)
    return SavedRun(path.name, (States.read(path),))


def as_saved(states: object) -> SavedRun | None:
    """Return states in memory, or a store, as a saved run; None for anything else."""
    if isinstance(states, States | Store | Pair):
        stacks = _stacks_of(states)
        return SavedRun(stacks[0].source.model, stacks)
    if not isinstance(states, Readable):
        return None
    blocks = [torch.cat(list(states.blocks(site))) for site in states.sites]
    source = getattr(states, "source", None)
    gathered = States(states.sites, torch.stack(blocks), states.tokens, source)  # type: ignore[arg-type]
    return SavedRun(str(getattr(source, "model", "states")), (gathered,))


def _stacks_of(states: States | Store | Pair) -> tuple[States | Store, ...]:
    if isinstance(states, Pair):
        return states.encoder, states.decoder
    return (states,)


def compare_model_with_saved(
    model: Model,
    saved: SavedRun,
    texts: Texts | Inputs | None,
    *,
    saved_is_reference: bool,
) -> DriftComparison:
    """Compare a live model with states that were saved elsewhere."""
    if isinstance(saved, UnnamedRun):
        saved = saved.named_by(model)
    _check_unpooled(saved)
    inputs = encode(model, saved.texts() if texts is None else texts)
    _check_tokens(inputs, saved)
    live = as_live(model)
    names = (saved.name, model.name) if saved_is_reference else (model.name, saved.name)
    sites = _common_sites(live.sites, saved.sites, names)
    for site in sites:
        _check_widths(site, live.anatomy.width(site), saved.width(site))
    readers = {str(site): partial(saved.rows, site) for site in sites}
    dtype = saved.computed_in(model.module)
    roles = ("reference", "candidate")
    if saved_is_reference:
        roles = ("candidate", "reference")
    with model.lock:
        errors = compare_passes(live, model, readers, dtype, inputs, roles=roles)
    tokens = tokens_of(model, inputs)
    if saved.windows() is not None:
        # The store knows the places of its windows in the whole texts.
        tokens |= {states.sites[0].stack: states.tokens for states in saved.stacks}
    sources = [model.source(None).to_json(), saved.stacks[0].source.to_json()]
    if saved_is_reference:
        sources.reverse()
        errors.passes = {"reference": 0, "candidate": errors.passes["reference"]}
    errors.notes += getattr(saved.stacks[0].source, "notes", ())
    comparison = DriftComparison(names, errors, tokens, sources, _paired_by_site(sites))
    if errors.drifting:
        comparison.hints = LayoutTrial(model, saved, inputs, errors, dtype).explain()
    return comparison


def compare_two_saved(first: SavedRun, second: SavedRun) -> DriftComparison:
    """Compare two saved runs."""
    for run in (first, second):
        if isinstance(run, UnnamedRun):
            reason = "nothing says which layers it holds, and no model can prove it"
            remedy = "Give hs.States.read(path, sites=[1, 2]), one for each layer."
            raise StatesError(f"Cannot compare {run.name}", reason, remedy)
    names = (first.name, second.name)
    sites = _common_sites(first.sites, second.sites, names)
    stacks = list(dict.fromkeys(site.stack for site in sites))
    for stack in stacks:
        _check_same_texts(first, second, stack)
    blocks = {}
    for site in sites:
        _check_widths(site, first.width(site), second.width(site))
        blocks[str(site)] = zip(first.blocks(site), second.blocks(site), strict=True)
    tokens = {stack: first.states_of(stack).tokens for stack in stacks}
    counts = {stack: len(stack_tokens) for stack, stack_tokens in tokens.items()}
    errors = compare_saved(blocks, counts, {first.named_dtype, second.named_dtype})
    errors.passes = {"reference": 0, "candidate": 0}
    sources = [first.stacks[0].source.to_json(), second.stacks[0].source.to_json()]
    return DriftComparison(names, errors, tokens, sources, _paired_by_site(sites))


def _paired_by_site(sites: Sequence[Site]) -> PairingFacts:
    pairs = []
    for name in map(str, sites):
        pairs.append(PairFacts(site=name, reference=name, candidate=name))
    return PairingFacts(by="site", pairs=pairs)


def _common_sites(
    sites: Sequence[Site], other_sites: Sequence[Site], names: tuple[str, str]
) -> list[Site]:
    """Return the sites that both sides have; none is an error."""
    common = [site for site in sites if site in other_sites]
    if not common:
        reason = (
            f"{names[0]} has {summarise(sites)} and {names[1]} has"
            f" {summarise(other_sites)}"
        )
        remedy = "Choose sites that both have, or give a pairing."
        raise StatesError("Nothing to compare", reason, remedy)
    return common


def _check_widths(site: Site, width: int, other_width: int) -> None:
    """Raise if the states of a site have different widths in the two runs."""
    if width != other_width:
        reason = f"{site} is {width} wide in one and {other_width} in the other"
        remedy = "Give two versions of one model."
        raise StatesError("Cannot compare the two runs", reason, remedy)


def _check_unpooled(saved: SavedRun) -> None:
    """Raise if a store lacks tokens: a pass cannot be compared with it then."""
    for states in saved.stacks:
        if not isinstance(states, Store):
            continue
        if states.pooled is None and states.every == 1:
            continue
        what = f"one token in {states.every}"
        if states.pooled:
            what = f"the {states.pooled} of each text"
        problem = f"Cannot compare a pass with {saved.name}"
        reason = f"the store keeps {what} alone"
        raise StatesError(problem, reason, "Extract the states of every token.")


def _check_tokens(inputs: Inputs, saved: SavedRun) -> None:
    """Raise if saved states are of other texts than those that are run here."""
    for states in saved.stacks:
        expected = inputs.of(states.sites[0].stack)
        tokens, lengths = states.tokens, states.tokens.lengths
        if isinstance(states, Store):
            lengths = states.sequence_lengths
        same_ids = expected.flat.tolist() == tokens.ids.tolist()
        if same_ids and expected.lengths == lengths.tolist():
            continue
        problem = f"The saved states of {saved.name} are of other texts"
        if saved.windows() is not None:
            reason = "they were computed in windows of long texts"
            remedy = "Leave the texts out: the store has its own."
            raise StatesError(problem, reason, remedy)
        reason = (
            f"they hold {len(tokens):,} tokens of {tokens.count} texts, which are not"
            f" the {sum(expected.lengths):,} given"
        )
        raise StatesError(problem, reason, "Give the texts they were captured on.")


def _check_same_texts(first: SavedRun, second: SavedRun, stack: str | None) -> None:
    """Raise if two saved runs are of different texts."""
    tokens, other = first.states_of(stack).tokens, second.states_of(stack).tokens
    same_ids = tokens.ids.tolist() == other.ids.tolist()
    same_lengths = tokens.lengths.tolist() == other.lengths.tolist()
    # Pooled states have no ids to tell texts apart by.
    is_pooled = bool((tokens.ids < 0).any())
    same_texts = not is_pooled or tokens.texts == other.texts
    if not (same_ids and same_lengths and same_texts):
        reason = (
            f"they hold {len(tokens):,} and {len(other):,} tokens that are not the same"
        )
        remedy = "Capture both on the same texts."
        raise StatesError("The two saved runs are of different texts", reason, remedy)
