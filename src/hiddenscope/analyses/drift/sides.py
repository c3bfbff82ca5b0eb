"""Live sides of a comparison: how they are opened, checked and put on equal terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.dtypes import (
    common_digits,
    majority_dtype,
    with_digits,
)
from hiddenscope.analyses.drift.live_model import LiveModel
from hiddenscope.analyses.drift.parts import ComparedSides
from hiddenscope.analyses.drift.program import is_compiled
from hiddenscope.discovery import Anatomy, vocabulary
from hiddenscope.errors import AnatomyError, StatesError, TextError
from hiddenscope.model import Model, load
from hiddenscope.modules import calls, hooks
from hiddenscope.modules.module_copy import named_weights, private_copy
from hiddenscope.passes import Inputs, TextEncoder, Texts, require_recordable
from hiddenscope.states import Tokens

KNOWN_KERNELS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)


@dataclass(eq=False)
class BareModule:
    """A module that was given without being loaded, with its tokenizer, if any."""

    module: nn.Module
    tokenizer: object = None


def as_live(model: Model) -> LiveModel:
    """Return a loaded model as a side of a comparison."""
    return LiveModel(
        model.name, model.module, model.anatomy, model.pad, majority_dtype(model.module)
    )


def as_candidate(side: Model | BareModule, reference: Model) -> LiveModel | None:
    """Return a model or module as the candidate; None if its modules are others.

    A module with the same blocks in the same places needs no proof of its own: the
    fault in it may be the very thing that a proof would refuse.
    """
    module = side.module
    if is_compiled(module):
        return None
    require_recordable(module)
    name = side.name if isinstance(side, Model) else type(module).__name__
    dtype = majority_dtype(module)
    if _has_same_tree(module, reference.module, reference.anatomy):
        return LiveModel(name, module, reference.anatomy, reference.pad, dtype)
    # A module in plain PyTorch is a port: it is paired by what it computes.
    if calls.plain_parameters(module) is not None:
        return None
    if isinstance(side, BareModule):
        try:
            side = load((module, side.tokenizer))
        except AnatomyError:
            return None
    if _depths(side.anatomy) != _depths(reference.anatomy):
        return None
    return LiveModel(name, module, side.anatomy, reference.pad, dtype)


def _has_same_tree(module: nn.Module, other: nn.Module, anatomy: Anatomy) -> bool:
    """Check that a module has the places of another's states, and as many blocks."""
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


def on_equal_terms(reference: LiveModel, candidate: LiveModel) -> ComparedSides:
    """Choose how parts are compared, on private copies where a side must change.

    The coarser of both dtypes and the candidate's attention kernel are used.
    """
    digits = common_digits(reference.module, candidate.module)
    equal_reference = _with_digits(reference, digits.reference)
    equal_candidate = _with_digits(candidate, digits.candidate)
    if torch.finfo(candidate.dtype).eps < torch.finfo(reference.dtype).eps:
        equal_candidate = _rounded(equal_candidate, reference.dtype, reference.module)
    if equal_candidate.dtype != reference.dtype:
        equal_reference = _rounded(
            equal_reference, equal_candidate.dtype, equal_candidate.module
        )
    kernel = candidate.kernel
    if kernel in KNOWN_KERNELS and kernel != reference.kernel:
        copied = private_copy(equal_reference.module, attention=kernel)
        equal_reference = replace(equal_reference, module=copied, passes=0)
    return ComparedSides(
        reference, candidate, equal_reference, equal_candidate, tuple(digits.notes)
    )


def _with_digits(model: LiveModel, dtype: torch.dtype | None) -> LiveModel:
    if dtype is None:
        return model
    return replace(model, module=with_digits(model.module, dtype), passes=0)


def _rounded(model: LiveModel, dtype: torch.dtype, like: nn.Module) -> LiveModel:
    """Copy a model with its weights in a dtype; what `like` keeps wider stays wide."""
    dtypes = {name: tensor.dtype for name, tensor in named_weights(like)}

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        # Buffers such as rotary tables have a dtype of their own.
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(dtypes.get(name, tensor.dtype))
        other = dtypes.get(name, dtype)
        return tensor.to(other if other.itemsize > dtype.itemsize else dtype)

    module = private_copy(model.module, convert)
    return replace(model, module=module, dtype=dtype, passes=0)


def encode(model: Model, texts: Texts | Inputs | None) -> Inputs:
    """Encode texts for the reference; an encoder-decoder gets them on both sides."""
    problem, remedy = "No texts to compare on", "Give at least one text."
    if texts is None:
        reason = "only saved states come with their own texts"
        raise StatesError(problem, reason, remedy)
    if isinstance(texts, list | tuple) and not texts:
        raise TextError(problem, "the list is empty", remedy)
    if isinstance(texts, Inputs) or not model.encoder_decoder:
        return model.encode(texts)
    return model.encode(texts, targets=texts)


def tokens_of(model: Model, inputs: Inputs) -> dict[str | None, Tokens]:
    """Return the tokens of each stack."""
    stacks = ("encoder", "decoder") if model.encoder_decoder else (None,)
    return {stack: model.text_encoder.tokens(inputs.of(stack)) for stack in stacks}


def check_tokenizers(inputs: Inputs, candidate: Model | BareModule) -> None:
    """Raise if the candidate's tokenizer makes other ids of the texts."""
    if inputs.texts is None or candidate.tokenizer is None:
        return
    encoder = TextEncoder(candidate.tokenizer, None, vocabulary(candidate.module))
    for number, (text, ids) in enumerate(zip(inputs.texts, inputs.ids, strict=True)):
        other_ids = encoder.encode([text]).ids[0]
        if other_ids != ids:
            reason = (
                f"text {number} is {len(ids)} tokens in one and {len(other_ids)} in the"
                f" other, from position {_first_difference(ids, other_ids)} on"
            )
            remedy = "Give token ids, or models with one tokenizer."
            raise TextError("Their tokenizers give different ids", reason, remedy)


def _first_difference(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    for place, (token, other) in enumerate(zip(ids, other_ids, strict=False)):
        if token != other:
            return place
    return min(len(ids), len(other_ids))
