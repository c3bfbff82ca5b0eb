"""The protocol of a model that passes run, and the checks of its module."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from hiddenscope.arguments import require
from hiddenscope.discovery import Anatomy, find
from hiddenscope.errors import ModuleError
from hiddenscope.modules import calls, hooks
from hiddenscope.modules.calls import depends_on_mode
from hiddenscope.modules.trials import Trials
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.inputs import BatchModel, Inputs, Texts
from hiddenscope.passes.text_encoder import TextEncoder
from hiddenscope.sites import Site
from hiddenscope.states import Source


class PassModel(BatchModel, Protocol):
    """A model as a pass sees it; `Model` is one."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    @property
    def anatomy(self) -> Anatomy: ...  # noqa: D102
    @property
    def text_encoder(self) -> TextEncoder: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def trials(self) -> Trials: ...  # noqa: D102
    @property
    def lock(self) -> AbstractContextManager[Any]: ...  # noqa: D102
    def encode(  # noqa: D102
        self,
        texts: Texts | Inputs,
        *,
        targets: Texts | Inputs | None = None,
        truncate: bool | int = False,
    ) -> Inputs: ...
    def source(self, stack: str | None, *, checked: bool = False) -> Source: ...  # noqa: D102


def require_recordable(module: nn.Module) -> nn.Module:
    """Return the module whose parts are really called.

    A ModuleError says why its states cannot be recorded, and a NotFinite names a weight
    that is not finite. `torch.compile` returns a wrapper around the module; the module
    inside is recorded, and runs uncompiled. Parts in train() mode are refused if their
    code reads `training`.

    >>> require_recordable(nn.Linear(2, 2).eval())
    Linear(in_features=2, out_features=2, bias=True)
    """
    inside: nn.Module = getattr(module, "_orig_mod", module)
    problem = _problem(inside)
    if problem is not None:
        reason, remedy = problem
        raise ModuleError(
            f"Cannot record the states of {type(inside).__name__}", reason, remedy
        )
    check_finite(inside)
    return inside


def _problem(module: nn.Module) -> tuple[str, str] | None:
    """Return the reason why a module cannot be recorded, with the remedy."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return (
            f"{type(module).__name__} runs copies of it",
            "Give the module inside: `module.module`.",
        )
    has_weights = has_meta_weights = is_compiled = False
    for path, part in hooks.parts_of(module).items():
        if part.training and depends_on_mode(part):
            where = f" at {path}" if path else ""
            return (
                f"it is in train() mode{where}, where its code computes something else",
                "Call module.eval() first.",
            )
        is_compiled = is_compiled or part._compiled_call_impl is not None
        for name, weight in part._parameters.items():
            if type(weight).__name__ == "DTensor":
                return (
                    f"`{path}.{name}` is split by tensor parallelism, and a state in"
                    " parts cannot be proved",
                    "Load it on one device, or spread whole layers: device='balanced'.",
                )
            if weight is not None:
                has_weights = True
                has_meta_weights = has_meta_weights or weight.is_meta
    if is_compiled:
        return (
            "it was compiled in place, and compiled code calls no hooks",
            "Give the module before `.compile()`, or wrap it with"
            " `torch.compile(module)` instead.",
        )
    if has_meta_weights and not hooks.is_offloaded(module):
        return (
            "it has weights on the meta device, which hold no numbers",
            "Load its weights first.",
        )
    if not has_weights:
        return "it has no weights", "Give a model."
    return None


def named_arguments(
    module: nn.Module, args: hooks.Args, kwargs: hooks.Kwargs
) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names.

    Ids are called `input_ids`, whatever a module in plain PyTorch calls them.

    >>> named_arguments(nn.Linear(2, 2), (1,), {})
    {'input_ids': 1}
    """
    names = inspect.signature(module.forward).parameters
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in calls.plain_parameters(module) or ():
        if name in arguments:
            arguments["input_ids"] = arguments.pop(name)
        break
    return arguments


def user_module(
    model: PassModel | nn.Module, verb: str
) -> tuple[Anatomy, nn.Module, AbstractContextManager[Any]]:
    """Return the module whose passes a user runs, with its anatomy and its lock.

    A bare module has no lock, and its states are found and proved first.
    """
    if not isinstance(model, nn.Module):
        require(model, PassModel | nn.Module, "model", f"{verb}ing")
        return model.anatomy, model.module, model.lock
    if hasattr(model, "_orig_mod"):
        raise ModuleError(
            f"Cannot {verb} the passes of this module",
            "it is compiled, and compiled code calls no hooks",
            "Give and call the module inside it.",
        )
    return find(model), model, nullcontext()


def pass_roots(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Return what a pass is a call of: the module, or an encoder, as in `generate`."""
    get_encoder: Any = getattr(module, "get_encoder", None)
    if get_encoder is None or len(anatomy.stacks) == 1:
        return [module]
    return [module, get_encoder()]


def is_in_stream(anatomy: Anatomy, site: Site) -> bool:
    """Tell whether the residual stream does not go past the place a site is seen at."""
    stack = anatomy.stack(site)
    entry = stack.proof.taps[0]
    return anatomy.taps[site] != entry or entry.path == stack.blocks[0].path
