"""Copy a module without copying its weights, so that it can be run in another way.

The copy has modules, tables of hooks and configurations of its own. Its parameters and
buffers are the very tensors of the original, or what `convert` makes of each of them.
To be converted, quantised weights are unpacked, and offloaded ones are read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.errors import ModuleError
from hiddenscope.modules import hooks, weights
from hiddenscope.modules.quantised import (
    plain_part,
    quantised_weights,
    refuse_packed_modules,
    shared_weight,
    state_objects,
)

Convert = Callable[[str, Tensor], Tensor]
"""Takes the name and the tensor of a weight, and returns that of the copy."""


def private_copy(
    module: nn.Module, convert: Convert | None = None, *, attention: str | None = None
) -> nn.Module:
    """Copy a module, sharing its weights unless they are converted.

    The copy may use another attention kernel.

    >>> linear = nn.Linear(2, 2)
    >>> private_copy(linear).weight is linear.weight
    True
    >>> wide = private_copy(linear, to_dtype(torch.float64))
    >>> wide.weight.dtype, linear.weight.dtype
    (torch.float64, torch.float32)
    """
    # deepcopy takes what it finds in this table instead of copying it.
    replacements: dict[int, Any] = {}
    packed = {
        id(getattr(weight.part, weight.name)) for weight in quantised_weights(module)
    }
    for name, tensor in named_weights(module):
        if id(tensor) in packed or tensor.is_meta:
            replacements[id(tensor)] = shared_weight(tensor)
        else:
            replacements[id(tensor)] = _replacement(name, tensor, convert)
    # A copy shares what else belongs to weights.
    shared = [*state_objects(module)]
    for part in module.modules():
        for hook in weights.accelerate_hooks(part):
            # deepcopy would read every offloaded weight into memory.
            shared.append(getattr(hook, "weights_map", None))
            shared.append(getattr(hook, "tied_params_map", None))
    replacements |= {id(value): value for value in shared}
    copied = copy.deepcopy(module, replacements)
    for part in copied.modules():
        hooks.drop_hooks(part)
    # Sharing needs neither unpacked nor gathered weights.
    if convert is not None and convert is not to_shared:
        refuse_packed_modules(module, "Cannot convert the weights of this model")
        _convert_packed(module, copied, convert)
        _convert_offloaded(copied, convert)
    if attention is not None:
        for config in _configurations(copied):
            config._attn_implementation_internal = attention
    return copied


def float64_copy(module: nn.Module) -> nn.Module:
    """Copy a module in float64, with a kernel for experts that knows float64."""
    copied = private_copy(module, to_dtype(torch.float64))
    for config in _configurations(copied):
        # torch's grouped product does not know it.
        if getattr(config, "_experts_implementation_internal", None) == "grouped_mm":
            config._experts_implementation_internal = "eager"
    return copied


def to_dtype(dtype: torch.dtype) -> Convert:
    """Make a conversion that casts every floating-point weight."""

    def convert(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return convert


def to_shared(name: str, tensor: Tensor) -> Tensor:
    """Share a weight's numbers, but not whether it needs a gradient.

    >>> linear = nn.Linear(2, 2)
    >>> shared = private_copy(linear, to_shared).requires_grad_(False)
    >>> shared.weight.data_ptr() == linear.weight.data_ptr()
    True
    >>> linear.weight.requires_grad
    True
    """
    # A packed weight is of a class of its own, and has no gradient.
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor.detach() if is_plain else tensor


def to_random(seed: int) -> Convert:
    """Make a conversion that draws every matrix again, with its own spread.

    Numbers of a matrix become normal, with mean 0 and the standard deviation that it
    has. Vectors, such as biases and the gains of norms, and buffers without fractions
    stay as they are, so that activations keep their scale in every architecture.

    >>> linear = nn.Linear(30, 30)
    >>> drawn = private_copy(linear, to_random(0))
    >>> bool((drawn.weight == linear.weight).any())
    False
    >>> drawn.bias is linear.bias or torch.equal(drawn.bias, linear.bias)
    True
    """
    # A generator of its own: the global one belongs to the user.
    generator = torch.Generator().manual_seed(seed)

    def convert(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or not tensor.is_floating_point():
            return tensor
        deviation = float(tensor.detach().float().std())
        drawn = torch.randn(tensor.shape, generator=generator) * deviation
        return drawn.to(dtype=tensor.dtype, device=tensor.device)

    return convert


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _convert_packed(module: nn.Module, copied: nn.Module, convert: Convert) -> None:
    """Put plain parts with converted numbers in the place of quantised ones."""
    for weight in list(quantised_weights(module)):
        numbers = convert(weight.full_name, nn.Parameter(weight.unpack(), False))
        plain = plain_part(weight, numbers.detach())
        part = copied.get_submodule(weight.path)
        bias = part._parameters.get("bias")
        if bias is not None:
            plain.register_parameter("bias", bias)
        if not weight.path:
            raise ModuleError(
                "Cannot convert a single quantised layer",
                "it would have to be exchanged within itself",
                "Put it into a module.",
            )
        container, _, name = weight.path.rpartition(".")
        setattr(copied.get_submodule(container), name, plain)


def _convert_offloaded(copied: nn.Module, convert: Convert) -> None:
    """Read the offloaded weights of a copy, which then stay where they are used."""
    for path, part in copied.named_modules():
        prefix = f"{path}." if path else ""
        device = weights.execution_device(part)
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            value = None
            if tensor is not None and tensor.is_meta:
                value = weights.offloaded_tensor(part, name)
            if value is None:
                continue
            value = value.to(device)
            if name in part._buffers:
                part._buffers[name] = _replacement(f"{prefix}{name}", value, convert)
                continue
            weight = nn.Parameter(value, requires_grad=False)
            converted = _replacement(f"{prefix}{name}", weight, convert)
            part.register_parameter(name, nn.Parameter(converted, requires_grad=False))
        for hook in weights.accelerate_hooks(part):
            hook.offload = hook.offload_buffers = False


def _replacement(name: str, tensor: Tensor, convert: Convert | None) -> Tensor:
    """Convert a weight; a parameter stays one, and one that does not change itself."""
    if convert is None:
        return tensor
    converted = convert(name, tensor)
    if converted is tensor:
        return tensor
    converted = converted.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(converted, requires_grad=False)
    return converted


def _configurations(module: nn.Module) -> list[Any]:
    """Return the configurations in which the parts of a module find their kernel."""
    configurations = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configurations[id(config)] = config
    return list(configurations.values())
