"""Attention kernels that lose a NaN or an infinity, and the check of what our passes
give them.

`F.scaled_dot_product_attention` picks a kernel by device, dtype and shape. On x86-64,
torch's flash kernel for CPUs takes the maximum of a row with an instruction that drops
a NaN, and then treats the row as wholly masked: where the queries or the keys hold a
NaN or an infinity, it gives finite, wrong numbers for some rows, depending on the dtype
and on how many keys are left over after the last full vector. So each device and dtype
is tried once, and where numbers get lost, the inputs of every attention call in our
passes are added up: a NaN or an infinity shows in the sum.

What is finite, but so large that its products overflow inside the kernel, is not seen.
"""

import itertools
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hiddenscope.errors import NotFinite
from hiddenscope.modules import autograd

# One key alone, a row shorter than a vector register, and one that leaves some keys
# behind the last full vector.
TRIAL_LENGTHS, TRIAL_WIDTH = (1, 8, 40), 64


class AttentionCheck:
    """Sums of what one thread gives to each call of attention, from `install` to
    `remove`.

    The calls of other threads pass unchanged. Both steps may be repeated, and `remove`
    may come from another thread, so that an interrupt between any two lines does no
    harm. `hooks.finite_attention` is this in a `with`.

    A TorchFunctionMode would do without exchanging torch's function, but it is called
    for every operation: on smollm2 and x86-64 it costs 18% of a pass over 8 tokens and
    8% of one over 1,024, and this 6% and less than 1%.
    """

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self._thread = threading.get_ident()

    def install(self) -> None:
        """Begin to collect."""
        global _attention
        with _exchange:
            _running[self._thread] = [*_running.get(self._thread, []), self]
            if functional.scaled_dot_product_attention is not _checked:
                _attention = functional.scaled_dot_product_attention
                functional.scaled_dot_product_attention = _checked

    def remove(self) -> None:
        """Collect no more, and give torch its own function back after the last."""
        with _exchange:
            others = [
                check for check in _running.get(self._thread, []) if check is not self
            ]
            if others:
                _running[self._thread] = others
            else:
                _running.pop(self._thread, None)
            if not _running and functional.scaled_dot_product_attention is _checked:
                functional.scaled_dot_product_attention = _attention

    def raise_if_lost(self) -> None:
        """Raise NotFinite if attention was given a NaN or an infinity that the kernel
        lost.
        """
        if not self.sums:
            return
        finite = torch.stack(self.sums).isfinite()
        if not bool(finite.all()):
            raise _lost(int(finite.logical_not().nonzero()[0]), len(self.sums))


@cache
def lost_inputs(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Of queries, keys and values (0, 1, 2): those whose NaN or infinities may be lost
    by attention on this device.

    >>> lost_inputs(torch.device("meta"), torch.float32)
    ()
    """
    if device.type == "meta" or not dtype.is_floating_point:
        return ()
    with autograd.restored(inference=False), torch.no_grad():
        cases = itertools.product(
            TRIAL_LENGTHS,
            (torch.nan, torch.inf),
            ("every key", "is_causal", "attn_mask"),
        )
        tried = list(cases)
        return tuple(
            which
            for which in range(3)
            if any(_loses(device, dtype, which, *case) for case in tried)
        )


def _loses(
    device: torch.device,
    dtype: torch.dtype,
    which: int,
    length: int,
    value: float,
    form: str,
) -> bool:
    """Whether a row that cannot be finite comes out finite when one of the three inputs
    holds this value.
    """
    given = torch.randn(
        3, 1, 2, length, TRIAL_WIDTH, generator=torch.Generator().manual_seed(0)
    ).to(dtype)
    given[which, 0, 0, length // 2, 5] = value
    q, k, v = given.double()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (
        q @ k.mT if form == "every key" else (q @ k.mT).masked_fill(~causal, -torch.inf)
    )
    weights = scores.softmax(-1)
    # A value that no weight falls on is rightly left out, though zero times NaN is NaN.
    hopeless = ~weights.isfinite().all(-1, keepdim=True) | (
        (weights > 0).double() @ (~v.isfinite()).double() > 0
    )
    mask = causal.to(device) if form == "attn_mask" else None
    output = _attention(
        *given.to(device), attn_mask=mask, is_causal=form == "is_causal"
    )
    return bool((output.cpu().isfinite() & hopeless).any())


# torch's own function, and the checks of the passes that run in each thread while
# `_checked` stands in for it.
_attention: Any = functional.scaled_dot_product_attention
_running: dict[int, list[AttentionCheck]] = {}
# Garbage collection may remove a check while this thread installs another one.
_exchange = threading.RLock()


def _checked(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    passes = _running.get(threading.get_ident())
    if passes and (lost := lost_inputs(query.device, query.dtype)):
        given = (query, key, value)
        sums = (_sum(given[which].detach()) for which in lost)
        passes[-1].sums.append(sum(sums, torch.zeros((), device=query.device)))
    output: Tensor = _attention(query, key, value, *args, **kwargs)
    return output


def _sum(numbers: Tensor) -> Tensor:
    """A number that is not finite if one of these is not.

    A sum in float16 overflows, and one of float16 to float32 takes 13 times as long, so
    the ends are taken there.
    """
    if numbers.dtype != torch.float16:
        return numbers.sum().float()
    low, high = torch.aminmax(numbers)
    return low.float() + high.float()


def _lost(call: int, calls: int) -> NotFinite:
    return NotFinite(
        "Cannot trust this pass",
        f"attention call {call + 1} of {calls} was given a NaN or an infinity, and its"
        " kernel gives finite numbers",
        "Load the model in a wider dtype, or with attention='eager' to see at which"
        " site it comes up.",
    )
