"""Measure how slow this CPU is in bfloat16 and float16: without instructions for them,
up to hundreds of times slower.

It is measured and not looked up: what torch says a CPU supports is not what its kernels
do. On a Neoverse-N1 it says that float16 is supported, and products take 13 times as
long as in float32 (in bfloat16, nearly 300 times).
"""

import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope import progress
from hiddenscope.modules import autograd

Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]

ROWS, WIDTH, TRIES = 64, 128, 3
SLOW = 5  # times as long as in float32, from which on it is worth saying
# As a linear layer makes them without a bias and with one, as GPT-2 stores its weights,
# and as attention does.
PRODUCTS: tuple[Product, ...] = (
    functional.linear,
    lambda rows, weight: functional.linear(rows[None], weight, weight[0]),
    lambda rows, weight: torch.addmm(weight[0], rows, weight),
    torch.mm,
    lambda rows, weight: torch.bmm(rows[None], rows.T[None]),
    lambda rows, weight: torch.bmm(rows[None], weight[None]),
)
_told: "WeakSet[nn.Module]" = WeakSet()


def tell_of_slow_products(module: nn.Module, name: str) -> None:
    """Note on stderr, once for a module and before its first pass, that its dtype is
    slow on this CPU.
    """
    if module not in _told:
        _told.add(module)
        if note := note_on_slow_products(module):
            progress.note(f"{name}: {note}.")


def note_on_slow_products(module: nn.Module) -> str:
    """Say that a module's dtype is slow on this CPU; empty where it is not, or where
    the module is elsewhere.

    >>> note_on_slow_products(nn.Linear(2, 2))
    ''
    """
    dtypes = {
        weight.dtype for weight in module.parameters() if weight.device.type == "cpu"
    }
    narrow = sorted(
        (dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), key=str
    )
    for dtype in narrow:
        times = slowdown(dtype)
        if times >= SLOW:
            name = str(dtype).removeprefix("torch.")
            rounded = float(f"{times:.1g}")
            how = f"about {rounded:,.0f} times as long as in float32"
            return (
                f"on this CPU a matrix product in {name} may take {how}; load it in"
                " float32 to be faster"
            )
    return ""


@cache
def slowdown(dtype: torch.dtype) -> float:
    """Try how many times as long as in float32 the slowest kind of product takes, on
    this CPU.

    >>> slowdown(torch.float32) > 0
    True
    """
    # Neither the user's default dtype and device nor an autocast may change what is
    # timed.
    rows = torch.ones(ROWS, WIDTH, dtype=torch.float32, device="cpu")
    weight = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device="cpu")
    with (
        autograd.restored(inference=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        # torch warns once, with a stack trace of C++, that it must do without its fast
        # product.
        warnings.simplefilter("ignore")
        wide = [_best_time(product, rows, weight) for product in PRODUCTS]
        narrow = [
            _best_time(product, rows.to(dtype), weight.to(dtype))
            for product in PRODUCTS
        ]
    return max(slow / fast for slow, fast in zip(narrow, wide, strict=True))


def _best_time(product: Product, rows: Tensor, weight: Tensor) -> float:
    """Return the shortest time of some products of one kind."""
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        product(rows, weight)
        times.append(time.perf_counter() - start)
    return min(times)
