"""Calls: how a module is given its ids.

Models of transformers take them as `input_ids`, beside options. A module in plain
PyTorch takes them as its first argument, whatever its name, and knows no options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

Parameters = Mapping[str, inspect.Parameter]

# nanoGPT gives the logits of the last token alone, unless it is given targets. By
# class, the parameter that has to be given the ids once more.
GIVEN_IDS_TOO: WeakKeyDictionary[type[nn.Module], str] = WeakKeyDictionary()


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
    get_base: Any = getattr(module, "get_base_model", None)
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


def call(module: nn.Module, inputs: Mapping[str, Any], **options: Any) -> Any:
    """Call a module with inputs that are named as in transformers.

    Options are for models of transformers alone.
    """
    parameters = plain_parameters(module)
    if parameters is None:
        return module(**{**options, **inputs})
    others = dict(inputs)
    ids = others.pop("input_ids")
    needed = parameters.get("attention_mask")
    if needed is not None and needed.default is needed.empty:
        others.setdefault("attention_mask", torch.ones_like(ids))
    return module(ids, **others)
