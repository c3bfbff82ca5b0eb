"""Sides: what the reference and the candidate are, whether they can be compared, and how their states are paired."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.analyses.drift.dtypes import majority_dtype, narrowest
from hiddenscope.analyses.drift.observe import Live, set_kernel
from hiddenscope.anatomy import Anatomy, vocabulary
from hiddenscope.errors import AnatomyError, ModuleError, StatesError, TextError
from hiddenscope.model import Model, load
from hiddenscope.passes import Inputs, TextEncoder, Texts, recordable
from hiddenscope.products import tell_of_slow_products
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, Readable, States, load_states
from hiddenscope.store import Store
from hiddenscope.store import open as open_store

BLOCK = 8192  # rows of saved states that are compared at a time
KNOWN_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(eq=False)
class Saved:
    """States from another run: only whole passes can be compared with them."""

    name: str
    stacks: tuple[States | Store, ...]

    @property
    def named_dtype(self) -> torch.dtype:
        """The dtype that their source names; float32 if it names none."""
        named = getattr(torch, str(getattr(self.stacks[0].source, "dtype", "")), None)
        return named if isinstance(named, torch.dtype) else torch.float32

    def dtype(self, other: nn.Module) -> torch.dtype:
        """What its states were computed in: what their source says, or a narrower dtype that holds them exactly.

        The first site alone tells it only where the weights of the `other` side have more digits than that: a float32
        model of a bfloat16 checkpoint has embeddings in bfloat16 as well. Mamba keeps its residual stream in float32
        whatever its weights are in.
        """
        states, own = self.stacks[0], self.named_dtype
        first, last = (narrowest([next(iter(self.blocks(site)))], own) for site in (states.sites[0], states.sites[-1]))
        wide_stream = bool(getattr(getattr(other, "config", None), "residual_in_fp32", False))
        if states.sites[-1].layer != 0 and last != own:
            return last
        return first if first != own and (wide_stream or narrowest(other.parameters(), own) == own) else own

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all its stacks."""
        return tuple(site for states in self.stacks for site in states.sites)

    def width(self, site: Site) -> int:
        """How many numbers a state of the site has."""
        states = self.of(site.stack)
        return states.width if isinstance(states, States) else states[site].shape[1]

    def rows(self, site: Site, numbers: Sequence[int]) -> Tensor:
        """Some rows of a site."""
        states = self.of(site.stack)
        return states[site].cpu()[list(numbers)] if isinstance(states, States) else states.rows(site, numbers)

    def blocks(self, site: Site) -> Iterator[Tensor]:
        """The states of a site, so many rows at a time for every side."""
        return self.of(site.stack).blocks(site, BLOCK)

    def of(self, stack: str | None) -> States | Store:
        """The states of a stack."""
        return next(states for states in self.stacks if states.sites[0].stack == stack)


@dataclass(eq=False)
class Given:
    """A module that was given without being loaded, and the tokenizer that came with it, if any."""

    module: nn.Module
    tokenizer: Any = None


Side: TypeAlias = Model | Saved | Given | Callable[..., Any]


def opened(given: Any, who: str) -> Side:
    """What was given, once it is clear what it is."""
    if isinstance(given, Model | Saved):
        return given
    if isinstance(given, Pair):
        return Saved(given.encoder.source.model, (given.encoder, given.decoder))
    if isinstance(given, States | Store):
        return Saved(given.source.model, (given,))
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if (path / "plan.json").is_file():
            store = open_store(path)
            return Saved(f"{store.source.model} ({path.name})", (store,))
        return _saved_file(path) if path.suffix.lower() == ".safetensors" and path.is_file() else load(given)
    if isinstance(given, Readable):
        return Saved(str(getattr(getattr(given, "source", None), "model", "states")), (_gathered(given),))
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module):
        tell_of_slow_products(given[0], type(given[0]).__name__)
        return Given(*given)
    if isinstance(given, nn.Module):
        tell_of_slow_products(given, type(given).__name__)
        return Given(given)
    if callable(given):
        function: Callable[..., Any] = given
        return function
    remedy = "Give a model, saved states, or a function of token ids."
    raise ModuleError(f"Cannot compare the {who}", f"got {type(given).__name__}", remedy)


def _saved_file(path: Path) -> Saved:
    states = load_states(path)
    stacks = (states.encoder, states.decoder) if isinstance(states, Pair) else (states,)
    return Saved(f"{stacks[0].source.model} ({path.name})", stacks)


def _gathered(source: Readable) -> States:
    """States that are read in blocks, in memory."""
    values = torch.stack([torch.cat(list(source.blocks(site))) for site in source.sites])
    return States(source.sites, values, source.tokens, getattr(source, "source", None))  # type: ignore[arg-type]


def as_model(side: Side, who: str) -> Model:
    """A side as a model whose states are proved."""
    if isinstance(side, Model):
        return side
    if isinstance(side, Given):
        return load((side.module, side.tokenizer))
    raise ModuleError(f"Cannot use the {who} alone", "it is not a model", "Give a model on one side at least.")


def as_live(side: Model | Given, reference: Model) -> Live | None:
    """A side as a module that runs beside the reference; None where its modules are not the reference's.

    A module with the same blocks in the same places needs no proof of its own: what is at fault in it may be the very
    thing that a proof would refuse.
    """
    module = side.module
    if is_compiled(module):
        return None
    recordable(module)
    anatomy = reference.anatomy
    name = side.name if isinstance(side, Model) else type(module).__name__
    if same_tree(module, reference.module, anatomy):
        return Live(name, module, anatomy, reference.pad, majority_dtype(module))
    if isinstance(side, Given):
        try:
            side = load((module, side.tokenizer))
        except AnatomyError:
            return None
    if _types(side.anatomy) != _types(anatomy):
        return None
    return Live(name, module, side.anatomy, reference.pad, majority_dtype(module))


def is_compiled(module: Any) -> bool:
    """Whether torch.compile made it, so that it calls no hooks: only what it returns can be seen."""
    if not isinstance(module, nn.Module) or hasattr(module, "_orig_mod"):
        return isinstance(module, nn.Module)
    return any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())


def same_tree(module: nn.Module, other: nn.Module, anatomy: Anatomy) -> bool:
    """Whether a module has all places where another's states are, and as many blocks."""
    parts = hooks.parts_of(module)
    if any(tap.path not in parts for tap in anatomy.taps.values()):
        return False
    mine = hooks.parts_of(other)
    lists = {block.path.rpartition(".")[0] for stack in anatomy.stacks for block in stack.blocks}
    return all(len(mine[path]._modules) == len(parts[path]._modules) for path in lists)


def _types(anatomy: Anatomy) -> list[tuple[str, int]]:
    return [(stack.name, stack.depth) for stack in anatomy.stacks]


def live(model: Model) -> Live:
    """A loaded model as a module that can be run here."""
    return Live(model.name, model.module, model.anatomy, model.pad, majority_dtype(model.module))


def alike(reference: Live, candidate: Live) -> Live:
    """The reference in the candidate's dtype and with its attention kernel; itself where both are the same already.

    It is a copy: the reference is not touched. A tensor that the candidate keeps wider than the rest is kept as wide.
    """
    kernel = candidate.kernel if candidate.kernel in KNOWN_KERNELS else reference.kernel
    if candidate.dtype == reference.dtype and kernel == reference.kernel:
        return reference
    module = copy.deepcopy(reference.module)
    if candidate.dtype != reference.dtype:
        _round(module, candidate.dtype, {name: tensor.dtype for name, tensor in _tensors(candidate.module)})
    set_kernel(module, kernel)
    return Live(reference.name, module, reference.anatomy, reference.pad, candidate.dtype)


def not_wider(candidate: Live, reference: Live) -> Live:
    """A candidate that has more digits than the reference, rounded to the reference's; itself where it has not."""
    if torch.finfo(candidate.dtype).eps >= torch.finfo(reference.dtype).eps:
        return candidate
    module = copy.deepcopy(candidate.module)
    _round(module, reference.dtype, {name: tensor.dtype for name, tensor in _tensors(reference.module)})
    call = None if candidate.call is None else candidate.call.of(module)
    return replace(candidate, module=module, dtype=reference.dtype, call=call, passes=0)


def _round(module: nn.Module, dtype: torch.dtype, kept: Mapping[str, torch.dtype]) -> None:
    """Round the weights of a module; a tensor that is `kept` wider stays so, and a buffer is what it is there."""
    for name, tensor in _tensors(module):
        if tensor.is_floating_point():
            buffer = not isinstance(tensor, nn.Parameter)
            own = kept.get(name, tensor.dtype if buffer else dtype)
            tensor.data = tensor.data.to(own if buffer or own.itemsize > dtype.itemsize else dtype)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def encoded(model: Model, texts: Texts | Inputs) -> Inputs:
    """The texts as the reference takes them; a decoder beside an encoder is given the same texts."""
    if not isinstance(texts, Inputs) and not isinstance(texts, str) and not len(texts):
        raise TextError("No texts to compare on", "the list is empty", "Give at least one text.")
    if isinstance(texts, Inputs) or not model.encoder_decoder:
        return model.encode(texts)
    return model.encode(texts, targets=texts)


def check_tokenizers(inputs: Inputs, candidate: Model | Given) -> None:
    """Refuse a candidate whose tokenizer makes other ids of the texts."""
    if inputs.texts is None or candidate.tokenizer is None:
        return
    encoder = TextEncoder(candidate.tokenizer, None, vocabulary(candidate.module))
    for number, (text, ids) in enumerate(zip(inputs.texts, inputs.ids, strict=True)):
        theirs = encoder.encode([text]).ids[0]
        if theirs != ids:
            equal = [a == b for a, b in zip(ids, theirs, strict=False)]
            place = equal.index(False) if False in equal else len(equal)
            reason = (
                f"text {number} is {len(ids)} tokens in one and {len(theirs)} in the other, from position {place} on"
            )
            remedy = "Give token ids, or models with one tokenizer."
            raise TextError("Their tokenizers give different ids", reason, remedy)


def check_shapes(reference: Live, candidate: Live) -> None:
    """Refuse models whose states have different widths."""
    for mine, theirs in zip(reference.anatomy.stacks, candidate.anatomy.stacks, strict=True):
        if mine.proof.width != theirs.proof.width:
            reason = f"their hidden sizes are {mine.proof.width} and {theirs.proof.width}"
            raise StatesError("Cannot compare the two models", reason, "Give two versions of one model.")


def check_whole(saved: Saved) -> None:
    """Refuse stores that do not have every token: a pass cannot be compared with them."""
    for states in saved.stacks:
        if isinstance(states, Store) and (states.pooled is not None or states.every > 1):
            how = f"the {states.pooled} of each text" if states.pooled else f"one token in {states.every}"
            problem, reason = f"Cannot compare a pass with {saved.name}", f"the store keeps {how} alone"
            raise StatesError(problem, reason, "Extract the states of every token.")


def windows_of(saved: Saved) -> list[list[int]] | None:
    """The ids of every window of a store whose long texts were cut; None where every text was given whole."""
    states = saved.stacks[0]
    if not isinstance(states, Store) or len(states.sequence_lengths) == states.tokens.count:
        return None
    ends = states.sequence_lengths.cumsum()[:-1]
    return [ids.tolist() for ids in np.split(states.tokens.ids, ends)]


def check_tokens(inputs: Inputs, saved: Saved) -> None:
    """Refuse saved states of other texts than those that are run here."""
    for states in saved.stacks:
        own = inputs.of(states.sites[0].stack)
        lengths = states.sequence_lengths if isinstance(states, Store) else states.tokens.lengths
        if own.flat.tolist() != states.tokens.ids.tolist() or own.lengths != lengths.tolist():
            here, there = sum(own.lengths), len(states.tokens)
            reason = f"they hold {there:,} tokens of {states.tokens.count} texts, which are not the {here:,} given"
            remedy = "Give the texts they were captured on."
            if windows_of(saved) is not None:
                reason, remedy = (
                    "they were computed in windows of long texts",
                    "Leave the texts out: the store has its own.",
                )
            raise StatesError(f"The saved states of {saved.name} are of other texts", reason, remedy)


def common(mine: tuple[Site, ...], theirs: tuple[Site, ...], names: tuple[str, str]) -> tuple[Site, ...]:
    """The sites that both sides have; none is an error."""
    both = tuple(site for site in mine if site in theirs)
    if not both:
        reason = f"{names[0]} has {summarise(mine)} and {names[1]} has {summarise(theirs)}"
        raise StatesError("Nothing to compare", reason, "Choose sites that both have, or give a pairing.")
    return both
