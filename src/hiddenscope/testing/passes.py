"""Watch the passes of a module while somebody asks about it."""

from collections.abc import Callable
from typing import Any

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
