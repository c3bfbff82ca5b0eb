"""What accelerate keeps elsewhere: its hooks on a module, and the weights behind them.

accelerate puts a weight that is offloaded on the meta device and brings it in for each
call. Its hooks know where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def accelerate_hooks(part: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks on one part, which has a single one or a sequence."""
    hook = vars(part).get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", [hook])


def offloaded_tensor(part: nn.Module, name: str) -> Tensor | None:
    """Read an offloaded weight from where accelerate keeps it; None if unknown.

    >>> offloaded_tensor(nn.Linear(2, 2), "weight") is None
    True
    """
    for hook in accelerate_hooks(part):
        weights = getattr(hook, "weights_map", None)
        if not isinstance(weights, Mapping):
            continue
        try:
            value = weights[name]
        except KeyError:
            continue
        if isinstance(value, Tensor):
            return value.detach()
    return None


def execution_device(part: nn.Module) -> torch.device | None:
    """Return the device that accelerate runs one part on; None without its hooks."""
    for hook in accelerate_hooks(part):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return as_device(device)
    return None


def as_device(device: Any) -> torch.device:
    """Return a device; as in accelerate, a number is that of a GPU."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device(device)


def devices_of(module: nn.Module) -> list[str]:
    """Name every place that holds weights of a module, in the order of the weights.

    Weights that accelerate reads from files are on "disk".
    """
    places: dict[str, None] = {}
    for part in module.modules():
        for name, weight in (*part._parameters.items(), *part._buffers.items()):
            if weight is not None:
                places[_place(part, name, weight)] = None
    return list(places)


def _place(part: nn.Module, name: str, weight: Tensor) -> str:
    if not weight.is_meta:
        return str(weight.device)
    for hook in accelerate_hooks(part):
        if _is_on_disk(getattr(hook, "weights_map", None), name):
            return "disk"
    value = offloaded_tensor(part, name)
    return "disk" if value is None else str(value.device)


def _is_on_disk(weights: Any, name: str) -> bool:
    """Tell whether a weight is in accelerate's index of files."""
    prefix = ""
    # A part sees the map of the whole model through a prefix.
    while hasattr(weights, "dataset"):
        prefix = f"{weights.prefix}{prefix}"
        weights = weights.dataset
    index = getattr(weights, "index", None)
    return isinstance(index, Mapping) and f"{prefix}{name}" in index
