"""Copy a module without copying its weights, so that it can be run in another way.

The copy has modules, tables of hooks and configurations of its own. Its parameters and
buffers are the very tensors of the original, or what `convert` makes of each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.modules import hooks

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
    for name, tensor in named_weights(module):
        replacements[id(tensor)] = _replacement(name, tensor, convert)
    copied: nn.Module = copy.deepcopy(module, replacements)
    for part in copied.modules():
        hooks.drop_hooks(part)
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
    return tensor.detach() if tensor.requires_grad else tensor


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
