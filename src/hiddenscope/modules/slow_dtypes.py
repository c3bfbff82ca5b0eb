"""Measure how slow this CPU is in bfloat16 and float16.

Without instructions for them it is up to hundreds of times slower.

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

ROWS, WIDTH, REPEATS = 64, 128, 3
SLOW = 5  # times as long as in float32, from which on it is worth saying
# The products of a linear layer without a bias and with one, of GPT-2, which stores its
# weights transposed, and of attention.
PRODUCTS: tuple[Product, ...] = (
    functional.linear,
    lambda rows, weight: functional.linear(rows[None], weight, weight[0]),
    lambda rows, weight: torch.addmm(weight[0], rows, weight),
    torch.mm,
    lambda rows, weight: torch.bmm(rows[None], rows.T[None]),
    lambda rows, weight: torch.bmm(rows[None], weight[None]),
)
_noted: "WeakSet[nn.Module]" = WeakSet()


def tell_of_slow_products(module: nn.Module, name: str) -> None:
    """Note on stderr, once for each module, that its dtype is slow on this CPU."""
    if module not in _noted:
        _noted.add(module)
        note = note_on_slow_products(module)
        if note:
            progress.note(f"{name}: {note}.")


def note_on_slow_products(module: nn.Module) -> str:
    """Say that a module's dtype is slow on this CPU.

    It is empty where the dtype is not slow, or the module is not on the CPU.

    >>> note_on_slow_products(nn.Linear(2, 2))
    ''
    """
    dtypes = set()
    for weight in module.parameters():
        if weight.device.type == "cpu":
            dtypes.add(weight.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        if dtype not in dtypes or slowdown(dtype) < SLOW:
            continue
        name = str(dtype).removeprefix("torch.")
        rounded = float(f"{slowdown(dtype):.1g}")
        return (
            f"on this CPU a matrix product in {name} may take about {rounded:,.0f}"
            " times as long as in float32; load it in float32 to be faster"
        )
    return ""


@cache
def slowdown(dtype: torch.dtype) -> float:
    """Return how many times as long as in float32 the slowest kind of product takes.

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
        narrow_rows, narrow_weight = rows.to(dtype), weight.to(dtype)
        ratios = []
        for product in PRODUCTS:
            fast = _best_time(product, rows, weight)
            ratios.append(_best_time(product, narrow_rows, narrow_weight) / fast)
    return max(ratios)


def _best_time(product: Product, rows: Tensor, weight: Tensor) -> float:
    """Return the shortest time of some products of one kind."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        product(rows, weight)
        times.append(time.perf_counter() - start)
    return min(times)
