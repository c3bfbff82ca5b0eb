"""Decide what the reference and the candidate are, whether they can be compared, and in
which dtype and kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.dtypes import (
    common_digits,
    majority_dtype,
    narrowest,
    with_digits,
)
from hiddenscope.analyses.drift.observe import Side
from hiddenscope.analyses.drift.parts import ComparedSides
from hiddenscope.discovery import Anatomy, vocabulary
from hiddenscope.errors import AnatomyError, ModuleError, StatesError, TextError
from hiddenscope.model import Model, load
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import Convert, named_weights, private_copy
from hiddenscope.modules.slow_dtypes import tell_of_slow_products
from hiddenscope.passes import Inputs, TextEncoder, Texts, recordable
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, Readable, States, load_states
from hiddenscope.store import Store
from hiddenscope.store import open as open_store

BLOCK = 8192  # rows of saved states that are compared at a time
KNOWN_KERNELS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)


@dataclass(eq=False)
class SavedRun:
    """States from another run: only whole passes can be compared with them."""

    name: str
    stacks: tuple[States | Store, ...]

    @property
    def named_dtype(self) -> torch.dtype:
        """The dtype that their source names; float32 if it names none."""
        name = str(getattr(self.stacks[0].source, "dtype", ""))
        dtype = getattr(torch, name, None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def computed_in(self, other: nn.Module) -> torch.dtype:
        """Tell the dtype its states were computed in: the one its source names, or a
        narrower one that holds them.

        The first site alone tells it only where the weights of the `other` side have
        more digits than that: a float32 model of a bfloat16 checkpoint has embeddings
        in bfloat16 as well. Mamba keeps its residual stream in float32 whatever its
        weights are in.
        """
        first_site, last_site = self.stacks[0].sites[0], self.stacks[0].sites[-1]
        first = narrowest([next(self.blocks(first_site))], self.named_dtype)
        last = narrowest([next(self.blocks(last_site))], self.named_dtype)
        if last_site.layer != 0 and last != self.named_dtype:
            return last
        if first == self.named_dtype:
            return first
        has_wide_stream = bool(
            getattr(getattr(other, "config", None), "residual_in_fp32", False)
        )
        has_wide_weights = (
            narrowest(other.parameters(), self.named_dtype) == self.named_dtype
        )
        return first if has_wide_stream or has_wide_weights else self.named_dtype

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all its stacks."""
        sites: tuple[Site, ...] = ()
        for states in self.stacks:
            sites += tuple(states.sites)
        return sites

    def width(self, site: Site) -> int:
        """How many numbers a state of the site has."""
        states = self.of(site.stack)
        return states.width if isinstance(states, States) else states[site].shape[1]

    def rows(self, site: Site, numbers: Sequence[int]) -> Tensor:
        """Read some rows of a site."""
        states = self.of(site.stack)
        if isinstance(states, States):
            return states[site].cpu()[list(numbers)]
        return states.rows(site, numbers)

    def blocks(self, site: Site) -> Iterator[Tensor]:
        """Read the states of a site in blocks of equal size for every run."""
        return iter(self.of(site.stack).blocks(site, BLOCK))

    def of(self, stack: str | None) -> States | Store:
        """Choose the states of a stack."""
        return next(states for states in self.stacks if states.sites[0].stack == stack)

    def own_texts(self) -> list[str] | list[list[int]]:
        """Return the texts that came with the states, or where these were not kept
        their ids.
        """
        tokens = self.stacks[0].tokens
        if tokens.texts is not None:
            return list(tokens.texts)
        return [tokens.ids[tokens.rows(text)].tolist() for text in range(tokens.count)]

    def windows(self) -> list[list[int]] | None:
        """Return the ids of every window of a store whose long texts were cut; None
        where every text is whole.
        """
        states = self.stacks[0]
        if (
            not isinstance(states, Store)
            or len(states.sequence_lengths) == states.tokens.count
        ):
            return None
        ends = states.sequence_lengths.cumsum()[:-1]
        return [ids.tolist() for ids in np.split(states.tokens.ids, ends)]


@dataclass(eq=False)
class BareModule:
    """A module that was given without being loaded, and the tokenizer that came with
    it, if any.
    """

    module: nn.Module
    tokenizer: Any = None


Opened: TypeAlias = Model | SavedRun | BareModule | Callable[..., Any]


def open_side(side: Any, who: str) -> Opened:
    """Find out what was given as one of the two sides."""
    if isinstance(side, Model | SavedRun):
        return side
    if isinstance(side, Pair):
        return SavedRun(side.encoder.source.model, (side.encoder, side.decoder))
    if isinstance(side, States | Store):
        return SavedRun(side.source.model, (side,))
    if isinstance(side, str | os.PathLike):
        return _open_path(Path(side), side)
    if isinstance(side, Readable):
        source = getattr(side, "source", None)
        return SavedRun(str(getattr(source, "model", "states")), (_in_memory(side),))
    if isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], nn.Module):
        return _bare(*side)
    if isinstance(side, nn.Module):
        return _bare(side)
    if callable(side) and not isinstance(side, type):
        function: Callable[..., Any] = side
        return function
    remedy = "Give a model, saved states, or a function of token ids."
    raise ModuleError(f"Cannot compare the {who}", f"got {type(side).__name__}", remedy)


def _bare(module: nn.Module, tokenizer: Any = None) -> BareModule:
    tell_of_slow_products(module, type(module).__name__)
    return BareModule(module, tokenizer)


def _open_path(path: Path, name: str | os.PathLike[str]) -> Opened:
    if (path / "plan.json").is_file():
        store = open_store(path)
        return SavedRun(f"{store.source.model} ({path.name})", (store,))
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return load(name)
    states = load_states(path)
    stacks = (states.encoder, states.decoder) if isinstance(states, Pair) else (states,)
    return SavedRun(f"{stacks[0].source.model} ({path.name})", stacks)


def _in_memory(source: Readable) -> States:
    """Gather states that are read in blocks."""
    values = torch.stack(
        [torch.cat(list(source.blocks(site))) for site in source.sites]
    )
    return States(source.sites, values, source.tokens, getattr(source, "source", None))  # type: ignore[arg-type]


def as_model(side: Opened, who: str) -> Model:
    """Load a side as a model whose states are proved."""
    if isinstance(side, Model):
        return side
    if isinstance(side, BareModule):
        return load((side.module, side.tokenizer))
    raise ModuleError(
        f"Cannot use the {who} alone",
        "it is not a model",
        "Give a model on one side at least.",
    )


def as_side(model: Model) -> Side:
    """Take a loaded model as a side of the comparison."""
    return Side(
        model.name, model.module, model.anatomy, model.pad, majority_dtype(model.module)
    )


def as_candidate(side: Model | BareModule, reference: Model) -> Side | None:
    """Take a model or module as the candidate; None where its modules are not the
    reference's.

    A module with the same blocks in the same places needs no proof of its own: what is
    at fault in it may be the very thing that a proof would refuse.
    """
    module = side.module
    if is_compiled(module):
        return None
    recordable(module)
    name = side.name if isinstance(side, Model) else type(module).__name__
    dtype = majority_dtype(module)
    if _has_same_tree(module, reference.module, reference.anatomy):
        return Side(name, module, reference.anatomy, reference.pad, dtype)
    if isinstance(side, BareModule):
        try:
            side = load((module, side.tokenizer))
        except AnatomyError:
            return None
    if _depths(side.anatomy) != _depths(reference.anatomy):
        return None
    return Side(name, module, side.anatomy, reference.pad, dtype)


def is_compiled(module: Any) -> bool:
    """Check whether torch.compile made a module, so that it calls no hooks: only what
    it returns can be seen.
    """
    if not isinstance(module, nn.Module):
        return False
    if hasattr(module, "_orig_mod"):
        return True
    return any(
        getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def _has_same_tree(module: nn.Module, other: nn.Module, anatomy: Anatomy) -> bool:
    """Check that a module has all places where another's states are, and as many
    blocks.
    """
    parts, other_parts = hooks.parts_of(module), hooks.parts_of(other)
    if any(tap.path not in parts for tap in anatomy.taps.values()):
        return False
    for stack in anatomy.stacks:
        for block in stack.blocks:
            container = block.path.rpartition(".")[0]
            if len(parts[container]._modules) != len(other_parts[container]._modules):
                return False
    return True


def _depths(anatomy: Anatomy) -> list[tuple[str, int]]:
    return [(stack.name, stack.depth) for stack in anatomy.stacks]


def on_equal_terms(reference: Side, candidate: Side) -> ComparedSides:
    """Choose how parts are compared: in the coarser of both dtypes, and with the
    candidate's attention kernel.

    Whichever side must change for that is a private copy.
    """
    digits = common_digits(reference.module, candidate.module)
    equal_reference = _with_digits(reference, digits.reference)
    equal_candidate = _with_digits(candidate, digits.candidate)
    if torch.finfo(candidate.dtype).eps < torch.finfo(reference.dtype).eps:
        equal_candidate = _rounded(equal_candidate, reference.dtype, reference.module)
    kernel = candidate.kernel if candidate.kernel in KNOWN_KERNELS else reference.kernel
    if equal_candidate.dtype != reference.dtype:
        equal_reference = _rounded(
            equal_reference, equal_candidate.dtype, equal_candidate.module
        )
    if kernel != reference.kernel:
        copied = private_copy(equal_reference.module, attention=kernel)
        equal_reference = _with_module(equal_reference, copied)
    return ComparedSides(
        reference, candidate, equal_reference, equal_candidate, tuple(digits.notes)
    )


def _with_digits(side: Side, dtype: torch.dtype | None) -> Side:
    """Copy a side with the digits of its weights rounded; without a dtype it stays as
    it is.
    """
    if dtype is None:
        return side
    return _with_module(side, with_digits(side.module, dtype))


def _with_module(side: Side, module: nn.Module) -> Side:
    call = None if side.call is None else side.call.of(module)
    return replace(side, module=module, call=call, passes=0)


def _rounded(side: Side, dtype: torch.dtype, like: nn.Module) -> Side:
    """Copy a side with its weights rounded to a dtype; what the other module keeps
    wider stays so.
    """
    module = private_copy(side.module, _rounding(dtype, like))
    return replace(_with_module(side, module), dtype=dtype)


def _rounding(dtype: torch.dtype, like: nn.Module) -> Convert:
    dtypes = {name: tensor.dtype for name, tensor in named_weights(like)}

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if not isinstance(tensor, nn.Parameter):
            # Buffers such as rotary tables are in a dtype of their own.
            return tensor.to(dtypes.get(name, tensor.dtype))
        other = dtypes.get(name, dtype)
        return tensor.to(other if other.itemsize > dtype.itemsize else dtype)

    return convert


def encode(model: Model, texts: Texts | Inputs | None) -> Inputs:
    """Encode texts as the reference takes them; a decoder beside an encoder is given
    the same texts.
    """
    problem = "No texts to compare on"
    if texts is None:
        raise StatesError(
            problem,
            "only saved states come with their own texts",
            "Give at least one text.",
        )
    if isinstance(texts, list | tuple) and not texts:
        raise TextError(problem, "the list is empty", "Give at least one text.")
    if isinstance(texts, Inputs) or not model.encoder_decoder:
        return model.encode(texts)
    return model.encode(texts, targets=texts)


def check_tokenizers(inputs: Inputs, candidate: Model | BareModule) -> None:
    """Refuse a candidate whose tokenizer makes other ids of the texts."""
    if inputs.texts is None or candidate.tokenizer is None:
        return
    encoder = TextEncoder(candidate.tokenizer, None, vocabulary(candidate.module))
    for number, (text, ids) in enumerate(zip(inputs.texts, inputs.ids, strict=True)):
        other_ids = encoder.encode([text]).ids[0]
        if other_ids != ids:
            place = _first_difference(ids, other_ids)
            lengths = (
                f"text {number} is {len(ids)} tokens in one and {len(other_ids)} in the"
                " other"
            )
            remedy = "Give token ids, or models with one tokenizer."
            raise TextError(
                "Their tokenizers give different ids",
                f"{lengths}, from position {place} on",
                remedy,
            )


def _first_difference(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    for place, (token, other) in enumerate(zip(ids, other_ids, strict=False)):
        if token != other:
            return place
    return min(len(ids), len(other_ids))


def check_shapes(reference: Side, candidate: Side) -> None:
    """Refuse models whose states have different widths."""
    for stack, other in zip(
        reference.anatomy.stacks, candidate.anatomy.stacks, strict=True
    ):
        if stack.proof.width != other.proof.width:
            reason = (
                f"their hidden sizes are {stack.proof.width} and {other.proof.width}"
            )
            raise StatesError(
                "Cannot compare the two models",
                reason,
                "Give two versions of one model.",
            )


def check_widths(site: Site, width: int, other_width: int) -> None:
    """Refuse a site whose states have different widths in the two runs."""
    if width != other_width:
        reason = f"{site} is {width} wide in one and {other_width} in the other"
        raise StatesError(
            "Cannot compare the two runs", reason, "Give two versions of one model."
        )


def check_whole(saved: SavedRun) -> None:
    """Refuse stores that do not have every token: a pass cannot be compared with them."""
    for states in saved.stacks:
        if not isinstance(states, Store) or (
            states.pooled is None and states.every == 1
        ):
            continue
        what = (
            f"the {states.pooled} of each text"
            if states.pooled
            else f"one token in {states.every}"
        )
        problem, reason = (
            f"Cannot compare a pass with {saved.name}",
            f"the store keeps {what} alone",
        )
        raise StatesError(problem, reason, "Extract the states of every token.")


def check_tokens(inputs: Inputs, saved: SavedRun) -> None:
    """Refuse saved states of other texts than those that are run here."""
    for states in saved.stacks:
        here = inputs.of(states.sites[0].stack)
        lengths = (
            states.sequence_lengths
            if isinstance(states, Store)
            else states.tokens.lengths
        )
        if (
            here.flat.tolist() == states.tokens.ids.tolist()
            and here.lengths == lengths.tolist()
        ):
            continue
        problem = f"The saved states of {saved.name} are of other texts"
        if saved.windows() is not None:
            remedy = "Leave the texts out: the store has its own."
            raise StatesError(
                problem, "they were computed in windows of long texts", remedy
            )
        held = f"they hold {len(states.tokens):,} tokens of {states.tokens.count} texts"
        reason = f"{held}, which are not the {sum(here.lengths):,} given"
        raise StatesError(problem, reason, "Give the texts they were captured on.")


def check_same_texts(first: SavedRun, second: SavedRun, stack: str | None) -> None:
    """Refuse two saved runs of different texts."""
    tokens, other = first.of(stack).tokens, second.of(stack).tokens
    same_ids = tokens.ids.tolist() == other.ids.tolist()
    same_lengths = tokens.lengths.tolist() == other.lengths.tolist()
    # Vectors of whole texts have no ids to tell them apart by.
    is_pooled = bool((tokens.ids < 0).any())
    same_texts = not is_pooled or tokens.texts == other.texts
    if not (same_ids and same_lengths and same_texts):
        reason = (
            f"they hold {len(tokens):,} and {len(other):,} tokens that are not the same"
        )
        raise StatesError(
            "The two saved runs are of different texts",
            reason,
            "Capture both on the same texts.",
        )


def common_sites(
    sites: Sequence[Site], other_sites: Sequence[Site], names: tuple[str, str]
) -> tuple[Site, ...]:
    """List the sites that both sides have; none is an error."""
    both = tuple(site for site in sites if site in other_sites)
    if not both:
        reason = (
            f"{names[0]} has {summarise(sites)} and {names[1]} has"
            f" {summarise(other_sites)}"
        )
        raise StatesError(
            "Nothing to compare",
            reason,
            "Choose sites that both have, or give a pairing.",
        )
    return both
