"""Calls: how a module is given its ids, and whether its code minds train() mode.

Models of transformers take ids as `input_ids`, beside options. A module in plain
PyTorch takes them as its first argument, whatever its name, and knows no options.

A module that is left in train() mode does no harm unless its code reads `training`: a
linear map, an activation or a layer norm does not, nor does a port without dropout.
Code that cannot be read is taken to depend on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

Parameters = Mapping[str, inspect.Parameter]

# nanoGPT gives the logits of the last token alone, unless it is given targets. By
# class, the parameter that has to be given the ids once more.
GIVEN_IDS_TOO: WeakKeyDictionary[type[nn.Module], str] = WeakKeyDictionary()

# These read `training` for a random part alone, and have none where this attribute is 0
# or False.
_RANDOM_PARTS = {
    nn.modules.dropout._DropoutNd: "p",
    nn.MultiheadAttention: "dropout",
    nn.RNNBase: "dropout",
    nn.modules.instancenorm._InstanceNorm: "track_running_stats",
}
# These take a faster way to the same result where `training` is False; their dropout is
# in modules of its own.
_SAME_RESULT = (
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def accepts(module: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that a module's forward takes.

    A wrapper that hands on whatever it gets, as PEFT's does, also takes those of the
    model in it.
    """
    names = frozenset(_parameters(type(module).forward))
    base = below_wrapper(module)
    return names if base is module else names | accepts(base)


def below_wrapper(module: nn.Module) -> nn.Module:
    """Return the model inside a wrapper that hands on whatever it gets."""
    get_base = getattr(module, "get_base_model", None)
    if get_base is None or "kwargs" not in _parameters(type(module).forward):
        return module
    base: nn.Module = get_base()
    return base


@cache
def _parameters(forward: Callable[..., Any]) -> Parameters:
    _, *parameters = inspect.signature(forward).parameters.items()
    return dict(parameters)


def plain_parameters(module: nn.Module) -> Parameters | None:
    """Return the parameters of a module in plain PyTorch, the one of the ids first.

    It is None for a module that is called like those of transformers.

    >>> list(plain_parameters(nn.Linear(2, 2)))
    ['input']
    """
    base = type(below_wrapper(module))
    parameters = _parameters(base.forward)
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_options = inspect.Parameter.VAR_KEYWORD in kinds
    has_name_for_ids = "input_ids" in parameters
    # A wrapper of the user's own may hand on whatever it gets.
    if kinds <= {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}:
        has_name_for_ids = True
    is_of_transformers = "output_hidden_states" in parameters or any(
        parent.__name__ == "PreTrainedModel" for parent in base.__mro__
    )
    if is_of_transformers or (has_name_for_ids and takes_options):
        return None
    return parameters


def call_arguments(
    module: nn.Module, inputs: Mapping[str, Any], **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, from inputs that are named as in transformers.

    Options are for models of transformers alone.
    """
    parameters = plain_parameters(module)
    if parameters is None:
        return [], {**options, **inputs}
    others = dict(inputs)
    ids = others.pop("input_ids")
    needed = parameters.get("attention_mask")
    if needed is not None and needed.default is needed.empty:
        others.setdefault("attention_mask", torch.ones_like(ids))
    return [ids], others


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
    if forward is not None and _reads_training(getattr(forward, "__func__", forward)):
        return True
    own_kind: Any = type(module)
    known: Any = nn.Module
    for kind, attribute in _RANDOM_PARTS.items():
        if isinstance(module, kind):
            if getattr(module, attribute):
                return True
            known = kind
    return _class_reads_training(own_kind, known)


@cache
def _class_reads_training(kind: type, known: type) -> bool:
    """Tell whether a class reads `training` in what it adds to a known class."""
    for base in kind.__mro__[: kind.__mro__.index(known)]:
        # A class of torch only fills in a known one, as nn.Dropout does.
        fills_in = known is not nn.Module and base.__module__.startswith("torch.nn.")
        if base in _SAME_RESULT or fills_in:
            continue
        for name, member in vars(base).items():
            functions: list[Any] = []
            if isinstance(member, property):
                functions += filter(None, (member.fget, member.fset))
            elif isinstance(member, staticmethod | classmethod):
                functions.append(member.__func__)
            elif isinstance(member, FunctionType) or name == "forward":
                functions.append(member)
            if any(map(_reads_training, functions)):
                return True
    return False


def _reads_training(function: Callable[..., Any]) -> bool:
    """Tell whether a function, or one that it calls by name, reads `training`.

    A function whose code cannot be read is taken to.
    """
    waiting = [inspect.unwrap(function)]
    known = set()
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
