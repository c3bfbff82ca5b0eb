"""Record the calls of a module's parts: what each was given, what it returned, and the
calls it made in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.modules import autograd, hooks


@dataclass
class ModuleCall:
    """One call of a module, with copies of its arguments and of the tensors that it
    returned.

    `structure` is the form of what it returned: True for a tensor, a list for a tuple,
    list or dict, else None.
    """

    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    structure: Any = None
    inner: list[ModuleCall] = field(default_factory=list)

    @property
    def state(self) -> Tensor | None:
        """The hidden state among its arguments."""
        return hooks.state_in(self.args, self.kwargs)

    @property
    def output(self) -> Tensor | None:
        """The first floating-point tensor that it returned."""
        return next(
            (tensor for tensor in self.outputs if tensor.is_floating_point()), None
        )

    def walk(self) -> Iterator[ModuleCall]:
        """List this call and all calls inside it, in the order in which they began."""
        yield self
        for call in self.inner:
            yield from call.walk()

    def leaves(self) -> Iterator[ModuleCall]:
        """List the calls that made no further calls."""
        for call in self.walk():
            if not call.inner:
                yield call

    def repeat(self, module: nn.Module, device: torch.device) -> Any:
        """Call another module with the same arguments, moved to its device."""
        return self.with_arguments(module, self.args, self.kwargs, device)

    def with_arguments(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> Any:
        """Call a module with these arguments on copies, as some modules write into what
        they are given.
        """

        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True)

        with autograd.restored(), torch.no_grad():
            return module(*map_tensors(args, move), **map_tensors(dict(kwargs), move))


def record_calls(
    parts: Mapping[str, nn.Module],
    run: Callable[[], object],
    *,
    opaque: Collection[str] = (),
) -> list[ModuleCall]:
    """Run something and return the outermost calls of some modules, each with those
    inside it.

    Of `opaque` modules neither arguments nor outputs are kept.
    """
    outermost: list[ModuleCall] = []
    running: list[ModuleCall] = []

    def watch(path: str, part: nn.Module) -> list[hooks.Watch]:
        def enter(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            call = ModuleCall(path)
            if path not in opaque:
                call.args, call.kwargs = (
                    map_tensors(args, clone),
                    map_tensors(dict(kwargs), clone),
                )
            siblings = running[-1].inner if running else outermost
            siblings.append(call)
            running.append(call)

        def leave(output: Any) -> None:
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


def clone(tensor: Tensor) -> Tensor:
    """Copy a tensor, without its history."""
    return tensor.detach().clone()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """List every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value):
        yield from tensors_in(part)


def structure_of(value: Any) -> Any:
    """Describe nested outputs: True for a tensor, a list for a container, None for
    anything else.
    """
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping | tuple | list):
        return [structure_of(part) for part in _parts(value)]
    return None


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    return []


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor in nested arguments; objects of other kinds stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change) for part in value]
        is_named_tuple = hasattr(value, "_fields")
        return type(value)(*parts) if is_named_tuple else type(value)(parts)
    return value


def to_float64(tensor: Tensor) -> Tensor:
    """Widen a floating-point tensor; others stay as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor
