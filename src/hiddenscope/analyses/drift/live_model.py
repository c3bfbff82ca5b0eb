"""A side of a comparison that can be run: its states, its dtypes, and how it is called.

A bfloat16 checkpoint is computed in float32 on most CPUs. Whatever their dtype, its
weights are then bfloat16 numbers. They differ from those of a float32 original by the
digits that were rounded away when it was saved.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hiddenscope.discovery import Anatomy, Tap, vocabulary
from hiddenscope.errors import AnatomyError, Error, PassError, StatesError, TextError
from hiddenscope.model import Model, load
from hiddenscope.modules import autograd, calls, hooks
from hiddenscope.modules.module_copy import private_copy
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.passes import (
    Inputs,
    PaddedBatch,
    TextEncoder,
    Texts,
    require_recordable,
)
from hiddenscope.sites import Site
from hiddenscope.states import Tokens

LOGITS = "logits"
BRANCHES = ("attn", "cross", "mlp")
NARROW = (torch.bfloat16, torch.float16)
# Elements that are converted at a time, to save memory.
CHUNK = 2**22
TARGET_WORDS = ("decoder", "target", "tgt")
Program = Callable[..., Any]


class Side(Protocol):
    """A side of a comparison, as a result names it."""

    @property
    def name(self) -> str:
        """Return what it is called."""

    @property
    def source(self) -> Mapping[str, object]:
        """Return where its states come from."""


@dataclass(eq=False)
class BareModule:
    """A module that was given without being loaded, with its tokenizer, if any."""

    module: nn.Module
    tokenizer: object = None


@dataclass(eq=False)
class LiveModel:
    """A module with the places of its states and the block that makes each layer.

    A port, whose modules have other names than the reference's, has its own `taps` and
    `blocks`. Other models use those of the anatomy. `model` is the loaded model that it
    was made of, if any.
    """

    name: str
    module: nn.Module
    anatomy: Anatomy
    pad: int
    taps: Mapping[Site, Tap] = field(default_factory=dict)
    blocks: Mapping[Site, str] = field(default_factory=dict)
    is_port: bool = False
    model: Model | None = None
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = majority_dtype(self.module)
        self.device = hooks.input_device(self.module)
        if self.taps:
            return
        self.taps = self.anatomy.taps
        blocks = {}
        for name, stack in zip(self.stacks, self.anatomy.stacks, strict=True):
            for number, block in enumerate(stack.blocks, 1):
                blocks[Site(number, "", name)] = block.path
        self.blocks = blocks

    @property
    def source(self) -> Mapping[str, object]:
        """Return where its states come from."""
        if self.model is not None:
            return self.model.source(None).to_json()
        return {
            "model": self.name,
            "dtype": name_of(self.dtype),
            "device": str(self.device),
            "attention": self.kernel,
        }

    @property
    def loaded(self) -> Model:
        """Return the loaded model, which a reference always is."""
        assert self.model is not None
        return self.model

    @property
    def stacks(self) -> list[str | None]:
        """Return the names of the stacks in sites: None if there is one."""
        if len(self.anatomy.stacks) == 1:
            return [None]
        return [stack.name for stack in self.anatomy.stacks]

    def with_digits(self, dtype: torch.dtype | None) -> LiveModel:
        """Round the weights to the digits of a dtype; without one, change nothing."""
        if dtype is None:
            return self
        return replace(self, module=with_digits(self.module, dtype))

    @property
    def kernel(self) -> str:
        """Return the name of its attention kernel."""
        config = getattr(self.module, "config", None)
        return str(getattr(config, "_attn_implementation", None) or "none")

    @property
    def sites(self) -> list[Site]:
        """Return the layers, the branches of every block, and final."""
        return [site for site in self.taps if site.part in ("", *BRANCHES)]

    def layers_of(self, path: str) -> list[Site]:
        """Return the layers that a block makes: one in each of its calls."""
        return [layer for layer, block in self.blocks.items() if block == path]

    @property
    def outer_parts(self) -> dict[str, nn.Module]:
        """Return the blocks and the modules outside them, by path."""
        inside = tuple(f"{path}." for path in self.blocks.values())
        parts = hooks.parts_of(self.module).items()
        return {path: part for path, part in parts if not path.startswith(inside)}

    def part(self, path: str) -> nn.Module:
        """Return the submodule at a path."""
        return self.module.get_submodule(path)

    def batch(self, inputs: Inputs) -> PaddedBatch:
        """Pad texts on its device."""
        targets = None
        if len(self.stacks) > 1 and inputs.targets is not None:
            targets = PaddedBatch.of(inputs.targets, self.pad, self.device)
        return PaddedBatch.of(inputs, self.pad, self.device, targets)

    def run(self, batch: PaddedBatch) -> object:
        """Run the module on a batch and return its output."""
        with autograd.restored(inference=False), torch.no_grad():
            if self.is_port:
                return run_program(self.module, batch)
            # A NaN that an attention kernel loses is tolerated: it may be in padding,
            # and what it does elsewhere shows in the comparison.
            return hooks.call_module(
                self.module, batch.arguments(self.module), finite=False
            )


def layer_before(site: Site) -> Site:
    """Return the layer that enters the block of a site."""
    return Site((site.layer or 1) - 1, "", site.stack)


def as_live(model: Model) -> LiveModel:
    """Return a loaded model as a side of a comparison."""
    return LiveModel(model.name, model.module, model.anatomy, model.pad, model=model)


def as_candidate(side: Model | BareModule, reference: Model) -> LiveModel | None:
    """Return a model or module as the candidate; None if its modules are others.

    A module with the same blocks in the same places needs no proof of its own: the
    fault in it may be the very thing that a proof would refuse.
    """
    module = side.module
    anatomy = reference.anatomy
    if is_compiled(module):
        return None
    require_recordable(module)
    model = None
    name = type(module).__name__
    if isinstance(side, Model):
        model = side
        name = side.name
    if not _has_same_tree(module, reference):
        # A module in plain PyTorch is a port: it is paired by what it computes.
        if calls.plain_parameters(module) is not None:
            return None
        try:
            if isinstance(side, BareModule):
                side = load((module, side.tokenizer))
        except AnatomyError:
            return None
        depths = [(stack.name, stack.depth) for stack in anatomy.stacks]
        anatomy = side.anatomy
        if depths != [(stack.name, stack.depth) for stack in anatomy.stacks]:
            return None
    return LiveModel(name, module, anatomy, reference.pad, model=model)


def _has_same_tree(module: nn.Module, reference: Model) -> bool:
    """Check that a module has the places of another's states, and as many blocks."""
    parts = hooks.parts_of(module)
    others = hooks.parts_of(reference.module)
    if any(tap.path not in parts for tap in reference.anatomy.taps.values()):
        return False
    for stack in reference.anatomy.stacks:
        for block in stack.blocks:
            container = block.path.rpartition(".")[0]
            if len(parts[container]._modules) != len(others[container]._modules):
                return False
    return True


def encode(model: Model, texts: Texts | Inputs | None) -> Inputs:
    """Encode texts for the reference; an encoder-decoder gets them on both sides."""
    if texts is None:
        problem = "No texts to compare on"
        reason = "only saved states come with their own texts"
        raise StatesError(problem, reason, "Give at least one text.")
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
        others = encoder.encode([text]).ids[0]
        if others == ids:
            continue
        pairs = zip(ids, others, strict=False)
        place = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        raise TextError(
            "Their tokenizers give different ids",
            f"text {number} is {len(ids)} tokens in one and {len(others)} in the other,"
            f" from position {place} on",
            "Give token ids, or models with one tokenizer.",
        )


def is_compiled(program: object) -> bool:
    """Check whether torch.compile made a module.

    It calls no hooks then, so only its outputs can be seen.
    """
    if not isinstance(program, nn.Module):
        return False
    if hasattr(program, "_orig_mod"):
        return True
    for part in program.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            return True
    return False


def run_program(program: Program, batch: PaddedBatch) -> object:
    """Call a program with token ids, and with a mask and decoder ids if it takes them.

    A compiled Hugging Face model is asked for its hidden states.
    """
    with naming_errors():
        if is_compiled(program):
            module: Any = program
            arguments = batch.arguments(getattr(module, "_orig_mod", module))
            return program(**arguments, output_hidden_states=True, return_dict=True)
        return program(batch.ids, **_named_arguments(program, batch))


@contextmanager
def naming_errors() -> Iterator[None]:
    """Raise a PassError that quotes what a program raised."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        reason = f"it raised {type(error).__name__}: {str(error)[:500]}"
        remedy = "Call it by itself on token ids [1, token]."
        raise PassError("Cannot run the candidate", reason, remedy) from error


def _named_arguments(program: Program, batch: PaddedBatch) -> dict[str, Tensor]:
    """Return the mask and the decoder ids by the names of a program's parameters."""
    function = program.forward if isinstance(program, nn.Module) else program
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        # Builtins have no signature to read.
        return {}
    offered = {"mask": batch.mask}
    if batch.targets is not None:
        offered["target"] = batch.targets.ids
    arguments = {}
    for parameter in parameters:
        meaning = "mask" if "mask" in parameter.name else ""
        if any(word in parameter.name for word in TARGET_WORDS):
            # A mask of the decoder is neither.
            meaning = "" if meaning else "target"
        is_variadic = parameter.kind.name.startswith("VAR_")
        if meaning in offered:
            arguments[parameter.name] = offered.pop(meaning)
        elif parameter.default is parameter.empty and not is_variadic:
            reason = f"it needs {parameter.name!r} as well as token ids"
            remedy = "Give a function of token ids that calls it."
            raise PassError("Cannot call the candidate", reason, remedy)
    return arguments


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def narrowest(tensors: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the first of bfloat16 and float16 that holds all tensors, or their dtype.

    >>> narrowest([torch.tensor([1.0, 1.5])], torch.float32)
    torch.bfloat16
    >>> narrowest([torch.tensor([0.1])], torch.float32)
    torch.float32
    """
    candidates = [narrow for narrow in NARROW if narrow.itemsize < dtype.itemsize]
    for tensor in tensors:
        candidates = [narrow for narrow in candidates if _holds(narrow, tensor)]
        if not candidates:
            break
    return next(iter(candidates), dtype)


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Check whether a dtype holds every element of a tensor exactly."""
    # A NaN says nothing about digits, and is not equal to itself.
    chunks = torch.split(tensor.detach().flatten(), CHUNK)
    return all(torch.equal(chunk.to(dtype).to(chunk), chunk) for chunk in chunks)


def majority_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of most weights: one layer in another does not decide."""
    counts: Counter[torch.dtype] = Counter()
    for weight in _weights(module):
        counts[weight.dtype] += weight.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def stored_dtype(module: nn.Module) -> torch.dtype:
    """Return the narrow dtype that holds every weight exactly, or the majority dtype.

    >>> linear = nn.Linear(8, 8)
    >>> stored_dtype(linear), stored_dtype(linear.bfloat16().float())
    (torch.float32, torch.bfloat16)
    """
    dtype = majority_dtype(module)
    weights = list(_weights(module))
    if not weights or any(weight.is_meta for weight in weights):
        return dtype
    # What quantisation left as it was says little about the whole.
    if any(quantised_weights(module)):
        return dtype
    return narrowest(weights, dtype)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for weight in module.parameters():
        # The digits of a quantised weight are another matter.
        is_plain = not hasattr(weight, "__tensor_flatten__")
        if is_plain and weight.is_floating_point():
            yield weight.detach()


@dataclass(frozen=True)
class Digits:
    """The dtypes that weights are rounded to before a comparison, if any.

    The weights keep their dtype; only their digits are reduced.
    """

    reference: torch.dtype | None = None
    candidate: torch.dtype | None = None

    @classmethod
    def common(cls, reference: nn.Module, candidate: nn.Module) -> Digits:
        """Choose the digits in which the weights of two modules are compared.

        A candidate that was saved in fewer digits than the reference has is no fault:
        the reference is rounded. More digits than a reference that was saved in few are
        a fault, unless they are the digits that were rounded away: then most of the
        candidate's weights, rounded, are the reference's.
        """
        saved = stored_dtype(candidate)
        if saved.itemsize < majority_dtype(candidate).itemsize:
            return cls.saved_in(saved, reference)
        expected = stored_dtype(reference)
        widest = min(saved.itemsize, majority_dtype(reference).itemsize)
        if expected.itemsize < widest and _rounds_to(candidate, reference, expected):
            return cls(candidate=expected)
        return cls()

    @classmethod
    def saved_in(cls, dtype: torch.dtype, reference: nn.Module) -> Digits:
        """Round the reference to the dtype of a candidate, unless it holds it."""
        if all(_holds(dtype, weight) for weight in _weights(reference)):
            return cls()
        return cls(reference=dtype)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was rounded, and why."""
        dtype = self.reference or self.candidate
        if dtype is None:
            return ()
        name = name_of(dtype)
        why = (
            f"The candidate was saved in {name}, and computes in a wider dtype. The"
            " reference's"
        )
        if self.candidate is not None:
            why = (
                f"The reference was saved in {name}, and the candidate has the digits"
                " that were rounded away. Its"
            )
        return (f"{why} weights were rounded to {name} for the comparison.",)


def _rounds_to(module: nn.Module, rounded: nn.Module, dtype: torch.dtype) -> bool:
    """Check whether most weights of a module, rounded, are those of another.

    Names and order do not matter.
    """

    # Sums of the bits of rounded weights, so that shape and order do not matter.
    def fingerprint(weight: Tensor) -> tuple[int, int, int]:
        total = squares = 0
        for chunk in torch.split(weight.flatten(), CHUNK):
            bits = chunk.to(dtype).view(torch.int16).long()
            total += int(bits.sum())
            squares += int(bits.square().sum())
        return weight.numel(), total, squares

    known = {fingerprint(weight) for weight in _weights(rounded)}
    count = matching = 0
    for weight in _weights(module):
        count += weight.numel()
        if fingerprint(weight) in known:
            matching += weight.numel()
    return 2 * matching > count


def with_digits(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module with its parameters rounded to the digits of a dtype.

    >>> linear = nn.Linear(8, 8)
    >>> stored_dtype(with_digits(linear, torch.bfloat16)), stored_dtype(linear)
    (torch.bfloat16, torch.float32)
    """
    return with_parameters(module, lambda weight: weight.to(dtype).to(weight.dtype))


def with_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with its parameters changed.

    Models keep buffers such as rotary tables wider: they stay as they are.
    """

    def convert(name: str, tensor: Tensor) -> Tensor:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return change(tensor) if is_weight else tensor

    return private_copy(module, convert)
