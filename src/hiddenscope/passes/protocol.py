"""What a pass needs of a model: the protocol that Model fulfils, and the condition that
its module must be in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from hiddenscope.discovery import Anatomy
from hiddenscope.errors import ModuleError
from hiddenscope.modules import hooks
from hiddenscope.modules.train_mode import depends_on_mode
from hiddenscope.modules.trials import Trials
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.inputs import BatchModel, Inputs, Texts
from hiddenscope.passes.text_encoder import TextEncoder
from hiddenscope.states import Source


class ModelLike(BatchModel, Protocol):
    """What a pass needs to know of a model."""

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


def recordable(module: nn.Module) -> nn.Module:
    """The module whose parts are really called, or a ModuleError that says why its
    states cannot be recorded.

    A weight that is not finite is a NotFinite that names it. `torch.compile` gives a
    wrapper around the module; the module inside is recorded, and runs uncompiled. Parts
    in train() mode are refused if their code reads `training`.

    >>> recordable(nn.Linear(2, 2).eval())
    Linear(in_features=2, out_features=2, bias=True)
    """
    inside: nn.Module = getattr(module, "_orig_mod", module)
    for wrong, reason, remedy in _conditions(inside):
        if wrong:
            raise ModuleError(
                f"Cannot record the states of {type(inside).__name__}", reason, remedy
            )
    check_finite(inside)
    return inside


def _conditions(module: nn.Module) -> list[tuple[bool, str, str]]:
    """What may be wrong with a module: whether it is, the reason, and the remedy."""
    parts = hooks.parts_of(module)
    weights: list[nn.Parameter] = []
    training, compiled = None, False
    for path, part in parts.items():
        if part._parameters:
            weights += [
                weight for weight in part._parameters.values() if weight is not None
            ]
        if training is None and part.training and depends_on_mode(part):
            training = path
        compiled = compiled or part._compiled_call_impl is not None
    return [
        (
            isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel),
            f"{type(module).__name__} runs copies of it",
            "Give the module inside: `module.module`.",
        ),
        (
            training is not None,
            (
                f"it is in train() mode{f' at {training}' if training else ''}, where"
                " its code computes something else"
            ),
            "Call module.eval() first.",
        ),
        (
            compiled,
            "it was compiled in place, and compiled code calls no hooks",
            (
                "Give the module before `.compile()`, or wrap it with"
                " `torch.compile(module)` instead."
            ),
        ),
        (
            any(weight.is_meta for weight in weights)
            and not hooks.is_offloaded(module),
            "it has weights on the meta device, which hold no numbers",
            "Load its weights first.",
        ),
        (not weights, "it has no weights", "Give a model."),
    ]
