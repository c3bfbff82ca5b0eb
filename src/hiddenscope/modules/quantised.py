"""Quantised weights: their scheme, and the numbers that they stand for.

torchao and optimum-quanto keep a weight as a tensor of their own class, bitsandbytes as
packed bytes with scales beside them. All of them can be unpacked to plain numbers. Of a
library that packs weights into modules of its own only the name is known. No library of
these is imported here, and torch only where it is used: `hiddenscope --help` needs none
of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from hiddenscope.errors import ModuleError

if TYPE_CHECKING:
    from torch import Tensor, nn

# The weights of these show what they are, whatever a config says.
_IN_TENSORS = ("torchao", "bitsandbytes", "quanto", "gguf")
_SHORT_NAMES = {"float8": "fp8", "float4": "fp4"}
# A wrong scale changes a number by more than this, and rounding to bfloat16 by less.
MISREAD = 0.01
_TENSOR_NAME = re.compile(r"([A-Za-z]+\d+)\w*?Tensor")


class QuantisedWeight(NamedTuple):
    """A quantised weight: the module that holds it, its name there, and its scheme.

    `rounds_input` says that its product rounds the input too, which has no derivative.
    """

    path: str
    part: nn.Module
    name: str
    scheme: str
    rounds_input: bool

    @property
    def full_name(self) -> str:
        """Return the name that the whole module has for this weight."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def unpack(self) -> Tensor:
        """Return the numbers that the packed weight stands for.

        A projection gets [output, input], however the original kept it.
        """
        weight = getattr(self.part, self.name)
        if _library(weight) != "bitsandbytes":
            # Older classes of torchao wrap the weight where activations are rounded.
            inner = getattr(weight, "original_weight_tensor", weight)
            numbers: Tensor = inner.dequantize()
            return numbers.detach()
        if _is_llm_int8(self.part):
            scales = _int8_scales(self.part).to(weight.device)
            rows: Tensor = weight.detach().float()
            return rows * (scales.float() / 127)[:, None]
        return _unpack_4bit(weight, weight.quant_state)

    @property
    def is_misread(self) -> bool:
        """Return whether its library takes scales of neighbouring blocks for it.

        bitsandbytes 0.50 does so on some processors where a block of scales goes over
        the end of a row.
        """
        weight = getattr(self.part, self.name)
        state = copy(getattr(weight, "quant_state", None))
        if state is None:
            return False
        # In one row there is no end of a row for a block to go over.
        state.shape = (1, state.shape.numel())
        in_one_row = _unpack_4bit(weight, state)
        numbers = self.unpack().reshape_as(in_one_row)
        return not numbers.allclose(in_one_row, rtol=MISREAD)


def quantised_weights(module: nn.Module) -> Iterator[QuantisedWeight]:
    """Yield the quantised weights of a module that can be unpacked.

    >>> from torch import nn
    >>> list(quantised_weights(nn.Linear(2, 2)))
    []
    """
    for path, part in module.named_modules():
        for name, weight in part._parameters.items():
            scheme = _scheme(weight)
            if scheme:
                yield QuantisedWeight(path, part, name, scheme, _rounds_input(weight))


def quantisation_of(module: nn.Module) -> str:
    """Name the scheme of a module's quantised weights; empty for plain weights.

    >>> from torch import nn
    >>> quantisation_of(nn.Linear(2, 2))
    ''
    """
    schemes = {weight.scheme: None for weight in quantised_weights(module)}
    if schemes:
        return " and ".join(schemes)
    return _configured_method(module)


def refuse_gradients(module: nn.Module) -> None:
    """Raise ModuleError if gradients through a module's weights would be wrong.

    >>> from torch import nn
    >>> refuse_gradients(nn.Linear(2, 2))
    """
    task = f"Cannot take gradients through {type(module).__name__}"
    remedy = "Use weight-only quantisation, or the model before quantisation."
    for weight in quantised_weights(module):
        if weight.rounds_input:
            reason = (
                f"{weight.scheme} rounds what enters `{weight.path}` to 8 bits, and"
                " rounding has no derivative"
            )
            raise ModuleError(task, reason, remedy)
    method = _configured_method(module)
    if method:
        reason = f"its weights are packed by {method}, whose gradients are not known"
        raise ModuleError(task, reason, remedy)


def batch_dependence(module: nn.Module) -> str:
    """Say why a text's numbers depend on its batch; empty where nothing is known."""
    for part in module.modules():
        state = getattr(part, "state", None)
        if _is_llm_int8(part) and getattr(state, "threshold", 0.0) > 0:
            return "LLM.int8() chooses its outlier channels over the whole batch"
    return ""


def packed_tensors(part: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a weight is made of, with names.

    Of a plain weight that is the weight itself.
    """
    weight: Any = part._parameters.get(name)
    if weight is None:
        weight = part._buffers[name]
    yield from _flat_tensors(name, weight)
    if _is_llm_int8(part) and name == "weight":
        yield f"{name}.SCB", _int8_scales(part)
    state = getattr(weight, "quant_state", None)
    if _library(weight) == "bitsandbytes" and state is not None:
        yield from _quant_state_tensors(f"{name}.quant_state", state)


def unpacked_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape that a weight has once it is unpacked."""
    state = getattr(weight, "quant_state", None)
    return tuple(weight.shape if state is None else state.shape)


def state_objects(module: nn.Module) -> Iterator[object]:
    """Yield what quantised modules keep beside their parameters, to be shared."""
    from torch import is_tensor

    for part in module.modules():
        if type(part).__module__.partition(".")[0] != "bitsandbytes":
            continue
        if _is_llm_int8(part):
            yield from filter(is_tensor, vars(part.state).values())
        state = getattr(part, "quant_state", None)
        if state is not None:
            yield state


def rearranged_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts whose 4-bit weights a pass would rearrange in place.

    bitsandbytes does so on processors with bfloat16, in eval mode, and rounds their
    scales; another thread then reads what it did not pack.
    """
    for part in module.modules():
        is_rearranged = getattr(part, "support_avx512bf16_for_cpu", False)
        if is_rearranged and part.weight.device.type == "cpu":
            yield part


def keep_layout(module: nn.Module) -> None:
    """Let 4-bit weights that nobody else uses yet lie as they were packed."""
    part: Any
    for part in rearranged_parts(module):
        part.support_avx512bf16_for_cpu = False


def shared_weight(weight: Tensor) -> Tensor:
    """Return the tensor that a copy of a module uses in the place of a packed one.

    Mostly it is the same. An int8 weight of bitsandbytes gives its scales away to the
    module that is called first, so that the copy needs an object of its own.
    """
    packed: Any = weight
    if _library(weight) != "bitsandbytes" or type(weight).__name__ != "Int8Params":
        return weight
    kind = type(packed)
    shared: Tensor = kind(
        packed.data,
        requires_grad=False,
        has_fp16_weights=packed.has_fp16_weights,
        CB=packed.CB,
        SCB=packed.SCB,
    )
    return shared


def plain_part(weight: QuantisedWeight, numbers: Tensor) -> nn.Module:
    """Build a plain module that computes with unpacked numbers."""
    from torch import nn

    part = weight.part
    plain: nn.Module
    if isinstance(part, nn.Linear):
        rows, columns = numbers.shape
        plain = nn.Linear(columns, rows, bias=False, device="meta")
    elif isinstance(part, nn.Embedding):
        rows, columns = numbers.shape
        plain = nn.Embedding(rows, columns, part.padding_idx, device="meta")
    else:
        raise ModuleError(
            f"Cannot unpack `{weight.path}`",
            f"it is a {type(part).__name__}, neither a projection nor an embedding",
            "Use the model before quantisation.",
        )
    plain.weight = nn.Parameter(numbers, requires_grad=False)
    plain.training = part.training
    return plain


def refuse_packed_modules(module: nn.Module, task: str) -> None:
    """Raise ModuleError if weights are packed in a way that cannot be unpacked."""
    method = _configured_method(module)
    if method:
        raise ModuleError(
            task,
            f"its weights are packed by {method}, and only its own code can unpack"
            " them",
            "Use the model before quantisation, or int8, fp8 or nf4.",
        )


def _configured_method(module: nn.Module) -> str:
    """Return the method that a config names, if only that knows the weights."""
    config = getattr(module, "config", None)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None or any(quantised_weights(module)):
        return ""
    if isinstance(quantisation, dict):
        method = quantisation.get("quant_method", "")
    else:
        method = getattr(quantisation, "quant_method", "")
    name = str(getattr(method, "value", method))
    return "" if name in _IN_TENSORS else name


def _library(tensor: object) -> str:
    """Return the top package that defines the class of a tensor."""
    return type(tensor).__module__.partition(".")[0]


def _scheme(weight: Any) -> str:
    """Name the scheme of one weight; empty for a plain one."""
    library, kind = _library(weight), type(weight).__name__
    if library == "bitsandbytes":
        state = getattr(weight, "quant_state", None)
        if kind == "Int8Params" and str(weight.dtype) == "torch.int8":
            return "bitsandbytes int8"
        if kind != "Params4bit" or state is None:
            return ""
        packed = " with packed scales" if state.nested else ""
        return f"bitsandbytes {state.quant_type}{packed}"
    if library not in ("torchao", "optimum"):
        return ""
    match = _TENSOR_NAME.fullmatch(kind)
    if match is not None:
        kind = match[1].lower()
    kind = _SHORT_NAMES.get(kind, kind)
    if library == "optimum":
        return f"quanto {getattr(weight.qtype, 'name', kind)}"
    if _rounds_input(weight):
        return f"torchao {kind} with {kind} activations"
    return f"torchao {kind} weight-only"


def _rounds_input(weight: Any) -> bool:
    """Tell whether the product with a weight rounds its input as well."""
    library = _library(weight)
    if library == "bitsandbytes":
        return type(weight).__name__ == "Int8Params"
    if library != "torchao":
        return False
    if hasattr(weight, "input_quant_func"):
        return True
    return getattr(weight, "act_quant_kwargs", None) is not None


def _unpack_4bit(weight: Tensor, state: Any) -> Tensor:
    from bitsandbytes import functional

    unpacked: Tensor = functional.dequantize_4bit(weight.detach(), state)
    return unpacked.detach()


def _is_llm_int8(part: nn.Module) -> bool:
    is_theirs = type(part).__module__.partition(".")[0] == "bitsandbytes"
    return is_theirs and type(part).__name__ == "Linear8bitLt"


def _int8_scales(part: Any) -> Tensor:
    """Return the scales of an int8 weight, which move on its first call."""
    scales: Tensor | None = getattr(part.weight, "SCB", None)
    if scales is None:
        scales = part.state.SCB
    assert scales is not None, "a quantised weight has scales"
    return scales


def _flat_tensors(path: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield path, tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _flat_tensors(f"{path}.{name}", getattr(tensor, name))


def _quant_state_tensors(path: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales and the table of values of a 4-bit weight."""
    from torch import Tensor

    for name in ("absmax", "code", "offset"):
        value = getattr(state, name, None)
        if isinstance(value, Tensor):
            yield f"{path}.{name}", value
    if state.state2 is not None:
        yield from _quant_state_tensors(f"{path}.state2", state.state2)
