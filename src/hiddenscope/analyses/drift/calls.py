"""Record the calls of modules: arguments, outputs, and the calls inside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.errors import is_out_of_memory
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.module_copy import float64_copy


@dataclass
class ModuleCall:
    """One call of a module, with copies of its arguments and returned tensors.

    `structure` is the form of what it returned: True for a tensor, a list for a tuple,
    list or dict, else None.
    """

    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    structure: object = None
    inner: list[ModuleCall] = field(default_factory=list)

    @classmethod
    def copied(
        cls, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ModuleCall:
        """Return a call with copies of these arguments.

        One state that is given as queries, keys and values stays one.
        """
        copies: dict[int, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), clone(tensor))

        return cls(path, map_tensors(args, copy), map_tensors(dict(kwargs), copy))

    @property
    def state(self) -> Tensor | None:
        """Return the hidden state among its arguments."""
        return hooks.state_in(self.args, self.kwargs)

    def with_state(self, state: Tensor) -> ModuleCall:
        """Return the same call with another hidden state."""
        args, kwargs = hooks.with_state_in(self.args, self.kwargs, state)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def output(self) -> Tensor | None:
        """Return the first floating-point tensor that it returned."""
        for tensor in self.outputs:
            if tensor.is_floating_point():
                return tensor
        return None

    def walk(self) -> Iterator[ModuleCall]:
        """Yield this call and all calls inside it, in the order in which they began."""
        yield self
        for call in self.inner:
            yield from call.walk()

    def leaves(self) -> Iterator[ModuleCall]:
        """Yield the calls that made no further calls."""
        for call in self.walk():
            if not call.inner:
                yield call

    def repeat(self, module: nn.Module, device: torch.device) -> object:
        """Call another module with the same arguments, moved to its device."""

        # Always a copy: some modules write into their arguments.
        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True)

        args = map_tensors(self.args, move)
        kwargs = map_tensors(self.kwargs, move)
        with autograd.restored(), torch.no_grad():
            output: object = module(*args, **kwargs)
        return output


def record_calls(
    parts: Mapping[str, nn.Module],
    run: Callable[[], object],
    *,
    opaque: Collection[str] = (),
) -> list[ModuleCall]:
    """Run a function and return the outermost calls of some modules.

    Each holds the calls made inside it. Of `opaque` modules neither arguments nor
    outputs are recorded.
    """
    outermost: list[ModuleCall] = []
    running: list[ModuleCall] = []

    def watch(path: str, part: nn.Module) -> list[hooks.Watch]:
        def enter(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            call = ModuleCall(path)
            if path not in opaque:
                call = ModuleCall.copied(path, args, kwargs)
            siblings = running[-1].inner if running else outermost
            siblings.append(call)
            running.append(call)

        def leave(output: object) -> None:
            call = running.pop()
            if path not in opaque:
                call.outputs = [clone(tensor) for tensor in tensors_in(output)]
                call.structure = structure_of(output)

        return [hooks.Watch(part, "input", enter), hooks.Watch(part, "output", leave)]

    watches: list[hooks.Watch] = []
    for path, part in parts.items():
        watches += watch(path, part)
    with autograd.restored(), torch.no_grad(), hooks.watching(watches):
        run()
    return outermost


def parts_inside(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return a module at a path and all modules inside it, by their full paths."""
    parts = {}
    for name, part in module.named_modules():
        parts[f"{path}.{name}".strip(".")] = part
    return parts


def run_in_float64(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Run a private float64 copy of a module on arguments of any dtype."""
    return run_exactly(float64_copy(module), args, kwargs)


def run_exactly(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Run a float64 module on copies of arguments of any dtype."""
    args = map_tensors(args, to_float64)
    kwargs = map_tensors(dict(kwargs), to_float64)
    with autograd.restored(), torch.no_grad():
        output: object = module(*args, **kwargs)
    return output


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise an error again if it says that memory ran out.

    torch raises a RuntimeError for it too, which would pass for a module that does not
    take its arguments, or that cannot run in float64.
    """
    if is_out_of_memory(error):
        raise error


def clone(tensor: Tensor) -> Tensor:
    """Copy a tensor without its autograd history."""
    return tensor.detach().clone()


def to_float64(tensor: Tensor) -> Tensor:
    """Copy a tensor, widened to float64 if it is a floating-point tensor."""
    if not tensor.is_floating_point():
        return clone(tensor)
    return tensor.detach().to(torch.float64, copy=True)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value):
        yield from tensors_in(part)


def structure_of(value: object) -> object:
    """Describe nested outputs: True for a tensor, a list for a container, else None."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping | tuple | list):
        return [structure_of(part) for part in _parts(value)]
    return None


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    return []


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor in nested arguments; other objects stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change) for part in value]
        is_named_tuple = hasattr(value, "_fields")
        return type(value)(*parts) if is_named_tuple else type(value)(parts)
    return value
