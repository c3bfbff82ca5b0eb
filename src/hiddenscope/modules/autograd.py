"""Set autograd's modes back, whatever interrupts.

`torch.no_grad` and `torch.inference_mode` are context managers in Python: a Ctrl-C that
comes as one begins to end skips the rest of it, and gradients stay off in the user's
thread. The guard that they are made of is compiled. It sets everything back in one step
that no interrupt can split, and also when it is garbage-collected.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def restored(*, inference: bool | None = None) -> AbstractContextManager[Any]:
    """Set the gradient and inference modes back when the body ends.

    Put it before `torch.no_grad()` and the like. With `inference`, inference mode is
    also turned on or off for the body. The body sets the gradient mode itself.

    >>> import torch
    >>> with restored(), torch.no_grad():
    ...     torch.is_grad_enabled()
    False
    >>> torch.is_grad_enabled()
    True
    """
    import torch

    mode = torch.is_inference_mode_enabled() if inference is None else inference
    return torch._C._InferenceMode(mode)


@contextmanager
def restored_after_error() -> Iterator[None]:
    """Set the gradient mode back if the body ends in an error or an interrupt.

    A body that ends well leaves the mode as it wishes: it may be the user's code.
    """
    import torch

    thread, grad = threading.get_ident(), torch.is_grad_enabled()
    try:
        yield
    except GeneratorExit:
        # The body was left long ago, and this generator is only being freed.
        raise
    except BaseException:
        # The mode belongs to a thread, and a generator may be closed in another one.
        if threading.get_ident() == thread:
            torch.set_grad_enabled(grad)
        raise


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without gradients, and set the modes back after it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        with restored(), torch.no_grad():
            return function(*args, **kwargs)

    return call
