"""Tell which modules compute something else in train() mode, by what their code reads.

A module that is left in train() mode does no harm unless its code reads `training`: a
linear map, an activation or a layer norm does not, nor does a port without dropout.
Code that cannot be read is taken to depend on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

# These read `training` for a random part alone, and have none where this attribute is 0
# or False.
_RANDOM_PARTS: dict[Any, str] = {
    nn.modules.dropout._DropoutNd: "p",
    nn.MultiheadAttention: "dropout",
    nn.RNNBase: "dropout",
    nn.modules.instancenorm._InstanceNorm: "track_running_stats",
}
_BASE: Any = nn.Module
# These take a faster way to the same result where `training` is False; their dropout is
# in modules of its own.
_SAME_RESULT = (
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def depends_on_mode(module: nn.Module) -> bool:
    """Tell whether a module without its children may compute otherwise in train() mode.

    >>> depends_on_mode(nn.GELU())
    False
    >>> depends_on_mode(nn.Dropout(0.1)), depends_on_mode(nn.Dropout(0.0))
    (True, False)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True
    forward = vars(module).get("forward")
    if forward is not None:
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        if _reads_training(function):
            return True
    kind: Any = type(module)
    for known, attribute in _RANDOM_PARTS.items():
        if isinstance(module, known):
            is_random = bool(getattr(module, attribute))
            return is_random or _class_reads_training(kind, known)
    return _class_reads_training(kind, _BASE)


@cache
def _class_reads_training(kind: type, known: type) -> bool:
    """Tell whether a class reads `training` in what it adds to a known class."""
    for base in kind.__mro__[: kind.__mro__.index(known)]:
        if base in _SAME_RESULT or _is_below(known, base):
            continue
        if any(_reads_training(function) for function in _functions_of(base)):
            return True
    return False


def _is_below(known: type, base: type) -> bool:
    """Tell whether a class of torch only fills in a known one, as nn.Dropout does."""
    is_torch = base.__module__.startswith("torch.nn.modules.")
    return is_torch and known is not nn.Module and issubclass(base, known)


def _functions_of(base: type) -> Iterator[Any]:
    """Yield the methods and properties of a class, without those of its bases."""
    for name, member in vars(base).items():
        if isinstance(member, property):
            yield from filter(None, (member.fget, member.fset))
        elif isinstance(member, staticmethod | classmethod):
            yield member.__func__
        elif isinstance(member, FunctionType) or (
            name == "forward" and callable(member)
        ):
            yield member


def _reads_training(function: Callable[..., Any]) -> bool:
    """Tell whether a function, or one that it calls by name, reads `training`.

    A function whose code cannot be read is taken to.
    """
    waiting: list[Any] = [inspect.unwrap(function)]
    known: set[Any] = set()
    while waiting:
        current = waiting.pop()
        if not isinstance(current, FunctionType):
            return True
        names = _names_in(current.__code__)
        if "training" in names:
            return True
        known.add(current)
        waiting += [called for called in _called(current, names) if called not in known]
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names and strings in code, and in functions defined in it."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def _called(function: FunctionType, names: set[str]) -> Iterator[FunctionType]:
    """Yield the functions that code may call by name, in its module and in others.

    Those of torch are known.
    """
    places = [function.__globals__]
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not value.__name__.startswith("torch"):
            places.append(vars(value))
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, FunctionType) and not value.__module__.startswith(
                "torch"
            ):
                yield value
