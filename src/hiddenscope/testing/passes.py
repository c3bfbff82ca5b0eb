"""Watch the passes of a module while somebody asks about it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def counted_passes(
    module: nn.Module, ask: Callable[[], Any]
) -> tuple[Exception | None, int]:
    """Ask, and return the error that came of it and how many passes were run."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = module.register_forward_pre_hook(count)
    try:
        ask()
    except Exception as error:
        return error, passes
    finally:
        handle.remove()
    return None, passes


def graded_passes(module: nn.Module, ask: Callable[[], Any]) -> int:
    """Ask, and count the passes in which gradients were recorded."""
    graded = 0

    def count(*_: Any) -> None:
        nonlocal graded
        graded += torch.is_grad_enabled()

    handle = module.register_forward_pre_hook(count)
    try:
        ask()
    finally:
        handle.remove()
    return graded
